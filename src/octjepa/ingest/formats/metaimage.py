"""MetaImage: `.mhd` with its voxels in another file (RETOUCH), or `.mha` in one, by SimpleITK (extra `formats`).

The text header is read first: which file holds the voxels, and whether that file is there, whole and in the folder of
the header or below it.
"""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath, PureWindowsPath

from octjepa.ingest.formats.axes import oriented
from octjepa.ingest.formats.intensity import check_size, to_grey
from octjepa.ingest.formats.itk import known_mm, read_itk
from octjepa.ingest.raw_scan import FrameGeometry, RawScan
from octjepa.ingest.reasons import rejection

_BYTES = {
    "MET_CHAR": 1, "MET_UCHAR": 1, "MET_SHORT": 2, "MET_USHORT": 2, "MET_INT": 4, "MET_UINT": 4,
    "MET_LONG_LONG": 8, "MET_ULONG_LONG": 8, "MET_FLOAT": 4, "MET_DOUBLE": 8,
}  # fmt: skip
_HEADER_LIMIT = 64 << 10


def header_of(path: Path) -> tuple[dict[str, str], int]:
    """(fields by their name in lower case, byte after the header). Raises VolumeRejected broken_header."""
    with path.open("rb") as file:
        text = file.read(_HEADER_LIMIT)
    fields: dict[str, str] = {}
    at = 0
    while (end := text.find(b"\n", at)) >= 0 or at < len(text):
        end = len(text) if end < 0 else end
        key, mark, value = text[at:end].decode("latin-1").partition("=")
        at = end + 1
        if not mark:
            raise rejection("broken_header", "a line of the header is not of the form name = value")
        fields[key.strip().lower()] = value.strip()
        if key.strip() == "ElementDataFile":
            return fields, at
    raise rejection("broken_header", "the header names no ElementDataFile")


def data_file(path: Path, fields: dict[str, str]) -> Path:
    """The file that holds the voxels. Raises VolumeRejected: broken_header, unsupported_pixels, no_pixel_data."""
    name = fields["elementdatafile"]
    if name.upper() == "LOCAL":
        return path
    if name.upper().startswith("LIST") or "%" in name:
        raise rejection("unsupported_pixels", "its voxels lie in a list of files; expected one")
    parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
    if not name or ".." in parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor:
        raise rejection("broken_header", "its ElementDataFile lies outside its folder")
    found = path.parent / name
    if not found.is_file():
        raise rejection(
            "no_pixel_data", f"the {found.suffix[:5] or 'data'} file that its ElementDataFile names is absent"
        )
    return found


def _check_data(path: Path) -> None:
    fields, header_bytes = header_of(path)
    try:
        shape = [int(length) for length in fields["dimsize"].split()]
        itemsize = _BYTES[fields["elementtype"].upper()] * int(fields.get("elementnumberofchannels", 1))
        skipped = int(fields.get("headersize", 0))
    except (KeyError, ValueError):
        raise rejection("broken_header", "DimSize, ElementType or HeaderSize is absent or no number") from None
    if len([length for length in shape if length > 1]) > 3 or len(shape) < 3:
        raise rejection("unsupported_pixels", f"{len(shape)} axes; expected three")
    check_size(shape, itemsize)
    data = data_file(path, fields)
    if fields.get("compresseddata", "").lower() in ("true", "1"):
        needed = int(fields.get("compresseddatasize") or 1)
    else:
        needed = math.prod(shape) * itemsize
    there = data.stat().st_size - (header_bytes if data == path else max(skipped, 0))
    if there < needed:
        raise rejection("truncated", f"{there} bytes of voxels, {needed} expected")


def read_metaimage(path: Path) -> RawScan:
    """Raises VolumeRejected: broken_header, no_pixel_data, truncated, unsupported_pixels, size_implausible,
    axes_ambiguous, no_decoder."""
    _check_data(path)
    values, spacing = read_itk(path, "MetaImageIO")
    notes: list[str] = []
    pixels, spacing_mm = oriented(to_grey(values, notes), known_mm(spacing), notes)
    return RawScan("metaimage", pixels, FrameGeometry.unknown(len(pixels)), spacing_mm=spacing_mm, notes=tuple(notes))
