"""A second loss next to the truth: an objective of pretraining on volumes of a store, in the same updates."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from octjepa.config import load_recipe
from octjepa.distributed.runtime import Runtime
from octjepa.encoders import load_encoder
from octjepa.errors import RecipeError, UsageError
from octjepa.objectives.base import get_objective
from octjepa.store import Store
from octjepa.tasks.encoder_command import starting_encoder
from octjepa.tasks.truth import train, training
from octjepa.tasks.truth.network import TruthNetwork
from octjepa.tasks.truth.training import TruthSettings, TruthTask, validation_volumes
from octjepa.tasks.truth.unlabelled import Unlabelled, unlabelled_recipe
from octjepa.train.engine import MicroLoss, accumulate_gradients
from octjepa.train.learner import Learner
from octjepa.train.step import batch_losses
from synthetic import MemoryStore

PACKAGED = load_encoder("phantom-tiny")
RECIPE = PACKAGED.recipe
STORE = MemoryStore(RECIPE.preprocessing, train=6, val=2)
FEW_TOKENS = ("tokens.budget=64", "masks.target_share=1.0")


def _task(objective: str, weight: float = 1.0, updates: int = 4) -> TruthTask:
    torch.manual_seed(0)
    encoder = load_encoder("phantom-tiny")
    unlabelled = Unlabelled(unlabelled_recipe(RECIPE, objective, 2, FEW_TOKENS), STORE, encoder.network, weight)
    encoder.network.requires_grad_(True)
    network = TruthNetwork(encoder.network, RECIPE.tokens.patch_size)
    settings = TruthSettings(updates, batch=2, uses=2, token_counts=(32,), learning_rate=1e-3)
    return TruthTask(network, RECIPE, settings, Runtime("fp32"), unlabelled=unlabelled)


@pytest.mark.parametrize("objective", ["mae", "vjepa"])
def test_the_loss_is_that_of_the_truth_plus_the_weighted_loss_of_pretraining(objective: str) -> None:
    task = _task(objective, weight=0.5)
    assert task.unlabelled is not None
    learner = Learner("truth", task.trained, task.optimizer, 4)
    batch = next(task.batches(0))
    both = [float(loss.detach()) for loss in task.losses(learner, batch, 0, 2)]
    assert batch.unlabelled is not None
    alone = [float(loss.detach()) for loss in task.losses(learner, training.replace(batch, unlabelled=None), 0, 2)]
    of_pretraining = [
        float(part.metrics["train/loss"])
        for part in batch_losses(task.unlabelled.model, batch.unlabelled, task.unlabelled.recipe, Runtime("fp32"))
    ]
    assert both == pytest.approx([*alone, 0.5 * of_pretraining[0]])
    parts = [float(loss.detach()) for loss in task.losses(learner, batch, 0, 1)]
    assert len(parts) == 4
    assert sum(parts[:2]) == pytest.approx(both[0], rel=1e-6)
    assert sum(parts[2:]) == pytest.approx(both[1], rel=1e-5)


@pytest.mark.parametrize("objective", ["mae", "vjepa"])
def test_one_encoder_learns_from_both_losses(objective: str) -> None:
    task = _task(objective)
    assert task.unlabelled is not None
    model = task.unlabelled.model
    assert model.context_encoder is task.network.encoder
    torch.nn.init.normal_(task.network.heads.weight, std=0.02)  # heads of zeros give the encoder no gradient
    learner = Learner("truth", task.trained, task.optimizer, 4)
    batch = next(task.batches(0))
    gradients = []
    for loss in task.losses(learner, batch, 0, 2):
        loss.backward()
        gradients.append(task.network.encoder.embed.weight.grad.clone())
        task.optimizer.zero_grad()
    assert all(bool(gradient.abs().sum() > 0) for gradient in gradients)
    assert not torch.equal(*gradients)

    accumulate_gradients(task.trained, (MicroLoss(loss, {}) for loss in task.losses(learner, batch, 0, 2)))
    task.begin_update(0)
    before = {name: value.clone() for name, value in model.target_encoder.state_dict().items()}
    task.optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.target_encoder.state_dict().items())
    # The EMA target of update 0 follows. A hundredth of four updates is less than one, so the target is the student.
    task.begin_update(1)
    student, target = (encoder.embed.weight for encoder in (model.context_encoder, model.target_encoder))
    assert torch.equal(target, student)
    assert not torch.equal(target, before["embed.weight"])


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on `STORE`, with a save after every update and one validation volume."""

    def run(options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train", *options.split()])
        return train.main()

    monkeypatch.setattr(training, "validation_volumes", lambda recipe, count: validation_volumes(recipe, 1))
    monkeypatch.setattr(
        train, "TruthSettings", partial(TruthSettings, save_every=1, validate_every=2, token_counts=(32,))
    )
    monkeypatch.setattr(Store, "open", lambda path: STORE)
    return run


@pytest.mark.slow
def test_a_resumed_combined_run_has_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    # vjepa: the state also holds a predictor and an EMA target, which starts to follow slowly.
    objective = "vjepa objective.ema_base=0.5 objective.ema_final=0.9"

    def run(folder: Path, more: str = "") -> int:
        options = f"--out {folder} --updates 3 --batch 2 --uses 2 --precision fp32 --learning-rate 1e-3"
        return command(f"{options} --store store {more} --with {objective} {' '.join(FEW_TOKENS)}")

    assert run(tmp_path / "whole") == 0
    begin = TruthTask.begin_update

    def killed(task: TruthTask, update: int) -> Any:
        if update == 2:
            raise RuntimeError("killed")
        return begin(task, update)

    with monkeypatch.context() as patch:
        patch.setattr(TruthTask, "begin_update", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path / "parts")
    assert run(tmp_path / "parts") == 0
    whole, parts = (load_encoder(tmp_path / name / "encoder") for name in ("whole", "parts"))
    for name, weights in whole.network.state_dict().items():
        assert torch.equal(weights, parts.network.state_dict()[name]), name
    seen = {f"volume{number:04d}" for number in range(len(STORE.volumes))} & whole.recorded_training
    assert 0 < len(seen) < len(STORE.volumes)  # the training split
    assert whole.recorded_training >= PACKAGED.recorded_training
    assert whole.recipe.model_copy(update={"name": RECIPE.name}) == RECIPE

    # Another weight is another run, and a combined run is not the run of the truth alone.
    assert run(tmp_path / "parts", more="--weight 0.5") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--with jepa --store store", "error: unknown objective 'jepa': one of "),
        ("--with truth --store store", "error: truth learns from the true class of every voxel, which no store holds"),
        ("--with mae", "error: --with mae learns from volumes without labels: add --store STORE"),
        ("--store store", "error: --store belongs to a second loss, and none is named"),
        ("masks.ratio=0.5", "error: masks.ratio=0.5 belongs to a second loss, and none is named"),
        ("--with mae --store store --weight 0", "error: a weight of 0.0 for mae: expected a positive number"),
        (
            "--with mae --store store tokens.patch_size=[4,8,16]",
            "error: tokens.patch_size=[4,8,16] does not change the loss of mae: the encoder and the options of this ",
        ),
    ],
)
def test_a_wrong_second_loss_is_one_line(
    options: str, message: str, command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(f"--out {tmp_path / 'run'} --updates 2 --batch 2 --uses 2 {options}") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "override",
    [
        *("model.position_unit=mm", "model.rope_base=100", "model.width=96", "model.warm_start=phantom-tiny"),
        *("train.base_lr=0.5", "train.max_updates=7", "machine.micro_batch=1", "monitor.volumes=3"),
    ],
)
def test_keys_that_the_second_loss_does_not_use_are_refused(override: str) -> None:
    with pytest.raises(UsageError, match=rf"{override} does not change the loss of mae: .* Leave it out, or use keys"):
        unlabelled_recipe(RECIPE, "mae", 2, [override])


