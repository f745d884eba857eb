"""Every metric equals scikit-learn's under sample weights; what cannot be said is NaN."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as sk

from octjepa.metrics.intervals import METRIC_SCALE
from octjepa.metrics.scores import (
    ECE_BINS,
    METRICS,
    TASK_METRICS,
    Predictions,
    confusion,
    expected_calibration_error,
    measure,
    metric_value,
    weighted_auroc,
)


def _predictions(classes: int, n: int = 90, seed: int = 0, ties: bool = True) -> Predictions:
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.arange(n) % classes)
    scores = rng.dirichlet(np.ones(classes), n) + 0.6 * np.eye(classes)[truth] * rng.random((n, 1))
    scores = scores / scores.sum(axis=1, keepdims=True)
    if ties:
        first = np.round(scores[:, :-1], 1)
        scores = np.hstack([first, 1 - first.sum(axis=1, keepdims=True)])
    return Predictions(truth, scores, scores)


def _weights(n: int, resamples: int = 25, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4, (n, resamples)).astype(float)


@pytest.mark.parametrize("ties", [True, False])
def test_two_class_curves_equal_scikit_learn(ties: bool) -> None:
    predicted = _predictions(2, ties=ties)
    weights = _weights(90)
    ours = {name: measure(name, predicted, weights) for name in TASK_METRICS["binary"]}
    for index, drawn in enumerate(weights.T):
        score = predicted.scores[:, 1]
        assert ours["auroc"][index] == pytest.approx(
            sk.roc_auc_score(predicted.truth, score, sample_weight=drawn), abs=1e-12
        )
        expected = sk.average_precision_score(predicted.truth, score, sample_weight=drawn)
        assert ours["auprc"][index] == pytest.approx(expected, abs=1e-12)
        false_alarms, hits, _ = sk.roc_curve(predicted.truth, score, sample_weight=drawn, drop_intermediate=False)
        expected = hits[false_alarms <= 0.1 + 1e-12].max()
        assert ours["sensitivity_at_specificity_90"][index] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("classes", [2, 4])
def test_decisions_equal_scikit_learn(classes: int) -> None:
    predicted = _predictions(classes)
    weights = _weights(90)
    accuracy, f1 = measure("balanced_accuracy", predicted, weights), measure("f1_macro", predicted, weights)
    for index, drawn in enumerate(weights.T):
        decided = predicted.predicted_classes()
        expected = sk.balanced_accuracy_score(predicted.truth, decided, sample_weight=drawn)
        assert accuracy[index] == pytest.approx(expected, abs=1e-12)
        expected = sk.f1_score(predicted.truth, decided, average="macro", sample_weight=drawn, zero_division=0)
        assert f1[index] == pytest.approx(expected, abs=1e-12)


def test_many_classes_are_one_against_the_rest() -> None:
    predicted = _predictions(4, ties=False)
    expected = sk.roc_auc_score(predicted.truth, predicted.scores, multi_class="ovr", average="macro")
    assert metric_value("auroc_ovr", predicted) == pytest.approx(expected, abs=1e-12)
    expected = sk.average_precision_score(np.eye(4)[predicted.truth], predicted.scores, average="macro")
    assert metric_value("auprc", predicted) == pytest.approx(expected, abs=1e-12)


def test_regression_equals_scikit_learn() -> None:
    rng = np.random.default_rng(3)
    truth = rng.normal(60, 5, 80)
    predicted = Predictions(truth, (truth + rng.normal(0, 3, 80))[:, None], truth[:, None])
    for drawn, r2, error in zip(
        _weights(80).T,
        measure("r2", predicted, _weights(80)),
        measure("mean_absolute_error", predicted, _weights(80)),
        strict=True,
    ):
        assert r2 == pytest.approx(sk.r2_score(truth, predicted.scores[:, 0], sample_weight=drawn), abs=1e-10)
        expected = sk.mean_absolute_error(truth, predicted.scores[:, 0], sample_weight=drawn)
        assert error == pytest.approx(expected, abs=1e-12)


def test_a_constant_score_has_chance_auroc() -> None:
    positive = np.array([True, False, True, False, False])
    assert weighted_auroc(positive, np.zeros(5), np.ones((5, 3))).tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("name", [name for name in TASK_METRICS["binary"] if name != "ece"])
def test_a_resample_without_a_class_is_nan(name: str) -> None:
    predicted = _predictions(2, n=20)
    weights = np.ones((20, 3))
    weights[predicted.truth == 1, 0] = 0
    weights[predicted.truth == 0, 1] = 0
    figures = measure(name, predicted, weights)
    assert np.isnan(figures[:2]).all()
    assert np.isfinite(figures[2])


def test_a_class_missing_from_the_test_set_is_left_out_of_the_mean() -> None:
    predicted = _predictions(4, ties=False)
    retained = predicted.truth != 3
    fewer = Predictions(predicted.truth[retained], predicted.scores[retained], predicted.calibrated[retained])
    expected = np.mean([sk.roc_auc_score(fewer.truth == c, fewer.scores[:, c]) for c in range(3)])
    assert metric_value("auroc_ovr", fewer) == pytest.approx(expected, abs=1e-12)
    expected = np.mean([(fewer.predicted_classes()[fewer.truth == c] == c).mean() for c in range(3)])
    assert metric_value("balanced_accuracy", fewer) == pytest.approx(expected, abs=1e-12)
    assert (fewer.predicted_classes() == 3).any()  # falsely called: a miss of the true class, and no class of its own
    expected = sk.f1_score(fewer.truth, fewer.predicted_classes(), labels=[0, 1, 2], average="macro")
    assert metric_value("f1_macro", fewer) == pytest.approx(expected, abs=1e-12)
    perfect = np.eye(4)[fewer.truth]
    right = Predictions(fewer.truth, perfect, perfect)
    assert metric_value("f1_macro", right) == sk.f1_score(fewer.truth, perfect.argmax(axis=1), average="macro") == 1


def test_ece_against_a_plain_loop_and_known_cases() -> None:
    rng = np.random.default_rng(5)
    stated = rng.random(4000)
    happened = (rng.random(4000) < stated).astype(int)
    honest = Predictions(happened, np.stack([1 - stated, stated], 1), np.stack([1 - stated, stated], 1))
    edges = np.quantile(stated, np.linspace(0, 1, ECE_BINS + 1))
    bins = np.clip(np.searchsorted(edges, stated, side="right") - 1, 0, ECE_BINS - 1)
    expected = sum(
        (bins == b).mean() * abs(stated[bins == b].mean() - happened[bins == b].mean()) for b in range(ECE_BINS)
    )
    assert metric_value("ece", honest) == pytest.approx(expected, abs=1e-12)
    assert metric_value("ece", honest) < 0.03
    sure = np.tile([0.1, 0.9], (4000, 1))
    assert metric_value("ece", Predictions(happened, sure, sure)) == pytest.approx(0.9 - happened.mean(), abs=1e-9)
    # More than two classes: the confidence of the decided class.
    four = np.tile([0.7, 0.1, 0.1, 0.1], (40, 1))
    flat = Predictions(np.arange(40) % 4, four, four)
    assert expected_calibration_error(flat, np.ones((40, 1)))[0] == pytest.approx(0.45)


def test_confusion_keeps_classes_that_are_never_predicted() -> None:
    scores = np.tile([0.6, 0.3, 0.1], (6, 1))
    assert confusion(Predictions(np.array([0, 0, 1, 1, 2, 2]), scores, scores)) == [[2, 0, 0], [2, 0, 0], [2, 0, 0]]


def test_every_task_metric_is_known() -> None:
    assert {name for names in TASK_METRICS.values() for name in names} == set(METRICS)
    assert {*METRICS, "brier"} == set(METRIC_SCALE)  # each names its interval's scale


def test_quadratic_kappa_and_rank_error_are_scikit_learns() -> None:
    rng = np.random.default_rng(5)
    scores = rng.random((200, 4))
    predicted = Predictions(rng.integers(0, 4, 200), scores, scores)
    weights = rng.integers(0, 4, (200, 1)).astype(float)
    for metric, theirs in (
        (
            "quadratic_kappa",
            lambda *of, sample_weight: sk.cohen_kappa_score(*of, weights="quadratic", sample_weight=sample_weight),
        ),
        ("mean_absolute_rank_error", sk.mean_absolute_error),
    ):
        expected = theirs(predicted.truth, scores.argmax(axis=1), sample_weight=weights[:, 0])
        assert measure(metric, predicted, weights)[0] == pytest.approx(expected), metric
