"""Canonicalisation: a native volume is resampled, flattened on Bruch's membrane, cropped to 8 bit, its tissue found.

Steps: remove painted text, fill and blank B-scans. Resample each B-scan to canonical depth and column spacing. Find the
retinal surfaces. Shift A-scans by whole depth indices so that the fitted Bruch's membrane is flat at the anchor. Only
then average B-scans along the slice axis, so that tilt and motion do not smear the layers. A left eye is mirrored last.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Bool, Float, Int16, Shaped, UInt8

from octjepa.canonical.burned_in import find_text
from octjepa.canonical.fill import intensity_beside_mask, remove_fill
from octjepa.canonical.grid_coverage import coverage_notes, shares_outside
from octjepa.canonical.near_duplicates import enface_hash, mean_en_face
from octjepa.canonical.neighbours import check_neighbours
from octjepa.canonical.plausibility import doubt_notes, retina_evidence, score_retina
from octjepa.canonical.quality import check_layered, score_quality, structured_frames
from octjepa.canonical.resample import centred_positions, resampling_matrix
from octjepa.canonical.surfaces import RobustSurface, Surfaces, find_surfaces, fit_surface
from octjepa.canonical.vitreous_objects import vitreous_notes
from octjepa.notes import HALVES_NOTE, SPARSE_NOTE, Note, unique_notes
from octjepa.read.orientation import VERTICAL_NOTE
from octjepa.read.picture_frames import damaged_frames
from octjepa.reasons import rejection
from octjepa.recipe import Preprocessing
from octjepa.volume import CanonicalVolume, OCTVolume, volume_id

BAND_BELOW_BRUCH_MM = 0.15  # the tissue band ends this far under Bruch's membrane: choriocapillaris and inner choroid
MAX_WORK_BYTES = 2 << 30  # of all arrays whose size follows from the file, together
SPARSE_GAP_MM = 0.5  # median gap between B-scans; volume scans have 0.01 to 0.25
SPARSE_SHARE = 0.125  # of the stored slices with a B-scan within half that gap or half a slice step, at least
SPARSE_FRAMES = 8  # fewer are a raster of lines, not a volume
_MAX_TEXT_SHARE = 0.2  # of a B-scan; more is the picture of a screen


@dataclass(frozen=True, eq=False)
class CanonicalisationResult:
    """A canonical volume and fields of its index entry.

    `measurements`: quality, its parts, the retina score and the shares outside of the grid. `enface_hash` is "" for a
    single B-scan.
    """

    volume: CanonicalVolume
    mirrored: bool
    tissue_share: float
    measurements: dict[str, float]
    notes: tuple[Note, ...]
    enface_hash: str


def _slice_positions(volume: OCTVolume) -> Float[np.ndarray, " D"]:
    """Slice positions in mm from the scan's centre."""
    if volume.slice_positions_mm is None:
        return centred_positions(volume.shape[0], volume.spacing_mm[0])
    positions = np.asarray(volume.slice_positions_mm, float)
    return positions - (positions[0] + positions[-1]) / 2


def _check_size(volume: OCTVolume, preprocessing: Preprocessing, columns: int) -> int:
    """The native height at canonical spacing. Raises VolumeRejected size_implausible, from sizes alone."""
    depth, height, width = volume.shape
    stored_height = preprocessing.stored_size[1]
    extent = height * volume.spacing_mm[1] / preprocessing.target_spacing_mm[1]
    resampled_height = max(8, round(extent)) if extent < MAX_WORK_BYTES else MAX_WORK_BYTES
    resampled, matrices = depth * resampled_height * columns, resampled_height * height + width * columns
    flattened = 4 * depth * stored_height * columns  # in float32, of which its int64 positions take most
    size = 4 * (resampled + matrices + flattened)
    if size > MAX_WORK_BYTES:
        raise rejection(
            "size_implausible", f"resampled to {depth} x {resampled_height} x {columns}, {size / 2**30:.1f} GiB"
        )
    return resampled_height


