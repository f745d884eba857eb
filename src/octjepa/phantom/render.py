"""From surfaces to the 8-bit image: reflectivity, shadows, speckle, noise floor, compression, vendor window.

Every layer has a reflectivity map `[D, W]` in units of the noise floor's power; a volume is built by writing each
layer's *change* of reflectivity at its (fractional) top and summing down the A-scan once, which costs the same for five
layers as for thirty and keeps boundaries exact below a voxel. Speckle is the squared magnitude of
circular complex Gaussian fields blurred by the point spread function, averaged over the looks (Goodman: one look is an
exponential law, N looks a gamma law of shape N). Noise has the same law, so it joins the signal's power.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from jaxtyping import Float, UInt8
from scipy.ndimage import gaussian_filter1d

from octjepa.phantom import anatomy as layers
from octjepa.phantom.anatomy import BM, ELM, EZ, ILM, OPL_ONL, RNFL_GCL, RPE, SCLERA, Anatomy, Map, smooth_map
from octjepa.phantom.dialect import Dialect, Grid
from octjepa.phantom.lesions import Cyst, Disease

# dB above the noise floor, so that Spectralis' fourth-root display gives the measured layer values: vitreous 2,
# RNFL/GCL/IPL 115-132, INL 97, OPL 112, ONL 62-71, ELM/EZ 120-184, RPE 222, BM 168, choroid 88 -> 50.
DECIBEL: Final[dict[str, float]] = {
    "hyaloid": 5.0,
    "epiretinal_membrane": 19.0,
    "ilm": 15.0,
    "rnfl": 13.5,
    "gcl": 11.9,
    "ipl": 12.8,
    "inl": 10.6,
    "opl": 11.7,
    "onl": 7.4,
    "elm": 12.5,
    "myoid": 8.0,
    "ez": 17.0,
    "outer_segments": 12.0,
    "rpe": 19.6,
    "drusen": 12.0,
    "bruch": 15.5,
    "choriocapillaris": 13.5,
    "fluid": -8.0,
}
_CHOROID_SHEETS = 9
_CHOROID_DECIBEL = (12.5, 6.0)  # below the choriocapillaris, at the sclera
_SCLERA_SHEETS = 3
_VESSEL_SHADOW = 0.68  # share of the light that a large vessel takes, both ways


def render(
    anatomy: Anatomy,
    disease: Disease,
    dialect: Dialect,
    grid: Grid,
    rng: np.random.Generator,
    eye_rng: np.random.Generator | None = None,
    contrast_db: Mapping[str, float] = DECIBEL,
) -> UInt8[np.ndarray, "D H W"]:
    """The scan as `dialect` shows it, `[D, H, W]`.

    `eye_rng` draws what belongs to the eye: reflectivity of layers, hyaloid, vessels and brightness of the choroid.
    `rng` draws what belongs to the scan, and both where `eye_rng` is not given. `contrast_db` is the reflectivity of
    every tissue in dB above the noise floor, with the keys of `DECIBEL`.
    """
    tops_um, reflectivity = tissue_sheets(
        anatomy, disease, dialect.choroid_gain_db, rng if eye_rng is None else eye_rng, contrast_db
    )
    _shade(tops_um, reflectivity, anatomy, disease, dialect, rng)
    power = stack_sheets(tops_um / (grid.spacing_mm[1] * 1000), reflectivity, grid.shape[1])
    if disease.cysts:
        _fill_cysts(power, disease.cysts, grid, contrast_db["fluid"])
    sigma = dialect.axial_resolution_um / 2355 / grid.spacing_mm[1]
    if sigma > 0.25:
        power = gaussian_filter1d(power, sigma, axis=1, mode="nearest", truncate=2.5)
    np.maximum(power, 0, out=power)
    power += 1
    power *= speckle(rng, grid.shape, grid.grain, dialect.looks)
    return _display(power, dialect, rng)


def tissue_sheets(
    anatomy: Anatomy,
    disease: Disease,
    choroid_gain_db: float,
    rng: np.random.Generator,
    contrast_db: Mapping[str, float] = DECIBEL,
) -> tuple[Float[np.ndarray, "K D W"], Float[np.ndarray, "K D W"]]:
    """Tops (um, from above downwards) and reflectivities `[K, D, W]` of all sheets, hyaloid to deep sclera."""
    s = disease.surfaces_um
    atrophy, vessel = disease.atrophy, anatomy.vessel
    alive = 1 - atrophy
    person_db = rng.normal(0.0, 1.0, len(contrast_db))  # eyes differ from layer to layer
    level = {
        name: np.float32(10 ** ((db + 0.9 * wobble) / 10))
        for (name, db), wobble in zip(contrast_db.items(), person_db, strict=True)
    }
    tops: list[Map] = []
    values: list[Map] = []

    def add(top: Map, value: Map | np.float32 | float) -> None:
        tops.append(top)
        values.append(np.broadcast_to(np.asarray(value, np.float32), top.shape))

    if rng.random() < 0.35:
        # A detached posterior hyaloid, a faint line before the retina: common, harmless, and no epiretinal membrane.
        gap = rng.uniform(30, 220) * (1 - np.exp(-(anatomy.u_mm**2 + anatomy.v_mm**2) / rng.uniform(1, 6)))
        rest = np.minimum(anatomy.surfaces_um[ILM], s[ILM] - disease.epiretinal_um)
        hyaloid = rest - 12 - gap.astype(np.float32)
        add(hyaloid, level["hyaloid"])
        add(hyaloid + 8, 0.0)
    if disease.sheet_gap_um is None:
        add(s[ILM] - disease.epiretinal_um, level["epiretinal_membrane"])
    else:
        add(s[ILM] - disease.sheet_gap_um - disease.epiretinal_um, level["epiretinal_membrane"])
        add(s[ILM] - disease.sheet_gap_um, 0.0)
    add(s[ILM], level["ilm"])
    add(np.minimum(s[ILM] + 5, s[RNFL_GCL]), level["rnfl"] * (1 + 0.3 * vessel))
    add(s[RNFL_GCL], level["gcl"] * (1 + 1.2 * vessel))
    add(s[layers.GCL_IPL], level["ipl"])
    add(s[layers.IPL_INL], level["inl"])
    add(s[layers.INL_OPL], level["opl"])
    henle = s[OPL_ONL] + 0.35 * (s[ELM] - s[OPL_ONL])
    add(s[OPL_ONL], level["onl"] * 1.35)
    add(henle, level["onl"])
    band = 0.5 * (s[RPE] - disease.subretinal_um - s[EZ])
    add(s[ELM] - 4, level["elm"] * alive + level["onl"] * atrophy)
    add(s[ELM] + 5, level["myoid"])
    add(s[EZ], level["ez"] * alive**2 + level["onl"] * (1 - alive**2))
    add(s[EZ] + band, level["outer_segments"])
    add(s[RPE] - disease.subretinal_um, np.where(disease.subretinal_um > 2, level["fluid"], level["outer_segments"]))
    add(s[RPE], level["rpe"] * alive + level["onl"] * atrophy)
    add(s[BM] - disease.drusen_um, np.where(disease.drusen_um > 2, level[disease.below_rpe], level["rpe"] * alive))
    if disease.basal_um is not None:
        add(s[BM] - disease.basal_um, level["rpe"])
    add(s[BM], level["bruch"] * (0.6 * alive + 0.4))
    add(s[BM] + 6, level["choriocapillaris"])
    return _with_choroid(np.stack(tops), np.stack(values), anatomy, disease, choroid_gain_db, rng)


def _with_choroid(
    tops: np.ndarray,
    values: np.ndarray,
    anatomy: Anatomy,
    disease: Disease,
    choroid_gain_db: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Adds choroid and sclera as thin sheets, each with its own blotches of vessels, darker with depth.

    Where the RPE is lost more light comes through, and the choroid and sclera below are brighter (hypertransmission).
    """
    s = disease.surfaces_um
    thick = s[SCLERA] - s[BM] - 16
    count = _CHOROID_SHEETS + _SCLERA_SHEETS
    depth = (np.arange(count, dtype=np.float32) / _CHOROID_SHEETS)[:, None, None]
    deep_tops = s[BM] + 16 + depth * thick
    deep_tops[_CHOROID_SHEETS:] = s[SCLERA] + 45 * np.arange(_SCLERA_SHEETS, dtype=np.float32)[:, None, None]
    dx_mm = float(anatomy.home.x_mm[1] - anatomy.home.x_mm[0])
    blotch = anatomy.eye_map(rng, (0.0, 0.045 / dx_mm), (count,))
    for k in range(1, _CHOROID_SHEETS):  # vessels cross several sheets
        blotch[k] = 0.65 * blotch[k - 1] + 0.76 * blotch[k]
    first, last = _CHOROID_DECIBEL
    gain = choroid_gain_db + rng.normal(0.0, 1.9)
    decibel = (
        first
        + (last - first) * depth**0.8
        + gain * np.minimum(1, 0.3 + depth)
        + 2.2 * blotch * np.minimum(1, 3 * depth + 0.3)
    )
    decibel[_CHOROID_SHEETS:] -= 1.5 + 3.0 * np.arange(_SCLERA_SHEETS, dtype=np.float32)[:, None, None]
    deep = 10 ** (decibel / 10) * (1 + 2.6 * disease.atrophy)
    return np.concatenate([tops, deep_tops]), np.concatenate([values, deep]).astype(np.float32)


