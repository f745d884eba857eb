"""The tasks of the front page, read from the records of the programs that measure them.

In go the JSON files of `benchmarks/records`, out come tasks with the value of every row, and the paired differences
between packaged encoders and baselines. Each program writes its record in a shape of its own, so there is a reader for
each of them. A record that is absent or of another shape, and a row of `REQUIRED` that is missing, are errors that name
the command which writes them: a page with holes would look complete. Other rows are optional. A whole task that its
record does not have yet is listed as not measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octjepa.errors import UsageError

from .truth import OF_EIGHT

ENCODERS = ("phantom-unet", "phantom-truth", "phantom-tiny")
OWN_RANDOM = {"phantom-unet": "random_unet", "phantom-truth": "random_init", "phantom-tiny": "random_init"}
BASELINES = ("context", "intensity", "position")  # hand-made; `outline` takes the place of `position` for surfaces
RANDOM = ("random_unet", "random_init")
REFERENCE = "segmenter"
MEAN = "mean"  # in the record of B-scans, over lesions or diagnoses
REQUIRED = ("phantom-unet", "phantom-truth", "context", "random_init")


@dataclass(frozen=True)
class Measured:
    """A value or a difference with its 95 % interval; no interval if too few groups have the finding."""

    value: float
    low: float | None
    high: float | None

    def is_better(self, lower_is_better: bool) -> bool:
        """Of a difference: whether its interval excludes zero on the better side."""
        if self.low is None or self.high is None:
            return False
        return self.high < 0 if lower_is_better else self.low > 0


@dataclass(frozen=True)
class Part:
    """One metric: the value of each row, and differences by (row, baseline)."""

    values: Mapping[str, Measured]
    less: Mapping[tuple[str, str], Measured]


@dataclass(frozen=True)
class Goal:
    """A value that a packaged encoder has to reach, in words, and a test whether it does. None: a value is missing."""

    text: str
    is_met: Callable[[Task, str], bool | None]


@dataclass(frozen=True)
class Task:
    """A row of the page: one metric, or several whose mean is shown.

    text: the task. metric: with its unit. digits: after the point. reference: the value of the dense network or of the
    surface finder, which read the scan itself. mean: the mean over parts, if its intervals are measured.
    """

    text: str
    metric: str
    parts: Mapping[str, Part]
    lower_is_better: bool = False
    digits: int = 3
    goal: Goal | None = None
    reference: float | None = None
    mean: Part | None = None

    def value(self, row: str) -> float | None:
        """The mean over parts; None if the row lacks one of them."""
        values = [part.values.get(row) for part in self.parts.values()]
        known = [one.value for one in values if one is not None]
        return sum(known) / len(known) if len(known) == len(values) else None

    def interval(self, row: str) -> Measured | None:
        """Of the value; None if a task with several parts has no measured mean."""
        shown = self.mean or (next(iter(self.parts.values())) if len(self.parts) == 1 else None)
        return shown.values.get(row) if shown else None

    def differences(self, row: str, baseline: str) -> list[Measured]:
        """One for each part that has it."""
        found = [part.less.get((row, baseline)) for part in self.parts.values()]
        return [one for one in found if one is not None]

    def random_of(self, row: str) -> str | None:
        """The random weights that `row` is compared with: its own network's, or else the transformer's; None: none."""
        return next((one for one in (OWN_RANDOM[row], "random_init") if self.differences(row, one)), None)

    def times_better(self, row: str, baseline: str) -> tuple[int, int]:
        """(parts in which the row is better with an interval that excludes zero, parts that compare them)."""
        found = self.differences(row, baseline)
        return sum(one.is_better(self.lower_is_better) for one in found), len(found)


class Records:
    """The folder of records. Every reader raises UsageError for what is absent or of another shape."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, Any] = {}

    def json(self, name: str, command: str) -> Any:
        """The record `name`, which `command` writes."""
        if name not in self._read:
            file = self.folder / name
            try:
                self._read[name] = json.loads(file.read_text(encoding="utf-8"))
            except FileNotFoundError:
                raise UsageError(f"{file} is absent: {command} writes it") from None
            except ValueError as error:
                raise UsageError(f"{file} is not JSON ({error}): {command} writes it") from None
        return self._read[name]

    def at(self, name: str, command: str, *keys: str) -> Any:
        """A part of a record, by its keys."""
        found = self.json(name, command)
        for number, key in enumerate(keys):
            if not isinstance(found, dict) or key not in found:
                raise UsageError(f"{self.folder / name} has no {'/'.join(keys[: number + 1])}: measure it, {command}")
            found = found[key]
        return found

    def has(self, name: str, command: str, *keys: str) -> bool:
        """Whether a record has a part. Raises UsageError for a record that is absent."""
        found = self.json(name, command)
        for key in keys:
            if not isinstance(found, dict) or key not in found:
                return False
            found = found[key]
        return True

    def measured(self, name: str, command: str, *keys: str) -> Measured:
        """A value with its interval: `value` or `mean`, `low` and `high`; both ends may be null."""
        found = self.at(name, command, *keys)
        value = found.get("value", found.get("mean")) if isinstance(found, dict) else None
        numbers = [value, *(found.get(key) for key in ("low", "high"))] if isinstance(found, dict) else []
        if isinstance(found, dict) and {"low", "high"} <= set(found) and numbers[1:] == [None, None]:
            numbers = numbers[:1]
        if not numbers or not all(isinstance(one, float | int) for one in numbers):
            raise UsageError(
                f"{self.folder / name}: {'/'.join(keys)} is {json.dumps(found)[:80]}, expected value, low and high: "
                f"measure it again, {command}"
            )
        ends = [float(one) for one in numbers[1:]] or [None, None]
        return Measured(float(numbers[0]), *ends)


