"""The run as a whole: exact resume, what stops it, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from octjepa.checkpoint import folder
from octjepa.distributed.signals import Interrupted
from octjepa.encoders import load_encoder
from octjepa.errors import CheckpointError, ContractError, OctjepaError, UsageError, WrongCheckpointError
from octjepa.files import read_json_lines
from octjepa.locks import writer_lock
from octjepa.outside import allow_outside
from octjepa.train import loop
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe

EVERY_2 = {"every_updates": 2}


def recipe_of(updates=6, **sections):
    train = {"max_updates": updates, "global_batch": 4, "base_lr": 1e-3, "precision": "fp32"}
    return small_recipe(**{"train": train, "checkpoint": EVERY_2, **sections})


def store_of(recipe):
    return MemoryStore(recipe.preprocessing)


def weights_of(run):
    newest = folder.list_checkpoints(run / "checkpoints")[-1]
    return folder.read_tensors(newest, "model.safetensors"), folder.read_tensors(newest, "optimiser.safetensors")


def assert_same_weights(one, other):
    for a, b in zip(weights_of(one), weights_of(other), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.slow
def test_a_run_leaves_what_the_contract_names(tmp_path):
    recipe = recipe_of()
    summary = pretrain(recipe, store_of(recipe), tmp_path / "run")
    for key in ("updates", "loss", "cosine", "baseline_cosine", "rankme", "volumes_per_second", "data_wait_share"):
        assert key in summary.to_json()
    assert set(summary.baseline_cosine) == {"constant", "position_mean", "copy_nearest"}
    assert (tmp_path / "run" / summary.checkpoint / "manifest.json").is_file()
    assert summary.skipped_updates == 0
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {"science_hash", "data_hash", "code_hash", "versions", "devices"} <= about.keys()
    lines = [line for line in read_json_lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["train/grad_norm"] > 0 and line["train/lr"] > 0 for line in lines)
    assert [path.name for path in folder.list_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]


@pytest.mark.slow
def test_without_held_out_people_it_runs_and_reports_what_it_validated_on(tmp_path, caplog):
    recipe = recipe_of(2)
    summary = pretrain(recipe, MemoryStore(recipe.preprocessing, train=12, val=0), tmp_path / "run")
    assert summary.validated_on == "train_fixed"
    assert "no validation people" in caplog.text
    lines = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    assert any("train_fixed/loss" in line for line in lines)
    assert not any("val/loss" in line for line in lines)


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_weights(tmp_path):
    recipe = recipe_of(4)
    for name in ("one", "two"):
        pretrain(recipe, store_of(recipe), tmp_path / name)
    assert_same_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_stop_and_resume_is_exact(tmp_path, monkeypatch):
    recipe = recipe_of(6)
    pretrain(recipe, store_of(recipe), tmp_path / "whole")
    honest, calls = loop.accumulate, []

    def stopping(*arguments):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(*arguments)

    monkeypatch.setattr(loop, "accumulate", stopping)
    with pytest.raises(Interrupted) as stopped:
        pretrain(recipe, store_of(recipe), tmp_path / "parts")
    assert stopped.value.exit_code == 143
    assert folder.list_checkpoints(tmp_path / "parts" / "checkpoints")[-1].name == "step-00000003"
    monkeypatch.setattr(loop, "accumulate", honest)
    pretrain(recipe, store_of(recipe), tmp_path / "parts", resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    losses = [
        [line["train/loss"] for line in read_json_lines(tmp_path / run / "metrics.jsonl") if "train/loss" in line]
        for run in ("whole", "parts")
    ]
    assert losses[0] == losses[1]


_CHILD = """
import sys
from pathlib import Path
from synthetic import MemoryStore, small_recipe
from octjepa.train.loop import pretrain
train = {"max_updates": 400, "global_batch": 4, "base_lr": 1e-3, "precision": "fp32"}
recipe = small_recipe(train=train, checkpoint={"every_updates": 2})
pretrain(recipe, MemoryStore(recipe.preprocessing), Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_kill_9_and_resume_is_exact(tmp_path, root):
    """The process is killed without warning while it writes; the run continues from its last whole checkpoint."""
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}:{root / 'tests' / 'support'}"}
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(tmp_path / "killed")], env=environment)
    saves = tmp_path / "killed" / "checkpoints"
    for _ in range(3000):
        if len(folder.list_checkpoints(saves)) >= 2:
            break
        time.sleep(0.1)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    reached = int(folder.list_checkpoints(saves)[-1].name.split("-")[1])
    recipe = recipe_of(400)
    stop_at = reached + 4
    for run, resume in (("killed", True), ("whole", False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "accumulate", _signal_at(stop_at))
            with pytest.raises(Interrupted):
                pretrain(recipe, store_of(recipe), tmp_path / run, resume=resume)
    remaining = [folder.list_checkpoints(tmp_path / run / "checkpoints")[-1] for run in ("killed", "whole")]
    assert remaining[0].name == remaining[1].name
    assert_same_weights(tmp_path / "killed", tmp_path / "whole")


def _signal_at(update):
    honest = loop.accumulate

    def accumulate(model, batch, recipe, runtime, now, micro):
        if now == update - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(model, batch, recipe, runtime, now, micro)

    return accumulate


@pytest.mark.slow
def test_a_run_without_checkpoints_cannot_be_resumed_and_writes_none(tmp_path):
    recipe = recipe_of(2, checkpoint={"dir": None})
    summary = pretrain(recipe, store_of(recipe), tmp_path / "run")
    assert summary.checkpoint is None
    assert not (tmp_path / "run" / "None").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    with pytest.raises(UsageError, match="cannot be resumed"):
        pretrain(recipe, store_of(recipe), tmp_path / "run", resume=True)
    with pytest.raises(UsageError, match="holds no run to resume"):
        pretrain(recipe, store_of(recipe), tmp_path / "other", resume=True)


@pytest.mark.slow
def test_a_finished_run_is_resumed_to_its_summary(tmp_path):
    recipe = recipe_of(2)
    summary = pretrain(recipe, store_of(recipe), tmp_path / "run")
    journal = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert pretrain(recipe, store_of(recipe), tmp_path / "run", resume=True) == summary
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == journal


@pytest.mark.slow
def test_continuing_with_other_code_is_logged_and_recorded(tmp_path, caplog):
    recipe, run = recipe_of(2), tmp_path / "run"
    pretrain(recipe, store_of(recipe), run)
    begun = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(begun | {"code_hash": "0" * 64}))
    pretrain(recipe, store_of(recipe), run, resume=True)
    assert "OTHER CODE" not in caplog.text  # the run has ended: nothing continues
    for _ in range(2):  # once for each change
        (run / "summary.json").unlink()
        pretrain(recipe, store_of(recipe), run, resume=True)
    assert caplog.text.count("continues from update 2 WITH OTHER CODE than it began with: code of octjepa 0000") == 1
    about = json.loads((run / "run.json").read_text())
    assert about["code_hash"] == "0" * 64
    assert about["continued"] == [{"from_update": 2, "code_hash": begun["code_hash"], "versions": begun["versions"]}]


