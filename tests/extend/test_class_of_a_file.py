"""An objective is a class of a file in the working folder: imported only with consent, and wrong classes are named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import call, run
from narrow_encoder import OVERRIDES
from octjepa.config import load_recipe
from octjepa.errors import UsageError
from octjepa.objectives.base import get_objective
from octjepa.outside import allow_outside
from octjepa.phantom import write_cohort
from short_pages import shorten_pages

CODE = """
from pathlib import Path

import torch.nn.functional as F
from octjepa.objectives.base import Objective
from octjepa.objectives.jepa import VJEPA

Path("imported").touch()


class Smooth(VJEPA):
    trivial_loss = 0.425

    def loss(self, predicted, target):
        return F.smooth_l1_loss(predicted.float(), target.float())


class NoLoss(Objective):
    trivial_loss = None


class NoTrivialLoss(Objective):
    def loss(self, predicted, target):
        return predicted.mean()


class Other:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, with `own_objectives.py`. Nothing of it stays imported."""
    (tmp_path / "own_objectives.py").write_text(CODE)
    (tmp_path / "their_objectives.py").write_text(CODE)  # imported by one test only: a class stays registered
    (tmp_path / "broken_objectives.py").write_text("import absent_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("own_objectives", "their_objectives", "broken_objectives"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.usefixtures("without_memory")
def test_a_class_of_a_file_is_planned_and_used(folder: Path) -> None:
    named = "own_objectives:Smooth"
    planned = call("plan", "tiny_cpu_vjepa", f"objective.name={named}", "--json")
    assert (planned.code, planned.err) == (0, planned.err)
    assert planned.json["tokens"] == call("plan", "tiny_cpu_vjepa", "--json").json["tokens"]
    with allow_outside(named):
        assert load_recipe("tiny_cpu_vjepa", [f"objective.name={named}"]).objective.name == named
    assert type(get_objective(named)).__name__ == "Smooth"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent_module:Smooth", "there is no module absent_module in this folder or among the installed packages"),
        (
            "own_objectives:Absent",
            "module own_objectives has no Absent; it defines Smooth, NoLoss, NoTrivialLoss, Other",
        ),
        ("own_objectives:Other", "is not a class derived from octjepa.objectives.base.Objective"),
        ("own_objectives:NoLoss", "has no method loss"),
        ("own_objectives:NoTrivialLoss", "does not state trivial_loss"),
        ("broken_objectives:Smooth", "cannot be imported: ModuleNotFoundError: No module named 'absent_library'"),
        ("own_objectives.Smooth", "unknown objective: one of "),
    ],
)
def test_what_is_wrong_with_a_class_is_one_line(folder: Path, name: str, message: str) -> None:
    done = call("plan", "tiny_cpu_vjepa", f"objective.name={name}")
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err


def test_a_recipe_of_another_person_imports_nothing(folder: Path) -> None:
    (folder / "theirs.yaml").write_text("extends: tiny_cpu_vjepa\nobjective: {name: 'their_objectives:Smooth'}\n")
    refused = call("plan", "theirs.yaml")
    assert refused.code == 2
    assert "so it was not imported" in refused.err
    with pytest.raises(UsageError, match=r"allow_outside"):
        load_recipe("theirs.yaml")
    assert not (folder / "imported").exists()
    with allow_outside():
        assert load_recipe("theirs.yaml").objective.name == "their_objectives:Smooth"
    assert (folder / "imported").exists()


@pytest.mark.slow
def test_a_run_is_trained_embedded_and_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pages(monkeypatch)
    named = "objective.name=own_objectives:Smooth"
    write_cohort(folder / "eyes", people=3)
    assert call("ingest", "eyes", "--store", "store", "--workers", 1, "--quiet").code == 0
    assert call("split", "store", "--by", "stratified").code == 0
    small = ("train.max_updates=2", "train.global_batch=4", *OVERRIDES, "--store", "store", "--out", "run", "--quiet")
    trained = call("pretrain", "tiny_cpu_vjepa", named, *small)
    assert trained.code == 0, trained.err
    embed = ("embed", "run", "--store", "store", "--out", "eyes.parquet", "--quiet")
    refused = run(*embed)  # another process, in which nothing was imported before
    assert refused.code == 2
    assert "own_objectives:Smooth" in refused.err
    assert call(*embed, "--allow-outside").code == 0
    assert call("report", "run", "--allow-outside").code == 0
