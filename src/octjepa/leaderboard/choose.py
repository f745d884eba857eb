"""Validation chooses: the checkpoint of a run, the pooling and the probe, for every target; the test set is not seen.

For choosing, a target is rewritten so that its validation people stand where the test people stood, and its test
volumes are nowhere: probes fit on train, take their own setting by cross-validation inside train, and are judged on
validation. What is chosen is then fitted as `octjepa probe` would and says of the test people what it says, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from octjepa.embed.token_folder import TokenFolder
from octjepa.errors import UsageError
from octjepa.metrics import test_set_ledger
from octjepa.metrics.scores import PRIMARY_METRIC, Predictions, metric_value
from octjepa.probe import probe_training
from octjepa.probe.calibration import ProbeFit
from octjepa.probe.features import MIN_VAL_PEOPLE, FeatureSpace, Selection, feature_space
from octjepa.probe.linear_knn import fit_knn, fit_linear
from octjepa.probe.targets import Target

# The probes that read one vector a case; the attentive one reads tokens.
PROBES: dict[str, Callable[[FeatureSpace, Target, Selection], ProbeFit]] = {
    "linear": fit_linear,
    "knn": fit_knn,
    "mlp": probe_training.mlp,
}
ATTENTIVE = "attentive"
DEFAULT = ("linear", "knn")


@dataclass(frozen=True)
class Tokens:
    """Tokens of the cases of a table: those of `volume_ids`, one a case; `train` are all rows of the training split."""

    folder: TokenFolder
    view: str
    volume_ids: list[str]
    train: Int[np.ndarray, " n"]


@dataclass(frozen=True)
class Option:
    """One way to read one set of features. checkpoint: "" where an entry has only one; tokens: for the attentive."""

    checkpoint: str
    pool: str
    probe: str
    features: Float[np.ndarray, "rows features"]
    tokens: Tokens | None = None

    @property
    def said(self) -> str:
        return " ".join(part for part in (self.checkpoint, self.pool, self.probe) if part)

    @property
    def fingerprint(self) -> str:
        """What the ledger knows it by."""
        if self.tokens is None:
            return test_set_ledger.fingerprint(self.features, self.probe)
        return f"{self.tokens.folder.weights} {self.tokens.view} {ATTENTIVE}"

    def fit(self, target: Target, how: Selection, space: FeatureSpace | None = None) -> ProbeFit:
        """`space`: of `features` and `target`, where it is at hand."""
        if self.tokens is None:
            return PROBES[self.probe](space or feature_space(self.features, target), target, how)
        of = self.tokens
        (probed,) = probe_training.attentive(of.folder, of.view, of.volume_ids, of.train, [target], [how])
        return probed


@dataclass(frozen=True)
class Choice:
    """The option of an entry for a target. validation: its figure there, None where nothing could be judged.

    judged: every option with its validation figure, in the order given.
    """

    option: Option
    validation: float | None
    judged: list[tuple[str, float | None]]


def without_test(target: Target) -> Target:
    """`target` as choosing sees it: validation in the place of test, no validation, no test."""
    none = target.indices["val"][:0]
    return replace(
        target,
        indices={"train": target.indices["train"], "val": none, "test": target.indices["val"]},
        values={"train": target.values["train"], "val": target.values["val"][:0], "test": target.values["val"]},
    )


def why_not(target: Target) -> str:
    """Why the validation split cannot choose for `target`; "" if it can."""
    val = target.values["val"]
    if target.classes and len(np.unique(val)) < 2:
        return f"its {len(val)} validation volumes do not hold two classes"
    if not target.classes and len(val) < 2:
        return f"it has {len(val)} validation volumes with a value"
    return ""


def note_on(target: Target, person_ids: np.ndarray) -> str:
    """What has to be said of choosing for `target`; "" if nothing."""
    why = why_not(target)
    if why:
        return (
            f"{target.name}: {why}, so nothing was chosen: the newest checkpoint and the first pooling and probe stand"
        )
    people = len(set(person_ids[target.indices["val"]].tolist()))
    if people < MIN_VAL_PEOPLE:
        return f"{target.name}: chosen on {people} validation people only, which says little about what is best"
    return ""


def choose(options: Sequence[Option], target: Target, how: Selection) -> Choice:
    """The option whose validation figure is best, the first of equals. Raises UsageError where there is none.

    how: the probes' own choosing for `without_test(target)`.
    """
    if not options:
        raise UsageError(f"{target.name}: nothing to choose from")
    if why_not(target):
        newest = options[-1].checkpoint
        return Choice(next(one for one in options if one.checkpoint == newest), None, [(o.said, None) for o in options])
    if len(options) == 1:
        return Choice(options[0], None, [(options[0].said, None)])
    seen = without_test(target)
    figures, spaces = [], dict[int, FeatureSpace]()
    for one in options:
        if one.tokens is None and id(one.features) not in spaces:  # the probes of one pooling share it
            spaces = {id(one.features): feature_space(one.features, seen)}
        probed = one.fit(seen, how, spaces.get(id(one.features)))
        figures.append(metric_value(PRIMARY_METRIC[target.task], probed.predictions))
    best = int(np.nanargmax(np.where(np.isfinite(figures), figures, -np.inf)))
    judged = [(one.said, figure if np.isfinite(figure) else None) for one, figure in zip(options, figures, strict=True)]
    return Choice(options[best], figures[best], judged)


@dataclass(frozen=True)
class Read:
    """What the chosen option says of the validation and of the test volumes of a target."""

    val: Predictions
    test: Predictions
    probed: ProbeFit


def read(option: Option, target: Target, how: Selection) -> Read:
    """Fits the option as the probes do; `how` chooses its setting on val or inside train, never on test."""
    cut = len(target.indices["val"])
    rows, values = (np.concatenate([of["val"], of["test"]]) for of in (target.indices, target.values))
    order = np.argsort(rows, kind="stable")  # networks read the table from top to bottom
    both = replace(
        target, indices=target.indices | {"test": rows[order]}, values=target.values | {"test": values[order]}
    )
    probed = option.fit(both, how)
    said, back = probed.predictions, np.argsort(order, kind="stable")
    val, test = (
        Predictions(said.truth[part], said.scores[part], said.calibrated[part]) for part in (back[:cut], back[cut:])
    )
    return Read(val, test, probed)
