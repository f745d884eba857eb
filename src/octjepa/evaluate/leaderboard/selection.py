"""Validation selects the checkpoint of a run, the pooling and the probe, for every target; the test set is not seen.

For selection, a target is rewritten so that its validation people replace the test people and its test volumes are
absent: probes fit on train, take their own setting by cross-validation inside train, and are scored on validation. The
selected option is then fitted as `octjepa probe` would, and its test predictions are made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from octjepa.embed.table import UNPOOLED
from octjepa.embed.token_folder import TokenFolder
from octjepa.encoders import pooling
from octjepa.errors import UsageError
from octjepa.evaluate.calibration import ProbeFit
from octjepa.evaluate.cases import Cases
from octjepa.evaluate.features import MIN_VAL_PEOPLE, PROBES, TOKEN_PROBES, FeatureSpace, Selection, feature_space
from octjepa.evaluate.leaderboard.entries import EmbeddedCandidate
from octjepa.evaluate.survival import MIN_EVENTS
from octjepa.evaluate.survival import TASK as SURVIVAL
from octjepa.evaluate.targets import Target
from octjepa.metrics import test_set_ledger
from octjepa.metrics.scores import PRIMARY_METRIC, Predictions, metric_value

UNTRAINED = "untrained"

FeatureView = tuple[str, EmbeddedCandidate, str]  # checkpoint, its table, which block of it


@dataclass(frozen=True)
class TokenInput:
    """Tokens of the cases of a table: those of `volume_ids`, one a case; `train` are all rows of the training split."""

    folder: TokenFolder
    view: str
    volume_ids: list[str]
    train: Int[np.ndarray, " n"]


@dataclass(frozen=True)
class Option:
    """One way to read one set of features. checkpoint: "" where an entry has one only; tokens: for token probes."""

    checkpoint: str
    pool: str
    probe: str
    features: Float[np.ndarray, "rows features"]
    tokens: TokenInput | None = None

    @property
    def label(self) -> str:
        """Checkpoint, pooling and probe in one line."""
        return " ".join(part for part in (self.checkpoint, self.pool, self.probe) if part)

    @property
    def fingerprint(self) -> str:
        """Its identity in the ledger of the test set."""
        if self.tokens is None:
            return test_set_ledger.fingerprint(self.features, self.probe)
        return f"{self.tokens.folder.weights} {self.tokens.view} {self.probe}"

    def fit(self, target: Target, selection: Selection, space: FeatureSpace | None = None) -> ProbeFit:
        """The fitted probe with its test predictions; `space` is that of `features` and `target`, where known."""
        if self.tokens is None:
            return PROBES.get(self.probe)(space or feature_space(self.features, target), target, selection)
        tokens = self.tokens
        probe: ProbeFit
        (probe,) = TOKEN_PROBES.get(self.probe)(
            tokens.folder, tokens.view, tokens.volume_ids, tokens.train, [target], [selection]
        )
        return probe


@dataclass(frozen=True)
class Choice:
    """The selected option of an entry for a target. validation: its metric there, None if nothing could be scored.

    scored: every option's label with its validation metric, in the order given.
    """

    option: Option
    validation: float | None
    scored: list[tuple[str, float | None]]


@dataclass(frozen=True)
class EvaluatedOption:
    """Predictions of the selected option on the validation and on the test volumes of a target."""

    val: Predictions
    test: Predictions
    fit: ProbeFit


def check_probes(probes: Sequence[str]) -> None:
    """Raises UsageError: none, or an unknown one."""
    names = (*PROBES.names(), *TOKEN_PROBES.names())
    unknown = [name for name in probes if name not in names]
    if unknown or not probes:
        raise UsageError(f"no probe {', '.join(unknown) or 'given'}: known are {', '.join(names)}")


def token_volumes(cases: Cases, volumes: pd.DataFrame) -> list[str]:
    """The id of the volume whose tokens represent each case. Raises UsageError for a case of several."""
    many = sum(len(case) > 1 for case in cases.members)
    if many:
        raise UsageError(f"{many} cases have several volumes, whose tokens have no mean: leave out token probes")
    return volumes["volume_id"].iloc[np.concatenate(cases.members)].tolist()


def feature_views(candidates: Sequence[EmbeddedCandidate]) -> dict[tuple[str, int], list[FeatureView]]:
    """(row name, seed) -> the views to select among, for every entry and every baseline with features.

    The untrained networks of a recipe's seeds are seeds of one row: "untrained" for the first entry, "untrained:NAME"
    for one of another architecture.
    """
    views: dict[tuple[str, int], list[FeatureView]] = {}
    for candidate in candidates:
        views.setdefault((candidate.entry.name, candidate.entry.seed), []).append(
            (candidate.candidate.label, candidate, "vector")
        )
    first = candidates[0]
    untrained: list[EmbeddedCandidate] = []
    for entry in candidates:
        if not any(np.array_equal(entry.table.untrained, other.table.untrained) for other in untrained):
            untrained.append(entry)
            name = UNTRAINED if entry.entry.name == first.entry.name else f"{UNTRAINED}:{entry.entry.name}"
            views[name, 1 + sum(key[0] == name for key in views)] = [("", entry, "untrained")]
    for block in first.table.unpooled:
        views[block, 1] = [("", first, block)]
    return views


def view_options(views: Sequence[FeatureView], probes: Sequence[str], token_ids: list[str] | None) -> list[Option]:
    """Every pooling of every view by every probe; with `token_ids`, those of tokens last."""
    options = []
    vector_probes = [name for name in probes if name not in TOKEN_PROBES]
    for checkpoint, candidate, view in views:
        unpooled = view in UNPOOLED
        for pool in ("none",) if unpooled else tuple(reversed(pooling.readable_pools(candidate.table.pools))):
            features = candidate.table.features(view, pool)
            # Intensities have no tokens: if no other probe is requested, the linear one reads them.
            options += [Option(checkpoint, pool, probe, features) for probe in vector_probes or ("linear",) * unpooled]
        if token_ids is not None and candidate.tokens is not None and not unpooled:
            train = np.flatnonzero((candidate.table.frame["split"] == "train").to_numpy())
            tokens = TokenInput(candidate.tokens, view, token_ids, train)
            options += [
                Option(checkpoint, "attention", probe, np.zeros((0, 1)), tokens)
                for probe in probes
                if probe in TOKEN_PROBES
            ]
    return options


def without_test(target: Target) -> Target:
    """`target` as selection sees it: validation replaces test, and there is no validation and no test."""
    val, values = target.indices["val"], target.values
    return replace(
        target,
        indices={"train": target.indices["train"], "val": val[:0], "test": val},
        values={"train": values["train"], "val": values["val"][:0], "test": values["val"]},
    )


def _no_selection_reason(target: Target) -> str:
    """Why the validation split cannot select for `target`; "" if it can."""
    val = target.values["val"]
    if target.classes and len(np.unique(val)) < 2:
        return f"its {len(val)} validation volumes do not hold two classes"
    if not target.classes and len(np.unique(val)) < 2:
        return f"its {len(val)} validation volumes do not hold two different values"
    if target.task == SURVIVAL and (events := int((val > 0).sum())) < MIN_EVENTS:
        return f"{events} of its {len(val)} validation volumes have the event"
    return ""


def selection_note(target: Target, person_ids: np.ndarray) -> str:
    """Facts that a reader must know about the selection for `target`; "" if nothing."""
    why = _no_selection_reason(target)
    if why:
        return f"{target.name}: {why}, so nothing was chosen: newest checkpoint, first pooling and first probe are used"
    people = len(set(person_ids[target.indices["val"]].tolist()))
    if people < MIN_VAL_PEOPLE:
        return f"{target.name}: chosen on {people} validation people only, which says little about what is best"
    return ""


def select_option(options: Sequence[Option], target: Target, selection: Selection) -> Choice:
    """The option whose validation metric is best, the first of equals. Raises UsageError if there is none.

    selection: how the probes select their own setting for `without_test(target)`.
    """
    if not options:
        raise UsageError(f"{target.name}: nothing to choose from")
    if _no_selection_reason(target):
        last = next(option for option in options if option.checkpoint == options[-1].checkpoint)
        return Choice(last, None, [(option.label, None) for option in options])
    if len(options) == 1:
        return Choice(options[0], None, [(options[0].label, None)])
    shown = without_test(target)
    figures, spaces = [], dict[int, FeatureSpace]()
    for option in options:
        if option.tokens is None and id(option.features) not in spaces:  # the probes of one pooling share it
            spaces = {id(option.features): feature_space(option.features, shown)}
        fit = option.fit(shown, selection, spaces.get(id(option.features)))
        figures.append(metric_value(PRIMARY_METRIC[target.task], fit.predictions))
    best = int(np.nanargmax(np.where(np.isfinite(figures), figures, -np.inf)))
    scored = [
        (option.label, figure if np.isfinite(figure) else None) for option, figure in zip(options, figures, strict=True)
    ]
    return Choice(options[best], scored[best][1], scored)


def evaluate_option(option: Option, target: Target, selection: Selection) -> EvaluatedOption:
    """Fits the option as the probes do; `selection` takes its setting on val or inside train, never on test."""
    cut = len(target.indices["val"])
    indices, values = (np.concatenate([part["val"], part["test"]]) for part in (target.indices, target.values))
    order = np.argsort(indices, kind="stable")  # networks read the table from top to bottom
    both = replace(
        target, indices=target.indices | {"test": indices[order]}, values=target.values | {"test": values[order]}
    )
    fit = option.fit(both, selection)
    predictions, back = fit.predictions, np.argsort(order, kind="stable")
    val, test = (
        Predictions(predictions.truth[part], predictions.scores[part], predictions.calibrated[part])
        for part in (back[:cut], back[cut:])
    )
    return EvaluatedOption(val, test, fit)
