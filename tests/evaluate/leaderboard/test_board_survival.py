"""A board of times to an event: Cox regression for every entry and baseline, concordance, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from invented_cohort import board_with
from octjepa.errors import RecipeError, UsageError
from octjepa.evaluate.leaderboard.board import Board
from octjepa.report.leaderboard import write_leaderboard
from octjepa.tasks.finetune.recipe import load_recipe


@pytest.fixture
def followed(made: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """The cohort of `made`, whose lesion brings the event twenty times sooner; follow-up ends at 3 years."""
    monkeypatch.setattr("octjepa.evaluate.linear_knn.ALPHA_GRID", (10.0, 0.1))
    table, path, _ = made
    labels = pd.read_csv(path, sep="\t", dtype={"person_id": str})
    rng = np.random.default_rng(3)
    times = rng.exponential(1, len(labels)) * np.where(labels["lesion0"] == 1, 0.5, 10.0) + 0.01
    labels.assign(years=np.minimum(times, 3.0).round(3), converted=(times < 3).astype(int)).to_csv(
        path, sep="\t", index=False
    )
    return table, path


def board_of(labels: Path, *entries: Path, **options: Any) -> Board:
    options = {"task": "survival", "event": "converted", "probes": ("linear",), "bootstrap": 50, **options}
    return board_with([str(one) for one in entries], labels, ["years"], None, labels.parent / "kept", **options)


def test_what_knows_the_risk_stands_higher_and_baselines_are_there(followed: Any, tmp_path: Path) -> None:
    table, labels = followed
    board = board_of(labels, table("good", 6.0))
    rows = {row["name"]: row for row in board.rows}
    assert {row["metric"] for row in board.rows} == {"concordance"}
    assert rows["good"]["low"] > 0.55 > rows["untrained"]["low"]
    assert rows["majority"]["value"] == 0.5
    assert {"untrained", "histogram", "covariates"} <= set(rows)
    (good,) = board.comparisons
    assert (good["name"], good["reference"], good["metric"]) == ("good", "untrained", "concordance")
    assert good["low"] > 0
    assert {row["group"] for row in board.details[0]["left_out"]["rows"]} == {"one", "two"}
    assert board.details[0]["reliability"] == []
    files = write_leaderboard(board.result, tmp_path)
    assert any("concordance" in path.read_text() for path in files if path.suffix == ".md")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"event": None}, "needs --task survival and --event"),
        ({"task": "auto"}, "needs --task survival and --event"),
        ({"probes": ("linear", "knn")}, "only the linear probe takes survival"),
        ({"event": "years"}, "an event is 1"),
    ],
)
def test_half_a_survival_task_is_refused(followed: Any, options: dict[str, Any], message: str) -> None:
    table, labels = followed
    with pytest.raises(UsageError, match=message):
        board_of(labels, table("good", 6.0), **options)


def test_fine_tuning_names_the_verbs_that_read_times_to_an_event() -> None:
    with pytest.raises(RecipeError, match=r"octjepa probe \(or leaderboard\) --task survival --event COLUMN"):
        load_recipe("study_group", ["task=survival"])
