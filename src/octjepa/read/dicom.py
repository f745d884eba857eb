"""A DICOM file to a `RawScan`, or a `VolumeRejected` that says why.

The header comes before the pixels: kind, anatomy and the declared size are checked before any pixel is decoded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octjepa.errors import VolumeRejected
from octjepa.read.anatomy import check_anatomy
from octjepa.read.dicom_file import PIXEL_GROUP, DicomStream, open_dicom, read_header
from octjepa.read.frames import check_one_eye, has_decimal_comma, pixel_measures, read_frame_geometry
from octjepa.read.identity import parse_laterality
from octjepa.read.personal_data import is_placeholder, personal_fields
from octjepa.read.pixels import MAX_FRAMES, check_size, decode_pixels, integer, read_layout
from octjepa.read.raw_scan import FrameGeometry, HeaderFields, RawScan
from octjepa.reasons import rejection

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

OPHTHALMIC_TOMOGRAPHY = "1.2.840.10008.5.1.4.1.1.77.1.5.4"
# Image classes that name no modality of their own: taken where the modality says OPT.
GENERIC = {
    "1.2.840.10008.5.1.4.1.1.7": "secondary capture",
    "1.2.840.10008.5.1.4.1.1.7.2": "multi-frame greyscale byte secondary capture",
    "1.2.840.10008.5.1.4.1.1.7.3": "multi-frame greyscale word secondary capture",
    "1.2.840.10008.5.1.4.1.1.7.4": "multi-frame true colour secondary capture",
    "1.2.840.10008.5.1.4.1.1.2.1": "enhanced CT",
    "1.2.840.10008.5.1.4.1.1.4.1": "enhanced MR",
    "1.2.840.10008.5.1.4.1.1.6.2": "enhanced ultrasound volume",
}
_MODALITIES = frozenset(
    (
        "CR",
        "CT",
        "DX",
        "ES",
        "IO",
        "IVOCT",
        "KER",
        "MR",
        "NM",
        "OAM",
        "OCT",
        "OP",
        "OPM",
        "OPT",
        "OPV",
        "OT",
        "PT",
        "SC",
        "SEG",
        "SM",
        "SR",
        "US",
        "XA",
        "XC",
    )
)
_HOW_TO_ASSEMBLE = "name the folder that holds all of them, with four B-scans at least"
_MAGIC_AT = 128
_UNDEFINED = 0xFFFFFFFF
# Elements whose words no stored text may repeat, in addition to the person's name and birth date.
_ALSO_PERSONAL = (
    "PatientID",
    "OtherPatientIDs",
    "AccessionNumber",
    "OtherPatientNames",
    "PatientBirthName",
    "ResponsiblePerson",
    "ReferringPhysicianName",
    "PerformingPhysicianName",
    "OperatorsName",
)
PART_NOTE = "part_of_scan"  # the B-scans continue in another file
_SQUARE = 0.75  # of the B-scans' width: a scan whose B-scans cover less may be a part of one
_STEP_TOLERANCE = 0.5  # of the step between B-scans
_LAST_SERIES_TAG = 0x0020000E
_PIXEL_DATA = 0x7FE00010
_OTHER_CONTENT = {
    b"<!doctype": "an HTML page",
    b"<html": "an HTML page",
    b"\x1f\x8b": "a gzip archive",
    b"pk\x03\x04": "a ZIP archive",
    b"%pdf": "a PDF document",
}


def has_dicom_magic(path: Path) -> bool:
    """Whether the file has the magic bytes DICM after 128 bytes of preamble. Raises VolumeRejected unreadable_file."""
    try:
        with path.open("rb") as file:
            return file.read(_MAGIC_AT + 4)[_MAGIC_AT:] == b"DICM"
    except OSError as error:
        raise rejection("unreadable_file", error.strerror or str(error)) from None


def lacks_preamble(head: bytes) -> bool:
    """Whether a file begins with DICOM's file meta information, without the preamble before it."""
    return head[:8] == b"\x02\0\0\0UL\x04\0"


