"""A DICOM Segmentation (PS3.3 A.51) as codes in the order of the scan it was drawn on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from jaxtyping import UInt8
from pydicom.errors import InvalidDicomError

from octjepa.errors import UsageError

SEGMENTATION = "1.2.840.10008.5.1.4.1.1.66.4"


@dataclass(frozen=True, eq=False)
class Segmentation:
    """`codes` k is `names[k - 1]`, the k-th segment; spacing (slice, depth, column) where the file tells all three."""

    codes: UInt8[np.ndarray, "N R C"]
    names: tuple[str, ...]
    spacing_mm: tuple[float, float, float] | None


def is_segmentation(path: Path) -> bool:
    try:
        return str(_header(path, ["SOPClassUID"]).get("SOPClassUID", "")) == SEGMENTATION
    except (InvalidDicomError, OSError):
        return False


def referenced_scan(path: Path) -> str:
    """SOP instance UID of the scan. Raises UsageError: none, or several."""
    header = _header(path, ["ReferencedSeriesSequence"])
    uids = {
        str(instance.ReferencedSOPInstanceUID)
        for series in header.get("ReferencedSeriesSequence", [])
        for instance in series.get("ReferencedInstanceSequence", [])
    }
    if len(uids) != 1:
        raise UsageError(f"{path} references {len(uids)} instances; expected one multi-frame OCT scan")
    return uids.pop()


def read_segmentation(path: Path, frames: int = 0, pixels: bool = True) -> Segmentation:
    """Of a scan of `frames` B-scans. Raises UsageError: damaged, not binary, overlapping segments, no B-scans."""
    try:
        file = pydicom.dcmread(path, stop_before_pixels=not pixels)
        segments = sorted(file.SegmentSequence, key=lambda one: int(one.SegmentNumber))
        names = tuple(str(one.SegmentLabel) for one in segments)
        if [int(one.SegmentNumber) for one in segments] != list(range(1, len(segments) + 1)) or len(names) > 60:
            raise UsageError(f"{path}: expected at most 60 segments numbered 1, 2, ...")
        size = int(file.Rows), int(file.Columns)
        codes = np.zeros((frames, *size), np.uint8)
        if pixels:
            _paint(codes, file, path)
    except (InvalidDicomError, OSError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a DICOM Segmentation ({type(error).__name__})") from None
    return Segmentation(codes, names, _spacing(file))


def _paint(codes: np.ndarray, file: Any, path: Path) -> None:
    if file.SegmentationType != "BINARY":
        raise UsageError(f"{path} is a {str(file.SegmentationType).lower()} segmentation; expected a binary one")
    array = file.pixel_array
    masks = array.reshape(-1, *array.shape[-2:]) > 0
    groups = file.PerFrameFunctionalGroupsSequence
    if len(groups) != len(masks):
        raise UsageError(f"{path} has {len(masks)} frames and {len(groups)} descriptions of frames")
    for mask, group in zip(masks, groups, strict=True):
        segment = int(group.SegmentIdentificationSequence[0].ReferencedSegmentNumber)
        place = int(np.atleast_1d(group.DerivationImageSequence[0].SourceImageSequence[0].ReferencedFrameNumber)[0]) - 1
        if not 0 <= place < len(codes):
            raise UsageError(f"{path} references B-scan {place + 1} of a scan of {len(codes)}: it is of another scan")
        if (codes[place][mask] > 0).any():
            raise UsageError(f"{path}: segments overlap; expected one class a voxel. Give one file a class set")
        codes[place][mask] = segment


def _spacing(file: Any) -> tuple[float, float, float] | None:
    try:
        measures = file.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        row, column = map(float, measures.PixelSpacing)
        return float(measures.get("SpacingBetweenSlices", 1.0)), row, column  # 1: unknown, as in NIfTI
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def _header(path: Path, tags: list[str]) -> Any:
    return pydicom.dcmread(path, stop_before_pixels=True, specific_tags=tags)
