"""Finds two retinal surfaces in every A-scan: the inner limiting membrane (ILM) and Bruch's membrane (BM).

Both are shortest paths through a B-scan (dynamic programming, as in Chiu et al., Optics Express 18(18), 2010), on
scores built from box averages in millimetres, so that one set of weights serves every device. The path may climb any
slope at a cost, which carries it over shadows, drusen and atrophy. A robust surface over all B-scans then finds
those whose path ran along a wrong layer, and they are searched again near it.

Axes: images are [D, H, W] (slice, depth, column). The search walks along the columns, so its arrays have them first
and depth last: [W, D, H].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from octjepa.reasons import rejection

_CLIMB_COST = 0.035  # cost of one depth index (7.8 um) between A-scans 47 um apart, in units of the tissue contrast
_WRONG_LAYER_MM = 0.12  # a B-scan whose path is this far off the common surface followed a wrong layer
_SURFACE_COST = 0.2  # cost of being 50 um off the common surface, in the same units
_SURFACE_COST_LIMIT = 4.0  # times that cost at most: strong evidence overrides the surface
_MIN_RETINA_MM = 0.05
_COARSE_MM = (0.016, 0.14)  # depth and column pitch of the image that is searched first
_REFINE_MM = 0.05  # largest error of the first search
TORN_MM, TORN_SHARE = 0.1, 0.01  # jumps of thickness between coarse columns, and the share that calls for a repair
_LOST_SHARE, _NOISY = 0.05, 0.15  # of the A-scans that far off, in noise of that share of the contrast: neighbouring
# B-scans are searched together. Without noise it is disease that is far off.
_WEIGHTS = (3, 2, 1, 1)  # then, of a B-scan, of those next to it, and further on
_ALIGN_MM = 0.2  # largest axial jump between B-scans that are searched together
_AROUND_FRAMES, _AROUND_MM = 7, 1.5  # B-scans and width over which a torn ILM takes the median thickness
_MIN_LIGHT = 0.38  # least share of an A-scan's intensity above Bruch's membrane


@dataclass(frozen=True)
class Surfaces:
    """Depth indices (float) per A-scan, `ilm` above `bm`; `contrast` over vitreous and `noise` in intensities."""

    ilm: Float[np.ndarray, "D W"]
    bm: Float[np.ndarray, "D W"]
    contrast: float
    noise: float


class _BoxMeans:
    """Box means along the last axis (depth) of `image`, by running sums.

    Means are given at the `count` depth indices from `before` on; the rest of `image` is padding that boxes reach into.
    """

    def __init__(self, image: np.ndarray, before: int, count: int) -> None:
        self._total = np.zeros((*image.shape[:-1], image.shape[-1] + 1), np.float32)
        np.cumsum(image, axis=-1, out=self._total[..., 1:])
        self._before, self._count = before, count

    def mean(self, start: int, stop: int) -> np.ndarray:
        """[..., count] Mean over depth i+start .. i+stop-1 for every index i."""
        low, high = self._before + start, self._before + stop
        result = self._total[..., high : high + self._count] - self._total[..., low : low + self._count]
        result *= np.float32(1 / (stop - start))
        return result

    def highest(self, size: int) -> np.ndarray:
        """[...] The largest mean over `size` consecutive depth indices."""
        return (self._total[..., size:] - self._total[..., :-size]).max(axis=-1) / np.float32(size)


def _padded(image: Float[np.ndarray, "W D H"], before: int, after: int) -> np.ndarray:
    """Pads the depth axis so that its ends are not edges: dark above, the mean of its last three indices below."""
    height = image.shape[-1]
    framed = np.zeros((*image.shape[:-1], before + height + after), np.float32)
    framed[..., before : before + height] = image
    framed[..., before + height :] = image[..., -3:].mean(axis=-1, keepdims=True)
    return framed


def _best_path(score: Float[np.ndarray, "W D H"], climb_cost: float) -> Float[np.ndarray, "D W"]:
    """Depth indices of the path of highest score in each B-scan; a step costs `climb_cost` per depth index."""
    width, depth, height = score.shape
    best = score.transpose(0, 2, 1).copy()  # [W, H, D]: what is moved along depth stays in one piece
    reach, paid = np.empty((height, depth), np.float32), np.empty((height, depth), np.float32)
    for x in range(1, width):
        reach[:] = best[x - 1]
        step = 1
        # Steps of 1, 2, 4 ... depth indices up or down add up to a climb of any height at its cost.
        while step < height:
            np.subtract(reach, np.float32(climb_cost * step), out=paid)
            np.maximum(reach[step:], paid[:-step], out=reach[step:])
            np.maximum(reach[:-step], paid[step:], out=reach[:-step])
            step *= 2
        best[x] += reach
    best = best.transpose(0, 2, 1).copy()  # [W, D, H]
    path = np.empty((depth, width), np.int64)  # traced back from the last column
    path[:, -1] = best[-1].argmax(axis=1)
    index = np.arange(height)
    costs = np.float32(climb_cost) * np.abs(index[:, None] - index).astype(np.float32)
    for x in range(width - 2, -1, -1):
        path[:, x] = (best[x] - costs[path[:, x + 1]]).argmax(axis=1)
    return path.astype(np.float64)


def _bruch_margin(depth_mm: float) -> tuple[int, int]:
    """Depth indices above and below that `_bruch_edge` reads."""
    return max(round(0.13 / depth_mm), max(2, round(0.03 / depth_mm)) + 2), 1 + max(2, round(0.05 / depth_mm))


def _bruch_edge(boxes: _BoxMeans, depth_mm: float) -> np.ndarray:
    """[W, D, H] High on the lower edge of the RPE: bright above, darker below and in the outer nuclear layer."""
    above, below = _bruch_margin(depth_mm)
    thick = max(2, round(0.03 / depth_mm))
    rpe = boxes.mean(-thick + 1, 1)
    nuclear = boxes.mean(-above, -max(round(0.06 / depth_mm), thick))
    choroid = boxes.mean(1, below)
    return rpe - np.float32(0.45) * nuclear - np.float32(0.55) * choroid


def _low_light_penalty(image: Float[np.ndarray, "W D H"]) -> np.ndarray:
    """[W, D, H] Penalty where little of the intensity is above: over the nerve fibre layer, as bright as the RPE."""
    dark = np.median(image[::3, :, ::3], axis=(0, 2)).astype(np.float32)
    light = np.maximum(image - dark[:, None], 0)
    np.cumsum(light, axis=-1, out=light)
    light /= np.maximum(light[..., -1:], 4.0)
    np.subtract(np.float32(_MIN_LIGHT), light, out=light)
    np.maximum(light, 0, out=light)
    light *= np.float32(1.6 / _MIN_LIGHT)
    return light


def _vitreous_level(image: Float[np.ndarray, "W D H"], bm: Float[np.ndarray, "D W"]) -> Float[np.ndarray, " D"]:
    """Intensity of each B-scan's vitreous: the first quartile of what is above Bruch's membrane."""
    above = np.arange(image.shape[-1]) < bm.T[..., None]
    depth = image.shape[1]
    values = np.where(above, image, np.inf)[::2, :, ::2].transpose(1, 0, 2).reshape(depth, -1)
    values.sort(axis=1)
    count = np.isfinite(values).sum(axis=1)
    return np.where(count > 0, values[np.arange(depth), count // 4], 0)


def _ilm_edge(boxes: _BoxMeans, depth_mm: float) -> np.ndarray:
    """[W, D, H] High where tissue begins: brighter below than above."""
    thick = max(2, round(0.03 / depth_mm))
    return boxes.mean(0, thick) - boxes.mean(-thick, 0)


def _tissue_above_penalty(boxes: _BoxMeans, vitreous: Float[np.ndarray, " D"], depth_mm: float) -> np.ndarray:
    """[W, D, H] Penalty where something brighter than vitreous is further up than the inner limiting membrane."""
    further = boxes.mean(-round(0.20 / depth_mm), -max(2, round(0.02 / depth_mm)))
    further -= vitreous.astype(np.float32)[:, None] + np.float32(0.05)
    np.maximum(further, 0, out=further)
    further *= np.float32(1.5)
    return further


def _median_along(values: np.ndarray, size: int) -> np.ndarray:
    from scipy.ndimage import median_filter

    return median_filter(values, size=(1, size), mode="nearest")


def _median_around(values: Float[np.ndarray, "D W"], columns: int) -> np.ndarray:
    from scipy.ndimage import median_filter

    return np.asarray(median_filter(values, size=(_AROUND_FRAMES, columns), mode="nearest"), np.float32)


def _block_mean(image: Float[np.ndarray, "D H W"], size: int, columns: int) -> Float[np.ndarray, "w D h"]:
    """Means of blocks of `size` x `columns` pixels (depth x column), columns first."""
    _, height, width = image.shape
    image = image[:, : height // size * size, : width // columns * columns]
    summed = image[:, ::size].copy()
    for offset in range(1, size):
        summed += image[:, offset::size]
    result = summed[..., ::columns].copy()
    for column in range(1, columns):
        result += summed[..., column::columns]
    result *= np.float32(1 / (size * columns))
    return np.ascontiguousarray(result.transpose(2, 0, 1))


def _upsample_columns(values: Float[np.ndarray, "D C"], factor: int, width: int) -> Float[np.ndarray, "D W"]:
    """Interpolates values at the columns of the coarse image to the `width` columns of the full one."""
    position = np.clip((np.arange(width) + 0.5) / factor - 0.5, 0, values.shape[1] - 1)
    left = np.minimum(position.astype(np.int64), max(values.shape[1] - 2, 0))
    share = position - left
    right = np.minimum(left + 1, values.shape[1] - 1)
    return values[:, left] * (1 - share) + values[:, right] * share


@dataclass(frozen=True)
class _FullResolution:
    """The image at full resolution, with each B-scan's background `level` and its `scale` above it."""

    image: Float[np.ndarray, "D H W"]
    level: Float[np.ndarray, " D"]
    scale: Float[np.ndarray, " D"]
    depth_mm: float
    column_mm: float

    def neighbourhood(self, surface: Float[np.ndarray, "D W"], above: int, below: int) -> np.ndarray:
        """[W, D, above + 1 + below] scaled intensity about `surface`, smoothed along columns; 0 above."""
        depth, height, width = self.image.shape
        at = np.rint(surface).astype(np.int64).T[..., None] + np.arange(-above, below + 1)
        position = np.minimum(at, height - 1)
        np.maximum(position, 0, out=position)
        position *= width
        position += np.arange(depth)[:, None] * (height * width) + np.arange(width)[:, None, None]
        patch = self.image.reshape(-1).take(position)
        patch -= self.level[:, None]
        patch /= self.scale[:, None]
        if int(at[..., 0].min()) < 0:
            patch[at < 0] = 0
        share = np.float32(np.exp(-0.5 / max(0.6, 0.03 / self.column_mm) ** 2))
        smooth = patch.copy()
        smooth[1:] += share * patch[:-1]
        smooth[:-1] += share * patch[1:]
        smooth[1:-1] *= np.float32(1 / (1 + 2 * share))
        smooth[[0, -1]] *= np.float32(1 / (1 + share))
        return smooth


