"""Layer intensity, vitreous, speckle correlation, vessel shadows, motion and thickness of phantom and real eyes.

`measure_pixels` needs only pixels and spacing, so phantom and real scans are measured by the same code; what needs the
true surfaces is in `measure_truth`. `REFERENCE` holds the figures that were measured on real scans. Printed by
phantom_statistics.py.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Bool, Float, UInt8
from scipy.ndimage import gaussian_filter, gaussian_filter1d, maximum_filter, uniform_filter
from scipy.signal import find_peaks, peak_widths

from octjepa.phantom.anatomy import BM, ILM, make_anatomy
from octjepa.phantom.dialect import dialect_of
from octjepa.phantom.eye import Eye

# Name -> measured value or range. Reflectivities are display values of a Spectralis.
REFERENCE: Final[dict[str, dict[str, str]]] = {
    "heidelberg_spectralis": {
        "vitreous mean": "2-6",
        "vitreous std": "7",
        "layer rnfl": "115-132",
        "layer gcl": "115-132",
        "layer ipl": "115-132",
        "layer inl": "97",
        "layer opl": "112",
        "layer onl": "62-71",
        "layer ez": "120-184",
        "layer rpe": "222",
        "layer choroid": "88 -> 50",
        "speckle corr. axial 1": "0.85",
        "speckle corr. axial 2": "0.56",
        "speckle corr. axial 3": "0.30",
        "speckle corr. lateral 1": "0.88",
        "speckle corr. lateral 2": "0.71",
        "speckle corr. lateral 3": "0.61",
        "vessel shadow width um": "60-150",
        "axial shift SD, px of 256": "0",
        "frame intensity CV %": "1-9",
    },
    "topcon_maestro2": {
        "vitreous mean": "57",
        "vitreous std": "6",
        "layer rpe": "129",
        "speckle corr. axial 1": "0.70 (downsized)",
        "speckle corr. axial 2": "0.34 (downsized)",
        "speckle corr. axial 3": "0.14 (downsized)",
        "speckle corr. lateral 1": "0.53 (downsized)",
        "speckle corr. lateral 2": "0.39 (downsized)",
        "speckle corr. lateral 3": "0.34 (downsized)",
        "vessel shadow width um": "60-150",
        "axial shift SD, px of 256": "1.95",
        "frame intensity CV %": "1-9",
    },
}
REFERENCE_THICKNESS: Final = {
    "ILM-BM fovea um": "218",
    "ILM-BM 1 mm temporal um": "364-377",
    "ILM-BM 1 mm nasal um": "364-377",
    "ILM-BM 2.6 mm temporal um": "284",
    "ILM-BM 2.6 mm nasal um": "319",
    "pit width at half depth mm": "0.83",
}


def measure_pixels(pixels: UInt8[np.ndarray, "D H W"], spacing_mm: tuple[float, float, float]) -> dict[str, float]:
    """Statistics of the pixels alone. The RPE of a column is taken to be the brightest smoothed voxel."""
    _, dy, dx = spacing_mm
    used = np.linspace(0, len(pixels) - 1, min(len(pixels), 24)).round().astype(int)
    frames = pixels[used].astype(np.float32)
    # White fill (the corners of a registered scan) is not tissue; a column of fill only is ignored.
    filling = _filling(frames)
    frames[filling] = 0
    valid = frames.max(axis=1) > 0
    smooth = gaussian_filter1d(gaussian_filter1d(frames, 0.012 / dy, axis=1), 0.05 / dx, axis=2)
    rpe = smooth.argmax(axis=1)
    depth_index = np.arange(frames.shape[1])[None, :, None]
    edge = np.stack([maximum_filter(frame, 9) for frame in filling])
    vitreous = frames[(depth_index < rpe[:, None] - 0.55 / dy) & (depth_index >= 8) & valid[:, None] & ~edge]
    band = (np.abs(depth_index - rpe[:, None]) < 0.02 / dy).astype(np.float32)
    trace = (frames * band).sum(axis=1) / band.sum(axis=1)
    figures = {"vitreous mean": float("nan"), "vitreous std": float("nan")}
    if vitreous.size > 1000:
        figures |= {"vitreous mean": float(vitreous.mean()), "vitreous std": float(vitreous.std())}
    figures |= _speckle_correlation(frames, rpe, dy)
    figures["vessel shadow width um"] = _shadow_width_um(trace, dx)
    figures["axial shift SD, px of 256"] = _axial_shift(pixels, spacing_mm)
    tissue = np.where(valid, trace, np.nan)
    level = np.nanmean(tissue[valid.any(axis=1)], axis=1)
    # Slow changes of intensity over the field are anatomy and illumination; differences of adjacent frames are not.
    figures["frame intensity CV %"] = float(100 * np.std(np.diff(level)) / np.sqrt(2) / np.mean(level))
    return figures


def _filling(frames: Float[np.ndarray, "D H W"]) -> Bool[np.ndarray, "D H W"]:
    return np.stack([uniform_filter(frame, 7) for frame in frames]) > 250


def _speckle_correlation(frames: Float[np.ndarray, "D H W"], rpe: np.ndarray, depth_mm: float) -> dict[str, float]:
    """Autocorrelation of pixel values less their local mean (sigma 12 px), 130-230 um above the RPE."""
    depth_index = np.arange(frames.shape[1])[None, :, None]
    inside = (depth_index < rpe[:, None] - 0.13 / depth_mm) & (depth_index > rpe[:, None] - 0.23 / depth_mm)
    rest = frames - np.stack([gaussian_filter(frame, 12) for frame in frames])
    figures = {}
    for name, axis in (("axial", 1), ("lateral", 2)):
        for lag in (1, 2, 3):
            near = [slice(None)] * 3
            far = [slice(None)] * 3
            near[axis], far[axis] = slice(None, -lag), slice(lag, None)
            both = inside[tuple(near)] & inside[tuple(far)]
            first, second = rest[tuple(near)][both], rest[tuple(far)][both]
            figures[f"speckle corr. {name} {lag}"] = (
                float(np.corrcoef(first, second)[0, 1]) if both.sum() > 1000 else float("nan")
            )
    return figures


def _shadow_width_um(trace: Float[np.ndarray, "D W"], column_mm: float) -> float:
    """Median full width at half depth of the dark dips along the RPE band."""
    widths = []
    for line in trace:
        flat = line / np.maximum(gaussian_filter1d(line, 0.4 / column_mm), 1)
        flat = gaussian_filter1d(flat, max(0.008 / column_mm, 0.1))
        dips, _ = find_peaks(-flat, prominence=0.25)
        if dips.size:
            widths.extend(peak_widths(-flat, dips, rel_height=0.5)[0] * column_mm * 1000)
    return float(np.median(widths)) if widths else float("nan")


def _axial_shift(pixels: UInt8[np.ndarray, "D H W"], spacing_mm: tuple[float, float, float]) -> float:
    """Standard deviation of the axial shift between frames, without slow drift, in pixels of a scan of depth 256."""
    _, dy, dx = spacing_mm
    step = max(1, round(0.05 / dx))
    thin = pixels[:, :, ::step].astype(np.float32)
    thin[_filling(thin)] = 0
    surface = gaussian_filter1d(thin, 0.012 / dy, axis=1).argmax(axis=1)
    shift = np.median(np.diff(surface, axis=0), axis=1)
    if len(shift) < 8:
        return float("nan")
    index = np.arange(len(shift))
    shift = shift - np.polyval(np.polyfit(index, shift, 2), index)
    return float(shift.std() * 256 / pixels.shape[1])


def measure_truth(eye: Eye) -> dict[str, float]:
    """Mean display value of every layer, over its middle half, between the true surfaces."""
    surfaces = eye.truth.surfaces_px
    depth_index = np.arange(eye.pixels.shape[1], dtype=np.float32)[None, :, None]
    names = ("rnfl", "gcl", "ipl", "inl", "opl", "onl", "elm-ez", "ez", "rpe", "choroid")
    figures = {}
    for k, name in enumerate(names):
        top, bottom = surfaces[k][:, None], surfaces[k + 1][:, None]
        if name == "ez":
            bottom = top + 0.5 * (bottom - top)
        quarter = (bottom - top) / 4
        inside = (depth_index >= top + quarter) & (depth_index <= bottom - quarter)
        figures[f"layer {name}"] = float(eye.pixels[inside].mean()) if inside.any() else float("nan")
    return figures


def measure_thickness(seed: int, people: int, device: str = "heidelberg_spectralis") -> dict[str, float]:
    """Mean ILM-Bruch thickness of `people` healthy right eyes at the positions where real eyes were measured."""
    at = {
        "ILM-BM fovea um": (0.0, 0.0),
        "ILM-BM 1 mm temporal um": (-1.0, 0.0),
        "ILM-BM 1 mm nasal um": (1.0, 0.0),
        "ILM-BM 2.6 mm temporal um": (-2.6, 0.0),
        "ILM-BM 2.6 mm nasal um": (2.6, 0.0),
    }
    values_of: dict[str, list[float]] = {name: [] for name in (*at, "pit width at half depth mm")}
    for person in range(people):
        anatomy = make_anatomy(seed, person, "OD", dialect_of(device), "full")
        thickness = anatomy.surfaces_um[BM] - anatomy.surfaces_um[ILM]
        for name, (u, v) in at.items():
            nearest = np.argmin((anatomy.u_mm - u) ** 2 + (anatomy.v_mm - v) ** 2)
            values_of[name].append(float(thickness.ravel()[nearest]))
        line = thickness[int(np.argmin(np.abs(anatomy.v_mm[:, 0])))]
        u_line = anatomy.u_mm[0]
        half = (line.min() + 0.5 * (line[u_line < 0].max() + line[u_line > 0].max())) / 2
        inside = (line < half) & (np.abs(u_line) < 1.2)
        values_of["pit width at half depth mm"].append(float(inside.sum() * abs(u_line[1] - u_line[0])))
    return {name: float(np.mean(values)) for name, values in values_of.items()}
