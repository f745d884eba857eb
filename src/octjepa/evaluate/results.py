"""Typed results of the evaluation protocol, each with one JSON form: what commands write and what pages read.

A `Row` is one metric of one predictor on the test set, a `Paired` the difference of two predictors on the same people.
The subclasses add what one caller alone knows. The keys of the JSON form are a contract (docs/probe.md,
docs/leaderboard.md, docs/finetune.md, docs/segment.md). `from_json` ignores unknown keys, so that files with additional
keys stay readable, and raises UsageError where a required key is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeVar

from octjepa.errors import UsageError
from octjepa.metrics.findings import Findings

P = TypeVar("P", bound="Paired")
R = TypeVar("R", bound="Record")


class Record:
    """A frozen dataclass with one JSON form. KEYS: its keys in order, where they are not the names of the fields."""

    KEYS: ClassVar[tuple[str, ...]] = ()
    ALIASES: ClassVar[Mapping[str, str]] = {}  # JSON key -> field

    @classmethod
    def _keys(cls) -> tuple[str, ...]:
        return cls.KEYS or tuple(one.name for one in fields(cls))  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {key: _plain(getattr(self, self.ALIASES.get(key, key))) for key in self._keys()}

    @classmethod
    def from_json(cls: type[R], data: Mapping[str, Any]) -> R:
        """The record with this JSON form. Raises UsageError: a required key is missing."""
        names = {key: cls.ALIASES.get(key, key) for key in data}
        known = {one.name: one for one in fields(cls)}  # type: ignore[arg-type]
        values = {names[key]: value for key, value in data.items() if names[key] in known}
        missing = [
            name
            for name, one in known.items()
            if name not in values and one.default is MISSING and one.default_factory is MISSING
        ]
        if missing:
            raise UsageError(f"a result lacks {', '.join(missing)}: it has {', '.join(map(str, data)) or 'no key'}")
        return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value


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
    """The mean of an entry over its seeds minus that of a reference; of the recipes where both have several seeds."""

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
    """Counts of test cases: rows are the true classes, columns the predicted ones."""

    name: str
    target: str
    probe: str
    pool: str
    classes: tuple[str, ...]
    counts: list[list[int]]


@dataclass(frozen=True)
class Choice(Record):
    """What was selected for a result without its test cases.

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
    """The update whose weights were selected, of all updates. by: "val", or "last" where nothing was selected."""

    name: str
    probe: str
    pool: str
    update: int
    of: int
    by: str


@dataclass(frozen=True)
class WithFewerLabels(Record):
    """Results with the labels of a number of training people; why targets are left out there."""

    rows: tuple[Row, ...] = ()
    comparisons: tuple[Paired, ...] = ()
    left_out: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WithFewerLabels:
        """As `Record.from_json`; the rows and differences are records, too."""
        pairs = data.get("comparisons") or data.get("paired") or ()
        return cls(
            tuple(map(read_row, data.get("rows") or ())),
            tuple(map(read_paired, pairs)),
            tuple(data.get("left_out") or ()),
        )


def read_fewer_labels(data: Mapping[str, Any]) -> dict[str, WithFewerLabels]:
    """By number of people, as text."""
    return {str(count): WithFewerLabels.from_json(one) for count, one in data.items()}


def to_json(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Plain data of several records."""
    return [record.to_json() for record in records]


def findings_json(findings: Findings) -> dict[str, Any]:
    """Faults, notes and uses as plain data."""
    faults = [fault.to_json() for fault in findings.faults]
    return {"faults": faults, "notes": list(findings.notes), "uses": list(findings.uses)}


def differences_by_name(paired: Sequence[P], name: Callable[[P], str]) -> dict[str, Any]:
    """Paired differences as `octjepa inspect` shows them: {value, low, high, n_people} under `name(pair)`."""
    return {
        name(pair): {"value": pair.difference, "low": pair.low, "high": pair.high, "n_people": pair.n_people}
        for pair in paired
    }
