"""Fluid in one eye from the other: known answers on drawn eyes, and masks that lie on the dark of the real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.study import fluid
from benchmarks.study.features import Tokens, of_pixels
from benchmarks.study.fluid import FluidEye, UNet, say_fluid, with_intensity, with_tokens
from benchmarks.study.plan import RECIPE

from invented_eyes import Said
from octjepa.config import load_recipe
from octjepa.store import CanonicalVolume
from octjepa.views import geometry


def drawn(seed: int) -> FluidEye:
    """Grey retina with dark pockets; fluid is what is dark."""
    recipe = load_recipe(RECIPE)
    depth, height, width = recipe.preprocessing.stored_size
    rng = np.random.default_rng(seed)
    pixels = np.full((depth, height, width), 20, np.uint8)
    band = np.stack([np.full((depth, width), 50), np.full((depth, width), 100)]).astype(np.int16)
    pixels[:, 50:101] = 150
    for _ in range(60):
        s, r, c = rng.integers(0, depth), rng.integers(55, 85), rng.integers(10, width - 20)
        pixels[s, r : r + 8, c : c + 8] = 5
    pixels += rng.integers(0, 5, pixels.shape).astype(np.uint8)
    volume = CanonicalVolume(f"v{seed}", pixels, band, 140.0, 30.0, np.zeros((depth, width), np.int16))
    view = geometry.apply_geometry(pixels, geometry.center_crop(recipe.preprocessing), recipe.preprocessing.image_size)
    seen = np.ones(view.shape, bool)
    seen[12:] = False
    return FluidEye(volume, (view < 12) & seen, seen)


@pytest.mark.slow
def test_dark_pockets_are_found_by_grey_values_and_by_patches_and_not_by_noise() -> None:
    recipe, eyes, said = load_recipe(RECIPE), [drawn(1), drawn(2)], Said()
    say_fluid(eyes, with_intensity(recipe), said, 50)
    value, low, high, scans = said["fluid_dice_real"]
    assert value > 0.8
    assert low is not None
    assert high is not None
    assert low <= value <= high
    assert scans == 24  # slices within the scan, of both eyes
    assert said["fluid_dice_real_01_to_04"][3] == 12
    patches = Said()
    say_fluid(eyes, with_tokens(of_pixels(recipe), recipe), patches, 50)
    index = of_pixels(recipe)([eyes[0].volume])[0].index

    def noise(volumes: list[CanonicalVolume]) -> list[Tokens]:
        rng = np.random.default_rng(3)
        return [Tokens(rng.normal(size=(len(index), 16)), index) for _ in volumes]

    nothing = Said()
    say_fluid(eyes, with_tokens(noise, recipe), nothing, 50)
    assert nothing["fluid_dice_real"][0] < patches["fluid_dice_real"][0]
    assert nothing["fluid_dice_real"][0] < 0.3


def test_the_unet_gives_a_logit_a_voxel_and_its_shifts_keep_pairs_together() -> None:
    assert UNet()(torch.zeros(2, 1, 32, 48)).shape == (2, 1, 32, 48)
    x = torch.rand(1, 1, 8, 8)
    moved = fluid._flipped(x, 2 * x)
    assert torch.equal(2 * moved[0], moved[1])


def test_nothing_is_there_without_a_folder(tmp_path: Path) -> None:
    assert not fluid.are_there(None)
    assert not fluid.are_there(tmp_path)


@pytest.mark.data
def test_the_masks_lie_on_the_dark_of_the_real_eyes(real_scans: Path, tmp_path: Path) -> None:
    if not fluid.are_there(real_scans):
        pytest.skip("the two Duke eyes are not there")
    place = fluid.real_store(tmp_path, real_scans, RECIPE)
    for eye in fluid.read_eyes(place, real_scans):
        preprocessing = load_recipe(RECIPE).preprocessing
        view = geometry.apply_geometry(eye.volume.pixels, geometry.center_crop(preprocessing), preprocessing.image_size)
        inside = eye.seen.any(axis=(1, 2))
        assert inside.sum() == 11
        size = eye.volume.pixels.shape[1]
        retina = geometry.tissue_mask(
            eye.volume.band, geometry.center_crop(preprocessing), size, preprocessing.image_size
        )
        assert (eye.fluid & retina).sum() > 0.85 * eye.fluid.sum()
        around = retina & ~eye.fluid & eye.fluid.any(axis=1, keepdims=True)
        assert view[eye.fluid].mean() < 0.7 * view[around].mean()
        wrong = np.roll(eye.fluid, 12, axis=2) & retina  # a mask that lies elsewhere is not dark
        assert view[eye.fluid].mean() < 0.8 * view[wrong].mean()
