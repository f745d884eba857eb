"""Files of values without a header: Zeiss Cirrus' research export (.img) and Optovue's .OCT.

Zeiss: single bytes; the file's name gives the rest, "{patient}_{scan} {columns}x{lines}_{m-d-yyyy}_{h-m-s}_{OD|OS}_
sn{number}_cube_z.img". B-scans follow one another, each row by row, the deepest row first and the columns from right to
left. Layout: `read_img` of retimat (mu-biomed) and JHU's octCirrusReader, which agree on it; oct-converter 0.7 takes
the bytes column by column.

Optovue: float32 values, one block a scan; a text file of the same name gives their shape. It gives no spacing of the
scan, only the scale of the video camera, so the spacing stays unknown.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octjepa.read.devices import named_model
from octjepa.read.formats.vendor import check_length, check_shape, date_text, file_size, member_names, more_scans
from octjepa.read.intensity import to_uint8
from octjepa.read.links import check_beside, text_beside
from octjepa.read.raw_scan import AxisSpacing, FrameGeometry, HeaderFields, RawScan
from octjepa.reasons import rejection

_ZEISS_DEPTH = 1024
_ZEISS_DEPTH_MM = 2.0
_ZEISS_CUBES = {512 * 128: (512, 128), 200 * 200: (200, 200), 1024 * 21: (1024, 21), 1024 * 5: (1024, 5)}
_ZEISS_OTHER = {
    "flowcube": "a flow cube",
    "lslo": "a fundus picture",
    "iris": "a picture of the iris",
    "anterior": "a scan of the anterior segment",
}
_SIZE = re.compile(r"(?<!\d)(\d{2,4})x(\d{2,4})(?![\dm])", re.IGNORECASE)
_FIELD = re.compile(r"(?<!\d)(\d{1,2})\s*(?:mm)?\s*x\s*(\d{1,2})\s*mm", re.IGNORECASE)
_EYE = re.compile(r"(?:^|_)(OD|OS)(?=_|\.)")
_DATE = re.compile(r"_(\d{1,2})-(\d{1,2})-(\d{4})_")
_PERSON = re.compile(r"^(.+?)_(?=Macular|Optic|Angio|HD|5 Line|Anterior)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\d.])(\d{1,6})(?![\d.])")
_MAX_TEXT_BYTES = 1 << 20


def _columns_and_lines(name: str, size: int) -> tuple[int, int]:
    """From the name, else from the size. Raises VolumeRejected: truncated, unsupported_pixels."""
    voxels, rest = divmod(size, _ZEISS_DEPTH)
    named = _SIZE.search(name)
    if named is not None and "hidef" not in name.lower():
        columns, lines = int(named[1]), int(named[2])
        if size < columns * lines * _ZEISS_DEPTH:
            raise rejection("truncated", f"the file holds {size} bytes; the cube that its name gives needs more")
        if size > columns * lines * _ZEISS_DEPTH:
            raise rejection("unsupported_pixels", f"{size} bytes are more than the cube that its name gives")
        return columns, lines
    columns_and_lines = _ZEISS_CUBES.get(voxels)
    side = round(voxels**0.5)
    if columns_and_lines is None and _FIELD.search(name) and side * side == voxels:
        columns_and_lines = (side, side)  # angiography cubes are square
    if columns_and_lines is None or rest:
        raise rejection(
            "unsupported_pixels", f"{size} bytes are those of no Cirrus cube, and the name gives no columns x lines"
        )
    return columns_and_lines


def _zeiss_spacing(name: str, columns: int, lines: int, model: str) -> AxisSpacing:
    """An angiography's field is in its name; that of the other cubes is fixed (`octjepa.read.protocols`).

    The depth is known of a Cirrus alone.
    """
    field = _FIELD.search(name)
    if field is None:
        return None, None, None
    depth = _ZEISS_DEPTH_MM / _ZEISS_DEPTH if model == "Cirrus" else None
    return float(field[2]) / lines, depth, float(field[1]) / columns


def read_zeiss(path: Path) -> RawScan:
    """One .img file.

    Raises VolumeRejected: not_structural_oct, too_few_frames, truncated, unsupported_pixels, size_implausible.
    """
    size, name = file_size(path), path.name
    lower = name.lower()
    for word, kind in _ZEISS_OTHER.items():
        if word in lower:
            raise rejection("not_structural_oct", f"{kind} by its name")
    columns, lines = _columns_and_lines(name, size)
    check_shape(lines, _ZEISS_DEPTH, columns)
    if lines < 4:
        raise rejection("too_few_frames", f"{lines} B-scans; a volume needs 4 at least")
    stored = np.fromfile(path, np.uint8, lines * _ZEISS_DEPTH * columns).reshape(lines, _ZEISS_DEPTH, columns)
    eye, date, person = _EYE.search(name), _DATE.search(name), _PERSON.match(name)
    visit = date_text(int(date[3]), int(date[1]), int(date[2])) if date else ""
    model = named_model((name,), "Zeiss", "Cirrus")
    return RawScan(
        format="zeiss_img",
        pixels=np.ascontiguousarray(stored[:, ::-1, ::-1]),
        frame_geometry=FrameGeometry.unknown(lines),
        header=HeaderFields(
            person_id=person[1] if person else "",
            laterality=eye[1] if eye else "",
            manufacturer="Zeiss",
            model=model,
            protocol="optic disc cube" if "optic" in lower else "macular cube" if "macular" in lower else "",
            visit=visit,
        ),
        spacing_mm=_zeiss_spacing(name, columns, lines, model),
        notes=("facts_from_file_name",),
        personal=("StudyDate",) if visit else (),
    )


class _Block(NamedTuple):
    """One scan of an Optovue file: index of its first value, and its shape."""

    first: int
    frames: int
    depth: int
    columns: int


def _first_number(line: str) -> int:
    number = _NUMBER.search(line)
    return int(number[1]) if number else 0


def _blocks(path: Path) -> tuple[list[_Block], str]:
    """(the scans of the file, the eye or ""). Raises VolumeRejected: broken_header, truncated."""
    text = text_beside(path)
    if text is None:
        raise rejection(
            "broken_header", "the text file of the same name, which gives the scan's shape, is not next to it"
        )
    check_beside(text, path)
    if file_size(text) > _MAX_TEXT_BYTES:
        raise rejection("broken_header", "the text file of the same name is not a description of a scan")
    lines = text.read_text("latin-1").splitlines()
    blocks: list[_Block] = []
    depth, first, eye = 0, 0, ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if "Window Height" in line:
            depth = _first_number(line)
        elif "Scan Length" in line and "Scan Usage" in following:
            block = _Block(first, _first_number(following), depth, _first_number(line))
            check_shape(*block[1:])
            blocks.append(block)
            first += block.frames * block.depth * block.columns
        elif "Eye Scanned" in line:
            eye = "OD" if "OD" in line else "OS" if "OS" in line else ""
    if not blocks:
        raise rejection("broken_header", "the text file of the same name gives no Scan Length and Scan Usage")
    check_length(first * 4, file_size(path))
    return blocks, eye


def members(path: Path) -> tuple[str, ...]:
    """The scans in an Optovue file, "1", "2", ..., in its order. Raises VolumeRejected."""
    return member_names(len(_blocks(path)[0]))


def read_optovue(path: Path, member: str = "") -> RawScan:
    """One scan of an Optovue file; without `member` the first, with a note of how many more there are.

    Raises VolumeRejected: broken_header, truncated, size_implausible.
    """
    blocks, eye = _blocks(path)
    block = blocks[int(member or 1) - 1]
    values = np.fromfile(path, "<f4", block.frames * block.depth * block.columns, offset=block.first * 4)
    # Stored A-scan by A-scan, the deepest value first; [D, H, W]
    stored = values.reshape(block.frames, block.columns, block.depth).transpose(0, 2, 1)[:, ::-1]
    notes: list[str] = []
    pixels = to_uint8(stored, notes)
    return RawScan(
        format="optovue_oct",
        pixels=pixels,
        frame_geometry=FrameGeometry.unknown(block.frames),
        header=HeaderFields(laterality=eye, manufacturer="Optovue"),
        notes=(*notes, *more_scans(member, len(blocks))),
    )
