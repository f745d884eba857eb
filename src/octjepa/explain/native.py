"""Values of tokens, and pixels of the store, at the voxels of the scan as it came."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8

from octjepa.canonical.native_mapping import NativeMap
from octjepa.recipe import Preprocessing, Recipe

Grid = Float[np.ndarray, "d h w"]


def tokens_to_native(grid: Grid, native: NativeMap, recipe: Recipe) -> Float[np.ndarray, "N R C"]:
    """The value of its token at every voxel of the scan, B-scans in spatial order; NaN outside the token grid."""
    voxels = np.empty(native.shape, np.float32)
    for number in range(native.shape[0]):
        cell = token_at(_canonical(native, number), native.preprocessing, recipe)
        voxels[number] = _look_up(grid, cell, np.nan).reshape(native.shape[1:])
    return voxels


def token_at(
    canonical: Float[np.ndarray, "P 3"], preprocessing: Preprocessing, recipe: Recipe
) -> Int[np.ndarray, "P 3"]:
    """The token (slice, depth, column) at positions of the stored volume; outside the grid if there is none."""
    corner, patch = np.array(preprocessing.margin), np.array(recipe.tokens.patch_size)
    return np.floor((canonical + 0.5 - corner) / patch).astype(np.int64)


def token_centre(token: tuple[int, int, int], preprocessing: Preprocessing, recipe: Recipe) -> Float[np.ndarray, " 3"]:
    """The middle (slice, depth, column) of a token of the grid in the stored volume."""
    corner, patch = np.array(preprocessing.margin), np.array(recipe.tokens.patch_size)
    return np.asarray(corner + (np.array(token) + 0.5) * patch - 0.5)


def pixels_to_native(pixels: UInt8[np.ndarray, "D H W"], native: NativeMap, number: int) -> UInt8[np.ndarray, "R C"]:
    """B-scan `number` of the scan from the stored volume, by the nearest stored voxel; 0 beyond it."""
    return _look_up(pixels, np.rint(_canonical(native, number)).astype(np.int64), 0).reshape(native.shape[1:])


def _canonical(native: NativeMap, number: int) -> Float[np.ndarray, "P 3"]:
    """The stored position of every pixel of B-scan `number`."""
    _, rows, columns = native.shape
    grid = np.stack(np.meshgrid([number], np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    return native.to_canonical(grid.reshape(-1, 3).astype(float))


def _look_up(values: Shaped[np.ndarray, "a b c"], cell: np.ndarray, outside: float) -> Shaped[np.ndarray, " P"]:
    inside = ((cell >= 0) & (cell < values.shape)).all(axis=1)
    cell_values = np.full(len(cell), outside, values.dtype)
    cell_values[inside] = values[tuple(cell[inside].T)]
    return cell_values
