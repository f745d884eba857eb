"""Disease as a change of the retinal surfaces: position and extent of each lesion, and how the layers move.

Drusen are domes under the RPE. Intraretinal cysts are in INL and ONL with local thickening. Subretinal fluid is a lens
above the RPE. Atrophy removes the RPE in patches. An epiretinal membrane is a thin bright sheet with folds. A severity
in 0..1 sets number and extent, by `octjepa.phantom.person.LESION_SIZES`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from jaxtyping import Float
from scipy.ndimage import gaussian_filter1d

from octjepa.phantom.anatomy import BM, ELM, EZ, ILM, INL_OPL, IPL_INL, OPL_ONL, RPE, Anatomy, Map
from octjepa.phantom.person import LESION_SIZES, LesionSizes, Linear


@dataclass(frozen=True, eq=False)
class Cyst:
    """A fluid pocket: top and bottom in um within the window `slices` x `columns` of the maps."""

    slices: slice
    columns: slice
    top_um: Map
    bottom_um: Map


@dataclass(eq=False)
class Disease:
    """The diseased eye: its surfaces `[11, D, W]`, and the maps `[D, W]` that the renderer needs."""

    surfaces_um: Float[np.ndarray, "K D W"]
    drusen_um: Map  # height between Bruch's membrane and the RPE
    subretinal_um: Map  # height of fluid between the RPE and the photoreceptors
    atrophy: Map  # 0 healthy .. 1 without RPE
    epiretinal_um: Map  # thickness on the ILM, 0 if there is none
    cysts: list[Cyst] = field(default_factory=list)
    below_rpe: Literal["drusen", "fluid"] = "drusen"  # what fills `drusen_um`
    basal_um: Map | None = None  # what is left of the RPE on Bruch's membrane below such fluid; None draws none
    sheet_gap_um: Map | None = None  # between the epiretinal sheet and the ILM; None draws no gap


def make_disease(
    anatomy: Anatomy, lesions: dict[str, float], rng: np.random.Generator, sizes: LesionSizes = LESION_SIZES["plain"]
) -> Disease:
    """Puts `lesions` (name -> severity) into the eye, outer retina first: inner layers move with what is below."""
    zero = np.zeros_like(anatomy.u_mm)
    disease = Disease(anatomy.surfaces_um.copy(), zero, zero.copy(), zero.copy(), zero.copy())
    for name, draw in _DRAWN_IN_ORDER.items():
        if name in lesions:
            draw(disease, anatomy, lesions[name], rng, sizes)
    # No layer has negative thickness: where folds and sagging cross, the deeper surface stays and lifts the upper.
    retina = disease.surfaces_um[BM::-1]
    np.minimum.accumulate(retina, axis=0, out=retina)
    return disease


def add_lesion(
    disease: Disease, anatomy: Anatomy, name: str, severity: float, rng: np.random.Generator, sizes: LesionSizes
) -> None:
    """Adds the lesion `name` to `disease` in place. The caller adds lesions of the outer retina first."""
    _DRAWN_IN_ORDER[name](disease, anatomy, severity, rng, sizes)


def _at(figure: Linear, severity: float) -> float:
    first, more = figure
    return first + more * severity


def _random_point(rng: np.random.Generator, reach_mm: float) -> tuple[float, float]:
    """A point (u, v) drawn evenly from the disc of `reach_mm` around the fovea."""
    radius, angle = reach_mm * np.sqrt(rng.random()), rng.uniform(0, 2 * np.pi)
    return float(radius * np.cos(angle)), float(radius * np.sin(angle))


def _smoothed(shift_um: Map, anatomy: Anatomy) -> Map:
    """A shift of the outer retina as the stiffer inner layers follow it: spread over about a third of a millimetre."""
    u, v = anatomy.u_mm, anatomy.v_mm
    for pitch_mm, axis in ((abs(u[0, 1] - u[0, 0]), 1), (abs(v[1, 0] - v[0, 0]), 0)):
        shift_um = gaussian_filter1d(shift_um, 0.16 / float(pitch_mm), axis=axis, mode="nearest", truncate=3)
    return shift_um


def _drusen(disease: Disease, anatomy: Anatomy, severity: float, rng: np.random.Generator, sizes: LesionSizes) -> None:
    count = round(_at(sizes.drusen_count, severity))
    median, least, most = sizes.drusen_radius_mm
    steep, low, high = sizes.drusen_peak_um
    u, v = anatomy.u_mm, anatomy.v_mm
    height = np.zeros_like(u)
    cluster_u, cluster_v = _random_point(rng, 0.8)
    for _ in range(count):
        du, dv = _random_point(rng, 1.7)
        radius = float(np.clip(rng.lognormal(np.log(median), 0.35), least, most))
        peak = float(np.clip(steep * radius * rng.uniform(0.8, 1.6), low, high))
        r2 = ((u - cluster_u - du) ** 2 + (v - cluster_v - dv) ** 2) / radius**2
        # A dome with a flat foot; super-Gaussian, since drusen have steep flanks.
        np.maximum(height, peak * np.exp(-(r2**1.3)).astype(np.float32), out=height)
    height *= 1 - disease.atrophy
    height[height < 3] = 0
    lift_rpe(disease, height)


def lift_rpe(disease: Disease, height: Map) -> None:
    """Puts deposits of `height` um on Bruch's membrane; the layers above rise with them, the upper layers less."""
    disease.drusen_um = height
    surfaces = disease.surfaces_um
    for k, share in ((RPE, 1.0), (EZ, 0.97), (ELM, 0.92), (OPL_ONL, 0.5), (INL_OPL, 0.35), (IPL_INL, 0.25)):
        surfaces[k] -= share * height
    surfaces[:IPL_INL] -= 0.2 * height


