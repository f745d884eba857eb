"""On which scale an interval is symmetric. It follows from what a figure is by definition, never from its size.

A choice by size would depend on the unit: an error of 0.4 mm would be taken for a share and one of 400 um would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

# share: within [0, 1], on the logit scale. error: 0 or more, in any unit, on that of its logarithm, so that the
# interval is the same in every unit. below_one: 1 - (error / spread), such as R2 and kappa, on log(1 - figure), which
# is the logarithm of an error again. of_constant: R2 of one number said of everyone, which is never above 0.
# difference: as it is.
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
}
LOWER_IS_BETTER = {"ece", "brier", "mean_absolute_error", "mean_absolute_rank_error"}


def scale_of(metric: str, scores: Float[np.ndarray, "n classes"]) -> Scale:
    """The scale of `metric` of a row that says `scores`."""
    if metric == "r2" and np.ptp(scores) == 0:
        return "of_constant"
    return METRIC_SCALE[metric]


def delta_method_slope(scale: Scale, value: float, samples: Float[np.ndarray, " defined"]) -> float:
    """How much faster than `value` its place on the scale moves (delta method); 1 where it has no place there.

    That is a share of exactly 0 or 1 and an error of 0, at the scale's end, and what was called a share and is none.
    """
    if scale == "share" and 0 < value < 1 and samples.min() >= 0 and samples.max() <= 1:
        return 1 / (value * (1 - value))
    if scale == "error" and value > 0:
        return 1 / value
    if scale in ("below_one", "of_constant") and value < 1:
        return 1 / (1 - value)
    return 1.0


def interval_around(
    scale: Scale, value: float, samples: Float[np.ndarray, " defined"], half: float
) -> tuple[float, float]:
    """value -+ `half`, which is in units of the scale, brought back from it."""
    if scale == "share" and samples.min() >= 0 and samples.max() <= 1:
        if 0 < value < 1:
            place = np.log(value / (1 - value))
            return float(1 / (1 + np.exp(half - place))), float(1 / (1 + np.exp(-half - place)))
        return max(value - half, 0.0), min(value + half, 1.0)
    if scale == "error":
        return (value * float(np.exp(-half)), value * float(np.exp(half))) if value > 0 else (0.0, half)
    if scale in ("below_one", "of_constant") and value < 1:
        high = 1 - (1 - value) * float(np.exp(-half))
        return 1 - (1 - value) * float(np.exp(half)), min(high, 0.0) if scale == "of_constant" else high
    return value - half, value + half


CONFIDENCE = 0.95


# With fewer people even the wide interval holds the truth less than nine times in ten (benchmarks/coverage.py).
MIN_PEOPLE = 6


# Below this share of resamples in which the figure exists, an interval would speak of luckier test sets than ours.
MIN_DEFINED_SHARE = 0.2


@dataclass(frozen=True)
class Interval:
    """low and high are None where no honest interval exists; undefined: the number of resamples without a figure.

    None exists for fewer than LEAST_PEOPLE people, where too few resamples hold the figure, and where no resample moves
    it: a perfect score of a few people, or a figure fixed by construction. The bootstrap cannot tell these two apart,
    and an interval without width would look like certainty.
    """

    low: float | None
    high: float | None
    undefined: int


def standard_error(samples: Float[np.ndarray, " resamples"], n_people: int) -> float | None:
    """Spread of the bootstrap copies, as of `n_people` people and not of their plug-in twins; None where none exists.

    See Interval for where that is.
    """
    defined = samples[np.isfinite(samples)]
    if n_people < MIN_PEOPLE or len(defined) < max(2, MIN_DEFINED_SHARE * len(samples)):
        return None
    if np.ptp(defined) <= 1e-12 * max(1.0, float(np.abs(defined).max())):
        return None
    return float(defined.std(ddof=1) * np.sqrt(n_people / (n_people - 1)))


def student_interval(
    value: float,
    samples: Float[np.ndarray, " resamples"],
    n_people: int,
    scale: Scale,
    more: Sequence[tuple[float, int]] = (),
) -> Interval:
    """value +- t standard errors on `scale`, by the delta method.

    Of figures that end at 1 the copies themselves are moved there, where they have no long tail.
    more: (variance, degrees of freedom) of further sources of error of `value`, such as the seeds; they add up as
    squares, degrees of freedom by Welch and Satterthwaite.
    """
    defined = samples[np.isfinite(samples)]
    undefined = len(samples) - len(defined)
    error = standard_error(samples, n_people)
    if error is None or not np.isfinite(value):
        return Interval(None, None, undefined)
    steep = delta_method_slope(scale, value, defined)
    apart = steep * error
    if scale in ("below_one", "of_constant") and defined.max() < 1:
        apart = standard_error(np.log(1 - defined), n_people) or apart
    low, high = interval_around(scale, value, defined, _half_width(apart, n_people, more, steep))
    return Interval(low, high, undefined)


def _half_width(error: float, n_people: int, more: Sequence[tuple[float, int]], steep: float) -> float:
    """Half the interval's width; `steep` takes the variances of `more` to the scale of `error`."""
    from scipy.stats import t

    total, freedom = combined_error(error, n_people, [(variance * steep**2, degrees) for variance, degrees in more])
    return float(t.ppf(0.5 + CONFIDENCE / 2, freedom)) * total


def combined_error(error: float, n_people: int, more: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Standard error of several sources together, and its degrees of freedom."""
    parts = [(error**2, n_people - 1), *more]
    variance = sum(part for part, _ in parts)
    return float(np.sqrt(variance)), variance**2 / sum(part**2 / degrees for part, degrees in parts)
