"""A DICOM file to an `OCTVolume`, or a `VolumeRejected` that says why.

Header before pixels: kind, identity and the declared size are judged before any pixel is decoded.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octjepa.errors import UsageError, VolumeRejected
from octjepa.ingest.frames import frame_facts, measures
from octjepa.ingest.geometry import Geometry, SpacingSources, resolve
from octjepa.ingest.identity import identify
from octjepa.ingest.manifest import ManifestRow, find_row
from octjepa.ingest.pattern import circles, scan_pattern
from octjepa.ingest.pixels import decode_pixels
from octjepa.ingest.protocols import known_spacing
from octjepa.ingest.reasons import REASONS, raised_in, rejected
from octjepa.volume import OCTVolume

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

OPHTHALMIC_TOMOGRAPHY = "1.2.840.10008.5.1.4.1.1.77.1.5.4"
MULTIFRAME_GREY_BYTE = "1.2.840.10008.5.1.4.1.1.7.2"  # accepted where the modality says OPT
_MAGIC_AT = 128


def has_dicom_magic(path: Path) -> bool:
    """Whether the file carries DICOM's mark. Raises VolumeRejected unreadable_file."""
    try:
        with path.open("rb") as file:
            return file.read(_MAGIC_AT + 4)[_MAGIC_AT:] == b"DICM"
    except OSError as error:
        raise rejected("unreadable_file", error.strerror or str(error)) from None


def _check_kind(path: Path) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise rejected("unreadable_file", error.strerror or str(error)) from None
    if size == 0:
        raise rejected("empty_file", "zero bytes")
    if not has_dicom_magic(path):
        with path.open("rb") as file:
            start = file.read(256).lstrip().lower()
        html = start.startswith((b"<!doctype", b"<html"))
        raise rejected("not_dicom", "an HTML page" if html else "no DICM mark at byte 128")


