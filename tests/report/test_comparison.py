"""Several runs on one page: their curves, last figures and what differs between their recipes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from octjepa.errors import UsageError
from octjepa.report import write_report
from octjepa.report.comparison import compare_runs, recipe_differences, run_labels
from octjepa.report.contents import read_run
from octjepa.report.figures.curves import compared_charts


@pytest.fixture
def other(made: Path, tmp_path: Path) -> Path:
    """A copy of the run with another learning rate, loss and data."""
    run = Path(shutil.copytree(made / "run", tmp_path / "other"))
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "data_hash": "e" * 64}))
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("max_updates: 2", "max_updates: 3"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["val/loss"] = 0.25
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_figures_and_recipes_are_laid_beside_each_other(made: Path, other: Path) -> None:
    found = compare_runs([read_run(made), read_run(other)])
    assert found.labels == ["run", "other"]
    assert [(one.updates, one.loss, one.baseline) for one in found.runs] == [(2, 0.4, 0.5), (2, 0.25, 0.5)]
    assert found.differences == [("train.max_updates", ["2", "3"])]
    assert found.different_data
    assert {chart.key for chart, _ in found.charts} >= {"train/loss", "train/lr"}
    assert all("other" in drawing for _, drawing in found.charts)


def test_a_curve_that_one_run_alone_has_is_not_drawn() -> None:
    lines = [{"update": 1, "train/lr": 0.1}, {"update": 2, "train/lr": 0.2}]
    drawn = compared_charts([("one", lines), ("two", [*lines, {"update": 2, "volumes_per_second": 3.0}])])
    assert [chart.key for chart, _ in drawn] == ["train/lr"]


def test_runs_of_one_name_are_numbered_and_absent_keys_shown(made: Path) -> None:
    run = read_run(made / "run")
    assert run_labels([run, run]) == ["run (1)", "run (2)"]
    assert recipe_differences([{"a": "1", "b": "2"}, {"a": "1"}]) == [("b", ["2", "-"])]


@pytest.mark.slow
def test_the_page_has_the_comparison_only_where_it_was_wanted(made: Path, other: Path, tmp_path: Path) -> None:
    from command_line import call

    shutil.copytree(made / "run", tmp_path / "alone")
    out = tmp_path / "page.html"
    done = call("report", tmp_path / "alone", "--compare", other, "--out", out, "--json")
    assert done.code == 0, done.err
    assert "Comparison of runs" in out.read_text()
    assert "train.max_updates" in out.read_text()
    write_report(tmp_path / "alone", out)
    assert "Comparison of runs" not in out.read_text()
    with pytest.raises(UsageError, match="not a pretraining run"):
        write_report(tmp_path / "alone", out, compare=[made / "store"])
    with pytest.raises(UsageError, match="nothing to --compare"):
        write_report(made / "store", out, compare=[other])
