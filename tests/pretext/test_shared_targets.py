"""Several masks of one view share a pass of the target encoder (`masks.per_target`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octjepa.config import load_recipe
from octjepa.distributed.runtime import Runtime
from octjepa.errors import RecipeError
from octjepa.model import VJEPA3D
from octjepa.train.guards import check_leak
from octjepa.train.loop import pretrain
from octjepa.train.plan import plan
from octjepa.train.step import accumulate
from octjepa.views.loader import Batch, TrainingDataset, collate
from octjepa.views.sample import make_sample
from synthetic import DEVICE, MemoryStore, small_recipe, volume

SAMPLES, MASKS = 4, 3


def recipe_of(count: int = MASKS, objective: str = "vjepa", **parts):
    return small_recipe(objective={"name": objective}, masks={"per_target": count}, **parts)


def batch_of(count: int = MASKS) -> Batch:
    recipe = recipe_of(count)
    store = MemoryStore(recipe.preprocessing)
    stream = TrainingDataset(store, recipe, list(store.volumes))
    return collate([stream[i] for i in range(SAMPLES)])


def model_of(objective: str) -> VJEPA3D:
    torch.manual_seed(0)
    return VJEPA3D.from_recipe(recipe_of(objective=objective)).to(DEVICE)


def one_mask(batch: Batch, number: int) -> Batch:
    rows = slice(number * SAMPLES, (number + 1) * SAMPLES)
    return batch._replace(context=batch.context[rows], target=batch.target[rows])


def test_the_first_mask_is_the_only_one_of_a_recipe_without() -> None:
    several, single = batch_of(), batch_of(1)
    for name in ("context_view", "target_view", "positions", "grid_index", "tissue"):
        assert torch.equal(getattr(several, name), getattr(single, name)), name
    first = one_mask(several, 0)
    assert torch.equal(first.context, single.context)
    assert torch.equal(first.target, single.target)
    assert several.context.shape == (MASKS * SAMPLES, single.context.shape[1])
    assert not torch.equal(one_mask(several, 1).context, first.context)


def test_validation_has_one_mask() -> None:
    recipe = recipe_of()
    sample = make_sample(volume(recipe.preprocessing, 0), recipe, None)
    assert sample.further == ()
    assert len(make_sample(volume(recipe.preprocessing, 0), recipe, 0).further) == MASKS - 1


@pytest.mark.parametrize("objective", ["vjepa", "vjepa_dense", "mae"])
def test_the_update_is_the_mean_over_masks_and_the_target_encoder_runs_once(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, batch, runtime = recipe_of(objective=objective), batch_of(), Runtime("fp32")
    model = model_of(objective)
    passes = []
    compute_targets = model.compute_targets
    monkeypatch.setattr(model, "compute_targets", lambda *x: passes.append(len(x[0])) or compute_targets(*x))
    loss = accumulate(model, batch, recipe, runtime)["train/loss"]
    assert passes == [SAMPLES]
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    parts = [accumulate(model, one_mask(batch, number), recipe, runtime)["train/loss"] for number in range(MASKS)]
    assert float(loss) == pytest.approx(float(torch.stack(parts).mean()), rel=1e-5)
    expected = [p.grad / MASKS for p in model.parameters() if p.grad is not None]
    for ours, mean in zip(found, expected, strict=True):
        assert torch.allclose(ours, mean, atol=1e-6, rtol=1e-4)


def test_micro_batches_hold_every_mask_of_their_samples() -> None:
    batch = batch_of()
    part = batch.micro_batch(1, 3)
    for number in range(MASKS):
        assert torch.equal(part.context[2 * number : 2 * number + 2], one_mask(batch, number).context[1:3])
    recipe, model, runtime = recipe_of(), model_of("vjepa"), Runtime("fp32")
    gradients = []
    for micro in (SAMPLES, 2, 1):
        model.zero_grad(set_to_none=True)
        accumulate(model, batch, recipe, runtime, micro_batch=micro)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)
    assert torch.allclose(gradients[0], gradients[2], atol=1e-6)


@pytest.mark.slow
def test_it_trains_and_the_plan_counts_every_mask(tmp_path: Path) -> None:
    check_leak(model_of("vjepa"), batch_of())
    costs = [plan(recipe_of(count)).flops_per_volume for count in (1, 2, 3)]
    assert costs[1] - costs[0] == costs[2] - costs[1]  # of a mask
    assert costs[1] < 2 * costs[0]  # the target is not paid again
    recipe = recipe_of(train={"max_updates": 2, "global_batch": 4, "precision": "fp32"})
    summary = pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run")
    assert np.isfinite(summary.loss)


def test_an_objective_that_sees_every_position_refuses_it() -> None:
    with pytest.raises(RecipeError, match=r"masks\.per_target 2: with objective normalized_mse"):
        load_recipe("tiny_cpu", ["objective.name=normalized_mse", "masks.per_target=2"])
