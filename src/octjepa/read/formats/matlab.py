"""MATLAB's .mat: versions 5 to 7 by NumPy, version 7.3 by h5py (extra `formats`). Only plain numeric arrays are read.

Classes, function handles and links to other files are left out. An array called `images` is that of Duke's DME set:
height x width x B-scan.

A file of versions 5 to 7 is a list of elements, each with a tag that states its type and its length (MAT-File Format,
MathWorks, chapter 1). SciPy allocates what a tag states, so the elements are read here: the tags of an array are
checked against each other and against the element that holds them, and only then are its values read or unpacked.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from octjepa.read.formats import import_extra
from octjepa.read.formats.arrays import (
    MAX_MEMBERS,
    ArrayMetadata,
    array_metadata,
    array_scan,
    check_members,
    is_small,
    scan_member,
)
from octjepa.read.intensity import check_size
from octjepa.read.memory_budget import DEFLATE_RATIO, array_bytes, check_memory, inflate
from octjepa.read.raw_scan import RawScan
from octjepa.reasons import rejection

_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15  # types of elements
_STORED = {  # types of values as they are stored, and as MATLAB's classes of arrays
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_CHAR = 4  # a class
_TEXTS = {4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32", 1: "latin-1", 2: "latin-1"}
_COMPLEX, _LOGICAL = 0x0800, 0x0200  # flags
_MAX_AXES = 32
_MAX_NAME_BYTES = 64  # MATLAB's own limit is 63
_MAX_TEXT = 64  # characters of a text that becomes a label
_LARGEST_CHUNK = 16 << 20  # bytes of a chunk of HDF5 that is larger than its array
_WINDOW = 4096  # bytes at the start of an array that hold the tags of its flags, shape, name and values
_HDF5_STARTS = (b"MATLAB 7.3", b"\x89HDF\r\n\x1a\n")
# Exceptions that the parsers of NumPy and h5py raise for damaged bytes.
_DAMAGED = (
    ValueError,
    TypeError,
    OSError,
    KeyError,
    IndexError,
    NotImplementedError,
    EOFError,
    OverflowError,
    RuntimeError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True)
class _Array:
    """One plain array of a file of version 5: its checked tags, and where the element lies that holds it."""

    name: str
    shape: tuple[int, ...]
    kind: str  # dtype of its class, "" for text
    stored: int  # type of its values as they are stored
    values_at: int  # byte within the element, unpacked
    value_bytes: int
    element_at: int  # byte in the file
    element_bytes: int  # in the file
    compressed: bool
    order: str

    @property
    def itemsize(self) -> int:
        """Bytes of a value; of a text, which becomes one value, 8."""
        return np.dtype(self.kind).itemsize if self.kind else 8


def _tag(data: bytes, at: int, order: str) -> tuple[int, int, int, int]:
    """(type, bytes, first byte, byte after it) of the element at `at`; a small one has its value within the tag."""
    kind, count = struct.unpack_from(order + "II", data, at)
    if kind >> 16:
        kind, count = kind & 0xFFFF, kind >> 16
        if count > 4:
            raise ValueError("a small element of more than four bytes")
        return kind, count, at + 4, at + 8
    return kind, count, at + 8, at + 8 + -(-count // 8) * 8


def _parse_array(head: bytes, element_bytes: int, order: str) -> tuple[str, tuple[int, ...], str, int, int, int] | None:
    """(name, shape, dtype or "", type, first byte, bytes) of the values in a matrix element that begins with `head`.

    None for what is not plain array: a class, a struct, a cell, complex numbers. Raises ValueError, struct.error: its
    tags contradict each other or leave the element.
    """
    _, count, at, following = _tag(head, 0, order)
    if count < 8:
        raise ValueError("an array without flags")
    (flags,) = struct.unpack_from(order + "I", head, at)
    kind_code = flags & 0xFF
    if flags & _COMPLEX or (kind_code not in _CLASSES and kind_code != _CHAR):
        return None
    kind, count, at, following = _tag(head, following, order)
    if kind != 5 or not 8 <= count <= 4 * _MAX_AXES or count % 4:
        raise ValueError("an array without a shape")
    shape = struct.unpack_from(f"{order}{count // 4}i", head, at)
    if min(shape) < 0:
        raise ValueError("an axis of negative length")
    kind, count, at, following = _tag(head, following, order)
    if kind not in (1, 2) or count > _MAX_NAME_BYTES:
        raise ValueError("an array without a name")
    name = head[at : at + count].decode("latin-1")
    kind, count, at, _ = _tag(head, following, order)
    if at + count > element_bytes:
        raise ValueError("the values of an array end beyond it")
    if kind_code == _CHAR:
        return (name, shape, "", kind, at, count) if kind in _TEXTS else None
    if kind not in _STORED or count != array_bytes(shape, np.dtype(_STORED[kind]).itemsize):
        raise ValueError("an array has not as many values as its shape says")
    return name, shape, "?" if flags & _LOGICAL else _CLASSES[kind_code], kind, at, count


def _list_arrays(path: Path) -> Iterator[_Array]:
    """The plain arrays of a file of version 5, in its order. Raises ValueError, struct.error, zlib.error: damaged."""
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
            head = _element_head(file, kind, length, order)
            if head is not None:
                inner, window = head
                parsed = _parse_array(window, inner, order)
                if parsed is not None:
                    yield _Array(*parsed, at + 8, length, kind == _COMPRESSED, order)
            at += 8 + length


def _element_head(file: BinaryIO, kind: int, length: int, order: str) -> tuple[int, bytes] | None:
    """(bytes of the array, its first ones) of the element at the position of `file`; None for what is not an array."""
    if kind == _MATRIX:
        return length, file.read(min(length, _WINDOW))
    if kind != _COMPRESSED:
        return None
    window = zlib.decompressobj().decompress(file.read(min(length, _WINDOW)), _WINDOW)
    if len(window) < 8:
        raise ValueError("a compressed element is empty")
    kind, inner = struct.unpack_from(order + "II", window)
    if inner > DEFLATE_RATIO * length:
        raise ValueError("a compressed element cannot hold what it claims")
    return (inner, window[8:]) if kind == _MATRIX else None


def _read_values(path: Path, array: _Array) -> np.ndarray:
    """The values of an array in its shape; of a text, a text of no axes. Raises VolumeRejected, ValueError: damaged."""
    with path.open("rb") as file:
        file.seek(array.element_at)
        if array.compressed:
            end = 8 + array.values_at + array.value_bytes
            data = inflate(file.read(array.element_bytes), "its values", most_bytes=end)
            raw = memoryview(data)[8 + array.values_at :]
        else:
            file.seek(array.values_at, 1)
            raw = memoryview(file.read(array.value_bytes))
    if len(raw) != array.value_bytes:
        raise ValueError("an array ends early")
    if not array.kind:
        encoding = _TEXTS[array.stored]
        wide = encoding in ("utf-16", "utf-32")
        return np.array(bytes(raw).decode(encoding + ("-le" if array.order == "<" else "-be") * wide))
    values = np.frombuffer(raw, array.order + _STORED[array.stored])
    return values.astype(array.kind, copy=False).reshape(array.shape, order="F")


def _is_short(array: _Array) -> bool:
    """Whether an array is a number, a short vector or a short text."""
    if array.kind:
        return is_small(array.shape, array.itemsize)
    return array.value_bytes <= 4 * _MAX_TEXT and sum(length > 1 for length in array.shape) <= 1


def _read_mat5(path: Path) -> tuple[str, np.ndarray, ArrayMetadata]:
    """(name of the scan, its values, what the small arrays describe)."""
    arrays: dict[str, _Array] = {}
    for array in _list_arrays(path):
        arrays[array.name] = array
        if len(arrays) > MAX_MEMBERS:
            check_members(len(arrays))
    shapes = {name: array.shape for name, array in arrays.items() if array.kind}
    scan = scan_member(shapes)
    check_size(shapes[scan], arrays[scan].itemsize)
    ratio = DEFLATE_RATIO if arrays[scan].compressed else 8  # doubles that are whole numbers are stored as bytes
    check_memory(array_bytes(shapes[scan], arrays[scan].itemsize), "its values", arrays[scan].element_bytes, 8 * ratio)
    small = {name: _read_values(path, array) for name, array in arrays.items() if name != scan and _is_short(array)}
    return scan, _read_values(path, arrays[scan]), array_metadata(small, shapes)


def _check_dataset(data: Any) -> None:
    """Checks an HDF5 data set and the chunks that it is packed in. Raises VolumeRejected: size_implausible, truncated.

    HDF5 unpacks whole chunks, and one chunk may be larger than the data set.
    """
    check_size(data.shape, data.dtype.itemsize)
    if data.chunks is not None:
        chunk = array_bytes(data.chunks, data.dtype.itemsize)
        if chunk > max(_LARGEST_CHUNK, array_bytes(data.shape, data.dtype.itemsize)):
            raise rejection("size_implausible", f"a chunk of {chunk >> 20} MiB, larger than the array that it is of")
    packed = data.id.get_storage_size()
    check_memory(array_bytes(data.shape, data.dtype.itemsize), "its values", packed, DEFLATE_RATIO**2)


def _is_text(data: Any) -> bool:
    """Whether MATLAB stored a short text as numbers."""
    if "MATLAB_class" not in data.attrs:
        return False
    kind = data.attrs.get_id("MATLAB_class")
    return kind.get_storage_size() <= 64 and data.attrs["MATLAB_class"] == b"char"


def _read_hdf5(path: Path) -> tuple[str, np.ndarray, ArrayMetadata]:
    """(name of the scan, its values, what the small arrays describe)."""
    h5py = import_extra("h5py", "formats")
    with h5py.File(path, "r") as file:
        check_members(len(file))
        names = [name for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)]
        arrays = {
            name: data
            for name, data in ((name, file[name]) for name in names)
            if isinstance(data, h5py.Dataset) and not (data.external or data.is_virtual) and data.dtype.kind in "biuf"
        }
        shapes = {name: data.shape for name, data in arrays.items() if data.shape is not None}
        scan = scan_member(shapes)
        _check_dataset(arrays[scan])
        small: dict[str, np.ndarray] = {}
        for name, shape in shapes.items():
            data = arrays[name]
            text = data.size <= _MAX_TEXT and _is_text(data)
            if name != scan and data.size and (text or is_small(shape, data.dtype.itemsize)):
                _check_dataset(data)
                small[name] = np.array("".join(map(chr, data[()].ravel()))) if text else data[()]
        # MATLAB writes the first axis last.
        return scan, np.asarray(arrays[scan][()]).T, array_metadata(small, shapes)


def read_arrays(path: Path, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """The plain arrays of the names `wanted` that the file holds, in the order of axes that MATLAB shows.

    Raises VolumeRejected: truncated, size_implausible, no_decoder.
    """
    with path.open("rb") as file:
        head = file.read(1024)
    try:
        if head.startswith(_HDF5_STARTS):
            h5py = import_extra("h5py", "formats")
            found: dict[str, np.ndarray] = {}
            with h5py.File(path, "r") as file:
                for name in wanted:
                    data = file.get(name) if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
                    if not isinstance(data, h5py.Dataset) or data.external or data.is_virtual:
                        continue
                    if data.dtype.kind in "biuf":
                        _check_dataset(data)
                        found[name] = np.asarray(data[()]).T
            return found
        arrays = {array.name: array for array in _list_arrays(path) if array.name in wanted and array.kind}
        for array in arrays.values():
            check_size(array.shape, array.itemsize)
            ratio = DEFLATE_RATIO if array.compressed else 8
            check_memory(array_bytes(array.shape, array.itemsize), "its values", array.element_bytes, 8 * ratio)
        return {name: _read_values(path, array) for name, array in arrays.items()}
    except _DAMAGED:
        raise rejection("truncated", "its arrays cannot be read: the file ends early or is damaged") from None


def read_mat(path: Path) -> RawScan:
    """The scan of a MATLAB file, with labels from its small arrays.

    Raises VolumeRejected: truncated, broken_header, no_pixel_data, unsupported_pixels, not_structural_oct,
    size_implausible, too_few_frames, no_decoder.
    """
    with path.open("rb") as file:
        head = file.read(1024)
    hdf5 = head.startswith(_HDF5_STARTS)
    try:
        scan, values, metadata = (_read_hdf5 if hdf5 else _read_mat5)(path)
    except _DAMAGED:
        raise rejection("truncated", "its arrays cannot be read: the file ends early or is damaged") from None
    return array_scan("mat", values, metadata, "HWD" if scan == "images" else "")
