"""An instrument or another opaque object in front of the retina: bright above it, with no light below.

Intraoperative OCT shows forceps, needles and tubes. A vessel or a floater shadows too, but lets the pigment epithelium
through; a detached hyaloid shadows nothing. Both signs in the same A-scans, side by side, are required.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from octjepa.canonical.surfaces import RobustSurface, Surfaces

OBJECT_NOTE = "object_in_vitreous"  # with the number of B-scans
_CLEAR_MM = 0.12  # above the usual thickness of the retina
_BRIGHT, _SHADOW = 0.5, 0.15  # of the contrast; of what the retina has elsewhere
_BLOCK_MM = (0.031, 0.094)  # depth and width over which brightness is averaged
_BLOCKS = 2  # side by side
_FRAMES = 2  # with an object, at least


def block_medians(blocks: Float[np.ndarray, "D r c"], chosen: Bool[np.ndarray, "D r c"]) -> Float[np.ndarray, " D"]:
    """Median of the chosen blocks of each B-scan, 0 if there is none; all B-scans are sorted at once."""
    count = chosen.sum(axis=(1, 2))
    values = np.where(chosen, blocks, np.inf).reshape(len(blocks), -1)
    values.sort(axis=1)
    index = np.arange(len(blocks))
    lower, upper = values[index, np.maximum(count - 1, 0) // 2], values[index, count // 2]
    medians = (lower + upper) / 2
    return medians if count.all() else np.where(count > 0, medians.astype(np.float64), 0.0)


def vitreous_notes(
    image: Float[np.ndarray, "D R C"], surfaces: Surfaces, fit: RobustSurface, depth_mm: float, column_mm: float
) -> list[str]:
    """["object_in_vitreous=5"] where 5 B-scans show one; else []."""
    down, across = (max(1, round(mm / step)) for mm, step in zip(_BLOCK_MM, (depth_mm, column_mm), strict=True))
    frames, height, columns = image.shape
    image = image[:, : height // down * down, : columns // across * across]
    image = image.reshape(frames, height // down, down, -1).mean(axis=2).reshape(frames, height // down, -1, across)
    blocks = image.mean(axis=3)  # [D, r, c]
    bruch = fit.surface[:, : columns // across * across : across] + fit.offsets[:, None]  # found ones are lost below it
    thickness = float(np.median(surfaces.bm - surfaces.ilm))
    depth_index = (np.arange(blocks.shape[1])[:, None] + 0.5) * down
    ends = bruch[:, None] - thickness
    above = depth_index < ends - _CLEAR_MM / depth_mm
    inside = (depth_index >= ends) & (depth_index <= bruch[:, None])
    if not above.any() or not inside.any():
        return []
    level = block_medians(blocks, above)
    brightest = np.where(above, blocks, 0).max(axis=1) - level[:, None]  # [D, c]
    light = (blocks * inside).sum(axis=1) / np.maximum(inside.sum(axis=1), 1) - level[:, None]
    hit = (brightest > _BRIGHT * surfaces.contrast) & (light < _SHADOW * float(np.median(light)))
    beside = np.logical_and.reduce([hit[:, shift : hit.shape[1] - _BLOCKS + 1 + shift] for shift in range(_BLOCKS)])
    seen = int(beside.any(axis=1).sum())
    return [f"{OBJECT_NOTE}={seen}"] if seen >= _FRAMES else []
