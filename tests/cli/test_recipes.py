"""The verbs of recipes, recipes that extend others, and what they are refused for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import call
from octjepa.config import load_recipe, parse_yaml
from octjepa.errors import RecipeError
from octjepa.locks import file_lock


def test_all_recipes_are_listed_with_their_verb() -> None:
    listed = {one["name"]: one for one in call("recipes", "list", "--json").json["recipes"]}
    assert {name: one["verb"] for name, one in listed.items()}.items() >= {
        ("tiny_cpu", "pretrain"),
        ("study_group", "finetune"),
        ("segment_decoder", "segment"),
    }
    assert all(one["about"] for one in listed.values())


def test_what_is_shown_is_the_recipe_with_its_overrides() -> None:
    assert call("recipes").out == call("recipes", "list").out
    assert call("recipes", "tiny_cpu").out == call("recipes", "show", "tiny_cpu").out
    about = [entry["about"] for entry in call("recipes", "list", "--json").json["recipes"]]
    assert all(sentence.endswith(".") for sentence in about), about
    shown = call("recipes", "show", "tiny_cpu", "train.base_lr=1e-4", "--json").json
    assert shown == load_recipe("tiny_cpu", ["train.base_lr=1e-4"]).model_dump(mode="json")
    assert parse_yaml(call("recipes", "show", "tiny_cpu", "train.base_lr=1e-4").out, "shown") == shown


def test_a_copy_is_the_same_recipe(tmp_path: Path) -> None:
    assert call("recipes", "copy", "tiny_cpu", tmp_path / "mine.yaml").code == 0
    again = call("recipes", "copy", "tiny_cpu", tmp_path / "again.yaml", "--json")
    assert again.json == {"recipe": "tiny_cpu", "path": str(tmp_path / "again.yaml")}
    copied = load_recipe(tmp_path / "mine.yaml")
    assert copied.model_copy(update={"name": "tiny_cpu"}) == load_recipe("tiny_cpu")
    for words, message in (
        (("copy", "tiny_cpu", tmp_path / "mine.yaml"), "exists: name a new file"),
        (("copy", "tiny_cpu", tmp_path / "mine"), "does not end in .yaml"),
        (("copy", "tiny_cpu", tmp_path / "absent" / "mine.yaml"), "cannot be written"),
        (("show", "tiny"), "no recipe 'tiny': choose one of eight_gpus, fine_cpu"),
    ):
        refused = call("recipes", *words)
        assert refused.code == 2
        assert message in refused.err


def test_a_copy_that_is_interrupted_leaves_no_part_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.yaml"
    with file_lock(mine):
        assert "another process is writing to" in call("recipes", "copy", "tiny_cpu", mine).err
    with monkeypatch.context() as interrupted:
        interrupted.setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGINT))
        assert call("recipes", "copy", "tiny_cpu", mine).code == 130
    assert list(tmp_path.iterdir()) == []
    assert call("recipes", "copy", "tiny_cpu", mine).code == 0


def test_a_recipe_extends_another_section_by_section(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("extends: tiny_cpu\ntrain: {base_lr: 1e-4}\n")
    (tmp_path / "mine.yaml").write_text("extends: ours.yaml\ntrain: {seed: 7}\n")
    base = load_recipe("tiny_cpu")
    mine = load_recipe(tmp_path / "mine.yaml")
    assert mine.name == "mine"
    assert (mine.train.base_lr, mine.train.seed) == (1e-4, 7)
    assert mine == base.model_copy(
        update={"name": "mine", "train": base.train.model_copy(update={"base_lr": 1e-4, "seed": 7})}
    )


def test_a_recipe_that_extends_itself_or_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(RecipeError, match=r"extends itself \(a.yaml -> b.yaml -> a.yaml\)"):
        load_recipe(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("extends: [tiny_cpu]\n")
    with pytest.raises(RecipeError, match="extends names one recipe"):
        load_recipe(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("extends: tiny\n")
    with pytest.raises(RecipeError, match="no recipe 'tiny'"):
        load_recipe(tmp_path / "a.yaml")


@pytest.mark.slow
def test_verbose_shows_what_is_logged_as_information() -> None:
    code = (
        "import logging, sys; from octjepa.cli import app\n"
        "try: app(sys.argv[1:])\nexcept SystemExit: pass\nlogging.getLogger('octjepa.part').info('chosen')"
    )
    for words, seen in (((), ""), (("-v",), "chosen\n")):
        run = [sys.executable, "-c", code, *words, "recipes", "list"]
        assert subprocess.run(run, capture_output=True, text=True, check=True).stderr == seen
