"""Metrics of one set of masks: fairness along an axis, distance to the nearest visible token, and copying it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Num
from scipy import ndimage, stats

from octjepa import keys
from octjepa.record import Record

_RESAMPLES = 1000
_PIXEL_EPS = 1e-6  # as in the objective mae_patch_norm
_OFF_AXIS = 1e4  # distance of a token step off the axis: farther than any grid is long


@dataclass(frozen=True)
class RatioInterval(Record):
    """A ratio of two sums with a 95 % interval over people; None if there is no ratio, or a single person."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class AxisBias(Record):
    """How often the borders and the centre of an axis are hidden.

    edge, centre: hiding rates of the two outermost and of the one or two central positions over the mean rate; 1 is
    fair. spread: standard deviation over positions of the mean rate over the share. expected_spread: by chance alone,
    after so many draws. p: of Hotelling's T2 test with the covariance of the draws, by its chi-squared limit; None if
    nothing varies. With a small p and a ratio near 1 the bias is too small to matter.
    """

    edge: RatioInterval
    centre: RatioInterval
    spread: float
    expected_spread: float
    p: float | None


def axis_bias(
    hidden: Num[np.ndarray, "draws positions"],
    selected: Num[np.ndarray, "draws positions"],
    share: float,
    people: Sequence[str],
) -> AxisBias:
    """Whether borders or the centre of an axis are hidden more often than they should be.

    A fair mask hides every selected token with the same probability. `hidden` and `selected` count the tokens of each
    draw at each position along the axis; `share` is the share of selected tokens that is hidden over the whole grid.
    Tokens of one draw are hidden together, so a draw counts once, and intervals are over people.
    """
    count = hidden.shape[1]
    centre = [(count - 1) // 2, count // 2]
    excess = hidden - share * selected  # 0 on average at every position if masks are fair
    mean = excess.mean(axis=0)
    draws = len(excess)
    covariance = np.atleast_2d(np.cov(excess.T)) / draws
    scale = share * np.maximum(selected.mean(axis=0), 1e-9)
    # an axis that a family spans whole may not vary at all: what is left then is rounding
    floor = 1e-9 * max(float(np.trace(covariance)), 1e-12)
    values, vectors = np.linalg.eigh(covariance)
    varying = values > floor
    statistic = float(((mean @ vectors[:, varying]) ** 2 / values[varying]).sum())
    edge_rate, centre_rate = (
        ratio_interval(hidden[:, part].sum(1), share * selected[:, part].sum(1), people) for part in ([0, -1], centre)
    )
    return AxisBias(
        edge=edge_rate,
        centre=centre_rate,
        spread=float((mean / scale).std()),
        expected_spread=float(np.sqrt((np.diag(covariance) / scale**2).mean())),
        p=float(stats.chi2.sf(statistic, int(varying.sum()))) if varying.any() else None,
    )


def ratio_interval(
    numerators: Num[np.ndarray, " draws"], denominators: Num[np.ndarray, " draws"], people: Sequence[str]
) -> RatioInterval:
    """Ratio of two sums, with an interval by resampling people; no value if the denominators sum to nothing."""
    groups, group = np.unique(np.asarray(people), return_inverse=True)
    above, below = (np.bincount(group, weights=part, minlength=len(groups)) for part in (numerators, denominators))
    if below.sum() <= 0:
        return RatioInterval(None)
    value = float(above.sum() / below.sum())
    if len(groups) < 2:
        return RatioInterval(value)
    rng = keys.generator("mask report", "people", len(groups))
    resampled = rng.multinomial(len(groups), np.full(len(groups), 1 / len(groups)), size=_RESAMPLES)
    low, high = np.percentile((resampled @ above) / np.maximum(resampled @ below, 1e-12), [2.5, 97.5])
    return RatioInterval(value, float(low), float(high))


class CopyErrors(NamedTuple):
    """Errors of copying the nearest visible patch in one draw, as pairs (sum, count).

    error: over all targets. on_tissue: over those on tissue. empty: of predicting zero. brightness: squared differences
    of patch means, over those from the targets' own mean. blank: share of constant targets. along: for each axis (sum
    of errors, targets with a visible token on their line along it, targets).
    """

    error: tuple[float, float]
    on_tissue: tuple[float, float]
    empty: tuple[float, float]
    brightness: tuple[float, float]
    blank: float
    along: tuple[tuple[float, float, float], ...]


def normalised_patches(patches: Float32[np.ndarray, "t voxels"]) -> Float32[np.ndarray, "t voxels"]:
    """Each patch less its mean over its standard deviation: the targets of mae_patch_norm."""
    spread = np.sqrt(patches.var(axis=1, keepdims=True, ddof=1) + np.float32(_PIXEL_EPS))
    return (patches - patches.mean(axis=1, keepdims=True)) / spread


def nearest_visible(
    visible: Bool[np.ndarray, "d h w"], positions: Int[np.ndarray, "m 3"], axis: int | None = None
) -> tuple[Int[np.ndarray, "m 3"], Float[np.ndarray, " m"]]:
    """(grid position of the nearest visible token, its distance in token steps) for each of `positions`.

    With `axis` only tokens on the line along it count; the distance is infinite if none is visible there. Raises
    ValueError: no token of the grid is visible.
    """
    if not visible.any():
        raise ValueError("no token is visible")
    sampling = [1.0 if axis in (None, number) else _OFF_AXIS for number in range(3)]
    distance_map, nearest = ndimage.distance_transform_edt(~visible, sampling=sampling, return_indices=True)
    at = tuple(positions.T)
    distance = distance_map[at]
    return nearest[(slice(None), *at)].T.astype(positions.dtype), np.where(distance < _OFF_AXIS, distance, np.inf)


def copy_errors(
    pixels: Float32[np.ndarray, "t voxels"],
    brightness: Float32[np.ndarray, " t"],
    tissue: Bool[np.ndarray, " t"],
    target: Int[np.ndarray, " m"],
    token_at: Int[np.ndarray, "d h w"],
    visible: Bool[np.ndarray, "d h w"],
    positions: Int[np.ndarray, "m 3"],
    nearest: Int[np.ndarray, "m 3"],
) -> CopyErrors:
    """How well copies of the nearest visible patches predict the targets.

    Neighbouring B-scans are nearly copies of each other; where copying does well, the task needs no understanding.
    pixels: as `normalised_patches` returns them. brightness: the patches' mean z-scores. token_at: the token at each
    grid position. positions, nearest: of the targets and of their nearest visible tokens.
    """
    source = token_at[tuple(nearest.T)]
    errors = ((pixels[target] - pixels[source]) ** 2).mean(axis=1)
    power = (pixels[target] ** 2).mean(axis=1)
    on_tissue = tissue[target]
    offset = (brightness[target] - brightness[source]) ** 2
    variance = (brightness[target] - brightness[target].mean()) ** 2
    along = []
    for axis in range(3):
        line_nearest, distance = nearest_visible(visible, positions, axis)
        is_known = np.isfinite(distance)
        line_source = token_at[tuple(line_nearest[is_known].T)]
        line_errors = ((pixels[target[is_known]] - pixels[line_source]) ** 2).mean(axis=1)
        along.append((float(line_errors.sum()), float(is_known.sum()), float(len(target))))
    return CopyErrors(
        (float(errors.sum()), float(len(errors))),
        (float(errors[on_tissue].sum()), float(on_tissue.sum())),
        (float(power.sum()), float(len(power))),
        (float(offset.sum()), float(variance.sum())),
        float((power == 0).mean()),
        tuple(along),
    )
