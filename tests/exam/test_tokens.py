"""Baselines of the exam that need no network: hand-made features of a patch and its neighbourhood, and position."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.exam.tokens import of_context, of_position, patches_of

import octjepa
from synthetic import volume

ENCODER = octjepa.load_encoder("phantom-tiny")
EYE = volume(ENCODER.preprocessing, 3)


def test_context_has_seven_numbers_for_every_cell_of_a_patch_and_its_neighbourhood() -> None:
    margin = ENCODER.preprocessing.margin
    before = of_context(ENCODER)([EYE])[0]
    assert before.features.shape[1] == 112
    pixels = EYE.pixels.copy()
    z, y, x = (2 * patch + skip for patch, skip in zip((4, 8, 8), margin, strict=True))  # the third patch of each axis
    pixels[z : z + 4, y + 40 : y + 48, x : x + 8] = 255
    after = of_context(ENCODER)([replace(EYE, pixels=pixels)])[0]
    changed = before.grid_index[np.abs(after.features - before.features).max(axis=1) > 0.3]
    steps = np.stack(np.unravel_index(changed, before.grid), axis=1) - np.array([2, 7, 2])
    assert len(steps)
    assert np.abs(steps).max() <= 2
    assert (steps == 0).all(axis=1).any()


def test_position_says_nothing_of_the_eye() -> None:
    other = replace(EYE, pixels=255 - EYE.pixels)
    one, two = of_position(ENCODER)([EYE, other])
    assert np.array_equal(one.features, two.features)
    assert one.features.shape == (len(one.grid_index), 5)
    assert np.ptp(one.features, axis=0).min() > 0.1


def test_patches_of_a_map_are_in_raster_order() -> None:
    values = np.arange(2 * 4 * 4).reshape(2, 4, 4).astype(float)
    found = patches_of(values, (2, 2, 2), (1, 2, 2))
    assert found.shape == (8, 4)
    assert found[0].tolist() == [0, 1, 4, 5]
    assert found[5].tolist() == pytest.approx([18, 19, 22, 23])