def _check_kind(path: Path) -> None:
    """Raises VolumeRejected: unreadable_file, empty_file, not_dicom."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise rejection("unreadable_file", error.strerror or str(error)) from None
    if size == 0:
        raise rejection("empty_file", "zero bytes")
    if not has_dicom_magic(path):
        with path.open("rb") as file:
            start = file.read(256)
        if lacks_preamble(start) or start[:2] == b"\x08\0":
            raise rejection(
                "not_dicom",
                "DICOM elements without the preamble of 128 bytes and the mark DICM that a DICOM file begins with; "
                "write it again as a file (dcmconv of DCMTK, or pydicom's save_as with enforce_file_format=True)",
            )
        start = start.lstrip().lower()
        other = next((name for mark, name in _OTHER_CONTENT.items() if start.startswith(mark)), "")
        raise rejection("not_dicom", other or "no DICM mark at byte 128")


def _read_header(stream: DicomStream) -> Dataset:
    """The elements before the pixel data; the stream is then at the start of the pixel data.

    Raises VolumeRejected: truncated, no_pixel_data, and those of `_check_header`.
    """
    stopped: list[int] = []

    def at_pixels(tag: int) -> bool:
        if tag >= PIXEL_GROUP:
            stopped.append(tag)
        return tag >= PIXEL_GROUP

    if not stream.syntax:
        raise rejection("broken_header", "no transfer syntax")
    header = stream.read(at_pixels)
    if not len(header):
        # pydicom drops everything when the file ends within a sequence.
        raise rejection("truncated", "the file ends within its header")
    _check_header(header)
    if stopped and stopped[-1] >> 16 == PIXEL_GROUP >> 16:
        return header
    last = header.get_item(next(reversed(list(header.keys()))))
    if not stopped and getattr(last, "is_raw", False) and len(last.value or b"") < last.length:
        raise rejection("truncated", "the file ends within its header")
    raise rejection("no_pixel_data", "the header is whole, the pixel data element is absent")


def _check_header(header: Dataset) -> None:
    """Raises VolumeRejected: not_structural_oct, not_retina, broken_header, no_decoder."""
    sop_class = _text(header, "SOPClassUID") or str(header.file_meta.get("MediaStorageSOPClassUID") or "").strip()
    modality = _text(header, "Modality").upper()
    if not sop_class and "Rows" not in header:
        raise rejection("broken_header", "neither SOP class nor rows: the header does not say what it is")
    if sop_class != OPHTHALMIC_TOMOGRAPHY and not (sop_class in GENERIC and modality == "OPT"):
        raise rejection(
            "not_structural_oct",
            f"SOP class {_registered(sop_class)}, modality {known_modality(modality) or 'unknown'}",
        )
    check_anatomy(header)
    syntax = header.file_meta.TransferSyntaxUID
    if not syntax.is_transfer_syntax or syntax.is_private:
        raise rejection("no_decoder", "the transfer syntax is private, or none of the DICOM standard")
    if video := next((kind for kind in ("MPEG", "HEVC", "SMPTE") if kind in syntax.name.upper()), ""):
        raise rejection(
            "no_decoder",
            f"a movie ({video}), which no library here decodes; export it as JPEG 2000, JPEG-LS, RLE or uncompressed",
        )


def _registered(uid: str) -> str:
    """A UID of the DICOM standard; other text is not repeated, because it may be anything."""
    from pydicom.uid import UID

    return "absent" if not uid else uid if UID(uid).name != uid else "of no DICOM standard"


def known_modality(text: str) -> str:
    """The Modality if it is one of DICOM's two- and three-letter terms, else "": free text may hold a name."""
    return text if text in _MODALITIES else ""


def _check_frames(header: Dataset) -> None:
    """Checks size and number of frames in the header, before any pixel is read.

    Raises VolumeRejected: single_frame_series, frames_missing, size_implausible, broken_header, unsupported_pixels.
    """
    check_size(max(integer(header, "NumberOfFrames"), 1), read_layout(header))
    groups = header.get("PerFrameFunctionalGroupsSequence") or []
    parts = integer(header, "InConcatenationTotalNumber")
    if parts > 1:
        number = integer(header, "InConcatenationNumber")
        raise rejection(
            "frames_missing", f"part {number} of {parts} of a concatenation: one scan cut into several files"
        )
    if integer(header, "NumberOfFrames") > 1 or len(groups) > 1:
        return
    if groups:  # a line scan has them too: its position in the stack is the first, and it is alone in its series
        content = (groups[0].get("FrameContentSequence") or [None])[0]
        placed = content is not None and integer(content, "InStackPositionNumber") > 1
    else:
        placed = integer(header, "InstanceNumber") > 1 or "ImagePositionPatient" in header
    if placed:
        raise rejection(
            "single_frame_series", f"one frame, which its header places in a series of files; {_HOW_TO_ASSEMBLE}"
        )


