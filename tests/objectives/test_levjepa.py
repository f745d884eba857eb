"""LeVJEPA: its two terms against their definitions, a collapse that is seen and undone, and a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octjepa.config import load_recipe
from octjepa.distributed.runtime import Runtime
from octjepa.encoders import load_encoder
from octjepa.errors import RecipeError
from octjepa.files import read_json_lines
from octjepa.model import VJEPA3D
from octjepa.model.vjepa3d import grid_positions
from octjepa.objectives.base import get_objective
from octjepa.objectives.loss import training_loss
from octjepa.objectives.regularisers import sigreg
from octjepa.recipe import ModelSize, ObjectiveRecipe, Recipe
from octjepa.train.guards import CollapseAlarms, check_leak
from octjepa.train.loop import pretrain
from octjepa.train.monitor import MonitorSet, run_monitor
from octjepa.views.loader import TrainingDataset, collate
from synthetic import MemoryStore, small_recipe

GRID = (2, 4, 4)
EYES, MASKS = 8, 2


def recipe_of(**objective: float) -> Recipe:
    return small_recipe(
        objective={"name": "levjepa", **objective},
        masks={"ratio": 0.5, "random": 1.0, "tubes": 0, "blocks": 0, "runs": 0, "per_target": MASKS},
        train={"max_updates": 3, "global_batch": 8, "base_lr": 1e-3, "precision": "fp32"},
    )


def inputs_of(seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    patches = torch.randn(EYES, 32, 1024) + torch.randn(EYES, 1, 1024)
    order = torch.stack([torch.randperm(32) for _ in range(MASKS * EYES)])
    return patches, patches, grid_positions(GRID).expand(EYES, -1, -1), order[:, :16], order[:, 16:]


def model_of(seed: int = 0) -> VJEPA3D:
    torch.manual_seed(seed)
    return VJEPA3D("levjepa", ModelSize(48, 2, 2, 24, 1, 2))


def test_the_loss_is_invariance_between_the_views_of_a_volume_and_sigreg_of_each_view_over_volumes() -> None:
    model, (patches, _, positions, context, target) = model_of(), inputs_of()
    outcome = model.predict(patches, patches, positions, context, target)
    projected = {}
    for mask in range(MASKS):
        for view, index in enumerate((context, target)):
            for eye in range(EYES):
                shown = index[mask * EYES + eye]
                features = model.context_encoder(patches[eye : eye + 1, shown], positions[eye : eye + 1, shown])
                projected[mask, view, eye] = model.predictor(features.mean(dim=1, keepdim=True))[0, 0]
    centres = [torch.stack([projected[m, v, eye] for m in range(MASKS) for v in (0, 1)]).mean(0) for eye in range(EYES)]
    distances = [(value - centres[eye]).square().mean() for (_, _, eye), value in projected.items()]
    spreads = [
        sigreg(torch.stack([projected[mask, view, eye] for eye in range(EYES)]), step=5)
        for mask in range(MASKS)
        for view in (0, 1)
    ]
    invariance, spread = torch.stack(distances).mean(), torch.stack(spreads).mean()
    loss, parts = training_loss(ObjectiveRecipe(name="levjepa"), outcome, positions, context, target, GRID, update=5)
    assert parts["hidden"] == pytest.approx(float(invariance.detach()), rel=1e-4)
    assert parts["sigreg"] == pytest.approx(float(spread.detach()), rel=1e-4)
    assert torch.allclose(loss, invariance + 0.05 * spread, rtol=1e-4)
    # The centres carry a gradient here, and none in the objective: both gradients are the same.
    wanted = torch.autograd.grad(invariance + 0.05 * spread, model.context_encoder.embed.weight)[0]
    found = torch.autograd.grad(loss, model.context_encoder.embed.weight)[0]
    assert torch.allclose(found, wanted, atol=1e-3 * float(wanted.abs().max()))


@torch.no_grad()
def test_views_that_are_equal_have_no_invariance_loss_and_others_do() -> None:
    model, (patches, _, positions, context, target) = model_of(), inputs_of()
    same = context[:EYES].repeat(MASKS, 1)
    loss = get_objective("levjepa").loss
    equal = model.predict(patches, patches, positions, same, same)
    assert float(loss(equal.predicted, equal.target)) < 1e-10
    other = model.predict(patches, patches, positions, context, target)
    assert float(loss(other.predicted, other.target)) > 1e-5
    # The second view reads the second patches: another half of the B-scans, or other intensity changes.
    shifted = model.predict(patches, patches + 1, positions, same, same)
    assert float(loss(shifted.predicted, shifted.target)) > 1e-5


def spread_after(updates: int, weight: float) -> float:
    """Standard deviation of projections over volumes, mean over features, after training nearly equal ones."""
    model, inputs = model_of(), inputs_of()
    with torch.no_grad():
        model.predictor.layers[-1].weight.mul_(0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recipe = ObjectiveRecipe(name="levjepa", sigreg=weight)
    for update in range(updates):
        outcome = model.predict(*inputs)
        optimizer.zero_grad()
        training_loss(recipe, outcome, *inputs[2:], GRID, update)[0].backward()
        optimizer.step()
    return float(model.predict(*inputs).target[:EYES, 0].std(dim=0).mean().detach())


@pytest.mark.slow
def test_sigreg_spreads_projections_that_have_collapsed_and_without_it_they_stay_alike() -> None:
    start = spread_after(0, 0.05)
    spread = spread_after(20, 0.05)
    assert spread > 20 * start
    assert spread > 10 * spread_after(20, 0.0)


def test_a_collapsed_encoder_trips_an_alarm_and_has_a_large_sigreg() -> None:
    recipe = recipe_of()
    store = MemoryStore(recipe.preprocessing)
    runtime = Runtime("fp32")
    torch.manual_seed(0)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    chosen = MonitorSet.choose(store, recipe, list(store.volumes), 8)
    alarm = "constant_solution"
    bias = torch.randn(recipe.model.encoder_size.width)
    healthy = run_monitor(model, runtime, chosen, 0)
    for encoder in (model.context_encoder, model.target_encoder):
        with torch.no_grad():
            encoder.norm.weight.mul_(1e-3)
            encoder.norm.bias.copy_(bias)
    collapsed = run_monitor(model, runtime, chosen, 0)
    assert alarm in CollapseAlarms(recipe.objective, 0).check(collapsed, 100)
    assert alarm not in CollapseAlarms(recipe.objective, 0).check(healthy, 100)


def test_the_projection_of_a_view_depends_on_its_own_tokens_only() -> None:
    recipe = recipe_of()
    store = MemoryStore(recipe.preprocessing)
    stream = TrainingDataset(store, recipe, list(store.volumes))
    torch.manual_seed(0)
    check_leak(VJEPA3D.from_recipe(recipe), collate([stream[i] for i in range(2)]))


@pytest.mark.slow
def test_a_run_validates_and_exports_the_only_encoder(tmp_path: Path) -> None:
    recipe = recipe_of()
    summary = pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run")
    assert summary.loss > 0
    assert set(summary.baseline_loss) == {"constant"}
    assert summary.encoder == "student"
    lines = [line for line in read_json_lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    assert {line["train/ema_momentum"] for line in lines} == {0.0}
    for line in lines:
        assert line["train/loss"] == pytest.approx(
            line["train/loss_hidden"] + 0.05 * line["train/loss_sigreg"], rel=1e-4
        )
    encoder = load_encoder(tmp_path / "run")
    assert encoder.which == "student"


def test_the_recipe_refuses_what_no_target_encoder_and_no_transformer_would_use() -> None:
    for key, value in (("ema_horizon", 0.05), ("ema_base", 0.9), ("teacher", "phantom-tiny")):
        with pytest.raises(RecipeError, match=f"objective.{key} is unused by levjepa, which has no target encoder"):
            recipe_of(**{key: value})
    with pytest.raises(RecipeError, match="predictor_depth is unused by objective levjepa"):
        small_recipe(objective={"name": "levjepa"}, model={"predictor_depth": 3})
    assert VJEPA3D.from_recipe(load_recipe("tiny_cpu_levjepa")).predictor.layers[0].out_features == 4 * 192