def find_surfaces(image: Float[np.ndarray, "D H W"], depth_mm: float, column_mm: float) -> Surfaces:
    """ILM and BM of `image` with spacing `depth_mm` and `column_mm`.

    First searched at some 16 um by 0.14 mm, then refined to the depth index within `_REFINE_MM` of that.
    Raises VolumeRejected no_tissue if nothing stands out from the background.
    """
    depth_factor = max(1, min(round(_COARSE_MM[0] / depth_mm), image.shape[1] // 32))
    column_factor = max(1, min(round(_COARSE_MM[1] / column_mm), image.shape[2] // 8))
    coarse = _block_mean(image, depth_factor, column_factor)
    coarse_mm, coarse_column_mm = depth_mm * depth_factor, column_mm * column_factor
    width, depth, height = coarse.shape
    # Intensity differs between B-scans: each is scaled to 0 in the background and 1 on its brightest layer.
    sampled = np.sort(coarse[::2, :, ::2].transpose(1, 0, 2).reshape(depth, -1), axis=1)
    faint, level = sampled[:, sampled.shape[1] // 50], sampled[:, sampled.shape[1] // 5]
    column_sums = _BoxMeans(coarse, 0, height)
    peak, broad = (np.median(column_sums.highest(max(1, round(mm / coarse_mm))), axis=0) for mm in (0.023, 0.047))
    contrast, noise = float(np.median(peak - level)), float(np.median(level - faint)) + 1.0
    if contrast < 4.0 or float(np.median(broad - level)) < 2.0 * noise:
        raise rejection("no_tissue", f"the brightest layers are {contrast:.1f} intensity levels above the background")
    scale = np.maximum(peak - level, 0.3 * contrast)
    coarse -= level[:, None]
    coarse /= scale[:, None]
    fine = _FullResolution(image, level, scale, depth_mm, column_mm)

    above, below = _bruch_margin(coarse_mm)
    above = max(above, round(0.20 / coarse_mm))
    boxes = _BoxMeans(_padded(coarse, above, below), above, height)
    climb_cost = _CLIMB_COST * coarse_mm / 0.0078 * 0.047 / coarse_column_mm

    bruch = _bruch_edge(boxes, coarse_mm) - _low_light_penalty(coarse)
    step = max(1, width // 32)  # the common surface is smooth: few A-scans suffice
    first = _best_path(bruch[::step], climb_cost * step)
    common = fit_surface(first, coarse_mm, columns=np.arange(width) / step)
    off_mm = np.abs(first - (common.surface + common.offsets[:, None])[:, ::step]) * coarse_mm
    if noise > _NOISY * contrast and (off_mm > _WRONG_LAYER_MM).mean() > _LOST_SHARE:
        bruch = _average_neighbours(bruch, _axial_shifts(coarse, coarse_mm))
        first = _best_path(bruch[::step], climb_cost * step)
        common = fit_surface(first, coarse_mm, columns=np.arange(width) / step)
    # Second search, near the common surface: over atrophy the path would follow the end of the bright choroid, and a
    # B-scan that took the nerve fibre layer for the RPE is corrected.
    offsets = np.where(np.abs(common.offsets) * coarse_mm > _WRONG_LAYER_MM, 0, common.offsets)
    expected = (common.surface + offsets[:, None]).astype(np.float32)
    bruch -= _surface_cost(np.arange(height, dtype=np.float32) - expected.T[..., None], coarse_mm)
    bm_depth = _best_path(bruch, climb_cost)

    inner = _ilm_edge(boxes, coarse_mm) - _tissue_above_penalty(boxes, _vitreous_level(coarse, bm_depth), coarse_mm)
    inner[np.arange(height) > (bm_depth.T - _MIN_RETINA_MM / coarse_mm)[..., None]] -= 2.0
    ilm_depth = _best_path(inner, climb_cost)
    thickness = bm_depth - ilm_depth
    if (np.abs(np.diff(thickness, axis=1)) * coarse_mm > TORN_MM).mean() > TORN_SHARE:
        # Noise tore the path apart: search again near the thickness of the retina around, over B-scans and columns.
        usual = _median_around(thickness, max(3, round(_AROUND_MM / coarse_column_mm) | 1))
        inner -= _surface_cost(np.arange(height, dtype=np.float32) - (bm_depth - usual).T[..., None], coarse_mm)
        ilm_depth = _best_path(inner, climb_cost)

    def to_fine(path: np.ndarray) -> np.ndarray:
        return (_upsample_columns(path, column_factor, image.shape[2]) + 0.5) * depth_factor - 0.5

    bm, ilm = _refine(fine, to_fine(bm_depth), to_fine(ilm_depth), to_fine(expected))
    ilm = np.minimum(ilm, bm - _MIN_RETINA_MM / depth_mm)
    return Surfaces(np.maximum(ilm, 0), bm, contrast, noise)


def _axial_shifts(image: Float[np.ndarray, "W D H"], depth_mm: float) -> list[np.ndarray]:
    """Depth indices by which the tissue of each B-scan lies deeper in the next one, in the next but one, and so on.

    By cross-correlation of whole B-scans, which noise hardly moves; one array [D - step] for each further weight.
    """
    depth, height = image.shape[1:]
    spectrum = np.fft.rfft(image - image.mean(axis=(0, 2), keepdims=True), n=2 * height, axis=2)
    reach = round(_ALIGN_MM / depth_mm)
    shifts = []
    for step in range(1, min(len(_WEIGHTS), depth)):
        products = (spectrum[:, :-step].conj() * spectrum[:, step:]).sum(axis=0)  # [D - step, frequencies]
        match = np.fft.irfft(products, axis=1)[:, np.arange(-reach, reach + 1)]
        shifts.append(match.argmax(axis=1) - reach)
    return shifts


def _average_neighbours(score: Float[np.ndarray, "W D H"], shifts: list[np.ndarray]) -> np.ndarray:
    """[W, D, H] Weighted means of the scores of neighbouring B-scans, each moved by its shift."""
    depth, height = score.shape[1:]
    total, weight = np.float32(_WEIGHTS[0]) * score, np.full((depth, 1), _WEIGHTS[0], np.float32)
    for step, (step_weight, shift) in enumerate(zip(_WEIGHTS[1:], shifts, strict=False), start=1):
        first, last = slice(None, depth - step), slice(step, None)
        for here, there, deeper in ((first, last, shift), (last, first, -shift)):
            position = np.clip(np.arange(height) + deeper[:, None], 0, height - 1)[None]
            total[:, here] += np.float32(step_weight) * np.take_along_axis(score[:, there], position, axis=2)
            weight[here] += step_weight
    return total / weight


def _surface_cost(distance: Float[np.ndarray, "W D H"], depth_mm: float) -> np.ndarray:
    """Cost of being `distance` depth indices off the common surface."""
    return np.float32(_SURFACE_COST) * np.minimum(
        np.abs(distance) * np.float32(depth_mm / 0.05), np.float32(_SURFACE_COST_LIMIT)
    )


def _refine(
    fine: _FullResolution,
    bm: Float[np.ndarray, "D W"],
    ilm: Float[np.ndarray, "D W"],
    expected: Float[np.ndarray, "D W"],
) -> tuple[np.ndarray, np.ndarray]:
    """(BM, ILM): the paths of best edge within `_REFINE_MM` of both, BM kept near `expected`."""
    depth_mm = fine.depth_mm
    near = max(2, round(_REFINE_MM / depth_mm))
    scores = []
    bm, ilm = np.rint(bm), np.rint(ilm)
    thick = max(2, round(0.03 / depth_mm))
    for path, edge, above, below in ((bm, _bruch_edge, *_bruch_margin(depth_mm)), (ilm, _ilm_edge, thick, thick)):
        image = fine.neighbourhood(path, near + above, near + below)
        scores.append(edge(_BoxMeans(image, above, 2 * near + 1), depth_mm))
    off = (bm - expected).astype(np.float32)
    scores[0] -= _surface_cost(off.T[..., None] + np.arange(-near, near + 1, dtype=np.float32), depth_mm)
    # One search for both, stacked as [W, 2 D, 2 near + 1]: its steps are many and small.
    offsets = (
        _best_path(np.concatenate(scores, axis=1), _CLIMB_COST * depth_mm / 0.0078 * 0.047 / fine.column_mm) - near
    )
    edges = np.clip(np.concatenate([bm, ilm]) + offsets, 0, fine.image.shape[1] - 1).astype(np.float32)
    smooth = _median_along(edges, max(3, round(0.15 / fine.column_mm) | 1))
    return smooth[: len(bm)], smooth[len(bm) :]


@dataclass(frozen=True)
class RobustSurface:
    """A fitted surface in depth indices, and how far each B-scan is displaced from it (`offsets`)."""

    surface: Float[np.ndarray, "D W"]
    offsets: Float[np.ndarray, " D"]


def _polynomial(depth: int, columns: np.ndarray, width: int, degree: int) -> np.ndarray:
    z, x = np.meshgrid(np.linspace(-1, 1, depth), columns / max(1, width - 1) * 2 - 1, indexing="ij")
    terms = [np.ones_like(z), x, z]
    if degree == 2:
        terms += [x * x, z * x, z * z]
    return np.stack([term.ravel() for term in terms], axis=1)


def fit_surface(
    surface: Float[np.ndarray, "D W"], depth_mm: float, degree: int = 2, columns: np.ndarray | None = None
) -> RobustSurface:
    """Fits a polynomial of `degree` over slice and column with an axial offset per B-scan, by Tukey's biweight.

    Weights fall to zero some 60 um from the fit, so that drusen and detachments do not pull it. The surface is
    evaluated at `columns`, in columns of `surface` (default: each of them).
    """
    depth, width = surface.shape
    step = max(1, width // 48)
    sampled = surface[:, ::step].astype(np.float64)
    terms = _polynomial(depth, np.arange(0, width, step), width, degree)
    offsets = np.zeros(depth)
    values = np.repeat(np.median(sampled), sampled.size)
    weight = np.ones(sampled.size)
    least = 0.06 / depth_mm
    for iteration in range(8):
        target = (sampled - offsets[:, None]).ravel()
        scaled = terms * weight[:, None]
        coefficients = np.linalg.lstsq(scaled.T @ terms + 1e-6 * np.eye(terms.shape[1]), scaled.T @ target, rcond=None)[
            0
        ]
        values = terms @ coefficients
        residual = sampled - values.reshape(sampled.shape)
        if iteration >= 2:
            offsets = np.median(residual, axis=1)
            offsets -= np.median(offsets)
        left = (residual - offsets[:, None]).ravel()
        scale = max(4.685 * 1.4826 * float(np.median(np.abs(left))), least)
        weight = np.maximum(0.0, 1.0 - (left / scale) ** 2) ** 2
    at = np.arange(width) if columns is None else columns
    full = (_polynomial(depth, at, width, degree) @ coefficients).reshape(depth, len(at))
    return RobustSurface(full, offsets)