def _subretinal_fluid(
    disease: Disease, anatomy: Anatomy, severity: float, rng: np.random.Generator, sizes: LesionSizes
) -> None:
    cu, cv = _random_point(rng, 0.9)
    first, more = sizes.subretinal_radius_mm
    radius = first + more * severity * rng.uniform(0.8, 1.1)
    stretch, turn = rng.uniform(0.8, 1.25), rng.uniform(0, np.pi)
    du, dv = anatomy.u_mm - cu, anatomy.v_mm - cv
    a = (np.cos(turn) * du + np.sin(turn) * dv) / (radius * stretch)
    b = (-np.sin(turn) * du + np.cos(turn) * dv) / (radius / stretch)
    lens = np.maximum(1 - a * a - b * b, 0) ** 0.9
    height = _at(sizes.subretinal_height_um, severity) * rng.uniform(0.8, 1.2) * lens.astype(np.float32)
    disease.subretinal_um = height
    surfaces = disease.surfaces_um
    for k in (EZ, ELM):
        surfaces[k] -= height
    lifted = _smoothed(height, anatomy)
    for k, share in ((OPL_ONL, 0.95), (INL_OPL, 0.92), (IPL_INL, 0.88)):
        surfaces[k] -= share * np.maximum(lifted, height - 12)
    surfaces[:IPL_INL] -= 0.85 * lifted


def _intraretinal_fluid(
    disease: Disease, anatomy: Anatomy, severity: float, rng: np.random.Generator, sizes: LesionSizes
) -> None:
    cu, cv = _random_point(rng, 1.1)
    radius = _at(sizes.swelling_radius_mm, severity)
    u, v = anatomy.u_mm, anatomy.v_mm
    swelling = np.exp(-((u - cu) ** 2 + (v - cv) ** 2) / radius**2).astype(np.float32)
    surfaces = disease.surfaces_um
    (inl, more_inl), (onl, more_onl) = sizes.swelling_inl_um, sizes.swelling_onl_um
    inl, onl = inl + more_inl * severity * rng.uniform(0.7, 1.3), onl + more_onl * severity * rng.uniform(0.7, 1.3)
    in_onl, in_inl, least, most = sizes.cyst_half_width_mm
    surfaces[: OPL_ONL + 1] -= onl * swelling
    surfaces[: IPL_INL + 1] -= inl * swelling
    spread = 0.75 * radius
    for _ in range(round(_at(sizes.cysts, severity))):
        outer = rng.random() < 0.55
        pu, pv = cu + rng.normal(0, spread * 0.65), cv + rng.normal(0, spread * 0.65)
        half_width = float(np.clip(rng.lognormal(np.log(in_onl if outer else in_inl), 0.4), least, most))
        half_deep = half_width * rng.uniform(0.9, 1.3)
        top, bottom = (OPL_ONL, ELM) if outer else (IPL_INL, INL_OPL)
        position, fill = rng.uniform(0.3, 0.7), rng.uniform(0.20, 0.46)
        near = np.maximum(((u - pu) / half_width) ** 2, ((v - pv) / half_deep) ** 2) < 1
        hit_slices, hit_columns = np.flatnonzero(near.any(axis=1)), np.flatnonzero(near.any(axis=0))
        if not hit_slices.size:
            continue
        window = (slice(hit_slices[0], hit_slices[-1] + 1), slice(hit_columns[0], hit_columns[-1] + 1))
        disc = np.maximum(1 - ((u[window] - pu) / half_width) ** 2 - ((v[window] - pv) / half_deep) ** 2, 0)
        roof, floor = surfaces[top][window], surfaces[bottom][window]
        half = np.minimum(np.sqrt(disc) * fill * (floor - roof), 1300 * half_width * np.sqrt(disc))
        middle = roof + position * (floor - roof)
        disease.cysts.append(Cyst(*window, (middle - half).astype(np.float32), (middle + half).astype(np.float32)))


