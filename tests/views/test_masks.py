"""What the masks do: fairness, exact counts, target subsets, and positions in millimetres."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octjepa import keys
from octjepa.canonical.resample import centred_positions
from octjepa.model import VJEPA3D
from octjepa.train.mask_metrics import axis_bias
from octjepa.views import masks, tokens
from octjepa.views.sample import token_positions
from synthetic import TEST_SIZE, small_recipe

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


@pytest.mark.slow
@pytest.mark.parametrize("family", masks.FAMILIES)
def test_borders_are_hidden_as_often_as_the_middle(family):
    """The last run once shrank towards the grid's middle: its border columns were hidden a fifth too seldom."""
    cubes = hidden_cubes(family, 1200)
    people = [str(number % 40) for number in range(len(cubes))]
    for axis in range(3):
        hidden = cubes.sum(axis=tuple(other + 1 for other in range(3) if other != axis))
        chosen = np.full(hidden.shape, 256 // GRID[axis])
        found = axis_bias(hidden, chosen, 154 / 256, people)
        assert abs(found.edge.value - 1) < 0.06, (axis, found)
        assert abs(found.centre.value - 1) < 0.06, (axis, found)


def test_a_run_hides_whole_b_scans_but_for_one():
    cubes = hidden_cubes("runs", 100).reshape(100, 4, 64).sum(axis=2)
    partly = ((cubes > 0) & (cubes < 64)).sum(axis=1)
    assert partly.max() == 1
    assert (cubes == 64).sum(axis=1).min() == 2


@pytest.mark.slow
def test_targets_are_an_even_sample_of_what_is_hidden():
    """target_share: exact, within the hidden, and no hidden place is asked more often than another."""
    whole, part = hidden_cubes("blocks", 600), hidden_cubes("blocks", 600, share=0.3)
    assert set(part.reshape(600, -1).sum(axis=1)) == {46}
    assert not (part & ~whole).any()
    rate = part.reshape(600, -1).sum(axis=0) / whole.reshape(600, -1).sum(axis=0)
    expected = np.sqrt(0.3 * 0.7 / (600 * 0.6))
    assert abs(rate.mean() - 46 / 154) < 0.01
    assert rate.std() < 1.3 * expected


@pytest.mark.slow
def test_a_part_of_the_hidden_tokens_is_tissue_first():
    """Exact counts, within what is hidden, the same context; no tissue is asked more often than other tissue."""
    recipe = small_recipe(masks={"target_share": 0.3})
    tissue = (EVERY[:, 1] == 3) | (EVERY[:, 1] == 4)  # 64 of 256
    requested = np.zeros(256)
    for number in range(600):
        context, target = masks.sample_mask(
            EVERY, GRID, recipe.masks, (102, 46), keys.generator("prefer", number), tissue
        )
        free, _ = masks.sample_mask(EVERY, GRID, recipe.masks, (102, 46), keys.generator("prefer", number))
        assert np.array_equal(context, free)
        assert len(set(target) - set(context)) == 46
        hidden_tissue = tissue.sum() - tissue[context].sum()
        assert tissue[target].sum() == min(46, hidden_tissue)
        requested[target] += 1
    assert requested[tissue].std() < 0.1 * requested[tissue].mean()


# Millimetres


def same_positions() -> tuple[list, list[np.ndarray]]:
    """Two recipes, the second three times as fine and of a wider scan, and the tokens whose centres coincide.

    The margin differs with the grid, so that the rows of Bruch's membrane lie alike to the third of a row.
    """
    sections = {"model": TEST_SIZE, "tokens": {"patch_size": [4, 16, 16], "select": "all", "budget": None}}
    coarse = small_recipe(**sections)
    fine = small_recipe(
        preprocessing={
            "image_size": [40, 192, 256],
            "margin": [0, 8, 12],
            "target_spacing_mm": [0.4 / 3, 0.016 / 3, 0.1 / 3],
        },
        **sections,
    )
    return [coarse, fine], [np.arange(32), np.arange(fine.grid_tokens)]


def in_the_eye(recipe) -> np.ndarray:
    """[tokens, 3] mm from the scan's centre and Bruch's membrane, from where the store lays its voxels."""
    wanted, (dz, dy, dx) = recipe.preprocessing, recipe.preprocessing.target_spacing_mm
    d, h, w = wanted.stored_size
    rows = (np.arange(h) - round(wanted.axial_anchor * (h - 1))) * dy
    axes = [
        line[margin : len(line) - margin].reshape(-1, size).mean(axis=1)
        for line, margin, size in zip(
            (centred_positions(d, dz), rows, centred_positions(w, dx)),
            wanted.margin,
            recipe.tokens.patch_size,
            strict=True,
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


def test_millimetres_count_from_the_scans_centre_and_bruchs_surface():
    recipe = small_recipe(
        tokens={"patch_size": [4, 16, 16], "select": "all", "budget": None}, model={"position_unit": "mm"}
    )
    positions = token_positions(np.arange(32), recipe).reshape(2, 4, 4, 3)
    assert np.allclose(positions[..., 0].mean(), 0, atol=1e-6)
    assert np.allclose(positions[..., 2].mean(), 0, atol=1e-6)
    row = round(0.65 * 71) - 4  # of the centred view
    assert np.allclose(positions[0, :, 0, 1], ((np.arange(4) + 0.5) * 16 - row - 0.5) * 0.016, atol=1e-6)
