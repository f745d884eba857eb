"""Topcon .fda and .fds: a mark, then named chunks, each with its length.

Chunks: https://bitbucket.org/uocte/uocte/wiki/Topcon%20File%20Format and oct-converter, whose 0.7 reads neither with
NumPy 2.3 and later.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.read.formats.sequence import PICTURE_FORMATS
from octjepa.read.formats.vendor import (
    check_length,
    check_shape,
    date_text,
    decode_frames,
    decode_text,
    file_size,
    filled_fields,
)
from octjepa.read.intensity import to_uint8
from octjepa.read.raw_scan import AxisSpacing, FrameGeometry, HeaderFields, RawScan
from octjepa.reasons import rejection
from octjepa.volume import Pattern

_HEADER_BYTES = 15
_MAX_CHUNKS = 10_000
_EYES = {0: "R", 1: "L"}
# By the scan mode. 4 is a cross of two lines. 11 holds five horizontal and five vertical lines, which cross: a DICOM
# file of such lines is "radial" as well.
_PATTERNS: dict[int, Pattern] = {2: "raster", 3: "radial", 11: "radial"}
_JPEG = struct.Struct("<BIIIIII")  # mode, two unknown, columns, rows, frames, unknown
_DEEP = struct.Struct("<BIIIIBI")  # mode, columns, rows, bits a pixel, frames, kind, bytes
_SCAN_04 = struct.Struct("<3I3d")  # fixation, mirror, polar, x mm, y mm, z um
_SCAN_02 = struct.Struct("<B5I3d")
_PATIENT = struct.Struct("<32s32s32s8sB3H")  # id, first, last, middle name, sex, birth date
_CAPTURE_02 = struct.Struct("<BBI100s6H")  # eye, mode, session, label, date and time
_CAPTURE = struct.Struct("<B6H")
_HARDWARE = struct.Struct("16s16s")  # model, serial number


@dataclass(frozen=True)
class _Chunks:
    """The position of each named chunk: name -> (offset, bytes), the first of a name."""

    path: Path
    positions: dict[bytes, tuple[int, int]]

    def read(self, name: bytes) -> bytes:
        """The bytes of a chunk. Raises KeyError where the file has none of that name."""
        offset, length = self.positions[name]
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def fields(self, layout: struct.Struct, *names: bytes) -> tuple[Any, ...] | None:
        """The first of `names` that is present and long enough, unpacked; None if none is."""
        for name in names:
            if name in self.positions and self.positions[name][1] >= layout.size:
                return layout.unpack_from(self.read(name))
        return None


def _list_chunks(path: Path) -> _Chunks:
    """Raises VolumeRejected: broken_header, truncated."""
    size = file_size(path)
    positions: dict[bytes, tuple[int, int]] = {}
    with path.open("rb") as file:
        if file.read(4) != b"FOCT":
            raise rejection("broken_header", "no FOCT mark at the start: no file of a Topcon scanner")
        at = _HEADER_BYTES
        for _ in range(_MAX_CHUNKS):
            file.seek(at)
            name_length = file.read(1)
            if not name_length:
                raise rejection("truncated", "the list of chunks ends without its end mark")
            if name_length == b"\0":
                return _Chunks(path, positions)
            name, length = file.read(name_length[0]), file.read(4)
            if len(length) < 4:
                raise rejection("truncated", "the file ends in the name of a chunk")
            start = at + 1 + name_length[0] + 4
            (count,) = struct.unpack("<I", length)
            check_length(start + count, size)
            positions.setdefault(name, (start, count))
            at = start + count
    raise rejection("broken_header", f"more than {_MAX_CHUNKS} chunks")


def _image_header(layout: struct.Struct, content: bytes) -> tuple[int, ...]:
    if len(content) < layout.size:
        raise rejection("truncated", "the chunk of images ends in its header")
    return layout.unpack_from(content)


def _jpeg_frames(content: bytes) -> tuple[np.ndarray, int, tuple[str, ...]]:
    """(pixels [D, H, W], scan mode, notes)."""
    from PIL import Image

    mode, _, _, columns, depth, frames, _ = _image_header(_JPEG, content)
    check_shape(frames, depth, columns)
    at = _JPEG.size
    streams = []
    for index in range(frames):
        if at + 4 > len(content):
            raise rejection("frames_missing", f"{index} of {frames} B-scans are in the chunk of images")
        (length,) = struct.unpack_from("<I", content, at)
        streams.append(content[at + 4 : at + 4 + length])
        at += 4 + length

    def decode(index: int) -> np.ndarray:
        with Image.open(BytesIO(streams[index]), formats=PICTURE_FORMATS) as image:
            if image.size != (columns, depth):
                raise ValueError("a B-scan of another size than the header's")
            return np.asarray(image.convert("L"))

    damaged = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
    pixels, notes = decode_frames(frames, decode, damaged)
    return pixels, mode, notes


def _deep_frames(content: bytes) -> tuple[np.ndarray, int, tuple[str, ...]]:
    """(pixels [D, H, W], scan mode, notes)."""
    mode, columns, depth, _, frames, _, _ = _image_header(_DEEP, content)
    check_shape(frames, depth, columns)
    check_length(_DEEP.size + frames * depth * columns * 2, len(content))
    raw = np.frombuffer(content, "<u2", frames * depth * columns, _DEEP.size).reshape(frames, depth, columns)
    notes: list[str] = []
    return to_uint8(raw, notes), mode, tuple(notes)


def _spacing(chunks: _Chunks, shape: tuple[int, ...]) -> AxisSpacing:
    """Field over columns and over gaps between lines, as Topcon's own DICOM export of a cube counts them."""
    fields = chunks.fields(_SCAN_04, b"@PARAM_SCAN_04") or chunks.fields(_SCAN_02, b"@PARAM_SCAN_02")
    if fields is None:
        return None, None, None
    x_mm, y_mm, z_um = (float(value) for value in fields[-3:])
    frames, _, columns = shape
    return (y_mm / (frames - 1) if frames > 1 and y_mm > 0 else None, z_um / 1000 or None, x_mm / columns or None)


