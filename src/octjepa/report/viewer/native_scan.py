"""A scan in its own geometry, as the viewer draws it: planes, surfaces, thickness, and token cells on its B-scans.

Axes are slice, depth, column as everywhere. Surfaces are those that ingest found, mapped back from the store; they are
NaN where the stored volume does not reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int, Int16, UInt8

from octjepa.report.figures import eyes
from octjepa.store.canonical import BAND_BELOW_BRUCH_MM
from octjepa.store.native_mapping import NativeMap
from octjepa.tasks.segment.thickness import SECTORS, ScanOrientation, etdrs_means, scan_centre
from octjepa.volume import AXES, OCTVolume

SURFACES = ("ILM", "Bruch's membrane", "lower edge of the tissue band")
Plane = Literal["slice", "depth", "column"]
_MAX_CELL_ROWS, _MAX_CELL_COLUMNS = 360, 640  # of an overlay: it is drawn over the B-scan at its size
_EMPTY_STD = 3.0  # intensity levels; a B-scan with less is blank
_BY_POSITION = ("positions", "frame_location")  # sources of the slice spacing that tell which B-scan is the lowest
_VIRIDIS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], float)


@dataclass(frozen=True, eq=False)
class NativeScan:
    """`volume` as it came, `native` its mapping to the store and `band` the stored tissue band [2, D, W]."""

    volume: OCTVolume
    native: NativeMap
    band: Int16[np.ndarray, "2 D W"]

    def plane(self, plane: Plane, index: int) -> UInt8[np.ndarray, "rows columns"]:
        """One of three orthogonal planes: depth x column, slice x column, or depth x slice. Raises IndexError."""
        axis = AXES.index(plane)
        if not 0 <= index < self.volume.shape[axis]:
            raise IndexError(index)
        found = np.moveaxis(self.volume.pixels, axis, 0)[index]
        return found.T if plane == "column" else found

    @cached_property
    def surfaces(self) -> Float[np.ndarray, "3 N C"]:
        """Native depth index of `SURFACES` in every A-scan, NaN where there is none."""
        frames, _, columns = self.volume.shape
        number, column = (axis.ravel() for axis in np.meshgrid(np.arange(frames), np.arange(columns), indexing="ij"))
        at = self.native.to_canonical(np.stack([number, np.zeros(len(number)), column], axis=1))  # [N * C, 3]
        near = np.rint(at[:, [0, 2]]).astype(np.int64)
        inside = ((near >= 0) & (near < self.band.shape[1:])).all(axis=1)
        near[~inside] = 0
        # Between stored slices, which are far apart, the surfaces are interpolated: [2, N * C].
        low = np.clip(np.floor(at[:, 0]), 0, max(self.band.shape[1] - 2, 0)).astype(np.int64)
        share = np.clip(at[:, 0] - low, 0, 1)
        first, second = (
            self.band[:, low, near[:, 1]],
            self.band[:, np.minimum(low + 1, len(self.band[0]) - 1), near[:, 1]],
        )
        both = (first[0] >= 0) & (second[0] >= 0)
        nearest = self.band[:, near[:, 0], near[:, 1]]
        ilm, lower = np.where(both, (1 - share) * first + share * second, nearest)
        below = BAND_BELOW_BRUCH_MM / self.native.preprocessing.target_spacing_mm[1]
        bruch = np.where(lower < self.native.preprocessing.stored_size[1] - 1, lower - below, np.nan)  # not clipped
        result = np.full((3, len(number)), np.nan, np.float32)
        usable = inside & (ilm >= 0)
        for surface, depth_index in zip(result, (ilm, bruch, lower), strict=True):
            at[:, 1] = depth_index
            surface[usable] = self.native.to_native(at[usable])[:, 1]
        return result.reshape(3, frames, columns)

    def surface_lines(self, plane: Plane, index: int) -> list[list[float | None]]:
        """`SURFACES` along a B-scan, or along the slices at one column; None where there is none. Raises IndexError."""
        if plane == "depth":
            return []
        if not 0 <= index < self.volume.shape[AXES.index(plane)]:
            raise IndexError(index)
        lines = self.surfaces[:, index] if plane == "slice" else self.surfaces[:, :, index]
        return [[round(float(value), 2) if np.isfinite(value) else None for value in line] for line in lines]

    @cached_property
    def opening_slice(self) -> int:
        """The B-scan to open on: near the middle, not blank, and with tissue."""
        tissue = np.isfinite(self.surfaces[0]).sum(axis=1)
        blank = self.volume.pixels[:, ::8, ::8].std(axis=(1, 2)) < _EMPTY_STD
        return eyes.central(np.where(blank, 0, tissue))

    @cached_property
    def en_face(self) -> UInt8[np.ndarray, "N C"]:
        """Mean over the lowest `eyes.SLAB_MM` of the tissue band, at full contrast; black where there is none."""
        frames, height, columns = self.volume.shape
        slab, total = eyes.SLAB_MM / self.volume.spacing_mm[1], np.zeros((height + 1, columns), np.float32)
        mean, across = np.zeros((frames, columns), np.float32), np.arange(columns)
        for number, frame in enumerate(self.volume.pixels):
            ilm, lower = self.surfaces[[0, 2], number]
            known = np.isfinite(lower)
            low, high = (
                np.clip(np.nan_to_num(edge), 0, height).astype(int) for edge in (np.maximum(ilm, lower - slab), lower)
            )
            np.cumsum(frame, axis=0, dtype=np.float32, out=total[1:])
            summed = total[high, across] - total[low, across]
            mean[number] = np.where(known & (high > low), summed / np.maximum(high - low, 1), 0)
        shown = mean > 0
        if not shown.any():
            return np.zeros(mean.shape, np.uint8)
        dark, light = np.percentile(mean[shown], [0.5, 99.5])
        return np.where(shown, np.clip((mean - dark) / max(light - dark, 1e-6), 0, 1) * 255, 0).astype(np.uint8)

    @cached_property
    def thickness_um(self) -> Float[np.ndarray, "N C"]:
        """Micrometres from the ILM to Bruch's membrane, NaN where one of them is not known."""
        return (self.surfaces[1] - self.surfaces[0]) * np.float32(self.volume.spacing_mm[1] * 1000)

    def thickness_picture(self) -> tuple[UInt8[np.ndarray, "N C 4"], float, float]:
        """(thickness in colours, the values in micrometres of the first and last colour)."""
        known = self.thickness_um[np.isfinite(self.thickness_um)]
        low, high = (float(value) for value in np.percentile(known, [1, 99])) if known.size else (0.0, 1.0)
        return coloured(self.thickness_um, low, high, 190), low, high

    def etdrs(self, centre: tuple[float, float] | None = None) -> dict[str, Any]:
        """Mean thickness in the ETDRS sectors about `centre` (slice, column index; default the scan's middle)."""
        (frames, _, columns), (dz, _, dx) = self.volume.shape, self.volume.spacing_mm
        known = self.volume.provenance["slice"] in _BY_POSITION
        middle = scan_centre((frames, 0, columns), self.volume.spacing_mm)
        at = middle if centre is None else (centre[0] * dz, centre[1] * dx)
        scan = ScanOrientation(self.volume.laterality or "", at, "inferior")
        means = etdrs_means(self.thickness_um[None], (dz, dx), scan)[0]
        up, nasal = scan.signs
        return {
            "sectors": {
                name: round(float(value), 1) if np.isfinite(value) else None
                for name, value in zip(SECTORS, means, strict=True)
            },
            "centre": [at[0] / dz, at[1] / dx], "superior": up, "nasal": nasal if self.volume.laterality else 0,
            "centre_from": "scan" if centre is None else "click", "vertical_known": known,
        }  # fmt: skip

    def canonical(self, slice_index: float, depth: float, column: float) -> list[float]:
        """The position in the stored volume of a native one."""
        position = self.native.to_canonical(np.array([[slice_index, depth, column]], float))[0]
        return [round(float(value), 2) for value in position]

    def cells(
        self, colours: UInt8[np.ndarray, "d h w 4"], number: int, corner: Int[np.ndarray, " 3"], patch: tuple[int, ...]
    ) -> UInt8[np.ndarray, "rows columns 4"]:
        """The colour of the token at each pixel of B-scan `number`, with fewer pixels; clear outside the token grid.

        `corner` is the first voxel of the grid in the stored volume, `patch` a token's voxels. Raises IndexError.
        """
        frames, height, width = self.volume.shape
        if not 0 <= number < frames:
            raise IndexError(number)
        down, across = -(-height // _MAX_CELL_ROWS), -(-width // _MAX_CELL_COLUMNS)
        depth_index, column = np.arange(0, height, down) + (down - 1) / 2, np.arange(0, width, across)
        position = np.stack(
            [grid.ravel() for grid in np.meshgrid([number], depth_index, column, indexing="ij")], axis=1
        )
        cell = np.floor((self.native.to_canonical(position) + 0.5 - corner) / np.array(patch)).astype(np.int64)
        inside = ((cell >= 0) & (cell < colours.shape[:3])).all(axis=1)
        painted = np.zeros((len(position), 4), np.uint8)
        painted[inside] = colours[tuple(cell[inside].T)]
        return painted.reshape(len(depth_index), len(column), 4)


def coloured(values: Float[np.ndarray, "..."], low: float, high: float, opacity: int) -> UInt8[np.ndarray, "... 4"]:
    """Values from dark violet (`low`) over green to yellow (`high`), as RGBA; NaN is clear."""
    share = np.clip((np.nan_to_num(values, nan=low) - low) / max(high - low, 1e-9), 0, 1) * (len(_VIRIDIS) - 1)
    painted = np.empty((*np.shape(values), 4), np.uint8)
    for channel in range(3):
        painted[..., channel] = np.interp(share, np.arange(len(_VIRIDIS)), _VIRIDIS[:, channel])
    painted[..., 3] = np.where(np.isfinite(values), opacity, 0)
    return painted
