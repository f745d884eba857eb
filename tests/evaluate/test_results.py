"""Typed results have one JSON form, with the keys that commands write, and come back from it unchanged."""

from __future__ import annotations

import pytest

from octjepa.errors import UsageError
from octjepa.evaluate.results import (
    BoardRow,
    CorrectedPaired,
    HeadPaired,
    HeadRow,
    ProbePaired,
    RecipePaired,
    Row,
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
            {"name": "a", "target": "t", "probe": "linear", "pool": "mean", "metric": "auroc", "reference": "b",
             **DIFFERENCE, "undefined": 0, "n_people": 9, "p": None},
        ),
        (
            TunedPaired,
            {"name": "a", "target": "t", "metric": "auroc", "against": "frozen", "reference": "b",
             "reference_probe": "linear", **DIFFERENCE, "undefined": 0, "n_people": 9, "p": 0.5},
        ),
        (HeadPaired, {"name": "a", "reference": "b", "metric": "dice", **DIFFERENCE, "n_people": 9}),
        (
            RecipePaired,
            {"name": "a", "reference": "b", "target": "t", "metric": "auroc", **DIFFERENCE, "recipe_low": None,
             "recipe_high": 0.2, "n_people": 9, "seeds": 3},
        ),
        (
            CorrectedPaired,
            {"name": "a", "reference": "b", "target": "t", "metric": "auroc", **DIFFERENCE, "recipe_low": None,
             "recipe_high": 0.2, "n_people": 9, "seeds": 3, "p_of": "recipes", "p": 0.01, "p_holm": 0.02,
             "q_bh": 0.02},
        ),
    ],
)  # fmt: skip
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
