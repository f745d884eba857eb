"""The self-tests of the pretext task, numbered as in docs/pretext.md. Each fails when the code it guards is broken."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from octjepa import keys
from octjepa.distributed.runtime import Runtime
from octjepa.model import VJEPA3D
from octjepa.objectives.base import get_objective
from octjepa.recipe import OBJECTIVES
from octjepa.train import loop, validate
from octjepa.train.guards import FROZEN_AFTER, PretextAlarm
from octjepa.train.loop import pretrain
from octjepa.train.optimizer import build_optimizer, horizon_momentum, momentum, random_start_share, update_target
from octjepa.train.step import accumulate
from octjepa.views import geometry, masks
from octjepa.views.loader import TrainingDataset, ValidationDataset, collate, validation_batches
from octjepa.views.sample import make_sample
from synthetic import DEVICE, MemoryStore, small_recipe, volume


def batch_of(recipe, count=4):
    store = MemoryStore(recipe.preprocessing)
    stream = TrainingDataset(store, recipe, list(store.volumes))
    batch = collate([stream[i] for i in range(count)])
    return batch._replace(**{name: getattr(batch, name).to(DEVICE) for name in batch._fields[:7]})


def recipe_of(objective, **sections):
    """A small recipe with the objective, and the views that it needs."""
    halves = get_objective(objective).needs_halves
    return small_recipe(objective={"name": objective}, views={"halves": halves}, **sections)


def model_of(recipe):
    torch.manual_seed(0)
    return VJEPA3D.from_recipe(recipe).to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES.names())
def test_1_a_hidden_voxel_changes_no_prediction(objective):
    recipe = recipe_of(objective)
    model, batch = model_of(recipe), batch_of(recipe)
    inputs = (batch.target_view, batch.positions, batch.context, batch.target)
    before = model.predict(batch.context_view, *inputs).predicted
    for number in range(len(batch.volume_ids)):
        for token in batch.target[number].tolist():
            changed = batch.context_view.clone()
            changed[number, token] += torch.randn_like(changed[number, token])
            assert torch.equal(model.predict(changed, *inputs).predicted, before)
    seen = batch.context_view.clone()
    seen[0, batch.context[0, 0], 0] += 1.0
    assert not torch.equal(model.predict(seen, *inputs).predicted[0], before[0])


def test_1_no_change_of_light_carries_a_hidden_voxel_into_a_visible_patch():
    """From the stored volume on: blur, gamma and speckle stay within a patch."""
    recipe = small_recipe(views={"blur": 1.0, "speckle": 0.5, "gamma": 0.5, "gain": 0.5})
    one = volume(recipe.preprocessing, 0)
    before = make_sample(one, recipe, 0)
    pixels = one.pixels.copy()
    d, h, w = np.unravel_index(before.grid_index[before.target], recipe.grid)
    shape = geometry.sample_transform(
        recipe.preprocessing, recipe.views, keys.generator(0, "geometry", 0, one.volume_id)
    )
    slow = recipe.preprocessing.image_size[0] // 4
    for a, b, c in zip((slow - 1 - d) if shape.flip_slow else d, h, w, strict=True):
        top, left = shape.corner[1] + 16 * b, shape.corner[2] + 16 * c
        pixels[4 * a : 4 * a + 4, top : top + 16, left : left + 16] ^= 0xFF
    after = make_sample(dataclasses.replace(one, pixels=pixels), recipe, 0)
    assert np.array_equal(before.context_view[before.context], after.context_view[after.context])
    assert (before.context_view[before.target] != after.context_view[after.target]).mean() > 0.9


@pytest.mark.parametrize("objective", OBJECTIVES.names())
def test_1_through_the_whole_volume_path(objective):
    model = model_of(recipe_of(objective))
    view = torch.randn(2, 8, 64, 64)
    mask = torch.zeros(2, 32, dtype=torch.bool)
    mask[:, 5:20] = True
    before = model(view, view, mask).predicted
    patches = mask[0].reshape(2, 4, 4)
    hidden = patches.repeat_interleave(4, 0).repeat_interleave(16, 1).repeat_interleave(16, 2)
    other = torch.where(hidden, torch.randn_like(view), view)
    assert torch.equal(model(other, view, mask).predicted, before)


def test_2_target_is_the_exact_moving_average_and_lags():
    recipe = small_recipe()
    model, batch = model_of(recipe), batch_of(recipe)
    optimizer = build_optimizer(model, recipe.train)
    accumulate(model, batch, recipe, Runtime("fp32"))
    optimizer.step()
    old = [p.clone() for p in model.target_encoder.parameters()]
    m = 0.9
    update_target(model.target_encoder, model.context_encoder, m)
    for before, now, student in zip(
        old, model.target_encoder.parameters(), model.context_encoder.parameters(), strict=True
    ):
        assert torch.equal(now, before.mul(m).add(student, alpha=1.0 - m))
    moved = sum((a - b).abs().sum() for a, b in zip(old, model.target_encoder.parameters(), strict=True))
    pairs = zip(model.context_encoder.parameters(), model.target_encoder.parameters(), strict=True)
    behind = sum((a - b).abs().sum() for a, b in pairs)
    assert moved > 0
    assert behind > moved


def test_2_momentum_rises_from_base_to_final():
    recipe = small_recipe(objective={"ema_base": 0.996}).objective
    values = [momentum(u, 100, recipe) for u in range(101)]
    assert values[0] == 0.996
    assert values[100] == 1.0
    assert values == sorted(values)
    assert values[50] == pytest.approx(0.998)
    assert values[25] == pytest.approx(0.9965858, abs=1e-7)  # a straight line would be at 0.997


@pytest.mark.parametrize("updates", [200, 675, 20_000])
def test_2_the_target_forgets_its_random_start(updates):
    """Whatever the length of the run, and then it averages the last updates: it is near the student at the end."""
    for horizon in (None, 0.001, 0.1):
        recipe = small_recipe(objective={"ema_horizon": horizon}).objective
        assert random_start_share(updates, recipe) < 1e-3
        student = target = 0.0
        for update in range(updates):  # a student that moves steadily: the target is behind it by the horizon
            student += 1 / updates
            m = momentum(update, updates, recipe)
            target = m * target + (1 - m) * student
        assert 0.7 * (horizon or 0.01) - 2 / updates < student - target <= (horizon or 0.01)
    schedule = small_recipe(objective={"ema_base": 0.996}).objective
    assert random_start_share(675, schedule) > 0.2  # what the horizon is for


def test_2_momentum_is_ramped_so_that_a_long_horizon_forgets_too():
    values = [horizon_momentum(u, 10_000, 0.1) for u in range(10_000)]
    assert values[:3] == [pytest.approx(1 / 10), pytest.approx(2 / 11), pytest.approx(3 / 12)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(1 - 1 / 1000)


@pytest.mark.parametrize("objective", OBJECTIVES.names())
def test_3_no_gradient_reaches_the_target(objective):
    recipe = recipe_of(objective)
    model, batch = model_of(recipe), batch_of(recipe)
    outcome = model.predict(*batch.inputs(DEVICE))
    assert outcome.predicted.requires_grad
    assert not outcome.target.requires_grad
    assert not outcome.all_targets.requires_grad
    accumulate(model, batch, recipe, Runtime("fp32"))
    assert all(p.grad is None and not p.requires_grad for p in model.target_encoder.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.context_encoder.parameters())
    assert all(p.grad is not None for p in model.predictor.parameters())


def test_4_both_views_share_their_geometry():
    """Without light the views are equal; with light each patch is nearest its own counterpart."""
    dark = {"gain": 0, "gamma": 0, "speckle": 0, "blur": 0, "flip_slow": 0.5, "flip_fast": 0.5, "rotation_degrees": 5}
    intensity = {**dark, "gain": 0.3, "gamma": 0.3, "speckle": 0.3, "blur": 0.5}
    for number in range(6):
        recipe = small_recipe(views=dark)
        one = volume(recipe.preprocessing, number)
        same = make_sample(one, recipe, epoch=number)
        assert np.array_equal(same.context_view, same.target_view)
        sample = make_sample(one, small_recipe(views=intensity), epoch=number)
        assert not np.array_equal(sample.context_view, sample.target_view)
        a = sample.context_view - sample.context_view.mean(1, keepdims=True)
        b = sample.target_view - sample.target_view.mean(1, keepdims=True)
        similarity = (a @ b.T) / np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
        own = np.flatnonzero(sample.tissue > 0.5)
        assert (similarity[np.ix_(own, own)].argmax(axis=1) == np.arange(len(own))).all()


def test_4_crops_and_flips_move_tissue_and_voxels_alike():
    """On a wedge that differs by slice and column, the mask is exactly where the bright voxels are."""
    recipe = small_recipe()
    d, h, w = recipe.preprocessing.stored_size
    slices, rows, columns = np.ogrid[:d, :h, :w]
    top = 10 + 2 * slices[:, 0] + columns[0] // 3
    band = np.stack([top, top + 12]).astype(np.int16)
    pixels = np.where((rows >= top[:, None]) & (rows <= top[:, None] + 12), 200, 10).astype(np.uint8)
    for flips in ((False, False), (True, False), (False, True), (True, True)):
        shape = geometry.ViewTransform((0, 3, 2), *flips)
        view = geometry.apply_transform(pixels, shape, recipe.preprocessing.image_size)
        mask = geometry.tissue_mask(band, shape, h, recipe.preprocessing.image_size)
        assert np.array_equal(view == 200, mask)
        assert mask.any()


@pytest.mark.parametrize("family", masks.FAMILIES)
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_5_masks_have_exact_counts_and_no_overlap(family, share):
    weights = dict.fromkeys(masks.FAMILIES, 0.0) | {family: 1.0}
    recipe = small_recipe(masks={**weights, "target_share": share})
    steps = np.stack(np.unravel_index(np.arange(32), recipe.grid), axis=-1)[:24]
    for number in range(200):
        context, target = masks.sample_mask(
            steps, recipe.grid, recipe.masks, recipe.mask_counts, keys.generator("mask", number)
        )
        assert (len(context), len(target)) == recipe.mask_counts
        assert not set(context) & set(target)
        assert len(set(context)) == len(context)
        assert max(context.max(), target.max()) < 24


@pytest.mark.slow
@pytest.mark.parametrize("family", masks.FAMILIES)
def test_5_every_position_is_hidden_alike_often(family):
    """No edge, corner or last B-scan is favoured: counts over positions stay within a fifth of their mean."""
    grid = (4, 8, 8)
    weights = dict.fromkeys(masks.FAMILIES, 0.0) | {family: 1.0}
    recipe = small_recipe(masks=weights)
    steps = np.stack(np.unravel_index(np.arange(256), grid), axis=-1)
    hidden = np.zeros(256)
    draws = 1500
    for number in range(draws):
        _, target = masks.sample_mask(steps, grid, recipe.masks, (102, 154), keys.generator(family, number))
        hidden[target] += 1
    share = hidden.reshape(grid) / draws
    for axis in range(3):
        profile = share.mean(axis=tuple(a for a in range(3) if a != axis))
        assert abs(profile / profile.mean() - 1).max() < 0.2, (family, axis, profile.round(3))


def test_5_families_span_the_slow_axis():
    """Through tubes a hidden place is hidden in every slice; runs hide whole B-scans."""
    grid = (4, 8, 8)
    steps = np.stack(np.unravel_index(np.arange(256), grid), axis=-1)
    spans = {}
    for family in masks.FAMILIES:
        recipe = small_recipe(masks=dict.fromkeys(masks.FAMILIES, 0.0) | {family: 1.0})
        same = []
        for number in range(100):
            _, target = masks.sample_mask(steps, grid, recipe.masks, (102, 154), keys.generator(family, number))
            hidden = np.zeros(256, dtype=bool)
            hidden[target] = True
            cube = hidden.reshape(grid)
            same.append((cube.all(0) | ~cube.any(0)).mean() if family == "tubes" else cube.reshape(4, -1).mean(1).max())
        spans[family] = np.mean(same)
    assert spans["tubes"] > 0.9
    assert spans["runs"] > 0.99
    assert spans["blocks"] < 0.95  # boxes of limited depth leave no B-scan without context


@pytest.mark.slow
@pytest.mark.timeout(400)  # seconds on a quiet machine
def test_6_a_short_run_beats_every_trivial_predictor(tmp_path):
    """On held-out eyes, by loss and by cosine; 200 updates reach about two thirds of the best trivial loss."""
    train = {"max_updates": 200, "global_batch": 8, "base_lr": 1e-3, "precision": "fp32"}
    recipe = small_recipe(train=train, objective={"ema_base": 0.99}, validation={"max_samples": 16})
    result = pretrain(recipe, MemoryStore(recipe.preprocessing, train=24, val=16), tmp_path / "run")
    for name in ("constant", "position_mean", "copy_nearest"):
        assert result.loss < 0.9 * result.baseline_loss[name], name
        assert result.cosine > result.baseline_cosine[name], name


def test_7_validation_is_fixed_positive_and_a_mean_over_samples():
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing)
    model, runtime = model_of(recipe), Runtime("fp32")
    held_out = [f"volume{n:04d}" for n in range(12, 20)]
    samples = ValidationDataset(store, recipe, held_out)
    first = collate([samples[i] for i in range(8)])
    again = collate([ValidationDataset(store, recipe, held_out)[i] for i in range(8)])
    assert torch.equal(first.target, again.target)
    assert torch.equal(first.context_view, first.target_view)
    means = validate.fit_means(model, runtime, validation_batches(samples, 4), recipe.grid_tokens)
    whole = validate.validate(model, runtime, validation_batches(samples, 8), means, recipe)
    uneven = validate.validate(model, runtime, validation_batches(samples, 3), means, recipe)
    assert whole["loss"] > 0
    assert whole["loss"] == pytest.approx(uneven["loss"], rel=1e-5)
    outcome = model.predict(first.context_view, first.target_view, first.positions, first.context, first.target)
    assert whole["loss"] == pytest.approx(
        get_objective("vjepa").loss(outcome.predicted, outcome.target).item(), rel=1e-5
    )


def _rank_mean(rank, world, port, queue):
    import os

    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    # rank 0 saw 1 sample with loss 10, rank 1 saw 3 with loss 2: the mean over samples is 4, of the ranks' means 6
    total, count = (torch.tensor(10.0), torch.tensor(1)) if rank == 0 else (torch.tensor(6.0), torch.tensor(3))
    queue.put(float(Runtime("fp32").mean_over_ranks(total, count)))
    dist.destroy_process_group()


@pytest.mark.slow
def test_7_the_mean_is_over_all_ranks():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_rank_mean, args=(rank, 2, port, queue)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    results = [queue.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join(timeout=60)
    assert results == [4.0, 4.0]


def run(tmp_path, updates=10, **sections):
    recipe = small_recipe(train={"max_updates": updates, "global_batch": 4, "base_lr": 1e-3, "precision": "fp32"})
    return pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run")


@pytest.mark.slow
def test_8_a_healthy_run_trips_no_alarm(tmp_path):
    assert run(tmp_path, updates=12).updates == 12


def test_8_a_frozen_target_trips_an_alarm(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "update_target", lambda target, student, m, healthy: None)
    with pytest.raises(PretextAlarm) as caught:
        run(tmp_path)
    assert caught.value.alarm == "frozen_target"
    assert str(FROZEN_AFTER) in str(caught.value)


def test_8_an_unmasked_context_trips_an_alarm(tmp_path, monkeypatch):
    honest = VJEPA3D.predict

    def peeking(self, context_patches, target_patches, positions, context, target):
        everything = torch.arange(context_patches.shape[1]).expand(len(context_patches), -1)
        return honest(self, context_patches, target_patches, positions, everything, target)

    monkeypatch.setattr(VJEPA3D, "predict", peeking)
    with pytest.raises(PretextAlarm) as caught:
        run(tmp_path)
    assert caught.value.alarm == "context_leak"


def test_8_a_live_gradient_target_trips_an_alarm(tmp_path, monkeypatch):
    def live(self, patches, positions):
        features = self.context_encoder(patches, positions)
        return torch.nn.functional.layer_norm(features, features.shape[-1:])

    monkeypatch.setattr(VJEPA3D, "compute_targets", live)
    with pytest.raises(PretextAlarm) as caught:
        run(tmp_path)
    assert caught.value.alarm == "live_target"


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES.names())
def test_9_accumulation_gives_the_same_update(objective):
    weights = []
    for micro in (32, 16, 8):
        recipe = recipe_of(
            objective,
            train={"max_updates": 1, "global_batch": 32, "base_lr": 1e-3, "precision": "fp32"},
            machine={"micro_batch": micro},
        )
        model = model_of(recipe)
        batch = batch_of(recipe, 32)
        accumulate(model, batch, recipe, Runtime("fp32"))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        weights.append([norm, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for other in weights[1:]:
        for a, b in zip(weights[0], other, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_9_one_part_is_not_the_whole():
    recipe = small_recipe()
    model, batch = model_of(recipe), batch_of(recipe)
    accumulate(model, batch, recipe, Runtime("fp32"))
    whole = copy.deepcopy([p.grad for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    outcome = model.predict(*batch.micro_batch(0, 1)[:3], *batch.micro_batch(0, 1)[5:7])
    get_objective("vjepa").loss(outcome.predicted, outcome.target).backward()
    part = [p.grad for p in model.parameters() if p.grad is not None]
    assert any(not torch.allclose(a, b, rtol=1e-3) for a, b in zip(whole, part, strict=True))
