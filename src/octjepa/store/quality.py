"""How good a scan is: signal to noise, blank B-scans, tissue cut off, motion and registration fill, and one score.

Every part is a column of the store's index, measured at the canonical row and column, so that an instrument that
samples more finely is not called noisier for it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8

from octjepa.ingest.reasons import rejection
from octjepa.store.surfaces import RobustSurface, Surfaces

_LEAST_FRAMES = 4
_BLANK = 0.3  # a B-scan with less than this share of the usual structure shows no eye
_EDGE_MM = 0.016  # tissue this near to the first or last row is cut off
_CLEAR_MM = 0.03  # vitreous is counted from this far above the ILM
_QUANTUM = 1.0  # grey levels; noise is never taken for less than a step of the 8-bit scale
_HALF_SNR_DB = 4.0  # where the share of the score that the signal gives is a half
_SNR_STEP_DB = 8.0
_HALF_MOTION_UM = 120.0
_EDGE = 0.12  # step at Bruch's membrane in units of the tissue contrast; smooth brightness has next to none
_THINNEST_MM = 0.07  # between the membranes; the search keeps them 0.05 mm apart where it finds one edge for both
_UNEVEN = 0.15  # spread of the dark in units of the contrast: a slope of grey has 0.2 and more, scans up to 0.1


@dataclass(frozen=True)
class Quality:
    """`quality` 0..1 is the product of the parts below, each brought to 0..1; see `docs/quality.md`.

    `snr_db`: 20 log10((mean of retina - mean of vitreous) / standard deviation of the vitreous), within B-scans;
    `blank_share`: of the B-scans; `clipped_share`: of the A-scans whose ILM or Bruch's membrane lies at or beyond the
    first or last row; `motion_um`: root mean square of the axial jumps from B-scan to B-scan, the smooth shape of the
    eye taken out; `fill_share`: of the voxels that were registration fill.
    """

    quality: float
    snr_db: float
    blank_share: float
    clipped_share: float
    motion_um: float
    fill_share: float

    def columns(self) -> dict[str, float]:
        return asdict(self)


def structured_frames(pixels: UInt8[np.ndarray, "D H W"]) -> Bool[np.ndarray, " D"]:
    """[D] False for empty, constant or blinked-away B-scans. Raises VolumeRejected blank where most are.

    What counts is the structure that is left when an eighth of a B-scan's width is averaged: speckle alone, which a
    blink leaves at full strength, has next to none.
    """
    depth, height, width = pixels.shape
    parts = min(8, width)
    sampled = pixels[:, :: max(1, min(4, height // 16)), : width // parts * parts]
    columns = sampled.reshape(depth, sampled.shape[1], parts, -1).mean(axis=3, dtype=np.float32)
    structure = columns.std(axis=(1, 2))
    lively = structure > max(0.5, _BLANK * float(np.median(structure)))
    if lively.sum() < max(_LEAST_FRAMES, depth // 2):
        raise rejection("blank", f"{int((~lively).sum())} of {depth} B-scans are empty or constant")
    return np.asarray(lively)


def signal_to_noise_db(image: Float[np.ndarray, "D R C"], surfaces: Surfaces, row_mm: float) -> float:
    """Retina over vitreous in decibels of the grey scale; 0 where no vitreous is in the scan.

    The SNR of Adler, Ko and Fujimoto (Optics Letters 29(24), 2004: 20 log10 of the image's maximum over the standard
    deviation of a background region) with the mean contrast of the retina in the place of the maximum, which a single
    bright speckle decides. Means and deviations are taken in every B-scan and averaged, the deviations as squares.
    """
    step = max(1, image.shape[2] // 64)
    sampled = image[:, :, ::step]
    rows = np.arange(image.shape[1], dtype=np.float32)[:, None]
    ilm, bm = surfaces.ilm[:, None, ::step], surfaces.bm[:, None, ::step]
    vitreous = rows < ilm - _CLEAR_MM / row_mm
    retina = (rows >= ilm) & (rows <= bm)
    count, size = vitreous.sum(axis=(1, 2)), retina.sum(axis=(1, 2))
    enough = (count >= 64) & (size >= 64)
    if not enough.any():
        return 0.0
    dark = np.einsum("drc,drc->d", sampled, vitreous, optimize=False) / np.maximum(count, 1)
    light = np.einsum("drc,drc->d", sampled, retina, optimize=False) / np.maximum(size, 1)
    squares = np.einsum("drc,drc,drc->d", sampled, sampled, vitreous, optimize=False) / np.maximum(count, 1)
    noise = float(np.sqrt(np.maximum(squares - dark**2, 0)[enough].mean() + _QUANTUM**2))
    contrast = max(float((light - dark)[enough].mean()), 1e-3)
    return max(0.0, 20 * float(np.log10(contrast / noise)))


def check_layered(image: Float[np.ndarray, "D R C"], surfaces: Surfaces, row_mm: float) -> None:
    """Raises VolumeRejected no_tissue where what was found has no layer at its outer end, or is one edge on a slope.

    Light falls within some 50 um under the pigment epithelium; along a grey ramp it does not. That a quarter of the
    A-scans show it is enough: atrophy, fluid and shadows do not count.
    """
    step = max(1, image.shape[2] // 64)
    sampled, height = image[:, :, ::step], image.shape[1]

    def mean(surface: np.ndarray, from_mm: float, to_mm: float) -> np.ndarray:
        """[D, C] brightness between two distances below `surface`."""
        first = round(from_mm / row_mm)
        rows = np.arange(first, max(round(to_mm / row_mm), first + 1))
        place = np.rint(surface).astype(np.int64)[:, None] + rows[:, None]
        return np.take_along_axis(sampled, np.clip(place, 0, height - 1), axis=1).mean(axis=1)

    ilm, bm = surfaces.ilm[:, ::step], surfaces.bm[:, ::step]
    # Bruch's membrane under the bright pigment epithelium
    outer = mean(bm, -0.02, 0.01) - 0.45 * mean(bm, -0.13, -0.06) - 0.55 * mean(bm, 0.01, 0.06)
    edge = float(np.percentile(outer, 75)) / surfaces.contrast
    thick_mm = float(np.median(bm - ilm)) * row_mm
    slope = thick_mm < _THINNEST_MM and surfaces.noise > _UNEVEN * surfaces.contrast
    if edge < _EDGE or slope:
        raise rejection(
            "no_tissue", f"no layers: a step of {edge:.2f} of the contrast, {thick_mm:.2f} mm below the first"
        )


def clipped_share(surfaces: Surfaces, fit: RobustSurface, height: int, row_mm: float) -> float:
    """Share of A-scans whose ILM lies at the first rows, or whose found or fitted Bruch's membrane at the last ones."""
    edge = _EDGE_MM / row_mm
    fitted = fit.rows + fit.offsets[:, None]
    deepest = np.maximum(surfaces.bm, fitted)
    return float(((surfaces.ilm <= edge) | (deepest >= height - 1 - edge)).mean())


def axial_motion_um(fit: RobustSurface, row_mm: float) -> float:
    """Root mean square of the jumps of Bruch's membrane between neighbouring B-scans, its smooth surface taken out."""
    return float(np.sqrt(np.mean(np.diff(fit.offsets) ** 2))) * row_mm * 1000


def score_quality(
    image: Float[np.ndarray, "D R C"],
    surfaces: Surfaces,
    fit: RobustSurface,
    row_mm: float,
    blank_share: float,
    fill_share: float,
) -> Quality:
    """Quality of a scan from its in-plane canonical B-scans `image`, before flattening."""
    snr = signal_to_noise_db(image, surfaces, row_mm)
    clipped = clipped_share(surfaces, fit, image.shape[1], row_mm)
    motion = axial_motion_um(fit, row_mm)
    score = (
        1
        / (1 + 10 ** ((_HALF_SNR_DB - snr) / _SNR_STEP_DB))
        / (1 + (motion / _HALF_MOTION_UM) ** 2)
        * (1 - blank_share)
        * (1 - clipped)
        * (1 - fill_share)
    )
    return Quality(score, snr, blank_share, clipped, motion, fill_share)
