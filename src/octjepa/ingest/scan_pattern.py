"""Raster, radial or circle: how the B-scans lie on the retina.

Geometry decides: how the lines turn on the fundus image or in space. Text is asked only where geometry is silent, and
warily: Topcon Triton's "3d radial" is a 12 x 9 mm raster cube.
"""

from __future__ import annotations

import numpy as np

from octjepa.ingest.raw_scan import FrameGeometry
from octjepa.volume import Pattern

_TURN_DEGREES = 30.0  # a raster's lines are parallel; a radial scan's turn through 180 degrees


def _angle_spread_degrees(directions: np.ndarray) -> float:
    """Largest angle between undirected lines [N, 2|3] and the first of them."""
    norms = np.linalg.norm(directions, axis=1)
    directions = directions[norms > 1e-6] / norms[norms > 1e-6, None]
    if len(directions) < 3:
        return 0.0
    cosines = np.abs(directions @ directions[0])
    return float(np.degrees(np.arccos(np.clip(cosines.min(), 0, 1))))


def circles(facts: FrameGeometry) -> np.ndarray:
    """[F] True for frames that run along a circle: curved, or ending where they began."""
    known = np.isfinite(facts.lines_px).all(axis=1)
    closed = np.zeros(len(known), bool)
    closed[known] = np.linalg.norm(facts.lines_px[known, 2:] - facts.lines_px[known, :2], axis=1) < 1.0
    return facts.curved | (closed & (known.sum() > closed.sum() / 2))


def scan_pattern(facts: FrameGeometry, device: str, text: str) -> Pattern:
    """`text` is protocol and region, lower case."""
    circle = circles(facts)
    if circle.all():
        return "circle"
    lines = facts.lines_px[~circle]
    known = lines[np.isfinite(lines).all(axis=1)]
    turns = [_angle_spread_degrees(known[:, 2:] - known[:, :2])] if len(known) >= 3 else []
    directions = facts.row_directions[np.isfinite(facts.row_directions).all(axis=1)]
    if len(directions) >= 3:
        turns.append(_angle_spread_degrees(directions))
    if turns and max(turns) > _TURN_DEGREES:
        return "radial"
    if circle.any():
        return "radial"  # lines and circles in one file: an optic disc programme
    if len(known) >= 3 or "3d" in text or device == "topcon_triton":
        return "raster"
    if "circle" in text:
        return "circle"
    if "radial" in text or (device == "heidelberg_spectralis" and "onh" in text):
        return "radial"
    return "raster"
