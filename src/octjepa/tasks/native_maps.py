"""Values of tokens, and pixels of the store, at the voxels of the scan as it came."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Shaped, UInt8

from octjepa.canonical.native_mapping import NativeMap
from octjepa.encoders.base import FrozenEncoder
from octjepa.errors import UsageError
from octjepa.recipe import Recipe
from octjepa.tasks.occlusion import Occlusion
from octjepa.views.tokens import holds_tissue
from octjepa.volume import CanonicalVolume

Grid = Float[np.ndarray, "d h w"]


def occlusion_grid(encoder: FrozenEncoder, volume: CanonicalVolume, occlusion: Occlusion) -> Grid:
    """The en face map of `occlusion` at every token of tissue of its column; NaN elsewhere."""
    selected = encoder.select_tokens(volume)
    slab, depth, column = np.unravel_index(selected.grid_index[holds_tissue(selected.tissue)], selected.grid)
    grid = np.full(selected.grid, np.nan, np.float32)
    grid[slab, depth, column] = occlusion.en_face[slab, column]
    return grid


def similarity_grid(encoder: FrozenEncoder, volume: CanonicalVolume, token: tuple[int, int, int]) -> Grid:
    """The cosine of every token of tissue with the one at `token` (slice, depth, column of the token grid); else NaN.

    Raises UsageError: no token of tissue is there.
    """
    tokens = encoder.tokens(volume)
    tissue = holds_tissue(tokens.tissue)
    here = np.flatnonzero((tokens.grid_index == np.ravel_multi_index(token, tokens.grid)) & tissue)
    if not len(here):
        raise UsageError(f"no token of tissue at {token} of a grid of {tokens.grid}")
    unit = tokens.features / np.maximum(np.linalg.norm(tokens.features, axis=1, keepdims=True), 1e-9)
    grid = np.full(tokens.grid, np.nan, np.float32)
    grid.reshape(-1)[tokens.grid_index[tissue]] = (unit @ unit[here[0]])[tissue]
    return grid


def strongest_token(occlusion: Occlusion) -> tuple[int, int, int]:
    """The token (slice, depth, column) whose region changes the output most in the strongest column."""
    sizes = np.abs(occlusion.b_scan)
    in_column = sizes[:, occlusion.column]
    if np.isnan(in_column).all():  # no region there could be left out
        depth, column = np.unravel_index(np.nanargmax(sizes), sizes.shape)
        return occlusion.slab, int(depth), int(column)
    return occlusion.slab, int(np.nanargmax(in_column)), occlusion.column


def tokens_to_native(grid: Grid, native: NativeMap, recipe: Recipe) -> Float[np.ndarray, "N R C"]:
    """The value of its token at every voxel of the scan, B-scans in spatial order; NaN outside the token grid."""
    corner, patch = np.array(native.preprocessing.margin), np.array(recipe.tokens.patch_size)

    found = np.empty(native.shape, np.float32)
    for number in range(native.shape[0]):
        cell = np.floor((_canonical(native, number) + 0.5 - corner) / patch).astype(np.int64)
        found[number] = _look_up(grid, cell, np.nan).reshape(native.shape[1:])
    return found


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
    found = np.full(len(cell), outside, values.dtype)
    found[inside] = values[tuple(cell[inside].T)]
    return found
