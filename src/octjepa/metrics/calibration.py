"""Do stated probabilities come true? Brier score, the reliability curve, and the error between the two.

`Predictions.calibrated` is read: probabilities at the training set's class shares. Two classes: the probability of the
second. More: the Brier score sums over classes, the curve is of the decided class (Guo et al. 2017).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.scores import ECE_BINS, Figures, Predictions, Weights


def brier(predictions: Predictions, weights: Weights) -> Figures:
    """Mean squared distance between stated probabilities and what happened, 0 to 1 (Brier 1950).

    Two classes: as scikit-learn's `brier_score_loss`. More: half the sum over classes, so that 1 is the worst again.
    """
    truth = predictions.truth[:, None] == np.arange(predictions.calibrated.shape[1])
    squares = ((predictions.calibrated - truth) ** 2).sum(axis=1) / 2
    total = weights.sum(axis=0)
    return np.divide(squares @ weights, total, out=np.full(total.shape, np.nan), where=total > 0)


def stated_and_happened(predictions: Predictions) -> tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """The probability that is judged, and whether its event happened."""
    calibrated, truth = predictions.calibrated, predictions.truth
    if calibrated.shape[1] == 2:
        return calibrated[:, 1], truth == 1
    return calibrated.max(axis=1), calibrated.argmax(axis=1) == truth


@dataclass(frozen=True)
class ReliabilityBin:
    """One point of the curve: mean stated probability, the frequency that came true, its interval; n volumes."""

    stated: float
    happened: float
    low: float | None
    high: float | None
    n: int
    n_people: int


def reliability_curve(
    predictions: Predictions, draws: Draws, person_ids: list[str], bins: int = ECE_BINS
) -> list[ReliabilityBin]:
    """Points of at most `bins` bins of equal mass, from low to high; the bins of `expected_calibration_error`.

    A bin in which all or none came true, or that holds too few people, has no interval: see Interval.
    """
    stated, happened = stated_and_happened(predictions)
    edges = np.quantile(stated, np.linspace(0, 1, bins + 1)[1:-1])
    member = np.searchsorted(edges, stated, side="right")
    people = np.array(person_ids)
    points = []
    for number in np.unique(member):
        inside = member == number
        events = happened[inside].astype(float)

        def frequency(weights: Weights, events: np.ndarray = events) -> Figures:
            total = weights.sum(axis=0)
            return np.divide(events @ weights, total, out=np.full(total.shape, np.nan), where=total > 0)

        found = draws.estimate(frequency, people[inside].tolist(), "")
        interval = found.interval()
        mean = float(stated[inside].mean())
        points.append(ReliabilityBin(mean, found.value, interval.low, interval.high, found.n, found.n_people))
    return points
