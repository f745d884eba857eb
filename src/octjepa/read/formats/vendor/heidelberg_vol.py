"""Heidelberg's raw export (.vol, HSF-OCT): header, localizer, then every B-scan with its own header.

The layout is fixed, so it is read here, needs no library, and takes what eyepy 0.21 refuses: circle and star scans have
their own messages, and letters beyond ASCII in a patient's id do not stop the reader. Layout: Heidelberg Engineering's
"Special Function: Exporting Raw Data", as in eyepy's `vol_format`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import UInt8

from octjepa.read.formats.vendor import (
    check_length,
    check_shape,
    decode_text,
    file_size,
    filled_fields,
    line_geometry,
    positive,
)
from octjepa.read.intensity import heyex_display
from octjepa.read.raw_scan import HeaderFields, RawScan
from octjepa.reasons import rejection

_HEADER_BYTES = 2048
_HEADER = np.dtype(
    {
        "names": [
            "columns",
            "frames",
            "depth",
            "column_mm",
            "slice_mm",
            "depth_mm",
            "slo_columns",
            "slo_rows",
            "eye",
            "exam_time",
            "pattern",
            "bscan_header",
            "patient_id",
            "birth_date",
            "visit_date",
        ],
        "formats": [
            "<u4",
            "<u4",
            "<u4",
            "<f8",
            "<f8",
            "<f8",
            "<u4",
            "<u4",
            "V4",
            "<u8",
            "<i4",
            "<u4",
            "V24",
            "<f8",
            "<f8",
        ],
        "offsets": [12, 16, 20, 24, 32, 40, 48, 52, 84, 88, 96, 100, 140, 164, 200],
        "itemsize": _HEADER_BYTES,
    }
)
_BSCAN_SIZE_OFFSET = 12  # in a B-scan's header: the length of that header
_LINE_OFFSET = 16  # in a B-scan's header: start and end, x and y, four float64
_MIN_BSCAN_HEADER = 256
_MAX_LOCALIZER_BYTES = 1 << 24
_LINE, _CIRCLE, _STAR = 1, 2, 5
_TICKS_PER_DAY = 24 * 3600 * 10**7


def _date(days: float) -> str:
    """YYYYMMDD of days since 30 December 1899; "" for none."""
    return (datetime(1899, 12, 30) + timedelta(days=days)).strftime("%Y%m%d") if 1 < days < 110_000 else ""


def _bscan_starts(
    file: BinaryIO, first: int, frames: int, pixel_bytes: int, stated: int, size: int
) -> tuple[list[int], list[int]]:
    """(where each B-scan begins, the length of its header) in a file of `size` bytes.

    Each header states its own length, by the layout the one `stated` in the file's header. Writers other than HEYEX,
    eyepy's for one, leave its usual 61440 there: the B-scan's own counts, unless the file is too short for it.
    Raises VolumeRejected: broken_header, truncated.
    """

    def chain(own: bool) -> tuple[list[int], list[int], int]:
        starts, lengths, at = [], [], first
        for _ in range(frames):
            file.seek(at + _BSCAN_SIZE_OFFSET)
            length = int.from_bytes(file.read(4), "little") if own else stated
            lengths.append(length if length >= _MIN_BSCAN_HEADER else stated)
            starts.append(at)
            at += lengths[-1] + pixel_bytes
        return starts, lengths, at

    starts, lengths, end = chain(own=True)
    if end > size:
        starts, lengths, end = chain(own=False)
    if min(lengths) < _MIN_BSCAN_HEADER:
        raise rejection("broken_header", f"a B-scan header of {min(lengths)} bytes, shorter than its fixed part")
    check_length(end, size)
    return starts, lengths


def _read_localizer(file: BinaryIO, rows: int, columns: int) -> UInt8[np.ndarray, "rows columns"] | None:
    """The fundus picture that follows the header; None where the file has none or ends within it."""
    if not 0 < rows * columns <= _MAX_LOCALIZER_BYTES:
        return None
    data = file.read(rows * columns)
    return np.frombuffer(data, np.uint8).reshape(rows, columns).copy() if len(data) == rows * columns else None


def read_vol(path: Path) -> RawScan:
    """One .vol file. Raises VolumeRejected: broken_header, truncated, too_few_frames, size_implausible."""
    size = file_size(path)
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
        if not head.startswith((b"HSF-OCT", b"ep-v")):  # HEYEX; eyepy's writer
            raise rejection("broken_header", "no HSF-OCT mark at the start: no raw export of HEYEX")
        check_length(_HEADER_BYTES, size)
        header = np.frombuffer(head, _HEADER)[0]
        frames, depth, columns = (int(header[name]) for name in ("frames", "depth", "columns"))
        check_shape(frames, depth, columns)
        first = _HEADER_BYTES + int(header["slo_columns"]) * int(header["slo_rows"])
        localizer = _read_localizer(file, int(header["slo_rows"]), int(header["slo_columns"]))
        starts, lengths = _bscan_starts(file, first, frames, depth * columns * 4, int(header["bscan_header"]), size)
        if header["pattern"] in (_LINE, _CIRCLE):
            kind = "circle" if header["pattern"] == _CIRCLE else "line"
            raise rejection("too_few_frames", f"a {kind} scan: {frames} B-scan, no volume")
        pixels = np.empty((frames, depth, columns), np.uint8)
        lines = np.empty((frames, 4))
        filled = 0
        for index in range(frames):
            file.seek(starts[index] + _LINE_OFFSET)
            lines[index] = np.frombuffer(file.read(32), "<f8")
            file.seek(starts[index] + lengths[index])
            raw = np.frombuffer(file.read(depth * columns * 4), "<f4").reshape(depth, columns)
            filled += int((~(raw <= 1)).sum())
            pixels[index] = heyex_display(raw)
    birth_date, visit, exam_time = _date(header["birth_date"]), _date(header["visit_date"]), int(header["exam_time"])
    return RawScan(
        format="heidelberg_vol",
        pixels=pixels,
        frame_geometry=line_geometry(lines[:, :2], lines[:, 2:]),
        header=HeaderFields(
            person_id=decode_text(header["patient_id"]),
            birth_date=birth_date,
            laterality=decode_text(header["eye"]),
            manufacturer="Heidelberg Engineering",
            model="Spectralis",
            visit=visit or str(exam_time // _TICKS_PER_DAY or ""),
        ),
        spacing_mm=(positive(header["slice_mm"]), positive(header["depth_mm"]), positive(header["column_mm"])),
        pattern="radial" if header["pattern"] == _STAR else None,
        notes=("fourth_root_display", *([f"fill_share={filled / pixels.size:.3f}"] if filled else [])),
        localizer=localizer,
        personal=filled_fields({"PatientBirthDate": birth_date, "StudyDate": visit or exam_time}),
    )
