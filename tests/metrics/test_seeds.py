"""Seeds and people are two sources of error: each is seen where it is, and the recipe's interval holds both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octjepa.errors import UsageError
from octjepa.metrics.bootstrap import Estimate
from octjepa.metrics.comparisons import mean_over_seeds, recipe_difference, recipe_interval, seed_spread

RNG = np.random.default_rng(0)


def _estimate(value: float, sd: float = 0.03, people: int = 50, label_hash: str = "h") -> Estimate:
    samples = value + sd * np.random.default_rng(3).normal(size=800)  # the same people: the same draws for all
    return Estimate(value, samples, 2 * people, people, label_hash, "d")


def test_spread_and_mean() -> None:
    recipes = [_estimate(0.70), _estimate(0.72), _estimate(0.77)]
    findings = seed_spread(recipes)
    assert (findings.seeds, findings.low, findings.high) == (3, 0.70, 0.77)
    assert findings.sd == pytest.approx(np.std([0.70, 0.72, 0.77], ddof=1))
    assert seed_spread(recipes[:1]).sd is None
    mean = mean_over_seeds(recipes)
    assert mean.value == pytest.approx(0.73)
    # These networks on other people: as wide as one network's, because the people are shared.
    one, whole = recipes[0].interval(), mean.interval()
    assert whole.high - whole.low == pytest.approx(one.high - one.low, rel=0.1)
    for wrong in ([], [_estimate(0.7), _estimate(0.7, label_hash="other")]):
        with pytest.raises(UsageError):
            mean_over_seeds(wrong)


def test_the_recipes_interval_is_wider_and_needs_two_seeds() -> None:
    recipes = [_estimate(0.66), _estimate(0.73), _estimate(0.80)]
    inner, outer = mean_over_seeds(recipes).interval(), recipe_interval(recipes)
    assert 0 < outer.low < inner.low < inner.high < outer.high < 1
    near_one = [_estimate(0.965, sd=0.004), _estimate(0.985, sd=0.004)]  # on the scale of shares, as the networks' own
    inner, outer = mean_over_seeds(near_one).interval(), recipe_interval(near_one)
    assert 0 < outer.low < inner.low < inner.high < outer.high < 1
    assert recipe_interval(recipes[:1]).low is None
    same = [_estimate(0.73)] * 3
    findings, alone = recipe_interval(same), mean_over_seeds(same).interval()
    assert findings.high - findings.low == pytest.approx(alone.high - alone.low, rel=0.03)


def test_a_seed_with_a_constant_prediction_does_not_bound_the_mean_of_all() -> None:
    good, constant = _estimate(0.9), replace(_estimate(-0.02, sd=0.01), scale="of_constant")
    for order in ([good, constant], [constant, good]):
        recipes = [replace(one, scale="below_one") if one is good else one for one in order]
        mean = mean_over_seeds(recipes)
        assert mean.interval().low < mean.value < mean.interval().high
        assert mean.scale == "below_one"
    assert mean_over_seeds([constant, constant]).scale == "of_constant"


def test_recipes_are_paired_by_people() -> None:
    ours, reference = [_estimate(0.74), _estimate(0.76)], [_estimate(0.70), _estimate(0.70)]
    for recipes in (ours, reference):
        for index, one in enumerate(recipes):
            recipes[index] = Estimate(one.value, one.samples + 0.01 * RNG.normal(size=800), one.n, 50, "h", "d")
    paired, recipe, p = recipe_difference(ours, reference)
    assert paired.difference == pytest.approx(0.05)
    assert paired.high - paired.low < 0.06  # unpaired it would be 0.16
    assert recipe.low < paired.low
    assert p > paired.p
    alone = recipe_difference(ours[:1], reference)
    assert (alone[1].low, alone[2]) == (None, None)


def test_the_recipes_interval_covers_the_recipe() -> None:
    """400 simulated studies of 3 seeds: the recipe's interval holds its mean, the networks' own does not."""
    rng = np.random.default_rng(5)
    held = np.zeros(2)
    for _ in range(400):
        people = rng.normal(scale=0.02)
        noise = 0.02 * rng.normal(size=400)
        values = people + rng.normal(scale=0.03, size=3)
        recipes = [Estimate(10 + value, 10 + value + noise, 200, 100, "h", "d") for value in values]
        for index, interval in enumerate((recipe_interval(recipes), mean_over_seeds(recipes).interval())):
            held[index] += interval.low <= 10 <= interval.high
    assert 0.92 <= held[0] / 400 <= 0.99
    assert held[1] / 400 < 0.90
