"""Metrics of the exam, a list in results.json that grows as each row ends, and their bootstrap samples.

The published list is in benchmarks/records/exam. An entry is an `ExamRow`, the `Row` of the evaluation protocol with
the question and the run that it belongs to. The bootstrap samples are kept in a folder outside the repository, so that
a later row is compared on the same draws of people. differences.json holds the differences that the pages show, for a
clone without that folder. left_out.json says what was not measured, and why, cohorts.json what ingest made of the
cohorts.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from filelock import FileLock

from octjepa.errors import UsageError
from octjepa.evaluate.results import RecipePaired, Row
from octjepa.files import write_atomic, write_json
from octjepa.metrics.bootstrap import Estimate
from octjepa.metrics.comparisons import paired_difference, recipe_difference
from octjepa.metrics.intervals import Scale
from octjepa.record import Record, to_json

from .stored_differences import StoredDifferences

Facts = Mapping[str, Any]  # of a run: its name, weights, code and training, as results.json has them
Signature = dict[str, dict[str, float]]  # cohort -> its volumes, and means over them of what ingest measured
Patch = tuple[int, int, int]
NO_PATCH: Patch = (0, 0, 0)  # of a row that cuts no patches
TOLERANCE = 1e-4  # of a mean; processors differ by 4e-6 (lab/2026-11.md, 2026-11-25)


def patch_text(patch: Patch) -> str:
    """As 4x8x8: slices, depth, columns."""
    return "x".join(map(str, patch))


def figure_key(task: str, metric: str, labels: int | None) -> str:
    """The name of a figure among those of a row."""
    return f"{task}/{metric}/{labels_text(labels)}"


def labels_text(labels: int | None) -> str:
    """A number of labelled eyes or people; None: all."""
    return "all" if labels is None else str(labels)


@dataclass(frozen=True)
class Finding:
    """One figure: of which task, from how many labelled eyes or people (None: all, 0: none)."""

    task: str
    metric: str
    labels: int | None
    estimate: Estimate

    @property
    def key(self) -> str:
        """Its name among the figures of a row."""
        return figure_key(self.task, self.metric, self.labels)


@dataclass(frozen=True)
class LeftOut:
    """A figure, or a whole task by its main figure, that was not measured; `reason` says why.

    retry: what was missing may come, such as a file, so that the next reading looks for it again.
    """

    task: str
    metric: str
    labels: int | None
    reason: str
    retry: bool = False

    @property
    def key(self) -> str:
        """Its name among the figures of a row."""
        return figure_key(self.task, self.metric, self.labels)


def left_out_mean(task: str, metric: str, labels: int | None, missing: Sequence[str]) -> LeftOut:
    """A mean over several questions of which `missing` have no figure: of the others it would be another figure."""
    return LeftOut(task, metric, labels, f"the mean over all of them needs {', '.join(missing)}, left out here")


# The poolings of whole eyes that did best on training and validation people (lab/2026-11.md, 2026-11-26): for what an
# eye has, how much of it, and which eye it is. The package's default is not referred to, so that the exam stays as it
# is when the default changes.
EYES, CENTERED, SAME_EYE = "zones_whitened", "zones_centered", "zones"
# How a task reads a row: the same way for every row but the supervised networks, which read voxels themselves.
READINGS = {
    "token_lesion": "tokens",
    "eye_lesion": EYES,
    "eye_lesion_centered": CENTERED,
    "added_value": EYES,
    "decoys": EYES,
    "surfaces": "tokens",
    "severity": CENTERED,
    "same_eye": SAME_EYE,
    "tuning": "tuned",
    "tuning_segmentation": "tuned",
    "frozen": EYES,
    "real_fluid": "tokens",
    "real_fluid_decoder": "tokens and voxels",
    "real_surfaces": "tokens",
}
SUPERVISED = "supervised"  # the row of networks that learn from labels alone
_WITHOUT_TOKENS = {SUPERVISED: "voxels", "covariates": "columns", "graders": "surfaces"}
UNTRAINED = "untrained"  # the exam's own encoder before its first update; of another architecture "untrained:NAME"


@dataclass(frozen=True)
class RowName:
    """A row: its encoder or floor, the patch that it cuts, the seed of its network (0 without one)."""

    name: str
    patch: Patch
    seed: int = 0

    @property
    def key(self) -> str:
        """Its name in files."""
        return f"{self.name}-{patch_text(self.patch)}-seed{self.seed}".replace("/", "-").replace(":", "-")


@dataclass(frozen=True)
class ExamRow(Row):
    """A figure of the exam as results.json has it.

    name ("encoder" in JSON): encoder or baseline; row: `RowName.key`. labels: labelled eyes or people, None: all.
    reading: how the task reads a row. run, weights: name of the training run, hash of its weights. views, eyes,
    overrides: of the training; trained: True for an encoder without a plan. facts: further records of the run, such as
    its code and CPU-minutes.
    """

    task: str = ""
    labels: int | None = None
    seed: int = 0
    reading: str | None = None
    row: str = ""
    patch: tuple[int, ...] = NO_PATCH
    scale: Scale = "share"
    run: str | None = None
    weights: str | None = None
    views: int | None = None
    eyes: int | None = None
    overrides: tuple[str, ...] | None = None
    trained: bool | None = None
    facts: Facts = field(default_factory=dict)
    KEYS: ClassVar[tuple[str, ...]] = (
        *("task", "encoder", "labels", "seed", "metric", "reading", "value", "low", "high", "n", "row", "patch"),
        *("people", "scale", "run", "weights", "views", "eyes", "overrides", "trained"),
    )
    ALIASES: ClassVar[Mapping[str, str]] = {"encoder": "name", "people": "n_people"}
    OMITTED: ClassVar[tuple[str, ...]] = ("reading", "run", "weights", "views", "eyes", "overrides", "trained")

    def to_json(self) -> dict[str, Any]:
        """As `Record.to_json`, with the facts as further keys."""
        return {**super().to_json(), **self.facts}

    @classmethod
    def from_json(cls, data: Facts) -> Self:
        """As `Record.from_json`; keys without a field become facts."""
        facts = {key: value for key, value in data.items() if key not in cls.KEYS}
        return replace(super().from_json({key: data[key] for key in cls.KEYS if key in data}), facts=facts)

    @property
    def row_name(self) -> RowName:
        """The row that the figure belongs to."""
        return RowName(self.name, (self.patch[0], self.patch[1], self.patch[2]), self.seed)

    @property
    def figure(self) -> str:
        """Its name among the figures of the row."""
        return figure_key(self.task, self.metric, self.labels)


@dataclass(frozen=True)
class LeftOutRow(Record):
    """A figure that a row lacks, as left_out.json has it: `LeftOut` with the row, and the run that was read."""

    row: str
    task: str
    metric: str
    labels: int | None
    reason: str
    retry: bool = True
    run: str | None = None
    weights: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As `Record.to_json`; without a run the figure is made of others, which name it."""
        data = super().to_json()
        return data if self.run is not None else {key: data[key] for key in data if key not in ("run", "weights")}

    @property
    def figure(self) -> str:
        """Its name among the figures of the row."""
        return figure_key(self.task, self.metric, self.labels)


