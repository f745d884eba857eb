"""From a canonical voxel to its place in the native scan and back: mirror, crop, flattening and resampling undone.

Positions are real-valued indices in the order of the axes, voxel centres at whole numbers. The slow axis is that of the
native B-scans in spatial order, as `read_volume` gives them. Every A-scan of a native B-scan was shifted by whole
canonical rows of its own; the map uses the shift of the nearest B-scan and canonical column in both directions, so one
direction undoes the other exactly (to rounding of float64) within the scan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int16, UInt8

from octjepa.errors import UsageError
from octjepa.recipe import Preprocessing
from octjepa.store.storage import reading_chunk

if TYPE_CHECKING:
    from octjepa.store.folder import Store

Positions = Float[np.ndarray, "P 3"]


@dataclass(frozen=True, eq=False)
class NativeMap:
    """The geometry of one canonical volume. `shape` and `spacing_mm` are the native scan's; `frame_mm` rises or falls.

    `frame_shifts` [N, W] are the rows that each native B-scan moved down, in stored columns.
    """

    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    preprocessing: Preprocessing
    frame_shifts: Int16[np.ndarray, "N W"]
    frame_mm: Float[np.ndarray, " N"]
    mirrored: bool

    @classmethod
    def from_store(cls, store: Store, volume_id: str) -> NativeMap:
        """Of a volume in a store. Raises UsageError: no such volume; what `Store.read` raises."""
        rows = store.table[store.table["volume_id"] == volume_id].to_dict("records")
        if not rows:
            raise UsageError(f"the store {store.location} has no volume {volume_id}")
        row = rows[0]
        with (
            reading_chunk(store.chunk_location(volume_id)),
            store.storage.chunk(volume_id) as files,
            files["geometry.npz"].open("rb") as file,
            np.load(file, allow_pickle=False) as geometry,
        ):
            shifts, frame_mm = geometry["frame_shifts"], geometry["frame_mm"]
        return cls(
            (int(row["native_d"]), int(row["native_h"]), int(row["native_w"])),
            (float(row["spacing_z_mm"]), float(row["spacing_y_mm"]), float(row["spacing_x_mm"])),
            store.preprocessing, shifts, frame_mm, bool(row["mirrored"]),
        )  # fmt: skip

    def to_native(self, canonical: Positions) -> Positions:
        """Maps positions (slice, depth, column) of the stored volume to the native scan; linear beyond its ends."""
        slices, rows, columns = np.asarray(canonical, float).T
        (depth, _, width), (_, dy, dx) = self.preprocessing.stored_size, self.spacing_mm
        tz, ty, tx = self.preprocessing.target_spacing_mm
        index = self._frames(slices=(slices - (depth - 1) / 2) * tz)
        row_mm = (rows - self._shift(index, columns) - self._centre_row) * ty
        signed = (width - 1) / 2 - columns if self.mirrored else columns - (width - 1) / 2
        native = (index, row_mm / dy + (self.shape[1] - 1) / 2, signed * tx / dx + (self.shape[2] - 1) / 2)
        return np.stack(native, axis=1)

    def to_canonical(self, native: Positions) -> Positions:
        """Positions (slice, depth, column) of the native volume in the stored one; some lie outside its size."""
        index, rows, columns = np.asarray(native, float).T
        (depth, _, width), (_, dy, dx) = self.preprocessing.stored_size, self.spacing_mm
        tz, ty, tx = self.preprocessing.target_spacing_mm
        signed = (columns - (self.shape[2] - 1) / 2) * dx / tx
        stored = (width - 1) / 2 + (-signed if self.mirrored else signed)
        moved = (rows - (self.shape[1] - 1) / 2) * dy / ty + self._centre_row + self._shift(index, stored)
        return np.stack([self._mm(index) / tz + (depth - 1) / 2, moved, stored], axis=1)

    def labels_to_native(self, labels: UInt8[np.ndarray, "D H W"]) -> UInt8[np.ndarray, "N R C"]:
        """A segmentation of the stored volume at every native voxel, nearest voxel; 0 beyond the stored volume."""
        depth, height, width = self.preprocessing.stored_size
        if labels.shape != (depth, height, width):
            raise UsageError(f"labels of shape {labels.shape}: expected the stored size {(depth, height, width)}")
        frames, rows, columns = self.shape
        grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1).reshape(-1, 2)
        result = np.zeros(self.shape, np.uint8)
        size = np.array(labels.shape)
        for frame in range(frames):
            place = np.rint(self.to_canonical(np.insert(grid.astype(float), 0, frame, axis=1))).astype(np.int64)
            inside = ((place >= 0) & (place < size)).all(axis=1)
            result[frame].reshape(-1)[inside] = labels[tuple(place[inside].T)]
        return result

    @property
    def _centre_row(self) -> float:
        """Middle of a whole native B-scan in canonical rows, before flattening."""
        rows = max(8, round(self.shape[1] * self.spacing_mm[1] / self.preprocessing.target_spacing_mm[1]))
        return (rows - 1) / 2

    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """(index, mm) of the B-scans, with a far one on either side, so that the ends go on straight."""
        far, count = 1000.0, len(self.frame_mm)
        step = self.spacing_mm[0] * (1 if self.frame_mm[-1] >= self.frame_mm[0] else -1)
        index = np.concatenate([[-far], np.arange(count), [count - 1 + far]])
        return index, np.concatenate([[self.frame_mm[0] - far * step], self.frame_mm, [self.frame_mm[-1] + far * step]])

    def _frames(self, slices: np.ndarray) -> np.ndarray:
        index, mm = self._ends()
        order = np.argsort(mm, kind="stable")
        return np.interp(slices, mm[order], index[order])

    def _mm(self, index: np.ndarray) -> np.ndarray:
        known, mm = self._ends()
        return np.interp(index, known, mm)

    def _shift(self, index: np.ndarray, columns: np.ndarray) -> np.ndarray:
        # A hair below the half, so that a place halfway, a rounding error apart, takes the same side both ways.
        frames, width = self.frame_shifts.shape
        frame = np.clip(np.rint(index - 1e-6), 0, frames - 1).astype(np.int64)
        column = np.clip(np.rint(columns - 1e-6), 0, width - 1).astype(np.int64)
        return self.frame_shifts[frame, column].astype(float)
