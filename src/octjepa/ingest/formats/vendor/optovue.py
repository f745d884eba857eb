"""Optovue .OCT: float32 grey values without a header, and a text file of the same name that says their shape.

A file may hold several blocks, one a scan. oct-converter 0.7 reads every block from the start of the file, and calls
the scale of the video camera the scan's pixel spacing, 0.015 where there is none; so the text is read here, and the
spacing stays unknown: it has to be given.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octjepa.ingest.formats.intensity import to_grey
from octjepa.ingest.formats.vendor.bounds import check_length, check_shape, file_size
from octjepa.ingest.raw_scan import FrameGeometry, HeaderFields, RawScan
from octjepa.ingest.reasons import rejection

_NUMBER = re.compile(r"(?<![\d.])(\d{1,6})(?![\d.])")
_MOST_TEXT = 1 << 20


class _Block(NamedTuple):
    """One scan: first value's place in the file, and its shape."""

    first: int
    frames: int
    rows: int
    columns: int


def _first_number(line: str) -> int:
    found = _NUMBER.search(line)
    return int(found[1]) if found else 0


def _blocks(path: Path) -> tuple[list[_Block], str]:
    """(the scans of the file, the eye or ""). Raises VolumeRejected: broken_header, truncated."""
    described = path.with_suffix(".txt")
    if not described.is_file():
        raise rejection("broken_header", "the text file of the same name, which states its shape, is missing")
    if file_size(described) > _MOST_TEXT:
        raise rejection("broken_header", "the text file of the same name is no description of a scan")
    lines = described.read_text("latin-1").splitlines()
    blocks: list[_Block] = []
    rows, first, eye = 0, 0, ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if "Window Height" in line:
            rows = _first_number(line)
        elif "Scan Length" in line and "Scan Usage" in following:
            block = _Block(first, _first_number(following), rows, _first_number(line))
            check_shape(*block[1:])
            blocks.append(block)
            first += block.frames * block.rows * block.columns
        elif "Eye Scanned" in line:
            eye = "OD" if "OD" in line else "OS" if "OS" in line else ""
    if not blocks:
        raise rejection("broken_header", "the text file of the same name says no Scan Length and Scan Usage")
    check_length(first * 4, file_size(path))
    return blocks, eye


def members(path: Path) -> tuple[str, ...]:
    """The scans in the file, "1", "2", ..., in its order."""
    return tuple(str(number + 1) for number in range(len(_blocks(path)[0])))


def read_optovue(path: Path, member: str = "") -> RawScan:
    """One scan of an Optovue file; without `member` the first, with a note of how many more there are.

    Raises VolumeRejected: broken_header, truncated, size_implausible.
    """
    blocks, eye = _blocks(path)
    block = blocks[int(member or 1) - 1]
    values = np.fromfile(path, "<f4", block.frames * block.rows * block.columns, offset=block.first * 4)
    # A-scan by A-scan, the deepest value first.
    stored = values.reshape(block.frames, block.columns, block.rows).transpose(0, 2, 1)[:, ::-1]
    notes: list[str] = []
    pixels = to_grey(stored, notes)
    if not member and len(blocks) > 1:
        notes.append(f"more_scans_in_file={len(blocks) - 1}")
    return RawScan(
        format="optovue_oct",
        pixels=pixels,
        frame_geometry=FrameGeometry.unknown(block.frames),
        header=HeaderFields(laterality=eye, manufacturer="Optovue"),
        notes=tuple(notes),
    )
