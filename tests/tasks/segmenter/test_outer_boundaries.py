"""The ILM and Bruch's membrane that are shown come from the surface finder, on the scan's own samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import octjepa
from octjepa.model.bscan_inference import near_bscans
from octjepa.tasks.segmenter.outer_boundaries import outer_boundaries, with_outer_boundaries
from octjepa.volume import OCTVolume


def bright_band(slices: int = 4, top: int = 60, thickness: int = 60) -> OCTVolume:
    """A retina of even thickness with a bright RPE; the ILM is at row `top`, Bruch's membrane `thickness` below."""
    pixels = np.random.default_rng(3).integers(8, 24, (slices, 200, 96)).astype(np.uint8)
    pixels[:, top : top + thickness] += 70
    pixels[:, top + thickness - 6 : top + thickness] += 110
    return OCTVolume(pixels, (0.12, 0.0039, 0.03), {}, "p", "device")


def alone(volume: OCTVolume) -> np.ndarray:
    return near_bscans(len(volume.pixels), volume.spacing_mm[0], None, sparse=True)


def test_the_finder_decides_and_the_other_boundaries_stay_between() -> None:
    volume = bright_band()
    network = np.broadcast_to(np.linspace(80, 122, 8, dtype=np.float32)[:, None, None], (8, 4, 96)).copy()
    rows, error_um = with_outer_boundaries(network, np.full((8, 4, 96), 2, np.float32), volume, alone(volume))
    assert np.abs(rows[0] - 59.5).max() < 2
    assert np.abs(rows[7] - 119.5).max() < 3
    assert (np.diff(rows, axis=0) >= 0).all()
    # The methods are 20 rows apart at the ILM: an error of at least half of that is expected.
    assert error_um[0].min() > 35
    assert (error_um[3] == 2).all()


def test_over_drusen_the_lowest_boundary_is_that_of_the_network() -> None:
    volume = bright_band()
    network = np.broadcast_to(np.linspace(60, 120, 8, dtype=np.float32)[:, None, None], (8, 4, 96)).copy()
    network[7, :, 30:50] += 12  # 47 um below the bright layer that the finder follows
    rows, error_um = with_outer_boundaries(network, np.zeros((8, 4, 96), np.float32), volume, alone(volume))
    assert (rows[7, :, 30:50] == network[7, :, 30:50]).all()
    assert error_um[7, :, 30:50].min() > 15  # the methods differ
    assert np.abs(rows[7, :, 55:] - 119.5).max() < 3


def test_the_network_keeps_blank_bscans_and_cut_off_ascans() -> None:
    volume = bright_band()
    pixels = volume.pixels.copy()
    pixels[1] = 0
    volume = replace(volume, pixels=pixels)
    assert np.isnan(outer_boundaries(volume, alone(volume))[:, 1]).all()
    network = np.broadcast_to(np.linspace(50, 140, 8, dtype=np.float32)[:, None, None], (8, 4, 96)).copy()
    network[0, 2, :40] = 0.5
    rows, _ = with_outer_boundaries(network, np.zeros((8, 4, 96), np.float32), volume, alone(volume))
    assert (rows[:, 1] == network[:, 1]).all()
    assert (rows[0, 2, :40] == 0.5).all()


def test_an_uncertain_slice_spacing_does_not_mix_bscans() -> None:
    """A B-scan whose neighbours are of another place of the retina keeps its own surfaces."""
    low, high = bright_band(1, 40), bright_band(1, 120)
    mixed = replace(low, pixels=np.concatenate([low.pixels, high.pixels, low.pixels]))
    rows = outer_boundaries(mixed, alone(mixed))
    for number, single in enumerate((low, high, low)):
        np.testing.assert_array_equal(rows[:, number], outer_boundaries(single, alone(single))[:, 0])


def test_surfaces_of_real_eyes_are_as_close_as_two_graders(real_scans: Path) -> None:
    layers = np.load(real_scans.parent / "labels" / "duke_dme_eye01_layers.npz")["layers"]
    volume = octjepa.read_volume(real_scans / "duke_dme_eye01_11x496x768.dcm")
    assert "slice" in volume.uncertain
    rows = outer_boundaries(volume, alone(volume))
    um = 1000 * volume.spacing_mm[1]
    for found, graded in zip(rows, (layers[:, 0], layers[:, 7]), strict=True):
        assert np.nanmean(np.abs(found - graded)) * um < 5.5  # 4.8 and 3.7


def test_thickness_of_real_eyes_is_that_of_the_graders(real_scans: Path) -> None:
    for name in ("01", "04"):
        layers = np.load(real_scans.parent / "labels" / f"duke_dme_eye{name}_layers.npz")["layers"]
        volume = octjepa.read_volume(real_scans / f"duke_dme_eye{name}_11x496x768.dcm")
        rows = outer_boundaries(volume, alone(volume))
        graded = np.isfinite(layers[:, 0]) & np.isfinite(layers[:, 7])
        um = 1000 * volume.spacing_mm[1]
        measured_um = float((rows[1] - rows[0])[graded].mean()) * um
        assert measured_um == pytest.approx(float((layers[:, 7] - layers[:, 0])[graded].mean()) * um, abs=4)
