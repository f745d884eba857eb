"""Writes the maps of one eye as files in the geometry of its scan as it came."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.canonical.native_mapping import NativeMap
from octjepa.explain.eyes import OccludedVolume
from octjepa.explain.native import pixels_to_native, token_centre, tokens_to_native
from octjepa.files import write_atomic
from octjepa.notes import read_notes
from octjepa.read.file_order import FileOrder
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.tasks.nifti import write_nifti

NativeValues = Float[np.ndarray, "N R C"]


@dataclass(frozen=True, eq=False)
class NativeWriter:
    """The files `ID.KIND.nii.gz` and `ID.png` of `eye` in `folder`; `paths` are those that were written."""

    eye: OccludedVolume
    native: NativeMap
    recipe: Recipe
    folder: Path
    order: FileOrder
    paths: list[Path] = field(default_factory=list)

    @classmethod
    def open(cls, store: Store, eye: OccludedVolume, recipe: Recipe, folder: Path) -> NativeWriter:
        """Raises UsageError: ingest turned the scan's voxels, so that no map can be laid on the file's."""
        native = store.native_map(eye.row.volume_id)
        return cls(eye, native, recipe, folder, FileOrder.of(read_notes(eye.row.notes), native.shape[0]))

    def write_map(self, kind: str, grid: Float[np.ndarray, "d h w"]) -> NativeValues:
        """Writes the values of tokens as `ID.KIND.nii.gz` and returns them at every voxel, B-scans in spatial order."""
        values = tokens_to_native(grid, self.native, self.recipe)
        self.paths.append(self.folder / f"{self.eye.row.volume_id}.{kind}.nii.gz")
        write_nifti(self.paths[-1], self.order.voxels(values), self.native.spacing_mm, self.order)
        return values

    def centre(self, token: tuple[int, int, int]) -> Float[np.ndarray, " 3"]:
        """The middle (slice, depth, column) of a token of the grid in the scan."""
        stored = token_centre(token, self.native.preprocessing, self.recipe)
        return np.asarray(self.native.to_native(stored[None])[0])

    def nearest_b_scan(self, centre: Float[np.ndarray, " 3"]) -> int:
        """The index of the B-scan that is nearest to a position."""
        return int(np.clip(np.rint(centre[0]), 0, self.native.shape[0] - 1))

    def b_scan(self, number: int) -> UInt8[np.ndarray, "R C"]:
        """The stored pixels laid back on B-scan `number`."""
        return pixels_to_native(np.asarray(self.eye.volume.pixels), self.native, number)

    @property
    def token_depth(self) -> float:
        """Voxels of the scan that a token spans in depth."""
        token_mm = self.recipe.tokens.patch_size[1] * self.native.preprocessing.target_spacing_mm[1]
        return token_mm / self.native.spacing_mm[1]

    def extents(self) -> tuple[tuple[float, float, float, float], tuple[float, float, float, float]]:
        """For pictures in mm (left, right, bottom, top): of the en face view, and of a B-scan."""
        (dz, dy, dx), (slices, depth, columns) = self.native.spacing_mm, self.native.shape
        return (0.0, columns * dx, slices * dz, 0.0), (0.0, columns * dx, depth * dy, 0.0)

    def write_figure(self, figure: object, kind: str = "") -> None:
        """Writes a matplotlib chart as `ID.png` or `ID.KIND.png`."""
        name = f"{self.eye.row.volume_id}.{kind}.png" if kind else f"{self.eye.row.volume_id}.png"
        self.paths.append(self.folder / name)
        write_atomic(self.paths[-1], lambda file: figure.savefig(file, format="png"))  # type: ignore[attr-defined]
