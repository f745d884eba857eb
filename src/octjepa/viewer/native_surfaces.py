"""The retinal surfaces of a scan as it came.

`found_surfaces` finds them in the scan's own samples. `native_surfaces` maps those that ingest found from the store
back to the scan. They are less exact, but the file need not be read: they only tell where the first B-scan has tissue.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Float, Int16

from octjepa.canonical.native_mapping import NativeMap
from octjepa.canonical.pipeline import BAND_BELOW_BRUCH_MM
from octjepa.tasks.segmenter.inference import near_bscans_of
from octjepa.tasks.segmenter.outer_boundaries import outer_boundaries
from octjepa.volume import OCTVolume

SURFACES = ("ILM", "Bruch's membrane", "lower edge of the tissue band")
Plane = Literal["slice", "depth", "column"]


def native_surfaces(native: NativeMap, band: Int16[np.ndarray, "2 D W"]) -> Float[np.ndarray, "3 N C"]:
    """The native depth index of `SURFACES` in every A-scan, from the stored tissue `band`.

    NaN if there is no tissue and where the stored volume does not reach.
    """
    frames, _, columns = native.shape
    number, column = (axis.ravel() for axis in np.meshgrid(np.arange(frames), np.arange(columns), indexing="ij"))
    at = native.to_canonical(np.stack([number, np.zeros(len(number)), column], axis=1))  # [N * C, 3]
    near = np.rint(at[:, [0, 2]]).astype(np.int64)
    inside = ((near >= 0) & (near < band.shape[1:])).all(axis=1)
    near[~inside] = 0
    # Between stored slices, which are far apart, the surfaces are interpolated: [2, N * C].
    low = np.clip(np.floor(at[:, 0]), 0, max(band.shape[1] - 2, 0)).astype(np.int64)
    share = np.clip(at[:, 0] - low, 0, 1)
    first, second = band[:, low, near[:, 1]], band[:, np.minimum(low + 1, len(band[0]) - 1), near[:, 1]]
    both = (first[0] >= 0) & (second[0] >= 0)
    ilm, lower = np.where(both, (1 - share) * first + share * second, band[:, near[:, 0], near[:, 1]])
    below = BAND_BELOW_BRUCH_MM / native.preprocessing.target_spacing_mm[1]
    bruch = np.where(lower < native.preprocessing.stored_size[1] - 1, lower - below, np.nan)  # not clipped
    result = np.full((3, len(number)), np.nan, np.float32)
    usable = inside & (ilm >= 0)
    for surface, depth_index in zip(result, (ilm, bruch, lower), strict=True):
        at[:, 1] = depth_index
        surface[usable] = native.to_native(at[usable])[:, 1]
    return result.reshape(3, frames, columns)


def found_surfaces(volume: OCTVolume) -> Float[np.ndarray, "3 N C"]:
    """The row of `SURFACES` in every A-scan, NaN if no tissue is found."""
    outer = outer_boundaries(volume, near_bscans_of(volume))
    below = np.float32(BAND_BELOW_BRUCH_MM / volume.spacing_mm[1])
    return np.concatenate([outer, outer[1:] + below])


def surface_lines(surfaces: Float[np.ndarray, "K N C"], plane: Plane, index: int) -> list[list[float | None]]:
    """Surfaces along a B-scan, or along the slices at one column; None if there is none.

    Raises KeyError: no such plane. IndexError: no such index.
    """
    if plane == "depth":
        return []
    if plane not in ("slice", "column"):
        raise KeyError(plane)
    axis = 1 + ("slice", "column").index(plane)
    if not 0 <= index < surfaces.shape[axis]:
        raise IndexError(index)
    lines = surfaces.take(index, axis=axis)
    return [[round(float(value), 2) if np.isfinite(value) else None for value in line] for line in lines]
