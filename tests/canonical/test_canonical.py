"""Canonical volumes: resampling without aliasing, a band that follows the retina, reversible geometry."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from layered_eye import BRUCH_ROW, COLUMNS, FRAMES, PREPROCESSING, ROWS, eye
from octjepa.errors import VolumeRejected
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume


def band_of(volume: OCTVolume, preprocessing: Preprocessing = PREPROCESSING) -> tuple[np.ndarray, np.ndarray, int]:
    from octjepa.canonical.pipeline import BAND_BELOW_BRUCH_MM, canonicalise

    made = canonicalise(volume, preprocessing).volume
    below = round(BAND_BELOW_BRUCH_MM / preprocessing.target_spacing_mm[1])
    inside = made.band[0] >= 0
    return made.band[0][inside], made.band[1][inside] - below, int(inside.sum())


def test_the_band_follows_a_tilted_bent_and_moving_retina_to_the_row() -> None:
    anchor = round(0.65 * (PREPROCESSING.stored_size[1] - 1))
    for volume in (eye(), eye(tilt=18), eye(curve=-15), eye(motion=3), eye(tilt=-12, curve=10, motion=4)):
        ilm, bruch, _ = band_of(volume)
        assert np.abs(bruch - anchor).mean() < 1.5
        assert np.abs((bruch - ilm) - 32).mean() < 2.5


def test_flatten_none_keeps_the_tilt_and_plane_keeps_the_bend() -> None:
    def spread(flatten: str, **shape: float) -> float:
        made = band_of(eye(**shape), PREPROCESSING.model_copy(update={"flatten": flatten}))
        return float(np.ptp(np.percentile(made[1], [2, 98])))

    assert spread("none", tilt=15) > 20
    assert spread("plane", tilt=15) < 4
    assert spread("plane", curve=15) > 8
    assert spread("quadratic", curve=15) < 4


def test_left_eyes_are_mirrored_and_it_is_recorded() -> None:
    from octjepa.canonical.pipeline import canonicalise

    right, left = canonicalise(eye("OD"), PREPROCESSING), canonicalise(eye("OS"), PREPROCESSING)
    assert (right.mirrored, left.mirrored) == (False, True)
    for name in ("pixels", "band", "shifts"):
        assert np.array_equal(getattr(right.volume, name), getattr(left.volume, name)[..., ::-1])
    native = canonicalise(eye("OS"), PREPROCESSING.model_copy(update={"orientation": "native"}))
    assert not native.mirrored
    assert np.array_equal(native.volume.pixels, right.volume.pixels)


def test_shifts_undo_the_flattening() -> None:
    from octjepa.canonical.pipeline import canonicalise

    volume = eye(tilt=15)
    made = canonicalise(volume, PREPROCESSING).volume
    depth, height, width = made.pixels.shape
    slices = np.flatnonzero((made.band[0] >= 0).any(axis=1))
    columns = np.flatnonzero((made.band[0] >= 0).any(axis=0))
    below = round(0.15 / 0.0078)
    native_bruch = made.band[1] - below - made.shifts
    x_mm = (columns - (width - 1) / 2) * 0.06
    expected = BRUCH_ROW + 15 * x_mm / (COLUMNS * 0.035 / 2) + 0.3 * (FRAMES - 1) / 2
    found = native_bruch[np.ix_(slices, columns)].mean(axis=0)
    assert np.abs(found - expected).mean() < 2
    assert depth == PREPROCESSING.stored_size[0]
    assert height == PREPROCESSING.stored_size[1]


def test_padding_is_zero_outside_the_scan_and_outside_the_band() -> None:
    from octjepa.canonical.pipeline import canonicalise

    made = canonicalise(eye(), PREPROCESSING).volume
    outside = made.band[0] < 0
    assert outside.any()
    assert not made.pixels.transpose(0, 2, 1)[outside].any()
    assert (made.band[1][outside] == -1).all()
    # 120 columns of 0.035 mm are 70 of 0.06 mm; 16 slices of 0.15 mm are 8 of 0.3 mm.
    assert (~outside).any(axis=0).sum() == 70
    assert (~outside).any(axis=1).sum() == 8


def test_going_coarser_averages_every_sample() -> None:
    from octjepa.canonical.resample import centred_positions, resampling_matrix

    matrix = resampling_matrix(centred_positions(512, 0.0117), centred_positions(64, 0.0936), 0.0936)
    assert (matrix.sum(axis=0) > 0.5 * 64 / 512).all()  # plain interpolation would read 128 of the 512
    assert matrix.sum(axis=1) == pytest.approx(1)
    stripes = np.arange(512) % 2
    assert np.ptp(matrix @ stripes) < 0.05
    finer = resampling_matrix(centred_positions(10, 0.1), centred_positions(30, 1 / 30), 1 / 30)
    line = finer @ centred_positions(10, 0.1)
    assert np.allclose(line[2:-2], centred_positions(30, 1 / 30)[2:-2], atol=1e-6)


def test_uneven_positions_are_resampled_where_they_lie() -> None:
    from octjepa.canonical.resample import centred_positions, resampling_matrix

    positions = np.array([0, 0.1, 0.2, 0.6, 0.7, 1.0]) - 0.5
    target = centred_positions(9, 0.1)
    assert np.allclose(resampling_matrix(positions, target, 0.1) @ positions, target, atol=0.02)


def test_registration_fill_changes_neither_band_nor_contrast() -> None:
    from octjepa.canonical.pipeline import canonicalise

    clean = eye()
    filled = clean.pixels.copy()
    corner = np.add.outer(np.arange(ROWS) * 3, np.arange(COLUMNS)) < 90
    filled[:, corner] = 255
    filled[:, -25:] = 255
    made, reference = canonicalise(eye(pixels=filled), PREPROCESSING), canonicalise(clean, PREPROCESSING)
    assert "fill_masked" in made.notes
    assert "fill_masked" not in reference.notes
    inside = made.volume.band[0] >= 0
    assert np.abs(made.volume.band.astype(int) - reference.volume.band)[:, inside].mean() < 1
    assert abs(made.volume.tissue_mean - reference.volume.tissue_mean) < 4
    assert made.volume.pixels[:, :20].max() < 120


def test_a_black_vitreous_is_no_fill() -> None:
    """A threshold or a mask sets all above the retina to zero; nothing of it lies in the tissue's brightness."""
    from octjepa.canonical.pipeline import canonicalise

    clean = eye(curve=10)
    x = np.linspace(-1, 1, COLUMNS)
    ilm = BRUCH_ROW - 31 + 10 * x**2 + 0.3 * np.arange(FRAMES)[:, None]
    above = np.arange(ROWS)[None, :, None] < ilm[:, None]
    black = np.where(above, 0, np.maximum(clean.pixels, 8)).astype(np.uint8)
    made, reference = canonicalise(eye(pixels=black), PREPROCESSING), canonicalise(clean, PREPROCESSING)
    assert "fill_masked" not in made.notes
    inside = made.volume.band[0] >= 0
    assert np.abs(made.volume.band.astype(int) - reference.volume.band)[:, inside].mean() < 1
    noisy = np.maximum(clean.pixels, 8)  # a background that is not dark, with fill above it
    noisy[:, :30] = 0
    filled = canonicalise(eye(pixels=noisy), PREPROCESSING)
    assert "fill_masked" in filled.notes


