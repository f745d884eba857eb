"""Subgroups that the user names: a column of the label table or of the volumes, or bands of a quantity such as age.

`--subgroups sex,age:50,65` gives, for every group of test people, the metrics with intervals clustered by person. A
group with too few people of a class is listed with its count and not scored: its figure would be noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Shaped

from octjepa.errors import UsageError
from octjepa.evaluate.labels import label_columns, numbers_of, read_labels
from octjepa.evaluate.subgroups import SubgroupScores, subgroup_scores
from octjepa.evaluate.targets import Target
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.scores import PRIMARY_METRIC, TASK_METRICS, Predictions

MIN_PEOPLE_PER_CLASS = 10
MAX_GROUPS = 20
# Columns of the volumes that a label table need not repeat.
_OF_VOLUMES = ("age", "clinical_site", "device", "eye")
Groups = Mapping[str, Shaped[np.ndarray, " cases"]]  # column -> group of every case, "" where it is not known


@dataclass(frozen=True)
class SubgroupColumn:
    """A column, and the edges of its bands (none: every value is a group)."""

    name: str
    edges: tuple[float, ...] = ()

    def group_of(self, text: str) -> str:
        """The group of a value: "under 50", "50 to under 65", "65 and over"; "" of nothing. Raises UsageError."""
        if not self.edges or not text:
            return text
        numbers = numbers_of([text])
        if numbers is None:
            raise UsageError(f"--subgroups {self.name}: {text!r} is no number, and bands need numbers: drop the edges")
        band = int(np.searchsorted(self.edges, numbers[0], side="right"))
        low, high = (f"{self.edges[at]:g}" if 0 <= at < len(self.edges) else "" for at in (band - 1, band))
        return f"{low} to under {high}" if low and high else f"under {high}" if high else f"{low} and over"


def parse_subgroups(text: str | None) -> tuple[SubgroupColumn, ...]:
    """The columns in a list such as "sex,age:50,65": numbers after a colon are edges of bands. Raises UsageError."""
    found: list[tuple[str, list[float]]] = []
    for part in (text or "").split(",") if text is not None else ():
        name, colon, edge = (piece.strip() for piece in part.rpartition(":"))
        is_edge = not colon and bool(found) and bool(found[-1][1])
        numbers = numbers_of([edge]) if colon or is_edge else None
        if numbers is not None and colon and name:
            found.append((name, [float(numbers[0])]))
        elif numbers is not None and is_edge:
            found[-1][1].append(float(numbers[0]))
        elif not colon and edge:
            found.append((edge, []))
        else:
            raise UsageError(f"--subgroups {text!r}: give columns, with edges of bands after a colon, as sex,age:50,65")
    for name, edges in found:
        if sorted(set(edges)) != edges:
            raise UsageError(f"--subgroups {name}: the edges of its bands do not rise")
    if len({name for name, _ in found}) < len(found):
        raise UsageError(f"--subgroups {text!r} names a column twice")
    return tuple(SubgroupColumn(name, tuple(edges)) for name, edges in found)


def read_groups(columns: Sequence[SubgroupColumn], labels_path: str | Path, frame: pd.DataFrame) -> Groups:
    """The group of every case of `frame` (person_id, eye, ...) in every column; the label table takes precedence.

    A person whose two eyes differ in a column belongs to no group of it at the level of people. Raises UsageError: a
    column that neither has, a band of what is no number, more than MAX_GROUPS groups.
    """
    if not columns:
        return {}
    in_labels = label_columns(labels_path)
    of_volumes = [name for name in _OF_VOLUMES if name in frame.columns]
    for column in columns:
        if column.name not in (*in_labels, *of_volumes):
            raise UsageError(
                f"--subgroups {column.name}: {labels_path} has no such column, it has {', '.join(in_labels)}; of the "
                f"volumes {', '.join(of_volumes)} are known"
            )
    named = [column.name for column in columns if column.name in in_labels]
    values = read_labels(labels_path, named).values if named else {}
    groups: dict[str, np.ndarray] = {}
    for column in columns:
        if column.name in values:
            cells = [_value(values[column.name], *key) for key in zip(frame["person_id"], frame["eye"], strict=True)]
        else:
            cells = ["" if pd.isna(cell) else str(cell) for cell in frame[column.name]]
        groups[column.name] = np.array([column.group_of(cell) for cell in cells], dtype=object)
        count = len(set(groups[column.name].tolist()) - {""})
        if count > MAX_GROUPS:
            raise UsageError(
                f"--subgroups {column.name} has {count} values, at most {MAX_GROUPS} are groups: of a quantity give "
                f"the edges of bands, as {column.name}:50,65"
            )
    return groups


def _value(values: Mapping[tuple[str, str], str], person: str, eye: str) -> str:
    """The text for a person and eye; of a person without an eye the text that both eyes share, else ""."""
    if eye:
        return values.get((person, eye), "")
    texts = {values[person, side] for side in ("OD", "OS", "") if (person, side) in values}
    return texts.pop() if len(texts) == 1 else ""


def score_groups(
    groups: Groups,
    target: Target,
    predictions: Predictions,
    people: Sequence[str],
    draws: Draws,
    metrics: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """{column, metric, groups, equity_scaled, left_out} for every column and metric, as `scores_as_dict` has them.

    people: of the test cases of `target`. metrics: None for all of the task.
    """
    shown = [name for name in TASK_METRICS[target.task] if metrics is None or name in metrics]
    names = shown or [PRIMARY_METRIC[target.task]]
    scored = []
    for column, values in groups.items():
        of_test = values[target.indices["test"]]
        for metric in names:
            found = subgroup_scores(
                metric, predictions, of_test, draws, list(people), target.label_hash, MIN_PEOPLE_PER_CLASS
            )
            scored.append({"column": column, **scores_as_dict(metric, found, target, of_test, people)})
    return scored


def scores_as_dict(
    metric: str, scores: SubgroupScores, target: Target, groups: np.ndarray, people: Sequence[str]
) -> dict[str, Any]:
    """Plain data of `scores`: by group the figure, its interval, cases, people and `people_by_class`; what is left out.

    groups, people: of the test cases.
    """
    names, ids = np.array([str(group) or "unknown" for group in groups]), np.asarray(people)

    def by_class(name: str) -> dict[str, int]:
        truth = target.values["test"]
        return {
            of_class: len(set(ids[(names == name) & (truth == code)].tolist()))
            for code, of_class in enumerate(target.classes)
        }

    return {
        "metric": metric,
        "groups": {
            name: {**estimate.as_dict(), "people_by_class": by_class(name)} for name, estimate in scores.groups.items()
        },
        "equity_scaled": None if scores.scaled is None else scores.scaled.as_dict(),
        "left_out": scores.left_out,
    }
