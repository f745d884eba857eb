"""Topcon .fda and .fds: a mark, then named chunks, each with its length.

oct-converter 0.7 reads both with a NumPy function that NumPy 2.3 removed, so it reads none; its chunks' layouts are
taken over, the walk is done here. Chunks: https://bitbucket.org/uocte/uocte/wiki/Topcon%20File%20Format.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.ingest.formats.intensity import to_grey
from octjepa.ingest.formats.vendor.bounds import check_length, check_shape, day, file_size, mend, text
from octjepa.ingest.raw_scan import AxisSpacing, FrameGeometry, HeaderFields, RawScan
from octjepa.ingest.reasons import error_origin, rejection
from octjepa.volume import Pattern

_HEADER_BYTES = 15
_MOST_CHUNKS = 10_000
_EYES = {0: "R", 1: "L"}
_PATTERNS: dict[int, Pattern] = {2: "raster", 3: "radial"}  # IMG_SCAN's scan mode; 4 is a cross of two lines
_JPEG = struct.Struct("<BIIIIII")  # mode, two unknown, columns, rows, frames, unknown
_DEEP = struct.Struct("<BIIIIBI")  # mode, columns, rows, bits a pixel, frames, kind, bytes
_SCAN_04 = struct.Struct("<3I3d")  # fixation, mirror, polar, x mm, y mm, z um
_SCAN_02 = struct.Struct("<B5I3d")
_PATIENT = struct.Struct("<32s32s32s8sB3H")  # id, first, last, middle name, sex, birth date
_CAPTURE_02 = struct.Struct("<BBI100s6H")  # eye, mode, session, label, date and time
_CAPTURE = struct.Struct("<B6H")


@dataclass(frozen=True)
class _Chunks:
    """Where each named chunk lies: name -> (offset, bytes), the first of a name."""

    path: Path
    places: dict[bytes, tuple[int, int]]

    def read(self, name: bytes) -> bytes:
        at, length = self.places[name]
        with self.path.open("rb") as file:
            file.seek(at)
            return file.read(length)

    def fields(self, layout: struct.Struct, *names: bytes) -> tuple[Any, ...] | None:
        """The first of `names` that is there and long enough, unpacked; None where none is."""
        for name in names:
            if name in self.places and self.places[name][1] >= layout.size:
                return layout.unpack_from(self.read(name))
        return None


def _chunks(path: Path) -> _Chunks:
    """Raises VolumeRejected: broken_header, truncated."""
    size = file_size(path)
    places: dict[bytes, tuple[int, int]] = {}
    with path.open("rb") as file:
        if file.read(4) != b"FOCT":
            raise rejection("broken_header", "no FOCT mark at the start: no file of a Topcon scanner")
        at = _HEADER_BYTES
        for _ in range(_MOST_CHUNKS):
            file.seek(at)
            name_length = file.read(1)
            if not name_length:
                raise rejection("truncated", "the list of chunks ends without its end mark")
            if name_length == b"\0":
                return _Chunks(path, places)
            name, length = file.read(name_length[0]), file.read(4)
            if len(length) < 4:
                raise rejection("truncated", "the file ends in the name of a chunk")
            start = at + 1 + name_length[0] + 4
            (count,) = struct.unpack("<I", length)
            check_length(start + count, size)
            places.setdefault(name, (start, count))
            at = start + count
    raise rejection("broken_header", f"more than {_MOST_CHUNKS} chunks")


def _jpeg_frames(content: bytes) -> tuple[np.ndarray, int, tuple[str, ...]]:
    """(pixels [F, H, W], scan mode, notes)."""
    from PIL import Image

    if len(content) < _JPEG.size:
        raise rejection("truncated", "the chunk of images ends in its header")
    mode, _, _, columns, rows, frames, _ = _JPEG.unpack_from(content)
    check_shape(frames, rows, columns)
    at, broken, fault = _JPEG.size, [], ""
    pixels = np.zeros((frames, rows, columns), np.uint8)
    for index in range(frames):
        if at + 4 > len(content):
            raise rejection("frames_missing", f"{index} of {frames} B-scans are in the chunk of images")
        (length,) = struct.unpack_from("<I", content, at)
        piece = content[at + 4 : at + 4 + length]
        at += 4 + length
        try:
            with Image.open(BytesIO(piece)) as image:
                if image.size != (columns, rows):
                    raise ValueError("a B-scan of another size than the header's")
                pixels[index] = np.asarray(image.convert("L"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            broken.append(index)
            fault = fault or error_origin(error)
    return pixels, mode, mend(pixels, broken, fault)


def _deep_frames(content: bytes) -> tuple[np.ndarray, int, tuple[str, ...]]:
    """(pixels [F, H, W], scan mode, notes)."""
    if len(content) < _DEEP.size:
        raise rejection("truncated", "the chunk of images ends in its header")
    mode, columns, rows, _, frames, _, _ = _DEEP.unpack_from(content)
    check_shape(frames, rows, columns)
    check_length(_DEEP.size + frames * rows * columns * 2, len(content))
    raw = np.frombuffer(content, "<u2", frames * rows * columns, _DEEP.size).reshape(frames, rows, columns)
    notes: list[str] = []
    return to_grey(raw, notes), mode, tuple(notes)


def _spacing(chunks: _Chunks, shape: tuple[int, ...]) -> AxisSpacing:
    """Field over columns and over gaps between lines, as Topcon's own DICOM export of a cube counts them."""
    fields = chunks.fields(_SCAN_04, b"@PARAM_SCAN_04") or chunks.fields(_SCAN_02, b"@PARAM_SCAN_02")
    if fields is None:
        return None, None, None
    x_mm, y_mm, z_um = (float(value) for value in fields[-3:])
    frames, _, columns = shape
    return (y_mm / (frames - 1) if frames > 1 and y_mm > 0 else None, z_um / 1000 or None, x_mm / columns or None)


