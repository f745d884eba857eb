"""Typed results of the evaluation protocol, each with one JSON form: what commands write and what pages read.

A `Row` is one metric of one predictor on the test set, a `Paired` the difference of two predictors on the same people.
The subclasses add what only one caller knows. The keys of the JSON form are a contract (docs/probe.md,
docs/leaderboard.md, docs/finetune.md, docs/segment.md). `from_json` ignores unknown keys, so that files with additional
keys stay readable, and raises UsageError where a required key is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from octjepa.metrics.bootstrap import MeasuredValue
from octjepa.metrics.findings import Findings
from octjepa.metrics.thresholds import DecisionPoint, ReliabilityBin
from octjepa.record import Record, to_json

P = TypeVar("P", bound="Paired")


@dataclass(frozen=True)
class ResultKey:
    """Encoder or baseline, target, probe and pooling of a result."""

    name: str
    target: str
    probe: str
    pool: str


@dataclass(frozen=True)
class Row(Record):
    """One metric of one predictor on the test cases of a target.

    value, low, high: None where the metric or a valid interval does not exist. n: test cases; n_people: people behind
    them.
    """

    name: str
    target: str = ""
    probe: str = ""
    pool: str = ""
    metric: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    n_people: int | None = None

    @property
    def key(self) -> ResultKey:
        """Whose metric it is."""
        return ResultKey(self.name, self.target, self.probe, self.pool)

    def measured(self) -> MeasuredValue:
        """Only the value. Raises ValueError: a row that was read without its numbers of cases and people."""
        if self.n is None or self.n_people is None:
            raise ValueError(f"the row of {self.name} has no number of cases")
        return MeasuredValue(self.value, self.low, self.high, self.n, self.n_people)


@dataclass(frozen=True)
class BoardRow(Row):
    """The mean of an entry of a leaderboard over its seeds.

    primary: the metric that the table is ordered by. seed_sd: standard deviation over the seeds, None for one seed.
    recipe_low, recipe_high: interval that also holds the spread of the seeds.
    """

    primary: bool = False
    seeds: int = 1
    seed_sd: float | None = None
    recipe_low: float | None = None
    recipe_high: float | None = None


@dataclass(frozen=True)
class HeadRow(Row):
    """One metric of a segmentation head in one class (`target`, "class" in JSON; "mean": over the classes).

    undefined: resamples without a value.
    """

    undefined: int = 0
    KEYS: ClassVar[tuple[str, ...]] = (
        *("name", "metric", "class", "value", "low", "high", "n", "n_people", "undefined"),
    )
    ALIASES: ClassVar[Mapping[str, str]] = {"class": "target"}


def read_row(data: Mapping[str, Any]) -> Row:
    """The row with this JSON form, whoever wrote it. Raises UsageError: a row without a name."""
    kind = HeadRow if "class" in data else BoardRow if "seed_sd" in data else Row
    return kind.from_json(data)


@dataclass(frozen=True)
class Paired(Record):
    """One predictor (`name`) minus another (`reference`) on the same people, in `metric`.

    undefined: resamples in which one of them has no value. p: two-sided, of no difference; None without an interval.
    """

    name: str = ""
    target: str = ""
    metric: str = ""
    reference: str = ""
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    undefined: int | None = None
    n_people: int | None = None
    p: float | None = None


@dataclass(frozen=True)
class ProbePaired(Paired):
    """Two results of the same probe and pooling."""

    probe: str = ""
    pool: str = ""
    KEYS: ClassVar[tuple[str, ...]] = (
        *("name", "target", "probe", "pool", "metric", "reference"),
        *("difference", "low", "high", "undefined", "n_people", "p"),
    )

    @property
    def key(self) -> ResultKey:
        """The result that the reference is taken from."""
        return ResultKey(self.name, self.target, self.probe, self.pool)


@dataclass(frozen=True)
class TunedPaired(Paired):
    """A tuned network minus a reference. against: frozen, best_baseline or tuned_from_scratch."""

    against: str = ""
    reference_probe: str = ""
    KEYS: ClassVar[tuple[str, ...]] = (
        *("name", "target", "metric", "against", "reference", "reference_probe"),
        *("difference", "low", "high", "undefined", "n_people", "p"),
    )


@dataclass(frozen=True)
class HeadPaired(Paired):
    """A segmentation head minus a reference, in its mean over the classes."""

    KEYS: ClassVar[tuple[str, ...]] = ("name", "reference", "metric", "difference", "low", "high", "n_people")


@dataclass(frozen=True)
class RecipePaired(Paired):
    """The mean of an entry over its seeds minus that of a reference; of the recipes if both have several seeds."""

    recipe_low: float | None = None
    recipe_high: float | None = None
    seeds: int = 1
    KEYS: ClassVar[tuple[str, ...]] = (
        *("name", "reference", "target", "metric", "difference", "low", "high"),
        *("recipe_low", "recipe_high", "n_people", "seeds"),
    )


@dataclass(frozen=True)
class CorrectedPaired(RecipePaired):
    """A member of a family of comparisons. p_of: networks or recipes. p_holm, q_bh: corrected over the family."""

    p_of: str = "networks"
    p_holm: float | None = None
    q_bh: float | None = None
    KEYS: ClassVar[tuple[str, ...]] = (*RecipePaired.KEYS, "p_of", "p", "p_holm", "q_bh")


def read_paired(data: Mapping[str, Any]) -> Paired:
    """The paired difference with this JSON form, whoever wrote it."""
    for key, kind in (
        ("against", TunedPaired),
        ("p_holm", CorrectedPaired),
        ("recipe_low", RecipePaired),
        ("probe", ProbePaired),
    ):
        if key in data:
            return kind.from_json(data)
    return HeadPaired.from_json(data) if "target" not in data else Paired.from_json(data)


@dataclass(frozen=True)
class Confusion(Record):
    """Counts of test cases: rows are the true classes, columns the predicted classes."""

    name: str
    target: str
    probe: str
    pool: str
    classes: tuple[str, ...]
    counts: list[list[int]]


@dataclass(frozen=True)
class Choice(Record):
    """The selection for a result without its test cases.

    setting: of the probe. by: "val", "cv" or "fixed". unconverged: fits that stopped before they converged.
    """

    name: str
    target: str
    probe: str
    pool: str
    setting: float
    by: str
    unconverged: int


@dataclass(frozen=True)
class TunedChoice(Record):
    """The update whose weights were selected, of all updates. by: "val", or "last" if nothing was selected."""

    name: str
    probe: str
    pool: str
    update: int
    of: int
    by: str


@dataclass(frozen=True)
class TargetSummary(Record):
    """The composition of a target.

    counts: labelled cases by split; of classes a list with a count for each. class_weights: of training, the same for
    every probe. events: of survival, by split.
    """

    target: str
    task: str
    label_hash: str
    classes: tuple[str, ...] | None = None
    counts: Mapping[str, int | list[int]] = field(default_factory=dict)
    class_weights: list[float] | None = None
    events: Mapping[str, int] | None = None
    OMITTED: ClassVar[tuple[str, ...]] = ("classes", "class_weights", "events")


@dataclass(frozen=True)
class CaseProtocol(Record):
    """The unit of a case, how its volumes became one, and how many there are. text: the same as a sentence."""

    level: str
    several: str
    cases: int
    volumes: int
    volumes_used: int
    volumes_in_no_split: int
    people: int
    people_with_one_eye: int
    volumes_of_unknown_eye: int
    text: str


@dataclass(frozen=True)
class GroupValue(MeasuredValue):
    """A metric in one group. people_by_class: test people of each class in it."""

    people_by_class: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupScores(Record):
    """A metric in every group. equity_scaled: see `subgroups`. left_out: by group, why it is not measured."""

    metric: str
    groups: Mapping[str, GroupValue]
    equity_scaled: MeasuredValue | None
    left_out: Mapping[str, str]


@dataclass(frozen=True)
class ColumnScores(GroupScores):
    """A metric in every group of a column."""

    column: str
    KEYS: ClassVar[tuple[str, ...]] = ("column", "metric", "groups", "equity_scaled", "left_out")


@dataclass(frozen=True)
class SubgroupResult(ColumnScores):
    """A metric of one result in every group of a column."""

    name: str
    target: str
    probe: str
    pool: str
    KEYS: ClassVar[tuple[str, ...]] = ("name", "target", "probe", "pool", *ColumnScores.KEYS)


@dataclass(frozen=True)
class GroupDrop(Record):
    """A metric on a group's test people with and without the group's own labels; low, high: of the drop."""

    group: str
    with_it: float
    without_it: float
    drop: float
    low: float | None
    high: float | None
    n: int
    n_people: int


@dataclass(frozen=True)
class MeanDrop(Record):
    """The mean drop over so many groups."""

    drop: float
    low: float | None
    high: float | None
    groups: int


@dataclass(frozen=True)
class LeaveOneGroupOut(Record):
    """The value of a group's own labels on its own test people. left_out: by group, why it is not measured."""

    rows: tuple[GroupDrop, ...] = ()
    mean_drop: MeanDrop | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteThreshold(Record):
    """A threshold that was chosen at one site and used at another."""

    chosen_at: str
    used_at: str
    threshold: float
    sensitivity: float | None
    sensitivity_low: float | None
    sensitivity_high: float | None
    specificity: float | None
    specificity_low: float | None
    specificity_high: float | None
    n: int
    n_people: int


