"""Decodes a single B-scan of a DICOM file without decoding the rest, so that the viewer can show it immediately.

It is the file's own frame, unchecked: only `read_volume` decides which frames are B-scans, which way they run, and
whether the file is what it was. So a frame is read only if nothing of that was changed when the file was ingested.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from octjepa.read.dicom import has_dicom_magic, read_with_pixels
from octjepa.read.encapsulated import FrameDecoder, decoding_fault, read_stream_header, split_frames
from octjepa.read.pixels import check_size, integer, read_layout
from octjepa.time_limit import SECONDS_PER_FILE, time_limit

# Notes under which a volume's B-scans are frames of the file as they are stored, in order or in reverse order.
_HARMLESS = (
    "frames_reversed",
    "repeated_frames",
    "person_",
    "laterality_",
    "device_",
    "manifest_",
    "positions_",
    "slice_",
    "spacing_",
    "depth_disagrees",
    "column_spacing",
    "option_disagrees",
    "extent_",
    "pitch_",
    "decimal_comma",
    "personal_text",
    "part_of_scan",
    "retina_doubtful",
    "radial_by",
    "neighbours_unlike",
    "field_outside",
    "field_implausible",
    "depth_outside",
    "fill_masked",
)


def read_one_frame(
    path: Path, number: int, shape: tuple[int, int, int], notes: Iterable[str]
) -> UInt8[np.ndarray, "H W"] | None:
    """B-scan `number` of a volume of `shape` that was ingested from `path` with `notes`; None if that needs all.

    That is so for files that are not DICOM file of 8-bit intensities, and for volumes whose frames ingest changed.
    Raises VolumeRejected: the file is no longer readable.
    """
    notes = list(notes)
    if not 0 <= number < shape[0] or not all(note.startswith(_HARMLESS) for note in notes):
        return None
    if not path.is_file() or not has_dicom_magic(path):
        return None
    with time_limit(SECONDS_PER_FILE):
        return _read(path, number, shape, notes)


def _read(path: Path, number: int, shape: tuple[int, int, int], notes: list[str]) -> UInt8[np.ndarray, "H W"] | None:
    data = read_with_pixels(path, lambda header: check_size(integer(header, "NumberOfFrames"), read_layout(header)))
    layout, frames = read_layout(data), integer(data, "NumberOfFrames")
    plain = layout.allocated == 8 and layout.samples == 1 and not layout.signed
    if not plain or (frames, layout.rows, layout.columns) != shape:
        return None
    index = frames - 1 - number if "frames_reversed" in notes else number
    if data.file_meta.TransferSyntaxUID.is_encapsulated:
        encoded, syntax = split_frames(data, frames), data.file_meta.TransferSyntaxUID
        if len(encoded) != frames:
            return None
        stream = read_stream_header(encoded[index])
        if decoding_fault(encoded[index], stream, layout, syntax.name) or (stream is not None and stream.signed):
            return None
        try:
            frame = FrameDecoder(syntax, layout)(encoded[index], stream)
        except Exception:
            return None
    else:
        size = layout.frame_bytes
        if len(data.PixelData) < frames * size:
            return None
        frame = np.frombuffer(data.PixelData, np.uint8, size, index * size).reshape(layout.rows, layout.columns)
    return frame if frame.shape == shape[1:] and frame.dtype == np.uint8 else None
