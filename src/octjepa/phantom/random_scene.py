"""Randomised phantom eyes for training a segmentation network: reflectivity before image formation, and the truth.

`draw_scene` is a pure function of (seed, index, ranges). It returns a `Scene`: the noise-free backscattered power of a
few neighbouring B-scans, eight layer boundaries, and the class of every voxel. Speckle, optics and display are not part
of a scene: `octjepa.tasks.segmenter.image_formation` adds them when a training batch is made, so one scene yields many
different images.

Everything that a disease or an eye can vary is drawn from `SceneRanges`: thickness of every layer, contrast between
layers, curvature and tilt, oedema (diffuse swelling, lakes in the outer nuclear layer with septa, cysts in the inner
nuclear layer, a central cyst that fills the foveal pit, fluid of free shape), subretinal fluid, drusen and detachments
of the pigment epithelium, atrophy, membranes, lost photoreceptors, exudates with shadows, hyperreflective foci, and the
edge of the optic disc. A network that saw only one kind of eye fails on real eyes; measurements are in
`lab/2026-11.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from jaxtyping import Float, UInt8
from scipy.ndimage import gaussian_filter1d

from octjepa.keys import generator
from octjepa.layers import BOUNDARIES
from octjepa.phantom.anatomy import (
    BM,
    BRUCH_RADIUS_MM,
    ELM,
    EZ,
    ILM,
    INL_OPL,
    IPL_INL,
    OPL_ONL,
    RNFL_GCL,
    RPE,
    SCLERA,
    SURFACES,
    Anatomy,
    Map,
    draw_vessels,
    layer_thicknesses_um,
    smooth_map,
)
from octjepa.phantom.lesions import Cyst, Disease, add_lesion
from octjepa.phantom.person import LESION_SIZES, LESIONS, LesionSizes
from octjepa.phantom.render import DECIBEL, stack_sheets, tissue_sheets
from octjepa.phantom.scan import Ripple, ScanGeometry

BOUNDARY_SURFACES: Final = tuple(SURFACES.index(name) for name in BOUNDARIES)
INTRARETINAL, SUBRETINAL, SUB_RPE = 1, 2, 3  # indices in CLASSES

# A scene stores power as uint8: 10 log10(power) in steps of 1 / STEPS_PER_DB, starting at LOWEST_DB.
STEPS_PER_DB: Final = 5
LOWEST_DB: Final = -12.0

ROWS: Final = 256
COLUMNS: Final = 320
ROW_MM: Final = 0.0078
COLUMN_MM: Final = 0.0234
_SIZE: Final = "scene"  # part of the key of the random draws

Pair = tuple[float, float]


@dataclass(frozen=True)
class SceneRanges:
    """How far the draws of a scene spread. Pairs are the ends of a uniform range.

    `optics` is the level of `image_formation` that the scene asks for: 0 the four instruments as they are, 1 moderately
    and 2 strongly randomised. `contrast_stretch` multiplies the differences between layers, in dB.
    """

    name: str
    optics: Literal[0, 1, 2]
    contrast_stretch: Pair
    contrast_jitter_db: float
    fluid_db: Pair
    thickness_sd: float
    thinning_probability: float
    oedema_probability: float
    oedema_scale: Pair
    free_fluid_probability: float
    texture_probability: float  # exudates, foci, lost photoreceptors, disorganised layers
    tilt_degrees: float
    curvature_per_mm: Pair
    sizes: tuple[LesionSizes, ...]
    lesion_probability: tuple[float, ...] = (0.22, 0.0, 0.2, 0.1, 0.15)  # in the order of LESIONS
    scan_offset_mm: float = 1.2


_LARGE = replace(
    LESION_SIZES["plain"],
    subretinal_radius_mm=(0.2, 1.4),
    subretinal_height_um=(15, 330),
    drusen_count=(3, 40),
    drusen_radius_mm=(0.12, 0.03, 0.5),
    drusen_peak_um=(450, 20, 230),
    atrophy_radius_mm=(0.2, 1.2),
    epiretinal_pull_um=(10, 110, 30),
    epiretinal_folds_um=(2, 13),
    epiretinal_um=(4, 18),
)
# `as_is` keeps contrast, thickness and lesion sizes of the phantom cohort; its cysts respect the layers.
AS_IS: Final = SceneRanges(
    name="as_is",
    optics=0,
    contrast_stretch=(1, 1),
    contrast_jitter_db=0.0,
    fluid_db=(-8, -8),
    thickness_sd=0.0,
    thinning_probability=0.0,
    oedema_probability=0.0,
    oedema_scale=(0, 0),
    free_fluid_probability=0.0,
    texture_probability=0.0,
    tilt_degrees=3.5,
    curvature_per_mm=(1 / 42, 1 / 35),
    sizes=(LESION_SIZES["plain"], LESION_SIZES["exam"]),
    lesion_probability=(0.2, 0.5, 0.3, 0.12, 0.2),
    scan_offset_mm=0.5,
)
MODERATE: Final = SceneRanges(
    name="moderate",
    optics=1,
    contrast_stretch=(0.75, 1.1),
    contrast_jitter_db=0.8,
    fluid_db=(-8, 3),
    thickness_sd=0.10,
    thinning_probability=0.1,
    oedema_probability=0.6,
    oedema_scale=(0.3, 1.1),
    free_fluid_probability=0.2,
    texture_probability=0.5,
    tilt_degrees=4.0,
    curvature_per_mm=(1 / 60, 1 / 25),
    sizes=(LESION_SIZES["plain"], _LARGE),
)
STRONG: Final = SceneRanges(
    name="strong",
    optics=2,
    contrast_stretch=(0.45, 1.15),
    contrast_jitter_db=1.6,
    fluid_db=(-8, 7),
    thickness_sd=0.2,
    thinning_probability=0.2,
    oedema_probability=0.78,
    oedema_scale=(0.4, 1.5),
    free_fluid_probability=0.3,
    texture_probability=0.8,
    tilt_degrees=4.5,
    curvature_per_mm=(-1 / 150, 1 / 14),
    sizes=(_LARGE,),
)
# Ranges for validation: other seeds, and other spreads than any of the training ranges.
SHIFTED: Final = replace(
    STRONG,
    name="shifted",
    contrast_stretch=(0.6, 1.25),
    contrast_jitter_db=2.0,
    fluid_db=(-4, 5),
    thickness_sd=0.15,
    oedema_probability=0.7,
    oedema_scale=(0.2, 1.0),
    free_fluid_probability=0.15,
    curvature_per_mm=(1 / 80, 1 / 18),
)
RANGES: Final = {ranges.name: ranges for ranges in (AS_IS, MODERATE, STRONG, SHIFTED)}


@dataclass(frozen=True, eq=False)
class Scene:
    """A few neighbouring B-scans of one eye before image formation, and the truth about them.

    `power` holds decibels as `(10 log10 power - LOWEST_DB) * STEPS_PER_DB`; the noise floor has power 1.
    `boundaries_px` is the fractional row of each of `BOUNDARIES`, NaN where a grader would draw none (inside the optic
    disc). `classes` indexes `CLASSES`. `spacing_mm` is (slice, row, column). `optics` is copied from the ranges.
    """

    power: UInt8[np.ndarray, "D H W"]
    boundaries_px: Float[np.ndarray, "D 8 W"]
    classes: UInt8[np.ndarray, "D H W"]
    spacing_mm: tuple[float, float, float]
    optics: int


@dataclass(eq=False)
class _Contents:
    """Disease of a scene, beyond what `Disease` holds; all maps are `[D, W]`."""

    disease: Disease
    ez_loss: Map  # 0 intact photoreceptors .. 1 lost
    fog: Map  # 0 distinct inner layers .. 1 no contrast between them
    disc: Map  # 0 retina .. 1 optic disc
    cyst_db: list[tuple[float, float]]  # of each cyst, at its roof and at its floor


def draw_scene(
    seed: int, index: int, ranges: SceneRanges, slices: int = 6, slice_pitch_mm: float | None = None
) -> Scene:
    """Scene number `index` of the sequence `seed`, with `slices` B-scans of 256 rows and 320 columns.

    slice_pitch_mm: distance of neighbouring B-scans; None: drawn between 0.03 and 0.4 mm. A pure function: equal
    arguments give equal bytes.
    """
    rng = generator("phantom", seed, _SIZE, ranges.name, index)
    drawn_mm = float(np.exp(rng.uniform(np.log(0.03), np.log(0.4))))
    pitch_mm = drawn_mm if slice_pitch_mm is None else slice_pitch_mm
    anatomy = _draw_anatomy(rng, ranges, slices, pitch_mm)
    contrast = _contrast(rng, ranges)
    contents = _draw_disease(rng, ranges, anatomy, contrast["onl"])
    _set_depth(rng, contents.disease, anatomy)
    power = _power(rng, ranges, anatomy, contents, contrast)
    boundaries, classes = _truth(contents)
    decibel = np.log10(np.maximum(power, 10 ** (LOWEST_DB / 10), out=power), out=power)
    decibel *= 10 * STEPS_PER_DB
    decibel += 0.5 - LOWEST_DB * STEPS_PER_DB
    stored = np.clip(decibel, 0, 255, out=decibel).astype(np.uint8)
    return Scene(stored, boundaries, classes, (pitch_mm, ROW_MM, COLUMN_MM), ranges.optics)


def _draw_anatomy(rng: np.random.Generator, ranges: SceneRanges, slices: int, pitch_mm: float) -> Anatomy:
    """A healthy eye, anywhere within the macula, with thickness, curvature and tilt drawn from the ranges."""
    near_fovea = rng.random() < 0.55
    centre_z = rng.normal(0, 0.35) if near_fovea else rng.uniform(-2.7, 2.7)
    centre_x = rng.uniform(-ranges.scan_offset_mm, ranges.scan_offset_mm)
    scan = ScanGeometry(
        x_mm=((np.arange(COLUMNS) - (COLUMNS - 1) / 2) * COLUMN_MM + centre_x).astype(np.float32),
        z_mm=((np.arange(slices) - (slices - 1) / 2) * pitch_mm + centre_z).astype(np.float32),
        nasal=1.0 if rng.random() < 0.5 else -1.0,
        upward=1.0 if rng.random() < 0.5 else -1.0,
    )
    jump = rng.normal(0, 0.03, slices) if ranges.optics and rng.random() < 0.3 else np.zeros(slices)
    u = (scan.nasal * (scan.x_mm[None, :] + jump[:, None])).astype(np.float32)
    v = np.broadcast_to((scan.upward * scan.z_mm)[:, None], u.shape).astype(np.float32)
    traits = rng.standard_normal(16)
    thick = layer_thicknesses_um(u, v, traits)
    if ranges.thickness_sd:
        spread = ranges.thickness_sd
        factor = np.exp(rng.normal(0, spread, 9) * (1, 1, 1, 1, 1, 1, 0.4, 0.6, 0.6)).astype(np.float32)
        wave = np.stack([Ripple.draw(rng).at(u, v) for _ in range(3)])
        thick[0] = _nerve_fibres(rng, thick[0], u, v, spread)
        thick = thick * factor[:, None, None] * np.exp(0.6 * spread * wave[[0, 0, 1, 1, 2, 2, 2, 0, 1]])
        if rng.random() < ranges.thinning_probability:  # glaucoma, or atrophy of the inner or outer retina
            inner = rng.random() < 0.6
            thick[0 if inner else 5 : 3 if inner else 6] *= rng.uniform(0.15, 0.8)
        # Shallow pits and foveal hypoplasia: inner layers continue over the fovea.
        if rng.random() < 0.12:
            at_pit = np.exp(-(u * u + v * v) / rng.uniform(0.3, 0.7) ** 2)
            thick[:5] += rng.uniform(5, 35) * at_pit
    curvature = rng.uniform(*ranges.curvature_per_mm) if ranges.optics else 1 / BRUCH_RADIUS_MM
    tilt = np.tan(np.radians(rng.normal(0, ranges.tilt_degrees)))
    bowl = -500 * curvature * (scan.x_mm[None, :] ** 2 + scan.z_mm[:, None] ** 2)
    ripple = Ripple.draw(rng).at(scan.x_mm[None, :], scan.z_mm[:, None])
    motion = np.cumsum(rng.normal(0, rng.uniform(0, 10), slices))
    rough = 3.0 if not ranges.optics else float(rng.choice((3.0, 8.0, 16.0), p=(0.6, 0.25, 0.15)))
    bruch = bowl + 1000 * tilt * scan.x_mm[None, :] + rough * ripple + motion[:, None]
    choroid = 250 * np.exp(0.35 * traits[8]) - 22 * u * (u > 0) - 6 * np.abs(u) + 14 * Ripple.draw(rng).at(u, v)
    surfaces = np.empty((len(SURFACES), *u.shape), np.float32)
    surfaces[BM] = bruch
    surfaces[:BM] = bruch - np.cumsum(thick[::-1], axis=0)[::-1]
    surfaces[SCLERA] = bruch + np.maximum(choroid, 70)
    return Anatomy(surfaces, u, v, draw_vessels(u, v, traits, rng), (0.0, 0.0), scan, scan)


def _nerve_fibres(rng: np.random.Generator, cohort_um: Map, u: Map, v: Map, spread: float) -> Map:
    """Thickness in um of the nerve fibre layer, from thin to swollen, with bundles.

    The cohort's layer is thin: about 12 um temporally and 18 um above the fovea, where normative data have 17 to 20 and
    26 (Invernizzi et al. 2018). Graders draw a layer of 10 um or more also where hardly a fibre is seen.
    """
    outside_pit = 1 - np.exp(-(u * u + v * v))
    bundles = np.maximum(Ripple.draw(rng).at(u, v), 0) * outside_pit
    gain = np.exp(rng.normal(0.1, 0.15 + spread))
    return cohort_um * gain + rng.uniform(2, 18) + bundles * (rng.uniform(0, 150 * spread) if rng.random() < 0.5 else 0)


def _set_depth(rng: np.random.Generator, disease: Disease, anatomy: Anatomy) -> None:
    """Shifts everything in depth, in position, so that the retina lies somewhere in the window of the scene."""
    window = ROWS * ROW_MM * 1000
    top, bottom = float(disease.surfaces_um[ILM].min()), float(disease.surfaces_um[BM].max())
    room = window - (bottom - top)
    shift = rng.uniform(0.1, 0.75) * room - top if room > 0 else window / 2 - (top + bottom) / 2
    disease.surfaces_um += np.float32(shift)
    anatomy.surfaces_um[:] += np.float32(shift)
    for cyst in disease.cysts:
        cyst.top_um[:] += np.float32(shift)
        cyst.bottom_um[:] += np.float32(shift)


# --- disease


def _draw_disease(rng: np.random.Generator, ranges: SceneRanges, anatomy: Anatomy, onl_db: float) -> _Contents:
    """Lesions from the outer retina inwards: inner layers move with what lies below them."""
    zero = np.zeros_like(anatomy.u_mm)
    surfaces = anatomy.surfaces_um
    disease = Disease(surfaces.copy(), zero, zero.copy(), zero.copy(), zero.copy())
    contents = _Contents(disease, zero.copy(), zero.copy(), zero.copy(), [])
    sizes = ranges.sizes[int(rng.integers(len(ranges.sizes)))]
    present = {
        name: float(rng.random())
        for name, chance in zip(LESIONS, ranges.lesion_probability, strict=True)
        if rng.random() < chance
    }
    for name in ("geographic_atrophy", "drusen", "subretinal_fluid", "intraretinal_fluid"):
        if name in present:
            add_lesion(disease, anatomy, name, present[name], rng, sizes)
    if "drusen" in present and ranges.optics and rng.random() < 0.35:
        disease.below_rpe, disease.basal_um = "fluid", np.where(disease.drusen_um > 0, np.float32(8), np.float32(0))
    if rng.random() < ranges.oedema_probability:
        _add_oedema(rng, ranges, anatomy, contents)
    if rng.random() < ranges.free_fluid_probability:
        _add_free_fluid(rng, anatomy, disease)
    if "epiretinal_membrane" in present:
        add_lesion(disease, anatomy, "epiretinal_membrane", present["epiretinal_membrane"], rng, sizes)
    retina = disease.surfaces_um[BM::-1]
    np.minimum.accumulate(retina, axis=0, out=retina)
    if rng.random() < ranges.texture_probability:
        contents.ez_loss = _patches(rng, anatomy, 0.5) * np.float32(rng.uniform(0.3, 1))
    if rng.random() < 0.6 * ranges.texture_probability:
        contents.fog = _patches(rng, anatomy, 0.8) * np.float32(rng.uniform(0.2, 0.9))
    if ranges.optics:
        _add_disc(rng, anatomy, contents)
    low, high = ranges.fluid_db
    common = rng.uniform(low, high)
    if rng.random() < 0.15 * ranges.optics:  # turbid fluid, about as bright as the outer nuclear layer or brighter
        common = onl_db + rng.normal(0.5, 2.0)
    for _ in disease.cysts:
        base = common + rng.normal(0, 0.8 if ranges.optics else 0)
        slope = rng.normal(0, 1.5) if ranges.optics else 0.0
        contents.cyst_db.append((base - slope, base + slope))
    return contents


def _patches(rng: np.random.Generator, anatomy: Anatomy, radius_mm: float) -> Map:
    """A map of 0..1 with one to three soft patches of about `radius_mm`."""
    out = np.zeros_like(anatomy.u_mm)
    for _ in range(int(rng.integers(1, 4))):
        radius = radius_mm * np.exp(rng.normal(0, 0.5))
        cu, cv = rng.normal(0, 0.9, 2)
        r2 = ((anatomy.u_mm - cu) ** 2 + (anatomy.v_mm - cv) ** 2) / radius**2
        np.maximum(out, 1 / (1 + np.exp(np.clip((r2 - 1) * 6, -30, 30))), out=out)
    return out


def _along_columns(values: Map, sigma_mm: float) -> Map:
    return gaussian_filter1d(values, sigma_mm / COLUMN_MM, axis=1, mode="nearest", truncate=3)


def _push_apart(surfaces: np.ndarray, thickness: Map, top: int, bottom: int, down: float) -> Map:
    """Makes room of `thickness` um between the surfaces `top` and `bottom`, in place; returns the room they have.

    A share `down` pushes the surfaces from `bottom` to the outer plexiform layer into the outer nuclear layer as far as
    it gives way. The rest lifts `top` and everything above; surfaces farther away follow a smoother relief.
    """
    lowered = np.minimum(down * thickness, 0.85 * np.maximum(surfaces[ELM] - surfaces[max(bottom, OPL_ONL)] - 8, 0))
    if bottom <= OPL_ONL:
        for k in range(bottom, OPL_ONL + 1):
            surfaces[k] += lowered
    else:
        lowered = np.zeros_like(thickness)
    lifted = thickness - lowered
    relief = lifted
    for k in range(top, -1, -1):
        surfaces[k] -= relief
        if k:
            relief = np.maximum(_along_columns(relief, 0.05), relief * 0.8) if k > 1 else _along_columns(relief, 0.08)
    retina = surfaces[BM::-1]
    np.minimum.accumulate(retina, axis=0, out=retina)
    return surfaces[bottom] - surfaces[top]


def _oval(
    rng: np.random.Generator, anatomy: Anatomy, centre: tuple[float, float], half_width_mm: float, stretch: float
) -> Map:
    """Height 0..1 of a rounded pocket with a wavy outline."""
    du, dv = anatomy.u_mm - centre[0], anatomy.v_mm - centre[1]
    angle = np.arctan2(dv, du)
    wave = 1 + 0.12 * np.sin(3 * angle + rng.uniform(0, 6)) + 0.08 * np.sin(5 * angle + rng.uniform(0, 6))
    r2 = np.abs(du / half_width_mm) ** rng.uniform(1.7, 2.6) + (dv / (half_width_mm * stretch)) ** 2
    return (np.maximum(wave - r2, 0) ** rng.uniform(0.3, 0.6)).astype(np.float32)


def _cells(rng: np.random.Generator, anatomy: Anatomy, centre: tuple[float, float], reach_mm: float, count: int) -> Map:
    """Height 0..1 of a lake that thin septa divide into about `count` chambers (a Voronoi diagram of random points)."""
    points_u = centre[0] + rng.normal(0, 0.55 * reach_mm, count)
    points_v = centre[1] + rng.normal(0, 0.55 * reach_mm, count)
    stretch = rng.uniform(0.8, 2.0)
    distance = np.hypot(
        anatomy.u_mm[None] - points_u[:, None, None], (anatomy.v_mm[None] - points_v[:, None, None]) / stretch
    ).astype(np.float32)
    nearest = np.partition(distance, 1, axis=0)[:2] if count > 1 else np.concatenate([distance, distance + 1])
    wall = 0.5 * (nearest[1] - nearest[0])  # about the distance to the septum, in mm
    septum = rng.choice((0.0, rng.uniform(0.004, 0.03)), p=(0.15, 0.85))
    edge = np.maximum(
        reach_mm * rng.uniform(0.5, 1.0) * rng.uniform(0.6, 1.3, count)[distance.argmin(0)] - nearest[0], 0
    )
    size = rng.uniform(0.01, 0.08)
    rounded = np.minimum(np.maximum(wall - septum, 0) / size, 1) ** 0.5 * np.minimum(edge / (1.5 * size), 1) ** 0.6
    return rounded.astype(np.float32)


def _pocket(disease: Disease, roof: Map, height: Map) -> None:
    """Adds a fluid pocket of `height` um below `roof`."""
    if not (height > 2).any():
        return
    whole = (slice(0, height.shape[0]), slice(0, height.shape[1]))
    disease.cysts.append(Cyst(*whole, roof.astype(np.float32), (roof + height).astype(np.float32)))


def _add_oedema(rng: np.random.Generator, ranges: SceneRanges, anatomy: Anatomy, contents: _Contents) -> None:
    """Macular oedema: diffuse swelling, lakes below the outer plexiform layer, cysts in the inner nuclear layer.

    Cysts push the layers apart as graders draw them: the boundaries of the outer plexiform layer run below cysts of the
    inner nuclear layer, and above lakes of the outer nuclear layer. A pocket never leaves its layer.
    """
    disease, surfaces = contents.disease, contents.disease.surfaces_um
    u, v = anatomy.u_mm, anatomy.v_mm
    scale = rng.uniform(*ranges.oedema_scale)
    # The focus is the fovea, or a point in the scanned field.
    focus = (
        tuple(rng.normal(0, 0.25, 2))
        if rng.random() < 0.6
        else (float(rng.choice(u[0])), float(rng.choice(v[:, 0]) + rng.normal(0, 0.2)))
    )
    centre = (float(focus[0]), float(focus[1]))
    reach = rng.uniform(0.5, 2.0)
    r2 = ((u - centre[0]) ** 2 + (v - centre[1]) ** 2) / reach**2
    envelope = np.exp(-(r2 ** rng.uniform(0.8, 1.6))).astype(np.float32)
    swelling = envelope * np.float32(scale * rng.uniform(10, 170))
    _push_apart(surfaces, swelling * np.float32(rng.uniform(0.3, 1)), OPL_ONL, ELM, 0.0)
    _push_apart(surfaces, swelling * np.float32(rng.uniform(0, 0.5)), IPL_INL, INL_OPL, 0.0)
    _push_apart(surfaces, swelling * np.float32(rng.uniform(0, 0.3)), RNFL_GCL, IPL_INL, 0.0)
    if rng.random() < 0.7:  # lakes in the outer, or pillars in the inner nuclear layer
        shape = _cells(rng, anatomy, centre, reach, int(rng.integers(2, 40)))
        height = shape * np.sqrt(envelope) * np.float32(scale * rng.uniform(50, 330))
        body = _along_columns(height, 0.02)
        if rng.random() < 0.3:
            _inner_nuclear_cysts(rng, contents, height, rng.uniform(0.3, 0.95))
        else:
            room = _push_apart(surfaces, body * np.float32(rng.uniform(0.5, 1)), OPL_ONL, ELM, 0.0)
            fits = np.minimum(height, rng.uniform(0.6, 0.97) * np.maximum(room - 6, 0))
            _pocket(disease, surfaces[OPL_ONL] + rng.uniform(0, 0.5) ** 2 * (room - fits) + 2, fits)
    count = (0, int(rng.integers(1, 8)), int(rng.integers(8, 30)))[int(rng.choice(3, p=(0.35, 0.4, 0.25)))]
    shapes = np.zeros_like(u)
    for _ in range(count):
        half = float(np.clip(rng.lognormal(np.log(0.09), 0.5), 0.025, 0.4))
        position = centre[0] + rng.normal(0, 0.5 * reach), centre[1] + rng.normal(0, 0.5 * reach)
        tall = min(scale * rng.uniform(0.5, 2.5) * half * 1000, 320)
        np.maximum(shapes, tall * _oval(rng, anatomy, position, half, rng.uniform(0.8, 2)), out=shapes)
    if count:
        _inner_nuclear_cysts(rng, contents, shapes, rng.uniform(0.2, 0.9))
    if rng.random() < 0.4:  # a central cyst fills the pit
        position = float(rng.normal(0, 0.08)), float(rng.normal(0, 0.08))
        oval = _oval(rng, anatomy, position, rng.uniform(0.12, 0.5), rng.uniform(0.8, 1.3))
        dome = oval * np.float32(scale * rng.uniform(120, 430))
        if rng.random() < 0.75:
            _inner_nuclear_cysts(rng, contents, dome, rng.uniform(0.4, 0.9))
        else:
            room = _push_apart(surfaces, dome, OPL_ONL, ELM, 0.0)
            fits = np.minimum(dome, 0.95 * np.maximum(room - 4, 0))
            _pocket(disease, surfaces[OPL_ONL] + rng.uniform(0, 0.3) * (room - fits) + 2, fits)
    if rng.random() < 0.2:  # small cysts between ganglion cells
        shapes = np.zeros_like(u)
        for _ in range(int(rng.integers(1, 8))):
            half = rng.uniform(0.02, 0.1)
            position = centre[0] + rng.normal(0, 0.6 * reach), centre[1] + rng.normal(0, 0.6 * reach)
            np.maximum(shapes, rng.uniform(20, 90) * _oval(rng, anatomy, position, half, 1.2), out=shapes)
        room = _push_apart(surfaces, 0.6 * shapes, RNFL_GCL, IPL_INL, 0.0)
        fits = np.minimum(shapes, 0.9 * np.maximum(room - 4, 0))
        _pocket(disease, surfaces[RNFL_GCL] + rng.uniform(0.1, 0.8) * (room - fits), fits)
    if rng.random() < 0.5:
        contents.ez_loss = np.maximum(contents.ez_loss, envelope * np.float32(rng.uniform(0.3, 1)))
    if rng.random() < 0.4:
        contents.fog = np.maximum(contents.fog, envelope * np.float32(rng.uniform(0.2, 0.9)))


def _inner_nuclear_cysts(rng: np.random.Generator, contents: _Contents, height: Map, down: float) -> None:
    """Pockets of `height` um in the inner nuclear layer, which push the outer plexiform layer down."""
    surfaces = contents.disease.surfaces_um
    earlier = contents.disease.cysts[:]
    before = surfaces[OPL_ONL].copy()
    room = _push_apart(surfaces, height * np.float32(rng.uniform(0.75, 1)), IPL_INL, INL_OPL, down)
    moved = surfaces[OPL_ONL] - before
    # Lakes below are squeezed from above.
    for cyst in earlier:
        cyst.top_um[:] = np.minimum(np.maximum(cyst.top_um, cyst.top_um + moved), cyst.bottom_um)
    fits = np.minimum(height, rng.uniform(0.85, 0.98) * np.maximum(room - 4, 0))
    _pocket(contents.disease, surfaces[IPL_INL] + rng.uniform(0.05, 0.9) * (room - fits) + 1, fits)


def _add_free_fluid(rng: np.random.Generator, anatomy: Anatomy, disease: Disease) -> None:
    """Ovals of any size and place between ILM and EZ, whatever the layers. The boundaries run through them."""
    surfaces = disease.surfaces_um
    cu, cv = float(rng.choice(anatomy.u_mm[0])), float(rng.choice(anatomy.v_mm[:, 0]))
    spread = rng.uniform(0.2, 1.3)
    for _ in range(int(rng.integers(1, 14))):
        half = float(np.clip(rng.lognormal(np.log(rng.choice((0.05, 0.12, 0.3))), 0.4), 0.02, 0.9))
        position = cu + rng.normal(0, spread), cv + rng.normal(0, spread)
        shape = _oval(rng, anatomy, position, half, rng.uniform(0.8, 2.5))
        roof, floor = surfaces[ILM] + rng.uniform(15, 60), surfaces[EZ] - rng.uniform(0, 30)
        low, high = np.sort(rng.random(2))
        high = max(high, low + 0.12)
        middle = roof + 0.5 * (low + high) * (floor - roof)
        deep = 0.5 * (high - low) * np.maximum(floor - roof, 0) * shape
        if rng.random() < 0.6:
            deep = np.minimum(deep, 1500 * half * shape)
        _pocket(disease, middle - deep, 2 * deep)


def _add_disc(rng: np.random.Generator, anatomy: Anatomy, contents: _Contents) -> None:
    """The edge of the optic disc about 4.2 mm nasal of the fovea: all layers but the nerve fibres end."""
    du, dv = anatomy.u_mm - rng.uniform(3.9, 4.6), anatomy.v_mm - rng.uniform(0.1, 0.6)
    distance = np.hypot(du / rng.uniform(0.75, 0.95), dv / rng.uniform(0.8, 1.0))
    contents.disc = (1 / (1 + np.exp(np.clip((distance - 1) / 0.03, -30, 30)))).astype(np.float32)
    if contents.disc.max() < 0.02:
        return
    surfaces = contents.disease.surfaces_um
    rim = np.exp(-(((distance - 1.05) / 0.3) ** 2)) * rng.uniform(0, 160)
    cup = np.maximum(0.7 - distance, 0) * rng.uniform(0, 900)
    surfaces[ILM] += (cup - rim).astype(np.float32)
    surfaces[RNFL_GCL : SCLERA + 1] += contents.disc * np.float32(rng.uniform(300, 1500))
    np.maximum(surfaces[RNFL_GCL:], surfaces[ILM], out=surfaces[RNFL_GCL:])


# --- reflectivity


def _contrast(rng: np.random.Generator, ranges: SceneRanges) -> dict[str, float]:
    """Reflectivity of every tissue in dB, from the ranges."""
    if not ranges.contrast_jitter_db:
        return dict(DECIBEL)
    mean = float(np.mean([value for name, value in DECIBEL.items() if name != "fluid"]))
    stretch, level = rng.uniform(*ranges.contrast_stretch), rng.normal(0, 2)
    jitter = ranges.contrast_jitter_db
    out = {name: mean + level + stretch * (value - mean) + rng.normal(0, jitter) for name, value in DECIBEL.items()}
    # Nerve fibres are brighter than the ganglion cells below them, more where light meets them at a right angle.
    out["rnfl"] = max(out["rnfl"], out["gcl"]) + rng.uniform(0, 2.5 * jitter)
    # Below the RPE there is drusen material, or fluid that may be turbid.
    out["fluid"] = rng.uniform(ranges.fluid_db[0], ranges.fluid_db[1] + 2)
    out["hyaloid"] = rng.uniform(-6, 11)
    return out


def _power(
    rng: np.random.Generator,
    ranges: SceneRanges,
    anatomy: Anatomy,
    contents: _Contents,
    contrast: dict[str, float],
) -> Float[np.ndarray, "D H W"]:
    """Backscattered power of every voxel, in units of the noise floor."""
    disease = contents.disease
    tops, values = tissue_sheets(anatomy, disease, rng.normal(0, 1 + ranges.optics), rng, contrast)
    s = disease.surfaces_um
    values = values.copy()
    if contents.fog.any():
        inner = (tops >= s[ILM] + 5) & (tops < s[OPL_ONL])
        mean = float(np.exp(np.mean(np.log([10 ** (contrast[k] / 10) for k in ("rnfl", "ipl", "inl", "opl")]))))
        values = np.where(inner, values ** (1 - contents.fog) * mean**contents.fog, values)
    if contents.ez_loss.any():
        photoreceptors = (tops >= s[ELM] - 5) & (tops < s[RPE] - disease.subretinal_um - 1)
        onl = np.float32(10 ** (contrast["onl"] / 10))
        values = np.where(photoreceptors, values ** (1 - contents.ez_loss) * onl**contents.ez_loss, values)
    # Light scattered on the way down is missing below: vessels, and the thickness of the tissue above.
    shadow = 1 - rng.uniform(0.2, 0.9 if ranges.optics else 0.7) * anatomy.vessel
    values = values * np.where(tops > s[RNFL_GCL] + 15, shadow, np.float32(1))
    values *= np.exp(rng.uniform(0.05, 0.22) * smooth_map(rng, values.shape, (0.0, 1.2)))
    power = stack_sheets(tops / np.float32(ROW_MM * 1000), values.astype(np.float32), ROWS)
    for cyst, decibel in zip(disease.cysts, contents.cyst_db, strict=True):
        _fill(power, cyst, decibel)
    if rng.random() < ranges.texture_probability:
        _add_spots(rng, power, contents, rng.poisson(rng.choice((2, 12, 40))), exudates=False)
    if rng.random() < 0.5 * ranges.texture_probability:
        _add_spots(rng, power, contents, rng.poisson(rng.choice((2, 8, 25))), exudates=True)
    return power


def _fill(power: Float[np.ndarray, "D H W"], cyst: Cyst, decibel: tuple[float, float]) -> None:
    """In place: the inside of `cyst` becomes fluid with a vertical gradient, its rim mixed by area."""
    row_um = np.float32(ROW_MM * 1000)
    height = cyst.bottom_um - cyst.top_um
    hit = np.flatnonzero((height > 1).any(axis=0))
    if not hit.size:
        return
    columns = slice(int(hit[0]), int(hit[-1]) + 1)
    top, bottom = cyst.top_um[:, columns] / row_um, cyst.bottom_um[:, columns] / row_um
    filled = bottom > top + 0.1
    if not filled.any():
        return
    first, last = max(int(top[filled].min()), 0), min(int(bottom[filled].max()) + 2, power.shape[1])
    if first >= last:
        return
    window = slice(cyst.columns.start + columns.start, cyst.columns.start + columns.stop)
    block = power[cyst.slices, first:last, window]
    rows = np.arange(first, last, dtype=np.float32)[None, :, None]
    inside = np.clip(np.minimum(rows + 0.5, bottom[:, None]) - np.maximum(rows - 0.5, top[:, None]), 0, 1)
    low, high = (10 ** (value / 10) for value in decibel)
    fluid = np.linspace(low, high, last - first, dtype=np.float32)[None, :, None]
    block += inside * (fluid - block)


def _add_spots(
    rng: np.random.Generator, power: Float[np.ndarray, "D H W"], contents: _Contents, count: int, exudates: bool
) -> None:
    """In place: hyperreflective foci (small, anywhere in the retina), or hard exudates (larger, with shadows)."""
    slices, rows, columns = power.shape
    row_um = ROW_MM * 1000
    surfaces = contents.disease.surfaces_um
    cluster = rng.uniform(0, columns)
    for _ in range(count):
        z = int(rng.integers(slices))
        x = int(
            np.clip(
                rng.normal(cluster, 40) if exudates or rng.random() < 0.5 else rng.uniform(0, columns), 3, columns - 4
            )
        )
        low, high = (OPL_ONL - 1, ELM) if exudates and rng.random() < 0.7 else (ILM, RPE)
        depth_um = rng.uniform(surfaces[low][z, x], max(surfaces[high][z, x], surfaces[low][z, x] + 1))
        row = int(depth_um / row_um)
        half_rows = min(rng.lognormal(0.5, 0.5), 5) if exudates else rng.uniform(0.5, 1.4)
        half_columns = half_rows * rng.uniform(0.3, 0.8) if exudates else rng.uniform(0.4, 0.9)
        dy, dx = int(half_rows) + 2, int(half_columns) + 2
        top, left, right = max(row - dy, 0), max(x - dx, 0), min(x + dx + 1, columns)
        if row + dy + 1 >= rows or row < 0:
            continue
        yy = (np.arange(top, row + dy + 1, dtype=np.float32)[:, None] - row) / half_rows
        xx = (np.arange(left, right, dtype=np.float32)[None, :] - x) / half_columns
        spot = np.exp(-((yy * yy + xx * xx) ** 1.5))
        block = power[z, top : row + dy + 1, left:right]
        level = np.float32(10 ** (rng.uniform(11, 20) / 10))
        np.maximum(block, level * spot, out=block)
        if exudates:
            taken = rng.uniform(0.1, 0.95) * np.exp(-((xx[0]) ** 2))
            power[z, row + dy + 1 :, left:right] *= 1 - taken


# --- truth


def _truth(contents: _Contents) -> tuple[Float[np.ndarray, "D 8 W"], UInt8[np.ndarray, "D H W"]]:
    disease = contents.disease
    surfaces = disease.surfaces_um / np.float32(ROW_MM * 1000)
    boundaries = surfaces[list(BOUNDARY_SURFACES)].transpose(1, 0, 2).copy()
    boundaries[:, 1:][np.broadcast_to((contents.disc > 0.02)[:, None], boundaries[:, 1:].shape)] = np.nan
    slices, _, columns = boundaries.shape
    classes = np.zeros((slices, ROWS, columns), np.uint8)
    rows = np.arange(ROWS, dtype=np.float32)[None, :, None]

    def mark(value: int, top: np.ndarray, bottom: np.ndarray) -> None:
        """`value` for voxels whose centre is in [top, bottom)."""
        hit = bottom > top + 0.05
        if not hit.any():
            return
        first = max(int(np.floor(top[hit].min())), 0)
        last = min(int(np.ceil(bottom[hit].max())) + 1, ROWS)
        if first < last:
            window = rows[:, first:last]
            classes[:, first:last][(window >= top[:, None]) & (window < bottom[:, None])] = value

    if disease.drusen_um.any():
        mark(SUB_RPE, surfaces[BM] - disease.drusen_um / (ROW_MM * 1000), surfaces[BM])
    if disease.subretinal_um.any():
        mark(SUBRETINAL, surfaces[RPE] - disease.subretinal_um / (ROW_MM * 1000), surfaces[RPE])
    for cyst in disease.cysts:
        top, bottom = np.zeros((2, slices, columns), np.float32)
        top[cyst.slices, cyst.columns] = cyst.top_um / (ROW_MM * 1000)
        bottom[cyst.slices, cyst.columns] = cyst.bottom_um / (ROW_MM * 1000)
        mark(INTRARETINAL, top, bottom)
    return boundaries.astype(np.float32), classes
