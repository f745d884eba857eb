"""A run says whom it takes before it starts, and keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octjepa.progress import set_quiet
from octjepa.train.data import choose_cohort
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe


def test_a_run_keeps_the_flow_and_reports_it_at_its_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small_recipe(
        data={"balance": "site", "max_samples": 9}, train={"max_updates": 1}, checkpoint={"dir": None}
    )
    store = MemoryStore(recipe.preprocessing)
    pretrain(recipe, store, tmp_path / "run")
    outputs = capsys.readouterr()
    assert outputs.out == ""
    lines = outputs.err.splitlines()
    assert lines[0] == "training cohort"
    (choices,) = (line for line in lines if line.startswith("on "))
    assert "precision fp32 (the recipe asks for it), threads " in choices
    assert any(line.split()[:5] == ["split", "train", "12", "12", "12"] for line in lines)
    about = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert [stage["name"] for stage in about["flow"]["train"]] == ["store", "split", "patterns", "max_samples"]
    assert about["flow"]["train"][-1]["left"] == {"people": 9, "eyes": 9, "volumes": 9, "files": 9}
    assert about["flow"]["val"][-1]["left"]["volumes"] == 8
    assert sum(of["per_epoch"] for of in about["domains"].values()) == 9
    assert {name: of["volumes"] for name, of in about["domains"].items()}.keys() == {"UAB", "UW"}


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small_recipe()
    cohort, stream = choose_cohort(MemoryStore(recipe.preprocessing), recipe)
    set_quiet(True)
    try:
        cohort.print_flow()
    finally:
        set_quiet(False)
    assert capsys.readouterr().err == ""
    assert stream.volume_ids == cohort.train.volume_ids