def resample_in_plane(
    pixels: UInt8[np.ndarray, "D H W"],
    volume: OCTVolume,
    preprocessing: Preprocessing,
    columns_mm: Float[np.ndarray, " C"],
) -> Float[np.ndarray, "D R C"]:
    """Every B-scan at canonical depth spacing (whole native height, R) and at `columns_mm` (C)."""
    from scipy.sparse import csr_array

    _, height, width = pixels.shape
    _, dy, dx = volume.spacing_mm
    _, ty, tx = preprocessing.target_spacing_mm
    resampled_height = _check_size(volume, preprocessing, len(columns_mm))
    down = csr_array(resampling_matrix(centred_positions(height, dy), centred_positions(resampled_height, ty), ty))
    across = resampling_matrix(centred_positions(width, dx), columns_mm, tx).T.copy()
    image = np.empty((len(pixels), resampled_height, len(columns_mm)), np.float32)
    for index, frame in enumerate(pixels):
        np.matmul(down @ frame.astype(np.float32), across, out=image[index])
    return image


def _sparse_note(
    frame_mm: Float[np.ndarray, " N"], stored_mm: Float[np.ndarray, " D"], step_mm: float
) -> tuple[str, ...]:
    """The note of a scan whose B-scans are too few or too far apart to be a volume; () for a volume."""
    distance = np.abs(stored_mm[:, None] - frame_mm).min(axis=1)
    seen = int((distance <= max(step_mm, SPARSE_GAP_MM) / 2 + 1e-9).sum())
    gap = float(np.median(np.diff(frame_mm)))
    is_sparse = gap > SPARSE_GAP_MM or seen < SPARSE_SHARE * len(stored_mm) or len(frame_mm) < SPARSE_FRAMES
    return (f"{SPARSE_NOTE}={seen}",) if is_sparse else ()


def _covered_range(positions_mm: Float[np.ndarray, " N"], ends_mm: tuple[float, float]) -> slice:
    """The slice of `positions_mm` (rising) between the ends of a scan; at least one position."""
    low, high = ends_mm
    inside = np.flatnonzero((positions_mm >= low - 1e-9) & (positions_mm <= high + 1e-9))
    if not len(inside):
        middle = int(np.abs(positions_mm - (low + high) / 2).argmin())
        return slice(middle, middle + 1)
    return slice(int(inside[0]), int(inside[-1]) + 1)


def _ends_of_slices(
    frame_mm: Float[np.ndarray, " N"], positions_mm: Float[np.ndarray, " D"], step_mm: float
) -> tuple[float, float]:
    """The ends of the scan along the slice axis, half a step beyond the first and the last B-scan that is left.

    `positions_mm` are the B-scans at `frame_mm` that are left. Where those at an end are not, the scan is shorter.
    """
    half = (float(frame_mm[-1] - frame_mm[0]) + step_mm) / 2
    low = -half if positions_mm[0] == frame_mm[0] else float(positions_mm[0]) - step_mm / 2
    high = half if positions_mm[-1] == frame_mm[-1] else float(positions_mm[-1]) + step_mm / 2
    return low, high


def _shift_field(
    bm: Float[np.ndarray, "D W"], fit: RobustSurface, preprocessing: Preprocessing
) -> Int16[np.ndarray, "D W"]:
    """Whole depth indices by which each A-scan moves down, so that the fitted Bruch's membrane is at the anchor."""
    ty = preprocessing.target_spacing_mm[1]
    anchor = round(preprocessing.axial_anchor * (preprocessing.stored_size[1] - 1))
    if preprocessing.flatten == "none":
        return np.full(bm.shape, round(anchor - float(np.median(bm))), np.int16)
    surface = fit.surface
    if preprocessing.flatten == "plane":
        surface = fit_surface(bm - fit.offsets[:, None], ty, degree=1).surface
    return np.rint(anchor - surface - fit.offsets[:, None]).astype(np.int16)


