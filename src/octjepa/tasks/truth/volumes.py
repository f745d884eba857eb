"""Randomised phantom volumes with the class of every voxel, on the grid that an encoder reads.

In: `octjepa.phantom.random_scene`, which draws reflectivity and truth of neighbouring B-scans. Out: a `LabelledVolume`:
a `CanonicalVolume` as ingest makes it (flattened, 8 bit, tissue band, mean and deviation of tissue), and in the same
grid the class of every voxel and the depth of eight boundaries.

Optics and display are drawn per volume in numpy, on the coarse grid of the encoder: this costs a tenth of rendering,
storing and reading a phantom eye. `octjepa.tasks.segmenter.image_formation` does the same for single fine B-scans in
torch. Flattening follows `octjepa.canonical` with the true Bruch's membrane, plus errors that a surface finder makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from scipy.ndimage import gaussian_filter1d

from octjepa.canonical.pipeline import BAND_BELOW_BRUCH_MM, intensity_scale, rescale_to_8_bit
from octjepa.canonical.surfaces import fit_surface
from octjepa.keys import generator
from octjepa.layers import BOUNDARIES
from octjepa.phantom.random_scene import (
    COLUMN_MM,
    COLUMNS,
    LOWEST_DB,
    ROW_MM,
    ROWS,
    STEPS_PER_DB,
    Scene,
    SceneRanges,
    draw_scene,
)
from octjepa.recipe import Preprocessing
from octjepa.volume import CanonicalVolume

# Vitreous, the seven layers between the eight boundaries, everything below; then three kinds of disease.
LAYERS: Final = len(BOUNDARIES) + 1
VOXEL_CLASSES: Final = LAYERS + 3  # intraretinal fluid, subretinal fluid, material below the RPE
UNKNOWN: Final = 255
_UNFLATTENED: Final = 0.25  # share of volumes that keep tilt and curvature, as `preprocessing.flatten=none` does
_POWER: Final = (10 ** ((np.arange(256) / STEPS_PER_DB + LOWEST_DB) / 10)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class LabelledVolume:
    """A phantom volume in the stored size of its preprocessing, margins included.

    `labels` holds 0 to 8 for vitreous, layers and choroid, 9 to 11 for intraretinal fluid, subretinal fluid and
    material below the RPE, and `UNKNOWN` outside the scan and inside the optic disc. `boundaries` are depth indices,
    NaN where unknown.
    """

    volume: CanonicalVolume
    labels: UInt8[np.ndarray, "D H W"]
    boundaries: Float[np.ndarray, "D 8 W"]


def draw_volume(seed: int, index: int, ranges: SceneRanges, preprocessing: Preprocessing) -> LabelledVolume:
    """Volume number `index` of the sequence `seed`. A pure function: equal arguments give equal bytes."""
    rng = generator("truth volume", seed, ranges.name, index)
    dz = preprocessing.target_spacing_mm[0]
    # The pitch of a real scan is never exactly that of the grid.
    pitch_mm = dz * float(np.exp(rng.normal(0, 0.2)))
    scene = draw_scene(seed, index, ranges, preprocessing.stored_size[0], pitch_mm)
    power, labels, boundaries, inside = _on_grid(scene, preprocessing, rng)
    image = _form(power, boundaries, scene.optics, rng)
    pixels = rescale_to_8_bit(image, inside, intensity_scale(image, inside, preprocessing.clip_percentiles))
    band = _tissue_band(boundaries, preprocessing, rng)
    rows = np.arange(pixels.shape[1])[None, :, None]
    tissue = (rows >= band[0][:, None]) & (rows <= band[1][:, None]) & inside
    values = pixels[tissue] if tissue.any() else pixels[inside]
    depth, _, width = pixels.shape
    volume = CanonicalVolume(
        f"truth-{seed}-{ranges.name}-{index}",
        pixels,
        band,
        float(values.mean()),
        float(values.std()),
        np.zeros((depth, width), np.int16),
        np.zeros((depth, width), np.int16),
        (np.arange(depth) - (depth - 1) / 2) * dz,
        None,
    )
    return LabelledVolume(volume, labels, boundaries)


def _on_grid(
    scene: Scene, preprocessing: Preprocessing, rng: np.random.Generator
) -> tuple[
    Float[np.ndarray, "D H W"], UInt8[np.ndarray, "D H W"], Float[np.ndarray, "D 8 W"], Bool[np.ndarray, "D H W"]
]:
    """Power, labels and boundaries of a flattened scene on the stored grid, and where the scene has voxels."""
    slices, height, width = preprocessing.stored_size
    _, dy, dx = preprocessing.target_spacing_mm
    strong = float(scene.optics == 2)
    zoom_rows = float(np.exp(rng.normal(0, 0.04 + 0.06 * strong)))
    zoom_columns = float(np.exp(rng.normal(0, 0.04 + 0.10 * strong)))

    # Columns of the scene under each stored column; power is the mean over the columns that it covers.
    covered = max(1, round(dx / COLUMN_MM))
    slack = max(0.0, COLUMNS - width * dx / COLUMN_MM / zoom_columns)
    centre = (COLUMNS - 1) / 2 + rng.uniform(-0.5, 0.5) * slack
    at = centre + (np.arange(width) - (width - 1) / 2) * dx / COLUMN_MM / zoom_columns
    first, middle = scene_columns(at, covered)
    seen = (first >= 0) & (first + covered <= COLUMNS)
    middle = np.clip(middle, 0, COLUMNS - 1)
    linear = _POWER[scene.power]
    power = np.mean([linear[:, :, np.clip(first + k, 0, COLUMNS - 1)] for k in range(covered)], axis=0)  # [D, rows, W]

    # Rows: Bruch's membrane, as fitted, lies at the anchor, except for the errors of a surface finder.
    bruch = _filled(scene.boundaries_px[:, -1])
    fit = fit_surface(bruch, ROW_MM)
    base = (fit.surface + fit.offsets[:, None])[:, middle]  # [D, W], rows of the scene
    if rng.random() < _UNFLATTENED:
        base = np.full_like(base, np.median(base))
    anchor = round(preprocessing.axial_anchor * (height - 1))
    error = rng.normal(0, 2.0) + rng.normal(0, 0.6, (slices, 1)) * np.ones((1, width))
    if rng.random() < 0.2:
        error = error + rng.normal(0, 5.0) * np.linspace(-1, 1, width)[None]
    scale = ROW_MM / dy * zoom_rows
    row = base[:, None] + (np.arange(height)[None, :, None] - anchor - error[:, None]) / scale  # [D, H, W]
    row = row.astype(np.float32)
    inside = (row >= 0) & (row <= ROWS - 1) & seen
    low = np.clip(row, 0, ROWS - 1.001).astype(np.int64)
    share = (np.clip(row, 0, ROWS - 1.001) - low).astype(np.float32)
    flat = low * width + np.arange(width) + np.arange(slices)[:, None, None] * (ROWS * width)
    above = power.reshape(-1).take(flat)
    below = power.reshape(-1).take(flat + width)
    moved = above + share * (below - above)

    boundaries = (scene.boundaries_px[:, :, middle] - base[:, None]) * scale + anchor + error[:, None]  # [D, 8, W]
    boundaries[:, :, ~seen] = np.nan
    nearest = np.clip(np.rint(row), 0, ROWS - 1).astype(np.int64)
    disease = scene.classes[np.arange(slices)[:, None, None], nearest, middle]
    rows = np.arange(height)[None, :, None]
    labels = np.zeros((slices, height, width), np.uint8)
    for number in range(len(BOUNDARIES)):
        with np.errstate(invalid="ignore"):
            labels += rows >= boundaries[:, number, None]
    # Inside the optic disc only the ILM is known.
    disc = ~np.isfinite(boundaries[:, -1])
    with np.errstate(invalid="ignore"):
        labels[disc[:, None] & (rows >= boundaries[:, :1])] = UNKNOWN
    labels = np.where(disease > 0, disease + np.uint8(LAYERS - 1), labels)
    labels[~inside] = UNKNOWN
    return moved.astype(np.float32), labels, boundaries.astype(np.float32), inside


def scene_columns(at: Float[np.ndarray, " W"], covered: int) -> tuple[Int[np.ndarray, " W"], Int[np.ndarray, " W"]]:
    """Of each stored column, centred at column `at` of the scene: the first of its `covered` columns, and the nearest.

    Both are rounded to the nearest, so that the image has no mean offset from the labels of the nearest column.
    """
    return np.rint(at - (covered - 1) / 2).astype(np.int64), np.rint(at).astype(np.int64)


def _filled(surface: Float[np.ndarray, "D W"]) -> Float[np.ndarray, "D W"]:
    """The surface with gaps interpolated along the columns; a B-scan without any value takes the median."""
    known = np.isfinite(surface)
    if known.all():
        return surface
    out = np.full(surface.shape, np.nanmedian(surface) if known.any() else ROWS / 2, np.float32)
    columns = np.arange(surface.shape[1])
    for filled, values, there in zip(out, surface, known, strict=True):
        if there.any():
            filled[:] = np.interp(columns, columns[there], values[there])
    return out


def _tissue_band(
    boundaries: Float[np.ndarray, "D 8 W"], preprocessing: Preprocessing, rng: np.random.Generator
) -> np.ndarray:
    """First and last depth index of tissue `[2, D, W]` int16, with the noise of a surface finder; -1 outside the scan.

    Inside the optic disc Bruch's membrane is interpolated.
    """
    ilm, bruch = boundaries[:, 0], _filled(boundaries[:, -1])
    top = ilm + rng.normal(0, 0.7, ilm.shape) + rng.normal(0, 0.7)
    bottom = bruch + BAND_BELOW_BRUCH_MM / preprocessing.target_spacing_mm[1] + rng.normal(0, 0.7)
    last = preprocessing.stored_size[1] - 1
    known = np.isfinite(ilm)
    band = np.stack([np.clip(np.rint(np.nan_to_num(edge)), 0, last) for edge in (top, bottom)])
    return np.where(known, band, -1).astype(np.int16)


# --- optics and display


def _waves(rng: np.random.Generator, slices: int, width: int) -> Float[np.ndarray, "D 1 W"]:
    """A smooth curve over the columns that drifts from slice to slice, of about unit amplitude."""
    x = np.linspace(0, 1, width)[None, None]
    z = np.linspace(0, 1, slices)[:, None, None]
    out = np.zeros((slices, 1, width))
    for _ in range(3):
        out += np.sin(2 * np.pi * (rng.uniform(0.3, 4) * x + rng.uniform(-1.5, 1.5) * z + rng.random()))
    return out / np.sqrt(1.5)


def _form(
    power: Float[np.ndarray, "D H W"], boundaries: Float[np.ndarray, "D 8 W"], level: int, rng: np.random.Generator
) -> Float[np.ndarray, "D H W"]:
    """Display values 0 to 1 of a volume. `level` 0 draws little, 2 draws everything (`SceneRanges.optics`)."""
    slices, height, width = power.shape
    random, strong = float(level > 0), level == 2
    rows = np.arange(height, dtype=np.float32)[None, :, None]
    bruch = np.nan_to_num(boundaries[:, -1:], nan=height).astype(np.float32)

    # Gain of the eye, of each frame, along the columns and with depth; loss below Bruch's membrane.
    light = rng.normal(0, 1.7 + 1.3 * random) + rng.normal(0, 0.6, (slices, 1, 1))
    light = light + _waves(rng, slices, width) * (0.4 + 1.2 * random * rng.random())
    light = light - random * rng.uniform(-1, 7) * rows / (2 * height)
    loss = random * max(0.0, rng.uniform(-0.02, 0.12))
    light = light - loss * np.maximum(rows - bruch, 0)
    power = power * np.exp(light.astype(np.float32) * np.float32(np.log(10) / 10))
    attenuation = random * rng.random() * 1.2e-3
    power *= np.exp(-attenuation * np.cumsum(np.minimum(power, 60), axis=1))
    if random:
        for _ in range(rng.binomial(6, 0.35)):
            _shadow(rng, power, boundaries)

    # Resolution, noise floor, speckle: a Wilson-Hilferty cube of a correlated normal field has a gamma law.
    power = _blur(power, rng.uniform(0.15, 0.9), rng.uniform(0.0, 0.5) if strong else 0.1) + 1
    # Averaging of B-scans into one slice adds looks to those of the instrument.
    looks = float(np.exp(rng.uniform(0.5, 4.4) if strong else rng.uniform(1.5, 4.0)))
    field = rng.standard_normal(power.shape, dtype=np.float32)
    field = _blur(field, rng.uniform(0.2, 1.1), rng.uniform(0.0, 0.7))
    field /= field.std()
    power = power * np.maximum(1 - 1 / (9 * looks) + field / (3 * np.sqrt(looks)), 0.02) ** 3

    # Display: a root or nearly a logarithm, in a window that may saturate.
    exponent = rng.uniform(0.02, 0.4) if strong else float(rng.choice([0.02, 0.25])) + 0.02 * rng.random()
    floor = rng.uniform(-0.15, 0.35) if strong else rng.uniform(-0.05, 0.25)
    bright = floor + (rng.uniform(0.25, 1.0) if strong else rng.uniform(0.35, 0.9))
    display = floor + (bright - floor) * (power**exponent - 1) / (100.0**exponent - 1)
    display = np.clip(display, 0, 1).astype(np.float32)
    if random and rng.random() < 0.3:
        display = _blur(display, rng.uniform(0.3, 1.1), rng.uniform(0.1, 0.4))
    if random:
        display = np.maximum(display, 1e-4) ** np.float32(np.exp(rng.normal(0, 0.2)))
    if random and rng.random() < 0.4:
        display = display + np.float32(0.06 * rng.random()) * rng.standard_normal(display.shape, dtype=np.float32)
    return np.clip(display, 0, 1)


def _shadow(rng: np.random.Generator, power: np.ndarray, boundaries: np.ndarray) -> None:
    """In place: a dark curtain below one of the inner boundaries, over some slices, as vessels and debris cast it."""
    slices, height, width = power.shape
    z, x = rng.uniform(0, slices), rng.uniform(0, width)
    long = np.exp(rng.uniform(-0.5, 2.0))
    first, last = max(0, int(z - long)), min(slices, int(z + long) + 1)
    slope = rng.normal(0, 2.0)
    columns = np.arange(width)[None] - x - slope * (np.arange(first, last)[:, None] - z)
    depth = rng.uniform(0.1, 0.95) * np.exp(-((columns / np.exp(rng.uniform(-0.7, 2.0))) ** 2))  # [d, W]
    start = np.nan_to_num(boundaries[first:last, rng.integers(6)], nan=0.0)
    below = np.arange(height)[None, :, None] > start[:, None]
    power[first:last] *= np.where(below, 1 - depth[:, None], 1).astype(np.float32)


def _blur(image: np.ndarray, sigma_rows: float, sigma_columns: float) -> np.ndarray:
    """Gaussian blur along depth and columns, in voxels."""
    if sigma_rows > 0.1:
        image = gaussian_filter1d(image, sigma_rows, axis=1, mode="nearest", truncate=3)
    if sigma_columns > 0.1:
        image = gaussian_filter1d(image, sigma_columns, axis=2, mode="nearest", truncate=3)
    return image
