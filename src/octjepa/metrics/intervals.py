"""Confidence intervals of bootstrapped metrics, symmetric on the scale that follows from what a metric is.

The interval is Student's: the value plus and minus t standard errors, the error being the spread of the bootstrap
samples times sqrt(n / (n - 1)) and t that of n - 1 people. The scale follows from the metric's definition, never from
its size: a choice by size would depend on the unit, and take an error of 0.4 mm for a share but not one of 400 um. No
interval leaves the range of its metric. Plain percentiles are too narrow for 30 people and fewer:
`benchmarks/coverage.py` counts how often each kind of interval covers the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

# share: within [0, 1], on the logit scale. error: 0 or more, in any unit, on the logarithm's scale, so that the
# interval is the same in every unit. below_one: 1 - (error / spread), such as R2 and kappa, on log(1 - value), which
# is the logarithm of an error again. of_constant: R2 of one predicted number, never above 0. difference: unchanged.
Scale = Literal["share", "error", "below_one", "of_constant", "difference"]

METRIC_SCALE: dict[str, Scale] = {
    "auroc": "share",
    "auroc_ovr": "share",
    "auprc": "share",
    "balanced_accuracy": "share",
    "f1_macro": "share",
    "ece": "share",
    "brier": "share",
    "sensitivity_at_specificity_90": "share",
    "quadratic_kappa": "below_one",
    "mean_absolute_rank_error": "error",
    "r2": "below_one",
    "mean_absolute_error": "error",
    "concordance": "share",
}
LOWER_IS_BETTER = {"ece", "brier", "mean_absolute_error", "mean_absolute_rank_error"}

CONFIDENCE = 0.95
# With fewer people even the wide interval covers the truth less than nine times in ten (benchmarks/coverage.py).
MIN_PEOPLE = 6
# Below this share of resamples in which the metric is defined, an interval would describe luckier test sets than ours.
MIN_DEFINED_SHARE = 0.2


@dataclass(frozen=True)
class Interval:
    """low and high are None if no valid interval exists; undefined: number of resamples without a value.

    None exists for fewer than MIN_PEOPLE people, where too few resamples have a value, and where all have the same: a
    perfect score of a few people, or a value fixed by construction. The bootstrap cannot tell these two apart, and an
    interval without width would look like certainty.
    """

    low: float | None
    high: float | None
    undefined: int


def scale_of(metric: str, scores: Float[np.ndarray, "n classes"]) -> Scale:
    """The scale of `metric` for predictions with these `scores`."""
    return "of_constant" if metric == "r2" and np.ptp(scores) == 0 else METRIC_SCALE[metric]


def standard_error(samples: Float[np.ndarray, " resamples"], n_people: int) -> float | None:
    """Spread of the bootstrap samples, corrected for `n_people`; None if no interval exists (see Interval)."""
    defined = samples[np.isfinite(samples)]
    if n_people < MIN_PEOPLE or len(defined) < max(2, MIN_DEFINED_SHARE * len(samples)):
        return None
    if np.ptp(defined) <= 1e-12 * max(1.0, float(np.abs(defined).max())):
        return None
    return float(defined.std(ddof=1) * np.sqrt(n_people / (n_people - 1)))


def combined_error(error: float, n_people: int, more: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Standard error of several independent sources, and its degrees of freedom (Welch and Satterthwaite).

    more: (variance, degrees of freedom) of the sources besides the people.
    """
    parts = [(error**2, n_people - 1), *more]
    variance = sum(part for part, _ in parts)
    return float(np.sqrt(variance)), variance**2 / sum(part**2 / degrees for part, degrees in parts)


def student_interval(
    value: float,
    samples: Float[np.ndarray, " resamples"],
    n_people: int,
    scale: Scale,
    more: Sequence[tuple[float, int]] = (),
) -> Interval:
    """value +- t standard errors on `scale`, by the delta method.

    For metrics that end at 1 the samples themselves are transformed, if they have no long tail.
    more: as in `combined_error`, such as the variance between seeds, on the scale of `value`.
    """
    from scipy.stats import t

    defined = samples[np.isfinite(samples)]
    undefined = len(samples) - len(defined)
    error = standard_error(samples, n_people)
    if error is None or not np.isfinite(value):
        return Interval(None, None, undefined)
    slope = delta_method_slope(scale, value, defined)
    scaled = slope * error
    if scale in ("below_one", "of_constant") and defined.max() < 1:
        scaled = standard_error(np.log(1 - defined), n_people) or scaled
    total, freedom = combined_error(scaled, n_people, [(variance * slope**2, degrees) for variance, degrees in more])
    half_width = float(t.ppf(0.5 + CONFIDENCE / 2, freedom)) * total
    return Interval(*interval_around(scale, value, defined, half_width), undefined)


def delta_method_slope(scale: Scale, value: float, samples: Float[np.ndarray, " defined"]) -> float:
    """Derivative of the transform to `scale` at `value`; 1 where the transform is undefined.

    That is at a share of exactly 0 or 1 and an error of 0, and where samples of a "share" leave [0, 1].
    """
    if scale == "share" and 0 < value < 1 and samples.min() >= 0 and samples.max() <= 1:
        return 1 / (value * (1 - value))
    if scale == "error" and value > 0:
        return 1 / value
    if scale in ("below_one", "of_constant") and value < 1:
        return 1 / (1 - value)
    return 1.0


def interval_around(
    scale: Scale, value: float, samples: Float[np.ndarray, " defined"], half_width: float
) -> tuple[float, float]:
    """value -+ `half_width`, which is in units of `scale`, transformed back."""
    grow, shrink = np.exp(half_width), np.exp(-half_width)
    if scale == "share" and samples.min() >= 0 and samples.max() <= 1:
        if 0 < value < 1:
            logit = np.log(value / (1 - value))
            return float(1 / (1 + np.exp(half_width - logit))), float(1 / (1 + np.exp(-half_width - logit)))
        return max(value - half_width, 0.0), min(value + half_width, 1.0)
    if scale == "error":
        return (value * float(shrink), value * float(grow)) if value > 0 else (0.0, half_width)
    if scale in ("below_one", "of_constant") and value < 1:
        high = 1 - (1 - value) * float(shrink)
        return 1 - (1 - value) * float(grow), min(high, 0.0) if scale == "of_constant" else high
    return value - half_width, value + half_width