def _flatten(
    image: Float[np.ndarray, "D R C"], shifts: Int16[np.ndarray, "D C"], height: int
) -> tuple[Float[np.ndarray, "D H C"], Bool[np.ndarray, "D H C"]]:
    """(image shifted down by `shifts`, H = `height`; whether the scan has a voxel there)."""
    depth, height_before, columns = image.shape
    # Flat indices into `image`, built in place: an int64 array of [D, height, C] is large.
    position = np.arange(height)[None, :, None] - shifts[:, None, :].astype(np.int64)
    valid = (position >= 0) & (position < height_before)
    np.clip(position, 0, height_before - 1, out=position)
    position *= columns
    position += np.arange(depth)[:, None, None] * (height_before * columns) + np.arange(columns)
    return image.reshape(-1).take(position), valid


def _average_slices(
    matrix: Float[np.ndarray, "T D"], values: Shaped[np.ndarray, "D ..."]
) -> Float[np.ndarray, "T ..."]:
    """`matrix` of `resampling_matrix` applied to the slice axis of `values`."""
    flat = values.reshape(len(values), -1)
    return (matrix @ flat.astype(np.float32, copy=False)).reshape(len(matrix), *values.shape[1:])


def _average_valid(
    matrix: Float[np.ndarray, "T D"], flat: Float[np.ndarray, "D H W"], valid: Bool[np.ndarray, "D H W"] | None
) -> tuple[Float[np.ndarray, "T H W"], Bool[np.ndarray, "T H W"]]:
    """(means along the slice axis of what is `valid`, None for all; where half of the weight is). `flat` is 0 else."""
    if valid is None:
        return _average_slices(matrix, flat), np.ones((len(matrix), *flat.shape[1:]), bool)
    share = _average_slices(matrix, valid)
    return _average_slices(matrix, flat) / np.maximum(share, 1e-3), share > 0.5


def intensity_scale(
    image: Float[np.ndarray, "D H W"], valid: Bool[np.ndarray, "D H W"], percentiles: tuple[float, float]
) -> tuple[np.float32, np.float32]:
    """(intensity of 0, stored values a unit of intensity) between two percentiles.

    Raises VolumeRejected no_tissue if nothing is valid.
    """
    if not valid.any():
        raise rejection("no_tissue", "flattening moves the whole scan out of the stored height")
    low, high = np.percentile(image[valid], percentiles)
    return np.float32(low), np.float32(255.0 / max(float(high - low), 1e-3))


def rescale_to_8_bit(
    image: Float[np.ndarray, "D H W"], valid: Bool[np.ndarray, "D H W"], scale: tuple[np.float32, np.float32]
) -> UInt8[np.ndarray, "D H W"]:
    """Intensities by `intensity_scale` to 0..255; 0 where not valid."""
    low, factor = scale
    scaled = np.clip((image - low) * factor + np.float32(0.5), 0, 255).astype(np.uint8)
    scaled[~valid] = 0
    return scaled


def _band_mask(band: Int16[np.ndarray, "2 D W"], height: int) -> Bool[np.ndarray, "D H W"]:
    """Whether each voxel is within the band; H = `height`."""
    depth_index = np.arange(height)[None, :, None]
    return (depth_index >= band[0][:, None, :]) & (depth_index <= band[1][:, None, :]) & (band[0] >= 0)[:, None, :]


