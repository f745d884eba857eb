"""How good a scan is: signal to noise, blank B-scans, tissue cut off, motion and registration fill, and one score.

Every part is a column of the store's index, measured at canonical depth and column spacing, so that an instrument that
samples more finely does not count as noisier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8

from octjepa.canonical.plausibility import implausible_share
from octjepa.canonical.surfaces import RobustSurface, Surfaces
from octjepa.reasons import rejection

_MIN_FRAMES = 4
_BLANK = 0.3  # a B-scan with less than this share of the usual structure shows no eye
_EDGE_MM = 0.016  # tissue this near to either end of the depth axis is cut off
_CLEAR_MM = 0.03  # vitreous is counted from this far above the ILM
_QUANTUM = 1.0  # intensity levels; noise is at least one step of the 8-bit scale
_HALF_SNR_DB = 4.0  # where the share of the score that the signal gives is a half
_SNR_STEP_DB = 8.0
_HALF_MOTION_UM = 120.0
_EDGE = 0.12  # step at Bruch's membrane in units of the tissue contrast; a smooth intensity has next to none
_TORN_MM, _TORN_REACH_MM = 0.06, 0.12  # jump between A-scans 47 um apart, and what is next to it
_THINNEST_MM = (
    0.07  # between ILM and Bruch's membrane; the search keeps them 0.05 mm apart if it finds one edge for both
)
_UNEVEN = 0.15  # spread of the background in units of the contrast: an intensity ramp has 0.2 and more, scans up to 0.1


@dataclass(frozen=True)
class Quality:
    """`quality` 0..1 is the product of the parts below, each brought to 0..1; see `docs/quality.md`.

    `snr_db`: 20 log10((mean of retina - mean of vitreous) / standard deviation of the vitreous), within B-scans.
    `blank_share`: of the B-scans, blank or damaged. `clipped_share`: of the A-scans whose ILM or Bruch's membrane
    is at or beyond an end of the depth axis. `motion_um`: root mean square of the axial jumps from B-scan to
    B-scan, without the smooth shape of the eye. `fill_share`: of the voxels that were registration fill.
    `torn_share`: of the A-scans near a jump of the retina's thickness, where the search for a surface lost it.
    `implausible_share`: of the A-scans whose surfaces are not retina's by their thickness, or have tissue above
    them.
    """

    quality: float
    snr_db: float
    blank_share: float
    clipped_share: float
    motion_um: float
    fill_share: float
    torn_share: float
    implausible_share: float


def structured_frames(pixels: UInt8[np.ndarray, "D H W"]) -> Bool[np.ndarray, " D"]:
    """False for empty, constant or blinked-away B-scans. Raises VolumeRejected blank where most are.

    Measured is the structure left after averaging over an eighth of the columns: speckle alone, which a blink leaves
    at full strength, has next to none.
    """
    depth, height, width = pixels.shape
    parts = min(8, width)
    sampled = pixels[:, :: max(1, min(4, height // 16)), : width // parts * parts]
    columns = sampled.reshape(depth, sampled.shape[1], parts, -1)
    narrow = np.uint16 if columns.shape[3] < 257 else np.uint32  # holds the sums, and is fast
    columns = columns.sum(axis=3, dtype=narrow).astype(np.float32) / np.float32(columns.shape[3])
    structure = columns.std(axis=(1, 2))
    varied = structure > max(0.5, _BLANK * float(np.median(structure)))
    if varied.sum() < max(_MIN_FRAMES, depth // 2):
        raise rejection("blank", f"{int((~varied).sum())} of {depth} B-scans are empty or constant")
    return np.asarray(varied)


def signal_to_noise_db(image: Float[np.ndarray, "D R C"], surfaces: Surfaces, depth_mm: float) -> float:
    """Retina over vitreous in decibels of the intensity scale; 0 if no vitreous is in the scan.

    The SNR of Adler, Ko and Fujimoto (Optics Letters 29(24), 2004: 20 log10 of the image's maximum over the standard
    deviation of a background region) with the mean contrast of the retina instead of the maximum, which a single
    bright speckle decides. Means and variances are computed per B-scan and averaged.
    """
    step = max(1, image.shape[2] // 64)
    sampled = image[:, :, ::step]
    depth_index = np.arange(image.shape[1], dtype=np.float32)[:, None]
    ilm, bm = surfaces.ilm[:, None, ::step], surfaces.bm[:, None, ::step]
    vitreous = depth_index < ilm - _CLEAR_MM / depth_mm
    retina = (depth_index >= ilm) & (depth_index <= bm)  # [D, H, C]
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


def check_layered(image: Float[np.ndarray, "D R C"], surfaces: Surfaces, depth_mm: float) -> None:
    """Raises VolumeRejected no_tissue where the surfaces enclose no layers, or are one edge on an intensity ramp.

    Intensity falls within some 50 um under the pigment epithelium; along a ramp it does not. That a quarter of the
    A-scans show it is enough: atrophy, fluid and shadows do not count.
    """
    step = max(1, image.shape[2] // 64)
    sampled, height = image[:, :, ::step], image.shape[1]

    def mean(surface: np.ndarray, from_mm: float, to_mm: float) -> np.ndarray:
        """[D, C] mean intensity between two distances below `surface`."""
        first = round(from_mm / depth_mm)
        below = np.arange(first, max(round(to_mm / depth_mm), first + 1))
        position = np.rint(surface).astype(np.int64)[:, None] + below[:, None]  # [D, n, C]
        return np.take_along_axis(sampled, np.clip(position, 0, height - 1), axis=1).mean(axis=1)

    ilm, bm = surfaces.ilm[:, ::step], surfaces.bm[:, ::step]
    # Bruch's membrane under the bright pigment epithelium
    outer = mean(bm, -0.02, 0.01) - 0.45 * mean(bm, -0.13, -0.06) - 0.55 * mean(bm, 0.01, 0.06)
    edge = float(np.percentile(outer, 75)) / surfaces.contrast
    thick_mm = float(np.median(bm - ilm)) * depth_mm
    slope = thick_mm < _THINNEST_MM and surfaces.noise > _UNEVEN * surfaces.contrast
    if edge < _EDGE or slope:
        raise rejection(
            "no_tissue",
            f"no layers: the intensity step at Bruch's membrane is {edge:.2f} of the contrast, {thick_mm:.2f} mm below "
            "the ILM",
        )


def clipped_share(surfaces: Surfaces, fit: RobustSurface, height: int, depth_mm: float) -> float:
    """Share of A-scans whose ILM, or found or fitted Bruch's membrane, is at an end of the depth axis."""
    edge = _EDGE_MM / depth_mm
    fitted = fit.surface + fit.offsets[:, None]
    deepest = np.maximum(surfaces.bm, fitted)
    return float(((surfaces.ilm <= edge) | (deepest >= height - 1 - edge)).mean())


