"""Find the fovea in a map of retinal thickness, and state how certain the result is.

In: thickness from the ILM to the RPE `[slice, column]` in um with the positions of B-scans and columns in mm. Out: a
`ScanCentre`, on which the ETDRS grid is centred. The fovea is the thinnest place of the central field: the retina must
be thicker in a ring of 0.8 to 1.3 mm around it, in every quarter that the scan covers. Central oedema fills the pit,
so the rule fails there. The inner layers, from the ILM to the outer plexiform layer, are then searched in the same way:
they are thinnest at the fovea also above subretinal fluid. If that fails as well, the grid is centred on the middle of
the scan, and the result says so. A thinnest place at the border of the search or of the field is not a fovea, because
the retina may be thinner beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from jaxtyping import Float

_CENTRAL_MM: Final = 1.5  # the fovea is searched for within this distance from the middle of the scan
_PIT_MM: Final = 0.2  # radius of the disc over which thickness is averaged
_RING_MM: Final = (0.8, 1.3)
_CERTAIN_UM: Final = 60.0  # a pit this much thinner than every quarter of its ring is certain
MIN_CERTAINTY: Final = 0.5
_STEP_MM: Final = 0.06  # between candidates


@dataclass(frozen=True)
class ScanCentre:
    """Centre of the ETDRS grid in mm (slice, column) from the first voxel.

    `certainty` is 0..1 that the thinnest place is the fovea: its depth below the least thick quarter of the ring around
    it, divided by 60 um. `kind` is "scan" if the certainty is below 0.5; the centre is then the middle of the scan.
    "chosen" is a centre that a person chose.
    """

    slice_mm: float
    column_mm: float
    kind: Literal["fovea", "scan", "chosen"]
    certainty: float


def find_centre(
    retina_um: Float[np.ndarray, "D W"],
    inner_um: Float[np.ndarray, "D W"],
    slice_mm: Float[np.ndarray, " D"],
    column_mm: Float[np.ndarray, " W"],
) -> ScanCentre:
    """The fovea, or the middle of the scan if no pit is found.

    `retina_um` is the thickness from the ILM to the RPE, `inner_um` that to the outer plexiform layer. NaN is an
    unknown A-scan.
    """
    centre = _thinnest(retina_um, slice_mm, column_mm)
    if centre.kind == "fovea":
        return centre
    inner = _thinnest(inner_um, slice_mm, column_mm)
    return inner if inner.kind == "fovea" else centre


def _thinnest(
    thickness_um: Float[np.ndarray, "D W"], slice_mm: Float[np.ndarray, " D"], column_mm: Float[np.ndarray, " W"]
) -> ScanCentre:
    middle = (float(slice_mm[0] + slice_mm[-1]) / 2, float(column_mm[0] + column_mm[-1]) / 2)
    step = max(1, round(_STEP_MM / max(float(column_mm[1] - column_mm[0]), 1e-6))) if len(column_mm) > 1 else 1
    columns, values = column_mm[::step], thickness_um[:, ::step]
    known = np.isfinite(values)
    best = (np.inf, middle)
    searched_slices, searched_columns = _searched(slice_mm, middle[0]), _searched(columns, middle[1])
    for v in searched_slices:
        near = np.abs(slice_mm - v) <= _PIT_MM
        for u in searched_columns:
            across = np.abs(columns - u) <= _PIT_MM
            inside = np.hypot(slice_mm[near, None] - v, columns[None, across] - u) <= _PIT_MM
            inside &= known[np.ix_(near, across)]
            if inside.sum() >= 3:
                mean = float(values[np.ix_(near, across)][inside].mean())
                best = min(best, (mean, (float(v), float(u))))
    certainty = 0.0
    is_at_border = best[1][0] in searched_slices[[0, -1]] or best[1][1] in searched_columns[[0, -1]]
    if np.isfinite(best[0]) and not is_at_border:
        v, u = slice_mm[:, None] - best[1][0], columns[None] - best[1][1]
        radius = np.hypot(v, u)
        ring = (radius >= _RING_MM[0]) & (radius < _RING_MM[1]) & known
        vertical = np.abs(v) >= np.abs(u)
        quarters = (
            ring & vertical & (v > 0),
            ring & vertical & (v < 0),
            ring & ~vertical & (u > 0),
            ring & ~vertical & (u < 0),
        )
        drops = [float(values[quarter].mean()) - best[0] for quarter in quarters if quarter.sum() >= 3]
        # Two quarters at least, and a certainty that falls with every quarter that the scan does not cover.
        if len(drops) >= 2:
            certainty = float(np.clip(min(drops) / _CERTAIN_UM, 0, 1)) * (0.5 + len(drops) / 8)
    if certainty < MIN_CERTAINTY:
        return ScanCentre(*middle, "scan", round(certainty, 2))
    return ScanCentre(*best[1], "fovea", round(certainty, 2))


def _searched(positions_mm: Float[np.ndarray, " N"], middle_mm: float) -> Float[np.ndarray, " S"]:
    """The positions within `_CENTRAL_MM` of the middle, and on both sides the next one, which is the border."""
    inside = np.flatnonzero(np.abs(positions_mm - middle_mm) <= _CENTRAL_MM)
    if not len(inside):
        return positions_mm[[0, -1]]
    return positions_mm[max(inside[0] - 1, 0) : inside[-1] + 2]
