"""Stated and true frequencies against scikit-learn; intervals that speak only where they can."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.scores import Predictions, brier, expected_calibration_error
from octjepa.metrics.thresholds import reliability_curve


def _two(n: int = 600, seed: int = 0) -> tuple[Predictions, list[str]]:
    rng = np.random.default_rng(seed)
    stated = rng.random(n)
    truth = (rng.random(n) < stated).astype(int)
    both = np.stack([1 - stated, stated], 1)
    return Predictions(truth, both, both), [str(index // 2) for index in range(n)]


def test_brier_equals_scikit_learn() -> None:
    predicted, _ = _two()
    weights = np.random.default_rng(1).integers(0, 4, (600, 5)).astype(float)
    found = brier(predicted, weights)
    for index, drawn in enumerate(weights.T):
        expected = brier_score_loss(predicted.truth, predicted.calibrated[:, 1], sample_weight=drawn)
        assert found[index] == pytest.approx(expected, abs=1e-12)
    sure = np.eye(3)[[0, 1, 2]]
    assert brier(Predictions(np.array([0, 1, 2]), sure, sure), np.ones((3, 1)))[0] == 0
    assert brier(Predictions(np.array([1, 2, 0]), sure, sure), np.ones((3, 1)))[0] == 1
    assert np.isnan(brier(predicted, np.zeros((600, 1)))[0])


def test_the_curve_equals_scikit_learn_and_sums_to_the_error() -> None:
    predicted, people = _two()
    curve = reliability_curve(predicted, Draws(people, 300, 0), people)
    happened, stated = calibration_curve(predicted.truth, predicted.calibrated[:, 1], n_bins=10, strategy="quantile")
    assert [point.stated for point in curve] == pytest.approx(stated.tolist(), abs=1e-9)
    assert [point.happened for point in curve] == pytest.approx(happened.tolist(), abs=1e-9)
    gap = sum(point.n * abs(point.stated - point.happened) for point in curve) / 600
    assert gap == pytest.approx(expected_calibration_error(predicted, np.ones((600, 1)))[0])
    held = [point.low <= point.stated <= point.high for point in curve if point.low is not None]
    assert len(held) >= 8
    assert sum(held) >= len(held) - 2  # the model is honest: 95 % of the points are on the diagonal


def test_a_point_without_both_outcomes_has_no_interval() -> None:
    stated = np.r_[np.full(20, 0.1), np.full(20, 0.9)]
    both = np.stack([1 - stated, stated], 1)
    people = [str(index) for index in range(40)]
    curve = reliability_curve(Predictions((stated > 0.5).astype(int), both, both), Draws(people, 100, 0), people)
    assert [(point.happened, point.low) for point in curve] == [(0.0, None), (1.0, None)]
