"""Surfaces are read from the outline of the tissue, and corrected by tokens that know more."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.exam.surface_head import FOLDS, LabelledEye, SurfaceHead, TokenEye, outline_features

GRID, PATCH = (2, 8, 6), (2, 4, 8)  # 4 x 32 x 48 voxels; two coarse columns a patch
COLUMNS = GRID[0] * GRID[2]


def eye(rng: np.random.Generator, know: float) -> tuple[TokenEye, np.ndarray]:
    """Tissue from about a quarter to three quarters; one surface somewhere in it, which each token knows by `know`."""
    d, h, w = GRID
    middle = 16 + rng.normal(0, 2.5, (d, w))  # voxels
    index = np.full(GRID, -1)
    depth = np.arange(h)[None, :, None]
    there = (depth >= 2) & (depth <= 5) & (rng.random(GRID) < 0.97)
    index[there] = np.arange(int(there.sum()))
    above = middle[:, None, :] - depth * PATCH[1]
    features = rng.normal(0, 0.2, (int(there.sum()), 5))
    features[:, 0] += know * above[there]
    truth = np.repeat(np.repeat(middle[None], 2, axis=1), 2, axis=2)
    return TokenEye(features, index, PATCH), truth


def error(know: float, without_features: bool = False) -> float:
    rng = np.random.default_rng(5)
    eyes = [eye(rng, know) for _ in range(12)]
    if without_features:
        eyes = [(one._replace(features=one.features[:, :0]), truth) for one, truth in eyes]
    labelled = [LabelledEye(*one, np.full(COLUMNS, number % FOLDS)) for number, one in enumerate(eyes[:8])]
    head = SurfaceHead(labelled)
    return float(np.mean([np.abs(head.depths(one) - truth).mean() for one, truth in eyes[8:]]))


def test_tokens_that_know_the_depth_correct_the_outline_and_noise_does_not_spoil_it() -> None:
    outline = error(0.0, without_features=True)
    assert outline == pytest.approx(2.0, abs=0.5)  # the mean deviation of the surface, which the outline cannot see
    assert error(1.0) < 0.3 * outline
    assert error(0.0) < 1.05 * outline


def test_what_is_unknown_is_not_learned_from() -> None:
    rng = np.random.default_rng(6)
    eyes = [eye(rng, 1.0) for _ in range(6)]
    holes = [truth.copy() for _, truth in eyes]
    for one in holes:
        one[:, :, :2] = np.nan
    folds = [np.full(COLUMNS, number % FOLDS) for number in range(6)]
    head = SurfaceHead([LabelledEye(one, truth, at) for (one, _), truth, at in zip(eyes, holes, folds, strict=True)])
    found = head.depths(eyes[0][0])
    assert found.shape == eyes[0][1].shape
    assert np.isfinite(found).all()
    assert np.abs(found - eyes[0][1]).mean() < 0.8


def test_a_volume_without_tissue_has_the_middle_and_one_fold_is_refused() -> None:
    assert outline_features(np.full(GRID, -1)) == pytest.approx(np.full((COLUMNS, 8), 0.5))
    one, truth = eye(np.random.default_rng(7), 1.0)
    with pytest.raises(ValueError, match="two folds"):
        SurfaceHead([LabelledEye(one, truth, np.zeros(COLUMNS, int))])