def torn_share(surfaces: Surfaces, depth_mm: float, column_mm: float) -> float:
    """Share of A-scans within `_TORN_REACH_MM` of a jump of thickness by `_TORN_MM` or more between two A-scans.

    Neither a pit nor the border of a detachment is so steep; noise makes a surface jump between layers.
    """
    from scipy.ndimage import maximum_filter1d

    jump = np.abs(np.diff(surfaces.bm - surfaces.ilm, axis=1)) * depth_mm > _TORN_MM * max(1.0, column_mm / 0.047)
    near = np.zeros(surfaces.bm.shape, bool)
    near[:, 1:] |= jump
    near[:, :-1] |= jump
    if not near.any():
        return 0.0
    return float(maximum_filter1d(near, 2 * max(1, round(_TORN_REACH_MM / column_mm)) + 1, axis=1).mean())


def axial_motion_um(fit: RobustSurface, depth_mm: float) -> float:
    """Root mean square of the jumps of Bruch's membrane between neighbouring B-scans, without its smooth surface."""
    return float(np.sqrt(np.mean(np.diff(fit.offsets) ** 2))) * depth_mm * 1000


def score_quality(
    image: Float[np.ndarray, "D R C"],
    surfaces: Surfaces,
    fit: RobustSurface,
    depth_mm: float,
    column_mm: float,
    positions_mm: Float[np.ndarray, " D"],
    blank_share: float,
    fill_share: float,
) -> Quality:
    """Quality of a scan from its in-plane canonical B-scans `image` at `positions_mm`, before flattening."""
    snr = signal_to_noise_db(image, surfaces, depth_mm)
    clipped = clipped_share(surfaces, fit, image.shape[1], depth_mm)
    motion = axial_motion_um(fit, depth_mm)
    torn = torn_share(surfaces, depth_mm, column_mm)
    implausible = implausible_share(image, surfaces, positions_mm, depth_mm, column_mm)
    score = (
        1
        / (1 + 10 ** ((_HALF_SNR_DB - snr) / _SNR_STEP_DB))
        / (1 + (motion / _HALF_MOTION_UM) ** 2)
        * (1 - blank_share)
        * (1 - clipped)
        * (1 - fill_share)
        * (1 - torn)
        * (1 - implausible)
    )
    return Quality(score, snr, blank_share, clipped, motion, fill_share, torn, implausible)


def looks_inverted(pixels: UInt8[np.ndarray, "D H W"]) -> bool:
    """Whether a scan is bright where a B-scan is dark: above the retina, and in most of its depth."""
    small = pixels[:: max(1, len(pixels) // 16), :, ::8].astype(np.float32)
    profile = small.mean(axis=(0, 2))
    above = float(np.median(profile[: max(2, len(profile) // 16)]))
    return above > 128 and above - float(profile.min()) > 2 * (float(profile.max()) - above)
