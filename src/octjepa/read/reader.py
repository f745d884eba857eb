"""Any file to an `OCTVolume`, or a `VolumeRejected` that says why: recognise its format, read it, assemble the volume.

Eye, person, scan pattern, spacing and frame order are decided here, alike for all formats.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.errors import UsageError, VolumeRejected
from octjepa.notes import unique_notes
from octjepa.read.anatomy import other_part
from octjepa.read.devices import check_images_retina, describe_device
from octjepa.read.formats import is_experimental, read_scan, recognise
from octjepa.read.formats.sequence import IMAGE_SUFFIXES, MIN_FRAMES
from octjepa.read.geometry import Geometry, SpacingSources, is_plausible, resolve_geometry, stated_spacing_fault
from octjepa.read.identity import identify, with_person
from octjepa.read.manifest import ManifestRow, find_row
from octjepa.read.orientation import (
    MAX_LOCALIZERS,
    align_columns,
    axes_exchanged,
    circle_frames,
    find_scan_pattern,
    is_transposed,
    is_upside_down,
    localizer_frames,
    rows_turned,
    wrapped_column,
)
from octjepa.read.personal_data import StatedPerson, mask_path, storable_labels
from octjepa.read.picture_frames import damaged_frames, picture_frames
from octjepa.read.protocols import protocol_spacing
from octjepa.read.raw_scan import FrameGeometry, RawScan
from octjepa.reasons import REASONS, error_origin, rejection
from octjepa.time_limit import SECONDS_PER_FILE, time_limit
from octjepa.volume import OCTVolume

SpacingOption = tuple[float, float, float] | Literal["file"] | None  # (slice, depth, column) in mm; "file": no option
_SETTLED = {"axes_stated", "axes_unlike_content", "depth_by_spacing"}  # the axes were decided by more than content


def read_volume(
    path: str | Path,
    manifest_row: ManifestRow | None = None,
    spacing_mm: tuple[float, float, float] | None = None,
    dataset_path: PurePath | None = None,
    member: str = "",
    people: list[StatedPerson] | None = None,
    seconds: float = SECONDS_PER_FILE,
) -> OCTVolume:
    """Reads one OCT scan in its native geometry: uint8 pixels `[D, H, W]`, spacing (dz, dy, dx) in mm with provenance.

    `manifest_row` is looked up in the tree around the file when it is not given. `spacing_mm` takes precedence over the
    file. `dataset_path` is the scan's path in its data set where `path` is a copy of it; its folders and name may state
    person, eye and device. `member` names one of several scans in the file ("1", "2", ...); without it the first is
    read. The person that the file states is appended to `people`, to mask the paths of its siblings.
    A file that takes longer than `seconds` is given up.
    Raises VolumeRejected (a code of `octjepa.reasons`); UsageError if there is no such file.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"no file at {path}: expected an OCT scan")
    try:
        with warnings.catch_warnings(), time_limit(seconds):
            # pydicom warns of each value out of standard that it converts; here such values are checked one by one.
            warnings.simplefilter("ignore")
            row = manifest_row or (find_row(path) if dataset_path is None else None)
            scan = read_scan(path, _recognise_format(path), member, spacing_mm)
            if people is not None:
                people.append(StatedPerson(scan.header.person_name, scan.header.birth_date, scan.header.sex))
            return assemble(scan, dataset_path or path, row, spacing_mm)
    except (VolumeRejected, UsageError, MemoryError):
        raise
    except Exception as error:  # a damaged header may hold anything; it must not end the run
        raise rejection("reader_failed", error_origin(error)) from error


def _recognise_format(path: Path) -> str:
    """The name of the format. Raises VolumeRejected: unknown_format, empty_file."""
    format = recognise(path)
    if format is not None:
        return format
    if path.is_dir():
        raise rejection("unknown_format", "a folder that holds no sequence of B-scan images")
    if path.stat().st_size == 0:
        raise rejection("empty_file", "zero bytes")
    if path.suffix.lower() in IMAGE_SUFFIXES:
        raise rejection(
            "unknown_format",
            "a single picture, not a volume: if it is a B-scan, name only pictures and add --images to `octjepa "
            "segment` or `octjepa ingest`",
        )
    raise rejection("unknown_format", "its first bytes and its suffix are those of no format")


