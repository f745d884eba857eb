"""A native volume to its canonical form: resampled, flattened on Bruch's membrane, cropped, 8 bit, tissue found.

Order of work: fill and blank B-scans out; each B-scan to canonical rows and columns; membranes found; A-scans shifted
by whole rows so that the fitted Bruch's membrane lies flat at the anchor; only then B-scans averaged along the
slow axis, so that tilt and motion do not smear the layers. The left eye is mirrored last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int16, UInt8

from octjepa.ingest.reasons import rejected
from octjepa.recipe import Preprocessing
from octjepa.store.fill import mask_fill
from octjepa.store.resample import centred, weights
from octjepa.store.surfaces import Surfaces, find_surfaces, robust_surface
from octjepa.volume import OCTVolume

CANONICAL_VERSION = 1  # counts up whenever the same file would give other pixels, band or figures
BAND_BELOW_BRUCH_MM = 0.15  # the tissue band ends this far under Bruch's membrane: choriocapillaris and inner choroid
MAX_WORK_BYTES = 2 << 30  # of the resampled volume before its axial crop, in float32
_LEAST_FRAMES = 4


@dataclass(frozen=True, eq=False)
class CanonicalVolume:
    """A stored volume. D, H, W are the contract's `stored_size`.

    `band` is (first row of tissue at the ILM, last row of the tissue band under Bruch's membrane), -1 in padding.
    `tissue_mean` and `tissue_std` are of the pixels within the band. Canonical row r of an A-scan was row
    r - `shifts` before flattening, counted in canonical rows from the top of the native B-scan.
    """

    volume_id: str
    pixels: UInt8[np.ndarray, "D H W"]
    band: Int16[np.ndarray, "2 D W"]
    tissue_mean: float
    tissue_std: float
    shifts: Int16[np.ndarray, "D W"]


@dataclass(frozen=True, eq=False)
class Canonicalised:
    """A canonical volume with what the index says of it."""

    volume: CanonicalVolume
    mirrored: bool
    tissue_share: float
    quality: float
    notes: tuple[str, ...]


def volume_id(content_hash: str) -> str:
    return content_hash[:16]


def _lively_frames(pixels: UInt8[np.ndarray, "D H W"]) -> Bool[np.ndarray, " D"]:
    """[D] False for empty, constant or blinked-away B-scans. Raises VolumeRejected blank where most are."""
    sampled = pixels[:, ::4, ::4].reshape(len(pixels), -1)
    spread = sampled.std(axis=1)
    lively = spread > max(1.0, 0.25 * float(np.median(spread)))
    if lively.sum() < max(_LEAST_FRAMES, len(pixels) // 2):
        raise rejected("blank", f"{int((~lively).sum())} of {len(pixels)} B-scans are empty or constant")
    return np.asarray(lively)


def _slow_positions(volume: OCTVolume) -> Float[np.ndarray, " D"]:
    """Slice positions in mm about the scan's centre."""
    if volume.slice_positions_mm is None:
        return centred(volume.shape[0], volume.spacing_mm[0])
    positions = np.asarray(volume.slice_positions_mm, float)
    return positions - (positions[0] + positions[-1]) / 2


def in_plane(
    pixels: UInt8[np.ndarray, "D H W"], volume: OCTVolume, preprocessing: Preprocessing, columns_mm: np.ndarray
) -> Float[np.ndarray, "D R C"]:
    """Every B-scan at canonical row spacing (whole native height) and at `columns_mm`."""
    from scipy.sparse import csr_array

    depth, height, width = pixels.shape
    _, dy, dx = volume.spacing_mm
    _, ty, tx = preprocessing.target_spacing_mm
    rows = max(8, round(height * dy / ty))
    size = 4 * depth * rows * max(len(columns_mm), 1)
    if size > MAX_WORK_BYTES:
        raise rejected("size_implausible", f"resampled to {depth} x {rows} x {len(columns_mm)}, {size / 2**30:.1f} GiB")
    down = csr_array(weights(centred(height, dy), centred(rows, ty), ty))
    across = weights(centred(width, dx), columns_mm, tx).T.copy()
    image = np.empty((depth, rows, len(columns_mm)), np.float32)
    for index, frame in enumerate(pixels):
        np.matmul(down @ frame.astype(np.float32), across, out=image[index])
    return image


def _within(positions_mm: np.ndarray, extent_mm: float) -> slice:
    """The run of `positions_mm` (rising) that lies on a scan of `extent_mm` about 0; a position at least."""
    inside = np.flatnonzero(np.abs(positions_mm) <= extent_mm / 2 + 1e-9)
    if not len(inside):
        middle = int(np.abs(positions_mm).argmin())
        return slice(middle, middle + 1)
    return slice(int(inside[0]), int(inside[-1]) + 1)


def _shift_field(bm: np.ndarray, preprocessing: Preprocessing) -> Int16[np.ndarray, "D W"]:
    """Whole rows by which each A-scan moves down, so that the fitted membrane comes to lie at the anchor."""
    ty = preprocessing.target_spacing_mm[1]
    anchor = round(preprocessing.axial_anchor * (preprocessing.stored_size[1] - 1))
    if preprocessing.flatten == "none":
        return np.full(bm.shape, round(anchor - float(np.median(bm))), np.int16)
    fit = robust_surface(bm, ty, degree=2)
    surface = fit.rows
    if preprocessing.flatten == "plane":
        surface = robust_surface(bm - fit.offsets[:, None], ty, degree=1).rows
    return np.rint(anchor - surface - fit.offsets[:, None]).astype(np.int16)


def _flattened(image: Float[np.ndarray, "D R C"], shifts: np.ndarray, height: int) -> tuple[np.ndarray, np.ndarray]:
    """(image [D, height, C] shifted, valid mask of the same shape)."""
    depth, rows, columns = image.shape
    place = np.arange(height)[None, :, None] - shifts[:, None, :].astype(np.int64)
    valid = (place >= 0) & (place < rows)
    np.clip(place, 0, rows - 1, out=place)
    place *= columns
    place += np.arange(depth)[:, None, None] * (rows * columns) + np.arange(columns)
    return image.reshape(-1).take(place), valid


def _along_slow(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`matrix` [T, D] applied to `values` [D, ...]."""
    flat = values.reshape(len(values), -1)
    return (matrix @ flat.astype(np.float32, copy=False)).reshape(len(matrix), *values.shape[1:])


def _to_bytes(image: np.ndarray, valid: np.ndarray, percentiles: tuple[float, float]) -> UInt8[np.ndarray, "D H W"]:
    """Raises VolumeRejected no_tissue where nothing is valid."""
    if not valid.any():
        raise rejected("no_tissue", "flattening moves the whole scan out of the stored height")
    low, high = np.percentile(image[valid], percentiles)
    scale = np.float32(255.0 / max(float(high - low), 1e-3))
    scaled = np.clip((image - np.float32(low)) * scale + np.float32(0.5), 0, 255).astype(np.uint8)
    scaled[~valid] = 0
    return scaled


def _in_band(band: Int16[np.ndarray, "2 D W"], height: int) -> Bool[np.ndarray, "D H W"]:
    rows = np.arange(height)[None, :, None]
    return (rows >= band[0][:, None, :]) & (rows <= band[1][:, None, :]) & (band[0] >= 0)[:, None, :]


def canonicalise(volume: OCTVolume, preprocessing: Preprocessing) -> Canonicalised:
    """Raises VolumeRejected: blank, no_tissue, size_implausible."""
    notes: list[str] = []
    stored_d, stored_h, stored_w = preprocessing.stored_size
    tz, ty, tx = preprocessing.target_spacing_mm
    dz, _, dx = volume.spacing_mm

    pixels, filled = mask_fill(volume.pixels)
    if filled:
        notes.append("fill_masked")
    lively = _lively_frames(pixels)
    positions = _slow_positions(volume)
    extent_z = float(positions[-1] - positions[0]) + dz
    if not lively.all():
        notes.append(f"blank_frames={int((~lively).sum())}")
        pixels, positions = pixels[lively], positions[lively]

    columns_mm = centred(stored_w, tx)
    columns = _within(columns_mm, volume.shape[2] * dx)
    image = in_plane(pixels, volume, preprocessing, columns_mm[columns])
    surfaces = find_surfaces(image, ty, tx)
    shifts = _shift_field(surfaces.bm, preprocessing)
    flat, valid = _flattened(image, shifts, stored_h)

    slices_mm = centred(stored_d, tz)
    slices = _within(slices_mm, extent_z)
    slow = weights(positions, slices_mm[slices], tz, reach_mm=max(extent_z, tz))
    if valid.all():
        image, kept = _along_slow(slow, flat), np.ones((len(slow), *valid.shape[1:]), bool)
    else:
        flat[~valid] = 0
        share = _along_slow(slow, valid)
        image = _along_slow(slow, flat) / np.maximum(share, 1e-3)
        kept = share > 0.5
    inner = _to_bytes(image, kept, preprocessing.clip_percentiles)

    inner_band = _band(surfaces, shifts, slow, ty, stored_h)
    place = (slices, slice(None), columns)
    stored = np.zeros(preprocessing.stored_size, np.uint8)
    stored[place] = inner
    band = np.full((2, stored_d, stored_w), -1, np.int16)
    band[:, slices, columns] = inner_band
    moved = np.zeros((stored_d, stored_w), np.int16)
    moved[slices, columns] = np.rint(_along_slow(slow, shifts)).astype(np.int16)

    tissue = _in_band(inner_band, stored_h) & kept
    if not tissue.any():
        raise rejected("no_tissue", "the tissue band lies outside the stored height")
    values = inner[tissue]
    quality = _quality(inner, inner_band, kept, values) * float(lively.mean())
    mirrored = preprocessing.orientation == "OD" and volume.laterality == "OS"
    if mirrored:
        stored = np.ascontiguousarray(stored[..., ::-1])
        band = np.ascontiguousarray(band[..., ::-1])
        moved = np.ascontiguousarray(moved[..., ::-1])
    canonical = CanonicalVolume(
        volume_id(volume.content_hash), stored, band, float(values.mean()), float(values.std()), moved
    )
    return Canonicalised(canonical, mirrored, float(tissue.sum() / stored.size), quality, tuple(notes))


def _band(
    surfaces: Surfaces, shifts: np.ndarray, slow: np.ndarray, row_mm: float, height: int
) -> Int16[np.ndarray, "2 T C"]:
    """First and last row of tissue, in stored rows at the canonical slices."""
    ilm = _along_slow(slow, surfaces.ilm + shifts)
    bm = _along_slow(slow, surfaces.bm + shifts)
    bottom = bm + BAND_BELOW_BRUCH_MM / row_mm
    band = np.stack([np.clip(np.rint(ilm), 0, height - 1), np.clip(np.rint(bottom), 0, height - 1)])
    return band.astype(np.int16)


def _quality(pixels: np.ndarray, band: np.ndarray, kept: np.ndarray, tissue: np.ndarray) -> float:
    """0..1: d / (1 + d), d the separation of tissue and vitreous in pooled standard deviations."""
    vitreous = pixels[kept & (np.arange(pixels.shape[1])[None, :, None] < band[0][:, None, :] - 2)]
    if vitreous.size < 64:
        return 0.0
    spread = float(np.sqrt((tissue.var() + vitreous.var()) / 2)) + 1e-6
    separation = max(0.0, float(tissue.mean() - vitreous.mean()) / spread)
    return separation / (1 + separation)
