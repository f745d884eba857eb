"""Zeiss Cirrus research export (.img): grey bytes and nothing else; the file's name says the rest.

A name is "{patient}_{scan} {columns}x{lines}_{m-d-yyyy}_{h-m-s}_{OD|OS}_sn{number}_cube_z.img". B-scans follow one
another, each row by row, the deepest row first and the columns from right to left. oct-converter 0.7 takes the bytes
column by column, which scrambles every B-scan, and finds an eye in names such as RODRIGUEZ, so it is not asked.
Layout: `read_img` of retimat (mu-biomed) and JHU's octCirrusReader, which agree on it.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from octjepa.ingest.formats.vendor.bounds import check_shape, day, file_size
from octjepa.ingest.raw_scan import AxisSpacing, FrameGeometry, HeaderFields, RawScan
from octjepa.ingest.reasons import rejection

ROWS = 1024
_DEPTH_MM = 2.0
_BY_VOXELS = {512 * 128: (512, 128), 200 * 200: (200, 200), 1024 * 21: (1024, 21), 1024 * 5: (1024, 5)}
_SIZE = re.compile(r"(?<!\d)(\d{2,4})x(\d{2,4})(?![\dm])", re.IGNORECASE)
_FIELD = re.compile(r"(?<!\d)(\d{1,2})\s*(?:mm)?\s*x\s*(\d{1,2})\s*mm", re.IGNORECASE)
_EYE = re.compile(r"(?:^|_)(OD|OS)(?=_|\.)")
_DATE = re.compile(r"_(\d{1,2})-(\d{1,2})-(\d{4})_")
_PERSON = re.compile(r"^(.+?)_(?=Macular|Optic|Angio|HD|5 Line|Anterior)", re.IGNORECASE)


def _columns_and_lines(name: str, size: int) -> tuple[int, int]:
    """From the name, else from the size. Raises VolumeRejected: truncated, unsupported_pixels."""
    voxels, rest = divmod(size, ROWS)
    named = _SIZE.search(name)
    if named is not None:
        columns, lines = int(named[1]), int(named[2])
        if "hidef" not in name.lower():
            if size < columns * lines * ROWS:
                raise rejection("truncated", f"the file holds {size} bytes; the cube that its name says needs more")
            if size > columns * lines * ROWS:
                raise rejection("unsupported_pixels", f"{size} bytes are more than the cube that its name says")
            return columns, lines
    known = _BY_VOXELS.get(voxels)
    side = round(voxels**0.5)
    if known is None and _FIELD.search(name) and side * side == voxels:
        known = (side, side)  # angiography cubes are square
    if known is None or rest:
        raise rejection(
            "unsupported_pixels", f"{size} bytes are those of no Cirrus cube, and the name says no columns x lines"
        )
    return known


def _spacing(name: str, columns: int, lines: int) -> AxisSpacing:
    """An angiography's field stands in its name; that of the other cubes is fixed (`octjepa.ingest.protocols`)."""
    field = _FIELD.search(name)
    if field is None:
        return None, None, None
    return float(field[2]) / lines, _DEPTH_MM / ROWS, float(field[1]) / columns


def read_img(path: Path) -> RawScan:
    """One .img file. Raises VolumeRejected: not_structural_oct, truncated, unsupported_pixels, size_implausible."""
    size, name = file_size(path), path.name
    lower = name.lower()
    for word, kind in (("flowcube", "a flow cube"), ("lslo", "a fundus picture"), ("iris", "a picture of the iris"),
                       ("anterior", "a scan of the anterior segment")):  # fmt: skip
        if word in lower:
            raise rejection("not_structural_oct", f"{kind} by its name")
    columns, lines = _columns_and_lines(name, size)
    check_shape(lines, ROWS, columns)
    if lines < 4:
        raise rejection("too_few_frames", f"{lines} B-scans; a volume needs 4 at least")
    stored = np.fromfile(path, np.uint8, lines * ROWS * columns).reshape(lines, ROWS, columns)
    eye, date, person = _EYE.search(name), _DATE.search(name), _PERSON.match(name)
    visit = day(int(date[3]), int(date[1]), int(date[2])) if date else ""
    protocol = "optic disc cube" if "optic" in lower else "macular cube" if "macular" in lower else ""
    return RawScan(
        format="zeiss_img",
        pixels=np.ascontiguousarray(stored[:, ::-1, ::-1]),
        frame_geometry=FrameGeometry.unknown(lines),
        header=HeaderFields(
            person_id=person[1] if person else "",
            laterality=eye[1] if eye else "",
            manufacturer="Zeiss",
            model="Cirrus",
            protocol=protocol,
            visit=visit,
        ),
        spacing_mm=_spacing(name, columns, lines),
        notes=("facts_from_file_name",),
        personal=("StudyDate",) if visit else (),
    )