def _shade(
    tops: np.ndarray, values: np.ndarray, anatomy: Anatomy, disease: Disease, dialect: Dialect, rng: np.random.Generator
) -> None:
    """In place: vessel shadows below the ganglion cells, tissue grain, uneven illumination, gain of frames, blinks."""
    shadow = 1 - _VESSEL_SHADOW * anatomy.vessel
    below = tops > disease.surfaces_um[RNFL_GCL] + 15
    values *= np.where(below, shadow, np.float32(1))
    values *= np.exp(0.16 * smooth_map(rng, values.shape, (0.0, 1.2)))
    frames, columns = values.shape[1:]
    gain_db = rng.normal(0.0, 1.7) + 0.8 * smooth_map(rng, (frames, columns), (frames / 6, columns / 6))
    gain_db = gain_db + 10 * np.log10(1 + dialect.frame_gain_cv * rng.standard_normal(frames))[:, None] * 2
    if dialect.blinks and rng.random() < 0.08:
        start = int(rng.integers(1, frames - 4))
        gain_db[start : start + int(rng.integers(1, 5))] -= 25
    values *= (10 ** (gain_db / 10)).astype(np.float32)


def stack_sheets(
    tops_px: Float[np.ndarray, "K D W"], values: Float[np.ndarray, "K D W"], depth: int
) -> Float[np.ndarray, "D H W"]:
    """Fills A-scans of `depth` voxels with `values[k]` from `tops_px[k]` down to the next top; 0 above the first.

    Voxel r covers [r - 0.5, r + 0.5); a boundary inside it mixes both values by area. Tops that are out of order are
    moved down.
    """
    shifted = np.maximum.accumulate(tops_px, axis=0) + 0.5
    change = np.diff(values, axis=0, prepend=np.float32(0))
    _, slices, columns = shifted.shape
    first = np.floor(shifted)
    share = np.where(first < 0, 1, (first + 1) - shifted).astype(np.float32)
    depth_index = np.clip(first, 0, depth).astype(np.int64)
    start = (np.arange(slices) * (depth + 2) * columns)[:, None] + np.arange(
        columns
    )  # [D, W] flat index of the A-scans
    index = depth_index * columns + start  # [K, D, W]
    size = slices * (depth + 2) * columns
    jumps = np.bincount(index.ravel(), (change * share).ravel(), size)
    jumps += np.bincount((index + columns).ravel(), (change * (1 - share)).ravel(), size)
    jumps = jumps.reshape(slices, depth + 2, columns)[:, :depth].astype(np.float32)
    return np.cumsum(jumps, axis=1, out=jumps)


