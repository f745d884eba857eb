"""Metrics, each with one definition for the value and for its bootstrap.

A metric takes `Predictions` of n test volumes and weights [n, resamples] (how often each volume is drawn) and returns a
value per resample; weights of one give the metric itself. All agree with scikit-learn under `sample_weight` (tested);
they are written on whole arrays because 2,000 resamples of each of a hundred rows must take a second, and with the
resamples last because sums over volumes then run over long contiguous rows (20 times faster than the other way).
A metric that a resample cannot have, such as an AUROC without a positive case, is NaN there: counted, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

Task = Literal["binary", "multiclass", "ordinal", "regression", "survival"]
Weights = Float[np.ndarray, "n resamples"]
Figures = Float[np.ndarray, " resamples"]

ECE_BINS = 10


@dataclass(frozen=True)
class Predictions:
    """Truth and predictions of a test set.

    truth: class codes 0..classes-1 [n], the quantity itself (regression), or the time to an event, negative if it
        was not seen until then (survival).
    scores: [n, classes], probabilities as if every class were equally common (their largest is the decision).
        regression: [n, 1], the predicted quantity. survival: [n, 1], a risk, larger where the event is sooner.
    calibrated: [n, classes], probabilities at the training set's class shares (before a draw of fewer labels); only
        `ece` reads them.
    """

    truth: Float[np.ndarray, " n"] | Int[np.ndarray, " n"]
    scores: Float[np.ndarray, "n classes"]
    calibrated: Float[np.ndarray, "n classes"]

    def predicted_classes(self) -> Int[np.ndarray, " n"]:
        """The class with the largest score; the first of equals."""
        return self.scores.argmax(axis=1)

    def subset(self, mask: Bool[np.ndarray, " n"]) -> Predictions:
        """The predictions of the test volumes in `mask`."""
        return Predictions(self.truth[mask], self.scores[mask], self.calibrated[mask])


def _tie_groups(
    positive: Bool[np.ndarray, " n"], score: Float[np.ndarray, " n"], weights: Weights
) -> tuple[Float[np.ndarray, "groups resamples"], Float[np.ndarray, "groups resamples"]]:
    """Weight of positives and of negatives at each distinct score, from the highest score down."""
    order = np.argsort(-score, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(score[order]) != 0])
    drawn, hit = weights[order], positive[order][:, None]
    positives, negatives = np.where(hit, drawn, 0.0), np.where(hit, 0.0, drawn)
    if len(starts) < len(order):
        positives, negatives = (np.add.reduceat(part, starts, axis=0) for part in (positives, negatives))
    return positives, negatives


def ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """top / bottom elementwise, NaN where bottom is 0."""
    return np.divide(top, bottom, out=np.full(np.broadcast(top, bottom).shape, np.nan), where=bottom != 0)


def weighted_auroc(positive: Bool[np.ndarray, " n"], score: Float[np.ndarray, " n"], weights: Weights) -> Figures:
    """Area under the ROC curve as the Mann-Whitney share of ordered pairs, ties counted half (Hanley & McNeil 1982)."""
    positives, negatives = _tie_groups(positive, score, weights)
    above = np.cumsum(positives, axis=0) - 0.5 * positives  # positives above each score, and half of those at it
    return ratio((negatives * above).sum(axis=0), positives.sum(axis=0) * negatives.sum(axis=0))


def weighted_average_precision(
    positive: Bool[np.ndarray, " n"], score: Float[np.ndarray, " n"], weights: Weights
) -> Figures:
    """Average precision, the step-wise area under the precision-recall curve, as scikit-learn defines it."""
    positives, negatives = _tie_groups(positive, score, weights)
    hits = np.cumsum(positives, axis=0)
    drawn = hits + np.cumsum(negatives, axis=0)
    return ratio((positives * hits / np.maximum(drawn, 1e-300)).sum(axis=0), hits[-1])


def weighted_sensitivity(
    positive: Bool[np.ndarray, " n"], score: Float[np.ndarray, " n"], weights: Weights, specificity: float
) -> Figures:
    """The largest sensitivity of any threshold on the ROC curve whose specificity is at least `specificity`."""
    positives, negatives = _tie_groups(positive, score, weights)
    false_alarms, hits = np.cumsum(negatives, axis=0), np.cumsum(positives, axis=0)
    allowed = false_alarms <= (1 - specificity + 1e-12) * false_alarms[-1]
    best = np.where(allowed, hits, 0.0).max(axis=0)
    return np.where(false_alarms[-1] > 0, ratio(best, hits[-1]), np.nan)


def forecasts(predictions: Predictions) -> tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Stated probability of an event and whether it happened; more than two classes: of the predicted class."""
    calibrated, truth = predictions.calibrated, predictions.truth
    if calibrated.shape[1] == 2:
        return calibrated[:, 1], truth == 1
    return calibrated.max(axis=1), calibrated.argmax(axis=1) == truth