TOKENS, TASKS = "phantom_tokens.json", "phantom_tasks.json"
REAL, BSCANS, EYES = "real_tokens.json", "real/bscans.json", "real/results.json"
OBJECTIVES, COSTS = "objectives.json", "encoder_costs.json"
COMMANDS = {
    TOKENS: "python -m benchmarks.phantom_tokens",
    TASKS: "python -m benchmarks.phantom_tasks",
    REAL: "python -m benchmarks.real_tokens",
    BSCANS: "python -m benchmarks.real_bscans",
    EYES: "make real",
    OBJECTIVES: "python -m benchmarks.objectives",
    COSTS: "by hand",
}


def _part(records: Records, name: str, rows: Sequence[str], metric: str, *where: str) -> Part:
    """A metric of a record with `values` and `differences` of rows below `where`."""
    command = COMMANDS[name]
    inside = "rows" if name == REAL else "values"
    rows = [row for row in rows if row in REQUIRED or records.has(name, command, *where, inside, row)]
    values = {row: records.measured(name, command, *where, inside, row, metric) for row in rows}
    less = {}
    for encoder in ENCODERS:
        for baseline in (*BASELINES, "outline", OWN_RANDOM[encoder]):
            if encoder in rows and baseline in rows:
                keys = (*where, "differences", f"{encoder} less {baseline}", metric)
                less[encoder, baseline] = records.measured(name, command, *keys)
    return Part(values, less)


def _bscan_parts(records: Records, part: str, metric: str, rows: Sequence[str]) -> dict[str, Part]:
    """Every lesion or diagnosis in single B-scans, and their mean."""
    command = COMMANDS[BSCANS]
    found = {}
    for name in records.at(BSCANS, command, part):
        where = (part, name, "rows")
        rows = [row for row in rows if row != "random_unet" or records.has(BSCANS, command, *where, row)]
        values = {row: records.measured(BSCANS, command, *where, row, metric) for row in rows}
        less = {
            (row, baseline): records.measured(BSCANS, command, *where, row, f"less_{baseline}")
            for row in ENCODERS
            for baseline in ("context", "intensity", OWN_RANDOM[row] if OWN_RANDOM[row] in rows else "random_init")
        }
        found[name] = Part(values, less)
    return found


# --- goals


def at_least(bound: float, times_context: float = 0.0) -> Goal:
    """A value of at least `bound`, and of `times_context` times hand-made features."""
    text = f"{bound:g}" + (f" and {times_context:g} x `context`" if times_context else "")

    def is_met(task: Task, row: str) -> bool | None:
        value, context = task.value(row), task.value("context")
        if value is None or context is None:
            return None
        return value >= bound and value >= times_context * context

    return Goal(text, is_met)