def test_keys_of_the_second_loss_change_it() -> None:
    overrides = [*FEW_TOKENS, "model.predictor_depth=1", "data.patterns=[line]", "views.flip_fast=0.5"]
    recipe = unlabelled_recipe(RECIPE, "vjepa", 2, [*overrides, "objective.ema_base=0.5"])
    assert (recipe.tokens.budget, recipe.model.predictor_depth, recipe.objective.ema_base) == (64, 1, 0.5)
    assert recipe.train.seed == RECIPE.train.seed
    assert unlabelled_recipe(RECIPE, "vjepa", 2, overrides, seed=7).train.seed == 7


def test_random_weights_depend_on_the_seed() -> None:
    hashes = [
        starting_encoder(argparse.Namespace(init="phantom-tiny", random=True, seed=seed)).weights_hash()
        for seed in (1, 1, 2)
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_store_of_another_grid_is_refused(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finer = RECIPE.preprocessing.model_copy(update={"target_spacing_mm": (0.36, 0.0078, 0.0235)})
    monkeypatch.setattr(Store, "open", lambda path: MemoryStore(finer, train=4, val=2))
    assert command(f"--out {tmp_path / 'run'} --with mae --store store") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: two sources with different grids: store memory was made with another prep")
    assert "target_spacing_mm" in lines[0]


def test_the_truth_is_no_objective_of_a_recipe() -> None:
    with pytest.raises(RecipeError, match=r"objective.name: truth learns from the true class of every voxel"):
        load_recipe("tiny_cpu", ["objective.name=truth"])
    with pytest.raises(UsageError, match=r"python -m octjepa.tasks.truth.train draws phantoms that have it"):
        get_objective("truth")


def test_the_teacher_of_an_objective_is_refused() -> None:
    with pytest.raises(UsageError, match=r"objective.teacher is not possible next to the truth"):
        unlabelled_recipe(RECIPE, "vjepa", 2, ["objective.teacher=phantom-tiny"])
