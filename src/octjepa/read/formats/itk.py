"""NIfTI-1, plain or gzipped, and MetaImage, `.mha` or `.mhd` with its voxels in another file, by SimpleITK (extra
`formats`).

The header is read first and compared with the file's size: SimpleITK fills what a cut file lacks with zeros and reports
nothing. A spacing of exactly 1 on an axis is what writers put where they know none, and counts as unknown.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path, PurePosixPath, PureWindowsPath
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple

import numpy as np

from octjepa.read.formats import import_extra
from octjepa.read.formats.arrays import single_b_scan
from octjepa.read.intensity import check_size, to_uint8
from octjepa.read.raw_scan import FrameGeometry, RawScan, StoredAxes
from octjepa.reasons import rejection

_NIFTI_HEADER_BYTES = 348
_METAIMAGE_BYTES = {
    "MET_CHAR": 1, "MET_UCHAR": 1, "MET_SHORT": 2, "MET_USHORT": 2, "MET_INT": 4, "MET_UINT": 4,
    "MET_LONG_LONG": 8, "MET_ULONG_LONG": 8, "MET_FLOAT": 4, "MET_DOUBLE": 8,
}  # fmt: skip
_METAIMAGE_HEADER_LIMIT = 64 << 10


def _read_itk(path: Path, reader_name: str) -> tuple[np.ndarray, tuple[float, ...]]:
    """(values of the three axes, the last in the file first; spacing in the same order).

    Raises VolumeRejected: unsupported_pixels, size_implausible, broken_header, no_decoder.
    """
    itk = import_extra("SimpleITK", "formats")
    itk.ProcessObject.GlobalWarningDisplayOff()  # its warnings quote paths
    reader = itk.ImageFileReader()
    reader.SetFileName(str(path))
    reader.SetImageIO(reader_name)
    try:
        reader.ReadImageInformation()
        size = reader.GetSize()
        if reader.GetNumberOfComponents() != 1 or any(length > 1 for length in size[3:]):
            components = reader.GetNumberOfComponents()
            raise rejection("unsupported_pixels", f"{components} values a voxel; expected one intensity")
        check_size(size, 1)
        values = itk.GetArrayFromImage(reader.Execute())
        spacing = reader.GetSpacing()[:3][::-1]
    except RuntimeError:  # its message names the path
        raise rejection("broken_header", "SimpleITK cannot read it: header or voxels are damaged") from None
    return values.reshape(values.shape[-3:]), spacing


def _scan(format: str, values: np.ndarray, spacing: tuple[float, ...]) -> RawScan:
    """`spacing` has float32 precision: seven digits. Raises VolumeRejected: unsupported_pixels, not_structural_oct."""
    a, b, c = (None if mm == 1.0 or not np.isfinite(mm) or mm <= 0 else round(float(mm), 7) for mm in spacing)
    notes: list[str] = []
    pixels = to_uint8(values, notes)
    return RawScan(
        format, pixels, FrameGeometry.unknown(len(pixels)), notes=tuple(notes), axes=StoredAxes(spacing_mm=(a, b, c))
    )


class _NiftiHeader(NamedTuple):
    data_bytes: int
    data_offset: int


def _nifti_header(head: bytes) -> _NiftiHeader:
    """Raises VolumeRejected: broken_header, unknown_format, unsupported_pixels, size_implausible, truncated."""
    if len(head) < _NIFTI_HEADER_BYTES:
        if not any(head.startswith(struct.pack(mark + "i", _NIFTI_HEADER_BYTES)) for mark in "<>") and len(head) >= 4:
            raise rejection("unknown_format", "no NIfTI: the length of the header, its first number, is another")
        raise rejection("truncated", f"{len(head)} bytes; the header alone needs {_NIFTI_HEADER_BYTES}")
    order = next((mark for mark in "<>" if struct.unpack_from(mark + "i", head)[0] == _NIFTI_HEADER_BYTES), "")
    if not order:
        nifti2 = any(struct.unpack_from(mark + "i", head)[0] == 540 for mark in "<>")
        raise rejection("unknown_format" if nifti2 else "broken_header", "NIfTI-2" if nifti2 else "no NIfTI header")
    if head[344:348] == b"ni1\0":
        raise rejection("unknown_format", "NIfTI of two files (.hdr and .img); expected one file")
    if head[344:348] != b"n+1\0":
        raise rejection("broken_header", "no NIfTI header: its mark is absent, as in Analyze files")
    axes, *lengths = struct.unpack_from(order + "8h", head, 40)
    bits = struct.unpack_from(order + "h", head, 72)[0]
    offset = struct.unpack_from(order + "f", head, 108)[0]
    shape = lengths[: max(0, min(axes, 7))]
    if axes == 2:
        raise single_b_scan(shape)
    if not 3 <= axes <= 7 or any(length > 1 for length in shape[3:]):
        raise rejection("unsupported_pixels", f"{axes} axes of {' x '.join(map(str, shape))}; expected three")
    if bits not in (8, 16, 32, 64) or not _NIFTI_HEADER_BYTES <= offset < 1 << 24:
        raise rejection("unsupported_pixels", f"{bits} bits a voxel, data at byte {offset:g}; expected intensities")
    check_size(shape[:3], bits // 8)
    return _NiftiHeader(math.prod(shape[:3]) * bits // 8, int(offset))


def _write_unpacked(path: Path, target: BinaryIO) -> None:
    """Writes the file's bytes without gzip, as many as its header declares. Raises VolumeRejected truncated."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as source:
            head = source.read(_NIFTI_HEADER_BYTES)
            header = _nifti_header(head)
            target.write(head)
            missing = header.data_offset + header.data_bytes - len(head)
            while missing > 0 and (block := source.read(min(missing, 1 << 20))):
                target.write(block)
                missing -= len(block)
            if missing == 0 and packed:
                source.read(1)  # to the end, where gzip keeps its checksum
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise rejection("truncated", "the gzip stream ends early or is damaged") from None
    if missing:
        raise rejection("truncated", f"{missing} of {header.data_bytes} bytes of voxels are missing")


