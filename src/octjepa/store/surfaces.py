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

from octjepa.ingest.reasons import rejection

_CLIMB = 0.035  # price of one row between neighbouring A-scans, in units of the tissue contrast
_WRONG_LAYER_MM = 0.12  # a B-scan whose membrane lies this far off the common surface took a wrong layer
_PULL = 0.2  # price of lying 50 um off the common surface, in the same units
_PULL_LIMIT = 4.0  # times that price at most: strong evidence wins over the surface
_LEAST_RETINA_MM = 0.05
_COARSE_MM = (0.016, 0.14)  # row and column of the image that is searched first
_REFINE_MM = 0.05  # how far the first search may lie off
_LEAST_LIGHT = 0.38  # share of an A-scan's light that lies above Bruch's membrane, at least


@dataclass(frozen=True)
class Surfaces:
    """Row numbers (float) per A-scan, `[D, W]`: `ilm` above `bm`; `contrast`: tissue over vitreous, grey levels."""

    ilm: Float[np.ndarray, "D W"]
    bm: Float[np.ndarray, "D W"]
    contrast: float
    noise: float


class _Boxes:
    """Box means along the last axis of `image` [..., rows], by running sums.

    Means are of the `count` rows from row `before` on; what lies around them in `image` is their surroundings.
    """

    def __init__(self, image: np.ndarray, before: int, count: int) -> None:
        self._total = np.zeros((*image.shape[:-1], image.shape[-1] + 1), np.float32)
        np.cumsum(image, axis=-1, out=self._total[..., 1:])
        self._before, self._count = before, count

    def mean(self, start: int, stop: int) -> np.ndarray:
        """Mean of rows r+start .. r+stop-1 for every row r."""
        low, high = self._before + start, self._before + stop
        result = self._total[..., high : high + self._count] - self._total[..., low : low + self._count]
        result *= np.float32(1 / (stop - start))
        return result

    def highest(self, rows: int) -> np.ndarray:
        """The largest mean of that many rows in a row."""
        return (self._total[..., rows:] - self._total[..., :-rows]).max(axis=-1) / np.float32(rows)


def _framed(image: Float[np.ndarray, "W D H"], before: int, after: int) -> np.ndarray:
    """More rows around `image`, so that its borders are no edges: dark above, more of its last rows below."""
    height = image.shape[-1]
    framed = np.zeros((*image.shape[:-1], before + height + after), np.float32)
    framed[..., before : before + height] = image
    framed[..., before + height :] = image[..., -3:].mean(axis=-1, keepdims=True)
    return framed


def _path(score: Float[np.ndarray, "W D H"], climb: float) -> Float[np.ndarray, "D W"]:
    """Rows [D, W] of the path of highest score with `climb` paid per row between neighbours, for each B-scan."""
    width, depth, height = score.shape
    best = score.copy()
    reach, paid = np.empty((depth, height), np.float32), np.empty((depth, height), np.float32)
    for x in range(1, width):
        reach[:] = best[x - 1]
        step = 1
        # Steps of 1, 2, 4 ... rows up or down make a climb of any height at its price.
        while step < height:
            np.subtract(reach, np.float32(climb * step), out=paid)
            np.maximum(reach[:, step:], paid[:, :-step], out=reach[:, step:])
            np.maximum(reach[:, :-step], paid[:, step:], out=reach[:, :-step])
            step *= 2
        best[x] += reach
    rows = np.empty((depth, width), np.int64)
    rows[:, -1] = best[-1].argmax(axis=1)
    index = np.arange(height)
    prices = np.float32(climb) * np.abs(index[:, None] - index).astype(np.float32)
    for x in range(width - 2, -1, -1):
        rows[:, x] = (best[x] - prices[rows[:, x + 1]]).argmax(axis=1)
    return rows.astype(np.float64)


def _bruch_reach(row_mm: float) -> tuple[int, int]:
    """Rows above and below that `_bruch_edge` looks at."""
    return max(round(0.13 / row_mm), max(2, round(0.03 / row_mm)) + 2), 1 + max(2, round(0.05 / row_mm))


def _bruch_edge(boxes: _Boxes, row_mm: float) -> np.ndarray:
    """High on the lower edge of the RPE: bright above the row, darker below it and in the outer nuclear layer."""
    above, below = _bruch_reach(row_mm)
    thick = max(2, round(0.03 / row_mm))
    rpe = boxes.mean(-thick + 1, 1)
    nuclear = boxes.mean(-above, -max(round(0.06 / row_mm), thick))
    choroid = boxes.mean(1, below)
    return rpe - np.float32(0.45) * nuclear - np.float32(0.55) * choroid


def _too_little_light(image: Float[np.ndarray, "W D H"]) -> np.ndarray:
    """Penalty: most light comes from above Bruch's membrane; over the nerve fibre layer, as bright, there is little."""
    dark = np.median(image[::3, :, ::3], axis=(0, 2)).astype(np.float32)
    light = np.maximum(image - dark[:, None], 0)
    np.cumsum(light, axis=-1, out=light)
    light /= np.maximum(light[..., -1:], 4.0)
    np.subtract(np.float32(_LEAST_LIGHT), light, out=light)
    np.maximum(light, 0, out=light)
    light *= np.float32(1.6 / _LEAST_LIGHT)
    return light


