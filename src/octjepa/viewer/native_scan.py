"""A scan in its own geometry, as the viewer draws it: planes, and token cells on its B-scans.

Axes are slice, depth, column as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int, UInt8

from octjepa.canonical.native_mapping import NativeMap
from octjepa.report.figures import eyes
from octjepa.tasks.thickness import Lines, ScanOrientation, lines_of
from octjepa.viewer.native_surfaces import Plane
from octjepa.volume import AXES, OCTVolume

_MAX_CELL_ROWS, _MAX_CELL_COLUMNS = 360, 640  # of an overlay: it is drawn over the B-scan at its size
_BLANK_STD = 3.0  # intensity levels; a B-scan with less is blank
_VIRIDIS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], float)


@dataclass(frozen=True, eq=False)
class NativeScan:
    """`volume` as it came, `native` its mapping to the store, and the `SURFACES` that were found in the scan itself."""

    volume: OCTVolume
    native: NativeMap
    surfaces: Float[np.ndarray, "3 N C"]

    def plane(self, plane: Plane, index: int) -> UInt8[np.ndarray, "rows columns"]:
        """One of three orthogonal planes: depth x column, slice x column, or depth x slice.

        Raises KeyError: no such plane. IndexError: no such index.
        """
        if plane not in AXES:
            raise KeyError(plane)
        axis = AXES.index(plane)
        if not 0 <= index < self.volume.shape[axis]:
            raise IndexError(index)
        pixels = np.moveaxis(self.volume.pixels, axis, 0)[index]
        return pixels.T if plane == "column" else pixels

    @cached_property
    def opening_slice(self) -> int:
        """The B-scan to open on: near the middle, not blank, and with tissue."""
        tissue = np.isfinite(self.surfaces[0]).sum(axis=1)
        return eyes.central(np.where([is_blank(frame) for frame in self.volume.pixels], 0, tissue))

    @cached_property
    def en_face(self) -> UInt8[np.ndarray, "N C"]:
        """Mean over the lowest `eyes.SLAB_MM` of the tissue band, at full contrast; black if there is none."""
        frames, height, columns = self.volume.shape
        slab, mean = eyes.SLAB_MM / self.volume.spacing_mm[1], np.zeros((frames, columns), np.float32)
        for number, frame in enumerate(self.volume.pixels):
            ilm, lower = self.surfaces[[0, 2], number]
            low, high = (
                np.clip(np.nan_to_num(edge), 0, height).astype(int) for edge in (np.maximum(ilm, lower - slab), lower)
            )
            across = np.flatnonzero(np.isfinite(lower) & (high > low))
            if not len(across):
                continue
            low, high = low[across], high[across]
            first = int(low.min())  # of the depth indices that are summed: a small part of the B-scan
            total = np.zeros((int(high.max()) - first + 1, columns), np.float32)
            np.cumsum(frame[first : high.max()], axis=0, dtype=np.float32, out=total[1:])
            mean[number, across] = (total[high - first, across] - total[low - first, across]) / (high - low)
        shown = mean > 0
        if not shown.any():
            return np.zeros(mean.shape, np.uint8)
        dark, light = np.percentile(mean[shown], [0.5, 99.5])
        return np.where(shown, np.clip((mean - dark) / max(light - dark, 1e-6), 0, 1) * 255, 0).astype(np.uint8)

    @property
    def signs(self) -> tuple[int, int]:
        """(1 if later B-scans are superior, 1 if higher columns are nasal), else -1.

        nasal is 0 if the eye is unknown or columns run up or down.
        """
        up, nasal = ScanOrientation(self.volume.laterality or "", (0.0, 0.0), "inferior").signs
        return up, nasal if self.volume.laterality and self.lines == "horizontal" else 0

    @property
    def lines(self) -> Lines:
        """How the B-scans run."""
        return lines_of(self.volume.pattern, self.volume.notes)

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


def is_blank(frame: UInt8[np.ndarray, "H W"]) -> bool:
    """Whether a B-scan has no contrast."""
    return bool(frame[::8, ::8].std() < _BLANK_STD)


def coloured(values: Float[np.ndarray, "..."], low: float, high: float, opacity: int) -> UInt8[np.ndarray, "... 4"]:
    """Values from dark violet (`low`) over green to yellow (`high`), as RGBA; NaN is clear."""
    share = np.clip((np.nan_to_num(values, nan=low) - low) / max(high - low, 1e-9), 0, 1) * (len(_VIRIDIS) - 1)
    painted = np.empty((*np.shape(values), 4), np.uint8)
    for channel in range(3):
        painted[..., channel] = np.interp(share, np.arange(len(_VIRIDIS)), _VIRIDIS[:, channel])
    painted[..., 3] = np.where(np.isfinite(values), opacity, 0)
    return painted
