"""What there is to choose among: the rows of a board, and for each every way to read its features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from octjepa.embed import pooling
from octjepa.embed.table import UNPOOLED
from octjepa.errors import UsageError
from octjepa.leaderboard.choose import ATTENTIVE, PROBES, Option, Tokens
from octjepa.leaderboard.embedding import Featured
from octjepa.probe.aggregation import Cases

UNTRAINED = "untrained"
View = tuple[str, Featured, str]  # checkpoint, its features, which block of them


def check_probes(probes: Sequence[str]) -> None:
    """Raises UsageError: none, or an unknown one."""
    known = (*PROBES, ATTENTIVE)
    unknown = [name for name in probes if name not in known]
    if unknown or not probes:
        raise UsageError(f"no probe {', '.join(unknown) or 'given'}: known are {', '.join(known)}")


def tokens_of(cases: Cases, volumes: pd.DataFrame) -> list[str]:
    """The volume whose tokens stand for each case. Raises UsageError for a case of several."""
    many = sum(len(case) > 1 for case in cases.members)
    if many:
        raise UsageError(f"{many} cases have several volumes, whose tokens have no mean: leave out the attentive probe")
    return volumes["volume_id"].iloc[np.concatenate(cases.members)].tolist()


def sources_of(found: list[Featured]) -> dict[tuple[str, int], list[View]]:
    """(row name, seed) -> (checkpoint, table, view) of everything that has features to choose among.

    The untrained networks of an arm's seeds are seeds of one row: "untrained" for the first arm, "untrained:ARM" for
    one of another architecture.
    """
    sources: dict[tuple[str, int], list[View]] = {}
    for one in found:
        sources.setdefault((one.entry.arm, one.entry.seed), []).append((one.candidate.label, one, "vector"))
    twins: list[tuple[str, Featured]] = []
    for one in found:
        if not any(np.array_equal(one.table.untrained, other.table.untrained) for _, other in twins):
            first = one.entry.arm == found[0].entry.arm
            twins.append((UNTRAINED if first else f"{UNTRAINED}:{one.entry.arm}", one))
    for name, one in twins:
        sources[name, 1 + sum(key[0] == name for key in sources)] = [("", one, "untrained")]
    for view in found[0].table.unpooled:
        sources[view, 1] = [("", found[0], view)]
    return sources


def options_of(views: list[View], probes: Sequence[str], tokens: list[str] | None) -> list[Option]:
    """Every pooling of every view by every probe; with `tokens`, the attentive probe last."""
    options = []
    of_vectors = [name for name in probes if name != ATTENTIVE]
    for checkpoint, one, view in views:
        plain = view in UNPOOLED
        for pool in ("none",) if plain else tuple(reversed(pooling.readable_pools(one.table.pools))):
            features = one.table.features(view, pool)
            # Grey levels have no tokens: where nothing else is asked for, the linear probe reads it.
            options += [Option(checkpoint, pool, probe, features) for probe in of_vectors or ("linear",) * plain]
        if tokens is not None and one.tokens is not None and not plain:
            train = np.flatnonzero((one.table.frame["split"] == "train").to_numpy())
            read_by = Tokens(one.tokens, view, tokens, train)
            options.append(Option(checkpoint, "attention", ATTENTIVE, np.zeros((0, 1)), read_by))
    return options