def _vitreous(image: Float[np.ndarray, "W D H"], bm: Float[np.ndarray, "D W"]) -> Float[np.ndarray, " D"]:
    """Brightness of each B-scan's vitreous: the lower quarter of what lies above Bruch's membrane."""
    above = np.arange(image.shape[-1]) < bm.T[..., None]
    depth = image.shape[1]
    values = np.where(above, image, np.inf)[::2, :, ::2].transpose(1, 0, 2).reshape(depth, -1)
    values.sort(axis=1)
    count = np.isfinite(values).sum(axis=1)
    return np.where(count > 0, values[np.arange(depth), count // 4], 0)


def _ilm_edge(boxes: _Boxes, row_mm: float) -> np.ndarray:
    """High on the first row of tissue: brighter below than above."""
    thick = max(2, round(0.03 / row_mm))
    return boxes.mean(0, thick) - boxes.mean(-thick, 0)


def _not_vitreous(boxes: _Boxes, vitreous: Float[np.ndarray, " D"], row_mm: float) -> np.ndarray:
    """Penalty: nothing but vitreous lies further up than the inner limiting membrane."""
    further = boxes.mean(-round(0.20 / row_mm), -max(2, round(0.02 / row_mm)))
    further -= vitreous.astype(np.float32)[:, None] + np.float32(0.05)
    np.maximum(further, 0, out=further)
    further *= np.float32(1.5)
    return further


def _median_along(values: np.ndarray, size: int) -> np.ndarray:
    from scipy.ndimage import median_filter

    return median_filter(values, size=(1, size), mode="nearest")


def _coarse(image: Float[np.ndarray, "D H W"], rows: int, columns: int) -> Float[np.ndarray, "C D R"]:
    """Means of `rows` x `columns` pixels, columns first."""
    _, height, width = image.shape
    image = image[:, : height // rows * rows, : width // columns * columns]
    summed = image[:, ::rows].copy()
    for row in range(1, rows):
        summed += image[:, row::rows]
    result = summed[..., ::columns].copy()
    for column in range(1, columns):
        result += summed[..., column::columns]
    result *= np.float32(1 / (rows * columns))
    return np.ascontiguousarray(result.transpose(2, 0, 1))


def _finer(rows: Float[np.ndarray, "D C"], factor: int, width: int) -> Float[np.ndarray, "D W"]:
    """Values at the columns of the coarse image, interpolated to the `width` columns that it was made of."""
    place = np.clip((np.arange(width) + 0.5) / factor - 0.5, 0, rows.shape[1] - 1)
    left = np.minimum(place.astype(np.int64), max(rows.shape[1] - 2, 0))
    share = place - left
    right = np.minimum(left + 1, rows.shape[1] - 1)
    return rows[:, left] * (1 - share) + rows[:, right] * share


@dataclass(frozen=True)
class _Fine:
    """The image as it came, with each B-scan's brightness in the dark and over the dark."""

    image: Float[np.ndarray, "D H W"]
    level: Float[np.ndarray, " D"]
    scale: Float[np.ndarray, " D"]
    row_mm: float
    column_mm: float

    def around(self, rows: Float[np.ndarray, "D W"], above: int, below: int) -> np.ndarray:
        """[W, D, above + 1 + below] scaled brightness around `rows`, smoothed along them; 0 above the image."""
        depth, height, width = self.image.shape
        wanted = np.rint(rows).astype(np.int64).T[..., None] + np.arange(-above, below + 1)
        place = np.minimum(wanted, height - 1)
        np.maximum(place, 0, out=place)
        place *= width
        place += np.arange(depth)[:, None] * (height * width) + np.arange(width)[:, None, None]
        taken = self.image.reshape(-1)[place]
        taken -= self.level[:, None]
        taken /= self.scale[:, None]
        if int(wanted[..., 0].min()) < 0:
            taken[wanted < 0] = 0
        share = np.float32(np.exp(-0.5 / max(0.6, 0.03 / self.column_mm) ** 2))
        smooth = taken.copy()
        smooth[1:] += share * taken[:-1]
        smooth[:-1] += share * taken[1:]
        smooth[1:-1] *= np.float32(1 / (1 + 2 * share))
        smooth[[0, -1]] *= np.float32(1 / (1 + share))
        return smooth


def find_surfaces(image: Float[np.ndarray, "D H W"], row_mm: float, column_mm: float) -> Surfaces:
    """ILM and BM of `image`, whose rows are `row_mm` and columns `column_mm` apart.

    Found at some 16 um by 0.14 mm, then to the row within `_REFINE_MM` of it.
    Raises VolumeRejected no_tissue where nothing stands out from the background.
    """
    row_factor = max(1, min(round(_COARSE_MM[0] / row_mm), image.shape[1] // 32))
    column_factor = max(1, min(round(_COARSE_MM[1] / column_mm), image.shape[2] // 8))
    coarse = _coarse(image, row_factor, column_factor)
    row, column = row_mm * row_factor, column_mm * column_factor
    width, depth, height = coarse.shape
    # Brightness differs from B-scan to B-scan: each is brought to 0 in the dark and 1 on its brightest layer.
    sampled = np.sort(coarse[::2, :, ::2].transpose(1, 0, 2).reshape(depth, -1), axis=1)
    faint, level = sampled[:, sampled.shape[1] // 50], sampled[:, sampled.shape[1] // 5]
    column_sums = _Boxes(coarse, 0, height)
    peak, broad = (np.median(column_sums.highest(max(1, round(mm / row))), axis=0) for mm in (0.023, 0.047))
    contrast, noise = float(np.median(peak - level)), float(np.median(level - faint)) + 1.0
    if contrast < 4.0 or float(np.median(broad - level)) < 2.0 * noise:
        raise rejection("no_tissue", f"the brightest layers stand {contrast:.1f} grey levels over the background")
    scale = np.maximum(peak - level, 0.3 * contrast)
    coarse -= level[:, None]
    coarse /= scale[:, None]
    fine = _Fine(image, level, scale, row_mm, column_mm)

    above, below = _bruch_reach(row)
    above = max(above, round(0.20 / row))
    boxes = _Boxes(_framed(coarse, above, below), above, height)
    climb = _CLIMB * row / 0.0078 * 0.047 / column

    bruch = _bruch_edge(boxes, row) - _too_little_light(coarse)
    step = max(1, width // 32)  # the common surface is smooth: few A-scans find it
    first = _path(bruch[::step], climb * step)
    common = robust_surface(first, row, columns=np.arange(width) / step)
    # Second search, drawn to the common surface: over atrophy the path would follow the bright choroid's end, and a
    # B-scan that took the nerve fibre layer for the RPE is brought back.
    moved = np.where(np.abs(common.offsets) * row > _WRONG_LAYER_MM, 0, common.offsets)
    expected = (common.rows + moved[:, None]).astype(np.float32)
    bruch -= _pull(np.arange(height, dtype=np.float32) - expected.T[..., None], row)
    bm_rows = _path(bruch, climb)

    inner = _ilm_edge(boxes, row) - _not_vitreous(boxes, _vitreous(coarse, bm_rows), row)
    inner[np.arange(height) > (bm_rows.T - _LEAST_RETINA_MM / row)[..., None]] -= 2.0
    ilm_rows = _path(inner, climb)

    def to_fine(rows: np.ndarray) -> np.ndarray:
        return (_finer(rows, column_factor, image.shape[2]) + 0.5) * row_factor - 0.5

    bm, ilm = _refined(fine, to_fine(bm_rows), to_fine(ilm_rows), to_fine(expected))
    ilm = np.minimum(ilm, bm - _LEAST_RETINA_MM / row_mm)
    return Surfaces(np.maximum(ilm, 0), bm, contrast, noise)


def _pull(distance: Float[np.ndarray, "W D H"], row_mm: float) -> np.ndarray:
    """Price of lying `distance` rows off the common surface."""
    return np.float32(_PULL) * np.minimum(np.abs(distance) * np.float32(row_mm / 0.05), np.float32(_PULL_LIMIT))


def _refined(
    fine: _Fine, bm: Float[np.ndarray, "D W"], ilm: Float[np.ndarray, "D W"], expected: Float[np.ndarray, "D W"]
) -> tuple[np.ndarray, np.ndarray]:
    """(BM, ILM): the paths of best edge within `_REFINE_MM` of both, BM drawn to `expected`."""
    row_mm = fine.row_mm
    near = max(2, round(_REFINE_MM / row_mm))
    scores = []
    bm, ilm = np.rint(bm), np.rint(ilm)
    thick = max(2, round(0.03 / row_mm))
    for rows, edge, above, below in ((bm, _bruch_edge, *_bruch_reach(row_mm)), (ilm, _ilm_edge, thick, thick)):
        image = fine.around(rows, near + above, near + below)
        scores.append(edge(_Boxes(image, above, 2 * near + 1), row_mm))
    off = (bm - expected).astype(np.float32)
    scores[0] -= _pull(off.T[..., None] + np.arange(-near, near + 1, dtype=np.float32), row_mm)
    # One search for both: its steps are many and small.
    moved = _path(np.concatenate(scores, axis=1), _CLIMB * row_mm / 0.0078 * 0.047 / fine.column_mm) - near
    found = np.clip(np.concatenate([bm, ilm]) + moved, 0, fine.image.shape[1] - 1).astype(np.float32)
    smooth = _median_along(found, max(3, round(0.15 / fine.column_mm) | 1))
    return smooth[: len(bm)], smooth[len(bm) :]


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
