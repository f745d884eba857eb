"""Fluid and surfaces of one eye learned from another: drawn eyes whose truth is known, and grades of the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.exam import real_eyes, real_tasks
from benchmarks.exam.real_decoder import fluid_from_decoder, labels_of, prior_by_depth, read_decoded
from benchmarks.exam.real_eyes import BSCANS, GRADED, RealEye, fill_up, shifted
from benchmarks.exam.results import Finding, LeftOut, Results, RowName
from benchmarks.exam.settings import RECIPE
from benchmarks.exam.tokens import Featurise
from benchmarks.exam.unet import UNet, shift_and_mirror, train_unet

from octjepa.config import load_recipe
from octjepa.embed.shard import patch_intensity
from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.pooling import TokenFeatures
from octjepa.model import VJEPA3D
from octjepa.tasks.segment.recipe import DecoderRecipe
from octjepa.views import geometry, intensity, tokens
from octjepa.views.sample import select_tissue_tokens
from octjepa.volume import CanonicalVolume

RECIPE_READ = load_recipe(RECIPE)


def drawn(seed: int) -> RealEye:
    """Bright tissue with dark pockets, which are its fluid; four surfaces of which the last is where tissue ends."""
    preprocessing = RECIPE_READ.preprocessing
    depth, height, width = preprocessing.stored_size
    rng = np.random.default_rng(seed)
    bottom = 96 + rng.integers(-4, 5, depth)
    pixels = np.full((depth, height, width), 20, np.uint8)
    for number in range(depth):
        pixels[number, 50 : bottom[number]] = 150
    for _ in range(60):
        s, r, c = rng.integers(0, depth), rng.integers(55, 80), rng.integers(10, width - 20)
        pixels[s, r : r + 8, c : c + 8] = 5
    pixels += rng.integers(0, 5, pixels.shape).astype(np.uint8)
    band = np.stack([np.full((depth, width), 50), np.repeat(bottom[:, None] - 1, width, 1)]).astype(np.int16)
    volume = CanonicalVolume(f"v{seed}", pixels, band, 140.0, 30.0, np.zeros((depth, width), np.int16))
    view = geometry.apply_transform(pixels, geometry.center_crop(preprocessing), preprocessing.image_size)
    graded = np.ones(view.shape, bool)
    graded[GRADED:] = False
    margin = preprocessing.margin[1]
    depths = np.full((2, 4, depth, 32), np.nan)
    for number, row in enumerate((50, 60, 70)):
        depths[:, number, :GRADED] = row - margin
    depths[:, 3, :GRADED] = bottom[None, :GRADED, None] - margin
    depths[1] += 2
    return RealEye(f"eye{seed}", volume, (view < 12) & graded, graded, depths)


def of_patches(noise: bool = False) -> Featurise:
    """Intensity of each patch, as the exam's floor has it; or noise."""

    def featurise(volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        found, rng = [], np.random.default_rng(5)
        for volume in volumes:
            view, index, share = select_tissue_tokens(
                volume, RECIPE_READ, geometry.center_crop(RECIPE_READ.preprocessing)
            )
            table = intensity.lookup_table(volume.tissue_mean, volume.tissue_std)
            patches = table[tokens.extract_patches(view, RECIPE_READ.tokens.patch_size, index)]
            features = rng.normal(size=(len(index), 8)) if noise else np.hstack([patch_intensity(patches), patches])
            found.append(TokenFeatures(features.astype(np.float32), index, RECIPE_READ.grid, share[index]))
        return found

    return featurise


def encoder() -> PretrainedEncoder:
    torch.manual_seed(0)
    return PretrainedEncoder(VJEPA3D.from_recipe(RECIPE_READ).target_encoder, RECIPE_READ, "small")


@pytest.fixture(scope="module")
def eyes() -> list[RealEye]:
    return [drawn(1), drawn(2)]


def figures(found: Sequence[Finding]) -> dict[str, float]:
    return {one.metric: one.estimate.value for one in found}


@pytest.mark.slow
def test_dark_pockets_are_found_by_voxels_and_patches_and_not_by_noise(eyes: list[RealEye]) -> None:
    voxels = list(real_tasks.fluid(eyes, real_tasks.fluid_from_voxels(RECIPE_READ)))
    values = figures(voxels)
    assert values["dice"] > 0.8
    assert values["ap"] > 0.9
    assert voxels[0].estimate.n == 2 * BSCANS
    assert {"dice_eye1_to_eye2", "ap_eye2_to_eye1"} <= set(values)
    patches = figures(list(real_tasks.fluid(eyes, real_tasks.fluid_from_tokens(of_patches(), RECIPE_READ))))
    nothing = figures(list(real_tasks.fluid(eyes, real_tasks.fluid_from_tokens(of_patches(noise=True), RECIPE_READ))))
    assert patches["ap"] > 0.6
    assert nothing["ap"] < 0.2


@pytest.mark.slow
def test_a_decoder_finds_dark_pockets_wherever_the_labelled_eye_had_them(eyes: list[RealEye]) -> None:
    settings = DecoderRecipe(width=4, updates=12, batch=1, lr=2e-2)
    segment = fluid_from_decoder(encoder(), True, 0, settings)
    found = list(real_tasks.fluid(eyes, segment, "real_fluid_decoder"))
    assert {one.task for one in found} == {"real_fluid_decoder"}
    assert figures(found)["dice"] > 0.5
    short = settings.model_copy(update={"updates": 2})
    blind, seeing = (
        figures(list(real_tasks.fluid(eyes, fluid_from_decoder(encoder(), blind, 0, short)))) for blind in (True, False)
    )
    assert seeing["ap"] != blind["ap"]  # it reads tokens as well


def test_the_decoders_prior_knows_no_position_of_the_labelled_eye(eyes: list[RealEye]) -> None:
    labels = labels_of(eyes[0], RECIPE_READ.preprocessing)
    margin = RECIPE_READ.preprocessing.margin[1]
    assert (labels == 1).sum() == eyes[0].fluid.sum()
    assert (labels[GRADED:] == 255).all()
    assert (labels[:, :margin] == 255).all()
    shares = prior_by_depth([(eyes[0].volume, labels)]).shares
    assert (shares == shares[:, :1, :, :1]).all()
    graded = eyes[0].graded.any(axis=(0, 2))
    true = eyes[0].fluid.sum(axis=(0, 2)) / np.maximum(eyes[0].graded.sum(axis=(0, 2)), 1)
    assert np.allclose(shares[1, 0, margin:-margin, 0][graded], true[graded], atol=0.05)  # of every fourth column


@pytest.mark.slow
def test_surfaces_are_found_better_by_patches_than_by_noise_and_graders_differ_by_what_was_drawn(
    eyes: list[RealEye],
) -> None:
    um = RECIPE_READ.preprocessing.target_spacing_mm[1] * 1000
    patches = figures(list(real_tasks.real_surfaces(eyes, of_patches(), RECIPE_READ)))
    noise = figures(list(real_tasks.real_surfaces(eyes, of_patches(noise=True), RECIPE_READ)))
    assert patches["error_um"] < noise["error_um"]
    assert patches["error_um_bm"] < 4 * um
    assert figures(list(real_tasks.graders(eyes, RECIPE_READ)))["error_um"] == pytest.approx(2 * um, rel=1e-3)


def test_average_precision_is_of_ranks_and_of_what_a_resample_drew() -> None:
    true, every = np.array([[1.0, 0, 1], [0, 0, 0]]), np.array([[1.0, 1, 1], [1, 0, 0]])
    ranks = np.stack([true, every])
    assert real_tasks.precision_of_ranks(ranks, np.array([[1.0, 0], [0, 1]])) == pytest.approx(
        [(1 + 2 / 3) / 2, np.nan], nan_ok=True
    )


def test_a_shifted_eye_moves_its_grades_with_its_voxels(eyes: list[RealEye]) -> None:
    crop, size = geometry.center_crop(RECIPE_READ.preprocessing), RECIPE_READ.preprocessing.image_size
    moved = shifted(eyes[0], 3, -4)
    view, before = (geometry.apply_transform(one.volume.pixels, crop, size) for one in (moved, eyes[0]))
    assert np.array_equal(view[:, 3:, :-4], before[:, :-3, 4:])
    assert np.array_equal(moved.fluid[:, 3:, :-4], eyes[0].fluid[:, :-3, 4:])
    assert not moved.graded[:, :3].any()
    assert np.nanmax(np.abs(moved.depths[:, :, :, :-1] - eyes[0].depths[:, :, :, 1:] - 3)) == 0
    assert np.isnan(moved.depths[..., -1]).all()
    assert np.array_equal(moved.volume.band[0, :, :-8], eyes[0].volume.band[0, :, 8:] + 3)


def test_bscans_are_mirrored_behind_the_last() -> None:
    assert fill_up(np.arange(11)).tolist() == [*range(11), 9, 8, 7, 6, 5]


def test_the_unet_learns_dark_pockets_and_its_views_keep_pairs_together() -> None:
    assert UNet()(torch.zeros(2, 1, 32, 48)).shape == (2, 1, 32, 48)
    x = torch.rand(1, 1, 8, 8)
    moved = shift_and_mirror(x, 2 * x)
    assert torch.equal(2 * moved[0], moved[1])
    rng = np.random.default_rng(0)
    fluid = np.zeros((2, 32, 32), bool)
    fluid[:, 8:16, 8:24] = True
    images = np.where(fluid, -2.0, 1.0).astype(np.float32) + 0.1 * rng.normal(size=fluid.shape).astype(np.float32)
    net = train_unet(images, fluid, np.ones_like(fluid), 1.0, 0)
    with torch.inference_mode():
        logits = net(torch.from_numpy(images)[:, None])[:, 0].numpy()
    assert logits[fluid].mean() > logits[~fluid].mean()


def test_without_the_data_folder_the_task_is_left_out_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTJEPA_DATA", str(tmp_path))
    row, results = RowName("x", (4, 8, 8)), Results(tmp_path / "out")
    found = list(real_tasks.read_fluid(tmp_path, "encoder", of_patches(), RECIPE_READ))
    assert found == [LeftOut("real_fluid", "dice", 1, real_eyes.why_absent(tmp_path) or "", retry=True)]
    assert "duke_dme_eye01" in str(real_eyes.why_absent(tmp_path))
    results.add(row, "real_fluid", found, {})
    again = Results(tmp_path / "out")
    assert "OCTJEPA_DATA" in again.left_out[0].reason
    assert not again.has(row, "real_fluid")
    assert isinstance(next(real_tasks.read_surfaces(tmp_path, None, RECIPE_READ)), LeftOut)
    assert isinstance(next(read_decoded(tmp_path, encoder(), False, 0)), LeftOut)
    assert isinstance(next(real_tasks.read_unet(tmp_path, RECIPE_READ, 1.0, 0)), LeftOut)


@pytest.mark.slow
@pytest.mark.data
def test_grades_lie_on_the_real_eyes(real_scans: Path, tmp_path: Path) -> None:
    reason = real_eyes.why_absent(real_scans)
    if reason is not None:
        pytest.skip(reason)
    preprocessing = RECIPE_READ.preprocessing
    for eye in real_eyes.read_eyes(tmp_path, real_scans, preprocessing.model_copy(update={"flatten": "none"})):
        crop, size = geometry.center_crop(preprocessing), preprocessing.image_size
        view = geometry.apply_transform(eye.volume.pixels, crop, size).astype(float)
        retina = geometry.tissue_mask(eye.volume.band, crop, eye.volume.pixels.shape[1], size)
        assert (eye.fluid & retina).sum() > 0.85 * eye.fluid.sum()
        around = retina & ~eye.fluid & eye.fluid.any(axis=1, keepdims=True)
        assert view[eye.fluid].mean() < 0.7 * view[around].mean()
        ilm, bm = eye.depths[0][0], eye.depths[0][3]
        columns = np.arange(32) * 4 + 1
        known = np.flatnonzero(~np.isnan(ilm[5]) & ~np.isnan(bm[5]) & (ilm[5] > 6))
        above, below = (view[5][np.rint(ilm[5][known] + step).astype(int), columns[known]].mean() for step in (-5, 5))
        assert below > 1.3 * above  # tissue begins at the inner limiting membrane
        assert np.nanmean(bm - ilm) * 7.8 > 250
        assert real_eyes.disagreement_px(eye).mean() * 7.8 < 20
