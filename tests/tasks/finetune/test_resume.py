"""Stopped, killed, or on two processes: a tuning computes what one that was left alone does."""

from __future__ import annotations

import json
import signal

import pytest
import torch

import planted
from command_line import call
from octjepa.checkpoint.folder import list_checkpoints, read_tensors
from octjepa.distributed.signals import Interrupted
from octjepa.errors import OctjepaError, UsageError, WrongCheckpointError
from octjepa.files import read_json_lines
from octjepa.tasks.finetune import training
from octjepa.tasks.finetune.training import TuningTask
from planted import PlantedStore, write_labels
from ranks import finish, start_ranks

pytestmark = pytest.mark.slow

QUICK = ("stages.head=2", "stages.last=2", "stages.all=4", "validate_every=2", "save_every=3", "micro_batch=4")


def weights_of(out):
    (folder,) = list_checkpoints(out / "tuned")
    return {
        name: value for file in ("model", "head") for name, value in read_tensors(folder, f"{file}.safetensors").items()
    }


def assert_same(out, other):
    ours, theirs = weights_of(out), weights_of(other)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert read_json_lines(out / "metrics.jsonl") == read_json_lines(other / "metrics.jsonl")


@pytest.fixture(scope="module")
def alone(tune, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "out"
    return out, tune(out, *QUICK)


def ending(monkeypatch, update, end):
    """Before the gradient of `update` (from 0), `end` happens."""
    honest = TuningTask.losses

    def losses(task, learner, batch, now, micro_batch):
        if now == update:
            end()
        return honest(task, learner, batch, now, micro_batch)

    monkeypatch.setattr(TuningTask, "losses", losses)


def test_a_stopped_tuning_says_143_and_goes_on_to_the_same_weights(alone, tune, tmp_path, monkeypatch) -> None:
    out, message = alone
    with monkeypatch.context() as patch:
        ending(patch, 3, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Interrupted, match="stopped after update 4 of 8; its checkpoint is written") as stopped:
            tune(tmp_path / "out", *QUICK)
    assert stopped.value.exit_code == 143
    resumed = tune(tmp_path / "out", *QUICK, resume=True)
    assert_same(out, tmp_path / "out")
    assert resumed["metrics"] == message["metrics"]
    assert (
        tune(tmp_path / "out", *QUICK, resume=True)["summary"] == resumed["summary"]
    )  # finished: nothing is done again
    with pytest.raises(WrongCheckpointError, match="since it was begun, the recipe changed"):
        tune(tmp_path / "out", *QUICK, "head_lr=0.5", resume=True)
    other = write_labels(tmp_path / "other.tsv", mark=[(number + (number < 4)) % 2 for number in range(40)])
    with pytest.raises(WrongCheckpointError, match="since it was begun, the labels changed"):
        tune(tmp_path / "out", *QUICK, labels=other, resume=True)
    with pytest.raises(UsageError, match="already holds a fine-tuning: add --resume"):
        tune(tmp_path / "out", *QUICK)


def test_a_killed_tuning_goes_on_from_its_last_checkpoint(alone, tune, source, tmp_path, monkeypatch) -> None:
    out, _ = alone

    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    with monkeypatch.context() as patch:
        ending(patch, 5, kill)
        with pytest.raises(Killed):
            tune(tmp_path / "out", *QUICK)
    assert [folder.name for folder in list_checkpoints(tmp_path / "out" / "checkpoints")] == ["step-00000003"]
    found = call("inspect", tmp_path / "out", "--json").json
    assert not found["finished"]
    result = [found[name] for name in ("stopped_in", "last_update", "resumes_after_update", "updates")]
    assert result == ["tuned", 5, 3, 8]
    with pytest.raises(WrongCheckpointError, match="since it was begun, the recipe changed"):
        tune(tmp_path / "out", *QUICK, "head_lr=0.5", resume=True)
    other = write_labels(
        tmp_path / "other.tsv", mark=[(number + (number < 4)) % 2 for number in range(40)]
    )  # training people
    with pytest.raises(WrongCheckpointError, match="since it was begun, the labels changed"):
        tune(tmp_path / "out", *QUICK, labels=other, resume=True)
    tune(tmp_path / "out", *QUICK, resume=True)
    assert_same(out, tmp_path / "out")


def test_a_damaged_checkpoint_is_reported_of_and_the_one_before_it_taken(
    alone, tune, tmp_path, monkeypatch, caplog
) -> None:
    out, _ = alone
    with monkeypatch.context() as patch:
        ending(patch, 4, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Interrupted):
            tune(tmp_path / "out", *QUICK)
    states = list_checkpoints(tmp_path / "out" / "checkpoints")
    assert [folder.name for folder in states] == ["step-00000003", "step-00000005"]
    newest = states[-1] / "best.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    tune(tmp_path / "out", *QUICK, resume=True)
    assert "NOT USED" in caplog.text
    assert_same(out, tmp_path / "out")


def test_volumes_that_the_store_holds_in_another_form_are_not_gone_on_with(tune, tmp_path, monkeypatch) -> None:
    """A corrected spacing leaves the contents of the files as they are."""
    with monkeypatch.context() as patch:
        ending(patch, 3, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Interrupted):
            tune(tmp_path / "out", *QUICK)
    other = PlantedStore()
    other.table = other.table.assign(chunk_hash="another")
    with pytest.raises(WrongCheckpointError, match=r"what the store makes of these volumes \(their spacing.* changed"):
        tune(tmp_path / "out", *QUICK, resume=True, store=other)


@pytest.mark.parametrize("at", ["losses", "validate"])
def test_the_death_of_a_loader_process_is_reported_wherever_the_tuning_is(tune, tmp_path, monkeypatch, at) -> None:
    """torch raises it in the midst of what the main process does just then."""

    def interrupted(*_):
        raise RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. ")

    monkeypatch.setattr(TuningTask, at, interrupted)
    result = r"a loader process was killed \(SIGKILL\).*\(of a fine-tuning: loader_workers\).*continue with --resume"
    with pytest.raises(OctjepaError, match=result) as error:
        tune(tmp_path / "out", *QUICK, "loader_workers=1")
    assert error.value.exit_code == 1


def test_early_stopping_ends_in_the_last_stage_alone_and_keeps_the_best_look(tune, tmp_path, monkeypatch) -> None:
    losses = iter([0.5, 0.9, 0.6, 0.7])  # at updates 2, 4, ...: the last stage begins after update 4
    seen = []
    honest = training.predict_split

    def look(network, *others):
        seen.append({name: value.clone() for name, value in network.state_dict().items()})
        return honest(network, *others)

    monkeypatch.setattr(training, "predict_split", look)
    monkeypatch.setattr(training, "validation_loss", lambda *_: (next(losses), None))
    tune(tmp_path / "out", *QUICK, "patience=1")
    looks = [line for line in read_json_lines(tmp_path / "out" / "metrics.jsonl") if "val_loss" in line]
    assert [line["update"] for line in looks] == [2, 4, 6]
    assert [folder.name for folder in list_checkpoints(tmp_path / "out" / "tuned")] == ["step-00000002"]
    retained = weights_of(tmp_path / "out")["heads.0.linear.weight"]
    assert torch.equal(retained, seen[0]["heads.0.linear.weight"])
    assert not torch.equal(retained, seen[-1]["heads.0.linear.weight"])


def test_updates_without_a_finite_gradient_change_nothing_and_end_the_run_when_they_do_not_end(
    tune, tmp_path, monkeypatch
) -> None:
    honest = training.each_loss
    calls = iter(range(100))
    monkeypatch.setattr(training, "each_loss", lambda *a: honest(*a) * (float("nan") if next(calls) in (2, 3) else 1))
    message = tune(tmp_path / "out", *QUICK)
    assert any("skipped 1 update without a finite gradient" in text for text in message["notes"])
    assert all(torch.isfinite(value).all() for value in weights_of(tmp_path / "out").values())
    monkeypatch.setattr(training, "each_loss", lambda *a: honest(*a) * float("nan"))
    with pytest.raises(Exception, match="5 updates in a row without a finite gradient"):
        tune(tmp_path / "broken", *QUICK)


TWO = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from octjepa.errors import OctjepaError
from octjepa.tasks.finetune.fit import FinetuneInputs, finetune_store
from octjepa.tasks.finetune.recipe import load_recipe
from planted import PlantedStore
torch.set_num_threads(1)
source, out, *overrides = sys.argv[1:]
dist.init_process_group("gloo")
told = {}
def tune(out, *more):
    recipe = load_recipe("finetune", [*overrides, *more])
    source_folder = Path(source)
    inputs = FinetuneInputs(
        source_folder / "encoder.safetensors", PlantedStore(), source_folder / "labels.tsv", ["mark"]
    )
    return finetune_store(recipe, inputs, Path(out)).to_json()
told["said"] = tune(out)
for name, more in (("again", ()), ("odd", ("batch=7",))):
    try:
        tune(out if name == "again" else out + "odd", *more)
    except OctjepaError as error:
        told[name] = [error.exit_code, str(error)]
print(json.dumps(told))
dist.destroy_process_group()
"""


def test_two_processes_tune_the_weights_of_one(alone, source, tmp_path) -> None:
    out, message = alone
    ended = finish(start_ranks(TWO, source, tmp_path / "out", *planted.QUICK, *QUICK))
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
    result = [json.loads(text.splitlines()[-1]) for _, text, _ in ended]
    assert result[0]["said"] == result[1]["said"]
    assert result[0]["said"]["metrics"] == message["metrics"]
    assert_same(out, tmp_path / "out")
    assert [one["again"][0] for one in result] == [2, 2]
    assert "cannot be divided evenly over 2 processes" in result[0]["odd"][1]


FEWER = """
import json, os, sys, time
from pathlib import Path
import torch
from octjepa.cli import app
from octjepa.store import Store
from octjepa.tasks.finetune import fit
from planted import PlantedStore
torch.set_num_threads(1)
Store.open = staticmethod(lambda _: PlantedStore())
honest = fit._finetune
def late(*arguments):  # one process leaves each tuning well after the other
    try:
        return honest(*arguments)
    finally:
        time.sleep(float(os.environ["RANK"]))
fit._finetune = late
source, out, *overrides = sys.argv[1:]
inputs = ["--from", f"{source}/encoder.safetensors", "--labels", f"{source}/labels.tsv", "--store", "memory"]
options = ["--target", "mark", "--labelled", "6,998,999", "--out", out, "--json"]
app(["finetune", "finetune", *overrides, *inputs, *options])
"""


def test_two_processes_tune_with_fewer_labels_and_leave_out_the_same_numbers_of_people(source, tmp_path) -> None:
    stages = ("stages.head=2", "stages.last=0", "stages.all=0")
    ended = finish(start_ranks(FEWER, source, tmp_path / "out", *planted.QUICK, *stages))
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
    result = json.loads(ended[0][1])["labelled"]
    assert {count: bool(found["rows"]) for count, found in result.items()} == {"6": True, "998": False, "999": False}
    assert "998 labelled people were requested" in result["998"]["left_out"][0]
    assert json.loads((tmp_path / "out" / "labelled.json").read_text()) == result