def calibration_bins(stated: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """The bin, of `ECE_BINS` of equal mass, of each stated probability."""
    edges = np.quantile(stated, np.linspace(0, 1, ECE_BINS + 1)[1:-1])
    return np.searchsorted(edges, stated, side="right")


def expected_calibration_error(predictions: Predictions, weights: Weights) -> Figures:
    """Mean gap between stated and true frequency over 10 bins of equal mass, weighted by the bins' share.

    Two classes: the probability of the second; more: of the decided one (Guo et al. 2017). Bins of equal mass because
    with a few hundred volumes most equal-width bins are nearly empty (Nixon et al. 2019). The bins are those of the
    full test set in every resample. On few volumes it reads above zero even for a perfect model.
    """
    stated, happened = forecasts(predictions)
    member = calibration_bins(stated)[:, None] == np.arange(ECE_BINS)  # [n, bins]
    gap = np.abs((member * (stated - happened)[:, None]).T @ weights).sum(axis=0)
    return ratio(gap, weights.sum(axis=0))


def brier(predictions: Predictions, weights: Weights) -> Figures:
    """Mean squared distance between stated probabilities and the truth, 0 to 1 (Brier 1950).

    Two classes: as scikit-learn's `brier_score_loss`. More: half the sum over classes, so that 1 is the worst again.
    """
    truth = predictions.truth[:, None] == np.arange(predictions.calibrated.shape[1])
    squares = ((predictions.calibrated - truth) ** 2).sum(axis=1) / 2
    return ratio(squares @ weights, weights.sum(axis=0))


def _per_class_hits(predictions: Predictions, weights: Weights) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weight of correct predictions, of the truth and of the predictions per class, each [classes, resamples]."""
    codes = np.arange(predictions.scores.shape[1])
    truth = predictions.truth[:, None] == codes
    predicted = predictions.predicted_classes()[:, None] == codes
    correct, true, called = (which.T.astype(float) @ weights for which in (truth & predicted, truth, predicted))
    return correct, true, called


def _balanced_accuracy(predictions: Predictions, weights: Weights) -> Figures:
    hits, truth, _ = _per_class_hits(predictions, weights)
    present = np.isin(np.arange(len(truth)), predictions.truth)
    return ratio(hits, truth)[present].mean(axis=0)


def _f1_macro(predictions: Predictions, weights: Weights) -> Figures:
    """Over the classes that the test set holds, as scikit-learn's with `labels` set to these.

    A false call of a class that it lacks is a miss of the true class, and not a separate class.
    """
    hits, truth, predicted = _per_class_hits(predictions, weights)
    present = np.isin(np.arange(len(truth)), predictions.truth)
    return np.nan_to_num(ratio(2 * hits, truth + predicted))[present].mean(axis=0)


def _over_classes(curve: Callable[..., Figures]) -> Callable[[Predictions, Weights], Figures]:
    """Two classes: the second against the first. More: each present class against the rest, then the plain mean."""

    def figure(predictions: Predictions, weights: Weights) -> Figures:
        classes = [1] if predictions.scores.shape[1] == 2 else np.unique(predictions.truth).tolist()
        return np.mean([curve(predictions.truth == c, predictions.scores[:, c], weights) for c in classes], axis=0)

    return figure


def _sensitivity_90(predictions: Predictions, weights: Weights) -> Figures:
    return weighted_sensitivity(predictions.truth == 1, predictions.scores[:, 1], weights, 0.90)


def _r2(predictions: Predictions, weights: Weights) -> Figures:
    truth, error = predictions.truth, predictions.truth - predictions.scores[:, 0]
    # Centring first keeps the weighted variance, E[y^2] - E[y]^2, from cancelling.
    centred = truth - truth.mean()
    squares = centred**2 @ weights
    spread = squares - ratio((centred @ weights) ** 2, weights.sum(axis=0))
    spread = np.where(spread > 1e-12 * squares, spread, 0.0)
    return 1 - ratio(error**2 @ weights, spread)


def _mean_absolute_error(predictions: Predictions, weights: Weights) -> Figures:
    return ratio(np.abs(predictions.truth - predictions.scores[:, 0]) @ weights, weights.sum(axis=0))


def _quadratic_kappa(predictions: Predictions, weights: Weights) -> Figures:
    """Agreement beyond chance of ordered classes, errors weighing by their squared distance (Cohen 1968)."""
    codes = np.arange(predictions.scores.shape[1])
    predicted = predictions.predicted_classes()
    truths, calls = ((which[:, None] == codes).T.astype(float) @ weights for which in (predictions.truth, predicted))
    squares = (codes[:, None] - codes) ** 2.0
    by_chance = ratio(np.einsum("ij,ir,jr->r", squares, truths, calls), weights.sum(axis=0))
    return 1 - ratio((predictions.truth - predicted) ** 2.0 @ weights, by_chance)


def _mean_absolute_rank_error(predictions: Predictions, weights: Weights) -> Figures:
    return ratio(np.abs(predictions.truth - predictions.predicted_classes()) @ weights, weights.sum(axis=0))


def _concordance(predictions: Predictions, weights: Weights) -> Figures:
    """Harrell's C: of the pairs of which it is known who had the event first, the share whose risks say so.

    A pair counts where the earlier time is that of an event; of equal times, if one is an event and the other is
    not. Equal risks count half (Harrell et al. 1996). Memory and time grow with events x volumes.
    """
    times, risk = np.abs(predictions.truth), predictions.scores[:, 0]
    event = np.flatnonzero(predictions.truth > 0)
    later = (times > times[event, None]) | ((times == times[event, None]) & (predictions.truth < 0))  # [events, n]
    right = later * (np.sign(risk[event, None] - risk) + 1) / 2
    drawn = weights[event]
    return ratio((drawn * (right @ weights)).sum(axis=0), (drawn * (later.astype(float) @ weights)).sum(axis=0))


METRICS: dict[str, Callable[[Predictions, Weights], Figures]] = {
    "auroc": _over_classes(weighted_auroc),
    "auroc_ovr": _over_classes(weighted_auroc),
    "auprc": _over_classes(weighted_average_precision),
    "balanced_accuracy": _balanced_accuracy,
    "f1_macro": _f1_macro,
    "ece": expected_calibration_error,
    "sensitivity_at_specificity_90": _sensitivity_90,
    "quadratic_kappa": _quadratic_kappa,
    "mean_absolute_rank_error": _mean_absolute_rank_error,
    "r2": _r2,
    "mean_absolute_error": _mean_absolute_error,
    "concordance": _concordance,
}

TASK_METRICS: dict[Task, tuple[str, ...]] = {
    "binary": ("auroc", "auprc", "balanced_accuracy", "f1_macro", "ece", "sensitivity_at_specificity_90"),
    "multiclass": ("auroc_ovr", "auprc", "balanced_accuracy", "f1_macro", "ece"),
    "ordinal": ("quadratic_kappa", "mean_absolute_rank_error", "balanced_accuracy", "f1_macro", "ece"),
    "regression": ("r2", "mean_absolute_error"),
    "survival": ("concordance",),
}

PRIMARY_METRIC: dict[Task, str] = {
    "binary": "auroc",
    "multiclass": "auroc_ovr",
    "ordinal": "quadratic_kappa",
    "regression": "r2",
    "survival": "concordance",
}

_NEEDS_EVERY_CLASS = {"auroc", "auroc_ovr", "auprc", "balanced_accuracy", "f1_macro", "sensitivity_at_specificity_90"}


def measure(name: str, predictions: Predictions, weights: Weights) -> Figures:
    """The metric `name` in every resample.

    A resample without a class that the full test set holds is NaN for every metric that compares classes: a mean over
    fewer classes would be another metric.
    """
    figures = METRICS[name](predictions, weights)
    if name in _NEEDS_EVERY_CLASS:
        present = predictions.truth[:, None] == np.unique(predictions.truth)
        figures = np.where((present.T.astype(float) @ weights > 0).all(axis=0), figures, np.nan)
    return figures


def metric_value(name: str, predictions: Predictions) -> float:
    """The metric `name` on the whole test set."""
    return float(measure(name, predictions, np.ones((len(predictions.truth), 1)))[0])


def confusion(predictions: Predictions) -> list[list[int]]:
    """Counts of test volumes: rows are the true classes, columns the predicted classes."""
    from sklearn.metrics import confusion_matrix

    codes = np.arange(predictions.scores.shape[1])
    matrix: list[list[int]] = confusion_matrix(
        predictions.truth, predictions.predicted_classes(), labels=codes
    ).tolist()
    return matrix
