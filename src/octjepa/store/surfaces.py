"""Finds the retina: the inner limiting membrane (ILM) and Bruch's membrane (BM) in every A-scan.

Both are shortest paths through a B-scan (dynamic programming, as in Chiu et al., Optics Express 18(18), 2010), on
scores built from box averages in millimetres, so that one set of weights serves every device. The path may climb any
slope at a price, which carries it over shadows, drusen and atrophy. A robust surface over all B-scans then finds
those whose path ran along a wrong layer, and they are searched again near it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from octjepa.ingest.reasons import rejected

_CLIMB = 0.035  # price of one row between neighbouring A-scans, in units of the tissue contrast
_WRONG_LAYER_MM = 0.12  # a B-scan whose membrane lies this far off the common surface took a wrong layer
_PULL = 0.15  # price of lying 50 um off the common surface, in the same units
_PULL_LIMIT = 4.0  # times that price at most: strong evidence wins over the surface
_LEAST_RETINA_MM = 0.05
_LEAST_LIGHT = 0.42  # share of an A-scan's light that lies above Bruch's membrane, at least


@dataclass(frozen=True)
class Surfaces:
    """Row numbers (float) per A-scan, `[D, W]`: `ilm` above `bm`; `contrast`: tissue over vitreous, grey levels."""

    ilm: Float[np.ndarray, "D W"]
    bm: Float[np.ndarray, "D W"]
    contrast: float
    noise: float


class _Boxes:
    """Box means along rows of `image` [D, H, W], by running sums.

    Beyond the top lies `level`, beyond the bottom more of the last rows, so that the image's borders are no edges.
    """

    def __init__(self, image: np.ndarray, level: float) -> None:
        depth, self.height, width = image.shape
        self.total = np.zeros((depth, self.height + 1, width), np.float32)
        np.cumsum(image, axis=1, out=self.total[:, 1:])
        self._level = np.float32(level)
        self._last = image[:, -3:].mean(axis=1, keepdims=True)

    def mean(self, start: int, stop: int) -> np.ndarray:
        """Mean of rows r+start .. r+stop-1 for every row r."""
        rows = np.arange(self.height)
        low, high = np.clip(rows + start, 0, self.height), np.clip(rows + stop, 0, self.height)
        result = self.total[:, high]
        result -= self.total[:, low]
        over = np.clip(-(rows + start), 0, stop - start)
        under = np.clip(rows + stop - self.height, 0, stop - start)
        result[:, over > 0] += over[over > 0][None, :, None] * self._level
        result[:, under > 0] += under[under > 0].astype(np.float32)[None, :, None] * self._last
        result *= np.float32(1 / (stop - start))
        return result


def _path(score: Float[np.ndarray, "D H W"], climb: float) -> np.ndarray:
    """Rows [D, W] of the path of highest score with `climb` paid per row between neighbours, for each B-scan."""
    depth, height, width = score.shape
    # Rows before B-scans: a running maximum over rows then takes all B-scans at once.
    columns = np.ascontiguousarray(score.transpose(2, 1, 0))
    index = np.arange(height)[:, None]
    ramp = (index * np.float32(climb)).astype(np.float32)
    best = np.empty_like(columns)
    best[0] = columns[0]
    down, up = np.empty_like(columns[0]), np.empty_like(columns[0])
    for x in range(1, width):
        np.maximum.accumulate(best[x - 1] + ramp, axis=0, out=down)
        down -= ramp
        np.maximum.accumulate((best[x - 1] - ramp)[::-1], axis=0, out=up)
        np.maximum(down, up[::-1] + ramp, out=down)
        np.add(down, columns[x], out=best[x])
    rows = np.empty((depth, width), np.int64)
    rows[:, -1] = best[-1].argmax(axis=0)
    for x in range(width - 2, -1, -1):
        price = np.float32(climb) * np.abs(index - rows[None, :, x + 1]).astype(np.float32)
        rows[:, x] = (best[x] - price).argmax(axis=0)
    return rows


def _bruch_score(boxes: _Boxes, image: Float[np.ndarray, "D H W"], row_mm: float) -> np.ndarray:
    """High on the lower edge of the RPE: bright above the row, darker below it and in the outer nuclear layer."""

    def rows(mm: float) -> int:
        return round(mm / row_mm)

    thick = max(2, rows(0.03))
    rpe = boxes.mean(-thick + 1, 1)
    nuclear = boxes.mean(-max(rows(0.13), thick + 2), -max(rows(0.06), thick))
    choroid = boxes.mean(1, 1 + max(2, rows(0.05)))
    edge = rpe - 0.45 * nuclear - 0.55 * choroid
    # Most light comes from above Bruch's membrane: over the nerve fibre layer, as bright, there is little.
    dark = np.median(image[:, ::3, ::3], axis=(1, 2)).astype(np.float32)
    light = np.cumsum(np.maximum(image - dark[:, None, None], 0), axis=1)
    share = light / np.maximum(light[:, -1:], 4.0)
    return edge - 1.6 * np.maximum(0.0, _LEAST_LIGHT - share) / _LEAST_LIGHT


def _vitreous(image: Float[np.ndarray, "D H W"], bm: Float[np.ndarray, "D W"]) -> Float[np.ndarray, " D"]:
    """Brightness of each B-scan's vitreous: the lower quarter of what lies above Bruch's membrane."""
    rows = np.arange(image.shape[1])[:, None]
    return np.array([np.percentile(frame[rows < line[None]][::7], 25) for frame, line in zip(image, bm, strict=True)])


def _ilm_score(boxes: _Boxes, vitreous: Float[np.ndarray, " D"], row_mm: float) -> np.ndarray:
    """High on the first row of tissue: brighter below than above, and nothing but vitreous further up."""

    def rows(mm: float) -> int:
        return max(2, round(mm / row_mm))

    edge = boxes.mean(0, rows(0.03)) - boxes.mean(-rows(0.03), 0)
    further = boxes.mean(-rows(0.20), -rows(0.02))
    return edge - 1.5 * np.maximum(0.0, further - vitreous.astype(np.float32)[:, None, None] - 0.05)


def _median_along(values: np.ndarray, size: int) -> np.ndarray:
    from scipy.ndimage import median_filter

    return median_filter(values, size=(1, size), mode="nearest")


def find_surfaces(image: Float[np.ndarray, "D H W"], row_mm: float, column_mm: float) -> Surfaces:
    """ILM and BM of `image`, whose rows are `row_mm` and columns `column_mm` apart.

    Raises VolumeRejected no_tissue where nothing stands out from the background.
    """
    from scipy.ndimage import gaussian_filter1d

    depth, height, width = image.shape
    smooth = gaussian_filter1d(image, max(0.6, 0.03 / column_mm), axis=2, mode="nearest", truncate=2.5)
    # Brightness differs from B-scan to B-scan: each is brought to 0 in the dark and 1 on its brightest layer.
    half = max(1, round(0.01 / row_mm))
    sampled = smooth[:, ::3, ::3].reshape(depth, -1)
    faint, level = np.percentile(sampled, [2, 20], axis=1).astype(np.float32)
    peak = np.median(_Boxes(smooth, float(np.median(level))).mean(-half, half + 1).max(axis=1), axis=1)
    contrast, noise = float(np.median(peak - level)), float(np.median(level - faint)) + 1.0
    if contrast < 4.0 or contrast < 2.0 * noise:
        raise rejected("no_tissue", f"the brightest layers stand {contrast:.1f} grey levels over the background")
    smooth -= level[:, None, None]
    smooth /= np.maximum(peak - level, 0.3 * contrast)[:, None, None]
    boxes = _Boxes(smooth, 0.0)

    climb = _CLIMB * row_mm / 0.0078 * 0.047 / column_mm
    bruch = _bruch_score(boxes, smooth, row_mm)
    step = max(1, width // 64)  # the common surface is smooth: few A-scans find it
    first = _path(bruch[:, :, ::step], climb * step).astype(np.float64)
    common = robust_surface(first, row_mm, columns=np.arange(width) / step)
    # Second search, drawn to the common surface: over atrophy the path would follow the bright choroid's end, and a
    # B-scan that took the nerve fibre layer for the RPE is brought back.
    moved = np.where(np.abs(common.offsets) * row_mm > _WRONG_LAYER_MM, 0, common.offsets)
    expected = (common.rows + moved[:, None]).astype(np.float32)
    distance = np.abs(np.arange(height, dtype=np.float32)[None, :, None] - expected[:, None, :])
    bruch -= _PULL * np.minimum(distance * np.float32(row_mm / 0.05), _PULL_LIMIT)
    size = max(3, round(0.15 / column_mm) | 1)
    bm_rows = _median_along(_path(bruch, climb).astype(np.float32), size)

    inner = _ilm_score(boxes, _vitreous(smooth, bm_rows), row_mm)
    inner[np.arange(height)[None, :, None] > (bm_rows - _LEAST_RETINA_MM / row_mm)[:, None, :]] -= 2.0
    ilm_rows = _median_along(_path(inner, climb).astype(np.float32), size)
    ilm_rows = np.minimum(ilm_rows, bm_rows - _LEAST_RETINA_MM / row_mm)
    return Surfaces(np.maximum(ilm_rows, 0), bm_rows, contrast, noise)


@dataclass(frozen=True)
class RobustSurface:
    """`rows` [D, W] of the fitted surface without, and `offsets` [D] with what each B-scan moved from it."""

    rows: Float[np.ndarray, "D W"]
    offsets: Float[np.ndarray, " D"]


def _terms(depth: int, columns: np.ndarray, width: int, degree: int) -> np.ndarray:
    z, x = np.meshgrid(np.linspace(-1, 1, depth), columns / max(1, width - 1) * 2 - 1, indexing="ij")
    terms = [np.ones_like(z), x, z]
    if degree == 2:
        terms += [x * x, z * x, z * z]
    return np.stack([term.ravel() for term in terms], axis=1)


def robust_surface(
    surface: Float[np.ndarray, "D W"], row_mm: float, degree: int = 2, columns: np.ndarray | None = None
) -> RobustSurface:
    """Polynomial of `degree` over slice and column with an axial offset per B-scan, fitted with Tukey's weights.

    Weights fall to zero some 60 um from the fit, so that drusen and detachments stay raised over it. `columns` are
    where `rows` is wanted, in columns of `surface` (default: at them).
    """
    depth, width = surface.shape
    step = max(1, width // 48)
    sampled = surface[:, ::step].astype(np.float64)
    terms = _terms(depth, np.arange(0, width, step), width, degree)
    offsets = np.zeros(depth)
    values = np.repeat(np.median(sampled), sampled.size)
    weight = np.ones(sampled.size)
    least = 0.06 / row_mm
    for turn in range(8):
        target = (sampled - offsets[:, None]).ravel()
        scaled = terms * weight[:, None]
        coefficients = np.linalg.lstsq(scaled.T @ terms + 1e-6 * np.eye(terms.shape[1]), scaled.T @ target, rcond=None)[
            0
        ]
        values = terms @ coefficients
        residual = sampled - values.reshape(sampled.shape)
        if turn >= 2:
            offsets = np.median(residual, axis=1)
            offsets -= np.median(offsets)
        left = (residual - offsets[:, None]).ravel()
        scale = max(4.685 * 1.4826 * float(np.median(np.abs(left))), least)
        weight = np.maximum(0.0, 1.0 - (left / scale) ** 2) ** 2
    wanted = np.arange(width) if columns is None else columns
    full = (_terms(depth, wanted, width, degree) @ coefficients).reshape(depth, len(wanted))
    return RobustSurface(full, offsets)