def _header(chunks: _Chunks) -> tuple[HeaderFields, tuple[str, ...]]:
    """(header fields, names of the filled fields of personal data)."""
    patient = chunks.fields(_PATIENT, b"@PATIENT_INFO_02", b"@PATIENT_INFO")
    person, first, last, middle = ("", "", "", "") if patient is None else (decode_text(part) for part in patient[:4])
    birth_date = "" if patient is None else date_text(*patient[5:8])
    capture = chunks.fields(_CAPTURE_02, b"@CAPTURE_INFO_02") or chunks.fields(_CAPTURE, b"@CAPTURE_INFO")
    visit = "" if capture is None else date_text(*capture[-6:-3])
    hardware = chunks.fields(_HARDWARE, b"@HW_INFO_03", b"@HW_INFO_02", b"@HW_INFO_01")
    model, serial = ("", "") if hardware is None else (decode_text(part) for part in hardware)
    header = HeaderFields(
        person_id=person,
        person_name=" ".join(part for part in (last, first, middle) if part),
        birth_date=birth_date,
        sex="" if patient is None else str(patient[4]),
        laterality="" if capture is None else _EYES.get(capture[0], ""),
        manufacturer="Topcon",
        model=model,
        visit=visit,
    )
    personal = {
        "PatientName": f"{last}{first}{middle}",
        "PatientBirthDate": birth_date,
        "PatientSex": patient is not None and patient[4],
        "StudyDate": visit,
        "DeviceSerialNumber": serial,
        # Newer scanners encrypt this chunk: who it is cannot be read, but it is there.
        "OtherPatientIDs": b"@PATIENT_INFO_03" in chunks.positions,
    }
    return header, filled_fields(personal)


def read_topcon(path: Path) -> RawScan:
    """One .fda or .fds file.

    Raises VolumeRejected: broken_header, truncated, no_pixel_data, frames_missing, frames_broken, size_implausible.
    """
    chunks = _list_chunks(path)
    if b"@IMG_JPEG" in chunks.positions:
        pixels, mode, notes = _jpeg_frames(chunks.read(b"@IMG_JPEG"))
    else:
        deep = next((name for name in (b"@IMG_MOT_COMP_03", b"@IMG_SCAN_03") if name in chunks.positions), None)
        if deep is None:
            raise rejection("no_pixel_data", "no chunk of B-scans (IMG_JPEG, IMG_MOT_COMP_03, IMG_SCAN_03)")
        pixels, mode, notes = _deep_frames(chunks.read(deep))
    header, personal = _header(chunks)
    return RawScan(
        format="topcon_fds" if b"@IMG_SCAN_03" in chunks.positions else "topcon_fda",
        pixels=pixels,
        frame_geometry=FrameGeometry.unknown(len(pixels)),
        header=header,
        spacing_mm=_spacing(chunks, pixels.shape),
        pattern=_PATTERNS.get(mode),
        notes=notes,
        personal=personal,
    )
