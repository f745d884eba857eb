"""Each objective and regulariser against its equations, written out token by token, and against other people's code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate
from torch.nn import functional as F

from octjepa import keys
from octjepa.config import load_recipe
from octjepa.errors import RecipeError
from octjepa.model import VJEPA3D
from octjepa.model.vjepa3d import grid_positions
from octjepa.objectives.base import Prediction, gather_tokens, get_objective
from octjepa.objectives.loss import (
    distance_weight,
    recipe_at_update,
    token_grid_positions,
    training_loss,
)
from octjepa.objectives.regularisers import FEWEST, sigreg, variance_covariance, zone_sigreg
from octjepa.recipe import ObjectiveRecipe
from octjepa.views.tokens import REGIONS
from synthetic import small_recipe
from user_package import Install

GRID = (2, 4, 4)


def predicted(objective: str, seed: int = 0) -> tuple[VJEPA3D, Prediction, tuple[torch.Tensor, ...]]:
    torch.manual_seed(seed)
    model = VJEPA3D(objective)
    patches = torch.randn(2, 32, 1024)
    positions = grid_positions(GRID).expand(2, -1, -1)
    order = torch.stack([torch.randperm(32) for _ in range(2)])
    inputs = (patches, patches + 0.1 * torch.randn_like(patches), positions, order[:, :20], order[:, 20:])
    outcome = model.predict(*inputs)
    return model, outcome, inputs


@pytest.mark.slow
def test_mae_is_that_of_transformers() -> None:
    """Another implementation of the normalised-pixel loss: ViTMAE in Hugging Face's transformers, on 2D patches."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    config = ViTMAEConfig(
        image_size=16,
        patch_size=4,
        num_channels=1,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        decoder_hidden_size=8,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=1,
        decoder_intermediate_size=8,
        norm_pix_loss=True,
    )
    image = torch.randn(2, 1, 16, 16)
    theirs = ViTMAEForPreTraining(config)(image)
    hidden = theirs.mask.nonzero()[:, 1].view(2, -1)
    model = VJEPA3D("mae_patch_norm", patch_size=(1, 4, 4))
    truth = gather_tokens(model.targets(model.patches(image), torch.zeros(2, 16, 3)), hidden)
    ours = get_objective("mae_patch_norm").loss(gather_tokens(theirs.logits.detach(), hidden), truth)
    assert float(ours) == pytest.approx(float(theirs.loss.detach()), rel=1e-4)


def test_mae_targets_are_the_voxels_that_the_encoder_would_see() -> None:
    """Their brightness included: two patches that differ in nothing else have other targets."""
    model = VJEPA3D("mae")
    patches = torch.randn(1, 3, 1024)
    patches[0, 1] = patches[0, 0] + 1.0
    assert torch.equal(model.targets(patches, torch.zeros(1, 3, 3)), patches)
    same = VJEPA3D("mae_patch_norm").targets(patches, torch.zeros(1, 3, 3))
    assert torch.allclose(same[0, 0], same[0, 1], atol=1e-4)


def test_the_decoder_of_mae_has_the_width_and_depth_of_the_recipe() -> None:
    wide = {"predictor_width": 192, "predictor_depth": 2, "predictor_heads": 6}
    model = VJEPA3D.from_recipe(small_recipe(objective={"name": "mae"}, model=wide))
    assert model.predictor.leave.weight.shape == (1024, 192)
    assert len(model.predictor.blocks) == 2


def test_patch_norm_targets_are_normalised_pixels_and_a_blank_patch_is_zero() -> None:
    model = VJEPA3D("mae_patch_norm")
    patches = 50 + 7 * torch.randn(1, 3, 1024)
    patches[0, 2] = 4.0
    targets = model.targets(patches, torch.zeros(1, 3, 3))
    assert targets[0, :2].mean(-1).abs().max() < 1e-4
    assert torch.allclose(targets[0, :2].var(-1), torch.ones(2), atol=1e-3)
    assert targets[0, 2].abs().max() == 0


@pytest.mark.parametrize("objective", ["vjepa", "mae", "normalized_mse"])
def test_the_sparse_objectives_are_their_loss_at_hidden_tokens_alone(objective: str) -> None:
    _, outcome, inputs = predicted(objective)
    loss, parts = training_loss(ObjectiveRecipe(name=objective), outcome, *inputs[2:], GRID, update=0)
    assert loss == get_objective(objective).loss(outcome.predicted, outcome.target)
    assert list(parts) == ["hidden"]


