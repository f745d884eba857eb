"""The test predictions of a probe case by case, so that a user can look at the scans behind a metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pandas as pd

from octjepa.evaluate.cases import Cases
from octjepa.evaluate.results import ResultKey
from octjepa.evaluate.survival import TASK as SURVIVAL
from octjepa.evaluate.targets import Target
from octjepa.files import write_atomic
from octjepa.metrics.scores import Predictions
from octjepa.record import Record, to_json


@dataclass(frozen=True)
class CasePrediction(Record):
    """The prediction for one case of one target: a row of predictions.parquet.

    truth, predicted: a class, or a quantity as text; truth is empty if it is not known. classes: of the target, empty
    for a quantity. scores: a probability for each class, or the quantity. volume_id: the case's first volume. visit: if
    cases are visits; else the table has no such column.
    """

    level: str
    target: str
    split: str
    person_id: str
    eye: str
    volume_id: str
    volumes: int
    truth: str
    predicted: str
    classes: list[str]
    scores: list[float]
    visit: str | None = None
    KEYS: ClassVar[tuple[str, ...]] = (
        *("level", "target", "split", "person_id", "eye", "volume_id", "visit", "volumes"),
        *("truth", "predicted", "classes", "scores"),
    )
    OMITTED: ClassVar[tuple[str, ...]] = ("visit",)


def list_predictions(
    predicted: Mapping[ResultKey, tuple[Target, Predictions]], headline: ResultKey, cases: Cases, volumes: pd.DataFrame
) -> list[CasePrediction]:
    """A row for each test case and target of the result whose name, probe and pool are those of `headline`.

    Survival, which predicts a risk and no value, is left out.
    """
    rows = []
    for key, (target, predictions) in predicted.items():
        if target.task == SURVIVAL or replace(key, target=headline.target) != headline:
            continue
        decisions = predictions.predicted_classes() if target.classes else predictions.scores[:, 0]
        for position, truth, decision, scores in zip(
            target.indices["test"], predictions.truth, decisions, predictions.scores, strict=True
        ):
            members = cases.members[position]
            first = volumes.iloc[int(members[0])]
            texts = [
                target.classes[int(value)] if target.classes else repr(float(value)) for value in (truth, decision)
            ]
            rows.append(
                CasePrediction(
                    level=cases.level,
                    target=target.name,
                    split="test",
                    person_id=str(first["person_id"]),
                    eye="" if cases.level == "person" else str(first["eye"]),
                    volume_id=str(first["volume_id"]),
                    volumes=len(members),
                    truth=texts[0],
                    predicted=texts[1],
                    classes=list(target.classes),
                    scores=scores.tolist(),
                    visit=str(first["visit"]) if cases.by_visit else None,
                )
            )
    return rows


def write_case_predictions(path: Path, rows: Sequence[CasePrediction]) -> None:
    """Writes `rows` as Parquet."""
    write_atomic(path, lambda file: pd.DataFrame(to_json(rows)).to_parquet(file, index=False))
