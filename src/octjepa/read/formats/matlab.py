"""MATLAB's .mat: up to version 7 by SciPy, version 7.3 by h5py (extra `formats`). Only plain numeric arrays are read.

Classes, function handles and links to other files are left out. An array called `images` is that of Duke's DME set:
height x width x B-scan. SciPy allocates what the tag of an element claims and only then finds that the file is
shorter, so the tags of versions 5 to 7 are checked first (MAT-File Format, MathWorks, chapter 1): an element ends
within the one around it, and a compressed one cannot hold more than deflate packs.
"""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np

from octjepa.read.formats import import_extra
from octjepa.read.formats.arrays import ArrayMetadata, array_metadata, array_scan, is_small, scan_member
from octjepa.read.intensity import check_size
from octjepa.read.raw_scan import RawScan
from octjepa.reasons import rejection

_ITEM_BYTES = {
    "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "single": 4,
    "double": 8, "int64": 8, "uint64": 8, "logical": 1,
}  # fmt: skip
_TEXT = "char"
# What SciPy's and h5py's parsers raise for damaged bytes.
_DAMAGED = (
    ValueError, TypeError, OSError, KeyError, IndexError, NotImplementedError, EOFError, OverflowError, RuntimeError,
    zlib.error,
)  # fmt: skip
_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15
_DEFLATE_RATIO = 1032  # bytes that one byte of a deflate stream can expand to
_MAX_TAGS = 64  # of one array: flags, shape, name and values are four or five
_TAG_WINDOW = 1 << 16  # bytes at the start of a compressed array that hold its values' tag


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
                _check_compressed(file, length, order)
            elif kind == _MATRIX:
                _check_parts(file, at + 8 + length, order)
            at += 8 + length


def _check_compressed(file: BinaryIO, length: int, order: str) -> None:
    """Raises ValueError where the compressed element at the position of `file` announces more than it can hold."""
    head = zlib.decompressobj().decompress(file.read(min(length, _TAG_WINDOW)), _TAG_WINDOW)
    if len(head) < 8:
        raise ValueError("a compressed element is empty")
    kind, inner = struct.unpack_from(order + "II", head)
    if inner > _DEFLATE_RATIO * length:
        raise ValueError("a compressed element cannot hold what it claims")
    if kind == _MATRIX:
        start = BytesIO(head)
        start.seek(8)
        _check_parts(start, 8 + inner, order)


def _check_parts(file: BinaryIO, end: int, order: str) -> None:
    """Checks the tags from the position of `file` to `end`."""
    for _ in range(_MAX_TAGS):
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


def _read_mat5(path: Path) -> tuple[str, np.ndarray, ArrayMetadata]:
    """(name of the scan, its values, what the small arrays describe)."""
    from scipy.io import loadmat, whosmat

    check_lengths(path)
    listed = {name: (shape, kind) for name, shape, kind in whosmat(path) if kind in _ITEM_BYTES or kind == _TEXT}
    numeric = {name: shape for name, (shape, kind) in listed.items() if kind != _TEXT}
    scan = scan_member(numeric)
    check_size(numeric[scan], _ITEM_BYTES[listed[scan][1]])
    others = [name for name, (shape, kind) in listed.items() if name != scan and (kind == _TEXT or is_small(shape))]
    # With chars as texts a char array of one row becomes one short text.
    arrays = loadmat(path, variable_names=[scan, *others], chars_as_strings=True)
    small = {name: arrays[name] for name in others if is_small(arrays[name].shape)}
    return scan, arrays[scan], array_metadata(small, numeric)


def _read_hdf5(path: Path) -> tuple[str, np.ndarray, ArrayMetadata]:
    """(name of the scan, its values, what the small arrays describe)."""
    h5py = import_extra("h5py", "formats")
    with h5py.File(path, "r") as file:
        names = [name for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)]
        arrays = {
            name: data
            for name, data in ((name, file[name]) for name in names)
            if isinstance(data, h5py.Dataset) and not (data.external or data.is_virtual) and data.dtype.kind in "biuf"
        }
        shapes = {name: data.shape for name, data in arrays.items()}
        scan = scan_member(shapes)
        check_size(shapes[scan], arrays[scan].dtype.itemsize)
        texts = {name for name, data in arrays.items() if data.attrs.get("MATLAB_class") == b"char"}
        small = {
            name: np.array("".join(map(chr, data[()].ravel()))) if name in texts else data[()]
            for name, data in arrays.items()
            if name != scan and (is_small(data.shape) or (name in texts and data.size <= 64))
        }
        # MATLAB writes the first axis last.
        return scan, np.asarray(arrays[scan][()]).T, array_metadata(small, shapes)


def read_mat(path: Path) -> RawScan:
    """The scan of a MATLAB file, with labels from its small arrays.

    Raises VolumeRejected: truncated, broken_header, no_pixel_data, unsupported_pixels, not_structural_oct,
    size_implausible, too_few_frames, no_decoder.
    """
    with path.open("rb") as file:
        head = file.read(1024)
    hdf5 = head.startswith((b"MATLAB 7.3", b"\x89HDF\r\n\x1a\n"))
    try:
        scan, values, metadata = (_read_hdf5 if hdf5 else _read_mat5)(path)
    except _DAMAGED:
        raise rejection("truncated", "its arrays cannot be read: the file ends early or is damaged") from None
    return array_scan("mat", values, metadata, "HWD" if scan == "images" else "")