def _check_neighbours(path: Path, header: Dataset) -> None:
    """Tells the first frame of a series from a line scan, which looks the same, by the files next to it.

    Raises VolumeRejected single_frame_series: the file before or after it, by name, is a frame of the same series.
    """
    series, instance = stated_text(header, "SeriesInstanceUID"), _text(header, "SOPInstanceUID")
    for other in _neighbours(path) if series else []:
        try:
            with open_dicom(other, header_only=True) as stream:
                header_of_file = _read_header(stream)
        except VolumeRejected:
            continue  # no frame of this series; what is wrong with that file, its own reading says
        single = integer(header_of_file, "NumberOfFrames") <= 1
        if (
            single
            and _text(header_of_file, "SeriesInstanceUID") == series
            and _text(header_of_file, "SOPInstanceUID") != instance
        ):
            raise rejection(
                "single_frame_series",
                f"one frame, and a file next to it holds another of its series; {_HOW_TO_ASSEMBLE}",
            )


def _is_part(path: Path, scan: RawScan, header: Dataset) -> bool:
    """Whether a file next to `path` continues its B-scans: one scan cut into several instances of a series.

    Only a file whose B-scans cover much less than a square field, or are numbered from another number than 1, is
    compared with the files before and after it by name.
    """
    series, frames = _text(header, "SeriesInstanceUID"), scan.frame_geometry
    numbers, columns = frames.in_stack, scan.pixels.shape[2]
    steps = np.linalg.norm(frames.positions_mm - frames.positions_mm[0], axis=1)
    spacing = scan.pixel_spacing_mm or tuple(frames.spacing_mm[0])
    is_short = bool(np.nanmax(steps, initial=0.0) < _SQUARE * columns * spacing[1]) or not np.isfinite(steps).all()
    if not series or not (is_short or numbers[0] > 1):
        return False
    for other in _neighbours(path):
        try:
            facts = read_header(other, ("SeriesInstanceUID",), _LAST_SERIES_TAG)
            if _text(facts, "SeriesInstanceUID") != series:
                continue
            with open_dicom(other, header_only=True) as stream:
                other_header = _read_header(stream)
        except VolumeRejected:
            continue  # what is wrong with that file, its own reading says
        same_size = all(integer(other_header, name) == integer(header, name) for name in ("Rows", "Columns"))
        count = integer(other_header, "NumberOfFrames")
        if not same_size or not 1 < count <= MAX_FRAMES:
            continue
        if _text(other_header, "SOPInstanceUID") != _text(header, "SOPInstanceUID") and _continues(
            frames, read_frame_geometry(other_header, count)
        ):
            return True
    return False


def _continues(frames: FrameGeometry, others: FrameGeometry) -> bool:
    """Whether `others` begin one step after the last of `frames`, or end one step before the first.

    By positions; by numbers in the stack where positions are missing.
    """
    positions, other_positions = frames.positions_mm, others.positions_mm
    if np.isfinite(positions).all() and np.isfinite(other_positions).all():
        step = np.median(np.diff(positions, axis=0), axis=0)
        length = float(np.linalg.norm(step))
        gaps = (other_positions[0] - positions[-1], positions[0] - other_positions[-1])
        return length > 0 and any(float(np.linalg.norm(gap - step)) < _STEP_TOLERANCE * length for gap in gaps)
    positions, other_positions = frames.in_stack, others.in_stack
    if not (np.isfinite(positions).all() and np.isfinite(other_positions).all()):
        return False
    return bool(other_positions.min() == positions.max() + 1 or positions.min() == other_positions.max() + 1)


def _neighbours(path: Path) -> list[Path]:
    """The regular files before and after this one in the order of names, if there are such."""
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.is_file()]
    before = max((name for name in names if name < path.name), default=None)
    after = min((name for name in names if name > path.name), default=None)
    return [path.with_name(name) for name in (before, after) if name is not None]


def _add_pixels(header: Dataset, stream: DicomStream) -> None:
    """Puts the pixel data into `header`; what follows them is not read.

    Raises VolumeRejected: truncated, no_pixel_data.
    """
    elements = stream.read(lambda tag: tag > _PIXEL_DATA)
    raw = elements.get_item(_PIXEL_DATA)
    if raw is None:
        if len(elements):
            raise rejection("no_pixel_data", "pixel data of a kind that holds no image")
        raise rejection("truncated", "the pixel data begin and are cut off")
    size = len(raw.value or b"")
    if getattr(raw, "is_raw", False) and raw.length != _UNDEFINED and size < raw.length:
        raise rejection("truncated", f"{raw.length} bytes of pixel data are announced, {size} are there")
    if not size:
        raise rejection("no_pixel_data", "the pixel data element is empty")
    header[_PIXEL_DATA] = raw


def _text(header: Dataset, keyword: str) -> str:
    """The element as text; "" if it is absent."""
    value = header.get(keyword)
    if isinstance(value, list | tuple) or type(value).__name__ == "MultiValue":
        return "\\".join(map(str, value)).strip()  # as DICOM writes several values
    return "" if value is None else str(value).strip()