def test_white_fill_below_full_scale_is_removed() -> None:
    """Of signed data, or of 12 bits in 16: the largest value of the volume, but not 255 after scaling."""
    from octjepa.canonical.pipeline import canonicalise

    clean = eye()
    pixels = (clean.pixels * 0.6).astype(np.uint8)
    corner = np.add.outer(np.arange(ROWS) * 3, np.arange(COLUMNS)) < 90
    pixels[:, corner] = 200
    made, reference = canonicalise(eye(pixels=pixels), PREPROCESSING), canonicalise(clean, PREPROCESSING)
    assert "fill_masked" in made.notes
    inside = made.volume.band[0] >= 0
    assert np.abs(made.volume.band.astype(int) - reference.volume.band)[:, inside].mean() < 1
    pixels[:, corner] = 20
    assert "fill_masked" not in canonicalise(eye(pixels=pixels), PREPROCESSING).notes


def test_blank_frames_are_left_out_and_mostly_blank_scans_refused() -> None:
    from octjepa.canonical.pipeline import canonicalise

    pixels = eye().pixels.copy()
    pixels[5] = 0
    made = canonicalise(eye(pixels=pixels), PREPROCESSING)
    assert "blank_frames=1" in made.notes
    reference = canonicalise(eye(), PREPROCESSING)
    assert abs(made.volume.tissue_mean - reference.volume.tissue_mean) < 3
    pixels[2:14] = 0
    with pytest.raises(VolumeRejected, match="blank"):
        canonicalise(eye(pixels=pixels), PREPROCESSING)


