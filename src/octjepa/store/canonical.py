"""A native volume to its canonical form: resampled, flattened on Bruch's membrane, cropped, 8 bit, tissue found.

Order of work: painted text, fill and blank B-scans out; each B-scan to canonical rows and columns; membranes found;
A-scans shifted by whole rows so that the fitted Bruch's membrane lies flat at the anchor; only then B-scans averaged
along the slow axis, so that tilt and motion do not smear the layers. The left eye is mirrored last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int16, UInt8

from octjepa.ingest.burned_in import find_text
from octjepa.ingest.reasons import rejection
from octjepa.recipe import Preprocessing
from octjepa.store.fill import level_beside, mask_fill
from octjepa.store.near_duplicates import enface, enface_hash
from octjepa.store.quality import check_layered, score_quality, structured_frames
from octjepa.store.resample import centred, weights
from octjepa.store.surfaces import RobustSurface, Surfaces, find_surfaces, robust_surface
from octjepa.volume import OCTVolume

CANONICAL_VERSION = 2  # counts up whenever the same file would give other pixels, band or figures
BAND_BELOW_BRUCH_MM = 0.15  # the tissue band ends this far under Bruch's membrane: choriocapillaris and inner choroid
MAX_WORK_BYTES = 2 << 30  # of all arrays whose size follows from the file, together
_MOST_TEXT = 0.2  # of a B-scan; more is the picture of a screen


@dataclass(frozen=True, eq=False)
class CanonicalVolume:
    """A stored volume. D, H, W are the contract's `stored_size`.

    `band` is (first row of tissue at the ILM, last row of the tissue band under Bruch's membrane), -1 in padding.
    `tissue_mean` and `tissue_std` are of the pixels within the band. Canonical row r of an A-scan was row
    r - `shifts` before flattening, counted in canonical rows from the top of the native B-scan; that is a mean over
    the B-scans that were averaged. `frame_shifts` says it of each of the N native ones, and `frame_mm` where it lay
    about the scan's centre: what `octjepa.store.native_mapping` needs. A store's reader leaves those two out.
    """

    volume_id: str
    pixels: UInt8[np.ndarray, "D H W"]
    band: Int16[np.ndarray, "2 D W"]
    tissue_mean: float
    tissue_std: float
    shifts: Int16[np.ndarray, "D W"]
    frame_shifts: Int16[np.ndarray, "N W"] | None = None
    frame_mm: Float[np.ndarray, " N"] | None = None

    def geometry(self) -> dict[str, np.ndarray]:
        """What stands beside the pixels, by name."""
        arrays = {
            "band": self.band,
            "shifts": self.shifts,
            "frame_shifts": self.frame_shifts,
            "frame_mm": self.frame_mm,
        }
        return {name: array for name, array in arrays.items() if array is not None}


@dataclass(frozen=True, eq=False)
class CanonicalisationResult:
    """A canonical volume with what the index says of it: `figures` are quality, its parts and the en face hash."""

    volume: CanonicalVolume
    mirrored: bool
    tissue_share: float
    figures: dict[str, float | str]
    notes: tuple[str, ...]

    @property
    def quality(self) -> float:
        return float(self.figures["quality"])


def volume_id(content_hash: str) -> str:
    return content_hash[:16]


def _slow_positions(volume: OCTVolume) -> Float[np.ndarray, " D"]:
    """Slice positions in mm about the scan's centre."""
    if volume.slice_positions_mm is None:
        return centred(volume.shape[0], volume.spacing_mm[0])
    positions = np.asarray(volume.slice_positions_mm, float)
    return positions - (positions[0] + positions[-1]) / 2


def _check_size(volume: OCTVolume, preprocessing: Preprocessing, columns: int) -> int:
    """Rows of a whole native B-scan at canonical spacing. Raises VolumeRejected size_implausible, from sizes alone."""
    depth, height, width = volume.shape
    stored_height = preprocessing.stored_size[1]
    extent = height * volume.spacing_mm[1] / preprocessing.target_spacing_mm[1]
    rows = max(8, round(extent)) if extent < MAX_WORK_BYTES else MAX_WORK_BYTES
    resampled, matrices = depth * rows * columns, rows * height + width * columns
    flattened = 4 * depth * stored_height * columns  # its places are of 8 bytes
    size = 4 * (resampled + matrices + flattened)
    if size > MAX_WORK_BYTES:
        raise rejection("size_implausible", f"resampled to {depth} x {rows} x {columns}, {size / 2**30:.1f} GiB")
    return rows


def resample_in_plane(
    pixels: UInt8[np.ndarray, "D H W"], volume: OCTVolume, preprocessing: Preprocessing, columns_mm: np.ndarray
) -> Float[np.ndarray, "D R C"]:
    """Every B-scan at canonical row spacing (whole native height) and at `columns_mm`."""
    from scipy.sparse import csr_array

    _, height, width = pixels.shape
    _, dy, dx = volume.spacing_mm
    _, ty, tx = preprocessing.target_spacing_mm
    rows = _check_size(volume, preprocessing, len(columns_mm))
    down = csr_array(weights(centred(height, dy), centred(rows, ty), ty))
    across = weights(centred(width, dx), columns_mm, tx).T.copy()
    image = np.empty((len(pixels), rows, len(columns_mm)), np.float32)
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


def _shift_field(bm: np.ndarray, fit: RobustSurface, preprocessing: Preprocessing) -> Int16[np.ndarray, "D W"]:
    """Whole rows by which each A-scan moves down, so that the fitted membrane comes to lie at the anchor."""
    ty = preprocessing.target_spacing_mm[1]
    anchor = round(preprocessing.axial_anchor * (preprocessing.stored_size[1] - 1))
    if preprocessing.flatten == "none":
        return np.full(bm.shape, round(anchor - float(np.median(bm))), np.int16)
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
        raise rejection("no_tissue", "flattening moves the whole scan out of the stored height")
    low, high = np.percentile(image[valid], percentiles)
    scale = np.float32(255.0 / max(float(high - low), 1e-3))
    scaled = np.clip((image - np.float32(low)) * scale + np.float32(0.5), 0, 255).astype(np.uint8)
    scaled[~valid] = 0
    return scaled


def _in_band(band: Int16[np.ndarray, "2 D W"], height: int) -> Bool[np.ndarray, "D H W"]:
    rows = np.arange(height)[None, :, None]
    return (rows >= band[0][:, None, :]) & (rows <= band[1][:, None, :]) & (band[0] >= 0)[:, None, :]


def canonicalise(volume: OCTVolume, preprocessing: Preprocessing) -> CanonicalisationResult:
    """Raises VolumeRejected: blank, no_tissue, size_implausible, burned_in_text."""
    notes: list[str] = []
    stored_d, stored_h, stored_w = preprocessing.stored_size
    tz, ty, tx = preprocessing.target_spacing_mm
    dz, _, dx = volume.spacing_mm
    columns_mm = centred(stored_w, tx)
    columns = _within(columns_mm, volume.shape[2] * dx)
    _check_size(volume, preprocessing, columns.stop - columns.start)

    pixels, filled = mask_fill(volume.pixels)
    if filled:
        notes.append("fill_masked")
    text = find_text(pixels)
    if text is not None:
        pixels = _without_text(pixels, text)
        notes += ["burned_in_text", f"text_blanked={int(text.any(axis=(1, 2)).sum())}"]
    lively = structured_frames(pixels)
    frame_mm = _slow_positions(volume)
    extent_z = float(frame_mm[-1] - frame_mm[0]) + dz
    positions = frame_mm[lively]
    if not lively.all():
        notes.append(f"blank_frames={int((~lively).sum())}")
        pixels = pixels[lively]

    image = resample_in_plane(pixels, volume, preprocessing, columns_mm[columns])
    surfaces = find_surfaces(image, ty, tx)
    check_layered(image, surfaces, ty)
    if text is not None:
        _check_text(
            resample_in_plane(text[lively].view(np.uint8), volume, preprocessing, columns_mm[columns]), surfaces, ty
        )
    fit = robust_surface(surfaces.bm, ty)
    quality = score_quality(image, surfaces, fit, ty, 1 - float(lively.mean()), filled)
    shifts = _shift_field(surfaces.bm, fit, preprocessing)
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
    tissue = _in_band(inner_band, stored_h) & kept
    if not tissue.any():
        raise rejection("no_tissue", "the tissue band lies outside the stored height")
    values = inner[tissue]

    stored = np.zeros(preprocessing.stored_size, np.uint8)
    stored[slices, :, columns] = inner
    band = np.full((2, stored_d, stored_w), -1, np.int16)
    band[:, slices, columns] = inner_band
    moved = np.zeros((stored_d, stored_w), np.int16)
    moved[slices, columns] = np.rint(_along_slow(slow, shifts)).astype(np.int16)
    frame_moved = np.zeros((len(frame_mm), stored_w), np.int16)
    frame_moved[:, columns] = shifts[np.abs(frame_mm[:, None] - positions).argmin(axis=1)]
    light = np.full((stored_d, stored_w), np.nan, np.float32)
    light[slices, columns] = enface(inner, tissue)

    left = volume.laterality == "OS"
    mirrored = preprocessing.orientation == "OD" and left
    if mirrored:
        stored, band = np.ascontiguousarray(stored[..., ::-1]), np.ascontiguousarray(band[..., ::-1])
        moved, frame_moved = np.ascontiguousarray(moved[..., ::-1]), np.ascontiguousarray(frame_moved[..., ::-1])
    canonical = CanonicalVolume(
        volume_id(volume.content_hash), stored, band, float(values.mean()), float(values.std()), moved, frame_moved,
        frame_mm,
    )  # fmt: skip
    code = enface_hash(light[:, ::-1] if left else light, tz, tx)
    figures: dict[str, float | str] = {**quality.columns(), "enface_hash": code}
    return CanonicalisationResult(canonical, mirrored, float(tissue.sum() / stored.size), figures, tuple(notes))


def _without_text(pixels: UInt8[np.ndarray, "D H W"], text: Bool[np.ndarray, "D H W"]) -> UInt8[np.ndarray, "D H W"]:
    """Text brought to the level beside it. Raises VolumeRejected burned_in_text where it fills much of a B-scan."""
    share = float(text.mean(axis=(1, 2)).max())
    if share > _MOST_TEXT:
        raise rejection("burned_in_text", f"text and lines cover {share:.0%} of a B-scan")
    cleaned = pixels.copy()
    for index in np.flatnonzero(text.any(axis=(1, 2))):
        cleaned[index][text[index]] = level_beside(pixels[index], text[index])
    return cleaned


def _check_text(text: Float[np.ndarray, "D R C"], surfaces: Surfaces, row_mm: float) -> None:
    """Raises VolumeRejected burned_in_text where text covered tissue, which is then lost."""
    rows = np.arange(text.shape[1])[:, None]
    inside = (rows >= surfaces.ilm[:, None]) & (rows <= surfaces.bm[:, None] + BAND_BELOW_BRUCH_MM / row_mm)
    hidden = ((text > 0.5) & inside).any(axis=(1, 2))
    if hidden.any():
        raise rejection("burned_in_text", f"text lies on the retina in {int(hidden.sum())} of {len(text)} B-scans")


def _band(
    surfaces: Surfaces, shifts: np.ndarray, slow: np.ndarray, row_mm: float, height: int
) -> Int16[np.ndarray, "2 T C"]:
    """First and last row of tissue, in stored rows at the canonical slices."""
    ilm = _along_slow(slow, surfaces.ilm + shifts)
    bm = _along_slow(slow, surfaces.bm + shifts)
    bottom = bm + BAND_BELOW_BRUCH_MM / row_mm
    band = np.stack([np.clip(np.rint(ilm), 0, height - 1), np.clip(np.rint(bottom), 0, height - 1)])
    return band.astype(np.int16)
