"""Truth in the canonical grid: lesions of each patch, and the depth of retinal surfaces in every A-scan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from octjepa.canonical.native_mapping import NativeMap
from octjepa.phantom import LESIONS, SURFACES
from octjepa.recipe import Preprocessing

from .cohorts import Cohort

BOUNDARIES = ("ilm", "ipl_inl", "opl_onl", "bm")
OF_EIGHT = (0, 2, 4, 7)  # where they are among the eight of graders and of `octjepa segment`
COLUMNS = 4  # coarse columns of the truth, in voxels
CELL = (1, 8, 4)  # voxels of a cell of the dense truth: 0.36 x 0.062 x 0.19 mm
Grid = tuple[int, int, int]


def lesion_shares(
    cohort: Cohort, index: int, patch: Grid, tokens: Int[np.ndarray, " k"]
) -> Float[np.ndarray, "k lesions"]:
    """Share of each lesion in the patches `tokens` (raster order) of a volume's centred view."""
    preprocessing = cohort.store.preprocessing
    native, inside = view_voxels(cohort.store.native_map(cohort.ids[index]), preprocessing, COLUMNS)
    truth = cohort.truth(index)
    frame = cohort.frames(index, native[..., 0])
    (d, h, c), (p, q, r) = inside.shape, (patch[0], patch[1], patch[2] // COLUMNS)
    shares = np.zeros((len(tokens), len(LESIONS)), np.float32)
    for number, name in enumerate(LESIONS):
        if name in truth.masks:
            hit = truth.masks[name][frame, native[..., 1], native[..., 2]] & inside  # [D, H, C]
            tiles = hit.reshape(d // p, p, h // q, q, c // r, r).mean(axis=(1, 3, 5), dtype=np.float32)
            shares[:, number] = tiles.reshape(-1)[tokens]
    return shares


def boundary_depths(cohort: Cohort, index: int) -> Float[np.ndarray, "boundaries D C"]:
    """Depth index of each of `BOUNDARIES` in the centred view; NaN where it lies outside the scan or the view."""
    native = cohort.store.native_map(cohort.ids[index])
    surfaces = cohort.truth(index).surfaces_px[[SURFACES.index(name) for name in BOUNDARIES]]
    in_order = surfaces[:, cohort.frames(index, np.arange(native.shape[0]))]
    return surface_depths(native, cohort.store.preprocessing, in_order)


def surface_depths(
    native: NativeMap, preprocessing: Preprocessing, surfaces: Float[np.ndarray, "b frames columns"]
) -> Float[np.ndarray, "b D C"]:
    """Depth index in the centred view of surfaces given as native depth, by frame in the reader's order; else NaN."""
    (depth, height, width), margin = preprocessing.image_size, np.array(preprocessing.margin)
    columns = np.arange(width // COLUMNS) * COLUMNS + (COLUMNS - 1) / 2
    grid = np.stack(np.meshgrid(np.arange(depth), [height / 2], columns, indexing="ij"), axis=-1).reshape(-1, 3)
    at = np.rint(native.to_native(grid + margin)).astype(np.int64)  # [P, 3]
    inside = ((at >= 0) & (at < np.array(native.shape)))[:, [0, 2]].all(axis=1)
    at = np.clip(at, 0, np.array(native.shape) - 1)
    found = np.full((len(surfaces), len(at)), np.nan, np.float32)
    for number, surface in enumerate(surfaces):
        points = np.stack([at[:, 0], surface[at[:, 0], at[:, 2]], at[:, 2]], axis=1).astype(float)
        seen = native.to_canonical(points)[:, 1] - margin[1]
        found[number] = np.where(inside & (seen >= 0) & (seen < height), seen, np.nan)
    return found.reshape(len(surfaces), depth, -1)


def view_voxels(
    native: NativeMap, preprocessing: Preprocessing, step: int
) -> tuple[Int[np.ndarray, "D H C 3"], Bool[np.ndarray, "D H C"]]:
    """Nearest native voxel of each position of the centred view, one for `step` columns, and whether it is inside."""
    (depth, height, width), margin = preprocessing.image_size, np.array(preprocessing.margin)
    axes = np.arange(depth), np.arange(height), np.arange(width // step) * step + (step - 1) / 2
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1) + margin
    at = np.rint(native.to_native(grid.reshape(-1, 3))).astype(np.int64).reshape(grid.shape)
    last = np.array(native.shape) - 1
    inside = ((at >= 0) & (at <= last)).all(axis=-1)
    return np.clip(at, 0, last), inside


def lesion_cells(cohort: Cohort, index: int) -> Float[np.ndarray, "lesions D h w"]:
    """Share of each lesion in every cell (`CELL`) of the stored volume, margins included.

    A stored slice is a mean over B-scans, so its truth is the mean over three positions across the slice.
    """
    (depth, height, width), (_, p, q) = cohort.store.preprocessing.stored_size, CELL
    shares = np.zeros((len(LESIONS), depth, height // p, width // q), np.float32)
    depths, columns = np.arange(height // 2) * 2 + 0.5, np.arange(width // 2) * 2 + 0.5
    for number, hit in _lesions_at(cohort, index, _across(np.arange(depth)), depths, columns):
        tiles = hit.reshape(depth, 3, height // p, p // 2, width // q, q // 2)
        shares[number] = tiles.mean(axis=(1, 3, 5), dtype=np.float32)
    return shares


def lesion_labels(cohort: Cohort, index: int, corner: Grid, size: Grid, step: int = 1) -> UInt8[np.ndarray, "d h c"]:
    """Bit n is 1 where `LESIONS[n]` is: of `size` voxels from `corner` of the stored volume, one for `step` columns.

    Where it is at two of three positions across the slice: a stored slice is a mean over B-scans.
    """
    slices, depths = (start + np.arange(count) for start, count in zip(corner[:2], size[:2], strict=True))
    columns = corner[2] + np.arange(size[2] // step) * step + step // 2  # those of `coarsen_columns`
    labels = np.zeros((len(slices), len(depths), len(columns)), np.uint8)
    for number, hit in _lesions_at(cohort, index, _across(slices), depths, columns):
        labels |= (hit.reshape(-1, 3, *hit.shape[1:]).sum(axis=1) >= 2).astype(np.uint8) << number
    return labels


def _across(slices: Int[np.ndarray, " d"]) -> Float[np.ndarray, " 3*d"]:
    """Three positions across each slice."""
    return (slices[:, None] + np.array([-1, 0, 1]) / 3).reshape(-1)


def _lesions_at(
    cohort: Cohort, index: int, slices: np.ndarray, depths: np.ndarray, columns: np.ndarray
) -> Iterator[tuple[int, Bool[np.ndarray, "n h w"]]]:
    """(number, where it is at these indices of the stored volume) of each lesion that an eye has."""
    truth = cohort.truth(index)
    if not truth.masks:
        return
    native = cohort.store.native_map(cohort.ids[index])
    grid = np.stack(np.meshgrid(slices, [0.0, 1.0], columns, indexing="ij"), axis=-1)  # [n, 2, w, 3]
    at = native.to_native(grid.reshape(-1, 3)).reshape(grid.shape)
    frame, column = np.rint(at[:, 0, :, 0]).astype(np.int64), np.rint(at[:, 0, :, 2]).astype(np.int64)  # [n, w]
    first, step = at[:, :1, :, 1], at[:, 1:, :, 1] - at[:, :1, :, 1]  # depth is linear within an A-scan
    deep = np.rint(first + step * depths[:, None]).astype(np.int64)  # [n, h, w]
    last = np.array(native.shape) - 1
    inside = ((frame >= 0) & (frame <= last[0]) & (column >= 0) & (column <= last[2]))[:, None]
    inside = inside & (deep >= 0) & (deep <= last[1])
    frame = cohort.frames(index, np.clip(frame, 0, last[0]))[:, None]
    column, deep = np.clip(column, 0, last[2])[:, None], np.clip(deep, 0, last[1])
    for number, name in enumerate(LESIONS):
        if name in truth.masks:
            yield number, truth.masks[name][frame, deep, column] & inside
