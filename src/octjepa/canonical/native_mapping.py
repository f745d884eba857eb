"""Maps canonical voxels to the native scan and back: undoes mirroring, cropping, flattening and resampling.

Positions are real-valued indices (slice, depth, column) with voxel centres at whole numbers. The slice axis is that of
the native B-scans in spatial order, as `read_volume` gives them. Every A-scan of a native B-scan was shifted by its own
whole number of canonical depth indices; the map uses the shift of the nearest B-scan and canonical column in both
directions, so one direction inverts the other exactly (to rounding of float64) within the scan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int16

from octjepa.recipe import Preprocessing

Positions = Float[np.ndarray, "P 3"]


@dataclass(frozen=True, eq=False)
class NativeMap:
    """The geometry of one canonical volume. `shape` and `spacing_mm` are the native scan's; `frame_mm` rises or falls.

    `frame_shifts` are the canonical depth indices that each native B-scan moved down, in stored columns.
    """

    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    preprocessing: Preprocessing
    frame_shifts: Int16[np.ndarray, "N W"]
    frame_mm: Float[np.ndarray, " N"]
    mirrored: bool

    @property
    def slice_mm(self) -> Float[np.ndarray, " N"]:
        """Positions of the native B-scans in mm from the first, rising."""
        return np.abs(self.frame_mm - self.frame_mm[0])

    @property
    def column_mm(self) -> Float[np.ndarray, " C"]:
        """Positions of the native columns in mm from the first."""
        return np.arange(self.shape[2]) * self.spacing_mm[2]

    def to_native(self, canonical: Positions) -> Positions:
        """Maps positions (slice, depth, column) of the stored volume to the native scan; linear beyond its ends."""
        slices, depth_index, columns = np.asarray(canonical, float).T
        (depth, _, width), (_, dy, dx) = self.preprocessing.stored_size, self.spacing_mm
        tz, ty, tx = self.preprocessing.target_spacing_mm
        index = self._frames(slices=(slices - (depth - 1) / 2) * tz)
        depth_mm = (depth_index - self._shift(index, columns) - self._centre_depth) * ty
        signed = (width - 1) / 2 - columns if self.mirrored else columns - (width - 1) / 2
        native = (index, depth_mm / dy + (self.shape[1] - 1) / 2, signed * tx / dx + (self.shape[2] - 1) / 2)
        return np.stack(native, axis=1)

    def to_canonical(self, native: Positions) -> Positions:
        """Positions (slice, depth, column) of the native volume in the stored one; some are outside its size."""
        index, depth_index, columns = np.asarray(native, float).T
        (depth, _, width), (_, dy, dx) = self.preprocessing.stored_size, self.spacing_mm
        tz, ty, tx = self.preprocessing.target_spacing_mm
        signed = (columns - (self.shape[2] - 1) / 2) * dx / tx
        stored = (width - 1) / 2 + (-signed if self.mirrored else signed)
        shifted = (depth_index - (self.shape[1] - 1) / 2) * dy / ty + self._centre_depth + self._shift(index, stored)
        return np.stack([self._mm(index) / tz + (depth - 1) / 2, shifted, stored], axis=1)

    @property
    def _centre_depth(self) -> float:
        """The middle of a native B-scan in canonical depth indices, before flattening."""
        height = max(8, round(self.shape[1] * self.spacing_mm[1] / self.preprocessing.target_spacing_mm[1]))
        return (height - 1) / 2

    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """(index, mm) of the B-scans, with a far one on either side, so that the map is linear beyond the ends."""
        far, count = 1000.0, len(self.frame_mm)
        step = self.spacing_mm[0] * (1 if self.frame_mm[-1] >= self.frame_mm[0] else -1)
        index = np.concatenate([[-far], np.arange(count), [count - 1 + far]])
        return index, np.concatenate([[self.frame_mm[0] - far * step], self.frame_mm, [self.frame_mm[-1] + far * step]])

    def _frames(self, slices: np.ndarray) -> np.ndarray:
        index, mm = self._ends()
        order = np.argsort(mm, kind="stable")
        return np.interp(slices, mm[order], index[order])

    def _mm(self, index: np.ndarray) -> np.ndarray:
        indices, mm = self._ends()
        return np.interp(index, indices, mm)

    def _shift(self, index: np.ndarray, columns: np.ndarray) -> np.ndarray:
        # Slightly below one half, so that positions a rounding error apart around it round to the same side both ways.
        frames, width = self.frame_shifts.shape
        frame = np.clip(np.rint(index - 1e-6), 0, frames - 1).astype(np.int64)
        column = np.clip(np.rint(columns - 1e-6), 0, width - 1).astype(np.int64)
        return self.frame_shifts[frame, column].astype(float)