@dataclass(frozen=True)
class ChosenThreshold(Record):
    """A threshold that was chosen on validation people, and what it does on test people."""

    chosen_for_specificity: float
    threshold: float
    sensitivity: MeasuredValue
    specificity: MeasuredValue


@dataclass(frozen=True)
class SeedResult(Record):
    """One seed of a leaderboard's entry: what validation selected, and its primary metric on the test people."""

    name: str
    seed: int
    target: str
    metric: str
    checkpoint: str
    pool: str
    probe: str
    setting: float
    validation: float | None
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ScoredOption(Record):
    """An option of a leaderboard's entry, and its metric on validation people."""

    name: str
    seed: int
    target: str
    option: str
    validation: float | None


@dataclass(frozen=True)
class TrainingDetails(Record):
    """Thresholds, calibration and groups of one seed of an entry; parts that cannot be measured are empty.

    left_out: without the labels of a vendor. by_group: by device, site and eye. subgroups: by the user's columns.
    """

    name: str
    seed: int
    target: str
    reliability: tuple[ReliabilityBin, ...] = ()
    decision_curve: tuple[DecisionPoint, ...] = ()
    threshold: ChosenThreshold | None = None
    between_sites: tuple[SiteThreshold, ...] = ()
    by_group: Mapping[str, GroupScores] = field(default_factory=dict)
    left_out: LeaveOneGroupOut = LeaveOneGroupOut()
    subgroups: tuple[ColumnScores, ...] = ()


