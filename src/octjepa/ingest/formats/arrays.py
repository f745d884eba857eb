"""NumPy's .npy and .npz. Pickled objects are never loaded; headers are read before values.

The convention for an array without names of its axes is [slice, depth, column]; content has to agree with it. One
member of a compressed .npz cannot be read in part: decoding it reads it all.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import IO

import numpy as np

from octjepa.ingest.formats.array_metadata import ArrayMetadata, array_metadata, array_scan, is_small, scan_member
from octjepa.ingest.formats.intensity import check_size
from octjepa.ingest.raw_scan import RawScan
from octjepa.ingest.reasons import rejection

_LAYOUT = "DHW"
_HEADER_LIMIT = 10_000  # NumPy's own, of a header that it parses as a Python literal


def _array_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of a .npy stream, read up to its values. Raises VolumeRejected broken_header."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file, max_header_size=_HEADER_LIMIT)
    except (ValueError, EOFError, SyntaxError, TypeError, TokenError):
        raise rejection("broken_header", "the header of the array cannot be parsed") from None
    return shape, dtype


def _check_header(shape: tuple[int, ...], dtype: np.dtype, value_bytes: int) -> None:
    """`value_bytes` follow the header. Raises VolumeRejected: unsupported_pixels, size_implausible, truncated."""
    if dtype.hasobject:
        raise rejection("unsupported_pixels", "an array of Python objects, which are never loaded")
    check_size(shape, dtype.itemsize)
    needed = math.prod(shape) * dtype.itemsize
    if value_bytes < needed:
        raise rejection("truncated", f"{value_bytes} bytes of values, {needed} expected")


def read_npy(path: Path) -> RawScan:
    """An array of three axes.

    Raises VolumeRejected: broken_header, unsupported_pixels, not_structural_oct, size_implausible, truncated,
    axes_ambiguous.
    """
    with path.open("rb") as file:
        shape, dtype = _array_header(file)
        _check_header(shape, dtype, path.stat().st_size - file.tell())
    return array_scan("npy", np.load(path, mmap_mode="r", allow_pickle=False), ArrayMetadata(), _LAYOUT)


def _member_header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype, int]:
    with archive.open(entry) as file:
        shape, dtype = _array_header(file)
        return shape, dtype, entry.file_size - file.tell()


def _member_values(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        values: np.ndarray = np.lib.format.read_array(file, allow_pickle=False, max_header_size=_HEADER_LIMIT)
        file.read(1)  # to the end of the member, where its checksum is compared with what was read
        return values


def read_npz(path: Path) -> RawScan:
    """The scan of an archive, with labels from its small members.

    Raises VolumeRejected: truncated, broken_header, no_pixel_data, unsupported_pixels, not_structural_oct,
    size_implausible, axes_ambiguous.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename[:-4]: entry for entry in archive.infolist() if entry.filename.endswith(".npy")}
            headers = {name: _member_header(archive, entry) for name, entry in entries.items()}
            shapes = {name: shape for name, (shape, _, _) in headers.items()}
            scan = scan_member(shapes)
            _check_header(*headers[scan])
            small = {
                name: _member_values(archive, entries[name])
                for name, (shape, dtype, _) in headers.items()
                if name != scan and is_small(shape) and not dtype.hasobject
            }
            metadata = array_metadata(small, shapes)
            values = _member_values(archive, entries[scan])
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError):
        raise rejection(
            "truncated", "the archive ends early, is damaged, or is packed in a way nothing here reads"
        ) from None
    return array_scan("npz", values, metadata, _LAYOUT)