def _fill_cysts(power: Float[np.ndarray, "D H W"], cysts: list[Cyst], grid: Grid, fluid_db: float) -> None:
    """In place: the inside of every cyst becomes fluid, its rim mixed by area."""
    voxel_um = grid.spacing_mm[1] * 1000
    fluid = np.float32(10 ** (fluid_db / 10))
    for cyst in cysts:
        top, bottom = cyst.top_um / voxel_um, cyst.bottom_um / voxel_um
        first, last = max(int(top.min()), 0), min(int(bottom.max()) + 2, power.shape[1])
        if first >= last:
            continue
        depth_index = np.arange(first, last, dtype=np.float32)[None, :, None]
        inside = np.minimum(depth_index + 0.5, bottom[:, None]) - np.maximum(depth_index - 0.5, top[:, None])
        inside = np.clip(inside, 0, 1)
        block = power[cyst.slices, first:last, cyst.columns]
        block += inside * (fluid - block)


def speckle(
    rng: np.random.Generator, shape: tuple[int, int, int], grain: tuple[int, int], looks: int
) -> Float[np.ndarray, "D H W"]:
    """Mean-1 speckle intensity `[D, H, W]` of `looks` independent looks, frames independent of each other.

    `grain` counts the [1, 1]/2 blur passes (axial, lateral). Samples start as uniform 16-bit integers, which is the
    cheapest draw; the blur brings the field near a Gaussian one: kurtosis 2.7 at the small size, 2.9 at the
    full one (a Gaussian has 3), so one look varies by 0.85 and 0.99 of its squared mean (an exponential law by 1).
    """
    axial, lateral = grain
    slices, depth, columns = shape
    gain = math.prod(math.comb(2 * n, n) / 4**n for n in grain)
    variance = ((1 << 14) ** 2 / 12) * gain * 2 * looks
    raw = np.random.Generator(np.random.SFC64(int(rng.integers(0, 2**63))))
    out = np.zeros(shape, np.float32)
    # A few frames at a time, so that the passes stay in the processor's cache.
    step = max(1, 100_000 // (depth * columns))
    for start in range(0, slices, step):
        chunk = out[start : start + step]
        block = (len(chunk), depth + axial, columns + lateral)
        for _ in range(2 * looks):
            sample = np.frombuffer(raw.bytes(2 * math.prod(block)), "<i2").reshape(block) >> 2
            for _ in range(axial):
                sample = (sample[:, 1:] + sample[:, :-1]) >> 1
            for _ in range(lateral):
                sample = (sample[:, :, 1:] + sample[:, :, :-1]) >> 1
            value = sample.astype(np.float32)
            value += 0.5 * (axial + lateral)  # each shift rounds down by a half on average
            value *= value
            chunk += value
    out *= 1 / variance
    return out


def _display(
    power: Float[np.ndarray, "D H W"], dialect: Dialect, rng: np.random.Generator
) -> UInt8[np.ndarray, "D H W"]:
    """Compresses power and maps it to 8 bit: `window` holds where the noise floor and 20 dB above it are displayed."""
    floor, bright = dialect.window
    shape = dialect.looks
    if dialect.compression == "fourth_root":
        np.sqrt(power, out=power)
        np.sqrt(power, out=power)
        # Mean of the fourth root of a gamma law with `shape` looks and mean 1.
        rest = math.exp(math.lgamma(shape + 0.25) - math.lgamma(shape)) / shape**0.25
        scale = (bright - floor) / (rest * (10**0.5 - 1))
        power *= np.float32(scale)
        power += np.float32(floor - scale * rest)
    else:
        np.log10(np.maximum(power, 1e-4, out=power), out=power)
        from scipy.special import digamma

        rest = (float(digamma(shape)) - math.log(shape)) / math.log(10)
        scale = (bright - floor) / 2
        power *= np.float32(scale)
        power += np.float32(floor - scale * rest)
    power += np.float32(0.5 + rng.normal(0.0, 1.0))
    np.clip(power, 0, 255, out=power)
    return power.astype(np.uint8)