def read_nifti_values(path: Path) -> tuple[np.ndarray, tuple[float, ...]]:
    """(values of the three axes, the last in the file first; spacing in the same order), of scans and labels alike.

    Raises VolumeRejected: truncated, broken_header, unknown_format, unsupported_pixels, size_implausible, no_decoder.
    """
    with TemporaryDirectory() as folder:
        plain = path
        with path.open("rb") as file:
            head = file.read(_NIFTI_HEADER_BYTES)
        if path.suffix.lower() == ".nii" and not head.startswith(b"\x1f\x8b"):
            header = _nifti_header(head)
            missing = header.data_offset + header.data_bytes - path.stat().st_size
            if missing > 0:
                raise rejection("truncated", f"{missing} of {header.data_bytes} bytes of voxels are missing")
        else:  # SimpleITK decides by the suffix, and takes a cut gzip stream for a whole one
            plain = Path(folder) / "scan.nii"
            with plain.open("wb") as target:
                _write_unpacked(path, target)
        return _read_itk(plain, "NiftiImageIO")


def read_nifti(path: Path) -> RawScan:
    """A NIfTI-1 file. Raises VolumeRejected: as `read_nifti_values`, not_structural_oct."""
    return _scan("nifti", *read_nifti_values(path))


def _metaimage_header(path: Path) -> tuple[dict[str, str], int]:
    """(fields by their name in lower case, byte after the header). Raises VolumeRejected broken_header."""
    with path.open("rb") as file:
        text = file.read(_METAIMAGE_HEADER_LIMIT)
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


def _metaimage_data(path: Path, name: str) -> Path:
    """The file that holds the voxels. Raises VolumeRejected: broken_header, unsupported_pixels, no_pixel_data."""
    if name.upper() == "LOCAL":
        return path
    if name.upper().startswith("LIST") or "%" in name:
        raise rejection("unsupported_pixels", "its voxels are in a list of files; expected one")
    parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
    if not name or ".." in parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor:
        raise rejection("broken_header", "its ElementDataFile is outside its folder")
    data = path.parent / name
    if not data.is_file():
        suffix = data.suffix[:5] or "data"
        raise rejection("no_pixel_data", f"the {suffix} file that its ElementDataFile names is absent")
    return data


def read_metaimage(path: Path) -> RawScan:
    """A MetaImage whose voxels are in its folder or below.

    Raises VolumeRejected: broken_header, no_pixel_data, truncated, unsupported_pixels, size_implausible,
    not_structural_oct, too_few_frames, no_decoder.
    """
    fields, header_bytes = _metaimage_header(path)
    try:
        shape = [int(length) for length in fields["dimsize"].split()]
        itemsize = _METAIMAGE_BYTES[fields["elementtype"].upper()] * int(fields.get("elementnumberofchannels", 1))
        skipped = int(fields.get("headersize", 0))
    except (KeyError, ValueError):
        raise rejection("broken_header", "DimSize, ElementType or HeaderSize is absent or no number") from None
    if len(shape) == 2:
        raise single_b_scan(shape)
    if len([length for length in shape if length > 1]) > 3 or len(shape) < 3:
        raise rejection("unsupported_pixels", f"{len(shape)} axes; expected three")
    check_size(shape, itemsize)
    data = _metaimage_data(path, fields["elementdatafile"])
    needed = math.prod(shape) * itemsize
    if fields.get("compresseddata", "").lower() in ("true", "1"):
        needed = int(fields.get("compresseddatasize") or 1)
    present = data.stat().st_size - (header_bytes if data == path else max(skipped, 0))
    if present < needed:
        raise rejection("truncated", f"{present} bytes of voxels, {needed} expected")
    return _scan("metaimage", *_read_itk(path, "MetaImageIO"))