def _read(path: Path, pixels: bool) -> Dataset:
    from pydicom import dcmread

    try:
        return dcmread(path, stop_before_pixels=not pixels)
    except OSError as error:
        raise rejected("unreadable_file", error.strerror or str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # pydicom raises what the broken element made of its parser
        raise rejected("truncated" if pixels else "broken_header", raised_in(error)) from None


def _check_header(header: Dataset) -> None:
    if "TransferSyntaxUID" not in getattr(header, "file_meta", {}):
        raise rejected("broken_header", "no transfer syntax")
    sop_class = str(header.get("SOPClassUID", "")).strip()
    modality = str(header.get("Modality", "")).strip().upper()
    if sop_class == OPHTHALMIC_TOMOGRAPHY or (sop_class == MULTIFRAME_GREY_BYTE and modality == "OPT"):
        return
    raise rejected("not_structural_oct", f"SOP class {sop_class or 'absent'}, modality {modality or 'absent'}")


def _with_pixels(path: Path) -> Dataset:
    data = _read(path, pixels=True)
    if "PixelData" not in data:
        # pydicom drops an element that is cut off: its tag in the bytes tells a cut file from a header alone.
        if b"\xe0\x7f\x10\x00" in path.read_bytes():
            raise rejected(
                "truncated", f"the pixel data begin and are cut off: the file holds {path.stat().st_size} bytes"
            )
        raise rejected("no_pixel_data", "the header is whole, the pixel data element is absent")
    if not len(data.PixelData):
        raise rejected("no_pixel_data", "the pixel data element is empty")
    return data


def _checked_order(pixels: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Frames in the resolved order, unless neighbours are clearly more alike as they were stored."""
    order = geometry.order
    if "frames_unordered" not in geometry.notes:
        return pixels if np.array_equal(order, np.arange(len(order))) else pixels[order]
    small = pixels[:, ::8, ::8].reshape(len(pixels), -1).astype(np.float32)
    small -= small.mean(axis=1, keepdims=True)
    small /= np.linalg.norm(small, axis=1, keepdims=True) + 1e-6

    def likeness(frames: np.ndarray) -> float:
        return float((frames[1:] * frames[:-1]).sum(axis=1).mean())

    if likeness(small) > likeness(small[order]) + 0.02:
        geometry.notes.append("order_by_correlation")
        geometry.positions_mm = None
        if "slice" not in geometry.uncertain:
            geometry.uncertain = (*geometry.uncertain, "slice")
        return pixels
    return pixels[order]


def read_volume(path: str | Path, manifest_row: ManifestRow | None = None) -> OCTVolume:
    """One OCT file in its native geometry: pixels uint8 `[D, H, W]`, spacing (dz, dy, dx) in mm with provenance.

    `manifest_row` is looked up in the tree around the file when it is not given.
    Raises VolumeRejected (a code of `octjepa.ingest.reasons`); UsageError where there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no file at {path}: expected an OCT DICOM file")
    try:
        with warnings.catch_warnings():
            # pydicom converts values when they are asked for, and warns of each that is out of standard: here what is
            # out of standard is judged one by one.
            warnings.simplefilter("ignore")
            return _read_volume(path, manifest_row or find_row(path))
    except (VolumeRejected, UsageError, MemoryError):
        raise
    except Exception as error:  # a damaged header may hold anything; the ledger must name it, not the run end
        raise rejected("reader_failed", raised_in(error)) from error


def _read_volume(path: Path, row: ManifestRow | None) -> OCTVolume:
    _check_kind(path)
    header = _read(path, pixels=False)
    _check_header(header)
    identity = identify(header, path, row)
    data = _with_pixels(path)
    decoded = decode_pixels(data)
    pixels, notes = decoded.pixels, [*identity.notes, *decoded.notes]
    del data

    frames, height, width = pixels.shape
    text = f"{identity.protocol} {identity.region}".lower()
    facts = frame_facts(header, frames)
    pattern = scan_pattern(facts, identity.device, text)
    if pattern == "radial" and (round_frames := circles(facts)).any():
        notes.append(f"circle_frames_dropped={int(round_frames.sum())}")
        facts, pixels = facts.take(~round_frames), pixels[~round_frames]
        frames = len(pixels)
        if frames < 4:
            raise rejected("too_few_frames", f"{frames} straight B-scans; a volume needs 4 at least")
    shape = (frames, height, width)
    pair, thickness = measures((header.get("SharedFunctionalGroupsSequence") or [None])[0])
    if pair is None and thickness is None:
        pair, thickness = measures(header)  # plain multi-frame images keep them at the top
    sources = SpacingSources(
        facts=facts,
        shared_pair=None if pair is None else (pair[0], pair[1]),
        shared_thickness=thickness,
        manifest_pair=row.pixel_spacing_mm if row else None,
        manifest_thickness=row.slice_thickness_mm if row else None,
        known=known_spacing(identity.device, text, shape),
    )
    geometry = resolve(sources, shape, pattern)
    pixels = _checked_order(pixels, geometry)
    return OCTVolume(
        pixels=pixels,
        spacing_mm=geometry.spacing_mm,
        provenance=geometry.provenance,
        person_id=identity.person_id,
        device=identity.device,
        laterality=identity.laterality,
        laterality_source=identity.laterality_source,
        pattern=pattern,
        uncertain=geometry.uncertain,
        slice_positions_mm=geometry.positions_mm,
        sop_instance_uid=identity.sop_instance_uid,
        protocol=identity.protocol,
        region=identity.region,
        notes=tuple(dict.fromkeys([*notes, *geometry.notes])),
        source=str(path),
    )


def describe_file(path: str | Path) -> dict[str, Any]:
    """What `octjepa inspect FILE` says, for an accepted and for a rejected file. Raises UsageError: no such file.

    Keys: kind ("volume" | "rejected"), shape, spacing_mm, provenance, laterality, device, pattern, reasons
    [{reason, detail, meaning, action}], uncertain, notes, protocol, region, content_hash.
    """
    try:
        volume = read_volume(path)
    except VolumeRejected as error:
        reason = REASONS[error.reason]
        explained = {"reason": error.reason, "detail": error.detail, "meaning": reason.meaning, "action": reason.action}
        return {
            "kind": "rejected", "shape": None, "spacing_mm": None, "provenance": {}, "laterality": None, "device": "",
            "pattern": "unknown", "reasons": [explained], "uncertain": [], "notes": [], "protocol": "", "region": "",
            "content_hash": "",
        }  # fmt: skip
    return {
        "kind": "volume",
        "shape": list(volume.shape),
        "spacing_mm": list(volume.spacing_mm),
        "provenance": dict(volume.provenance),
        "laterality": volume.laterality,
        "device": volume.device,
        "pattern": volume.pattern,
        "reasons": [],
        "uncertain": list(volume.uncertain),
        "notes": list(volume.notes),
        "protocol": volume.protocol,
        "region": volume.region,
        "content_hash": volume.content_hash,
    }
