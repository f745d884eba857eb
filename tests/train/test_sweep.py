"""A sweep: every combination in its folder, all checked first, resumed by the same command, failures listed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from octjepa.errors import OctjepaError, RecipeError, UsageError
from octjepa.locks import writer_lock
from octjepa.recipe import Recipe
from octjepa.train.sweep import parse_sweep, plan_sweep, run_name, sweep

AXES = {"train.base_lr": ["1e-4", "3e-4"], "model.depth": ["1", "2"]}


def test_values_are_split_at_commas_outside_brackets() -> None:
    found = parse_sweep(["train.base_lr=1e-4, 3e-4", "data.devices=[a,b],[c]"])
    assert found == {"train.base_lr": ["1e-4", "3e-4"], "data.devices": ["[a,b]", "[c]"]}


@pytest.mark.parametrize("text", ["", "train.base_lr", "train.base_lr=1", "=1,2", "a=1,1", "a=1,,2"])
def test_what_is_no_sweep_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="key=value,value"):
        parse_sweep([text])
    with pytest.raises(UsageError, match="key=value,value"):
        parse_sweep(["a=1,2", "a=3,4"])


def test_folders_are_named_by_their_values() -> None:
    assert run_name({"train.base_lr": "1e-4", "model.depth": "6"}) == "base_lr=1e-4,depth=6"
    assert run_name({"a.lr": "1", "b.lr": "2"}) == "a.lr=1,b.lr=2"
    assert run_name({"checkpoint.dir": "../x y"}) == "dir=.._x_y"


def test_all_recipes_are_checked_before_the_first_run(tmp_path: Path) -> None:
    plans = plan_sweep("tiny_cpu", ["train.max_updates=4"], AXES)
    assert list(plans) == [f"base_lr={lr},depth={depth}" for lr in ("1e-4", "3e-4") for depth in "12"]
    assert {(recipe.train.base_lr, recipe.train.max_updates) for _, recipe in plans.values()} == {(1e-4, 4), (3e-4, 4)}
    with pytest.raises(RecipeError, match=r"train\.base_lr"):
        sweep("tiny_cpu", [], {"train.base_lr": ["1e-4", "high"]}, None, tmp_path / "out", None)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="twice"):
        plan_sweep("tiny_cpu", [], {"train.base_lr": ["1e-4", "0.0001"]})


def test_a_sweep_goes_on_and_lists_the_best_first_and_failures_last(tmp_path: Path) -> None:
    resumed: list[bool] = []

    def train(recipe: Recipe, store: Any, out: Path, resume: bool) -> dict[str, Any]:
        resumed.append(resume)
        if recipe.train.base_lr == 3e-4 and not resume:
            out.mkdir()
            (out / "run.json").write_text("{}")
            raise OctjepaError("the disk is full\nmore")
        out.mkdir(exist_ok=True)
        (out / "run.json").write_text("{}")
        lines = [{"monitor/layer_accuracy": 0.1}, {"monitor/layer_accuracy": 1000 * recipe.train.base_lr}]
        (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return {"cosine": 0.5, "loss": 0.1, "rankme": 9.0, "updates": 4, "encoder": "target"}

    given = ("tiny_cpu", [], {"train.base_lr": ["1e-4", "3e-4"]}, None, tmp_path / "out")
    first = sweep(*given, train)  # type: ignore[arg-type]
    assert [run["state"] for run in first["runs"]] == ["finished", "failed: the disk is full"]
    again = sweep(*given, train)  # type: ignore[arg-type]
    assert resumed == [False, False, True, True]
    assert [(run["run"], run["probe"]) for run in again["runs"]] == [("base_lr=3e-4", 0.3), ("base_lr=1e-4", 0.1)]
    with Path(again["table"]).open(encoding="utf-8") as file:
        table = list(csv.DictReader(file, delimiter="\t"))
    assert [(row["train.base_lr"], row["probe"], row["state"]) for row in table] == [
        *(("3e-4", "0.3", "finished"), ("1e-4", "0.1", "finished")),
    ]
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["runs"] == again["runs"]


@pytest.mark.slow
def test_one_sweep_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    """Two would train the same runs and overwrite each other's table."""

    def train(recipe: Recipe, store: Any, out: Path, resume: bool) -> dict[str, Any]:
        with pytest.raises(UsageError, match="another process is writing to"), writer_lock(tmp_path / "out"):
            pass
        out.mkdir()
        (out / "metrics.jsonl").write_text("")
        return {"updates": 1}

    made = sweep("tiny_cpu", [], {"train.base_lr": ["1e-4", "3e-4"]}, None, tmp_path / "out", train)  # type: ignore[arg-type]
    assert [run["state"] for run in made["runs"]] == ["finished"] * 2
    with writer_lock(tmp_path / "out"), pytest.raises(UsageError, match="another process is writing to"):
        sweep("tiny_cpu", [], {"train.base_lr": ["1e-4", "3e-4"]}, None, tmp_path / "out", train)  # type: ignore[arg-type]
    assert not (tmp_path / "out" / ".lock").exists()