def canonicalise(volume: OCTVolume, preprocessing: Preprocessing, halves: bool = False) -> CanonicalisationResult:
    """Brings a native volume to the form of the contract; `halves`: with `half_difference`, where B-scans are dense.

    Every slice of a half needs B-scans within its own step: where every other B-scan is further from the next than the
    stored slices are, the halves would show different places, and there is none.
    Raises VolumeRejected: blank, no_tissue, size_implausible, burned_in_text, not_retina, frames_unrelated,
    one_position.
    """
    notes: list[str] = []
    stored_d, stored_h, stored_w = preprocessing.stored_size
    tz, ty, tx = preprocessing.target_spacing_mm
    dz, _, dx = volume.spacing_mm
    columns_mm = centred_positions(stored_w, tx)
    width_mm = volume.shape[2] * dx
    columns = _covered_range(columns_mm, (-width_mm / 2, width_mm / 2))  # the stored columns that the scan covers, C
    _check_size(volume, preprocessing, columns.stop - columns.start)

    # Remove fill, damaged B-scans, painted text and blank B-scans, which are not tissue. D' B-scans are left.
    pixels, filled = remove_fill(volume.pixels)
    if filled:
        notes.append("fill_masked")
    frame_mm = _slice_positions(volume)
    extent_z = float(frame_mm[-1] - frame_mm[0]) + dz
    intact = ~damaged_frames(pixels)
    pixels, positions = (pixels, frame_mm) if intact.all() else (pixels[intact], frame_mm[intact])
    text = find_text(pixels)
    if text is not None:
        pixels = _remove_text(pixels, text)
        notes += ["burned_in_text", f"text_blanked={int(text.any(axis=(1, 2)).sum())}"]
    usable = structured_frames(pixels)
    left_out = {"damaged_frames": int((~intact).sum()), "blank_frames": int((~usable).sum())}
    notes += [f"{note}={count}" for note, count in left_out.items() if count]
    pixels, positions = (pixels, positions) if usable.all() else (pixels[usable], positions[usable])

    # In-plane: [D', R, C], R the native height at canonical spacing.
    image = resample_in_plane(pixels, volume, preprocessing, columns_mm[columns])
    surfaces = find_surfaces(image, ty, tx)  # [D', C] each
    check_layered(image, surfaces, ty)
    if text is not None:
        painted = resample_in_plane(text[usable].view(np.uint8), volume, preprocessing, columns_mm[columns])
        _check_text(painted, surfaces, ty)
    fit = fit_surface(surfaces.bm, ty)
    evidence = retina_evidence(image, surfaces, ty, tx)
    retina_score = score_retina(surfaces, fit, evidence, ty, tx)
    notes += doubt_notes(evidence)
    quality = score_quality(image, surfaces, fit, ty, tx, positions, 1 - len(positions) / len(frame_mm), filled)
    notes += vitreous_notes(image, surfaces, fit, ty, tx)
    if volume.pattern == "raster":
        notes += check_neighbours(image, surfaces, positions, quality.torn_share, ty, tx)
    shifts = _shift_field(surfaces.bm, fit, preprocessing)  # [D', C]
    outside = shares_outside(frame_mm, volume.shape[2], dx, surfaces, shifts, BAND_BELOW_BRUCH_MM / ty, preprocessing)
    notes += coverage_notes(outside)
    flat, valid = _flatten(image, shifts, stored_h)  # [D', stored_h, C]

    # Along the slice axis, only now: [S, stored_h, C], S the stored slices that the scan covers.
    slices_mm = centred_positions(stored_d, tz)
    slices = _covered_range(slices_mm, _ends_of_slices(frame_mm, positions, dz))
    if volume.pattern == "raster":
        notes.extend(_sparse_note(positions, slices_mm, tz))
    slice_weights = resampling_matrix(positions, slices_mm[slices], tz, reach_mm=max(extent_z, tz))  # [S, D']
    whole = bool(valid.all())
    if not whole:
        flat[~valid] = 0
    image, covered = _average_valid(slice_weights, flat, None if whole else valid)
    scale = intensity_scale(image, covered, preprocessing.clip_percentiles)
    inner = rescale_to_8_bit(image, covered, scale)
    half_difference = None
    if halves and 2 * float(np.median(np.diff(positions))) <= tz + 1e-9:
        both = []
        for half in (slice(0, None, 2), slice(1, None, 2)):  # of the B-scans
            weights = resampling_matrix(positions[half], slices_mm[slices], tz, reach_mm=max(extent_z, tz))
            half_average, own_covered = _average_valid(weights, flat[half], None if whole else valid[half])
            both.append(np.where(own_covered, rescale_to_8_bit(half_average, covered, scale), inner).astype(np.int16))
        half_difference = np.zeros(preprocessing.stored_size, np.int8)
        half_difference[slices, :, columns] = (both[0] - both[1]) // 2  # -128 to 127
        notes.append(HALVES_NOTE)
    inner_band = _tissue_band(surfaces, shifts, slice_weights, ty, stored_h)  # [2, S, C]
    tissue = _band_mask(inner_band, stored_h) & covered
    if not tissue.any():
        raise rejection("no_tissue", "the tissue mask is outside the stored height")
    values = inner[tissue]

    # Into the stored size, padded where the scan is smaller; slices and columns are on the last two axes of maps.
    stored = np.zeros(preprocessing.stored_size, np.uint8)
    stored[slices, :, columns] = inner
    band = np.full((2, stored_d, stored_w), -1, np.int16)
    band[:, slices, columns] = inner_band
    stored_shifts = np.zeros((stored_d, stored_w), np.int16)
    stored_shifts[slices, columns] = np.rint(_average_slices(slice_weights, shifts)).astype(np.int16)
    frame_shifts = np.zeros((len(frame_mm), stored_w), np.int16)  # a blank B-scan has the shifts of its neighbour
    frame_shifts[:, columns] = shifts[np.abs(frame_mm[:, None] - positions).argmin(axis=1)]
    enface_image = np.full((stored_d, stored_w), np.nan, np.float32)
    enface_image[slices, columns] = mean_en_face(inner, tissue)

    left = volume.laterality == "OS"
    mirrored = preprocessing.orientation == "OD" and left and VERTICAL_NOTE not in volume.notes
    if mirrored:
        stored, band = np.ascontiguousarray(stored[..., ::-1]), np.ascontiguousarray(band[..., ::-1])
        stored_shifts = np.ascontiguousarray(stored_shifts[..., ::-1])
        frame_shifts = np.ascontiguousarray(frame_shifts[..., ::-1])
        if half_difference is not None:
            half_difference = np.ascontiguousarray(half_difference[..., ::-1])
    canonical = CanonicalVolume(
        volume_id(volume.content_hash),
        stored,
        band,
        float(values.mean()),
        float(values.std()),
        stored_shifts,
        frame_shifts,
        frame_mm,
        half_difference,
    )
    code = enface_hash(enface_image[:, ::-1] if left else enface_image, tz, tx)
    measurements: dict[str, float] = {**asdict(quality), "retina_score": retina_score, **outside}
    return CanonicalisationResult(
        canonical, mirrored, float(tissue.sum() / stored.size), measurements, unique_notes(notes), code
    )