def test_where_b_scans_at_an_end_are_blank_the_stored_scan_is_shorter() -> None:
    from octjepa.canonical.pipeline import canonicalise

    whole = canonicalise(eye(), PREPROCESSING).volume
    assert (whole.band >= 0).any(axis=(0, 2)).all()
    for blank, outside in ((slice(11, None), slice(6, None)), (slice(0, 5), slice(0, 2))):
        pixels = eye().pixels.copy()
        pixels[blank] = 0
        made = canonicalise(eye(pixels=pixels), PREPROCESSING)
        assert "blank_frames=5" in made.notes
        is_outside = np.zeros(8, bool)
        is_outside[outside] = True
        assert (made.volume.band[:, is_outside] == -1).all()
        assert (made.volume.pixels[is_outside] == 0).all()
        assert (made.volume.band[:, ~is_outside] >= 0).any(axis=(0, 2)).all()
        assert not any(np.array_equal(one, other) for one, other in pairwise(made.volume.pixels[~is_outside]))


def test_scans_without_a_retina_are_refused() -> None:
    from octjepa.canonical.pipeline import canonicalise

    noise = np.random.default_rng(0).integers(0, 30, (16, 180, 120)).astype(np.uint8)
    with pytest.raises(VolumeRejected, match="no_tissue"):
        canonicalise(eye(pixels=noise), PREPROCESSING)


@pytest.mark.parametrize("loudest", [30, 60, 120])
def test_louder_noise_is_no_retina_either(loudest: int) -> None:
    from octjepa.canonical.surfaces import find_surfaces

    noise = np.random.default_rng(0).integers(0, loudest, (16, 180, 128)).astype(np.float32)
    with pytest.raises(VolumeRejected, match="no_tissue"):
        find_surfaces(noise, 0.0078, 0.047)


@pytest.mark.parametrize(("depth_mm", "column_mm"), [(0.0078, 0.035), (0.0039, 0.0117), (0.0078, 0.2)])
def test_surfaces_are_found_to_the_depth_index_whatever_the_coarse_search_leaves_over(
    depth_mm: float, column_mm: float
) -> None:
    from octjepa.canonical.surfaces import find_surfaces

    found = find_surfaces(eye(tilt=9).pixels[:, :179, :119].astype(np.float32), depth_mm, column_mm)
    x = np.linspace(-1, 1, COLUMNS)[None, :119]
    true = BRUCH_ROW + 9 * x + 0.3 * np.arange(FRAMES)[:, None]
    assert np.abs(found.bm - true).mean() < 0.7
    assert np.abs(found.ilm - (true - 31.5)).mean() < 0.9
    assert np.abs(found.bm - true).max() < 4