class Results:
    """The results in `folder`, and their bootstrap samples in `samples`; several processes may add to them.

    samples: default: the folder `samples` in `folder`.
    """

    def __init__(self, folder: Path, samples: Path | None = None) -> None:
        self.path, self.samples = folder / "results.json", samples or folder / "samples"
        self._left_out_path, self._cohorts = folder / "left_out.json", folder / "cohorts.json"
        self.entries: list[ExamRow] = []
        self.left_out: list[LeftOutRow] = []
        self.differences = StoredDifferences.read(folder / "differences.json")
        self._read()

    def _read(self) -> None:
        if self.path.is_file():
            self.entries = [ExamRow.from_json(one) for one in json.loads(self.path.read_text(encoding="utf-8"))]
        if self._left_out_path.is_file():
            left_out = json.loads(self._left_out_path.read_text(encoding="utf-8"))
            self.left_out = [LeftOutRow.from_json(one) for one in left_out]

    def check_cohorts(self, signature: Signature) -> None:
        """Raises UsageError where figures are of other cohorts: ingest has changed, and rows would not compare."""
        known: Signature = json.loads(self._cohorts.read_text(encoding="utf-8")) if self._cohorts.is_file() else {}
        if not known or not self.entries:
            self._cohorts.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._cohorts, signature)
            return
        for name, measures in signature.items():
            for measure, value in measures.items():
                before = known.get(name, {}).get(measure, 0.0)
                if abs(value - before) > TOLERANCE * abs(before):
                    raise UsageError(
                        f"the figures in {self.path} are of cohorts with {measure} {before:g} in {name}, here it is "
                        f"{value:g}: ingested otherwise, so that rows of both do not compare. Move its folder away, or "
                        "name another --out"
                    )

    def has(self, row: RowName, task: str, run: str | None = None, weights: str | None = None) -> bool:
        """Whether a row's figures of a task are there, with their resamples: of an encoder, of its training `run`.

        A task of which every figure is left out is there as well, unless what was missing may come.
        weights: the hash of what that run left. A run that is trained again, on another processor say, has its name
        and other weights, and figures of both would stand in one row. What was read by another pooling is not there.
        """
        return self._samples_of(row, task).is_file() and any(
            (one.row, one.task, one.run, one.weights) == (row.key, task, run or row.key, weights)
            and (isinstance(one, LeftOutRow) or one.reading in (None, _reading(row, task)))
            for one in (*self.entries, *(one for one in self.left_out if not one.retry))
        )

    def is_left_out(self, row: RowName, key: str) -> bool:
        """Whether left_out.json says why a row has no figure `key`.

        The main figure of a task stands there for the others of as many labels, where none of them was measured.
        """
        task, _, labels = key.partition("/")[0], *key.rpartition("/")[1:]
        ours = [one for one in self.left_out if one.row == row.key]
        measured = {labels_text(one.labels) for one in self.entries if (one.row, one.task) == (row.key, task)}
        return any(one.figure == key for one in ours) or (
            labels not in measured and any((one.task, labels_text(one.labels)) == (task, labels) for one in ours)
        )

    def _samples_of(self, row: RowName, task: str) -> Path:
        return self.samples / f"{row.key}-{task}.npz"

    def add(self, row: RowName, task: str, found: Iterable[Finding | LeftOut], about: Facts) -> None:
        """Replaces a row's figures of `task`, and why others are missing, and writes everything.

        about: the run, its code and recipe. A task may find figures of another one too (`added_value`).
        """
        found = list(found)
        self.samples.mkdir(parents=True, exist_ok=True)
        with FileLock(self.samples / ".lock"):
            self._read()
            for one in dict.fromkeys([task, *(finding.task for finding in found)]):
                self._replace(row, one, [finding for finding in found if finding.task == one], about)
            self._write()

    def extend(self, row: RowName, found: Iterable[Finding | LeftOut]) -> None:
        """Adds figures that are made of others of the same row and task, or replaces them, and writes everything."""
        found = list(found)
        keys = {one.key for one in found}
        with FileLock(self.samples / ".lock"):
            self._read()
            self.left_out = [one for one in self.left_out if one.row != row.key or one.figure not in keys]
            self.left_out += [LeftOutRow(row.key, **asdict(one)) for one in found if isinstance(one, LeftOut)]
            self.entries = [one for one in self.entries if one.row != row.key or one.figure not in keys]
            for one in found:
                if isinstance(one, LeftOut):
                    continue
                others = [other for other in self.entries if (other.row, other.task) == (row.key, one.task)]
                with np.load(self._samples_of(row, one.task), allow_pickle=False) as file:
                    arrays = {name: file[name] for name in file.files}
                arrays |= _arrays(one)
                self._write_samples(row, one.task, arrays)
                made = _exam_row(row, one, {})
                measured = {name: getattr(made, name) for name in _MEASURED}
                self.entries.append(replace(others[0], **measured))
            self._write()

    def _write(self) -> None:
        write_json(self.path, to_json(self.entries))
        write_json(self._left_out_path, to_json(self.left_out))

    def _write_samples(self, row: RowName, task: str, arrays: dict[str, np.ndarray]) -> None:
        path = self._samples_of(row, task)
        write_atomic(path, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))

    def _replace(self, row: RowName, task: str, found: list[Finding | LeftOut], about: Facts) -> None:
        findings = [one for one in found if isinstance(one, Finding)]
        self.left_out = [one for one in self.left_out if (one.row, one.task) != (row.key, task)]
        run, weights = about.get("run") or row.key, about.get("weights")
        self.left_out += [
            LeftOutRow(row.key, **asdict(one), run=run, weights=weights) for one in found if isinstance(one, LeftOut)
        ]
        arrays: dict[str, np.ndarray] = {}
        for one in findings:
            arrays |= _arrays(one)
        self._write_samples(row, task, arrays)
        self.entries = [one for one in self.entries if (one.row, one.task) != (row.key, task)]
        self.entries += [_exam_row(row, one, about) for one in findings]

    def estimate(self, row: RowName, key: str) -> Estimate | None:
        """A figure with its resamples; None where it is not there."""
        path = self._samples_of(row, key.partition("/")[0])
        found = self._find(row, key)
        if found is None or not path.is_file():
            return None
        assert found.value is not None
        assert found.n is not None
        assert found.n_people is not None
        with np.load(path, allow_pickle=False) as file:
            samples, draws = file[key].astype(float), str(file[f"draws:{key}"])
        return Estimate(found.value, samples, found.n, found.n_people, key, draws, found.scale)

    def values(self, encoder: str, key: str, patches: Container[Patch] | None = None) -> dict[RowName, float]:
        """A figure of every seed of an encoder, or floor; where given, of those alone that cut one of `patches`."""
        return {
            one.row_name: one.value
            for one in self.entries
            if one.name == encoder and one.figure == key and (patches is None or one.row_name.patch in patches)
            if one.value is not None
        }

    def labels(self, row: RowName, task: str) -> set[int | None]:
        """The numbers of labels of a row's figures of a task."""
        return {one.labels for one in self.entries if (one.row, one.task) == (row.key, task)}

    def entry(self, row: RowName, key: str) -> ExamRow:
        """A figure as results.json has it. Raises KeyError where it is not there."""
        found = self._find(row, key)
        if found is None:
            raise KeyError(f"{row.key} has no {key}")
        return found

    def value_of(self, row: RowName, key: str) -> float:
        """The value of a figure. Raises KeyError: it is not there."""
        value = self.entry(row, key).value
        if value is None:
            raise KeyError(f"{row.key} has no value of {key}")
        return value

    def value(self, row: RowName, key: str) -> float | None:
        """A figure alone."""
        found = self._find(row, key)
        return None if found is None else found.value

    def _find(self, row: RowName, key: str) -> ExamRow | None:
        name = row.key
        return next((one for one in self.entries if one.row == name and one.figure == key), None)


