"""Phantom eyes of one chosen shape, with the true rows of both membranes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from octjepa.keys import generator
from octjepa.phantom import DIALECTS
from octjepa.phantom.anatomy import BM, ELM, ILM, RPE, make_anatomy
from octjepa.phantom.lesions import make_disease
from octjepa.phantom.render import render
from octjepa.volume import Laterality, OCTVolume

LESIONS = ("drusen", "subretinal_fluid", "intraretinal_fluid", "geographic_atrophy", "epiretinal_membrane")
SHAPES = ("healthy", *LESIONS, "pigment_epithelial_detachment", "macular_hole", "tilt_10", "tilt_minus_10", "myopic")


@dataclass(frozen=True, eq=False)
class ShapedEye:
    """`ilm` and `bm` [D, W] are rows of the native scan."""

    volume: OCTVolume
    ilm: np.ndarray
    bm: np.ndarray


def as_volume(pixels: np.ndarray, spacing_mm: tuple[float, float, float], eye: Laterality = "OD") -> OCTVolume:
    provenance = {"slice": "positions", "depth": "shared", "column": "shared"}
    return OCTVolume(pixels, spacing_mm, provenance, "1", "phantom", laterality=eye)


@lru_cache(maxsize=32)
def shaped_eye(
    device: str, shape: str = "healthy", seed: int = 0, eye: Laterality = "OD", light: int = 0, motion: int = 0
) -> ShapedEye:
    """A pure function. `light` draws another speckle, noise and brightness; `motion` other axial jumps of B-scans."""
    dialect = DIALECTS[device]
    if shape.startswith("tilt") or shape == "myopic":  # instruments that meet such eyes have the depth for them
        depth, rows, columns = dialect.small.shape
        dialect = replace(dialect, small=replace(dialect.small, shape=(depth, rows + 130, columns)))
    grid = dialect.small
    anatomy = make_anatomy(seed, seed, eye, dialect, "small")
    lesions = {shape: 0.8} if shape in LESIONS else {}
    disease = make_disease(anatomy, lesions, generator("shaped", seed, shape))
    surfaces, (u, v) = disease.surfaces_um, (anatomy.u_mm, anatomy.v_mm)
    radius2 = (u - 0.4) ** 2 + (v - 0.2) ** 2
    if shape == "pigment_epithelial_detachment":
        dome = (280 * np.maximum(1 - radius2 / 0.8**2, 0) ** 0.7).astype(np.float32)
        disease.drusen_um = dome
        surfaces[:BM] -= dome
    elif shape == "macular_hole":
        wall = 1 / (1 + np.exp(-(np.hypot(u, v) - 0.22) / 0.02))
        for layer in range(ELM + 1):
            surfaces[layer] = surfaces[RPE] - 12 + wall * (surfaces[layer] - surfaces[RPE] + 12)
    elif shape.startswith("tilt"):
        wanted = np.tan(np.radians(10)) * (1 if shape == "tilt_10" else -1)
        x = np.linspace(-0.5, 0.5, grid.shape[2]) * grid.spacing_mm[2] * grid.shape[2]
        have = np.polyfit(x, surfaces[BM].mean(axis=0) / 1000, 1)[0]
        surfaces += (1000 * (wanted - have) * x).astype(np.float32)
    elif shape == "myopic":
        surfaces += (-1000 * (u**2 + v**2) * (1 / (2 * 12) - 1 / (2 * 38))).astype(np.float32)
    if motion:
        jumps = generator("motion", motion).normal(0, 12, grid.shape[0]).astype(np.float32)
        surfaces += jumps[:, None]
    if shape not in ("healthy", *LESIONS):  # as an operator would, in the middle of the window
        surfaces += grid.shape[1] * grid.spacing_mm[1] * 600 - (surfaces[BM].max() + surfaces[BM].min()) / 2
    surfaces[:] = np.maximum.accumulate(surfaces, axis=0) if shape == "macular_hole" else surfaces
    pixels = render(anatomy, disease, dialect, grid, generator("light", seed, light, device))
    rows = surfaces / (grid.spacing_mm[1] * 1000)
    inner = rows[ILM] - disease.epiretinal_um / (grid.spacing_mm[1] * 1000)  # the band begins at a membrane on the ILM
    return ShapedEye(as_volume(pixels, grid.spacing_mm, eye), inner, rows[BM])
