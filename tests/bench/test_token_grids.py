"""Tokens of two grids over the same volume (`benchmarks.token_grids`)."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.objectives import CHOICES
from benchmarks.token_grids import GRIDS, children_of, of_same_tokens

from octjepa.encoders import load_encoder
from octjepa.volume import CanonicalVolume
from synthetic import volume


def test_children_cover_the_voxels_of_their_token() -> None:
    coarse, fine = (4, 16, 16), (8, 16, 32)
    voxels = np.arange(16 * 128 * 128).reshape(16, 128, 128)
    tokens = {
        grid: voxels.reshape(grid[0], 16 // grid[0], grid[1], 128 // grid[1], grid[2], 128 // grid[2])
        .transpose(0, 2, 4, 1, 3, 5)
        .reshape(np.prod(grid), -1)
        for grid in (coarse, fine)
    }
    index = np.array([0, 17, 1023])
    children = children_of(index, coarse, fine)
    assert children.shape == (3, 4)
    for number, of_token in zip(index, children, strict=True):
        assert set(tokens[fine][of_token].ravel()) == set(tokens[coarse][number])


def test_the_mean_of_one_child_is_the_token_itself() -> None:
    encoder = load_encoder("phantom-tiny")
    one: CanonicalVolume = volume(encoder.recipe.preprocessing, 1)
    found, own = of_same_tokens(encoder, encoder.recipe)([one])[0], encoder.encode_volumes([one])[0]
    assert np.array_equal(found.grid_index, own.grid_index)
    assert found.features == pytest.approx(own.features, abs=1e-4)


def test_names_of_runs_are_unique() -> None:
    names = [choice.name for choice in (*CHOICES, *GRIDS)]
    assert len(set(names)) == len(names)
