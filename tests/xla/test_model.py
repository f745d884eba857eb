"""Every objective, bf16, recomputation, the leak check and the frozen encoder by torch_xla, held against the CPU."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from octjepa.distributed import xla
from octjepa.encoders import PretrainedEncoder
from octjepa.model import VJEPA3D
from octjepa.objectives.loss import token_grid_positions, training_loss
from octjepa.recipe import Recipe
from octjepa.train.guards import PretextAlarm, check_leak
from octjepa.views.loader import Batch, TrainingDataset, training_batches
from synthetic import MemoryStore, small_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def small(**sections: dict) -> Recipe:
    return small_recipe(tokens={"budget": 12}, train={"global_batch": 2}, **sections)


def first_batch(recipe: Recipe) -> Batch:
    store = MemoryStore(recipe.preprocessing)
    return next(training_batches(TrainingDataset(store, recipe, list(store.volumes)), 0, 1, workers=0))


def loss_and_norm(recipe: Recipe, device: torch.device, bf16: bool = False) -> list[float]:
    torch.manual_seed(0)
    model, batch = VJEPA3D.from_recipe(recipe).to(device), first_batch(recipe)
    inputs = batch.inputs(device)
    with torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext():
        outcome = model.predict(*inputs)
    grid_positions = token_grid_positions(batch.grid_index.to(device), recipe.grid)
    loss, _ = training_loss(recipe.objective, outcome, grid_positions, *inputs[3:], recipe.grid, update=1)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if device.type == "xla":
        xla.sync()
    return torch.stack([loss.detach(), norm]).tolist()


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("vjepa_dense", {"variance_covariance": 0.04, "sigreg": 0.1}),
        ("normalized_mse", {}),
        ("mae", {}),
    ],
)
def test_loss_and_gradient_of_an_objective(name: str, sections: dict, xla_device: torch.device) -> None:
    recipe = small(objective={"name": name, **sections})
    by_xla, by_cpu = (loss_and_norm(recipe, device) for device in (xla_device, torch.device("cpu")))
    assert by_xla == pytest.approx(by_cpu, rel=1e-5)


def test_bf16_and_recomputation(xla_device: torch.device) -> None:
    """bf16 products are rounded in another order: loss within 1e-3, norm within 1e-2 of itself."""
    whole = loss_and_norm(small(), torch.device("cpu"), bf16=True)
    again = loss_and_norm(small(machine={"recompute": True}), xla_device, bf16=True)
    assert again[0] == pytest.approx(whole[0], rel=1e-3)
    assert again[1] == pytest.approx(whole[1], rel=1e-2)


def test_the_leak_check_sees_a_leak(xla_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small()
    model, batch = VJEPA3D.from_recipe(recipe).to(xla_device), first_batch(recipe)
    check_leak(model, batch)
    honest = VJEPA3D.predict

    def peeking(self, context_patches, target_patches, positions, context, target):
        everything = torch.arange(positions.shape[1], device=positions.device).expand(len(positions), -1)
        return honest(self, context_patches, target_patches, positions, everything, target)

    monkeypatch.setattr(VJEPA3D, "predict", peeking)
    with pytest.raises(PretextAlarm, match="context_leak"):
        check_leak(model, batch)


def test_a_frozen_encoder_gives_the_same_features(xla_device: torch.device) -> None:
    recipe = small()
    torch.manual_seed(0)
    encoder = PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, "of the test")
    volume = MemoryStore(recipe.preprocessing).read("volume0000")
    by_cpu = encoder.tokens(volume).features
    by_xla = encoder.to(xla_device).tokens(volume).features
    np.testing.assert_allclose(by_xla, by_cpu, atol=1e-5)
