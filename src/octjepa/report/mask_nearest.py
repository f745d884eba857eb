"""The visible token nearest to each hidden one, and how well its pixels, copied, predict the hidden patch.

Neighbouring B-scans are nearly copies. Where copying does well, a mask can be solved without understanding anything.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int
from scipy import ndimage

_PIXEL_EPS = 1e-6  # as in arm mae
_NEVER = 1e4  # token steps off an axis: farther than any grid is long


class Copies(NamedTuple):
    """Of one draw, pairs (sum, how many); `along` per axis (sum, targets with a visible token on their line, targets).

    `brightness` sums squared differences of patch means, over those from the targets' own mean.
    """

    error: tuple[float, float]
    on_tissue: tuple[float, float]
    empty: tuple[float, float]
    brightness: tuple[float, float]
    blank: float
    along: tuple[tuple[float, float, float], ...]


def normalised(patches: Float32[np.ndarray, "t voxels"]) -> Float32[np.ndarray, "t voxels"]:
    """Each patch less its mean over its spread: the targets of arm mae (`VJEPA3D.targets`)."""
    spread = np.sqrt(patches.var(axis=1, keepdims=True, ddof=1) + np.float32(_PIXEL_EPS))
    return (patches - patches.mean(axis=1, keepdims=True)) / spread


def nearest_visible(
    visible: Bool[np.ndarray, "d h w"], places: Int[np.ndarray, "m 3"], axis: int | None = None
) -> tuple[Int[np.ndarray, "m 3"], Float[np.ndarray, " m"]]:
    """(grid place of the nearest visible token, its distance in token steps) for each of `places`.

    With `axis` only tokens on the line along it count; the distance is infinite where none is visible. A grid with
    nothing visible is a fault of the caller: ValueError.
    """
    if not visible.any():
        raise ValueError("no token is visible")
    sampling = [1.0 if axis in (None, one) else _NEVER for one in range(3)]
    distance, nearest = ndimage.distance_transform_edt(~visible, sampling=sampling, return_indices=True)
    at = tuple(places.T)
    away = distance[at]
    return nearest[(slice(None), *at)].T.astype(places.dtype), np.where(away < _NEVER, away, np.inf)


def copies_of(
    pixels: Float32[np.ndarray, "t voxels"],
    level: Float32[np.ndarray, " t"],
    tissue: Bool[np.ndarray, " t"],
    target: Int[np.ndarray, " m"],
    number_at: Int[np.ndarray, "d h w"],
    visible: Bool[np.ndarray, "d h w"],
    places: Int[np.ndarray, "m 3"],
    nearest: Int[np.ndarray, "m 3"],
) -> Copies:
    """`pixels` as `normalised` gives them, `level` the patches' mean z-scores, `number_at` which token lies where."""
    copied = number_at[tuple(nearest.T)]
    errors = ((pixels[target] - pixels[copied]) ** 2).mean(axis=1)
    power = (pixels[target] ** 2).mean(axis=1)
    on_tissue = tissue[target]
    off, own = (level[target] - level[copied]) ** 2, (level[target] - level[target].mean()) ** 2
    along = []
    for axis in range(3):
        there, away = nearest_visible(visible, places, axis)
        known = np.isfinite(away)
        from_line = number_at[tuple(there[known].T)]
        missed = ((pixels[target[known]] - pixels[from_line]) ** 2).mean(axis=1)
        along.append((float(missed.sum()), float(known.sum()), float(len(target))))
    return Copies(
        (float(errors.sum()), float(len(errors))),
        (float(errors[on_tissue].sum()), float(on_tissue.sum())),
        (float(power.sum()), float(len(power))),
        (float(off.sum()), float(own.sum())),
        float((power == 0).mean()),
        tuple(along),
    )