def _said(chunks: _Chunks) -> tuple[HeaderFields, tuple[str, ...]]:
    patient = chunks.fields(_PATIENT, b"@PATIENT_INFO_02", b"@PATIENT_INFO")
    person, first, last, middle = ("", "", "", "") if patient is None else (text(part) for part in patient[:4])
    born = "" if patient is None else day(*(int(part) for part in patient[5:8]))
    capture = chunks.fields(_CAPTURE_02, b"@CAPTURE_INFO_02") or chunks.fields(_CAPTURE, b"@CAPTURE_INFO")
    visit = "" if capture is None else day(*(int(part) for part in capture[-6:-3]))
    hardware = chunks.fields(struct.Struct("16s16s"), b"@HW_INFO_03", b"@HW_INFO_02", b"@HW_INFO_01")
    model, serial = ("", "") if hardware is None else (text(part) for part in hardware)
    held = {
        "PatientName": f"{last}{first}{middle}",
        "PatientBirthDate": born,
        "PatientSex": patient is not None and patient[4],
        "StudyDate": visit,
        "DeviceSerialNumber": serial,
        # Newer scanners encrypt this chunk: who it is cannot be read, but it is there.
        "OtherPatientIDs": b"@PATIENT_INFO_03" in chunks.places,
    }
    said = HeaderFields(
        person_id=person,
        person_name=" ".join(part for part in (last, first, middle) if part),
        birth_date=born,
        laterality="" if capture is None else _EYES.get(int(capture[0]), ""),
        manufacturer="Topcon",
        model=model,
        visit=visit,
    )
    return said, tuple(field for field, value in held.items() if value)


def read_topcon(path: Path) -> RawScan:
    """One .fda or .fds file.

    Raises VolumeRejected: broken_header, truncated, no_pixel_data, frames_missing, frames_broken, size_implausible.
    """
    chunks = _chunks(path)
    if b"@IMG_JPEG" in chunks.places:
        pixels, mode, notes = _jpeg_frames(chunks.read(b"@IMG_JPEG"))
    else:
        deep = next((name for name in (b"@IMG_MOT_COMP_03", b"@IMG_SCAN_03") if name in chunks.places), None)
        if deep is None:
            raise rejection("no_pixel_data", "no chunk of B-scans (IMG_JPEG, IMG_MOT_COMP_03, IMG_SCAN_03)")
        pixels, mode, notes = _deep_frames(chunks.read(deep))
    said, personal = _said(chunks)
    return RawScan(
        format="topcon_fds" if b"@IMG_SCAN_03" in chunks.places else "topcon_fda",
        pixels=pixels,
        frame_geometry=FrameGeometry.unknown(len(pixels)),
        header=said,
        spacing_mm=_spacing(chunks, pixels.shape),
        pattern=_PATTERNS.get(mode),
        notes=notes,
        personal=personal,
    )
