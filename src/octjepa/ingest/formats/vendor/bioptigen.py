"""Bioptigen .OCT: a list of keyed values, then the B-scans, read with oct-converter's layout of the file.

A file is a series in time of volumes of one shape. oct-converter 0.7 asks for the memory that the header names and
hands on what lay in it where frames are missing; so the layout alone is taken from it, and sizes are checked first.
Lengths are in mm (`extractOctData.m` of Bioptigen).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.ingest.formats import library
from octjepa.ingest.formats.intensity import to_grey
from octjepa.ingest.formats.vendor.bounds import check_length, check_shape, file_size
from octjepa.ingest.frames import FrameFacts
from octjepa.ingest.header_fields import RawScan, Said
from octjepa.ingest.reasons import raised_in, rejected
from octjepa.volume import Pattern

_LINEAR, _RECT, _CIRCLE, _RADIAL = 0, 1, 2, 3
_EYE = re.compile(r"(?:^|[_\-. ])(OD|OS)(?=[_\-. ]|$)")


def _header(path: Path) -> Any:
    """The parsed header. Raises VolumeRejected: broken_header, truncated, size_implausible."""
    layout = library("oct_converter.readers.binary_structs.boct_binary", "vendor")
    size = file_size(path)
    try:
        with path.open("rb") as file:
            header = layout.bioptigen_oct_header_struct.parse_stream(file)
    except MemoryError:
        raise rejected("broken_header", "a field of the header longer than the file") from None
    except Exception as error:  # construct raises what the bytes made of its parsers
        raise rejected("broken_header", raised_in(error)) from None
    counted, columns, rows = header.framecount.value, header.linecount.value, header.linelength.value
    check_shape(counted, rows, columns)
    check_length(counted * rows * columns * 2, size)
    if not 0 < header.frames.value * header.scans.value <= counted:
        raise rejected("frames_missing", f"{counted} B-scans in the file, its volumes are of more")
    return header


def _volumes(header: Any) -> tuple[int, int]:
    """(volumes in time, B-scans of each), as oct-converter counts them."""
    if header.scantype.value == _LINEAR:
        return header.frames.value * header.scans.value, 1
    return header.frames.value, header.scans.value


def members(path: Path) -> tuple[str, ...]:
    """The volumes in the file, "1", "2", ..., in order of time."""
    return tuple(str(number + 1) for number in range(_volumes(_header(path))[0]))


def _positive(length: float, over: int) -> float | None:
    return float(length) / over if np.isfinite(length) and length > 0 else None


def read_bioptigen(path: Path, member: str = "") -> RawScan:
    """One volume of a Bioptigen file; without `member` the first, with a note of how many more there are.

    Raises VolumeRejected: broken_header, truncated, frames_missing, too_few_frames, size_implausible, no_decoder.
    """
    header = _header(path)
    times, frames = _volumes(header)
    if frames < 4:
        raise rejected("too_few_frames", f"{times} x {frames} B-scans at one place: lines in time, no volume")
    layout = library("oct_converter.readers.binary_structs.boct_binary", "vendor")
    try:
        stack = layout.bioptigen_file_structure.parse_file(path).data
    except Exception as error:  # the same; and a file that ends between frames
        raise rejected("truncated", f"the B-scans: {raised_in(error)}") from None
    first = (int(member or 1) - 1) * frames
    chosen = stack[first : first + frames]
    rows, columns = chosen[0].image.rows, chosen[0].image.columns
    check_shape(frames, rows, columns)
    raw = np.empty((frames, rows, columns), np.uint16)
    for index, frame in enumerate(chosen):
        if (frame.image.rows, frame.image.columns) != (rows, columns):
            raise rejected("unsupported_pixels", f"B-scan {index + 1} is of another size than the first")
        check_length(frame.image.end, file_size(path))
        samples = np.fromfile(path, "<u2", rows * columns, offset=frame.image.offset)
        raw[index] = samples.reshape(columns, rows).T  # A-scan by A-scan
    notes: list[str] = []
    pixels = to_grey(raw, notes)
    taken = chosen[0].header.framedatetime.value
    visit = f"{taken.year:04d}{taken.month:02d}{taken.day:02d}"
    eye = _EYE.search(path.stem)
    pattern: Pattern | None = {_RECT: "raster", _RADIAL: "radial"}.get(header.scantype.value)  # type: ignore[assignment]
    if not member and times > 1:
        notes.append(f"more_scans_in_file={times - 1}")
    return RawScan(
        format="bioptigen_oct",
        pixels=pixels,
        facts=FrameFacts.silent(frames),
        said=Said(laterality=eye[1] if eye else "", manufacturer="Bioptigen", visit=visit),
        spacing_mm=(
            _positive(header.elscanlength.value, frames),
            _positive(header.scandepth.value, rows),
            _positive(header.azscanlength.value, columns),
        ),
        pattern=pattern,
        notes=tuple(notes),
        personal=("StudyDate",),
    )
