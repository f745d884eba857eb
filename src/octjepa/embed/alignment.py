"""Embedding tables side by side: cut to the volumes that all hold, with their names in results and randomly initialised
encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float

from octjepa.embed.table import Embeddings
from octjepa.embed.token_folder import TokenFolder
from octjepa.errors import UsageError, counted_are
from octjepa.metrics.findings import BASELINES, Findings

NamedTables = list[tuple[str, Embeddings]]


def align_tables(embeddings: Sequence[Embeddings], findings: Findings) -> list[Embeddings]:
    """All tables cut to the volumes that every one of them holds, in one order, so that results can be paired.

    Volumes that are left out are a fault, different preprocessing is a note. Raises UsageError: no common volume, or
    tables that differ in person, eye or split.
    """
    positions = [{volume: index for index, volume in enumerate(table.frame["volume_id"])} for table in embeddings]
    common = sorted(set(positions[0]).intersection(*positions[1:]))
    if not common:
        raise UsageError(f"the {len(embeddings)} embedding files share no volume, so their rows cannot be compared")
    for table in embeddings:
        if len(table) > len(common):
            findings.add_fault(
                "different_labels",
                f"{table.encoder}: {counted_are(len(table) - len(common), 'volume')} left out: rows are compared on "
                "the volumes that all tables hold",
            )
    tables = [
        table.take(index[volume] for volume in common) for table, index in zip(embeddings, positions, strict=True)
    ]
    keys = ["person_id", "eye", "split"]
    first = tables[0]
    for table in tables[1:]:
        differing = int((table.frame[keys] != first.frame[keys]).any(axis=1).sum())
        if differing:
            raise UsageError(
                f"{table.encoder} and {first.encoder} differ in person, eye or split for {differing} of "
                f"{len(common)} volumes; embed both from the same store"
            )
        if table.contract != first.contract:
            findings.add_note(
                f"{table.encoder} and {first.encoder} saw differently preprocessed volumes (contracts "
                f"{table.contract[:12]} and {first.contract[:12]}): the comparison holds that difference too"
            )
    return tables


def result_names(encoders: Sequence[str], add_note: Callable[[str], None]) -> list[str]:
    """The encoders' names in results; a name that is taken gets a number, and a note."""
    names: list[str] = []
    for encoder in encoders:
        name, number = encoder or "encoder", 2
        while name in (*BASELINES, *names):
            name, number = f"{encoder}#{number}", number + 1
        if name != encoder:
            add_note(f"the name {encoder!r} is taken: table {len(names) + 1} is called {name!r}")
        names.append(name)
    return names


def name_tables(tables: Sequence[Embeddings], add_note: Callable[[str], None]) -> NamedTables:
    """Tables under their `result_names`."""
    return list(zip(result_names([table.encoder for table in tables], add_note), tables, strict=True))


def untrained_name(tables: NamedTables, index: int) -> str:
    """Result name of the randomly initialised encoder of table `index`: "untrained" if it equals the first table's."""
    name, table = tables[index]
    return "untrained" if np.array_equal(table.untrained, tables[0][1].untrained) else f"untrained:{name}"


def feature_sets(
    tables: NamedTables, pools: Sequence[str]
) -> Iterator[tuple[str, str, Float[np.ndarray, "volumes features"]]]:
    """(name, pool, features) of every encoder and its random initialisation; last the features without network and pool
    of the first."""
    for name, index, view in _sources(tables):
        for pool in pools:
            yield name, pool, tables[index][1].features(view, pool)
    for view in tables[0][1].unpooled:
        yield view, "none", tables[0][1].features(view, "none")


def token_sets(tables: NamedTables, tokens: Sequence[TokenFolder]) -> Iterator[tuple[str, TokenFolder, str]]:
    """(name, folder, view) of every encoder and its random initialisation. Raises UsageError unless `tokens` has a
    folder of the same weights and preprocessing for each table, in order.
    """
    if len(tokens) != len(tables):
        raise UsageError(
            f"the attentive probe reads tokens: {len(tokens)} folder(s) given for {len(tables)} table(s). Embed with "
            "--tokens FOLDER and give --tokens FOLDER here, one for each table in the same order"
        )
    for (name, table), folder in zip(tables, tokens, strict=True):
        if (folder.weights, folder.contract) != (table.weights, table.contract):
            raise UsageError(
                f"the tokens in {folder.folder} are of other weights or another preprocessing than the table of "
                f"{name}: give both from one octjepa embed"
            )
    for name, index, view in _sources(tables):
        yield name, tokens[index], view


def _sources(tables: NamedTables) -> Iterator[tuple[str, int, str]]:
    """(result name, index of the table, its feature view) of every encoder, and of every random initialisation that
    differs."""
    names: set[str] = set()
    for index, (name, _) in enumerate(tables):
        yield name, index, "vector"
        twin = untrained_name(tables, index)
        if twin not in names:
            names.add(twin)
            yield twin, index, "untrained"
