"""What the masks do, measured: fairness, exact counts, target subsets, and positions in millimetres."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octjepa import keys
from octjepa.model import VJEPA3D
from octjepa.report import mask_bias, mask_nearest, mask_statistics
from octjepa.store.resample import centred
from octjepa.views import masks, tokens
from octjepa.views.sample import make_sample, token_positions
from synthetic import MemoryStore, small_recipe, volume

GRID = (4, 8, 8)
EVERY = np.stack(np.unravel_index(np.arange(256), GRID), axis=-1)


def hidden_cubes(family: str, draws: int, share: float = 1.0, hidden: int = 154) -> np.ndarray:
    """[draws, 4, 8, 8] targets of full grids."""
    recipe = small_recipe(masks=dict.fromkeys(masks.FAMILIES, 0.0) | {family: 1.0, "target_share": share})
    cubes = np.zeros((draws, 256), bool)
    for number in range(draws):
        counts = (256 - hidden, round(share * hidden))
        _, target = masks.sample_mask(EVERY, GRID, recipe.masks, counts, keys.generator("cubes", family, number))
        cubes[number, target] = True
    return cubes.reshape(draws, *GRID)


@pytest.mark.parametrize("family", masks.FAMILIES)
def test_borders_are_hidden_as_often_as_the_middle(family):
    """The last run once shrank towards the grid's middle: its border columns were hidden a fifth too seldom."""
    cubes = hidden_cubes(family, 1200)
    people = [str(number % 40) for number in range(len(cubes))]
    for axis in range(3):
        hidden = cubes.sum(axis=tuple(other + 1 for other in range(3) if other != axis))
        chosen = np.full(hidden.shape, 256 // GRID[axis])
        found = mask_bias.axis_bias(hidden, chosen, 154 / 256, people)
        assert abs(found["edge"]["value"] - 1) < 0.06, (axis, found)
        assert abs(found["centre"]["value"] - 1) < 0.06, (axis, found)


def test_a_run_hides_whole_b_scans_but_for_one():
    cubes = hidden_cubes("runs", 100).reshape(100, 4, 64).sum(axis=2)
    partly = ((cubes > 0) & (cubes < 64)).sum(axis=1)
    assert partly.max() == 1
    assert (cubes == 64).sum(axis=1).min() == 2


def test_targets_are_an_even_sample_of_what_is_hidden():
    """target_share: exact, within the hidden, and no hidden place is asked more often than another."""
    whole, part = hidden_cubes("blocks", 600), hidden_cubes("blocks", 600, share=0.3)
    assert set(part.reshape(600, -1).sum(axis=1)) == {46}
    assert not (part & ~whole).any()
    rate = part.reshape(600, -1).sum(axis=0) / whole.reshape(600, -1).sum(axis=0)
    expected = np.sqrt(0.3 * 0.7 / (600 * 0.6))
    assert abs(rate.mean() - 46 / 154) < 0.01
    assert rate.std() < 1.3 * expected


def test_a_part_of_the_hidden_tokens_is_tissue_first():
    """Exact counts, within what is hidden, the same context; no tissue is asked more often than other tissue."""
    recipe = small_recipe(masks={"target_share": 0.3})
    tissue = (EVERY[:, 1] == 3) | (EVERY[:, 1] == 4)  # 64 of 256
    asked = np.zeros(256)
    for number in range(600):
        context, target = masks.sample_mask(
            EVERY, GRID, recipe.masks, (102, 46), keys.generator("prefer", number), tissue
        )
        free, _ = masks.sample_mask(EVERY, GRID, recipe.masks, (102, 46), keys.generator("prefer", number))
        assert np.array_equal(context, free)
        assert len(set(target) - set(context)) == 46
        hidden_tissue = tissue.sum() - tissue[context].sum()
        assert tissue[target].sum() == min(46, hidden_tissue)
        asked[target] += 1
    assert asked[tissue].std() < 0.1 * asked[tissue].mean()


def test_the_report_shows_what_is_preferred():
    """With every patch a token, targets are as often tissue as patches are, unless only a part is asked for."""
    shown = {}
    for share in (1.0, 0.3):
        recipe = small_recipe(tokens={"select": "all", "budget": None}, masks={"target_share": share})
        measured = mask_statistics.measure_synthetic(recipe, samples=64)
        assert all(one["exact"] for one in measured["families"].values())
        shown[share] = measured["families"]["mix"]["targets"]["on_tissue"]
        assert shown[share] == mask_statistics.summary(measured)["targets_on_tissue"]
    assert shown[1.0] == pytest.approx(measured["tissue"]["of_grid"], abs=0.08)
    assert shown[0.3] > shown[1.0] + 0.25


def test_a_bias_is_found_and_fair_masks_pass():
    rng = np.random.default_rng(0)
    people = [str(number % 20) for number in range(400)]
    chosen = np.full((400, 6), 20)
    fair = rng.multivariate_hypergeometric([20] * 6, 60, size=400)
    found = mask_bias.axis_bias(fair, chosen, 0.5, people)
    assert found["p"] > 0.01
    assert found["edge"]["low"] <= 1 <= found["edge"]["high"]
    assert found["spread"] == pytest.approx(found["expected_spread"], rel=1.0)
    spared = fair.copy()
    spared[:, 0] -= 3
    spared[:, 2] += 3
    found = mask_bias.axis_bias(spared, chosen, 0.5, people)
    assert found["p"] < 1e-6
    assert found["edge"]["high"] < 0.9
    assert mask_bias.ratio(np.ones(3), np.ones(3), ["one"] * 3) == {"value": 1.0, "low": None, "high": None}


def test_the_nearest_visible_token_by_hand():
    visible = np.zeros((3, 4, 4), bool)
    visible[0, 0, 0] = visible[2, 3, 3] = True
    positions = np.array([[0, 0, 3], [2, 3, 0], [1, 1, 1]])
    nearest, away = mask_nearest.nearest_visible(visible, positions)
    assert nearest.tolist() == [[0, 0, 0], [2, 3, 3], [0, 0, 0]]
    assert np.allclose(away, [3, 3, np.sqrt(3)])
    there, away = mask_nearest.nearest_visible(visible, positions, axis=2)
    assert away.tolist() == [3, 3, np.inf]
    assert there[:2].tolist() == [[0, 0, 0], [2, 3, 3]]
    with pytest.raises(ValueError, match="no token is visible"):
        mask_nearest.nearest_visible(np.zeros((2, 2, 2), bool), positions)


def test_pixels_are_normalised_as_in_arm_mae():
    patches = np.random.default_rng(0).normal(2, 3, size=(5, 1024)).astype(np.float32)
    patches[4] = 1.0
    recipe = small_recipe(objective={"name": "mae"})
    wanted = VJEPA3D.from_recipe(recipe).targets(torch.from_numpy(patches)[None], torch.zeros(1, 5, 3))[0]
    assert np.allclose(mask_nearest.normalised(patches), wanted.numpy(), atol=1e-5)


def copied(patches: np.ndarray) -> mask_nearest.Copies:
    """Row of four tokens: the first two seen, the last two hidden."""
    seen = np.array([True, True, False, False]).reshape(1, 1, 4)
    positions = np.array([[0, 0, 2], [0, 0, 3]])
    nearest, _ = mask_nearest.nearest_visible(seen, positions)
    return mask_nearest.copies_of(
        mask_nearest.normalised(patches), patches.mean(axis=1), np.array([True, True, True, False]),
        np.array([2, 3]), np.arange(4).reshape(1, 1, 4), seen, positions, nearest,
    )  # fmt: skip


def test_copying_costs_nothing_for_twins_two_for_strangers_and_silence_one():
    noise = np.random.default_rng(1).normal(size=(4, 4096)).astype(np.float32)
    twins = copied(noise[[0, 1, 1, 1]])
    assert twins.error[0] == pytest.approx(0, abs=1e-6)
    strangers = copied(noise)
    assert strangers.error[0] / strangers.error[1] == pytest.approx(2, abs=0.15)
    assert strangers.empty[0] / strangers.empty[1] == pytest.approx(1, abs=0.01)
    assert strangers.on_tissue[1] == 1
    assert [part[1] for part in strangers.along] == [0, 0, 2]
    assert copied(np.ones((4, 64), np.float32)).blank == 1


def test_the_report_measures_what_training_draws():
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing)
    ids = list(store.volumes)[:6]
    measured = mask_statistics.measure_store(recipe, store, ids, samples=12)
    mix = measured["families"]["mix"]
    seen, asked = np.zeros(32), np.zeros(32)
    for one in ids:
        for epoch in range(2):
            sample = make_sample(store.read(one), recipe, epoch)
            seen[sample.grid_index[sample.context]] += 1
            asked[sample.grid_index[sample.target]] += 1
    assert np.allclose(np.ravel(mix["map"]["context"]), seen / 12, atol=1e-4)
    assert np.allclose(np.ravel(mix["map"]["target"]), asked / 12, atol=1e-4)
    assert np.allclose(
        np.sum([mix["coverage"]["depth"][part] for part in ("context", "target", "left_out")], axis=0), 1
    )
    assert mix["exact"]
    assert measured["samples"] == 12
    assert mix["bias"].keys() == {"depth", "width"}  # two slabs of slices have an edge and nothing else
    assert measured["tissue"]["of_tokens"] > measured["tissue"]["of_grid"]
    assert mask_statistics.summary(measured)["copy_nearest"].keys() == set(masks.FAMILIES)


