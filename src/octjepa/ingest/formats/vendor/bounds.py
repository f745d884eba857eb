"""What a proprietary header may promise, judged against the file itself before anything is allocated or a library runs.

A damaged header can name four thousand million frames; the libraries would loop over them or ask for the memory. No
message here quotes a header's texts.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.ingest.encapsulated import GAP_SHARE
from octjepa.ingest.pixels import MAX_BYTES, fill_gaps
from octjepa.ingest.raw_scan import FrameGeometry
from octjepa.ingest.reasons import rejection

LARGEST_SIDE = 1 << 15  # rows, columns or frames; the widest known B-scan has 4096 columns


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


def check_shape(frames: int, rows: int, columns: int) -> None:
    """Raises VolumeRejected: broken_header, size_implausible."""
    if not (0 < frames <= LARGEST_SIDE and 8 <= rows <= LARGEST_SIDE and 8 <= columns <= LARGEST_SIDE):
        raise rejection("broken_header", "the header's numbers of frames, rows and columns are those of no scan")
    if frames * rows * columns > MAX_BYTES:
        raise rejection("size_implausible", f"{frames} x {rows} x {columns} voxels, more than {MAX_BYTES >> 30} GiB")


def check_length(needed: int, size: int) -> None:
    """Raises VolumeRejected truncated."""
    if needed > size:
        raise rejection("truncated", f"the file holds {size} bytes, its header promises {needed}")


def mend(pixels: UInt8[np.ndarray, "F H W"], broken: list[int], fault: str) -> tuple[str, ...]:
    """Fills the frames that did not decode from their neighbours, in place, as for DICOM; the notes that say so.

    Raises VolumeRejected frames_broken: more than a tenth of the frames, or two neighbours. `fault` is the first one's.
    """
    if len(broken) > GAP_SHARE * len(pixels) or bool(np.any(np.diff(broken) == 1)):
        raise rejection("frames_broken", f"{len(broken)} of {len(pixels)} B-scans do not decode; {fault}")
    fill_gaps(pixels, broken)
    return (f"gap_frames={len(broken)}",) if broken else ()


def text(raw: bytes) -> str:
    """A zero-terminated text; Latin-1 decodes whatever bytes are there, so no name ends a run."""
    return bytes(raw).split(b"\0", 1)[0].decode("latin-1").strip()


def day(year: int, month: int, date: int) -> str:
    """YYYYMMDD, or "" where the numbers are no date of a patient."""
    return f"{year:04d}{month:02d}{date:02d}" if 1880 < year < 2200 and 0 < month < 13 and 0 < date < 32 else ""


def line_facts(starts: Float[np.ndarray, "F 2"], ends: Float[np.ndarray, "F 2"]) -> FrameGeometry:
    """Facts of B-scans along lines on the fundus image: `starts` and `ends`, x to the right and y down, in mm.

    Normals point up, to the superior retina, as they do in Spectralis DICOM files.
    """
    facts = FrameGeometry.unknown(len(starts))
    along = ends - starts
    length = np.linalg.norm(along, axis=1, keepdims=True)
    if not np.isfinite(along).all() or (length < 1e-6).any():
        return facts
    along = along / length
    facts.positions_mm[:] = np.column_stack([(starts + ends) / 2, np.zeros(len(starts))])
    facts.row_directions[:] = np.column_stack([along, np.zeros(len(starts))])
    facts.normals[:] = np.column_stack([along[:, 1], -along[:, 0], np.zeros(len(starts))])
    return facts
