"""Thresholds and probabilities in use: chosen on validation people and applied to test people unchanged.

The probes' `sensitivity_at_specificity_90` takes the best point of the test's own ROC curve, which is not known before
the test. Here a threshold is chosen where labels were allowed, and its sensitivity and specificity are measured on the
people it is applied to. Decision curves show the stakes for which a model does more good than treating all people or
none; the reliability curve shows whether stated probabilities come true (Guo et al. 2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from octjepa.errors import UsageError
from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.scores import Figures, Predictions, Weights, calibration_bins, forecasts, ratio
from octjepa.record import Record


def threshold_at_specificity(
    positive: Bool[np.ndarray, " n"], score: Float[np.ndarray, " n"], specificity: float
) -> float:
    """The lowest threshold t, of the given scores, at which "score >= t" has at least this specificity.

    If no score is high enough, the next number above the highest: no case is called positive.
    Raises UsageError: no negative case, scores that are not finite, or a specificity outside 0..1.
    """
    if not 0 <= specificity <= 1:
        raise UsageError(f"specificity is {specificity}, expected 0 to 1")
    negatives = np.sort(score[~positive])
    if not len(negatives):
        raise UsageError("a threshold at a given specificity needs cases without the finding; validation holds none")
    if not np.isfinite(score).all():
        raise UsageError("a threshold cannot be chosen on scores that are not finite")
    candidates = np.append(np.unique(score), np.nextafter(score.max(), np.inf))
    below = np.searchsorted(negatives, candidates, side="left") / len(negatives)
    return float(candidates[np.argmax(below >= specificity - 1e-12)])


@dataclass(frozen=True)
class ThresholdScores:
    """A threshold where it is used; estimates, so that two of them can be paired."""

    threshold: float
    sensitivity: Estimate
    specificity: Estimate


def threshold_scores(
    threshold: float,
    positive: Bool[np.ndarray, " n"],
    score: Float[np.ndarray, " n"],
    draws: Draws,
    person_ids: list[str],
    label_hash: str,
) -> ThresholdScores:
    """Sensitivity and specificity of "score >= threshold" on test volumes, resampled by person."""
    called = score >= threshold

    def rate(correct: np.ndarray, among: np.ndarray) -> Estimate:
        def statistic(weights: Weights) -> Figures:
            return ratio((correct & among) @ weights, among.astype(float) @ weights)

        return draws.estimate(statistic, person_ids, label_hash)

    return ThresholdScores(threshold, rate(called, positive), rate(~called, ~positive))


def net_benefit(
    positive: Bool[np.ndarray, " n"], called: Bool[np.ndarray, " n"], weights: Weights, threshold: float
) -> Figures:
    """True positives per case less false positives at the exchange rate of the threshold (Vickers & Elkin 2006)."""
    gain = (called & positive) @ weights - (called & ~positive) @ weights * threshold / (1 - threshold)
    return ratio(gain, weights.sum(axis=0))


@dataclass(frozen=True)
class DecisionPoint(Record):
    """Net benefit at a threshold probability: of the model, of treating all, of treating none.

    over_best: the model minus the better of the two, with its interval.
    """

    threshold: float
    model: float
    all: float
    none: float
    over_best: float
    low: float | None
    high: float | None


def decision_curve(
    positive: Bool[np.ndarray, " n"],
    probability: Float[np.ndarray, " n"],
    draws: Draws,
    person_ids: list[str],
    thresholds: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5),
) -> list[DecisionPoint]:
    """Net benefit of the model, of treating all and of treating none (0), per threshold probability.

    `over_best` is the model less the better of the two, with its interval on the same people. Probabilities must be
    those of the population, `Predictions.calibrated`. Raises UsageError on a threshold outside 0..1.
    """
    points = []
    everyone = np.ones(len(positive), dtype=bool)
    for threshold in thresholds:
        if not 0 < threshold < 1:
            raise UsageError(f"a threshold probability is {threshold}, expected between 0 and 1")
        called = probability >= threshold

        def over_best(weights: Weights, called: np.ndarray = called, threshold: float = threshold) -> Figures:
            treat_all = net_benefit(positive, everyone, weights, threshold)
            return net_benefit(positive, called, weights, threshold) - np.maximum(treat_all, 0)

        estimate = draws.estimate(over_best, person_ids, "", scale="difference")
        interval = estimate.interval()
        ones = np.ones((len(positive), 1))
        points.append(
            DecisionPoint(
                threshold,
                float(net_benefit(positive, called, ones, threshold)[0]),
                float(net_benefit(positive, everyone, ones, threshold)[0]),
                0.0,
                estimate.value,
                interval.low,
                interval.high,
            )
        )
    return points


@dataclass(frozen=True)
class ReliabilityBin(Record):
    """One point of the curve: mean stated probability, the frequency that came true, its interval; n volumes."""

    stated: float
    happened: float
    low: float | None
    high: float | None
    n: int
    n_people: int


def reliability_curve(predictions: Predictions, draws: Draws, person_ids: list[str]) -> list[ReliabilityBin]:
    """Points of at most `ECE_BINS` bins of equal mass, from low to high; the bins of `expected_calibration_error`.

    Read are `Predictions.calibrated`, probabilities at the training set's class shares. A bin in which all or none came
    true, or that holds too few people, has no interval: see Interval.
    """
    stated, happened = forecasts(predictions)
    member = calibration_bins(stated)
    people = np.array(person_ids)
    points = []
    for number in np.unique(member):
        inside = member == number
        events = happened[inside].astype(float)

        def frequency(weights: Weights, events: np.ndarray = events) -> Figures:
            return ratio(events @ weights, weights.sum(axis=0))

        estimate = draws.estimate(frequency, people[inside].tolist(), "")
        interval = estimate.interval()
        mean = float(stated[inside].mean())
        points.append(ReliabilityBin(mean, estimate.value, interval.low, interval.high, estimate.n, estimate.n_people))
    return points
