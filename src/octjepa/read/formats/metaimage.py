"""MetaImage (`.mha`, or `.mhd` with its voxels in another file of its folder), read from checked fields.

NumPy and zlib read the voxels, and no library parses the header a second time. MetaIO, the format's own library,
accepts more than the documented form `Name = value`: a colon in place of the equals sign, several spellings, fields
twice. Two parsers that disagree can be made to read different files, so a header that is not of the documented form is
refused.
https://itk.org/Wiki/MetaIO/Documentation

The spacing is `ElementSpacing`, or `ElementSize` if that is absent. A spacing of exactly 1 on an axis is the
placeholder of writers that know none, and counts as unknown.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
from jaxtyping import Shaped

from octjepa.errors import VolumeRejected
from octjepa.read.formats.arrays import single_b_scan
from octjepa.read.intensity import check_size, to_uint8
from octjepa.read.links import check_beside
from octjepa.read.memory_budget import DEFLATE_RATIO, array_bytes, check_memory, inflate
from octjepa.read.raw_scan import AxisSpacing, FrameGeometry, RawScan, StoredAxes
from octjepa.reasons import rejection

_TYPES = {
    "MET_CHAR": "i1",
    "MET_UCHAR": "u1",
    "MET_SHORT": "i2",
    "MET_USHORT": "u2",
    "MET_INT": "i4",
    "MET_UINT": "u4",
    "MET_LONG_LONG": "i8",
    "MET_ULONG_LONG": "u8",
    "MET_FLOAT": "f4",
    "MET_DOUBLE": "f8",
}
HEADER_BYTES = 64 << 10  # at most
_LARGEST_SKIP = 1 << 24  # bytes of a header of the voxels' own file
_FIELD = re.compile(rb"([A-Za-z0-9_]+)[ \t]*=[ \t]*([^\r\n]*?)[ \t]*")
_TRUE, _FALSE = {"true", "1", "yes"}, {"false", "0", "no", ""}


@dataclass(frozen=True)
class _Layout:
    """The type of the voxels: the checked fields of a header."""

    shape: tuple[int, ...]  # the first axis in the file first
    dtype: np.dtype
    compressed: bool
    packed_bytes: int | None  # None where the header does not state it
    skipped: int  # bytes before the voxels in a file of their own; -1: they are its last bytes
    spacing_mm: AxisSpacing  # the last axis in the file first


def _read_fields(path: Path) -> tuple[dict[str, str], int]:
    """As `_parse_fields`, of the header of a file."""
    with path.open("rb") as file:
        return _parse_fields(file.read(HEADER_BYTES))


def _parse_fields(text: bytes) -> tuple[dict[str, str], int]:
    """(fields by their name in lower case, byte after the header). Raises VolumeRejected broken_header."""
    fields: dict[str, str] = {}
    at = 0
    while at < len(text):
        end = text.find(b"\n", at)
        end = len(text) if end < 0 else end
        line = text[at:end].removesuffix(b"\r")
        at = end + 1
        match = _FIELD.fullmatch(line)
        if match is None:
            raise rejection("broken_header", "a line of the header is not of the form Name = value")
        name = match[1].decode("ascii").lower()
        if name in fields:
            raise rejection("broken_header", "the header states a field twice")
        try:
            fields[name] = match[2].decode("utf-8")
        except UnicodeDecodeError:
            fields[name] = match[2].decode("latin-1")
        if name == "elementdatafile":
            return fields, at
    raise rejection("broken_header", "the header names no ElementDataFile")


def _truth(fields: dict[str, str], *names: str) -> bool:
    """The truth value of the first of `names` that is stated, False for none. Raises VolumeRejected broken_header."""
    text = next((fields[name] for name in names if name in fields), "").lower()
    if text not in _TRUE | _FALSE:
        raise rejection("broken_header", f"its {names[0]} is neither True nor False")
    return text in _TRUE


def _numbers(fields: dict[str, str], name: str, count: int) -> list[float] | None:
    """The numbers of a field; None if it is absent, of another count, or no numbers."""
    try:
        numbers = [float(text) for text in fields.get(name, "").split()]
    except ValueError:
        return None
    return numbers if len(numbers) == count else None


def _layout(fields: dict[str, str]) -> _Layout:
    """Raises VolumeRejected: broken_header, unsupported_pixels, too_few_frames, size_implausible."""
    try:
        shape = [int(length) for length in fields["dimsize"].split()]
        axes = int(fields.get("ndims", len(shape)))
        kind = _TYPES[fields["elementtype"].upper()]
        channels = int(fields.get("elementnumberofchannels", 1))
        skipped = int(fields.get("headersize", 0))
        packed_bytes = int(fields["compresseddatasize"]) if fields.get("compresseddatasize") else None
    except (KeyError, ValueError):
        raise rejection("broken_header", "DimSize, ElementType or HeaderSize is absent or no number") from None
    if axes != len(shape):
        raise rejection("broken_header", f"NDims says {axes} axes, DimSize lists {len(shape)}")
    if not -1 <= skipped < _LARGEST_SKIP:
        raise rejection("broken_header", f"its HeaderSize is {skipped}")
    if channels != 1:
        raise rejection("unsupported_pixels", f"{channels} values a voxel; expected one intensity")
    if not _truth({"binarydata": "True", **fields}, "binarydata"):
        raise rejection("unsupported_pixels", "its voxels are written as text; expected binary values")
    if len(shape) == 2:
        raise single_b_scan(shape)
    if len(shape) < 3 or any(length != 1 for length in shape[3:]):
        raise rejection("unsupported_pixels", f"{len(shape)} axes; expected three")
    big = _truth(fields, "binarydatabyteordermsb", "elementbyteordermsb")
    dtype = np.dtype((">" if big else "<") + kind)
    check_size(shape, dtype.itemsize)
    spacing = _numbers(fields, "elementspacing", axes) or _numbers(fields, "elementsize", axes) or [1.0] * axes
    a, b, c = (None if mm == 1.0 or not math.isfinite(mm) or mm <= 0 else float(f"{mm:.7g}") for mm in spacing[:3])
    return _Layout(tuple(shape[:3]), dtype, _truth(fields, "compresseddata"), packed_bytes, skipped, (c, b, a))


def named_voxel_file(header: bytes) -> str:
    """The file that a header names for its voxels, below its folder; "" if it names none there."""
    try:
        name = _parse_fields(header)[0]["elementdatafile"]
        return "" if name.upper() == "LOCAL" else _checked_name(name)
    except VolumeRejected:
        return ""


def _checked_name(name: str) -> str:
    """`name` of the file of voxels. Raises VolumeRejected: unsupported_pixels, broken_header."""
    if name.upper().startswith("LIST") or "%" in name:
        raise rejection("unsupported_pixels", "its voxels are in a list of files; expected one")
    parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
    if not name or "\0" in name or ".." in parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor:
        raise rejection("broken_header", "its ElementDataFile is outside its folder")
    return name


def _voxel_file(path: Path, name: str) -> Path:
    """The file that holds the voxels. Raises VolumeRejected: broken_header, unsupported_pixels, no_pixel_data."""
    if name.upper() == "LOCAL":
        return path
    data = path.parent / _checked_name(name)
    if not data.is_file():
        suffix = data.suffix[:5] or "data"
        raise rejection("no_pixel_data", f"the {suffix} file that its ElementDataFile names is absent")
    check_beside(data, path)
    return data


def _read_voxels(data: Path, start: int, layout: _Layout) -> Shaped[np.ndarray, "A B C"]:
    """Raises VolumeRejected: truncated, size_implausible."""
    needed = array_bytes(layout.shape, layout.dtype.itemsize)
    present = data.stat().st_size - start
    with data.open("rb") as file:
        if layout.compressed:
            packed_bytes = present if layout.packed_bytes is None else layout.packed_bytes
            if packed_bytes > present:
                raise rejection("truncated", f"{max(present, 0)} bytes of voxels, {packed_bytes} expected")
            check_memory(needed, "its voxels", max(packed_bytes, 0), DEFLATE_RATIO)
            file.seek(start)
            values = inflate(file.read(packed_bytes), "its voxels", most_bytes=needed)
            if len(values) < needed:
                raise rejection("truncated", f"{len(values)} bytes of unpacked voxels, {needed} expected")
            read = np.frombuffer(values, layout.dtype)
        else:
            start = data.stat().st_size - needed if layout.skipped == -1 else start
            if present < needed or start < 0:
                raise rejection("truncated", f"{max(present, 0)} bytes of voxels, {needed} expected")
            file.seek(start)
            read = np.fromfile(file, layout.dtype, math.prod(layout.shape))
    if read.size * layout.dtype.itemsize < needed:
        raise rejection("truncated", "the file became shorter while it was read")
    values_ = read.reshape(layout.shape[::-1])
    return values_ if read.dtype.isnative else values_.byteswap().view(read.dtype.newbyteorder("="))


def read_metaimage_values(path: Path) -> tuple[Shaped[np.ndarray, "A B C"], AxisSpacing]:
    """(values as stored, spacing of their axes in mm) of a MetaImage whose voxels are in its folder or below.

    Raises VolumeRejected: broken_header, no_pixel_data, truncated, unsupported_pixels, size_implausible,
    too_few_frames, path_escapes.
    """
    fields, header_bytes = _read_fields(path)
    layout = _layout(fields)
    data = _voxel_file(path, fields["elementdatafile"])
    values = _read_voxels(data, header_bytes if data == path else max(layout.skipped, 0), layout)
    return values, layout.spacing_mm


def read_metaimage(path: Path) -> RawScan:
    """A MetaImage as a scan. Raises VolumeRejected: as `read_metaimage_values`, and not_structural_oct."""
    values, spacing_mm = read_metaimage_values(path)
    notes: list[str] = []
    pixels = to_uint8(values, notes)
    axes = StoredAxes(spacing_mm=spacing_mm)
    return RawScan("metaimage", pixels, FrameGeometry.unknown(len(pixels)), notes=tuple(notes), axes=axes)
