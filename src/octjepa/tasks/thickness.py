"""Thickness of each class in micrometres at every A-scan, its mean in the nine ETDRS sectors, and a picture of both.

ETDRS (Early Treatment Diabetic Retinopathy Study report 7, 1991): circles of 1, 3 and 6 mm across about the fovea; the
two rings are cut by the diagonals into superior, nasal, inferior and temporal. In a right eye nasal is towards higher
columns of the scan, in a left eye towards lower columns. Superior is towards higher B-scans if the first B-scan is the
lowest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

from octjepa.files import write_atomic
from octjepa.read.orientation import VERTICAL_NOTE
from octjepa.tables import format_table
from octjepa.tasks.labels.label_files import UNLABELLED
from octjepa.volume import OCTVolume

SECTORS = (
    "central",
    "inner_superior",
    "inner_nasal",
    "inner_inferior",
    "inner_temporal",
    "outer_superior",
    "outer_nasal",
    "outer_inferior",
    "outer_temporal",
)
RADII_MM = (0.5, 1.5, 3.0)
MIN_AREA_SHARE = 0.5  # of a sector; with less in the scan it has no mean
_MOST_ROWS = 1024  # of a map in the figure
REACH_MM = 0.25  # a B-scan stands for no more than this on either side
_DIRECTION = {"superior": (0, 1), "nasal": (1, 0), "inferior": (0, -1), "temporal": (-1, 0)}  # (nasal, up)
_RING_RADIUS = {"central": 0.0, "inner": 1.0, "outer": 2.25}  # mm, of the text in the figure


NO_SECTORS_OF_VERTICAL = "the B-scans run up or down, by the header: only the central sector has values"
Lines = Literal["horizontal", "vertical", "not parallel"]


class ScanOrientation(NamedTuple):
    """A scan on the eye: eye "OD", "OS" or "" (unknown), centre (slice, column) in mm from the first voxel.

    lines: how the B-scans run. Vertical B-scans have the central sector only, because it is not known which end of a
    column is superior. B-scans that are not parallel have no sectors.
    """

    eye: str
    centre_mm: tuple[float, float]
    first_bscan: Literal["inferior", "superior"]
    lines: Lines = "horizontal"

    @property
    def signs(self) -> tuple[int, int]:
        """(towards superior, nasal) for higher slices and columns; nasal as in a right eye if it is unknown."""
        return (1 if self.first_bscan == "inferior" else -1), (-1 if self.eye == "OS" else 1)


def lines_of(pattern: str, notes: Collection[str]) -> Lines:
    """How the B-scans of a scan run. A scan of unknown pattern counts as a raster."""
    if pattern not in ("raster", "unknown", "line"):
        return "not parallel"
    return "vertical" if VERTICAL_NOTE in notes else "horizontal"


def thickness_um(codes: UInt8[np.ndarray, "N R C"], classes: int, depth_mm: float) -> Float[np.ndarray, "classes N C"]:
    """Voxels of each class in an A-scan times the depth spacing; NaN if nothing of the A-scan is labelled.

    Unlabelled voxels count as none of the classes: right if they are outside the stored volume, as in predictions.
    """
    labelled = (codes != UNLABELLED).any(axis=1)
    maps = np.stack([(codes == code).sum(axis=1) for code in range(1, classes + 1)]) * (depth_mm * 1000)
    return np.where(labelled, maps, np.nan).astype(np.float32)


def sector_at(
    up_mm: Float[np.ndarray, " N"], nasal_mm: Float[np.ndarray, " C"], eye_known: bool
) -> Int[np.ndarray, "N C"]:
    """Index in SECTORS at distances from the centre, towards superior and nasal; -1 outside the grid.

    Without the eye nasal and temporal are -2.
    """
    v, u = up_mm[:, None], nasal_mm[None, :]
    radius = np.hypot(u, v)
    quarter = np.where(np.abs(v) >= np.abs(u), np.where(v >= 0, 0, 2), np.where(u >= 0, 1, 3))
    ring = np.digitize(radius, RADII_MM)  # 0 centre, 1 and 2 the rings, 3 outside
    sector = np.select([ring == 0, ring == 3], [0, -1], 1 + 4 * (ring - 1) + quarter)
    if not eye_known:
        sector[(sector > 0) & (quarter % 2 == 1)] = -2
    return sector


def sector_means(
    thickness: Float[np.ndarray, "K N C"],
    slice_mm: Float[np.ndarray, " N"],
    column_mm: Float[np.ndarray, " C"],
    scan: ScanOrientation,
) -> tuple[Float[np.ndarray, "K 9"], Float[np.ndarray, " 9"]]:
    """Means in SECTORS, weighted by the area of each A-scan, and the share of each sector's area that was measured.

    An A-scan is measured where all classes have a value. A B-scan stands for at most `REACH_MM` on either side. NaN
    where less than half of a sector's area is measured, the eye is unknown, or `scan.lines` has no such sector.
    """
    up, nasal = scan.signs
    sector = sector_at(up * (slice_mm - scan.centre_mm[0]), nasal * (column_mm - scan.centre_mm[1]), bool(scan.eye))
    width = np.minimum(slice_widths_mm(slice_mm, 0.0), 2 * REACH_MM)
    column = float(column_mm[1] - column_mm[0]) if len(column_mm) > 1 else 0.0
    area = np.broadcast_to((width * column)[:, None], sector.shape)
    known = np.isfinite(thickness).all(axis=0)
    means, measured = np.full((len(thickness), len(SECTORS)), np.nan), np.zeros(len(SECTORS))
    if scan.lines == "not parallel":
        return means, measured
    if scan.lines == "vertical":
        sector = np.where(sector > 0, -2, sector)
    for index, whole in enumerate(sector_areas_mm2()):
        inside = (sector == index) & known
        measured[index] = min(float(area[inside].sum()) / whole, 1.0)
        if measured[index] >= MIN_AREA_SHARE:
            means[:, index] = np.average(thickness[:, inside], axis=1, weights=area[inside])
    return means, measured


def slice_positions_mm(volume: OCTVolume) -> Float[np.ndarray, " N"]:
    """Positions of B-scans in mm from the first, rising."""
    if volume.slice_positions_mm is None or volume.pattern not in ("raster", "unknown"):
        return np.arange(volume.shape[0]) * volume.spacing_mm[0]
    positions = np.asarray(volume.slice_positions_mm, float)
    return np.abs(positions - positions[0])


def slice_widths_mm(slice_mm: Float[np.ndarray, " D"], single_mm: float) -> Float[np.ndarray, " D"]:
    """The width that each B-scan stands for: half of the gap to each neighbour, the same outwards at both ends."""
    if len(slice_mm) < 2:
        return np.full(len(slice_mm), single_mm)
    gaps = np.abs(np.diff(slice_mm))
    return np.concatenate([gaps[:1], gaps]) / 2 + np.concatenate([gaps, gaps[-1:]]) / 2


def sector_areas_mm2() -> Float[np.ndarray, " 9"]:
    """The areas of SECTORS."""
    inner, middle, outer = (np.pi * radius**2 for radius in RADII_MM)
    return np.array([inner] + 4 * [(middle - inner) / 4] + 4 * [(outer - middle) / 4])


def scan_centre(slice_mm: Float[np.ndarray, " N"], column_mm: Float[np.ndarray, " C"]) -> tuple[float, float]:
    """The middle (slice, column) of the scan in mm from the first voxel's centre."""
    return float(slice_mm[[0, -1]].mean()), float(column_mm[[0, -1]].mean())


