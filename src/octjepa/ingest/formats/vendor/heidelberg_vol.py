"""Heidelberg's raw export (.vol, HSF-OCT): header, localizer, then every B-scan with its own header.

The layout is fixed, so it is read here, needs no library, and takes what eyepy 0.21 refuses: circle and star scans are
told by name, and letters beyond ASCII in a patient's id do not end the reading. Layout: Heidelberg Engineering's
"Special Function: Exporting Raw Data", as in eyepy's `vol_format`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from octjepa.ingest.formats.vendor import is_vol
from octjepa.ingest.formats.vendor.bounds import check_length, check_shape, file_size, line_facts, text
from octjepa.ingest.formats.vendor.intensity import heyex_grey
from octjepa.ingest.raw_scan import HeaderFields, RawScan
from octjepa.ingest.reasons import rejection
from octjepa.volume import Pattern

_HEADER_BYTES = 2048
_HEADER = np.dtype(
    {
        "names": ["columns", "frames", "rows", "column_mm", "slice_mm", "row_mm", "slo_columns", "slo_rows",
                  "eye", "exam_time", "pattern", "bscan_header", "patient_id", "born", "visited"],
        "formats": ["<u4", "<u4", "<u4", "<f8", "<f8", "<f8", "<u4", "<u4",
                    "V4", "<u8", "<i4", "<u4", "V24", "<f8", "<f8"],
        "offsets": [12, 16, 20, 24, 32, 40, 48, 52, 84, 88, 96, 100, 140, 164, 200],
        "itemsize": _HEADER_BYTES,
    }
)  # fmt: skip
_BSCAN_ENDS_AT = 16  # start and end, x and y, four float64
_BSCAN_HEADER_LEAST = 256
_LINE, _CIRCLE, _STAR = 1, 2, 5


def _date(days: float) -> str:
    """YYYYMMDD of days since 30 December 1899; "" for none."""
    return (datetime(1899, 12, 30) + timedelta(days=days)).strftime("%Y%m%d") if 1 < days < 110_000 else ""


def _positive(number: float) -> float | None:
    return float(number) if np.isfinite(number) and number > 0 else None


def _said(header: np.void) -> tuple[HeaderFields, tuple[str, ...]]:
    born, visited, eye = _date(header["born"]), _date(header["visited"]), text(header["eye"])
    person = text(header["patient_id"])
    held = {"PatientID": person, "PatientBirthDate": born, "StudyDate": visited or header["exam_time"]}
    said = HeaderFields(
        person_id=person,
        birth_date=born,
        laterality=eye,
        manufacturer="Heidelberg Engineering",
        model="Spectralis",
        visit=visited or str(int(header["exam_time"]) // (24 * 3600 * 10**7) or ""),
    )
    return said, tuple(name for name, value in held.items() if value and name != "PatientID")


def read_vol(path: Path) -> RawScan:
    """One .vol file. Raises VolumeRejected: broken_header, truncated, too_few_frames, size_implausible."""
    size = file_size(path)
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
        if not is_vol(path, head):
            raise rejection("broken_header", "no HSF-OCT mark at the start: no raw export of HEYEX")
        check_length(_HEADER_BYTES, size)
        header = np.frombuffer(head, _HEADER)[0]
        frames, rows, columns = int(header["frames"]), int(header["rows"]), int(header["columns"])
        check_shape(frames, rows, columns)
        own = int(header["bscan_header"])
        if own < _BSCAN_HEADER_LEAST:
            raise rejection("broken_header", "a B-scan header shorter than its fixed part")
        first = _HEADER_BYTES + int(header["slo_columns"]) * int(header["slo_rows"])
        stride = own + rows * columns * 4
        check_length(first + frames * stride, size)
        if header["pattern"] in (_LINE, _CIRCLE):
            kind = "circle" if header["pattern"] == _CIRCLE else "line"
            raise rejection("too_few_frames", f"a {kind} scan: {frames} B-scan, no volume")
        pixels = np.empty((frames, rows, columns), np.uint8)
        ends = np.empty((frames, 4))
        filled = 0
        for index in range(frames):
            file.seek(first + index * stride + _BSCAN_ENDS_AT)
            ends[index] = np.frombuffer(file.read(32), "<f8")
            file.seek(first + index * stride + own)
            raw = np.frombuffer(file.read(rows * columns * 4), "<f4").reshape(rows, columns)
            filled += int((~(raw <= 1)).sum())
            pixels[index] = heyex_grey(raw)
    said, personal = _said(header)
    pattern: Pattern | None = "radial" if header["pattern"] == _STAR else None
    return RawScan(
        format="heidelberg_vol",
        pixels=pixels,
        frame_geometry=line_facts(ends[:, :2], ends[:, 2:]),
        header=said,
        spacing_mm=(_positive(header["slice_mm"]), _positive(header["row_mm"]), _positive(header["column_mm"])),
        pattern=pattern,
        notes=("fourth_root_display", *([f"fill_share={filled / pixels.size:.3f}"] if filled else [])),
        personal=personal,
    )
