"""Volumes, area and central thickness, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from octjepa.phantom import Truth
from octjepa.phantom.anatomy import BM, ILM, SURFACES
from octjepa.phantom.eye import MEASURES, eye_measures

SPACING = (0.25, 0.01, 0.05)  # a voxel holds 0.000125 mm3, an A-scan covers 0.0125 mm2


def flat_truth(**masks: np.ndarray) -> Truth:
    """9 slices of 31 columns, ILM at 10, Bruch's membrane at 35; the fovea at slice 4, column 15."""
    surfaces = np.zeros((len(SURFACES), 9, 31), np.float32)
    surfaces[ILM], surfaces[BM] = 10, 35
    return Truth(surfaces, masks, (1.0, 0.75))


def box(slices: slice, rows: slice, columns: slice) -> np.ndarray:
    mask = np.zeros((9, 50, 31), bool)
    mask[slices, rows, columns] = True
    return mask


def test_volumes_are_voxels_and_atrophy_is_a_scans() -> None:
    truth = flat_truth(
        intraretinal_fluid=box(slice(2, 4), slice(20, 25), slice(3, 7)),
        subretinal_fluid=box(slice(0, 1), slice(30, 32), slice(0, 3)),
        drusen=box(slice(5, 6), slice(33, 35), slice(10, 15)),
        geographic_atrophy=box(slice(1, 3), slice(32, 35), slice(20, 30)),
    )
    measures = eye_measures(truth, SPACING)
    assert tuple(measures) == MEASURES
    assert measures["intraretinal_fluid_mm3"] == pytest.approx(2 * 5 * 4 * 0.000125)
    assert measures["subretinal_fluid_mm3"] == pytest.approx(2 * 3 * 0.000125)
    assert measures["drusen_mm3"] == pytest.approx(2 * 5 * 0.000125)
    assert measures["atrophy_mm2"] == pytest.approx(2 * 10 * 0.0125)
    assert measures["central_thickness_um"] == pytest.approx(250)


def test_an_eye_without_lesions_measures_nothing() -> None:
    measures = eye_measures(flat_truth(), SPACING)
    assert [measures[name] for name in MEASURES[:4]] == [0, 0, 0, 0]


def test_central_thickness_is_the_mean_within_half_a_millimetre_of_the_fovea() -> None:
    truth = flat_truth()
    truth.surfaces_px[ILM][4, 15 + 11 :] = 0  # 0.55 mm away and more: not counted
    assert eye_measures(truth, SPACING)["central_thickness_um"] == pytest.approx(250)
    # The slice of the fovea counts 2 * 10 + 1 A-scans, those 0.25 mm away 2 * 8 + 1, those 0.5 mm away 1.
    truth.surfaces_px[ILM][4, 15] = 0
    assert eye_measures(truth, SPACING)["central_thickness_um"] == pytest.approx(250 + 100 / (21 + 2 * 17 + 2))
