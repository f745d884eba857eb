"""NIfTI-1 and NIfTI-2 in one file, plain or gzipped: the header by nibabel, the voxels by NumPy from checked fields.

One parser reads the header, and only the fields that this module has checked decide which bytes are voxels. The file is
never handed to a library that would parse it a second time and might read something else. Extensions are skipped.

The spacing is that of `pixdim`. The affine (`sform`) is compared with it: an axis on which they differ has an uncertain
spacing. A spacing of exactly 1 on an axis is the placeholder of writers that know none, and counts as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Shaped

from octjepa.read.formats.arrays import single_b_scan
from octjepa.read.intensity import check_size, to_uint8
from octjepa.read.memory_budget import DEFLATE_RATIO, GZIP, array_bytes, check_memory, inflated_chunks
from octjepa.read.raw_scan import AxisSpacing, FrameGeometry, RawScan, StoredAxes
from octjepa.reasons import rejection

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Header

_HEADER_BYTES = {348: 348, 540: 540}  # the first number of the header: its length, of NIfTI-1 and of NIfTI-2
_DATA_OFFSET = {348: 352, 540: 544}  # of the voxels, where vox_offset is 0
_SINGLE_FILE = {348: b"n+1\0", 540: b"n+2\0"}
_TWO_FILES = {348: b"ni1\0", 540: b"ni2\0"}
_MARK_AT = {348: 344, 540: 4}
_LARGEST_OFFSET = 1 << 24
_UNIT_MM = {1: 1000.0, 3: 0.001}  # of xyzt_units: metres and micrometres; else millimetres
_INTENSITIES = {2, 4, 8, 16, 64, 256, 512, 768, 1024, 1280}  # data types: one integer or float a voxel
_DIFFERS = 0.02  # relative; of a spacing from another one
_SHEARED = 0.01  # cosine of the angle between two axes


@dataclass(frozen=True, eq=False)
class NiftiVolume:
    """The three axes of a NIfTI file, the last in the file first, as `values` store them.

    `spacing_mm` is None on axes where the file states none. `uncertain` are the axes (0, 1, 2) on which the affine
    contradicts it. `notes` say what was found.
    """

    values: Shaped[np.ndarray, "A B C"]
    spacing_mm: AxisSpacing
    uncertain: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Layout:
    """Where the voxels are and what they are: the checked fields of a header."""

    shape: tuple[int, ...]  # of the three axes, the first in the file first
    dtype: np.dtype
    offset: int
    rescaling: tuple[float, float]  # slope and intercept

    @property
    def data_bytes(self) -> int:
        """Bytes of all voxels."""
        return array_bytes(self.shape, self.dtype.itemsize)


def _parse_header(head: bytes) -> Nifti1Header:
    """Raises VolumeRejected: truncated, unknown_format, broken_header."""
    from nibabel.nifti1 import Nifti1Header
    from nibabel.nifti2 import Nifti2Header

    length = next((n for n in _HEADER_BYTES for order in ("little", "big") if head[:4] == n.to_bytes(4, order)), 0)
    if not length and len(head) >= 348:
        raise rejection("broken_header", "not a NIfTI header: its first number must be 348 or 540")
    if not length and len(head) >= 4:
        raise rejection("unknown_format", "not a NIfTI file: its first number must be 348 or 540")
    if len(head) < length or not length:
        raise rejection("truncated", f"{len(head)} bytes; its header needs {length or 348}")
    mark = head[_MARK_AT[length] : _MARK_AT[length] + 4]
    if mark == _TWO_FILES[length]:
        raise rejection("unknown_format", "NIfTI of two files (.hdr and .img); expected one file")
    if mark != _SINGLE_FILE[length]:
        raise rejection("broken_header", "not a NIfTI header: the NIfTI mark is absent, as in Analyze files")
    kind = Nifti1Header if length == 348 else Nifti2Header
    order = "<" if head[:4] == length.to_bytes(4, "little") else ">"
    return kind(head[:length], endianness=order, check=False)


def _layout(header: Nifti1Header) -> _Layout:
    """Raises VolumeRejected: unsupported_pixels, too_few_frames, broken_header, size_implausible."""
    dim = [int(length) for length in header["dim"]]
    axes, lengths = dim[0], dim[1:]
    shape = lengths[: max(0, min(axes, 7))]
    if axes == 2:
        raise single_b_scan(shape)
    if not 3 <= axes <= 7 or any(length > 1 for length in shape[3:]):
        raise rejection("unsupported_pixels", f"{axes} axes of {' x '.join(map(str, shape))}; expected three")
    code, bits = int(header["datatype"]), int(header["bitpix"])
    if code not in _INTENSITIES:
        raise rejection("unsupported_pixels", f"data type {code}; expected one integer or float a voxel")
    dtype = header.get_data_dtype()
    if bits != 8 * dtype.itemsize:
        raise rejection("broken_header", f"data type {code} has {8 * dtype.itemsize} bits a voxel, bitpix says {bits}")
    length = int(header["sizeof_hdr"])
    stated = float(header["vox_offset"])
    offset = _DATA_OFFSET[length] if stated == 0 else stated
    if not length <= offset < _LARGEST_OFFSET:  # false for NaN as well
        raise rejection("broken_header", f"the voxels begin at byte {stated:g}, within the header or far beyond it")
    check_size(shape[:3], dtype.itemsize)
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    scaled = math.isfinite(slope) and math.isfinite(intercept) and slope != 0
    return _Layout(tuple(shape[:3]), dtype, int(offset), (slope, intercept) if scaled else (1.0, 0.0))


def _unpacked(path: Path, packed: bool) -> Iterator[bytes]:
    """The file's bytes without gzip, in pieces. Raises VolumeRejected truncated."""
    with path.open("rb") as file:
        if packed:
            yield from inflated_chunks(file, "the voxels", GZIP)
        else:
            while piece := file.read(1 << 20):
                yield piece


