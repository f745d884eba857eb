"""Bioptigen .OCT: a list of keyed values, then every B-scan with its own keyed values.

An entry is the length of its key, the key, the length of its value, and the value; a key of length 0 ends a list. A
file is a time series of volumes of one shape. Lengths are in mm. Layout: Bioptigen's `extractOctData.m`.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from octjepa.read.formats.vendor import check_length, check_shape, file_size, member_names, more_scans, positive
from octjepa.read.intensity import to_uint8
from octjepa.read.raw_scan import FrameGeometry, HeaderFields, RawScan
from octjepa.reasons import rejection
from octjepa.volume import Pattern

_PREAMBLE_BYTES = 6  # magic number and version
_LINEAR = 0
_PATTERNS: dict[int, Pattern] = {1: "raster", 3: "radial"}
_MAX_ENTRIES, _MAX_KEY_BYTES, _MAX_VALUE_BYTES = 100, 64, 1 << 20
_SAMPLES = "FRAMESAMPLES"
_EYE = re.compile(r"(?:^|[_\-. ])(OD|OS)(?=[_\-. ]|$)")


def _entries(file: BinaryIO) -> dict[str, bytes]:
    """The keyed values from the file's position to the end of their list, or to a frame's samples, which stay unread.

    Raises ValueError if they are damaged, struct.error where the file ends.
    """
    entries: dict[str, bytes] = {}
    for _ in range(_MAX_ENTRIES):
        (key_bytes,) = struct.unpack("<I", file.read(4))
        if key_bytes == 0:
            return entries
        if key_bytes > _MAX_KEY_BYTES:
            raise ValueError("a key that is too long")
        key = file.read(key_bytes).decode("latin-1").strip("\0 ").upper()
        (value_bytes,) = struct.unpack("<I", file.read(4))
        if key == _SAMPLES:
            return entries
        if value_bytes > _MAX_VALUE_BYTES:
            raise ValueError("a value that is too long")
        entries[key] = file.read(value_bytes)
    raise ValueError("a list of values that does not end")


class _Header(NamedTuple):
    frames: int
    columns: int
    depth: int
    scan_type: int
    volumes: int
    frames_per_volume: int
    spacing_mm: tuple[float | None, float | None, float | None]
    first_frame: int  # byte in the file


def _read_header(path: Path) -> _Header:
    """Raises VolumeRejected: broken_header, truncated, frames_missing, size_implausible."""
    size = file_size(path)
    try:
        with path.open("rb") as file:
            file.seek(_PREAMBLE_BYTES)
            entries = _entries(file)
            first_frame = file.tell()
        keys = ("FRAMECOUNT", "LINECOUNT", "LINELENGTH", "SCANTYPE", "FRAMES", "SCANS")
        frames, columns, depth, scan_type, times, scans = (int.from_bytes(entries[key], "little") for key in keys)
        length_keys = ("ELSCANLENGTH", "SCANDEPTH", "AZSCANLENGTH")
        lengths_mm = [struct.unpack("<d", entries[key])[0] for key in length_keys]
    except (KeyError, ValueError, struct.error):
        raise rejection("broken_header", "its list of values is damaged, or lacks one that every scan has") from None
    check_shape(frames, depth, columns)
    check_length(frames * depth * columns * 2, size)
    if not 0 < times * scans <= frames:
        raise rejection("frames_missing", f"the file holds {frames} B-scans; its header describes {times * scans}")
    volumes, frames_per_volume = (times * scans, 1) if scan_type == _LINEAR else (times, scans)
    dz, dy, dx = (
        None if positive(length) is None else length / count
        for length, count in zip(lengths_mm, (frames_per_volume, depth, columns), strict=True)
    )
    return _Header(frames, columns, depth, scan_type, volumes, frames_per_volume, (dz, dy, dx), first_frame)


def members(path: Path) -> tuple[str, ...]:
    """The volumes in the file, "1", "2", ..., in order of time. Raises VolumeRejected."""
    return member_names(_read_header(path).volumes)


def _read_frames(path: Path, header: _Header, first: int, count: int) -> tuple[np.ndarray, str]:
    """(`count` B-scans from number `first` as uint16 `[D, H, W]`, date of the first as YYYYMMDD).

    Raises VolumeRejected: truncated, unsupported_pixels, size_implausible.
    """
    size = file_size(path)
    values: np.ndarray | None = None
    day = ""
    with path.open("rb") as file:
        file.seek(header.first_frame)
        for index in range(first + count):
            try:
                entries = _entries(file)
                columns = int.from_bytes(entries["FRAMELINES"], "little")
                year, month, _, date = struct.unpack_from("<4H", entries["FRAMEDATETIME"])
            except (KeyError, ValueError, struct.error):
                raise rejection("truncated", f"the header of B-scan {index + 1} is damaged or cut") from None
            start = file.tell()
            sample_bytes = header.depth * columns * 2
            check_length(start + sample_bytes, size)
            if index >= first:
                if values is None:
                    check_shape(count, header.depth, columns)
                    values = np.empty((count, header.depth, columns), np.uint16)
                    day = f"{year:04d}{month:02d}{date:02d}"
                if columns != values.shape[2]:
                    raise rejection("unsupported_pixels", f"B-scan {index + 1} is of another size than the first")
                samples = np.frombuffer(file.read(sample_bytes), "<u2").reshape(columns, header.depth)
                values[index - first] = samples.T  # stored A-scan by A-scan
            file.seek(start + sample_bytes + 4)
    assert values is not None, "the caller asks for one B-scan at least"
    return values, day


def read_bioptigen(path: Path, member: str = "") -> RawScan:
    """One volume of a Bioptigen file; without `member` the first, with a note of how many more there are.

    Raises VolumeRejected: broken_header, truncated, frames_missing, too_few_frames, size_implausible.
    """
    header = _read_header(path)
    count = header.frames_per_volume
    if count < 4:
        raise rejection(
            "too_few_frames", f"{header.volumes} x {count} B-scans at one position: lines in time, no volume"
        )
    values, visit = _read_frames(path, header, (int(member or 1) - 1) * count, count)
    notes: list[str] = []
    pixels = to_uint8(values, notes)
    eye = _EYE.search(path.stem)
    return RawScan(
        format="bioptigen_oct",
        pixels=pixels,
        frame_geometry=FrameGeometry.unknown(count),
        header=HeaderFields(laterality=eye[1] if eye else "", manufacturer="Bioptigen", visit=visit),
        spacing_mm=header.spacing_mm,
        pattern=_PATTERNS.get(header.scan_type),
        notes=(*notes, *more_scans(member, header.volumes)),
        personal=("StudyDate",),
    )
