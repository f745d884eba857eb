"""Typed results have one JSON form, with the keys that commands write, and come back from it unchanged."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from octjepa.errors import UsageError
from octjepa.evaluate.case_predictions import CasePrediction, write_case_predictions
from octjepa.evaluate.results import (
    BoardRow,
    CorrectedPaired,
    HeadPaired,
    HeadRow,
    ProbePaired,
    RecipePaired,
    Row,
    SubgroupResult,
    TargetSummary,
    TrainingDetails,
    TunedPaired,
    WithFewerLabels,
    read_paired,
    read_row,
)

VALUES = {"value": 0.8, "low": 0.7, "high": 0.9, "n": 20, "n_people": 10}
PROBED = {"name": "a", "target": "t", "probe": "linear", "pool": "mean", "metric": "auroc", **VALUES}
DIFFERENCE = {"difference": 0.1, "low": None, "high": None}


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Row, PROBED),
        (BoardRow, {**PROBED, "primary": True, "seeds": 1, "seed_sd": None, "recipe_low": None, "recipe_high": None}),
        (HeadRow, {"name": "a", "metric": "dice", "class": "drusen", **VALUES, "undefined": 2}),
    ],
)
def test_rows_come_back_from_their_json_form(kind: type[Row], data: dict[str, object]) -> None:
    row = read_row(data)
    assert type(row) is kind
    assert row.to_json() == data
    assert list(row.to_json()) == list(data)
    assert kind.from_json({**data, "of_a_newer_version": 1}) == row


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (
            ProbePaired,
            {
                "name": "a",
                "target": "t",
                "probe": "linear",
                "pool": "mean",
                "metric": "auroc",
                "reference": "b",
                **DIFFERENCE,
                "undefined": 0,
                "n_people": 9,
                "p": None,
            },
        ),
        (
            TunedPaired,
            {
                "name": "a",
                "target": "t",
                "metric": "auroc",
                "against": "frozen",
                "reference": "b",
                "reference_probe": "linear",
                **DIFFERENCE,
                "undefined": 0,
                "n_people": 9,
                "p": 0.5,
            },
        ),
        (HeadPaired, {"name": "a", "reference": "b", "metric": "dice", **DIFFERENCE, "n_people": 9}),
        (
            RecipePaired,
            {
                "name": "a",
                "reference": "b",
                "target": "t",
                "metric": "auroc",
                **DIFFERENCE,
                "recipe_low": None,
                "recipe_high": 0.2,
                "n_people": 9,
                "seeds": 3,
            },
        ),
        (
            CorrectedPaired,
            {
                "name": "a",
                "reference": "b",
                "target": "t",
                "metric": "auroc",
                **DIFFERENCE,
                "recipe_low": None,
                "recipe_high": 0.2,
                "n_people": 9,
                "seeds": 3,
                "p_of": "recipes",
                "p": 0.01,
                "p_holm": 0.02,
                "q_bh": 0.02,
            },
        ),
    ],
)
def test_differences_come_back_from_their_json_form(kind: type, data: dict[str, object]) -> None:
    pair = read_paired(data)
    assert type(pair) is kind
    assert pair.to_json() == data
    assert list(pair.to_json()) == list(data)  # CSV headings are in this order


def test_a_row_without_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="lacks name"):
        read_row({"metric": "auroc", "value": 0.5})


def test_results_with_fewer_labels_hold_records() -> None:
    data = {"rows": [PROBED], "comparisons": [], "left_out": ["too few"]}
    read = WithFewerLabels.from_json(data)
    assert read.rows == (Row.from_json(PROBED),)
    assert read.to_json() == data


MEASURED = {"low": None, "high": None, "n": 20, "n_people": 10}
GROUPS = {
    "metric": "auroc",
    "groups": {"f": {"value": 0.8, **MEASURED, "people_by_class": {"0": 4, "1": 6}}},
    "equity_scaled": {"value": 0.7, **MEASURED},
    "left_out": {"m": "2 test people"},
}
RATES = {f"{rate}{end}": 0.9 for rate in ("sensitivity", "specificity") for end in ("", "_low", "_high")}


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (TargetSummary, {"target": "t", "task": "regression", "label_hash": "h", "counts": {"train": 3}}),
        (
            TargetSummary,
            {
                "target": "t",
                "task": "binary",
                "label_hash": "h",
                "classes": ["0", "1"],
                "counts": {"train": [3, 4]},
                "class_weights": [1.0, 2.0],
            },
        ),
        (SubgroupResult, {"name": "a", "target": "t", "probe": "linear", "pool": "mean", "column": "sex", **GROUPS}),
        (
            TrainingDetails,
            {
                "name": "a",
                "seed": 1,
                "target": "t",
                "reliability": [{"stated": 0.1, "happened": 0.2, "low": None, "high": 0.3, "n": 4, "n_people": 2}],
                "decision_curve": [
                    {"threshold": 0.1, "model": 0.2, "all": 0.1, "none": 0.0, "over_best": 0.1, "low": 0.0, "high": 0.2}
                ],
                "threshold": {
                    "chosen_for_specificity": 0.9,
                    "threshold": 0.4,
                    "sensitivity": {"value": 0.8, **MEASURED},
                    "specificity": {"value": 0.9, **MEASURED},
                },
                "between_sites": [{"chosen_at": "a", "used_at": "b", "threshold": 0.4, **RATES, "n": 9, "n_people": 8}],
                "by_group": {"device": GROUPS},
                "left_out": {
                    "rows": [
                        {
                            "group": "one",
                            "with_it": 0.8,
                            "without_it": 0.7,
                            "drop": 0.1,
                            "low": None,
                            "high": None,
                            "n": 9,
                            "n_people": 8,
                        }
                    ],
                    "mean_drop": {"drop": 0.1, "low": None, "high": None, "groups": 1},
                    "left_out": {},
                },
                "subgroups": [{"column": "sex", **GROUPS}],
            },
        ),
    ],
)
def test_records_within_records_come_back_with_their_types(kind: type, data: dict[str, object]) -> None:
    record = kind.from_json(data)
    assert record.to_json() == data
    assert list(record.to_json()) == list(data)
    if kind is TrainingDetails:
        assert record.by_group["device"].groups["f"].people_by_class == {"0": 4, "1": 6}
        assert record.left_out.mean_drop.groups == 1
        assert record.threshold.sensitivity.value == 0.8


@pytest.mark.parametrize("visit", [None, "v1"])
def test_a_table_of_case_predictions_has_visits_only_if_cases_are_visits(visit: str | None, tmp_path: Path) -> None:
    row = CasePrediction("eye", "t", "test", "1", "OD", "a", 2, "1", "0", ["0", "1"], [0.6, 0.4], visit)
    write_case_predictions(tmp_path / "predictions.parquet", [row])
    columns = list(pd.read_parquet(tmp_path / "predictions.parquet"))
    first = ["level", "target", "split", "person_id", "eye", "volume_id", *(["visit"] if visit else [])]
    assert columns == [*first, "volumes", "truth", "predicted", "classes", "scores"]