def assemble(
    scan: RawScan,
    dataset_path: PurePath,
    row: ManifestRow | None = None,
    spacing_mm: tuple[float, float, float] | None = None,
) -> OCTVolume:
    """The volume of `scan`; folders and name of `dataset_path` may state person, eye and device.

    The user's `spacing_mm` (slice, depth, column) takes precedence over every other source.
    Raises VolumeRejected: spacing_unknown, too_few_frames, not_b_scans, not_retina, not_structural_oct.
    """
    identity = identify(scan.header, dataset_path, row)
    notes = [*identity.notes, *scan.notes]
    if part := other_part(f"{identity.protocol} {identity.region}"):
        raise rejection("not_retina", f"its protocol or region says {part}; expected the retina")
    check_images_retina(identity.device)
    _check_frames(len(scan.pixels), "B-scans")
    scan = _drop_copies(scan, notes)
    scan, frame_geometry = _drop_localizers(scan, notes)
    _check_repeats(scan.pixels, notes)
    pixels = _orient(scan, notes)
    if "axes_transposed" in notes:
        scan, row = _exchange_spacings(scan, row)
        frame_geometry = scan.frame_geometry
    exchanged = axes_exchanged(frame_geometry) if "axes_transposed" in notes else frame_geometry
    frame_geometry = exchanged or frame_geometry
    if "turned_upright" in notes and exchanged:
        frame_geometry = rows_turned(frame_geometry)
    text = f"{identity.protocol} {identity.region}".lower()
    pattern = scan.pattern or find_scan_pattern(frame_geometry, identity.device, text)
    if pattern == "radial" and (circular := circle_frames(frame_geometry)).any():
        notes.append(f"circle_frames_dropped={int(circular.sum())}")
        frame_geometry, pixels = frame_geometry.take(~circular), pixels[~circular]
        _check_frames(len(pixels), "straight B-scans")
    if pattern == "raster" and exchanged:
        pixels, frame_geometry = align_columns(pixels, frame_geometry, notes)
    frames, depth, columns = pixels.shape
    sources = SpacingSources(
        frame_geometry=frame_geometry,
        shared_pixel_spacing=scan.pixel_spacing_mm,
        shared_thickness=scan.thickness_mm,
        manifest_pixel_spacing=row.pixel_spacing_mm if row else None,
        manifest_thickness=row.slice_thickness_mm if row else None,
        protocol=protocol_spacing(identity.device, text, (frames, depth, columns)),
        header=scan.spacing_mm,
        header_source=scan.spacing_from,
        option=spacing_mm,
    )
    geometry = resolve_geometry(sources, (frames, depth, columns), pattern)
    notes += _manifest_contradictions(scan, row, geometry)
    pixels = _sort_frames(pixels, geometry)
    estimated = [axis for axis in scan.uncertain if geometry.provenance[axis] != "option"]
    volume = OCTVolume(
        pixels=pixels,
        spacing_mm=geometry.spacing_mm,
        provenance=geometry.provenance,
        person_id=identity.person_id,
        device=identity.device,
        laterality=identity.laterality,
        laterality_source=identity.laterality_source,
        pattern=pattern,
        uncertain=tuple(dict.fromkeys([*geometry.uncertain, *estimated])),
        slice_positions_mm=geometry.positions_mm,
        sop_instance_uid=identity.sop_instance_uid,
        protocol=identity.protocol,
        region=identity.region,
        visit=identity.visit,
        site=identity.site,
        format=scan.format,
        labels=storable_labels(scan.labels, scan.header.person_name, scan.header.birth_date, scan.header.person_id),
        personal=scan.personal,
        notes=unique_notes([*notes, *geometry.notes]),
        localizer=scan.localizer,
        source=mask_path(dataset_path.as_posix(), scan.header.person_name, scan.header.birth_date),
    )
    return with_person(volume, scan.header)


def _drop_localizers(scan: RawScan, notes: list[str]) -> tuple[RawScan, FrameGeometry]:
    """The scan without frames that are a localizer by its header, else by their content, and its geometry.

    Raises VolumeRejected: not_structural_oct, too_few_frames.
    """
    others = localizer_frames(scan.frame_geometry)
    if not others.any() and (pictures := picture_frames(scan.pixels)).any():
        others = pictures
        notes.append("localizer_by_content")
    if not others.any():
        return scan, scan.frame_geometry
    if others.sum() > MAX_LOCALIZERS:
        raise rejection(
            "not_structural_oct",
            f"{int(others.sum())} of {len(others)} frames are en face images, flow or localizers by the header; "
            "expected B-scans",
        )
    _check_frames(int((~others).sum()), "B-scans besides localizers")
    notes.append(f"localizers_dropped={int(others.sum())}")
    picture = scan.pixels[int(others.argmax())].copy() if scan.localizer is None else scan.localizer
    retained = replace(
        scan, pixels=scan.pixels[~others], frame_geometry=scan.frame_geometry.take(~others), localizer=picture
    )
    return retained, retained.frame_geometry


def _check_frames(count: int, what: str) -> None:
    if count < MIN_FRAMES:
        raise rejection("too_few_frames", f"{count} {what}; a volume needs {MIN_FRAMES} at least")


