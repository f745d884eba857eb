"""The statistics of masks: fairness, nearest visible tokens, copying, and the samples that training draws."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from octjepa.canonical.single_bscan import bscan_range
from octjepa.model import VJEPA3D
from octjepa.train import mask_metrics, mask_statistics
from octjepa.views import masks, tokens
from octjepa.views.sample import make_sample
from synthetic import MemoryStore, small_recipe, volume


def test_the_report_shows_what_is_preferred():
    """With every patch a token, targets are as often tissue as patches are, unless only a part is asked for."""
    shown = {}
    for share in (1.0, 0.3):
        recipe = small_recipe(tokens={"select": "all", "budget": None}, masks={"target_share": share})
        measured = mask_statistics.measure_synthetic(recipe, samples=64)
        assert all(one.exact for one in measured.families.values())
        shown[share] = measured.families["mix"].targets.on_tissue
        assert shown[share] == mask_statistics.summary(measured).targets_on_tissue
    assert shown[1.0] == pytest.approx(measured.tissue.of_grid, abs=0.08)
    assert shown[0.3] > shown[1.0] + 0.25


def test_a_bias_is_found_and_fair_masks_pass():
    rng = np.random.default_rng(0)
    people = [str(number % 20) for number in range(400)]
    chosen = np.full((400, 6), 20)
    fair = rng.multivariate_hypergeometric([20] * 6, 60, size=400)
    found = mask_metrics.axis_bias(fair, chosen, 0.5, people)
    assert found.p > 0.01
    assert found.edge.low <= 1 <= found.edge.high
    assert found.spread == pytest.approx(found.expected_spread, rel=1.0)
    spared = fair.copy()
    spared[:, 0] -= 3
    spared[:, 2] += 3
    found = mask_metrics.axis_bias(spared, chosen, 0.5, people)
    assert found.p < 1e-6
    assert found.edge.high < 0.9
    assert mask_metrics.ratio_interval(np.ones(3), np.ones(3), ["one"] * 3) == mask_metrics.RatioInterval(1.0)


def test_the_nearest_visible_token_by_hand():
    visible = np.zeros((3, 4, 4), bool)
    visible[0, 0, 0] = visible[2, 3, 3] = True
    positions = np.array([[0, 0, 3], [2, 3, 0], [1, 1, 1]])
    nearest, away = mask_metrics.nearest_visible(visible, positions)
    assert nearest.tolist() == [[0, 0, 0], [2, 3, 3], [0, 0, 0]]
    assert np.allclose(away, [3, 3, np.sqrt(3)])
    there, away = mask_metrics.nearest_visible(visible, positions, axis=2)
    assert away.tolist() == [3, 3, np.inf]
    assert there[:2].tolist() == [[0, 0, 0], [2, 3, 3]]
    with pytest.raises(ValueError, match="no token is visible"):
        mask_metrics.nearest_visible(np.zeros((2, 2, 2), bool), positions)


def test_pixels_are_normalised_as_in_mae():
    patches = np.random.default_rng(0).normal(2, 3, size=(5, 1024)).astype(np.float32)
    patches[4] = 1.0
    recipe = small_recipe(objective={"name": "mae_patch_norm"})
    wanted = VJEPA3D.from_recipe(recipe).targets(torch.from_numpy(patches)[None], torch.zeros(1, 5, 3))[0]
    assert np.allclose(mask_metrics.normalised_patches(patches), wanted.numpy(), atol=1e-5)


def copied(patches: np.ndarray) -> mask_metrics.CopyErrors:
    """Row of four tokens: the first two seen, the last two hidden."""
    seen = np.array([True, True, False, False]).reshape(1, 1, 4)
    positions = np.array([[0, 0, 2], [0, 0, 3]])
    nearest, _ = mask_metrics.nearest_visible(seen, positions)
    return mask_metrics.copy_errors(
        mask_metrics.normalised_patches(patches),
        patches.mean(axis=1),
        np.array([True, True, True, False]),
        np.array([2, 3]),
        np.arange(4).reshape(1, 1, 4),
        seen,
        positions,
        nearest,
    )


def test_copying_costs_nothing_for_equal_patches_two_for_independent_ones_and_zero_costs_one():
    noise = np.random.default_rng(1).normal(size=(4, 4096)).astype(np.float32)
    twins = copied(noise[[0, 1, 1, 1]])
    assert twins.error[0] == pytest.approx(0, abs=1e-6)
    different_people = copied(noise)
    assert different_people.error[0] / different_people.error[1] == pytest.approx(2, abs=0.15)
    assert different_people.empty[0] / different_people.empty[1] == pytest.approx(1, abs=0.01)
    assert different_people.on_tissue[1] == 1
    assert [part[1] for part in different_people.along] == [0, 0, 2]
    assert copied(np.ones((4, 64), np.float32)).blank == 1


def test_the_report_measures_what_training_draws():
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing)
    ids = list(store.volumes)[:6]
    measured = mask_statistics.measure_store(recipe, store, ids, samples=12)
    mix = measured.families["mix"]
    seen, requested = np.zeros(32), np.zeros(32)
    for one in ids:
        for epoch in range(2):
            sample = make_sample(store.read(one), recipe, epoch)
            seen[sample.grid_index[sample.context]] += 1
            requested[sample.grid_index[sample.target]] += 1
    assert np.allclose(np.ravel(mix.map["context"]), seen / 12, atol=1e-4)
    assert np.allclose(np.ravel(mix.map["target"]), requested / 12, atol=1e-4)
    assert np.allclose(np.sum([mix.coverage["depth"][part] for part in ("context", "target", "left_out")], axis=0), 1)
    assert mix.exact
    assert measured.samples == 12
    assert mix.bias.keys() == {"depth", "column"}  # two slabs of slices have an edge and nothing else
    assert measured.tissue.of_tokens > measured.tissue.of_grid
    assert mask_statistics.summary(measured).copy_nearest.keys() == set(masks.FAMILIES)


def test_without_a_store_there_are_no_pixel_statistics():
    recipe = small_recipe()
    measured = mask_statistics.measure_synthetic(recipe, samples=8)
    assert measured.synthetic
    assert "copy_nearest" not in measured.to_json()["families"]["mix"]
    assert "copy_nearest" not in mask_statistics.summary(measured).to_json()
    band = mask_statistics.synthetic_band(recipe, 0)
    assert 0.1 < tokens.tissue_share(band_mask(band), (4, 8, 8)).mean() < 0.7


def band_mask(volume):
    depths = np.arange(volume.pixels.shape[1])[None, :, None]
    return (depths >= volume.band[0][:, None]) & (depths <= volume.band[1][:, None])


def test_a_short_count_is_not_called_exact(monkeypatch):
    recipe = small_recipe()
    drawn = masks.sample_mask

    def short(*given):
        context, target = drawn(*given)
        return context, target[1:]

    monkeypatch.setattr(masks, "sample_mask", short)
    measured = mask_statistics.measure(recipe, [("one", volume(recipe.preprocessing))], 1, samples=2)
    assert not mask_statistics.summary(measured).exact


def test_single_bscans_are_measured_with_the_masks_that_training_draws():
    recipe = small_recipe(preprocessing={"margin": [2, 4, 4]}, data={"patterns": ["line"]})
    slots = bscan_range(recipe.preprocessing, recipe.tokens.patch_size[0])
    one = volume(recipe.preprocessing)
    band = np.full_like(one.band, -1)
    band[:, slots] = one.band[:, slots]
    single = dataclasses.replace(one, band=band, bscan_slices=recipe.tokens.patch_size[0])
    sample = make_sample(single, recipe, 0)
    measured = mask_statistics.measure(recipe, [("one", single)], 1, samples=2)
    counts = len(sample.grid_index), len(sample.context), len(sample.target)
    assert (measured.counts.tokens, measured.counts.context, measured.counts.target) == counts
    assert counts[0] < recipe.token_count
    assert measured.counts.hidden == counts[0] - counts[1]
    assert mask_statistics.summary(measured).exact
