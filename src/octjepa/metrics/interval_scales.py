"""On which scale an interval is symmetric. It follows from what a figure is by definition, never from its size.

A choice by size would depend on the unit: an error of 0.4 mm would be taken for a share and one of 400 um would not.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Float

# share: within [0, 1], on the logit scale. error: 0 or more, in any unit, on that of its logarithm, so that the
# interval is the same in every unit. below_one: 1 - (error / spread), such as R2 and kappa, on log(1 - figure), which
# is the logarithm of an error again. of_constant: R2 of one number said of everyone, which is never above 0.
# difference: as it is.
Scale = Literal["share", "error", "below_one", "of_constant", "difference"]

OF_METRIC: dict[str, Scale] = {
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
    return OF_METRIC[metric]


def steepness(scale: Scale, value: float, samples: Float[np.ndarray, " defined"]) -> float:
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


def around(scale: Scale, value: float, samples: Float[np.ndarray, " defined"], half: float) -> tuple[float, float]:
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