def _first_bytes(pieces: Iterator[bytes], count: int) -> bytes:
    """The first `count` bytes or more, fewer if there are no more."""
    first = b""
    while len(first) < count and (piece := next(pieces, b"")):
        first += piece
    return first


def _read_voxels(pieces: Iterator[bytes], first: bytes, layout: _Layout) -> np.ndarray:
    """The values as one row; `first` are the bytes of `pieces` that were read already. Raises VolumeRejected truncated.

    One piece more than needed is read: gzip keeps its checksum behind the data.
    """
    values = np.empty(layout.data_bytes, np.uint8)
    buffer = memoryview(values.data)
    skip, filled = layout.offset, 0
    piece = first
    while piece:
        part = piece[skip:]
        skip = max(0, skip - len(piece))
        if filled == len(buffer) and part:
            break
        count = min(len(part), len(buffer) - filled)
        buffer[filled : filled + count] = part[:count]
        filled += count
        piece = next(pieces, b"")
    if filled < len(buffer):
        missing = len(buffer) - filled
        raise rejection("truncated", f"{missing} of {len(buffer)} bytes of voxels are missing")
    return values.view(layout.dtype)


def _spacing(header: Nifti1Header) -> tuple[AxisSpacing, tuple[int, ...], tuple[str, ...]]:
    """(spacing, axes on which it is uncertain, notes), the last axis in the file first."""
    unit_mm = _UNIT_MM.get(int(header["xyzt_units"]) & 7, 1.0)
    stored = np.abs(np.asarray(header["pixdim"][1:4], np.float64)) * unit_mm
    spacings: list[float | None] = [_known_spacing(mm, unit_mm) for mm in stored]
    notes: list[str] = []
    uncertain: set[int] = set()
    if int(header["sform_code"]) > 0:
        affine = np.array([header[f"srow_{row}"][:3] for row in "xyz"], np.float64) * unit_mm
        lengths = np.linalg.norm(affine, axis=0)
        if np.isfinite(affine).all() and (lengths > 0).all():
            cosines = np.abs((affine / lengths).T @ (affine / lengths))
            sheared = bool((cosines[~np.eye(3, dtype=bool)] > _SHEARED).any())
            # Without its shear an axis is as long as the diagonal of the triangular factor says.
            straight = np.abs(np.diag(np.linalg.qr(affine)[1])) if sheared else lengths
            if sheared:
                notes.append("affine_sheared")
            for axis, mm in enumerate(spacings):
                other = [_known_spacing(float(length[axis]), unit_mm) for length in (lengths, straight)]
                if mm is None:
                    spacings[axis] = other[1]
                    uncertain |= {axis} if other[1] is not None else set()
                elif all(length is not None and abs(length / mm - 1) > _DIFFERS for length in other):
                    uncertain.add(axis)
            if uncertain:
                notes.append("affine_disagrees_with_spacing")
    a, b, c = spacings
    return (c, b, a), tuple(sorted(2 - axis for axis in uncertain)), tuple(notes)


def _known_spacing(mm: float, unit_mm: float) -> float | None:
    """`mm` to the seven digits of float32, or None if it is not a spacing, or the placeholder 1."""
    if not math.isfinite(mm) or mm <= 0 or mm == unit_mm:
        return None
    return float(f"{mm:.7g}")


def read_nifti_volume(path: Path, is_scan: bool = False) -> NiftiVolume:
    """The values of a NIfTI file, rescaled where its header says so; labels compress further than a scan (`is_scan`).

    Raises VolumeRejected: truncated, broken_header, unknown_format, unsupported_pixels, size_implausible,
    too_few_frames.
    """
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    pieces = _unpacked(path, packed)
    first = _first_bytes(pieces, max(_HEADER_BYTES.values()))
    header = _parse_header(first)
    layout = _layout(header)
    size = path.stat().st_size
    ratio = DEFLATE_RATIO if packed else 1
    check_memory(layout.offset + layout.data_bytes, "its voxels", size, ratio, is_scan)
    values = _read_voxels(pieces, first, layout).reshape(layout.shape[::-1])
    slope, intercept = layout.rescaling
    if (slope, intercept) != (1.0, 0.0):
        check_size(values.shape, 4)
        values = values.astype(np.float32) * np.float32(slope) + np.float32(intercept)
    elif not values.dtype.isnative:
        values = values.byteswap().view(values.dtype.newbyteorder("="))
    spacing_mm, uncertain, notes = _spacing(header)
    return NiftiVolume(values, spacing_mm, uncertain, notes)


def read_nifti(path: Path) -> RawScan:
    """A NIfTI scan. Raises VolumeRejected: as `read_nifti_volume`, not_structural_oct."""
    volume = read_nifti_volume(path, is_scan=True)
    notes = list(volume.notes)
    pixels = to_uint8(volume.values, notes)
    uncertain = ("slice",) if "affine_sheared" in notes else ()
    return RawScan(
        "nifti",
        pixels,
        FrameGeometry.unknown(len(pixels)),
        notes=tuple(notes),
        uncertain=uncertain,
        axes=StoredAxes(spacing_mm=volume.spacing_mm, uncertain=volume.uncertain),
    )
