"""A DICOM file to a `RawScan`, or a `VolumeRejected` that says why.

The header comes before the pixels: kind, anatomy and the declared size are checked before any pixel is decoded.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable
from io import BufferedReader, FileIO
from os import fstat
from pathlib import Path
from typing import TYPE_CHECKING

from octjepa.errors import VolumeRejected
from octjepa.read.anatomy import check_anatomy
from octjepa.read.frames import has_decimal_comma, pixel_measures, read_frame_geometry
from octjepa.read.personal_data import is_placeholder, personal_fields
from octjepa.read.pixels import check_size, decode_pixels, integer, read_layout
from octjepa.read.raw_scan import HeaderFields, RawScan
from octjepa.reasons import error_origin, rejection

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
DEFLATED = b"1.2.840.10008.1.2.1.99"
_HOW_TO_ASSEMBLE = "name the folder that holds all of them, with four B-scans at least"
_MAGIC_AT = 128
_UNDEFINED = 0xFFFFFFFF
_MAX_INFLATED = 1 << 30  # of a deflated data set, which is unpacked in memory as a whole
_PIXEL_GROUP, _PIXEL_DATA = 0x7FE00001, 0x7FE00010
_OTHER_CONTENT = {
    b"<!doctype": "an HTML page", b"<html": "an HTML page", b"\x1f\x8b": "a gzip archive",
    b"pk\x03\x04": "a ZIP archive", b"%pdf": "a PDF document",
}  # fmt: skip


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


def _check_inflated_size(path: Path) -> None:
    """Inflates a deflated data set block by block, before pydicom inflates it as a whole, to learn its size.

    Raises VolumeRejected size_implausible.
    """
    with path.open("rb") as file:
        file.seek(_MAGIC_AT + 4)
        head = file.read(12)  # (0002,0000) UL 4: the length of the file meta information
        if head[:8] != b"\x02\x00\x00\x00UL\x04\x00":
            return
        length = int.from_bytes(head[8:], "little")
        if length > 1 << 16 or DEFLATED not in file.read(length):
            return
        unpack, size = zlib.decompressobj(-zlib.MAX_WBITS), 0
        while block := unpack.unconsumed_tail or file.read(1 << 20):
            size += len(unpack.decompress(block, 1 << 24))
            if size > _MAX_INFLATED:
                raise rejection("size_implausible", f"it inflates to more than {_MAX_INFLATED >> 30} GiB")


class _BoundedReader(BufferedReader):
    """A file whose `read` allocates no more than what is left: a broken element may announce 4 GiB."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > 1 << 20:
            size = min(size, max(0, fstat(self.fileno()).st_size - self.tell()))
        return super().read(size)


def _parse(parse: Callable[[], Dataset]) -> Dataset:
    """What `parse` returns; its errors are translated. Raises VolumeRejected: unreadable_file, broken_header."""
    try:
        return parse()
    except OSError as error:
        raise rejection("unreadable_file", error.strerror or str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # pydicom raises what the broken element made of its parser
        raise rejection("broken_header", error_origin(error)) from None


def _read_header(file: BufferedReader) -> Dataset:
    """The elements before the pixel data; the position in the file is then the start of the pixel data.

    Raises VolumeRejected: truncated, no_pixel_data, and those of `_check_header`.
    """
    from pydicom.filereader import read_partial

    stopped: list[int] = []

    def at_pixels(tag: int, *_: object) -> bool:
        if tag >= _PIXEL_GROUP:
            stopped.append(int(tag))
        return tag >= _PIXEL_GROUP

    header = _parse(lambda: read_partial(file, at_pixels))
    if "TransferSyntaxUID" not in getattr(header, "file_meta", {}):
        raise rejection("broken_header", "no transfer syntax")
    if not len(header):
        # pydicom drops everything when the file ends within a sequence.
        raise rejection("truncated", "the file ends within its header")
    _check_header(header)
    if stopped and stopped[-1] >> 16 == _PIXEL_GROUP >> 16:
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
        raise rejection("not_structural_oct", f"SOP class {sop_class or 'absent'}, modality {modality or 'absent'}")
    check_anatomy(header)
    syntax = header.file_meta.TransferSyntaxUID
    if not syntax.is_transfer_syntax or syntax.is_private:
        raise rejection("no_decoder", "the transfer syntax is private, or none of the DICOM standard")
    if video := next((kind for kind in ("MPEG", "HEVC", "SMPTE") if kind in syntax.name.upper()), ""):
        raise rejection(
            "no_decoder",
            f"a movie ({video}), which no library here decodes; export it as JPEG 2000, JPEG-LS, RLE or uncompressed",
        )


def _check_frames(header: Dataset) -> None:
    """Checks size and number of frames in the header, before any pixel is read.

    Raises VolumeRejected: single_frame_series, frames_missing, size_implausible, broken_header, unsupported_pixels.
    """
    check_size(max(integer(header, "NumberOfFrames"), 1), read_layout(header))
    groups = header.get("PerFrameFunctionalGroupsSequence") or []
    parts = integer(header, "InConcatenationTotalNumber")
    if parts > 1 and _text(header, "ConcatenationUID"):
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
        raise rejection("single_frame_series", f"one frame, with a place of its own in a series; {_HOW_TO_ASSEMBLE}")


def _check_neighbours(path: Path, header: Dataset) -> None:
    """Tells the first frame of a series from a line scan, which looks the same, by the files beside it.

    Raises VolumeRejected single_frame_series: the file before or after it, by name, is a frame of the same series.
    """
    series, own = _text(header, "SeriesInstanceUID"), _text(header, "SOPInstanceUID")
    for other in _neighbours(path) if series else []:
        try:
            _check_inflated_size(other)
            with _BoundedReader(FileIO(str(other))) as file:
                found = _read_header(file)
        except (VolumeRejected, OSError, zlib.error):
            continue  # no frame of this series; what is wrong with that file, its own reading says
        single = integer(found, "NumberOfFrames") <= 1
        if single and _text(found, "SeriesInstanceUID") == series and _text(found, "SOPInstanceUID") != own:
            raise rejection(
                "single_frame_series",
                f"one frame, and a file beside it holds another of its series; {_HOW_TO_ASSEMBLE}",
            )


def _neighbours(path: Path) -> list[Path]:
    """The regular files before and after this one in the order of names, where there are such."""
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.is_file()]
    before = max((name for name in names if name < path.name), default=None)
    after = min((name for name in names if name > path.name), default=None)
    return [path.with_name(name) for name in (before, after) if name is not None]