@pytest.mark.slow
def test_a_kill_before_the_summary_doubles_no_line(tmp_path):
    recipe = recipe_of(2)
    pretrain(recipe, store_of(recipe), tmp_path / "run")
    journal = (tmp_path / "run" / "metrics.jsonl").read_text()
    (tmp_path / "run" / "summary.json").unlink()
    pretrain(recipe, store_of(recipe), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == journal


@pytest.mark.slow
def test_lost_checkpoints_stop_a_resume(tmp_path):
    recipe = recipe_of(6)
    pretrain(recipe, store_of(recipe), tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UsageError, match=r"wrote .*step-00000006, but .* holds no checkpoint"):
        pretrain(recipe, store_of(recipe), tmp_path / "run", resume=True)


@pytest.mark.slow
def test_a_run_stopped_before_its_first_checkpoint_starts_at_its_first_update(tmp_path, monkeypatch):
    recipe = recipe_of(4)
    pretrain(recipe, store_of(recipe), tmp_path / "whole")
    monkeypatch.setattr(loop, "accumulate", _failing_at(2))
    with pytest.raises(ZeroDivisionError):
        pretrain(recipe, store_of(recipe), tmp_path / "parts")
    monkeypatch.undo()
    assert folder.list_checkpoints(tmp_path / "parts" / "checkpoints") == []
    other = recipe_of(4, train={"max_updates": 4, "global_batch": 4, "base_lr": 5e-4, "precision": "fp32"})
    with pytest.raises(WrongCheckpointError, match=r"train\.base_lr"):
        pretrain(other, store_of(other), tmp_path / "parts", resume=True)
    pretrain(recipe, store_of(recipe), tmp_path / "parts", resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    updates = [line["update"] for line in read_json_lines(tmp_path / "parts" / "metrics.jsonl") if "train/loss" in line]
    assert updates == [1, 2, 3, 4]


def _failing_at(call):
    honest, calls = loop.accumulate, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == call:
            raise ZeroDivisionError
        return honest(*arguments)

    return failing


def test_half_a_launchers_environment_is_refused_rather_than_trained_into_one_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe = recipe_of(2)
    with pytest.raises(UsageError, match="RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"):
        pretrain(recipe, store_of(recipe), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_process_writes_a_run_at_a_time(tmp_path):
    recipe = recipe_of(2)
    (tmp_path / "run").mkdir()
    with writer_lock(tmp_path / "run"), pytest.raises(UsageError, match="another process is writing to"):
        pretrain(recipe, store_of(recipe), tmp_path / "run")


@pytest.mark.slow
def test_two_runs_do_not_share_a_checkpoint_folder(tmp_path):
    recipe = recipe_of(2, checkpoint={"dir": str(tmp_path / "shared"), "every_updates": 2})
    pretrain(recipe, store_of(recipe), tmp_path / "one")
    with allow_outside(tmp_path / "shared"):
        assert load_encoder(tmp_path / "one").dim == recipe.model.encoder_size.width
    with pytest.raises(UsageError, match="checkpoints of another run"):
        pretrain(recipe, store_of(recipe), tmp_path / "two")
    assert len(folder.list_checkpoints(tmp_path / "shared")) == 1


@pytest.mark.slow
def test_a_run_is_not_overwritten(tmp_path):
    recipe = recipe_of(2)
    pretrain(recipe, store_of(recipe), tmp_path / "run")
    with pytest.raises(UsageError, match="already holds a run"):
        pretrain(recipe, store_of(recipe), tmp_path / "run")


@pytest.mark.slow
def test_a_checkpoint_of_another_model_size_is_refused_with_the_difference(tmp_path):
    recipe = recipe_of(2)
    pretrain(recipe, store_of(recipe), tmp_path / "run")
    other = recipe_of(2, model={"size": "reference"})
    with pytest.raises(CheckpointError, match=r"model\.size: checkpoint 'test', recipe 'reference'"):
        pretrain(other, store_of(other), tmp_path / "run", resume=True)


@pytest.mark.slow
def test_other_data_on_resume_is_refused(tmp_path):
    recipe = recipe_of(2)
    pretrain(recipe, store_of(recipe), tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    fewer = MemoryStore(recipe.preprocessing, train=10, val=8)
    with pytest.raises(UsageError, match="no longer holds the 12 training volumes"):
        pretrain(recipe, fewer, tmp_path / "run", resume=True)


def test_a_store_of_another_contract_is_refused_with_the_difference(tmp_path):
    recipe = recipe_of(2)
    store = store_of(small_recipe(preprocessing={"flatten": "none"}))
    store.preprocessing = recipe.preprocessing.model_copy(update={"flatten": "none"})
    with pytest.raises(ContractError, match="flatten: store none, recipe quadratic"):
        pretrain(recipe, store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    recipe = recipe_of(6)
    honest, calls = folder.save_file, []

    def full(*arguments):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return honest(*arguments)

    monkeypatch.setattr(folder, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        pretrain(recipe, store_of(recipe), tmp_path / "run")
    saves = tmp_path / "run" / "checkpoints"
    assert [path.name for path in saves.iterdir()] == ["step-00000002"]
    monkeypatch.setattr(folder, "save_file", honest)
    assert pretrain(recipe, store_of(recipe), tmp_path / "run", resume=True).updates == 6


@pytest.mark.slow
def test_a_bad_update_is_skipped_and_named(tmp_path, monkeypatch):
    recipe = recipe_of(4)
    honest, calls = loop.accumulate, []

    def sometimes_bad(model, *arguments):
        measured = honest(model, *arguments)
        calls.append(1)
        if len(calls) == 2:
            next(model.predictor.parameters()).grad.fill_(float("nan"))
        return measured

    monkeypatch.setattr(loop, "accumulate", sometimes_bad)
    assert pretrain(recipe, store_of(recipe), tmp_path / "run").skipped_updates == 1
    lines = [line for line in read_json_lines(tmp_path / "run" / "metrics.jsonl") if "skipped" in line]
    assert [line["update"] for line in lines] == [2]
    assert len(lines[0]["skipped"]) == 4


def test_a_run_that_never_gives_a_finite_gradient_stops(tmp_path, monkeypatch):
    recipe = recipe_of(30)
    monkeypatch.setattr(
        loop,
        "accumulate",
        lambda *_: {"train/loss": torch.tensor(float("nan")), "train/cosine": torch.zeros(())},
    )
    with pytest.raises(OctjepaError, match=r"5 updates in a row from 1 on .* no checkpoint before them"):
        pretrain(recipe, store_of(recipe), tmp_path / "run")
