"""People are drawn, not scans; pairs need equal labels; simulated intervals cover what they should."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from octjepa.errors import UsageError
from octjepa.metrics.bootstrap import Draws, Estimate, mean_estimate
from octjepa.metrics.comparisons import paired_difference
from octjepa.metrics.intervals import MIN_PEOPLE, Interval, Scale, scale_of
from octjepa.metrics.scores import Predictions, measure, metric_value, weighted_auroc


def _estimate(samples: list[float], value: float = 0.7, label_hash: str = "h", draws_id: str = "d") -> Estimate:
    return Estimate(value, np.array(samples), 20, 10, label_hash, draws_id)


def test_draws_are_of_whole_people_and_repeat() -> None:
    people = ["a", "a", "b", "c", "c", "c"]
    draws = Draws(people, 50, seed=1)
    assert draws.people == ["a", "b", "c"]
    assert draws.counts.shape == (3, 50)
    assert (draws.counts.sum(axis=0) == 3).all()
    seen: list[np.ndarray] = []

    def keep(weights: np.ndarray) -> np.ndarray:
        seen.append(weights)
        return weights.sum(axis=0)

    draws.estimate(keep, people, "h")
    weights = seen[-1]
    assert (weights[0] == weights[1]).all()  # both eyes of a person come or stay away together
    assert (weights[3] == weights[5]).all()
    assert (Draws(people[::-1], 50, seed=1).counts == draws.counts).all()
    assert (Draws(people, 50, seed=2).counts != draws.counts).any()


def test_blocks_of_resamples_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    people = [str(index // 2) for index in range(60)]
    truth, score = rng.integers(0, 2, 60).astype(bool), rng.random(60)

    def auroc(weights: np.ndarray) -> np.ndarray:
        return weighted_auroc(truth, score, weights)

    draws = Draws(people, 100, seed=0)
    whole = draws.estimate(auroc, people, "h").samples
    monkeypatch.setattr("octjepa.metrics.bootstrap.CHUNK_CELLS", 7 * 60)
    assert (draws.estimate(auroc, people, "h").samples == whole).all()


def test_the_bootstrap_equals_scikit_learn_on_resampled_rows() -> None:
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(2)
    people = np.arange(40) // 2
    truth, score = rng.permutation(np.arange(40) % 2).astype(bool), rng.random(40).round(1)
    draws = Draws([f"{p:02d}" for p in people], 30, seed=3)
    ours = draws.estimate(lambda weights: weighted_auroc(truth, score, weights), [f"{p:02d}" for p in people], "h")
    for index in range(30):
        rows = np.repeat(np.arange(40), draws.counts[people, index].astype(int))
        assert ours.samples[index] == pytest.approx(roc_auc_score(truth[rows], score[rows]), abs=1e-12)


def test_undefined_resamples_are_counted_and_too_many_leave_no_interval() -> None:
    few = _estimate([0.65, 0.7, 0.75, float("nan")]).interval()
    assert few.undefined == 1
    # By hand: spread 0.05, times sqrt(10 / 9), t of 9 people 2.2622; on the logit scale divided by 0.7 x 0.3.
    side = 2.2622 * 0.05 * np.sqrt(10 / 9) / 0.21
    expected = [1 / (1 + np.exp(-(np.log(0.7 / 0.3) + sign * side))) for sign in (-1, 1)]
    assert [few.low, few.high] == pytest.approx(expected, abs=1e-4)
    none = _estimate([0.5] + [float("nan")] * 9).interval()
    assert (none.low, none.high, none.undefined) == (None, None, 9)


def test_no_interval_without_width_or_of_too_few_people() -> None:
    perfect = _estimate([1.0, 1.0, 1.0], 1.0).interval()
    assert (perfect.low, perfect.high, perfect.undefined) == (None, None, 0)
    samples = np.array([0.5, 0.6, 0.7])
    assert Estimate(0.6, samples, 9, MIN_PEOPLE - 1, "h", "d").interval().low is None
    assert Estimate(0.6, samples, 9, MIN_PEOPLE, "h", "d").interval().low is not None
    same = paired_difference(_estimate([0.6, 0.7, 0.8]), _estimate([0.6, 0.7, 0.8]))
    assert (same.difference, same.low, same.p) == (0.0, None, None)
    three = Draws(["a", "a", "b", "c"], 200, 0)
    truth, score = np.array([True, True, False, False]), np.array([0.9, 0.8, 0.2, 0.1])
    found = three.estimate(lambda weights: weighted_auroc(truth, score, weights), ["a", "a", "b", "c"], "h")
    assert (found.value, found.interval().low) == (1.0, None)


def test_an_interval_stays_within_shares_and_leaves_other_figures_alone() -> None:
    high = _estimate([0.9, 1.0, 0.95], 0.97).interval()
    assert 0 < high.low < 0.97 < high.high < 1
    top = _estimate([0.9, 1.0, 0.95], 1.0).interval()
    assert 0 < top.low < top.high == 1
    gain = Estimate(0.1, np.array([0.05, 0.1, 0.15]), 20, 10, "h", "d", "difference").interval()
    assert gain.low < 0  # no resample is, and yet it may
    # R2: on log(1 - R2), longer towards the low side, never above 1. By hand: log 1.2, log 0.9, log 0.6.
    r2 = Estimate(0.1, np.array([-0.2, 0.1, 0.4]), 20, 10, "h", "d", "below_one").interval()
    factor = np.exp(2.2622 * np.std(np.log([1.2, 0.9, 0.6]), ddof=1) * np.sqrt(10 / 9))
    assert [r2.low, r2.high] == pytest.approx([1 - 0.9 * factor, 1 - 0.9 / factor], abs=1e-4)
    kappa = Estimate(0.8, np.array([0.6, 0.8, 1.0]), 20, 10, "h", "d", "below_one").interval()
    assert kappa.low < 0.8 < kappa.high < 1  # a resample without an error has no logarithm
    years = Estimate(4.0, np.array([3.0, 4.0, 5.0]), 20, 10, "h", "d", "error").interval()
    assert years.high / 4 == pytest.approx(4 / years.low)


@pytest.mark.parametrize("metric", ["mean_absolute_error", "r2"])
def test_an_interval_does_not_depend_on_the_unit(metric: str) -> None:
    rng = np.random.default_rng(0)
    people = [str(index) for index in range(12)]
    truth = rng.normal(size=12)
    predicted = truth + np.abs(rng.normal(0, 0.5, 12))
    found = {}
    for unit, factor in (("mm", 1.0), ("um", 1000.0)):
        of = Predictions(truth * factor, (predicted * factor)[:, None], (predicted * factor)[:, None])
        scale = scale_of(metric, of.scores)
        estimate = Draws(people, 300, 0).estimate(lambda w, of=of: measure(metric, of, w), people, "h", scale=scale)
        interval = estimate.interval()
        by = factor if metric == "mean_absolute_error" else 1.0
        found[unit] = [estimate.value / by, interval.low / by, interval.high / by]
    assert found["mm"] == pytest.approx(found["um"])
    assert found["mm"][0] < 1  # as a share would be


def test_r2_of_a_constant_is_never_reported_above_zero() -> None:
    people = [str(index) for index in range(10)]
    truth = np.random.default_rng(0).normal(60, 5, 10)
    predicted = np.full((10, 1), 61.0)
    of = Predictions(truth, predicted, predicted)
    draws = Draws(people, 500, 0)

    def interval(scale: Scale) -> Interval:
        return draws.estimate(lambda w: measure("r2", of, w), people, "h", scale=scale).interval()

    assert interval("below_one").high > 0.05
    scale = scale_of("r2", predicted)
    assert (scale, interval(scale).high) == ("of_constant", 0)
    assert interval(scale).low == interval("below_one").low < metric_value("r2", of) < 0


def test_a_p_value_says_what_its_interval_says() -> None:
    rng = np.random.default_rng(4)
    for shift in (0.0, 0.05, 0.08, 0.2):
        samples = (0.7 + shift + 0.04 * rng.normal(size=400)).tolist()
        paired = paired_difference(_estimate(samples, 0.7 + shift), _estimate([0.7] * 400))
        assert (paired.p < 0.05) == (not paired.low <= 0 <= paired.high)


def test_centred_copies_have_the_value_as_their_mean() -> None:
    people = [str(index) for index in range(30)]
    draws = Draws(people, 400, seed=0)
    noise = np.random.default_rng(0).normal(size=30)

    def grows(weights: np.ndarray) -> np.ndarray:
        return np.abs(noise @ weights) / 30 + weights.var(axis=0)

    plain, centred = draws.estimate(grows, people, "h"), draws.estimate(grows, people, "h", centred=True)
    assert plain.samples.mean() > plain.value + 0.5
    assert centred.samples.min() >= 0
    interval = centred.interval()
    assert interval.low <= centred.value <= interval.high


def test_pairs_need_equal_labels_and_draws() -> None:
    ours, reference = _estimate([0.7, 0.8, 0.9]), _estimate([0.6, 0.6, 0.9], value=0.6)
    paired = paired_difference(ours, reference)
    assert paired.difference == pytest.approx(0.1)
    assert paired.low == pytest.approx(0.1 - 2.2622 * 0.1 * np.sqrt(10 / 9), abs=1e-4)
    assert (paired.low + paired.high) / 2 == pytest.approx(0.1)
    with pytest.raises(UsageError, match="different labels"):
        paired_difference(ours, _estimate([0.6, 0.6, 0.9], label_hash="other"))
    with pytest.raises(UsageError, match="different draws"):
        paired_difference(ours, _estimate([0.6, 0.6, 0.9], draws_id="other"))
    with pytest.raises(UsageError, match="different draws"):
        mean_estimate([ours, _estimate([0.1, 0.1, 0.1], draws_id="other")], 5)


def test_a_mean_is_resampled_jointly() -> None:
    macro = mean_estimate([_estimate([0.4, 0.8], 0.6), _estimate([0.8, 0.4], 0.6, label_hash="g")], 7)
    assert macro.samples.tolist() == pytest.approx([0.6, 0.6])
    assert macro.n_people == 7
    assert macro.label_hash not in ("h", "g")


@pytest.mark.parametrize(("people", "resamples"), [([], 10), (["a"], 0)])
def test_nothing_to_draw_is_an_error(people: list[str], resamples: int) -> None:
    with pytest.raises(UsageError):
        Draws(people, resamples, seed=0)


def test_a_person_who_was_not_drawn_is_an_error() -> None:
    with pytest.raises(UsageError, match="1 people"):
        Draws(["a"], 5, 0).estimate(lambda weights: weights.sum(axis=0), ["a", "b"], "h")


@pytest.mark.slow
def test_simulated_coverage() -> None:
    """95 % intervals of an AUROC whose true value is known, for two nearly equal eyes a person.

    300 trials have a standard error of 1.3 %, so 91.5 % to 98.5 % is what a correct interval shows; drawing scans as if
    they were people must fall clearly short, or the test would not see the difference. `benchmarks/coverage.py` does
    the same with more trials, more figures and other sizes.
    """
    rng = np.random.default_rng(11)
    trials, people, gap, shared, own = 300, 30, 1.0, 0.9, 0.435  # shared and own spread: total variance 1
    true = norm.cdf(gap / np.sqrt(2 * (shared**2 + own**2)))
    eyes = [f"{index:03d}" for index in range(people) for _ in range(2)]
    scans = [f"{index:03d}" for index in range(2 * people)]
    by_person, by_scan = Draws(eyes, 300, seed=5), Draws(scans, 300, seed=5)
    covered = np.zeros(2)
    for _ in range(trials):
        sick = rng.permutation(np.arange(people) % 2).repeat(2)
        score = gap * sick + shared * rng.normal(size=people).repeat(2) + own * rng.normal(size=2 * people)
        predicted = Predictions(sick, np.stack([-score, score], 1), np.stack([-score, score], 1))
        for index, (draws, ids) in enumerate(((by_person, eyes), (by_scan, scans))):
            interval = draws.estimate(
                lambda weights, predicted=predicted: measure("auroc", predicted, weights), ids, "h"
            ).interval()
            covered[index] += interval.low <= true <= interval.high
    by_people, by_scans = covered / trials
    assert 0.915 <= by_people <= 0.985
    assert by_scans < 0.90
