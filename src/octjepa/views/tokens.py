"""The patches of a view that become tokens, and their positions.

Retina fills about a fifth of a scan. In training, `select: tissue` gives exactly K tokens of each volume: those that
hold tissue first, then a keyed sample of the rest, so shapes never change. A frozen encoder reads every token that
holds tissue (`select_tissue`), whatever training drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

TISSUE_SHARE = 0.25  # a patch with at least this share of tissue counts as tissue
_BANDS = 8  # of the grid's depth; a store's volumes are flattened, so that a band holds the same layers everywhere
REGIONS = 2 * _BANDS
COUNT_MULTIPLE = 32  # volumes of equal counts can be encoded together, and of 32 numbers many are equal


def extract_patches(
    view: UInt8[np.ndarray, "d h w"], patch: tuple[int, int, int], index: Int[np.ndarray, " t"]
) -> UInt8[np.ndarray, "t voxels"]:
    """The patches `index` (raster order over slice, depth, column) of a view, each flattened the same way."""
    (p, q, r), (d, h, w) = patch, view.shape
    grid = (d // p, h // q, w // r)
    tiles = (
        np.asarray(view).reshape(grid[0], p, grid[1], q, grid[2], r).transpose(0, 2, 4, 1, 3, 5)
    )  # [D, H, W, p, q, r]
    return tiles[np.unravel_index(index, grid)].reshape(len(index), p * q * r)


def tissue_share(mask: Bool[np.ndarray, "d h w"], patch: tuple[int, int, int]) -> Float[np.ndarray, " grid"]:
    """Share of each patch's voxels that are tissue, raster order."""
    (p, q, r), (d, h, w) = patch, mask.shape
    tiles = mask.reshape(d // p, p, h // q, q, w // r, r)
    return tiles.mean(axis=(1, 3, 5), dtype=np.float32).reshape(-1)


def holds_tissue(share: Float[np.ndarray, " t"]) -> Bool[np.ndarray, " t"]:
    """The patches that count as tissue, from their shares of tissue: those with at least `TISSUE_SHARE`.

    Of a sparse scan, whose few B-scans fill a small part of every patch, none may have so much: there the patches with
    at least half of the largest share count.
    """
    most = float(share.max(initial=0.0))
    return np.asarray((share >= (TISSUE_SHARE if most >= TISSUE_SHARE else most / 2)) & (share > 0))


def tissue_share_of_band(
    band: Int[np.ndarray, "2 d w"], patch: tuple[int, int, int], height: int
) -> Float[np.ndarray, " grid"]:
    """As `tissue_share` of the mask of a band (first and last depth index, first > last for none), without the mask."""
    (p, q, r), (_, d, w) = patch, band.shape
    first, last = band[:, :, None]  # [d, 1, w]
    starts = np.arange(0, height, q, dtype=band.dtype)[:, None]  # [h / q, 1]
    inside = (np.minimum(last + 1, starts + q) - np.maximum(first, starts)).clip(0)  # [d, h / q, w]: voxels of tissue
    counts = inside.reshape(d // p, p, height // q, w // r, r).sum(axis=(1, 4))
    return (counts.astype(np.float32) / np.float32(p * q * r)).reshape(-1)


LAYERS = ("vitreous", "inner retina", "outer retina", "choroid", "below")
_RETINA = 2 / 3  # of the tissue band; the rest is choroid under Bruch's membrane


def patch_layers(mask: Bool[np.ndarray, "d h w"], patch: tuple[int, int, int]) -> Int[np.ndarray, " grid"]:
    """The layer of `LAYERS` at the centre of each patch, raster order; -1 where its A-scans hold no tissue.

    Layers are thirds of the tissue band, and what is above and below it; nothing is segmented here.
    """
    (p, q, r), (d, h, w) = patch, mask.shape
    with_tissue = np.asarray(mask.any(axis=1))  # [d, w]: A-scans with tissue
    top = np.where(with_tissue, mask.argmax(axis=1), np.nan)
    bottom = np.where(with_tissue, h - 1 - mask[:, ::-1].argmax(axis=1), np.nan)
    kinds = np.full((d // p, h // q, w // r), -1, np.int64)
    has_tissue = np.asarray(with_tissue.reshape(d // p, p, w // r, r).any(axis=(1, 3)))
    edges = [np.nan_to_num(e).reshape(d // p, p, w // r, r).sum(axis=(1, 3)) for e in (top, bottom)]
    count = np.maximum(with_tissue.reshape(d // p, p, w // r, r).sum(axis=(1, 3)), 1)
    first, last = (edge / count for edge in edges)
    centre = (np.arange(h // q) + 0.5)[None, :, None] * q - 0.5
    share = (centre - first[:, None]) / np.maximum(last - first, 1)[:, None]
    inside = np.digitize(share, (0.0, _RETINA / 2, _RETINA, 1.0))
    return np.where(has_tissue[:, None], inside, kinds).reshape(-1)


def select(
    share: Float[np.ndarray, " grid"], budget: int, rng: np.random.Generator, background: int = 0
) -> Int[np.ndarray, " budget"]:
    """`budget` patches in raster order: tissue first, then the rest, at random within each; at least `background` of
    the rest, if there are so many.

    At random, not by raster order or share: with more tissue than tokens those always leave out the same positions.
    """
    is_tissue = holds_tissue(share)
    order = np.argsort(rng.random(len(share)) - is_tissue, kind="stable")
    tissue = int(is_tissue.sum())
    chosen = min(tissue, budget - min(background, len(share) - tissue))
    return np.sort(np.concatenate([order[:chosen], order[tissue:][: budget - chosen]]))


def select_tissue(share: Float[np.ndarray, " grid"], grid: tuple[int, int, int]) -> Int[np.ndarray, " k"]:
    """Every patch that holds tissue, in raster order, and the background nearest to it up to a multiple of 32 in all.

    Distance is in steps of the grid; of equally near patches one with more tissue comes first, then raster order
    decides. A grid of fewer patches is returned whole; if none holds tissue, the grid's middle counts as tissue.
    """
    from scipy.ndimage import distance_transform_edt

    tissue = holds_tissue(share).reshape(grid)
    if not tissue.any():
        tissue[tuple(size // 2 for size in grid)] = True
    distance = distance_transform_edt(~tissue).ravel()
    count = -(-int(tissue.sum()) // COUNT_MULTIPLE) * COUNT_MULTIPLE
    return np.sort(np.lexsort((-share, distance))[:count])  # the sort is stable: ties stay in raster order


def positions(
    index: Int[np.ndarray, " t"],
    grid: tuple[int, int, int],
    patch: tuple[int, int, int],
    spacing_mm: tuple[float, float, float],
    unit: str,
    origin: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> Float[np.ndarray, "t 3"]:
    """Token centres (slice, depth, column): in token steps, or in millimetres from `origin`.

    `origin` is in voxels from the view's first corner.
    """
    steps = np.stack(np.unravel_index(index, grid), axis=-1).astype(np.float32)
    if unit == "index":
        return steps
    size_mm = np.asarray(patch, dtype=np.float32) * np.asarray(spacing_mm, dtype=np.float32)
    return (steps + 0.5) * size_mm - np.asarray(origin, dtype=np.float32) * np.asarray(spacing_mm, dtype=np.float32)


def regions_at(steps: Any, grid: tuple[int, int, int]) -> Any:
    """[...] The region of a token at [..., 3] steps of the grid (slice, depth, column), a whole number below `REGIONS`.

    2 * band, and 1 more outside the middle, which is the central half of columns and of slices.
    """
    z, x = (abs((2 * steps[..., axis] + 1) / grid[axis] - 1) for axis in (0, 2))  # 0 in the middle, 1 at the edge
    return 2 * (steps[..., 1] * _BANDS // grid[1]) + ((z >= 0.5) | (x >= 0.5))


def grid_coordinates(index: Int[np.ndarray, "*tokens"], grid: Sequence[int]) -> Float[np.ndarray, "*tokens 3"]:
    """Centres (slice, depth, column) of the patches `index`, raster order, from -1 to 1 at the grid's faces, fp32."""
    steps = np.stack(np.unravel_index(index, tuple(grid)), axis=-1)
    return ((2 * steps + 1) / np.asarray(grid) - 1).astype(np.float32)