@pytest.mark.parametrize(
    "changes",
    [
        {"spacing_mm": (0.15, 5e4, 0.035)},  # 414 TB where nothing checks
        {"spacing_mm": (0.15, float("inf"), 0.035)},
        {"spacing_mm": (0.15, float("nan"), 0.035)},
        {"slice_positions_mm": np.r_[np.arange(FRAMES - 1) * 0.15, 1e9]},
    ],
)
def test_a_size_beyond_memory_is_refused_before_it_is_allocated(changes: dict[str, object]) -> None:
    import tracemalloc

    from octjepa.canonical.pipeline import canonicalise

    volume = eye(**changes)
    tracemalloc.start()
    try:
        with pytest.raises(VolumeRejected, match="size_implausible"):
            canonicalise(volume, PREPROCESSING)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_stored_size_beyond_memory_is_refused_too() -> None:
    from octjepa.canonical.pipeline import canonicalise

    tiny = Preprocessing(image_size=(16, 4096, 65536), margin=(0, 0, 0), target_spacing_mm=(0.3, 1e-7, 1e-7))
    with pytest.raises(VolumeRejected, match="size_implausible"):
        canonicalise(eye(), tiny)


@pytest.mark.parametrize("frequency", [0.8, 0.9, 1.0, 1.3, 1.7, 2.4])
def test_a_grating_beyond_the_targets_nyquist_limit_does_not_alias(frequency: float) -> None:
    """`frequency` in periods a target step; interpolating leaves more than half of it as a coarse pattern."""
    from octjepa.canonical.resample import centred_positions, resampling_matrix

    source, target, step = centred_positions(4096, 0.002), centred_positions(200, 0.036), 0.036
    for phase in (0.0, 0.7, 1.5):
        grating = np.sin(2 * np.pi * frequency * source / step + phase)
        left = (resampling_matrix(source, target, step) @ grating)[5:-5]
        assert np.abs(left).max() < 0.08, np.abs(left).max()
    plain = np.interp(target, source, grating)
    assert np.ptp(plain) > 0.5 or frequency in (1.0,)
    passed = resampling_matrix(source, target, step) @ np.sin(2 * np.pi * 0.1 * source / step)
    assert np.abs(passed[5:-5]).max() > 0.9  # what the target can hold goes through


def test_drusen_stay_raised_over_the_flattened_surface() -> None:
    from octjepa.canonical.surfaces import fit_surface

    z, x = np.meshgrid(np.linspace(-1, 1, 20), np.linspace(-1, 1, 90), indexing="ij")
    bruch = 60 + 8 * x - 5 * x**2 + 2 * z
    raised = bruch.copy()
    raised[6:12, 20:45] -= 12
    offsets = np.rint(np.random.default_rng(2).normal(0, 4, 20))
    fit = fit_surface(raised + offsets[:, None], depth_mm=0.0078)
    assert np.abs(fit.surface + fit.offsets[:, None] - bruch - offsets[:, None]).max() < 1.5


@pytest.mark.data
def test_the_band_on_real_eyes(real_scans: Path) -> None:
    from octjepa.canonical.pipeline import canonicalise
    from octjepa.read.reader import read_volume

    made = canonicalise(read_volume(real_scans / "duke_dme_eye01_11x496x768.dcm"), Preprocessing())
    assert "fill_masked" in made.notes
    ilm, bottom = made.volume.band[:, :, :][:, made.volume.band[0] >= 0]
    thickness_mm = (bottom - ilm) * 0.0078 - 0.15
    assert np.percentile(thickness_mm, 5) > 0.12
    assert np.percentile(thickness_mm, 99) < 0.85
    assert float(made.measurements["quality"]) > 0.5
    # Two of the eleven B-scans have a nerve fibre layer as bright as the RPE: none may take the one for the other.
    flat = round(0.65 * (made.volume.pixels.shape[1] - 1)) + round(0.15 / 0.0078)
    assert np.percentile(np.abs(bottom - flat), 98) < 8
