"""NumPy's .npy and .npz. Pickled objects are never loaded; headers come before values.

octjepa's own convention for an array without a word on its axes is [slice, depth, width]; content has to agree with it.
One member of a compressed .npz cannot be read in part: decoding it reads it all.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import IO

import numpy as np

from octjepa.ingest.formats.axes import oriented
from octjepa.ingest.formats.intensity import check_size, to_grey
from octjepa.ingest.formats.members import Small, is_small, left_out, scan_member, small_members
from octjepa.ingest.raw_scan import FrameGeometry, RawScan
from octjepa.ingest.reasons import rejection

_CONVENTION = "DHW"
_HEADER_LIMIT = 10_000  # NumPy's own, of a header that it parses as a Python literal


def _declared(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of a .npy stream, read up to its values. Raises VolumeRejected broken_header."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file, max_header_size=_HEADER_LIMIT)
    except (ValueError, EOFError, SyntaxError, TypeError, TokenError):
        raise rejection("broken_header", "the header of the array cannot be parsed") from None
    return shape, dtype


def _check_declared(shape: tuple[int, ...], dtype: np.dtype, there: int) -> None:
    """Raises VolumeRejected: unsupported_pixels, size_implausible, truncated."""
    if dtype.hasobject:
        raise rejection("unsupported_pixels", "an array of Python objects, which are never loaded")
    check_size(shape, dtype.itemsize)
    needed = math.prod(shape) * dtype.itemsize
    if there < needed:
        raise rejection("truncated", f"{there} bytes of values, {needed} expected")


def _scan(format: str, values: np.ndarray, small: Small) -> RawScan:
    values = values.reshape([length for length in values.shape if length != 1] or [1])
    if values.ndim != 3:
        raise rejection("unsupported_pixels", f"an array of {values.ndim} axes; expected three")
    notes = list(small.notes)
    pixels, spacing_mm = oriented(to_grey(values, notes), (None, None, None), notes, _CONVENTION)
    if any(small.spacing_mm):
        spacing_mm = small.spacing_mm
    return RawScan(
        format, pixels, FrameGeometry.unknown(len(pixels)), small.header, spacing_mm=spacing_mm, notes=tuple(notes),
        labels=small.labels, personal=small.personal,
    )  # fmt: skip


def read_npy(path: Path) -> RawScan:
    """Raises VolumeRejected: broken_header, unsupported_pixels, size_implausible, truncated, axes_ambiguous."""
    with path.open("rb") as file:
        shape, dtype = _declared(file)
        _check_declared(shape, dtype, path.stat().st_size - file.tell())
    return _scan("npy", np.load(path, mmap_mode="r", allow_pickle=False), Small())


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype, int]:
    with archive.open(entry) as file:
        shape, dtype = _declared(file)
        return shape, dtype, entry.file_size - file.tell()


def _values(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        values: np.ndarray = np.lib.format.read_array(file, allow_pickle=False, max_header_size=_HEADER_LIMIT)
        file.read(1)  # to the end of the member, where its checksum is held against what was read
        return values


def read_npz(path: Path) -> RawScan:
    """Raises VolumeRejected: truncated, broken_header, no_pixel_data, unsupported_pixels, size_implausible,
    axes_ambiguous."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename[:-4]: entry for entry in archive.infolist() if entry.filename.endswith(".npy")}
            declared = {name: _member(archive, entry) for name, entry in entries.items()}
            shapes = {name: shape for name, (shape, _, _) in declared.items()}
            name = scan_member(shapes)
            _check_declared(*declared[name])
            small = small_members(
                {
                    other: _values(archive, entries[other])
                    for other, (shape, dtype, _) in declared.items()
                    if other != name and is_small(shape) and not dtype.hasobject
                }
            )
            small.notes = tuple(left_out(shapes))
            values = _values(archive, entries[name])
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError):
        raise rejection(
            "truncated", "the archive ends early, is damaged, or is packed in a way nothing here reads"
        ) from None
    return _scan("npz", values, small)