def _drop_copies(scan: RawScan, notes: list[str]) -> RawScan:
    """The scan once, where a file holds all its B-scans several times: one after the other, or forwards and backwards.

    B-scans of a retina never have equal pixels twice: the same speckle and noise come from the same measurement.
    """
    pixels = scan.pixels
    count = len(pixels)

    def are_equal(one: int, other: int) -> bool:
        return np.array_equal(pixels[one, ::32], pixels[other, ::32]) and np.array_equal(pixels[one], pixels[other])

    for length in range(MIN_FRAMES, count // 2 + 1):
        if count % length:
            continue
        if are_equal(0, length) and all(are_equal(index, index % length) for index in range(length, count)):
            break
        if 2 * length == count and all(are_equal(index, count - 1 - index) for index in range(length)):
            break
    else:
        return scan
    if not (np.ptp(pixels[:length, ::4, ::4], axis=(1, 2)) > 0).any():
        return scan  # empty frames are equal
    if all(are_equal(0, index) for index in range(1, length)):
        return scan  # one frame throughout, which `_check_repeats` counts
    notes.append(f"frame_copies_dropped={count - length}")
    return replace(scan, pixels=pixels[:length].copy(), frame_geometry=scan.frame_geometry.take(np.arange(length)))


def _check_repeats(pixels: UInt8[np.ndarray, "F H W"], notes: list[str]) -> None:
    """Notes B-scans that equal the one before. Raises VolumeRejected too_few_frames where fewer than four are left."""
    repeats = sum(
        np.array_equal(first[::32], other[::32])  # nearly all differ there already
        and np.array_equal(first, other)
        and bool(np.ptp(other[::4, ::4]) > 0)
        for first, other in pairwise(pixels)
    )
    if not repeats:
        return
    notes.append(f"repeated_frames={repeats}")
    if len(pixels) - repeats < MIN_FRAMES:
        different = len(pixels) - repeats
        raise rejection(
            "too_few_frames",
            f"{len(pixels)} B-scans of which {different} differ, the others repeat the one before; a volume needs "
            f"{MIN_FRAMES} at different places",
        )


def _orient(scan: RawScan, notes: list[str]) -> UInt8[np.ndarray, "F H W"]:
    """The pixels with the A-scans along axis 1 and the vitreous on top.

    Raises VolumeRejected: not_b_scans, header_contradicts_pixels.
    """
    pixels = scan.pixels
    damaged = damaged_frames(pixels)  # a few of them would decide
    intact = pixels[~damaged] if damaged.any() else pixels
    if not _SETTLED & set(scan.notes) and is_transposed(intact):
        notes.append("axes_transposed")
        pixels, intact = (np.ascontiguousarray(frames.swapaxes(1, 2)) for frames in (pixels, intact))
    if column := wrapped_column(intact):
        raise rejection(
            "header_contradicts_pixels",
            f"every B-scan begins at its column {column}: bytes are missing or too many before the pixels",
        )
    if is_upside_down(intact):
        notes.append("turned_upright")
        pixels = np.ascontiguousarray(pixels[:, ::-1])
    return pixels


def _exchange_spacings(scan: RawScan, row: ManifestRow | None) -> tuple[RawScan, ManifestRow | None]:
    """Both with the spacings that are stated for rows and columns as they are stored, after these were exchanged.

    A spacing that is not plausible the other way round stays, and so does that of a JSON file, which names its axes.
    """

    def exchanged(pair: tuple[float, float]) -> tuple[float, float]:
        column_mm, depth_mm = pair
        fits = is_plausible("depth", depth_mm) and is_plausible("column", column_mm)
        return (depth_mm, column_mm) if fits else pair

    per_frame = np.array([exchanged((first, second)) for first, second in scan.frame_geometry.spacing_mm])
    scan = replace(scan, frame_geometry=replace(scan.frame_geometry, spacing_mm=per_frame))
    if scan.pixel_spacing_mm is not None:
        scan = replace(scan, pixel_spacing_mm=exchanged(scan.pixel_spacing_mm))
    slice_mm, depth_mm, column_mm = scan.spacing_mm
    if depth_mm is not None and column_mm is not None and scan.spacing_from != "sidecar":
        scan = replace(scan, spacing_mm=(slice_mm, *exchanged((depth_mm, column_mm))))
    if row is not None and row.pixel_spacing_mm is not None:
        row = replace(row, pixel_spacing_mm=exchanged(row.pixel_spacing_mm))
    return scan, row


def _manifest_contradictions(scan: RawScan, row: ManifestRow | None, geometry: Geometry) -> list[str]:
    """Notes where a manifest row contradicts the file: it may be the row of another scan."""
    if row is None:
        return []
    contradicts = {
        "manifest_uid_disagrees": len({row.sop_instance_uid, scan.header.uid} - {""}) > 1,
        "manifest_frames_disagree": row.frames is not None and row.frames != len(scan.pixels),
        "manifest_spacing_disagrees": row.pixel_spacing_mm is not None
        and not np.allclose(row.pixel_spacing_mm, geometry.spacing_mm[1:], rtol=0.02),
    }
    return [note for note, disagrees in contradicts.items() if disagrees]


def _sort_frames(pixels: UInt8[np.ndarray, "F H W"], geometry: Geometry) -> UInt8[np.ndarray, "F H W"]:
    """Frames in the resolved order, unless neighbours correlate clearly better as they are stored."""
    order = geometry.order
    if "frames_unordered" not in geometry.notes:
        ascending = np.arange(len(order))
        if np.array_equal(order, ascending[::-1]):
            return pixels[::-1]  # the usual order of a raster from below: no copy of the scan
        return pixels if np.array_equal(order, ascending) else pixels[order]
    small = pixels[:, ::8, ::8].reshape(len(pixels), -1).astype(np.float32)  # [F, N]
    small -= small.mean(axis=1, keepdims=True)
    small /= np.linalg.norm(small, axis=1, keepdims=True) + 1e-6

    def correlation(frames: Float[np.ndarray, "F N"]) -> float:
        return float((frames[1:] * frames[:-1]).sum(axis=1).mean())

    if correlation(small) > correlation(small[order]) + 0.02:
        geometry.notes.append("order_by_correlation")
        geometry.positions_mm = None
        geometry.uncertain = tuple(dict.fromkeys([*geometry.uncertain, "slice"]))
        return pixels
    return pixels[order]


def parse_spacing(text: str) -> tuple[float, float, float] | Literal["file"]:
    """Parses "0.047,0.0026,0.0117" to (slice, depth, column) in mm; "file" (what the files state) stays as it is.

    Raises UsageError: not three plausible numbers.
    """
    if text.strip() == "file":
        return "file"
    try:
        dz, dy, dx = map(float, text.split(","))
    except ValueError:
        raise UsageError(
            f"spacing {text!r} is not of the form 0.047,0.0026,0.0117: slice, depth, column in mm; nor file"
        ) from None
    if fault := stated_spacing_fault((dz, dy, dx)):
        raise UsageError(f"spacing {text!r}: {fault}; expected slice,depth,column in mm")
    return dz, dy, dx


def _format_or_empty(path: Path) -> str:
    """The format of a file that was refused; "" for none, and if it cannot be opened."""
    try:
        return recognise(path) or ""
    except VolumeRejected:
        return ""


def describe_file(path: str | Path, spacing_mm: SpacingOption = None) -> dict[str, Any]:
    """The report of `octjepa inspect FILE`, for an accepted and for a rejected file. Raises UsageError: no such file.

    Keys: kind ("volume" | "rejected"), format ("" if it is none), experimental (whether no file of a real device has
    proved the reader of this format), shape, spacing_mm, provenance, laterality, device, modality ("SD-OCT", "SS-OCT",
    "TD-OCT"; "" where octjepa does not know the device), pattern, reasons [{reason, detail, meaning, action}],
    uncertain, notes, protocol, region, content_hash.
    """
    try:
        volume = read_volume(path, spacing_mm=None if spacing_mm == "file" else spacing_mm)
    except VolumeRejected as error:
        reason = REASONS[error.reason]
        explained = {"reason": error.reason, "detail": error.detail, "meaning": reason.meaning, "action": reason.action}
        format = _format_or_empty(Path(path))
        return {
            "kind": "rejected",
            "format": format,
            "experimental": is_experimental(format),
            "shape": None,
            "spacing_mm": None,
            "provenance": {},
            "laterality": None,
            "device": "",
            "modality": "",
            "pattern": "unknown",
            "reasons": [explained],
            "uncertain": [],
            "notes": [],
            "protocol": "",
            "region": "",
            "content_hash": "",
        }
    return {
        "kind": "volume",
        "format": volume.format,
        "experimental": is_experimental(volume.format),
        "shape": list(volume.shape),
        "spacing_mm": list(volume.spacing_mm),
        "provenance": dict(volume.provenance),
        "laterality": volume.laterality,
        "device": volume.device,
        "modality": describe_device(volume.device).modality,
        "pattern": volume.pattern,
        "reasons": [],
        "uncertain": list(volume.uncertain),
        "notes": list(volume.notes),
        "protocol": volume.protocol,
        "region": volume.region,
        "content_hash": volume.content_hash,
    }