def stated_text(header: Dataset, keyword: str) -> str:
    """The element as text; "" if it is absent or a placeholder such as "anonymous"."""
    text = _text(header, keyword)
    return "" if is_placeholder(text) else text


def _first_eye(texts: Iterable[str]) -> str:
    """The first text that names an eye: U (unpaired) or B (both) does not hide another. "" if none does."""
    return next((text for text in texts if parse_laterality(text)), "")


def _frame_laterality(header: Dataset) -> str:
    """FrameLaterality of the shared functional groups, else of the first frame; "" where neither names an eye."""
    return _first_eye(
        _text(anatomy, "FrameLaterality")
        for group in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
        for item in (header.get(group) or [])[:1]
        for anatomy in item.get("FrameAnatomySequence") or []
    )


def _institution(header: Dataset) -> str:
    """A pseudonym of the institution: enough to see that two hospitals use one id, without naming either."""
    name = " ".join(_text(header, "InstitutionName").lower().split())
    return "" if is_placeholder(name) else "site-" + hashlib.sha256(name.encode()).hexdigest()[:8]


def _header_fields(header: Dataset) -> HeaderFields:
    """Identity and acquisition, verbatim; an eye only where the header names one."""
    return HeaderFields(
        person_id=_text(header, "PatientID"),
        person_name=_text(header, "PatientName"),
        birth_date=_text(header, "PatientBirthDate"),
        sex=_text(header, "PatientSex"),
        also_personal=tuple(filter(None, (_text(header, name) for name in _ALSO_PERSONAL))),
        laterality=_first_eye(_text(header, name) for name in ("ImageLaterality", "Laterality")),
        frame_laterality=_frame_laterality(header),
        manufacturer=stated_text(header, "Manufacturer"),
        model=stated_text(header, "ManufacturerModelName"),
        protocol=stated_text(header, "ProtocolName").lower(),
        site=_institution(header),
        visit=stated_text(header, "StudyInstanceUID") or stated_text(header, "StudyDate"),
        uid=stated_text(header, "SOPInstanceUID"),
        burned_in=_text(header, "BurnedInAnnotation").upper() == "YES",
    )


def read_with_pixels(path: Path, check: Callable[[Dataset], None]) -> Dataset:
    """The dataset of a file with its pixel data, undecoded; `check` is called with the header before they are read.

    Raises VolumeRejected: kind and header codes of `octjepa.reasons`, and what `check` raises.
    """
    _check_kind(path)
    with open_dicom(path) as stream:
        header = _read_header(stream)
        check(header)
        _add_pixels(header, stream)
    return header


def to_raw_scan(header: Dataset, fewest: int = 4) -> RawScan:
    """The scan of a dataset with its pixel data, of `fewest` B-scans or more.

    Raises VolumeRejected (pixel codes of `octjepa.reasons`).
    """
    check_one_eye(header)
    decoded = decode_pixels(header, fewest)
    pair, thickness = pixel_measures((header.get("SharedFunctionalGroupsSequence") or [None])[0])
    if pair is None and thickness is None:
        pair, thickness = pixel_measures(header)  # plain multi-frame images keep them at the top
    return RawScan(
        format="dicom",
        pixels=decoded.pixels,
        frame_geometry=read_frame_geometry(header, len(decoded.pixels)),
        header=_header_fields(header),
        pixel_spacing_mm=None if pair is None else (pair[0], pair[1]),
        thickness_mm=thickness,
        notes=(*decoded.notes, *(["decimal_comma"] if has_decimal_comma(header) else [])),
        personal=personal_fields(header),
    )


def read_single_frame(path: Path) -> RawScan:
    """A DICOM file of one frame, also if that is one of a series. Raises VolumeRejected, also for several frames."""

    def check_count(frames: int) -> None:
        if frames > 1:
            raise rejection("unsupported_pixels", f"{frames} frames: a volume, not a single B-scan")

    def check(header: Dataset) -> None:
        check_count(integer(header, "NumberOfFrames"))
        check_size(1, read_layout(header))

    scan = to_raw_scan(read_with_pixels(path, check), fewest=1)
    check_count(len(scan.pixels))  # the data may hold more frames than the header says
    return scan


def read_dicom(path: Path) -> RawScan:
    """One DICOM file. Raises VolumeRejected (kind, header and pixel codes of `octjepa.reasons`)."""
    header = read_with_pixels(path, _check_frames)
    try:
        scan = to_raw_scan(header)
    except VolumeRejected as error:
        if error.reason == "too_few_frames" and integer(header, "NumberOfFrames") <= 1:
            _check_neighbours(path, header)
        raise
    return replace(scan, notes=(*scan.notes, PART_NOTE)) if _is_part(path, scan, header) else scan
