"""What a header says of its frames: positions, orientations, location on the fundus image, in-stack numbers.

DICOM Part 3: Plane Position (Patient), Plane Orientation (Patient), Frame Content, and Ophthalmic Frame Location
(C.8.17.11), whose Reference Coordinates are pixels (row, column) of the fundus image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from pydicom.dataset import Dataset


@dataclass(frozen=True)
class FrameFacts:
    """One value a frame (first axis F), NaN where the header is silent.

    `positions_mm` [F, 3]; `row_directions` [F, 3] the direction along a B-scan's row; `normals` [F, 3];
    `lines_px` [F, 4] first and last point (row, column) on the fundus image; `curved` [F] True where the location has
    more than two points or is called NONLINEAR; `in_stack` [F]; `spacing_mm` [F, 2] per-frame (row, column);
    `thickness_mm` [F] per-frame.
    """

    positions_mm: Float[np.ndarray, "F 3"]
    row_directions: Float[np.ndarray, "F 3"]
    normals: Float[np.ndarray, "F 3"]
    lines_px: Float[np.ndarray, "F 4"]
    curved: np.ndarray
    in_stack: Float[np.ndarray, " F"]
    spacing_mm: Float[np.ndarray, "F 2"]
    thickness_mm: Float[np.ndarray, " F"]

    def take(self, order: np.ndarray) -> FrameFacts:
        return FrameFacts(*(getattr(self, name)[order] for name in self.__dataclass_fields__))


def floats(value: Any, count: int) -> list[float] | None:
    """`count` finite floats from a DICOM value, or None: empty lists, short lists and texts are common."""
    if value is None or isinstance(value, str):
        return None
    try:
        numbers = [float(number) for number in value] if hasattr(value, "__iter__") else [float(value)]
    except (TypeError, ValueError):
        return None
    return numbers if len(numbers) == count and bool(np.all(np.isfinite(numbers))) else None


def _items(group: Any, keyword: str) -> Iterator[Any]:
    if group is not None:
        yield from group.get(keyword) or []


def measures(group: Any) -> tuple[list[float] | None, float | None]:
    """((row, column) spacing, slice thickness) of a functional group's or a header's Pixel Measures."""
    pair, thickness = None, None
    for item in [*_items(group, "PixelMeasuresSequence"), *([group] if group is not None else [])]:
        pair = pair or floats(item.get("PixelSpacing"), 2)
        for keyword in ("SpacingBetweenSlices", "SliceThickness"):
            number = floats(item.get(keyword), 1)
            if thickness is None and number is not None:
                thickness = number[0]
    return pair, thickness


def frame_facts(header: Dataset, frames: int) -> FrameFacts:
    """Reads the functional groups; a group list shorter than `frames` leaves NaN for the rest."""
    nan = np.nan
    positions, directions, normals = np.full((frames, 3), nan), np.full((frames, 3), nan), np.full((frames, 3), nan)
    lines, curved = np.full((frames, 4), nan), np.zeros(frames, bool)
    in_stack, spacing, thickness = np.full(frames, nan), np.full((frames, 2), nan), np.full(frames, nan)

    shared = (header.get("SharedFunctionalGroupsSequence") or [None])[0]
    groups = header.get("PerFrameFunctionalGroupsSequence") or []
    for index in range(frames):
        group = groups[index] if index < len(groups) else None
        for source in (shared, group):
            for item in _items(source, "PlaneOrientationSequence"):
                cosines = floats(item.get("ImageOrientationPatient"), 6)
                if cosines:
                    directions[index] = cosines[:3]
                    normals[index] = np.cross(cosines[:3], cosines[3:])
        for item in _items(group, "PlanePositionSequence"):
            position = floats(item.get("ImagePositionPatient"), 3)
            if position:
                positions[index] = position
        for item in _items(group, "FrameContentSequence"):
            number = floats(item.get("InStackPositionNumber"), 1)
            if number:
                in_stack[index] = number[0]
        for item in _items(group, "OphthalmicFrameLocationSequence"):
            points = item.get("ReferenceCoordinates")
            points = floats(points, len(points)) if hasattr(points, "__len__") and not isinstance(points, str) else None
            if points and len(points) >= 4 and len(points) % 2 == 0:
                lines[index] = [*points[:2], *points[-2:]]
                nonlinear = str(item.get("OphthalmicImageOrientation", "")).strip().upper() == "NONLINEAR"
                curved[index] = nonlinear or len(points) > 4
        if group is not None:
            pair, thick = measures(group)
            if pair:
                spacing[index] = pair
            if thick is not None:
                thickness[index] = thick
    return FrameFacts(positions, directions, normals, lines, curved, in_stack, spacing, thickness)