def test_without_a_store_nothing_is_said_of_pixels():
    recipe = small_recipe()
    measured = mask_statistics.measure_synthetic(recipe, samples=8)
    assert measured["synthetic"]
    assert "copy_nearest" not in measured["families"]["mix"]
    assert "copy_nearest" not in mask_statistics.summary(measured)
    band = mask_statistics.synthetic_band(recipe, 0)
    assert 0.1 < tokens.tissue_share(band_mask(band), (4, 8, 8)).mean() < 0.7


def band_mask(made):
    rows = np.arange(made.pixels.shape[1])[None, :, None]
    return (rows >= made.band[0][:, None]) & (rows <= made.band[1][:, None])


def test_a_short_count_is_not_called_exact(monkeypatch):
    recipe = small_recipe()
    drawn = masks.sample_mask

    def short(*given):
        context, target = drawn(*given)
        return context, target[1:]

    monkeypatch.setattr(masks, "sample_mask", short)
    measured = mask_statistics.measure(recipe, [("one", volume(recipe.preprocessing))], 1, samples=2)
    assert not mask_statistics.summary(measured)["exact"]


# Millimetres


def same_positions() -> tuple[list, list[np.ndarray]]:
    """Two recipes, the second three times as fine and of a wider scan, and the tokens whose centres coincide.

    The margin differs with the grid, so that the rows of Bruch's membrane lie alike to the third of a row.
    """
    sections = {"masks": {}, "tokens": {"patch_size": [4, 16, 16], "select": "all", "budget": None}}
    coarse = small_recipe(**sections)
    fine = small_recipe(
        preprocessing={
            "image_size": [40, 192, 256], "margin": [0, 8, 12], "target_spacing_mm": [0.4 / 3, 0.016 / 3, 0.1 / 3],
        },
        **sections,
    )  # fmt: skip
    return [coarse, fine], [np.arange(32), np.arange(fine.grid_tokens)]


