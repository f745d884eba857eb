"""Anti-aliased resampling of one axis at a time, as a small matrix.

Going coarser, the kernel is a triangle that falls to zero one target step away, so that 512 B-scans to 64 read every
B-scan; going finer it is linear interpolation. Input and output have the same centre. Of a grating with f periods
a target step the triangle leaves sinc(f)^2: nothing at f = 1, a tenth from 0.75 on, 0.4 at the Nyquist limit of 0.5.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from octjepa.reasons import rejection

_MAX_BYTES = 1 << 30  # of the matrices for uneven positions


def centred_positions(count: int, step_mm: float) -> Float[np.ndarray, " N"]:
    """Positions in mm of `count` samples about their centre."""
    return (np.arange(count) - (count - 1) / 2) * step_mm


def resampling_matrix(
    source_mm: Float[np.ndarray, " S"],
    target_mm: Float[np.ndarray, " T"],
    step_mm: float,
    reach_mm: float | None = None,
) -> Float[np.ndarray, "T S"]:
    """Resampling matrix, rows summing to 1, from rising `source_mm`, evenly spaced or not, to `target_mm` at `step_mm`.

    Targets beyond the source's ends (by more than `reach_mm`, default half a median source gap) have zero rows.
    Raises VolumeRejected size_implausible: uneven positions over an extent that no eye has.
    """
    if len(source_mm) < 2:
        raise ValueError("resampling needs two samples at least")
    gaps = np.diff(source_mm)
    gap = float(np.median(gaps))
    if np.abs(gaps - gap).max() > 0.02 * gap:
        fine_step = max(float(gaps.min()), step_mm / 8)
        span = float(source_mm[-1] - source_mm[0])
        count = int(np.ceil(span / fine_step)) + 1
        size = 4 * count * (len(source_mm) + 2 * len(target_mm))
        if size > _MAX_BYTES:
            raise rejection("size_implausible", f"positions over {span:.0f} mm take {size / 2**30:.1f} GiB to resample")
        fine = np.linspace(source_mm[0], source_mm[-1], count)
        spread = resampling_matrix(fine, target_mm, step_mm, (reach_mm or gap / 2))
        return spread @ _linear_interpolation(source_mm, fine)
    width = max(step_mm, gap)
    matrix = np.maximum(0.0, 1.0 - np.abs(target_mm[:, None] - source_mm[None, :]) / width)
    total = matrix.sum(axis=1, keepdims=True)
    # A target between the last sample and its edge is beyond every sample: it takes the last one.
    lost = (total[:, 0] < 1e-9).nonzero()[0]
    matrix[lost, np.abs(target_mm[lost, None] - source_mm[None, :]).argmin(axis=1)] = 1.0
    matrix /= matrix.sum(axis=1, keepdims=True)
    reach = gap / 2 if reach_mm is None else reach_mm
    outside = (target_mm < source_mm[0] - reach - 1e-9) | (target_mm > source_mm[-1] + reach + 1e-9)
    matrix[outside] = 0.0
    return matrix.astype(np.float32)


def _linear_interpolation(source_mm: np.ndarray, target_mm: np.ndarray) -> Float[np.ndarray, "T S"]:
    right = np.clip(np.searchsorted(source_mm, target_mm), 1, len(source_mm) - 1)
    share = np.clip((target_mm - source_mm[right - 1]) / (source_mm[right] - source_mm[right - 1]), 0, 1)
    matrix = np.zeros((len(target_mm), len(source_mm)), np.float32)
    target = np.arange(len(target_mm))
    matrix[target, right - 1] = 1 - share
    matrix[target, right] += share
    return matrix
