"""The rows that every figure is read against say what they should, and learn nothing from the test people."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from octjepa.evaluate.features import covariate_features, majority_predictions
from octjepa.evaluate.targets import Target
from octjepa.metrics.scores import metric_value


def _target(
    train: list[float], test: list[float], classes: tuple[str, ...] = ("0", "1"), name: str = "lesion"
) -> Target:
    kind = int if classes else float
    rows = {"train": np.arange(len(train)), "val": np.arange(0), "test": len(train) + np.arange(len(test))}
    values = {"train": np.array(train, kind), "val": np.array([], kind), "test": np.array(test, kind)}
    return Target(name, "binary" if classes else "regression", rows, values, classes, "h", ())


def test_majority_says_the_training_shares() -> None:
    predicted = majority_predictions(_target([0, 0, 0, 1], [1, 1, 0]))
    assert predicted.scores.tolist() == [[0.75, 0.25]] * 3
    assert metric_value("auroc", predicted) == 0.5
    assert metric_value("balanced_accuracy", predicted) == 0.5
    assert metric_value("ece", predicted) == pytest.approx(abs(0.25 - 2 / 3))


def test_majority_of_a_quantity_is_the_training_mean() -> None:
    predicted = majority_predictions(_target([1.0, 3.0], [2.0, 5.0], classes=()))
    assert predicted.scores.tolist() == [[2.0], [2.0]]
    assert metric_value("mean_absolute_error", predicted) == 1.5


def test_covariates_fill_the_unknown_from_training_only() -> None:
    frame = pd.DataFrame(
        {
            "age": [50.0, np.nan, 60.0, 99.0, np.nan],
            "clinical_site": ["UW", "", "UW", "UCSD", "UW"],
            "device": ["one"] * 5,
        }
    )
    features, notes = covariate_features(frame, _target([0, 1, 1], [0, 1]))
    assert features[:, 0].tolist() == [50, 55, 60, 99, 55]  # the median of the training ages, not of all
    assert features[:, 1].tolist() == [0, 1, 0, 0, 1]
    assert features[:, 2:4].tolist() == [[0, 1], [1, 0], [0, 1], [0, 0], [0, 1]]  # "" and UW; UCSD was never trained on
    assert notes == ["lesion: device is constant or unknown in training; the covariate baseline ignores it"]


def test_a_covariate_is_not_its_own_predictor() -> None:
    frame = pd.DataFrame({"age": [50.0, 60.0, 70.0], "clinical_site": ["a", "b", "a"], "device": ["x", "y", "x"]})
    features, notes = covariate_features(frame, _target([1.0, 2.0], [3.0], classes=(), name="age"))
    assert features.shape == (3, 4)
    assert any("it is the target" in text for text in notes)
