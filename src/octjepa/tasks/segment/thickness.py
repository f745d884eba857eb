"""Thickness of each class in micrometres at every A-scan, and its mean in the nine sectors of the ETDRS grid.

ETDRS (Early Treatment Diabetic Retinopathy Study report 7, 1991): circles of 1, 3 and 6 mm across about the fovea; the
two rings are cut by the diagonals into superior, nasal, inferior and temporal. In a right eye nasal is towards higher
columns of the scan, in a left eye towards lower ones; superior is towards higher B-scans where the first is the lowest.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.tasks.segment.label_files import UNSEEN

SECTORS = (
    "central",
    "inner_superior", "inner_nasal", "inner_inferior", "inner_temporal",
    "outer_superior", "outer_nasal", "outer_inferior", "outer_temporal",
)  # fmt: skip
RADII_MM = (0.5, 1.5, 3.0)
LEAST_SEEN = 0.5  # of a sector's area; with less in the scan it has no mean


class Lie(NamedTuple):
    """How a scan lies on the eye: eye "OD", "OS" or "" (unknown), centre (slice, column) in mm from the first voxel."""

    eye: str
    centre_mm: tuple[float, float]
    first_bscan: Literal["inferior", "superior"]


def thickness_um(codes: UInt8[np.ndarray, "N R C"], classes: int, row_mm: float) -> Float[np.ndarray, "classes N C"]:
    """Rows of each class in an A-scan times the row spacing; NaN where nothing of the A-scan is labelled."""
    seen = (codes != UNSEEN).any(axis=1)
    maps = np.stack([(codes == code).sum(axis=1) for code in range(1, classes + 1)]) * (row_mm * 1000)
    return np.where(seen, maps, np.nan).astype(np.float32)


def sector_of(shape: tuple[int, int], spacing_mm: tuple[float, float], lie: Lie) -> np.ndarray:
    """Place in SECTORS of each A-scan [N, C], -1 outside the grid; without the eye nasal and temporal are -2."""
    up = 1.0 if lie.first_bscan == "inferior" else -1.0
    nasal = -1.0 if lie.eye == "OS" else 1.0
    v = up * (np.arange(shape[0]) * spacing_mm[0] - lie.centre_mm[0])[:, None]
    u = nasal * (np.arange(shape[1]) * spacing_mm[1] - lie.centre_mm[1])[None, :]
    radius = np.hypot(u, v)
    quarter = np.where(np.abs(v) >= np.abs(u), np.where(v >= 0, 0, 2), np.where(u >= 0, 1, 3))
    ring = np.digitize(radius, RADII_MM)  # 0 centre, 1 and 2 the rings, 3 outside
    sector = np.select([ring == 0, ring == 3], [0, -1], 1 + 4 * (ring - 1) + quarter)
    if not lie.eye:
        sector[(sector > 0) & (quarter % 2 == 1)] = -2
    return sector


def etdrs(
    thickness: Float[np.ndarray, "classes N C"], spacing_mm: tuple[float, float], lie: Lie
) -> Float[np.ndarray, "classes 9"]:
    """Mean thickness in SECTORS; NaN where less than half of a sector's area was seen, or the eye is unknown."""
    sector = sector_of((thickness.shape[1], thickness.shape[2]), spacing_mm, lie)
    inner, middle, outer = (np.pi * radius**2 for radius in RADII_MM)
    areas = np.array([inner] + 4 * [(middle - inner) / 4] + 4 * [(outer - middle) / 4])
    means = np.full((len(thickness), len(SECTORS)), np.nan)
    cell = spacing_mm[0] * spacing_mm[1]
    for place in range(len(SECTORS)):
        for number, one in enumerate(thickness):
            values = one[(sector == place) & np.isfinite(one)]
            if len(values) * cell >= LEAST_SEEN * areas[place]:
                means[number, place] = values.mean()
    return means


def scan_centre(shape: tuple[int, int, int], spacing_mm: tuple[float, float, float]) -> tuple[float, float]:
    """(slice, column) in mm from the first voxel's centre."""
    return (shape[0] - 1) / 2 * spacing_mm[0], (shape[2] - 1) / 2 * spacing_mm[2]