@dataclass(frozen=True)
class WithFewerLabels(Record):
    """Results with the labels of a number of training people; why targets are left out there."""

    rows: tuple[Row, ...] = ()
    comparisons: tuple[Paired, ...] = ()
    left_out: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WithFewerLabels:
        """As `Record.from_json`; the rows and differences are records as well."""
        pairs = data.get("comparisons") or data.get("paired") or ()
        return cls(
            tuple(map(read_row, data.get("rows") or ())),
            tuple(map(read_paired, pairs)),
            tuple(data.get("left_out") or ()),
        )


def read_fewer_labels(data: Mapping[str, Any]) -> dict[str, WithFewerLabels]:
    """By number of people, as text."""
    return {str(count): WithFewerLabels.from_json(value) for count, value in data.items()}


def findings_json(findings: Findings) -> dict[str, object]:
    """Faults, notes and uses as plain data."""
    return {"faults": to_json(findings.faults), "notes": list(findings.notes), "uses": to_json(findings.uses)}


def differences_by_name(paired: Sequence[P], name: Callable[[P], str]) -> dict[str, dict[str, float | None]]:
    """Paired differences as `octjepa inspect` shows them: {value, low, high, n_people} under `name(pair)`."""
    return {
        name(pair): {"value": pair.difference, "low": pair.low, "high": pair.high, "n_people": pair.n_people}
        for pair in paired
    }