def _remove_text(pixels: UInt8[np.ndarray, "D H W"], text: Bool[np.ndarray, "D H W"]) -> UInt8[np.ndarray, "D H W"]:
    """Sets text to the level next to it. Raises VolumeRejected burned_in_text if it fills much of a B-scan."""
    share = float(text.mean(axis=(1, 2)).max())
    if share > _MAX_TEXT_SHARE:
        raise rejection("burned_in_text", f"text and lines cover {share:.0%} of a B-scan")
    cleaned = pixels.copy()
    for index in np.flatnonzero(text.any(axis=(1, 2))):
        cleaned[index][text[index]] = intensity_beside_mask(pixels[index], text[index])
    return cleaned


def _check_text(text: Float[np.ndarray, "D R C"], surfaces: Surfaces, depth_mm: float) -> None:
    """Raises VolumeRejected burned_in_text where text covered tissue, which is then lost."""
    depth_index = np.arange(text.shape[1])[:, None]
    inside = (depth_index >= surfaces.ilm[:, None]) & (
        depth_index <= surfaces.bm[:, None] + BAND_BELOW_BRUCH_MM / depth_mm
    )
    hidden = ((text > 0.5) & inside).any(axis=(1, 2))
    if hidden.any():
        raise rejection("burned_in_text", f"text covers the retina in {int(hidden.sum())} of {len(text)} B-scans")


def _tissue_band(
    surfaces: Surfaces,
    shifts: Int16[np.ndarray, "D C"],
    slice_weights: Float[np.ndarray, "T D"],
    depth_mm: float,
    height: int,
) -> Int16[np.ndarray, "2 T C"]:
    """(first, last) depth index of tissue at the T canonical slices, from surfaces of the D native ones."""
    ilm = _average_slices(slice_weights, surfaces.ilm + shifts)
    bm = _average_slices(slice_weights, surfaces.bm + shifts)
    bottom = bm + BAND_BELOW_BRUCH_MM / depth_mm
    band = np.stack([np.clip(np.rint(ilm), 0, height - 1), np.clip(np.rint(bottom), 0, height - 1)])
    return band.astype(np.int16)