def test_dense_is_hidden_plus_faded_visible_token_by_token() -> None:
    model, outcome, (_, seen_by_target, positions, context, target) = predicted("vjepa_dense")
    assert model.depths == (2, 3, 5, 6)
    # Targets: every depth by itself, layer-normed, next to the others.
    stream = model.target_encoder.embed_patches(seen_by_target)
    from octjepa.model.positions import rope_tables

    tables = rope_tables(positions, model.target_encoder.width // model.target_encoder.heads)
    levels = []
    for number, block in enumerate(model.target_encoder.blocks, start=1):
        stream = block(stream, tables)
        if number in model.depths:
            levels.append(F.layer_norm(stream if number < 6 else model.target_encoder.norm(stream), (192,)))
    assert torch.allclose(outcome.all_targets, torch.cat(levels, -1), atol=1e-4)
    # Loss: mean |p - t| over hidden tokens, and half of that over visible ones, each over the root of its distance.
    message, truth = outcome.visible
    hidden = sum(
        float((outcome.predicted[b, i] - outcome.target[b, i]).abs().mean().detach())
        for b in range(2)
        for i in range(12)
    ) / (2 * 12)
    visible = 0.0
    for b in range(2):
        for i in range(20):
            here = positions[b, context[b, i]]
            nearest = min(math.dist(here.tolist(), positions[b, j].tolist()) for j in target[b])
            visible += float((message[b, i] - truth[b, i]).abs().mean().detach()) / math.sqrt(max(nearest, 1.0))
    loss, parts = training_loss(
        ObjectiveRecipe(name="vjepa_dense"), outcome, positions, context, target, GRID, update=0
    )
    assert float(parts["hidden"]) == pytest.approx(hidden, rel=1e-5)
    assert float(parts["visible"]) == pytest.approx(visible / 40, rel=1e-5)
    assert float(loss.detach()) == pytest.approx(hidden + 0.5 * visible / 40, rel=1e-5)
    light = ObjectiveRecipe(name="vjepa_dense", visible_weight=0.1)
    faint = training_loss(light, outcome, positions, context, target, GRID, 0)[0].detach()
    assert float(faint) == pytest.approx(hidden + 0.1 * visible / 40, rel=1e-5)


def test_noise2noise_compares_visible_tokens_with_the_other_half_too() -> None:
    _, outcome, (_, other_half, positions, context, target) = predicted("noise2noise")
    at_visible, truth = outcome.visible
    assert torch.equal(truth, gather_tokens(other_half, context))
    assert torch.equal(outcome.target, gather_tokens(other_half, target))
    loss, parts = training_loss(
        ObjectiveRecipe(name="noise2noise"), outcome, positions, context, target, GRID, update=0
    )
    hidden, visible = ((p - t).square().mean() for p, t in ((outcome.predicted, outcome.target), (at_visible, truth)))
    assert torch.allclose(loss, hidden + 0.5 * visible)
    assert torch.allclose(parts["visible"], visible.detach())


def test_dense_fuses_its_depths_and_has_a_head_for_visible_tokens() -> None:
    """An MLP as wide as the encoder leads into the predictor; each of the two last layers moves its tokens alone."""
    model, before, inputs = predicted("vjepa_dense")
    enter, own, other = model.predictor.enter, model.predictor.leave_visible, model.predictor.leave
    assert [tuple(enter[n].weight.shape) for n in (0, 2)] == [(192, 768), (96, 192)]
    assert isinstance(enter[1], torch.nn.GELU)
    with torch.no_grad():
        own.bias += 1.0
        after = model.predict(*inputs)
        assert torch.equal(after.predicted, before.predicted)
        assert torch.allclose(after.visible[0], before.visible[0] + 1.0, atol=1e-5)
        other.bias += 1.0
        assert torch.equal(model.predict(*inputs).visible[0], after.visible[0])
    assert VJEPA3D("vjepa").predictor.leave_visible is None
    assert isinstance(VJEPA3D("vjepa").predictor.enter, torch.nn.Linear)


def test_the_weight_of_visible_tokens_rises() -> None:
    recipe = small_recipe(objective={"name": "vjepa_dense"})
    weights = [recipe_at_update(recipe, update, 1000).objective.weight_of_visible for update in range(1000)]
    assert weights[0] == pytest.approx(0.005)
    assert weights[49] == pytest.approx(0.25)
    assert weights[99:] == [0.5] * 901
    for name, more in (("vjepa_dense", {"visible_warmup": 0.0}), ("vjepa", {})):
        same = small_recipe(objective={"name": name, **more})
        assert recipe_at_update(same, 0, 1000) is same
    _, outcome, (_, _, positions, context, target) = predicted("vjepa_dense")
    loss, parts = training_loss(
        recipe_at_update(recipe, 49, 1000).objective, outcome, positions, context, target, GRID, 49
    )
    assert float(loss.detach()) == pytest.approx(float(parts["hidden"] + 0.25 * parts["visible"]))
    with pytest.raises(ValueError, match="visible_warmup is unused by vjepa"):
        ObjectiveRecipe(name="vjepa", visible_warmup=0.1)


def test_dense_supervises_every_depth() -> None:
    model, outcome, (_, _, positions, context, target) = predicted("vjepa_dense")
    width = model.context_encoder.width
    (outcome.predicted[..., :width] - outcome.target[..., :width]).abs().mean().backward()
    assert model.context_encoder.blocks[1].mlp[0].weight.grad.abs().max() > 0
    assert outcome.predicted.shape[-1] == 4 * width
    assert distance_weight(positions, context, target).max() <= 1.0


@pytest.mark.parametrize("objective", ["vjepa_dense", "mae", "normalized_mse"])
def test_an_encoder_starts_the_same_whichever_objective_trains_it(objective: str) -> None:
    states = []
    for one in ("vjepa", objective):
        torch.manual_seed(0)
        states.append(VJEPA3D(one).context_encoder.state_dict())
    first, other = states
    assert first.keys() == other.keys()
    assert all(torch.equal(first[name], other[name]) for name in first)


def test_steps_are_the_grids() -> None:
    index = torch.arange(32)[None]
    assert torch.equal(token_grid_positions(index, GRID)[0], grid_positions(GRID))


def test_variance_covariance_by_loops() -> None:
    features = np.random.default_rng(0).normal(0, [0.3, 1.5, 0.9], (50, 3))
    features[:, 2] += features[:, 0]
    hinge = sum(max(0.0, 1 - math.sqrt(np.var(features[:, i], ddof=1) + 1e-4)) for i in range(3)) / 3
    cov = np.cov(features.T)
    off = sum(cov[i, j] ** 2 for i in range(3) for j in range(3) if i != j) / 3
    assert float(variance_covariance(torch.from_numpy(features))) == pytest.approx(hinge + off, rel=1e-4)


def test_sigreg_is_the_integral_of_the_characteristic_functions() -> None:
    features = np.random.default_rng(1).normal(0.3, 1.4, (40, 5))
    drawn = torch.Generator().manual_seed(keys.key("sigreg", 7) % 2**63)
    basis = F.normalize(torch.randn(5, 64, generator=drawn), dim=0).numpy()
    values = []
    for direction in basis.T:
        along = features @ direction

        def gap(t: float, along: np.ndarray = along) -> float:
            return float(abs(np.exp(1j * t * along).mean() - math.exp(-t * t / 2)) ** 2 * math.exp(-t * t / 2))

        values.append(40 * 2 * integrate.quad(gap, 0, 3)[0])
    assert float(sigreg(torch.from_numpy(features), step=7)) == pytest.approx(np.mean(values), rel=2e-2)


def test_sigreg_tells_a_normal_from_what_collapses() -> None:
    torch.manual_seed(0)
    normal = [float(sigreg(torch.randn(n, 32), step=0)) for n in (200, 2000)]
    assert normal == pytest.approx([1.05, 1.05], rel=0.35)
    for spoilt in (torch.zeros(200, 32), 0.1 * torch.randn(200, 32), 3 * torch.randn(200, 1).expand(-1, 32)):
        assert float(sigreg(spoilt, step=0)) > 10 * normal[0]
    assert float(sigreg(torch.ones(9, 4), step=1)) != float(sigreg(torch.arange(36.0).reshape(9, 4), step=2))


def zones_by_loops(features: np.ndarray, regions: np.ndarray, masks: int, step: int) -> tuple[float, float]:
    """(invariance, SIGReg) of `zone_sigreg`, from its sentences; `features` are [masks, samples, tokens, width]."""
    distances, spreads = [], []
    for region in range(REGIONS):
        means = {
            (mask, eye): features[mask, eye, regions[mask, eye] == region].mean(axis=0)
            for mask in range(masks)
            for eye in range(features.shape[1])
            if (regions[mask, eye] == region).any()
        }
        for eye in range(features.shape[1]):
            shown = [mean for (_, of), mean in means.items() if of == eye]
            if len(shown) > 1:
                distances += [float(((mean - np.mean(shown, axis=0)) ** 2).mean()) for mean in shown]
        for mask in range(masks):
            of_mask = [mean for (by, _), mean in means.items() if by == mask]
            if len(of_mask) >= FEWEST:
                spreads.append(float(sigreg(torch.from_numpy(np.stack(of_mask)).float(), step)))
    return float(np.mean(distances)), float(np.mean(spreads))


def test_zone_sigreg_is_invariance_between_masks_and_a_test_of_each_zone() -> None:
    rng = np.random.default_rng(3)
    features = rng.normal(0.2, 1.3, (2, 12, 5, 4))
    regions = rng.integers(0, 6, (2, 12, 5))  # zones that a mask does not show, and ten that none shows
    agree, apart = zones_by_loops(features, regions, 2, 11)
    rows = torch.from_numpy(features).flatten(0, 1), torch.from_numpy(regions).flatten(0, 1)
    assert float(zone_sigreg(*rows, masks=2, step=11)) == pytest.approx(0.95 * agree + 0.05 * apart, rel=1e-4)


def test_zone_sigreg_falls_where_masks_agree_and_rises_where_eyes_do() -> None:
    torch.manual_seed(0)
    regions = torch.zeros(64, 3, dtype=torch.long)
    eyes = math.sqrt(3) * torch.randn(32, 3, 8)  # the mean of three tokens is a standard normal
    alike, masked = torch.cat([eyes, eyes]), math.sqrt(3) * torch.randn(64, 3, 8)
    good = float(zone_sigreg(alike, regions, 2, 0))
    assert good == pytest.approx(0.05 * float(sigreg(alike[:32].mean(dim=1), 0)), rel=1e-5)  # masks that agree add none
    assert float(zone_sigreg(masked, regions, 2, 0)) > good + 0.3  # half of the variance is between masks
    assert float(zone_sigreg(torch.zeros(64, 3, 8), regions, 2, 0)) > 3 * good
    assert float(zone_sigreg(torch.cat([eyes[:2], eyes[:2]]), regions[:4], 2, 0)) == 0  # too few rows for a test


def test_zone_sigreg_needs_masks_to_compare() -> None:
    with pytest.raises(RecipeError, match=r"zone_sigreg compares the masks of an eye: set masks\.per_target to 2"):
        small_recipe(objective={"zone_sigreg": 0.1})
    small_recipe(objective={"zone_sigreg": 0.0})
    small_recipe(objective={"zone_sigreg": 0.1}, masks={"per_target": 2})


@pytest.mark.parametrize("term", ["variance_covariance", "sigreg", "zone_sigreg"])
def test_a_weight_trains_and_weight_0_only_measures(term: str) -> None:
    model, outcome, inputs = predicted("vjepa")
    plain, _ = training_loss(ObjectiveRecipe(), outcome, *inputs[2:], GRID, update=3)
    meter, parts = training_loss(ObjectiveRecipe(**{term: 0.0}), outcome, *inputs[2:], GRID, update=3)
    assert meter == plain
    assert not parts[term].requires_grad
    trained, _ = training_loss(ObjectiveRecipe(**{term: 2.0}), outcome, *inputs[2:], GRID, update=3)
    assert float(trained.detach()) == pytest.approx(float(plain.detach()) + 2 * float(parts[term]), rel=1e-5)
    trained.backward()
    assert model.context_encoder.embed.weight.grad.abs().max() > 0


def test_settings_that_nothing_would_use_are_refused() -> None:
    with pytest.raises(RecipeError, match="visible_weight is unused by vjepa"):
        small_recipe(objective={"visible_weight": 0.3})
    with pytest.raises(RecipeError, match="micro_batch would change the result"):
        small_recipe(objective={"variance_covariance": 0.1}, machine={"micro_batch": 2})
    small_recipe(objective={"variance_covariance": 0.0, "sigreg": 0.1}, machine={"micro_batch": 2})


def test_recomputed_activations_give_the_same_gradients() -> None:
    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = VJEPA3D("vjepa", recompute=recompute)
        patches, positions = torch.randn(1, 32, 1024), grid_positions(GRID)[None]
        order = torch.arange(32)[None]
        outcome = model.predict(patches, patches, positions, order[:, :20], order[:, 20:])
        get_objective("vjepa").loss(outcome.predicted, outcome.target).backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-7)


def test_a_package_of_a_user_adds_an_objective(install_package: Install) -> None:
    install_package(
        *("my_package", "octjepa.objectives", "halved = my_package:Halved"),
        "from octjepa.objectives.jepa import VJEPA\n\n"
        "class Halved(VJEPA):\n    predictor_depth = 1\n    alarm_bounds = {'low_rank': 2.0}\n\n"
        "    def loss(self, predicted, target):\n        return super().loss(predicted, target) / 2\n",
    )
    recipe = load_recipe("tiny_cpu_vjepa", ["objective.name=halved"])
    model = VJEPA3D.from_recipe(recipe)
    assert len(model.predictor.blocks) == 1
    predicted, target = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    assert model.objective.loss(predicted, target) == get_objective("vjepa").loss(predicted, target) / 2
    assert len(VJEPA3D.from_recipe(load_recipe("tiny_cpu_vjepa")).predictor.blocks) == 3