def _add_pixels(header: Dataset, file: BufferedReader) -> None:
    """Puts the pixel data into `header`; what follows them is not read.

    Raises VolumeRejected: truncated, no_pixel_data.
    """
    from pydicom.filereader import read_dataset, read_partial

    implicit, little = header.original_encoding

    def after_pixels(tag: int, *_: object) -> bool:
        return tag > _PIXEL_DATA

    if header.file_meta.TransferSyntaxUID.is_deflated:
        file.seek(0)  # it was unpacked as a whole: there is no place in the file to go on from
        found = _parse(lambda: read_partial(file, after_pixels))
    else:
        found = _parse(lambda: read_dataset(file, bool(implicit), bool(little), stop_when=after_pixels))
    raw = found.get_item(_PIXEL_DATA)
    if raw is None:
        if len(found):
            raise rejection("no_pixel_data", "pixel data of a kind that holds no image")
        raise rejection("truncated", "the pixel data begin and are cut off")
    size = len(raw.value or b"")
    if getattr(raw, "is_raw", False) and raw.length != _UNDEFINED and size < raw.length:
        raise rejection("truncated", f"{raw.length} bytes of pixel data are announced, {size} are there")
    if not size:
        raise rejection("no_pixel_data", "the pixel data element is empty")
    header[_PIXEL_DATA] = raw


def _text(header: Dataset, keyword: str) -> str:
    """The element as text; "" where it is absent."""
    value = header.get(keyword)
    if isinstance(value, list | tuple) or type(value).__name__ == "MultiValue":
        return "\\".join(map(str, value)).strip()  # as DICOM writes several values
    return "" if value is None else str(value).strip()


def _first_frame_laterality(header: Dataset) -> str:
    """FrameLaterality of the shared functional groups, else of the first frame; "" where neither has it."""
    for group in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        for item in (header.get(group) or [])[:1]:
            for anatomy in item.get("FrameAnatomySequence") or []:
                if anatomy.get("FrameLaterality"):
                    return str(anatomy.FrameLaterality)
    return ""


def _institution(header: Dataset) -> str:
    """A pseudonym of the institution: enough to see that two hospitals use one id, without naming either."""
    name = " ".join(_text(header, "InstitutionName").lower().split())
    return "" if is_placeholder(name) else "site-" + hashlib.sha256(name.encode()).hexdigest()[:8]


def _header_fields(header: Dataset) -> HeaderFields:
    """Identity and acquisition, verbatim."""
    return HeaderFields(
        person_id=_text(header, "PatientID"),
        person_name=_text(header, "PatientName"),
        birth_date=_text(header, "PatientBirthDate"),
        laterality=_text(header, "ImageLaterality") or _text(header, "Laterality"),
        frame_laterality=_first_frame_laterality(header),
        manufacturer=_text(header, "Manufacturer"),
        model=_text(header, "ManufacturerModelName"),
        protocol=_text(header, "ProtocolName").lower(),
        site=_institution(header),
        visit=_text(header, "StudyInstanceUID") or _text(header, "StudyDate"),
        uid=_text(header, "SOPInstanceUID"),
        burned_in=_text(header, "BurnedInAnnotation").upper() == "YES",
    )


def read_with_pixels(path: Path, check: Callable[[Dataset], None]) -> Dataset:
    """The dataset of a file with its pixel data, undecoded; `check` is called with the header before they are read.

    Raises VolumeRejected: kind and header codes of `octjepa.reasons`, and what `check` raises.
    """
    _check_kind(path)
    try:
        _check_inflated_size(path)
    except (OSError, zlib.error) as error:
        raise rejection("truncated", f"the deflated data cannot be unpacked: {error_origin(error)}") from None
    with _BoundedReader(FileIO(str(path))) as file:
        header = _read_header(file)
        check(header)
        _add_pixels(header, file)
    return header


def to_raw_scan(header: Dataset) -> RawScan:
    """The scan of a dataset with its pixel data. Raises VolumeRejected (pixel codes of `octjepa.reasons`)."""
    decoded = decode_pixels(header)
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


def read_dicom(path: Path) -> RawScan:
    """One DICOM file. Raises VolumeRejected (kind, header and pixel codes of `octjepa.reasons`)."""
    header = read_with_pixels(path, _check_frames)
    try:
        return to_raw_scan(header)
    except VolumeRejected as error:
        if error.reason == "too_few_frames" and integer(header, "NumberOfFrames") <= 1:
            _check_neighbours(path, header)
        raise