def write_table(path: Path, columns: Sequence[str], entries: Iterable[Sequence[object]]) -> Path:
    """Writes tab-separated values; thicknesses (floats) with one decimal, empty if there is none."""
    rows = ([_um(value) if isinstance(value, float) else value for value in entry] for entry in entries)
    text = format_table(columns, rows)
    write_atomic(path, lambda file: file.write(text.encode()))
    return path


def _um(value: float) -> str:
    return f"{value:.1f}" if np.isfinite(value) else ""


def draw_thickness(
    path: Path,
    thickness_um: Float[np.ndarray, "K N C"],
    etdrs_um: Float[np.ndarray, "K 9"],
    classes: Sequence[str],
    slice_mm: Float[np.ndarray, " N"],
    column_mm: Float[np.ndarray, " C"],
    scan: ScanOrientation,
    title: str,
) -> Path:
    """Writes thickness maps, a panel for each class, with the ETDRS grid and its means, as SVG; returns `path`.

    Columns run to the right as in the scan, superior is up. Between uneven B-scans the map shows the nearest one. The
    grid has those parts for which `scan.lines` has sectors.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    across = min(3, len(classes))
    down = -(-len(classes) // across)
    figure = Figure(figsize=(3.6 * across, 3.4 * down), layout="constrained")
    up, nasal = scan.signs
    rows_mm = np.linspace(slice_mm[0], slice_mm[-1], _even_rows(slice_mm))
    nearest = np.abs(rows_mm[:, None] - slice_mm[None]).argmin(axis=1)
    down_mm, right_mm = up * (_edges(rows_mm) - scan.centre_mm[0]), _edges(column_mm) - scan.centre_mm[1]
    rings = RADII_MM if scan.lines == "horizontal" else RADII_MM[:1] if scan.lines == "vertical" else ()
    angle = np.linspace(0, 2 * np.pi, 200)
    for number, name in enumerate(classes):
        panel = figure.add_subplot(down, across, number + 1)
        image = panel.imshow(
            thickness_um[number, nearest], origin="lower", extent=(*right_mm, *down_mm), aspect="equal", cmap="viridis"
        )
        figure.colorbar(image, ax=panel, shrink=0.8, label="um")
        for radius in rings:
            panel.plot(radius * np.cos(angle), radius * np.sin(angle), color="white", linewidth=0.8)
        for turn in (1, -1) if len(rings) > 1 else ():
            for side in (1, -1):
                ends = side * np.array([RADII_MM[0], RADII_MM[2]]) / np.sqrt(2)
                panel.plot(ends, turn * ends, color="white", linewidth=0.8)
        for value, sector in zip(etdrs_um[number], SECTORS, strict=True):
            if np.isfinite(value):
                ring, _, quarter = sector.partition("_")
                (u, v), radius = _DIRECTION.get(quarter, (0, 0)), _RING_RADIUS[ring]
                text: dict[str, Any] = {"color": "white", "fontsize": 7, "ha": "center", "va": "center"}
                panel.text(nasal * u * radius, v * radius, f"{value:.0f}", **text)
        panel.set_xlim(*map(float, right_mm))
        panel.set_ylim(*sorted(map(float, down_mm)))
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("mm, as in the B-scan", fontsize=7)
        panel.set_ylabel("mm, superior up" if scan.lines == "horizontal" else "mm, across the B-scans", fontsize=7)
        panel.tick_params(labelsize=7)
    figure.suptitle(f"Thickness, {title}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "octjepa"}):  # the same drawing is the same file
        write_atomic(path, lambda file: figure.savefig(file, format="svg", metadata={"Date": None}))
    return path


def _even_rows(slice_mm: Float[np.ndarray, " N"]) -> int:
    """As many rows as B-scans if these are even, else enough for the smallest gap."""
    if len(slice_mm) < 2:
        return len(slice_mm)
    gap = float(np.abs(np.diff(slice_mm)).min())
    return min(round(abs(float(slice_mm[-1] - slice_mm[0])) / gap) + 1, _MOST_ROWS)


def _edges(centres_mm: Float[np.ndarray, " N"]) -> Float[np.ndarray, " 2"]:
    """The outer edges of evenly spaced pixels; a single pixel reaches as far as a B-scan stands for."""
    half = (centres_mm[-1] - centres_mm[0]) / (len(centres_mm) - 1) / 2 if len(centres_mm) > 1 else REACH_MM
    return np.array([centres_mm[0] - half, centres_mm[-1] + half])