def in_the_eye(recipe) -> np.ndarray:
    """[tokens, 3] mm from the scan's centre and Bruch's membrane, from where the store lays its voxels."""
    wanted, (dz, dy, dx) = recipe.preprocessing, recipe.preprocessing.target_spacing_mm
    d, h, w = wanted.stored_size
    rows = (np.arange(h) - round(wanted.axial_anchor * (h - 1))) * dy
    axes = [
        line[margin : len(line) - margin].reshape(-1, size).mean(axis=1)
        for line, margin, size in zip(
            (centred(d, dz), rows, centred(w, dx)), wanted.margin, recipe.tokens.patch_size, strict=True
        )
    ]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)


@pytest.mark.parametrize("positions", ["rope", "sincos"])
def test_one_layout_has_the_same_features_on_two_grids(positions):
    """The same patches at the same millimetres: features do not know which grid they were cut from."""
    recipes, index = same_positions()
    recipes = [
        recipe.model_copy(
            update={"model": recipe.model.model_copy(update={"position_unit": "mm", "positions": positions})}
        )
        for recipe in recipes
    ]
    coarse, fine = (token_positions(own, one) for own, one in zip(index, recipes, strict=True))
    away = np.linalg.norm(in_the_eye(recipes[0])[:, None] - in_the_eye(recipes[1])[None], axis=-1)
    twin = away.argmin(axis=1)
    met = away.min(axis=1) < 1e-4
    assert met.sum() == 32
    torch.manual_seed(0)
    encoder = VJEPA3D.from_recipe(recipes[0]).context_encoder.eval()
    patches = torch.randn(1, 32, 1024)
    with torch.inference_mode():
        one, other = (encoder(patches, torch.from_numpy(at)[None]) for at in (coarse, fine[twin]))
        steps = [
            tokens.positions(own, recipe.grid, (4, 16, 16), (1.0, 1.0, 1.0), "index")
            for own, recipe in zip((index[0], twin), recipes, strict=True)
        ]
        apart = [encoder(patches, torch.from_numpy(at)[None]) for at in steps]
    assert torch.allclose(one, other, atol=1e-5)
    assert not torch.allclose(apart[0], apart[1], atol=1e-3)  # in token steps the grid shows


def test_millimetres_count_from_the_scans_centre_and_bruchs_membrane():
    recipe = small_recipe(
        tokens={"patch_size": [4, 16, 16], "select": "all", "budget": None}, model={"position_unit": "mm"}
    )
    positions = token_positions(np.arange(32), recipe).reshape(2, 4, 4, 3)
    assert np.allclose(positions[..., 0].mean(), 0, atol=1e-6)
    assert np.allclose(positions[..., 2].mean(), 0, atol=1e-6)
    row = round(0.65 * 71) - 4  # of the centred view
    assert np.allclose(positions[0, :, 0, 1], ((np.arange(4) + 0.5) * 16 - row - 0.5) * 0.016, atol=1e-6)
