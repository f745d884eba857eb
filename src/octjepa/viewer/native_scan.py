"""A scan in its own geometry, as the viewer draws it: planes, thickness, and token cells on its B-scans.

Axes are slice, depth, column as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from octjepa.canonical.native_mapping import NativeMap
from octjepa.report.figures import eyes
from octjepa.tasks.segment.thickness import SECTORS, ScanOrientation, etdrs_means, scan_centre, sector_coverage
from octjepa.viewer.native_surfaces import Plane
from octjepa.volume import AXES, OCTVolume

_MAX_CELL_ROWS, _MAX_CELL_COLUMNS = 360, 640  # of an overlay: it is drawn over the B-scan at its size
MIN_COVERED = 0.9  # of a sector's area: with less, its mean would be that of another area
_BLANK_STD = 3.0  # intensity levels; a B-scan with less is blank
_BY_POSITION = ("positions", "frame_location")  # sources of the slice spacing that tell which B-scan is the lowest
_VIRIDIS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], float)


@dataclass(frozen=True, eq=False)
class NativeScan:
    """`volume` as it came, `native` its mapping to the store and `surfaces` those of `native_surfaces`."""

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
        found = np.moveaxis(self.volume.pixels, axis, 0)[index]
        return found.T if plane == "column" else found

    @cached_property
    def opening_slice(self) -> int:
        """The B-scan to open on: near the middle, not blank, and with tissue."""
        tissue = np.isfinite(self.surfaces[0]).sum(axis=1)
        return eyes.central(np.where([is_blank(frame) for frame in self.volume.pixels], 0, tissue))

    @cached_property
    def en_face(self) -> UInt8[np.ndarray, "N C"]:
        """Mean over the lowest `eyes.SLAB_MM` of the tissue band, at full contrast; black where there is none."""
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
        """Mean thickness in the ETDRS sectors about `centre` (slice, column index; default the scan's middle).

        A sector has no mean if less than `MIN_COVERED` of its area is in the scan or has both surfaces.
        `notes` say why.
        """
        (frames, _, columns), (dz, _, dx) = self.volume.shape, self.volume.spacing_mm
        known = self.volume.provenance["slice"] in _BY_POSITION
        middle = scan_centre((frames, 0, columns), self.volume.spacing_mm)
        at = middle if centre is None else (centre[0] * dz, centre[1] * dx)
        scan = ScanOrientation(self.volume.laterality or "", at, "inferior")
        means = etdrs_means(self.thickness_um[None], (dz, dx), scan)[0]
        inside = sector_coverage(np.ones((frames, columns), bool), (dz, dx), scan)
        measured = sector_coverage(np.isfinite(self.thickness_um), (dz, dx), scan)
        means[measured < MIN_COVERED] = np.nan
        up, nasal = scan.signs
        return {
            "sectors": {
                name: round(float(value), 1) if np.isfinite(value) else None
                for name, value in zip(SECTORS, means, strict=True)
            },
            "measured": {name: round(float(share), 3) for name, share in zip(SECTORS, measured, strict=True)},
            "notes": _sector_notes(inside, measured, scan.eye),
            "centre": [at[0] / dz, at[1] / dx],
            "superior": up,
            "nasal": nasal if self.volume.laterality else 0,
            "centre_from": "scan" if centre is None else "click",
            "vertical_known": known,
        }

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


def _sector_notes(inside: Float[np.ndarray, " 9"], measured: Float[np.ndarray, " 9"], eye: str) -> list[str]:
    """Why sectors have no mean, one sentence for each reason. Shares are from 0 to 1."""
    is_named = [bool(eye) or not name.endswith(("nasal", "temporal")) for name in SECTORS]
    beyond, missing = [], []
    for name, share_inside, share_measured, known in zip(SECTORS, inside, measured, is_named, strict=True):
        name = name.replace("_", " ")
        if known and share_inside < MIN_COVERED:
            beyond.append(f"{name} ({share_inside:.0%} in the scan)")
        elif known and share_measured < MIN_COVERED:
            missing.append(f"{name} ({share_measured:.0%} measured)")
    notes = []
    if beyond:
        notes.append(f"Beyond the field of the scan: {', '.join(beyond)}.")
    if missing:
        notes.append(f"Surfaces were not found everywhere: {', '.join(missing)}.")
    if not eye:
        notes.append("The side of the eye is unknown, so nasal and temporal sectors cannot be told apart.")
    return notes


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
