"""Are borders or the middle hidden more often than they should be? Ratios with intervals, and a test of uniformity.

A fair mask hides each chosen token with the same chance, wherever it lies. Tokens of one draw are hidden together, so
they say little each: a draw counts once, and intervals are over people.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Num
from scipy import stats

from octjepa import keys

_RESAMPLES = 1000


def axis_bias(
    hidden: Num[np.ndarray, "draws places"],
    chosen: Num[np.ndarray, "draws places"],
    share: float,
    people: Sequence[str],
) -> dict[str, Any]:
    """`hidden` of `chosen` tokens at each place along an axis, and the share of tokens that is hidden in all.

    `edge` and `centre` are the hiding rates of the two outermost and of the one or two middle places over that share;
    1 is fair. `spread` is the standard deviation over places of the mean rate over the share, `expected_spread` what
    chance alone leaves after so many draws, and `p` the chance of a spread like this with fair masks (Hotelling's T2
    with the draws' own covariance, by its chi-squared limit). A small p with a ratio near 1 is a bias too small to
    matter; what matters is the ratio.
    """
    places = hidden.shape[1]
    middle = [(places - 1) // 2, places // 2]
    excess = hidden - share * chosen  # of each draw: 0 on average at every place if masks are fair
    mean = excess.mean(axis=0)
    draws = len(excess)
    covariance = np.atleast_2d(np.cov(excess.T)) / draws
    scale = share * np.maximum(chosen.mean(axis=0), 1e-9)
    # an axis that a family spans whole may not vary at all: what is left then is rounding
    floor = 1e-9 * max(float(np.trace(covariance)), 1e-12)
    values, vectors = np.linalg.eigh(covariance)
    kept = values > floor
    statistic = float(((mean @ vectors[:, kept]) ** 2 / values[kept]).sum())
    return {
        "edge": ratio(hidden[:, [0, -1]].sum(1), share * chosen[:, [0, -1]].sum(1), people),
        "centre": ratio(hidden[:, middle].sum(1), share * chosen[:, middle].sum(1), people),
        "spread": float((mean / scale).std()),
        "expected_spread": float(np.sqrt((np.diag(covariance) / scale**2).mean())),
        "p": float(stats.chi2.sf(statistic, int(kept.sum()))) if kept.any() else None,
    }


def ratio(
    above: Num[np.ndarray, " draws"], below: Num[np.ndarray, " draws"], people: Sequence[str]
) -> dict[str, float | None]:
    """Sum over sum with its 95 % interval by resampling people; no interval for one person, no value over nothing."""
    groups, number = np.unique(np.asarray(people), return_inverse=True)
    tops, bottoms = (np.bincount(number, weights=part, minlength=len(groups)) for part in (above, below))
    if bottoms.sum() <= 0:
        return {"value": None, "low": None, "high": None}
    value = float(tops.sum() / bottoms.sum())
    if len(groups) < 2:
        return {"value": value, "low": None, "high": None}
    rng = keys.generator("mask report", "people", len(groups))
    picked = rng.multinomial(len(groups), np.full(len(groups), 1 / len(groups)), size=_RESAMPLES)
    low, high = np.percentile((picked @ tops) / np.maximum(picked @ bottoms, 1e-12), [2.5, 97.5])
    return {"value": value, "low": float(low), "high": float(high)}
