"""Which questions of the exam count: those that its floors leave open and its ceilings show to be answerable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.exam.decoys import DECOYS

from octjepa.phantom import LESIONS

from .measurement_tasks import macro
from .results import NO_PATCH, SUPERVISED, Finding, LeftOut, Patch, Results, RowName
from .settings import MAX_CNN_FEW, MAX_INTENSITY, MIN_CNN

ADMITTED = "auroc_admitted"  # the metric: the mean over the admitted questions of a task
CNN = RowName(SUPERVISED, NO_PATCH)


class Question(NamedTuple):
    """One AUROC of the tasks eye_lesion and decoys; the verdict is None where a floor or ceiling is missing."""

    task: str
    metric: str
    name: str
    intensity: float | None
    ample: float | None
    few: float | None

    @property
    def admitted(self) -> bool | None:
        """Whether it passes all three bounds."""
        if self.intensity is None or self.ample is None or self.few is None:
            return None
        return self.intensity <= MAX_INTENSITY and self.ample >= MIN_CNN and self.few <= MAX_CNN_FEW


def questions(results: Results, patch: Patch) -> list[Question]:
    """All questions, with the floor that cuts `patch` and the ceilings."""
    floor, found = RowName("intensity", patch), []
    for task, names, prefix in (("eye_lesion", LESIONS, "has"), ("decoys", DECOYS, "decoy")):
        for name in names:
            metric = f"auroc_{name}"
            bounds = [
                results.value(row, f"{task}/{metric}/{labels}")
                for row, labels in ((floor, "30"), (CNN, "all"), (CNN, "30"))
            ]
            found.append(Question(task, metric, f"{prefix}: {name.replace('_', ' ')}", *bounds))
    return found


def admitted_means(results: Results, row: RowName, counted: Sequence[Question]) -> list[Finding | LeftOut]:
    """A row's means over the questions `counted` of each task; left out where one of them was."""
    found: list[Finding | LeftOut] = []
    for task in dict.fromkeys(one.task for one in counted):
        metrics = [one.metric for one in counted if one.task == task]
        for labels in sorted(results.labels(row, task), key=str):
            key = "all" if labels is None else str(labels)
            estimates = [results.estimate(row, f"{task}/{metric}/{key}") for metric in metrics]
            parts = [Finding(task, metric, labels, one) for metric, one in zip(metrics, estimates, strict=True) if one]
            missing = {metric for metric in metrics if metric not in {one.metric for one in parts}}
            if all(results.is_left_out(row, f"{task}/{metric}/{key}") for metric in missing):
                found.append(macro(parts, task, ADMITTED, labels, metrics))
    return found


def add_admitted_means(results: Results, patch: Patch, decided_by: Results | None = None) -> None:
    """Adds to every row that cuts `patch`, and to the ceiling, its means over the admitted questions.

    decided_by: the results whose floors and ceilings admit, where they are others.
    """
    rows = {one.row: one.row_name for one in results.entries}
    counted = [one for one in questions(decided_by or results, patch) if one.admitted]
    for row in rows.values():
        if row.patch in (patch, CNN.patch):
            results.extend(row, admitted_means(results, row, counted))
