"""Which way the B-scans of a raster run across the retina, by orientation vectors and lines on the fundus image.

Columns run as on a fundus image, from the patient's right to the left: temporal to nasal in a right eye, nasal to
temporal in a left one, which the store mirrors. B-scans that run the other way are mirrored here. B-scans that run up
or down have other axes: their columns are what slices are elsewhere. They are noted, and recipes leave them out.

Of the vectors only x, to the patient's left, is used: writers disagree on which of the others points into the eye.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.ingest.raw_scan import FrameGeometry

VERTICAL_NOTE = "vertical_lines"
_VERTICAL = 0.5  # cosine between a B-scan and the horizontal: 60 degrees
_SHORTEST_PX = 2.0  # of a line on the fundus image


def _unit(vectors: Float[np.ndarray, "F n"]) -> Float[np.ndarray, "F n"]:
    """Vectors of length 1, NaN where one has none."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(length > 1e-6, length, np.nan)


def _ways(cosines: Float[np.ndarray, " F"]) -> Float[np.ndarray, " F"]:
    """1 to the patient's left, -1 to the right, 0 up or down, NaN where unknown."""
    return np.where(np.isnan(cosines), np.nan, np.where(np.abs(cosines) < _VERTICAL, 0.0, np.sign(cosines)))


def _ways_by_vectors(frames: FrameGeometry) -> Float[np.ndarray, " F"]:
    along, normal = _unit(frames.row_directions), _unit(frames.normals)
    into_the_eye = np.cross(normal, along)
    return _ways(np.where(np.abs(into_the_eye[:, 0]) < _VERTICAL, along[:, 0], np.nan))


def _ways_on_fundus(frames: FrameGeometry) -> Float[np.ndarray, " F"]:
    lines = frames.lines_px[:, 2:] - frames.lines_px[:, :2]  # [F, (row, column)]
    long = np.linalg.norm(lines, axis=1) >= _SHORTEST_PX
    return _ways(np.where(long & ~frames.curved, _unit(lines)[:, 1], np.nan))


def align_columns(
    pixels: UInt8[np.ndarray, "F H W"], frames: FrameGeometry, notes: list[str]
) -> tuple[UInt8[np.ndarray, "F H W"], FrameGeometry]:
    """The B-scans of a raster, all from the patient's right to the left, and their geometry.

    Adds to `notes`: `columns_mirrored=K` B-scans; `vertical_lines`; `line_direction_disagrees` where vectors and lines
    contradict each other, and nothing is changed.
    """
    by_vectors, on_fundus = _ways_by_vectors(frames), _ways_on_fundus(frames)
    if (np.isfinite(by_vectors) & np.isfinite(on_fundus) & (by_vectors != on_fundus)).any():
        notes.append("line_direction_disagrees")
        return pixels, frames
    ways = np.where(np.isfinite(by_vectors), by_vectors, on_fundus)
    if not np.isfinite(ways).all():
        return pixels, frames
    if not ways.any():
        notes.append(VERTICAL_NOTE)
    backwards = ways < 0
    if not backwards.any() or not ways.all():
        return pixels, frames
    notes.append(f"columns_mirrored={int(backwards.sum())}")
    pixels = pixels.copy()
    pixels[backwards] = pixels[backwards, :, ::-1]
    sign = np.where(backwards, -1.0, 1.0)[:, None]
    lines = np.where(backwards[:, None], frames.lines_px[:, [2, 3, 0, 1]], frames.lines_px)
    return pixels, replace(
        frames, row_directions=frames.row_directions * sign, normals=frames.normals * sign, lines_px=lines
    )
