"""A DICOM file to a `RawScan`, or a `VolumeRejected` that says why.

Header before pixels: kind, identity and the declared size are judged before any pixel is decoded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octjepa.ingest.frames import frame_facts, measures
from octjepa.ingest.personal import personal_fields
from octjepa.ingest.pixels import decode_pixels
from octjepa.ingest.reasons import raised_in, rejected
from octjepa.ingest.scan import RawScan, Said

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


def _text(header: Dataset, keyword: str) -> str:
    value = header.get(keyword)
    return "" if value is None else str(value).strip()


def _first_frame_laterality(header: Dataset) -> str:
    for group in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        for item in (header.get(group) or [])[:1]:
            for anatomy in item.get("FrameAnatomySequence") or []:
                if anatomy.get("FrameLaterality"):
                    return str(anatomy.FrameLaterality)
    return ""


def _said(header: Dataset) -> Said:
    return Said(
        person_id=_text(header, "PatientID"),
        person_name=_text(header, "PatientName"),
        birth_date=_text(header, "PatientBirthDate"),
        laterality=_text(header, "ImageLaterality") or _text(header, "Laterality"),
        frame_laterality=_first_frame_laterality(header),
        manufacturer=_text(header, "Manufacturer"),
        model=_text(header, "ManufacturerModelName"),
        protocol=_text(header, "ProtocolName").lower(),
        visit=_text(header, "StudyInstanceUID") or _text(header, "StudyDate"),
        uid=_text(header, "SOPInstanceUID"),
        burned_in=_text(header, "BurnedInAnnotation").upper() == "YES",
    )


def read_dicom(path: Path) -> RawScan:
    """One DICOM file. Raises VolumeRejected (kind, header and pixel codes of `octjepa.ingest.reasons`)."""
    _check_kind(path)
    header = _read(path, pixels=False)
    _check_header(header)
    decoded = decode_pixels(_with_pixels(path))
    pair, thickness = measures((header.get("SharedFunctionalGroupsSequence") or [None])[0])
    if pair is None and thickness is None:
        pair, thickness = measures(header)  # plain multi-frame images keep them at the top
    return RawScan(
        format="dicom",
        pixels=decoded.pixels,
        facts=frame_facts(header, len(decoded.pixels)),
        said=_said(header),
        pair_mm=None if pair is None else (pair[0], pair[1]),
        thickness_mm=thickness,
        notes=decoded.notes,
        personal=personal_fields(header),
    )