def _atrophy(disease: Disease, anatomy: Anatomy, severity: float, rng: np.random.Generator, sizes: LesionSizes) -> None:
    u, v = anatomy.u_mm, anatomy.v_mm
    patches = np.zeros_like(u)
    cu, cv = _random_point(rng, 0.9)
    for k in range(int(rng.integers(1, sizes.atrophy_patches + 1))):
        radius = _at(sizes.atrophy_radius_mm, severity) * (1.0 if k == 0 else rng.uniform(0.4, 0.7))
        du, dv = (0.0, 0.0) if k == 0 else _random_point(rng, 1.4)
        angle = np.arctan2(v - cv - dv, u - cu - du)
        lobes = 1 + 0.16 * np.sin(2 * angle + rng.uniform(0, 6)) + 0.10 * np.sin(5 * angle + rng.uniform(0, 6))
        distance = np.hypot(u - cu - du, v - cv - dv) - radius * lobes
        np.maximum(patches, 1 / (1 + np.exp(np.clip(distance / 0.035, -30, 30))), out=patches)
    patches[patches < 0.05] = 0
    disease.atrophy = patches
    surfaces = disease.surfaces_um
    # RPE, photoreceptors and most of the outer nuclear layer are gone; the inner layers sink onto Bruch's membrane.
    lost_outer = patches * 0.9 * (surfaces[BM] - surfaces[ELM])
    lost_onl = patches * 0.72 * (surfaces[ELM] - surfaces[OPL_ONL])
    for k in (RPE, EZ, ELM):
        surfaces[k] += patches * 0.9 * (surfaces[BM] - surfaces[k])
    sunk = lost_outer + lost_onl
    surfaces[OPL_ONL] += sunk
    surfaces[:OPL_ONL] += _smoothed(sunk, anatomy)  # atrophy has sharp edges at the RPE, not at the ILM


def _epiretinal_membrane(
    disease: Disease, anatomy: Anatomy, severity: float, rng: np.random.Generator, sizes: LesionSizes
) -> None:
    u, v = anatomy.u_mm, anatomy.v_mm
    cu, cv = _random_point(rng, 0.6)
    reach = _at(sizes.epiretinal_reach_mm, severity)
    edge = np.hypot(u - cu, v - cv) - reach * (1 + 0.12 * anatomy.eye_map(rng, (3.0, 12.0)))
    cover = (1 / (1 + np.exp(np.clip(edge / 0.12, -30, 30)))).astype(np.float32)
    surfaces = disease.surfaces_um
    # The pit is pulled up and the inner retina thickened.
    pit = np.exp(-(u * u + v * v) / 0.8**2).astype(np.float32)
    at_pit, more, elsewhere = sizes.epiretinal_pull_um
    pull = cover * ((at_pit + more * severity) * pit + elsewhere * severity)
    for k, share in ((ILM, 1.0), (1, 0.95), (2, 0.75), (IPL_INL, 0.6), (INL_OPL, 0.45), (OPL_ONL, 0.3)):
        surfaces[k] -= share * pull
    # Folds: the ILM is crumpled square to the pull, while the layers below follow less and less.
    turn, wave = rng.uniform(-0.5, 0.5), rng.uniform(0.28, 0.48)
    phase = 2 * np.pi * (np.cos(turn) * u + np.sin(turn) * v) / wave + 1.6 * anatomy.eye_map(rng, (2.0, 8.0))
    size = np.clip(1 + 0.5 * anatomy.eye_map(rng, (2.0, 9.0)), 0.1, 2)
    folds = (cover * size * _at(sizes.epiretinal_folds_um, severity) * np.sin(phase)).astype(np.float32)
    surfaces[ILM] -= folds
    surfaces[1] -= 0.6 * folds
    surfaces[2] -= 0.3 * folds
    disease.epiretinal_um = cover * np.float32(_at(sizes.epiretinal_um, severity))
    disease.epiretinal_um[cover < 0.2] = 0


_DRAWN_IN_ORDER: Final = {
    "geographic_atrophy": _atrophy,
    "drusen": _drusen,
    "subretinal_fluid": _subretinal_fluid,
    "intraretinal_fluid": _intraretinal_fluid,
    "epiretinal_membrane": _epiretinal_membrane,
}
