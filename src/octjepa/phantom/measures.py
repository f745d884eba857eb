"""How much of a lesion an eye has: volumes, an area and the central thickness, counted in the truth."""

from __future__ import annotations

from typing import Final

import numpy as np

from octjepa.phantom.anatomy import BM, ILM
from octjepa.phantom.eye import Truth

# The columns of truth/eyes.tsv.
MEASURES: Final = (
    "intraretinal_fluid_mm3", "subretinal_fluid_mm3", "atrophy_mm2", "drusen_mm3", "central_thickness_um",
)  # fmt: skip
CENTRAL_SUBFIELD_MM: Final = 0.5  # radius of the middle of the ETDRS grid


def eye_measures(truth: Truth, spacing_mm: tuple[float, float, float]) -> dict[str, float]:
    """`MEASURES` of a scan with voxels of `spacing_mm` (slice, depth, column).

    A volume is the voxels of a lesion's mask, the area of atrophy its A-scans, and the central thickness the mean from
    the ILM to Bruch's membrane over the A-scans within 0.5 mm of the fovea; 0 where there is no lesion.
    """
    dz, dy, dx = spacing_mm
    voxels = {name: np.count_nonzero(mask) for name, mask in truth.masks.items()}
    atrophy = truth.masks.get("geographic_atrophy")
    volumes = (voxels.get(name, 0) * dz * dy * dx for name in ("intraretinal_fluid", "subretinal_fluid", "drusen"))
    intraretinal, subretinal, drusen = volumes
    area = 0.0 if atrophy is None else np.count_nonzero(atrophy.any(axis=1)) * dz * dx
    thickness = (truth.surfaces_px[BM] - truth.surfaces_px[ILM]) * dy * 1000
    z, x = (np.arange(n) * step for n, step in zip(thickness.shape, (dz, dx), strict=True))
    central = np.hypot(z[:, None] - truth.fovea_mm[0], x[None, :] - truth.fovea_mm[1]) <= CENTRAL_SUBFIELD_MM
    values = (intraretinal, subretinal, area, drusen, float(thickness[central].mean()))
    return dict(zip(MEASURES, values, strict=True))