def _arrays(finding: Finding) -> dict[str, np.ndarray]:
    """A figure's resamples and the draws that they are of."""
    estimate = finding.estimate
    return {finding.key: estimate.samples.astype(np.float32), f"draws:{finding.key}": np.array(estimate.draws_id)}


_MEASURED = ("labels", "metric", "value", "low", "high", "n", "n_people", "scale")  # of a figure made of others


def _exam_row(row: RowName, finding: Finding, about: Facts) -> ExamRow:
    """A figure as results.json has it; about: the run."""
    estimate, interval = finding.estimate, finding.estimate.interval()
    measured = ExamRow(
        name=row.name,
        metric=finding.metric,
        value=round(estimate.value, 5),
        low=_rounded(interval.low),
        high=_rounded(interval.high),
        n=estimate.n,
        n_people=estimate.n_people,
        task=finding.task,
        labels=finding.labels,
        seed=row.seed,
        reading=_reading(row, finding.task),
        row=row.key,
        patch=row.patch,
        scale=estimate.scale,
    )
    return ExamRow.from_json({**measured.to_json(), **about, "run": about.get("run") or row.key})


def _reading(row: RowName, task: str) -> str:
    return _WITHOUT_TOKENS.get(row.name, READINGS[task])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def compare(
    results: Results, ours: Sequence[RowName], theirs: Sequence[RowName], key: str, their_key: str | None = None
) -> RecipePaired | None:
    """Mean difference over seeds; low and high hold people, and seeds where there are two.

    their_key: the other rows' figure, where it is the same of the same people, read in another way. A floor without
    seeds stands for every seed. None where a figure is missing.
    """
    pairs = [
        (results.estimate(a, key), results.estimate(b, their_key or key)) for a, b in zip(ours, theirs, strict=True)
    ]
    measured = [
        (a, b)
        for a, b in zip(ours, theirs, strict=True)
        if results.value(a, key) is not None and results.value(b, their_key or key) is not None
    ]
    rows = ([a.key for a, _ in measured], [b.key for _, b in measured])
    known = [(a, replace(b, label_hash=a.label_hash)) for a, b in pairs if a is not None and b is not None]
    if not known:
        return _stored_difference(results, measured, key, their_key or key)
    if len(known) == 1:
        networks = paired_difference(*known[0])
        low, high, people = networks.low, networks.high, networks.n_people
    else:
        networks, recipe, _ = recipe_difference([a for a, _ in known], [b for _, b in known])
        low, high, people = recipe.low, recipe.high, networks.n_people
    difference = float(np.mean([a.value - b.value for a, b in known]))
    results.differences.remember(rows, (key, their_key or key), difference=difference, low=low, high=high)
    return RecipePaired(
        name=ours[0].name,
        metric=key,
        reference=theirs[0].name,
        difference=difference,
        low=low,
        high=high,
        n_people=people,
        seeds=len(known),
    )


def _stored_difference(
    results: Results, pairs: Sequence[tuple[RowName, RowName]], key: str, their_key: str
) -> RecipePaired | None:
    """The difference that an earlier run computed from the same values; None if none is stored."""
    if not pairs:
        return None
    values = [results.value_of(a, key) - results.value_of(b, their_key) for a, b in pairs]
    rows = ([a.key for a, _ in pairs], [b.key for _, b in pairs])
    record = results.differences.find(rows, (key, their_key), float(np.mean(values)))
    if record is None:
        return None
    ours, theirs = pairs[0]
    return RecipePaired(
        name=ours.name,
        metric=key,
        reference=theirs.name,
        difference=record["difference"],
        low=record["low"],
        high=record["high"],
        n_people=record.get("people"),
        seeds=len(pairs),
    )


def digits_of(key: str) -> int:
    """Digits after the point that a figure is shown with: errors are in um."""
    return 1 if "error_um" in key else 3


def difference_text(found: RecipePaired, digits: int) -> str:
    """What `compare` found, with its interval where there is one."""
    if found.low is None:
        return f"{found.difference:+.{digits}f}"
    return f"{found.difference:+.{digits}f} ({found.low:+.{digits}f} to {found.high:+.{digits}f})"
