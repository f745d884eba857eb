"""NIfTI-1, plain or gzipped, by SimpleITK (extra `formats`).

The header is read first and held against the file's size: SimpleITK fills what a cut file lacks with zeros and says
nothing. A spacing of exactly 1 on an axis is what writers put where they know none, and counts as unknown.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple

import numpy as np

from octjepa.ingest.formats.axes import oriented
from octjepa.ingest.formats.intensity import check_size, to_grey
from octjepa.ingest.formats.itk import known_mm, read_itk
from octjepa.ingest.raw_scan import FrameGeometry, RawScan
from octjepa.ingest.reasons import rejection

_HEADER_BYTES = 348
_PAIR = b"ni1\0"


class _Header(NamedTuple):
    shape: tuple[int, ...]
    itemsize: int
    data_bytes: int
    starts_at: int


def _header(head: bytes) -> _Header:
    """Raises VolumeRejected: broken_header, unknown_format, unsupported_pixels, size_implausible."""
    if len(head) < _HEADER_BYTES:
        if not any(head.startswith(struct.pack(mark + "i", _HEADER_BYTES)) for mark in "<>") and len(head) >= 4:
            raise rejection("unknown_format", "no NIfTI: the length of the header, its first number, is another")
        raise rejection("truncated", f"{len(head)} bytes; the header alone needs {_HEADER_BYTES}")
    order = next((mark for mark in "<>" if struct.unpack_from(mark + "i", head)[0] == _HEADER_BYTES), "")
    if not order:
        nifti2 = any(struct.unpack_from(mark + "i", head)[0] == 540 for mark in "<>")
        raise rejection("unknown_format" if nifti2 else "broken_header", "NIfTI-2" if nifti2 else "no NIfTI header")
    if head[344:348] == _PAIR:
        raise rejection("unknown_format", "NIfTI of two files (.hdr and .img); expected one file")
    if head[344:348] != b"n+1\0":
        raise rejection("broken_header", "no NIfTI header: its mark is absent, as in Analyze files")
    axes, *lengths = struct.unpack_from(order + "8h", head, 40)
    bits = struct.unpack_from(order + "h", head, 72)[0]
    starts_at = struct.unpack_from(order + "f", head, 108)[0]
    shape = tuple(lengths[: max(0, min(axes, 7))])
    if not 3 <= axes <= 7 or any(length > 1 for length in shape[3:]):
        raise rejection("unsupported_pixels", f"{axes} axes of {' x '.join(map(str, shape))}; expected three")
    if bits not in (8, 16, 32, 64) or not _HEADER_BYTES <= starts_at < 1 << 24:
        raise rejection("unsupported_pixels", f"{bits} bits a voxel, data at byte {starts_at:g}; expected grey values")
    check_size(shape[:3], bits // 8)
    return _Header(shape[:3], bits // 8, shape[0] * shape[1] * shape[2] * bits // 8, int(starts_at))


def _unpacked(path: Path, whole: BinaryIO) -> None:
    """The file's bytes, without gzip, as many as its header declares. Raises VolumeRejected truncated."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as source:
            head = source.read(_HEADER_BYTES)
            header = _header(head)
            whole.write(head)
            left = header.starts_at + header.data_bytes - len(head)
            while left > 0 and (block := source.read(min(left, 1 << 20))):
                whole.write(block)
                left -= len(block)
            if left == 0 and packed:
                source.read(1)  # to the end, where gzip keeps its checksum
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise rejection("truncated", "the gzip stream ends early or is damaged") from None
    if left:
        raise rejection("truncated", f"{left} of {header.data_bytes} bytes of voxels are missing")


def read_values(path: Path) -> tuple[np.ndarray, tuple[float, ...]]:
    """(values of the three axes, the last in the file first; spacing in the same order), of scans and labels alike.

    Raises VolumeRejected: truncated, broken_header, unknown_format, unsupported_pixels, size_implausible, no_decoder.
    """
    with TemporaryDirectory() as folder:
        plain = path
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
        if path.suffix.lower() == ".nii" and not head.startswith(b"\x1f\x8b"):
            header = _header(head)
            missing = header.starts_at + header.data_bytes - path.stat().st_size
            if missing > 0:
                raise rejection("truncated", f"{missing} of {header.data_bytes} bytes of voxels are missing")
        else:  # SimpleITK goes by the suffix, and takes a cut gzip stream for a whole one
            plain = Path(folder) / "scan.nii"
            with plain.open("wb") as whole:
                _unpacked(path, whole)
        return read_itk(plain, "NiftiImageIO")


def read_nifti(path: Path) -> RawScan:
    """Raises VolumeRejected: as `read_values`, axes_ambiguous."""
    values, spacing = read_values(path)
    notes: list[str] = []
    pixels, spacing_mm = oriented(to_grey(values, notes), known_mm(spacing), notes)
    return RawScan("nifti", pixels, FrameGeometry.unknown(len(pixels)), spacing_mm=spacing_mm, notes=tuple(notes))
