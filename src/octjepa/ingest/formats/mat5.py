"""The lengths that a MATLAB file of version 5 to 7 claims, held against its size before anything is read.

SciPy allocates what an element's tag claims, and only then finds that the file is shorter. Here the tags alone are
walked (MAT-File Format, MathWorks, chapter 1): an element lies within the one around it, and a compressed one cannot
hold more than deflate packs.
"""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15
_MOST_PACKED = 1032  # bytes that one byte of a deflate stream can stand for
_MOST_TAGS = 64  # of one array: flags, shape, name and values are four or five
_TAGS_WITHIN = 1 << 16  # bytes at the start of a compressed array in which its values' tag lies


def check_lengths(path: Path) -> None:
    """Raises ValueError: an element is longer than what holds it; zlib.error: a stream is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES or 0 in header[:4]:
            raise ValueError("no header of version 5; version 4 has no arrays of three axes")
        order = ">" if header[126:128] == b"MI" else "<"
        at = _HEADER_BYTES
        while at + 8 <= size:
            file.seek(at)
            kind, length = struct.unpack(order + "II", file.read(8))
            if at + 8 + length > size:
                raise ValueError("an element ends beyond the file")
            if kind == _COMPRESSED:
                _check_packed(file, length, order)
            elif kind == _MATRIX:
                _check_parts(file, at + 8 + length, order)
            at += 8 + length


def _check_packed(file: BinaryIO, length: int, order: str) -> None:
    head = zlib.decompressobj().decompress(file.read(min(length, _TAGS_WITHIN)), _TAGS_WITHIN)
    if len(head) < 8:
        raise ValueError("a compressed element is empty")
    kind, inner = struct.unpack_from(order + "II", head)
    if inner > _MOST_PACKED * length:
        raise ValueError("a compressed element cannot hold what it claims")
    if kind == _MATRIX:
        start = BytesIO(head)
        start.seek(8)
        _check_parts(start, 8 + inner, order)


def _check_parts(file: BinaryIO, end: int, order: str) -> None:
    """From the place of `file` to `end`, tag by tag."""
    for _ in range(_MOST_TAGS):
        at = file.tell()
        tag = file.read(8)
        if at >= end or len(tag) < 8:
            return
        kind, length = struct.unpack(order + "II", tag)
        if kind >> 16:  # a small element: its length and its value are within the tag
            continue
        if at + 8 + length > end:
            raise ValueError("a part of an array ends beyond it")
        file.seek(at + 8 + -(-length // 8) * 8)
