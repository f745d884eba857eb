"""Does what was found look like a human retina? A score of 0 to 1 from its curvature and thickness.

A retina lines the back of the eye: in a B-scan, with the vitreous on top, it is flat or its middle is deepest (Bruch's
membrane has a radius of some 38 mm, 12 mm in high myopia). A cornea bulges towards the top with a radius of 6.5 to
8 mm; the retina of a small animal's eye is bent by a radius of 2 to 3 mm. Both surfaces have to be bent: a dome-shaped
macula or a detachment bends one more than the other.

Not distinguished: other eyes with the size and the layers of a human one, and a human eye with an instrument in it.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from octjepa.ingest.reasons import rejection
from octjepa.store.surfaces import RobustSurface, Surfaces

_LEAST = 0.1  # a lower score is refused
# (0 below, 1 from, 1 up to, 0 above) of the curvature per mm, positive where the middle is highest
_CURVATURE = (-0.3, -0.2, 0.07, 0.12)
_THICKNESS_MM = (0.04, 0.09, 0.75, 1.2)  # median of ILM to Bruch's membrane
_NARROWEST_MM = 1.0  # a field along the columns that shows no curvature


def _trapezoid(value: float, corners: tuple[float, float, float, float]) -> float:
    return float(np.interp(value, corners, (0.0, 1.0, 1.0, 0.0)))


def _curvature_per_mm(depth_mm: Float[np.ndarray, " C"], column_mm: float) -> float:
    """Second derivative of a surface's depth along the columns."""
    position = (np.arange(len(depth_mm)) - (len(depth_mm) - 1) / 2) * column_mm
    return 2 * float(np.polyfit(position, depth_mm, 2)[0])


def score_retina(surfaces: Surfaces, fit: RobustSurface, depth_mm: float, column_mm: float) -> float:
    """0..1. Raises VolumeRejected not_retina where the score is below `_LEAST`, with what speaks against it."""
    thickness = float(np.median(surfaces.bm - surfaces.ilm)) * depth_mm
    score, against = _trapezoid(thickness, _THICKNESS_MM), f"{thickness:.2f} mm thick"
    if fit.surface.shape[1] * column_mm >= _NARROWEST_MM:
        outer = _curvature_per_mm(fit.surface.mean(axis=0) * depth_mm, column_mm)
        inner = _curvature_per_mm(np.median(surfaces.ilm - fit.offsets[:, None], axis=0) * depth_mm, column_mm)
        bend = min(outer, inner) if outer > 0 else max(outer, inner)
        if (bent := _trapezoid(bend, _CURVATURE)) < score:
            towards = "the vitreous, as a cornea" if bend > 0 else "the sclera, as the retina of a small animal"
            score, against = bent, f"both surfaces bend towards {towards}, by a radius of {1 / abs(bend):.1f} mm"
    if score < _LEAST:
        raise rejection("not_retina", f"it does not look like a human retina (score {score:.2f}): {against}")
    return score
