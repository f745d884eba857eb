"""How often do 95 % intervals hold the truth? Studies of people with two eyes each are simulated, whose truth is known.

`python benchmarks/coverage.py` prints, for each number of test people and each metric, the share of simulated studies
whose interval holds the true value: ours (Student's, on the metric's scale), plain percentiles, and BCa
(Efron 1987) of the same resamples. A study without an interval counts as missed. The figures in
docs/leaderboard.md are its output.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.comparisons import paired_difference
from octjepa.metrics.intervals import scale_of
from octjepa.metrics.scores import Predictions, measure

FIGURES = ("auroc", "balanced_accuracy", "r2", "mean_absolute_error", "paired auroc")
QUANTITY_FIGURES = ("r2", "mean_absolute_error")
KINDS = ("ours", "percentile", "bca")
SHARE_SICK = 0.3
_TRUTH_PEOPLE = 400_000


@dataclass(frozen=True)
class Study:
    """Two models' predictions of a finding, and one of a quantity, on the two eyes of every person."""

    first: Predictions
    second: Predictions
    quantity: Predictions


def study(rng: np.random.Generator, people: int) -> Study:
    """Fellow eyes share their finding in 85 of 100 and half of the spread of every score; the second model is weaker.

    At least two people have the finding and two do not, else there is nothing to measure.
    """
    sick = rng.permutation(np.arange(people) < max(2, round(SHARE_SICK * people)))[:, None]
    agrees = np.concatenate([np.ones((people, 1), bool), rng.random((people, 1)) < 0.85], axis=1)
    truth = np.where(agrees, sick, ~sick)
    shared = rng.normal(size=(people, 1))
    first = 1.2 * truth - 0.6 + 0.7 * shared + 0.714 * rng.normal(size=(people, 2))
    apart = 0.6 * rng.normal(size=(people, 1)) + 0.6 * rng.normal(size=(people, 2))
    second = 0.96 * truth - 0.48 + 0.56 * shared + apart
    level = rng.normal(size=(people, 1))
    quantity = level + 0.4 * rng.normal(size=(people, 2))
    guess = 0.6 * level + 0.4 * rng.normal(size=(people, 1)) + 0.3 * rng.normal(size=(people, 2))
    predictions = guess.reshape(-1, 1)
    return Study(_two(truth, first), _two(truth, second), Predictions(quantity.ravel(), predictions, predictions))


def _two(truth: np.ndarray, score: np.ndarray) -> Predictions:
    both = np.stack([-score.ravel(), score.ravel()], axis=1)
    return Predictions(truth.ravel().astype(int), both, both)


def figures_of(one: Study, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Every figure of a study for each column of `weights` [N, draws]."""
    first = measure("auroc", one.first, weights)
    return {
        "auroc": first,
        "balanced_accuracy": measure("balanced_accuracy", one.first, weights),
        **{name: measure(name, one.quantity, weights) for name in QUANTITY_FIGURES},
        "paired auroc": first - measure("auroc", one.second, weights),
    }


def percentile(samples: np.ndarray) -> tuple[float, float]:
    """The 95 % interval between percentiles of resamples."""
    low, high = np.nanquantile(samples, [0.025, 0.975])
    return float(low), float(high)


def bca(value: float, samples: np.ndarray, left_out: np.ndarray) -> tuple[float, float]:
    """Bias-corrected and accelerated percentiles; `left_out` holds the figure without each person."""
    samples, left_out = samples[np.isfinite(samples)], left_out[np.isfinite(left_out)]
    below = ((samples < value).sum() + 0.5 * (samples == value).sum()) / len(samples)
    bias = norm.ppf(np.clip(below, 1 / len(samples), 1 - 1 / len(samples)))
    pull = left_out.mean() - left_out
    spread = (pull**2).sum() ** 1.5
    acceleration = (pull**3).sum() / (6 * spread) if spread > 0 else 0.0
    at = bias + norm.ppf([0.025, 0.975])
    low, high = np.quantile(samples, norm.cdf(bias + at / (1 - acceleration * at)))
    return float(low), float(high)


def coverage(people: int, trials: int, resamples: int, seed: int = 0) -> dict[tuple[str, str], tuple[float, float]]:
    """(figure, kind) -> share of studies whose interval holds the truth, and the mean width of the intervals."""
    ids = [f"{index // 2:06d}" for index in range(2 * people)]
    draws = Draws(ids, resamples, seed)
    true = {name: float(values[0]) for name, values in _truth().items()}
    rng = np.random.default_rng([seed, people])
    covered: dict[tuple[str, str], list[bool]] = {(name, kind): [] for name in FIGURES for kind in KINDS}
    widths: dict[tuple[str, str], list[float]] = {key: [] for key in covered}
    without = (1 - np.eye(people)).repeat(2, axis=0)
    for _ in range(trials):
        one = study(rng, people)
        left_out = figures_of(one, without)
        for name in FIGURES:
            found, ends = _ours(name, one, draws, ids)
            result = {"ours": ends, "percentile": percentile(found.samples)}
            result["bca"] = bca(found.value, found.samples, left_out[name])
            for kind, (low, high) in result.items():
                covered[name, kind].append(low is not None and high is not None and low <= true[name] <= high)
                if low is not None and high is not None:
                    widths[name, kind].append(high - low)
    return {key: (float(np.mean(result)), float(np.mean(widths[key]))) for key, result in covered.items()}


def _truth() -> dict[str, np.ndarray]:
    return figures_of(study(np.random.default_rng(1), _TRUTH_PEOPLE), np.ones((2 * _TRUTH_PEOPLE, 1)))


def _ours(name: str, one: Study, draws: Draws, ids: list[str]) -> tuple[Estimate, tuple[float | None, float | None]]:
    """The figure with its resamples, and the interval that octjepa gives it."""
    if name == "paired auroc":
        ours, reference = (_estimate("auroc", predictions, draws, ids) for predictions in (one.first, one.second))
        paired = paired_difference(ours, reference)
        apart = Estimate(paired.difference, ours.samples - reference.samples, ours.n, ours.n_people, "", draws.id)
        return apart, (paired.low, paired.high)
    estimate = _estimate(name, one.quantity if name in QUANTITY_FIGURES else one.first, draws, ids)
    interval = estimate.interval()
    return estimate, (interval.low, interval.high)


def _estimate(metric: str, predictions: Predictions, draws: Draws, ids: list[str]) -> Estimate:
    return draws.estimate(
        lambda weights: measure(metric, predictions, weights), ids, "", scale=scale_of(metric, predictions.scores)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--people", type=int, nargs="+", default=[10, 30, 100, 300])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--resamples", type=int, default=500)
    arguments = parser.parse_args()
    print(
        f"{arguments.trials} studies a row, {arguments.resamples} resamples; share covered in %, mean width in brackets"
    )
    print(f"{'people':>6}  {'metric':<18}" + "".join(f"{kind:>18}" for kind in KINDS))
    started = time.process_time()
    for people in arguments.people:
        result = coverage(people, arguments.trials, arguments.resamples)
        for name in FIGURES:
            cells = (f"{100 * result[name, kind][0]:.1f} ({result[name, kind][1]:.3f})" for kind in KINDS)
            print(f"{people:>6}  {name:<18}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    print(f"{time.process_time() - started:.0f} s of one core")


if __name__ == "__main__":
    main()
