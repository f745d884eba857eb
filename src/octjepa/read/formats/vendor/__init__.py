"""Proprietary scans: Heidelberg .vol, HEYEX XML and .e2e, Topcon .fda and .fds, Zeiss .img, Bioptigen and Optovue .OCT.

Here is what their readers share: checks of what a header promises against the file itself, before anything is allocated
or a library runs. A damaged header can name four thousand million frames. No message quotes a header's texts.
`docs/formats.md` lists where eyepy (extra `vendor`) is wrong and what is done instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.read.encapsulated import GAP_SHARE
from octjepa.read.intensity import check_size
from octjepa.read.pixels import fill_gaps
from octjepa.read.raw_scan import FrameGeometry
from octjepa.reasons import error_origin, rejection

MAX_LENGTH = 1 << 15  # of an axis; the widest known B-scan has 4096 columns


def file_size(path: Path) -> int:
    """Bytes of the file. Raises VolumeRejected: unreadable_file, empty_file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise rejection("unreadable_file", error.strerror or "it cannot be opened") from None
    if size == 0:
        raise rejection("empty_file", "zero bytes")
    return size


def check_shape(frames: int, depth: int, columns: int) -> None:
    """Raises VolumeRejected: broken_header, size_implausible."""
    if not (0 < frames <= MAX_LENGTH and 8 <= depth <= MAX_LENGTH and 8 <= columns <= MAX_LENGTH):
        raise rejection("broken_header", "the header's numbers of frames, rows and columns are those of no scan")
    check_size((frames, depth, columns), 1)


def check_length(needed: int, size: int) -> None:
    """Raises VolumeRejected truncated."""
    if needed > size:
        raise rejection("truncated", f"the file holds {size} bytes, its header promises {needed}")


def decode_frames(
    count: int, decode: Callable[[int], np.ndarray], errors: tuple[type[Exception], ...]
) -> tuple[UInt8[np.ndarray, "D H W"], tuple[str, ...]]:
    """(`count` frames of equal shape, decoded by number, notes); those that raise `errors` are filled, as for DICOM.

    Raises VolumeRejected frames_broken: more than a tenth of the frames, two neighbours, or all.
    """
    pixels: np.ndarray | None = None
    broken: list[int] = []
    first_error = ""
    for index in range(count):
        try:
            frame = decode(index)
            if pixels is None:
                check_shape(count, *frame.shape)
                pixels = np.zeros((count, *frame.shape), np.uint8)
            pixels[index] = frame
        except errors as error:
            broken.append(index)
            first_error = first_error or error_origin(error)
    if pixels is None or len(broken) > GAP_SHARE * count or bool(np.any(np.diff(broken) == 1)):
        raise rejection("frames_broken", f"{len(broken)} of {count} B-scans do not decode; {first_error}")
    fill_gaps(pixels, broken)
    return pixels, (f"gap_frames={len(broken)}",) if broken else ()


def decode_text(raw: bytes) -> str:
    """A zero-terminated text; Latin-1 decodes whatever bytes are there, so no name ends a run."""
    return bytes(raw).split(b"\0", 1)[0].decode("latin-1").strip()


def date_text(year: int, month: int, day: int) -> str:
    """YYYYMMDD, or "" where the numbers are not date of a patient."""
    return f"{year:04d}{month:02d}{day:02d}" if 1880 < year < 2200 and 0 < month < 13 and 0 < day < 32 else ""


def positive(number: float | None) -> float | None:
    """`number` if it is finite and positive, else None."""
    return float(number) if number is not None and np.isfinite(number) and number > 0 else None


def filled_fields(values: Mapping[str, object]) -> tuple[str, ...]:
    """The names of the fields of personal data that hold a value."""
    return tuple(name for name, value in values.items() if value)


def member_names(count: int) -> tuple[str, ...]:
    """The scans of a file, "1", "2", ..., in its order."""
    return tuple(str(number + 1) for number in range(count))


def more_scans(member: str, count: int) -> tuple[str, ...]:
    """The note of how many scans of a file are not read if no `member` was requested."""
    return (f"more_scans_in_file={count - 1}",) if not member and count > 1 else ()


def line_geometry(starts: Float[np.ndarray, "D 2"], ends: Float[np.ndarray, "D 2"]) -> FrameGeometry:
    """Geometry of B-scans along lines on the fundus image: `starts` and `ends`, x to the right and y down, in mm.

    Normals point up, to the superior retina, as they do in Spectralis DICOM files.
    """
    geometry = FrameGeometry.unknown(len(starts))
    along = ends - starts
    length = np.linalg.norm(along, axis=1, keepdims=True)
    if not np.isfinite(along).all() or (length < 1e-6).any():
        return geometry
    along = along / length
    zero = np.zeros(len(starts))
    geometry.positions_mm[:] = np.column_stack([(starts + ends) / 2, zero])
    geometry.row_directions[:] = np.column_stack([along, zero])
    geometry.normals[:] = np.column_stack([along[:, 1], -along[:, 0], zero])
    geometry.by_line[:] = True
    return geometry
