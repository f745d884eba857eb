"""A threshold is chosen on one set of people and told on another; net benefit is that of its definition."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_curve

from octjepa.errors import UsageError
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.scores import weighted_sensitivity
from octjepa.metrics.thresholds import decision_curve, net_benefit, threshold_at_specificity, threshold_scores


def _scores(n: int, gap: float, seed: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    positive = rng.permutation(np.arange(n) % 2).astype(bool)
    return positive, gap * positive + shift + rng.normal(size=n), [f"{index // 2}" for index in range(n)]


@pytest.mark.parametrize("digits", [1, 9])
@pytest.mark.parametrize("specificity", [0.5, 0.9, 1.0])
def test_the_threshold_is_that_of_the_roc_curve(digits: int, specificity: float) -> None:
    positive, score, _ = _scores(300, 1.5, 0)
    score = score.round(digits)
    threshold = threshold_at_specificity(positive, score, specificity)
    false_alarms, hits, thresholds = roc_curve(positive, score, drop_intermediate=False)
    best = hits[false_alarms <= 1 - specificity + 1e-12].max()
    called = score >= threshold
    assert called[positive].mean() == pytest.approx(best)
    assert (~called[~positive]).mean() >= specificity
    assert best == pytest.approx(weighted_sensitivity(positive, score, np.ones((300, 1)), specificity)[0])
    assert threshold in thresholds or not called.any()


def test_what_cannot_be_chosen_is_refused() -> None:
    with pytest.raises(UsageError, match="validation holds none"):
        threshold_at_specificity(np.array([True, True]), np.array([0.1, 0.2]), 0.9)
    with pytest.raises(UsageError, match="expected 0 to 1"):
        threshold_at_specificity(np.array([True, False]), np.array([0.1, 0.2]), 90)
    with pytest.raises(UsageError, match="not finite"):
        threshold_at_specificity(np.array([True, False]), np.array([np.nan, 0.2]), 0.9)
    tied = np.zeros(4)
    assert threshold_at_specificity(np.array([True, False, True, False]), tied, 0.9) > 0  # nobody is called


def test_a_carried_threshold_keeps_its_number_not_its_specificity() -> None:
    positive, score, _ = _scores(600, 1.5, 0)
    threshold = threshold_at_specificity(positive, score, 0.9)
    there, moved, people = _scores(600, 1.5, 1, shift=0.7)  # another site reads brighter
    draws = Draws(people, 300, 0)
    found = threshold_scores(threshold, there, moved, draws, people, "h")
    assert found.specificity.value == pytest.approx((moved[~there] < threshold).mean())
    assert found.specificity.interval().high < 0.85
    same = threshold_scores(threshold, *_scores(600, 1.5, 2)[:2], draws, people, "h")
    assert same.specificity.interval().low < 0.9 < same.specificity.interval().high


def test_net_benefit_by_hand_and_against_the_trivial_policies() -> None:
    positive = np.array([True, True, False, False, False])
    called = np.array([True, False, True, False, False])
    # 1 hit, 1 false alarm at odds 0.2 / 0.8, of 5 people.
    assert net_benefit(positive, called, np.ones((5, 1)), 0.2)[0] == pytest.approx((1 - 0.25) / 5)
    rng = np.random.default_rng(0)
    probability = rng.random(800)
    happened = rng.random(800) < probability
    people = [str(index // 2) for index in range(800)]
    rows = decision_curve(happened, probability, Draws(people, 200, 0), people, thresholds=(0.2, 0.5))
    for row in rows:
        share = happened.mean()
        assert row.all == pytest.approx(share - (1 - share) * row.threshold / (1 - row.threshold))
        assert row.over_best == pytest.approx(row.model - max(row.all, 0))
    # Of uniform honest probabilities: the integral of p - (1 - p) x odds above the threshold, less treating all.
    assert [row.over_best for row in rows] == pytest.approx([0.025, 0.25], abs=0.05)
    assert rows[1].low > 0.1
    useless = decision_curve(happened, rng.random(800), Draws(people, 200, 0), people, thresholds=(0.5,))
    assert useless[0].low < 0.01
    with pytest.raises(UsageError, match="between 0 and 1"):
        decision_curve(happened, probability, Draws(people, 200, 0), people, thresholds=(1.0,))