def share_of(other: Task, share: float) -> Goal:
    """A value of at least `share` of the same row's value in another task, which has the same lesions."""

    def is_met(task: Task, row: str) -> bool | None:
        value, reference = task.value(row), other.value(row)
        return None if value is None or reference is None else value >= share * reference

    return Goal(f"{share:.0%} of these lesions in the first row", is_met)


def at_most(bound: float) -> Goal:
    """An error of at most `bound`."""

    def is_met(task: Task, row: str) -> bool | None:
        value = task.value(row)
        return None if value is None else value <= bound

    return Goal(f"at most {bound:g}", is_met)


def half_of_random() -> Goal:
    """At most half of the error of the same network with random weights."""

    def is_met(task: Task, row: str) -> bool | None:
        value, random = task.value(row), task.value(OWN_RANDOM[row])
        return None if value is None or random is None else value <= random / 2

    return Goal("half the error of random weights", is_met)


def above_random_and_context() -> Goal:
    """Every part above random weights and hand-made features, with intervals that exclude zero."""

    def is_met(task: Task, row: str) -> bool | None:
        random = task.random_of(row)
        if random is None or not task.differences(row, "context"):
            return None
        counts = [task.times_better(row, baseline) for baseline in (random, "context")]
        return all(better == len(task.parts) for better, _ in counts)

    return Goal("each above random weights and `context`", is_met)


# --- tasks

LOOK_ALIKES, SURFACES = "look-alikes of four lesions", "four surfaces"
_ROWS = (*ENCODERS, *BASELINES, *RANDOM)
_WITHOUT_POSITION = (*ENCODERS, "context", "intensity", *RANDOM)
_MLP_ROWS = ("phantom-unet", "phantom-truth", "context", *RANDOM)


def tasks_of(records: Records) -> list[Task]:
    """The rows of the page. Raises UsageError."""

    def tokens(reading: str, cohort: str, metric: str, rows: Sequence[str] = _ROWS) -> dict[str, Part]:
        return {metric: _part(records, TOKENS, rows, metric, reading, cohort)}

    def real(metric: str, rows: Sequence[str] = _ROWS) -> dict[str, Part]:
        return {metric: _part(records, REAL, rows, metric)}

    def reference(name: str, *keys: str) -> float | None:
        return records.measured(name, COMMANDS[name], *keys).value if records.has(name, COMMANDS[name], *keys) else None

    every = Task(
        "lesions by token: mean of five",
        "AP",
        tokens("linear", "exam", "with_drusen"),
        goal=at_least(0.60, times_context=2),
        reference=reference(TOKENS, "linear", "exam", "values", REFERENCE, "with_drusen"),
    )
    surfaces = (*ENCODERS, "context", "intensity", "outline", *RANDOM)

    def of_shifted_lesions() -> Task:
        known = records.at(TOKENS, COMMANDS[TOKENS], "linear", "shifted", "values", ENCODERS[0])
        lesions = [name for name in known if name not in ("with_drusen", "without_drusen")]
        parts = {name: _part(records, TOKENS, _ROWS, name, "linear", "exam") for name in lesions}
        return Task("lesions of `shifted` in phantoms of the exam's kind", "AP", parts)

    tasks: list[tuple[tuple[str, ...], Callable[[], Task]]] = [
        ((), lambda: every),
        ((), lambda: Task("without drusen", "AP", tokens("linear", "exam", "without_drusen"))),
        ((), lambda: Task("only drusen", "AP", tokens("linear", "exam", "drusen"), goal=at_least(0.20))),
        (
            (TOKENS, "mlp", "exam"),
            lambda: Task("the first row, read by an MLP", "AP", tokens("mlp", "exam", "with_drusen", _MLP_ROWS)),
        ),
        (
            (TOKENS, "linear", "shifted"),
            lambda: Task(
                "`shifted` phantoms: mean of three lesions",
                "AP",
                tokens("linear", "shifted", "with_drusen"),
                goal=share_of(of_shifted_lesions(), 0.9),
            ),
        ),
        ((), lambda: Task("whole eyes: mean of five lesions", "AUROC", tokens("eyes", "exam", "with_drusen"))),
        (
            (TOKENS, "eyes", "shifted"),
            lambda: Task("whole eyes, `shifted`: mean of three", "AUROC", tokens("eyes", "shifted", "with_drusen")),
        ),
        (
            (TASKS, "look_alikes"),
            lambda: Task(
                LOOK_ALIKES,
                "AUROC",
                {"mean": _part(records, TASKS, _WITHOUT_POSITION, "mean", "look_alikes")},
                goal=at_least(0.75),
            ),
        ),
        ((), lambda: Task("area of atrophy", "R2", tokens("measures", "exam", "atrophy_mm2"))),
        ((), lambda: Task("volume of fluid", "R2", tokens("measures", "exam", "fluid_mm3"))),
        ((), lambda: Task("central thickness", "R2", tokens("measures", "exam", "central_thickness_um"))),
        (
            (TASKS, "surfaces"),
            lambda: Task(
                SURFACES,
                "um",
                {"mean": _part(records, TASKS, surfaces, "mean", "surfaces")},
                lower_is_better=True,
                digits=1,
                goal=half_of_random(),
                reference=reference(TASKS, "surfaces", "values", REFERENCE, "mean"),
            ),
        ),
        (
            (),
            lambda: Task(
                "real: fluid by token, four labelled eyes",
                "AP",
                real("fluid_ap"),
                goal=at_least(0.80),
                reference=reference(REAL, "rows", REFERENCE, "fluid_ap"),
            ),
        ),
        (
            (),
            lambda: Task(
                "real: the same, one labelled eye",
                "AP",
                real("fluid_ap_from_one_eye"),
                reference=reference(REAL, "rows", REFERENCE, "fluid_ap_from_one_eye"),
            ),
        ),
        (
            (),
            lambda: Task(
                "real: four labelled eyes, read by an MLP",
                "AP",
                real("fluid_ap_mlp"),
                reference=reference(REAL, "rows", REFERENCE, "fluid_ap_mlp"),
            ),
        ),
        (
            (),
            lambda: Task(
                "real: one labelled eye, read by an MLP",
                "AP",
                real("fluid_ap_from_one_eye_mlp"),
                reference=reference(REAL, "rows", REFERENCE, "fluid_ap_from_one_eye_mlp"),
            ),
        ),
        (
            (),
            lambda: Task(
                "real: four surfaces, one labelled eye",
                "um",
                real("surface_um", surfaces),
                lower_is_better=True,
                digits=1,
                goal=at_most(12),
                reference=_segmented_surfaces(records),
            ),
        ),
        ((), lambda: _bscans(records, "real: four lesions in B-scans", "lesions", "AP")),
        ((), lambda: _bscans(records, "real: four diagnoses of eyes", "diagnoses", "AUROC")),
    ]
    return [make() for needed, make in tasks if not needed or records.has(needed[0], COMMANDS[needed[0]], *needed[1:])]


def not_measured(records: Records) -> list[str]:
    """Tasks that their record does not have yet, with the command that measures them."""
    requested = {LOOK_ALIKES: (TASKS, "look_alikes"), SURFACES: (TASKS, "surfaces")}
    return [
        f"{text} (`{COMMANDS[name]}`)"
        for text, (name, *keys) in requested.items()
        if not records.has(name, COMMANDS[name], *keys)
    ]


def _bscans(records: Records, text: str, part: str, metric: str) -> Task:
    parts = _bscan_parts(records, part, metric.lower(), _WITHOUT_POSITION)
    records.at(BSCANS, COMMANDS[BSCANS], part, MEAN)
    mean = parts.pop(MEAN)
    named = {name: records.at(BSCANS, COMMANDS[BSCANS], part, name, "rows", REFERENCE) for name in parts}
    values = [
        records.measured(BSCANS, COMMANDS[BSCANS], part, name, "rows", REFERENCE, metric.lower()).value
        for name in named
    ]
    reference = sum(values) / len(values)
    return Task(text, metric, parts, goal=above_random_and_context(), reference=reference, mean=mean)


def _segmented_surfaces(records: Records) -> float:
    """Error of `octjepa segment` at the four surfaces, without a label of real eyes."""
    found = records.at(EYES, COMMANDS[EYES], "tasks", "task_1_um", "octjepa")
    if not isinstance(found, list) or len(found) != 8:
        raise UsageError(f"{records.folder / EYES}: expected eight boundaries: {COMMANDS[EYES]}")
    return sum(float(found[k]) for k in OF_EIGHT) / len(OF_EIGHT)
