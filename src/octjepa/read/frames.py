"""The geometry of frames from a DICOM header: positions, orientations, location on the fundus image, order.

DICOM Part 3: Plane Position (Patient), Plane Orientation (Patient), Frame Content, and Ophthalmic Frame Location
(C.8.17.11), whose Reference Coordinates are pixels (row, column) of the fundus image.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from octjepa.read.anatomy import other_image
from octjepa.read.raw_scan import FrameGeometry
from octjepa.reasons import rejection

if TYPE_CHECKING:
    from pydicom.dataset import Dataset


def floats(value: Any, count: int) -> list[float] | None:
    """`count` finite floats from a DICOM value, or None: empty lists, short lists and texts are common."""
    if value is None or isinstance(value, str):
        return None
    try:
        numbers = [float(number) for number in value] if hasattr(value, "__iter__") else [float(value)]
    except (TypeError, ValueError):
        return None
    return numbers if len(numbers) == count and all(map(isfinite, numbers)) else None


# Tags by number: pydicom looks a keyword up in a long table, and raises and catches where the element is absent.
_PIXEL_MEASURES, _PIXEL_SPACING, _BETWEEN_SLICES, _THICKNESS = 0x00289110, 0x00280030, 0x00180088, 0x00180050
_PLANE_ORIENTATION, _ORIENTATION, _PLANE_POSITION, _POSITION = 0x00209116, 0x00200037, 0x00209113, 0x00200032
_FRAME_CONTENT, _IN_STACK_POSITION = 0x00209111, 0x00209057
_FRAME_LOCATION, _COORDINATES, _OPHTHALMIC_ORIENTATION = 0x00220031, 0x00220032, 0x00220039
_FRAME_TYPE = 0x00089007
_FRAME_TYPE_SEQUENCES = (0x00189329, 0x00189226, 0x00520025)  # of enhanced CT, enhanced MR, intravascular OCT
_DECIMAL = {_PIXEL_SPACING, _BETWEEN_SLICES, _THICKNESS, _ORIENTATION, _POSITION}  # of VR DS in the standard
_TEXTS = {"UT", "LT", "ST", "LO", "SH", "UC", "IS", "CS", "UN"}
_FRAME_ANATOMY, _FRAME_LATERALITY = 0x00209071, 0x00209072
_PER_FRAME = 0x52009230
_BINARY = {"FL": "f4", "FD": "f8", "UL": "u4", "US": "u2", "SL": "i4", "SS": "i2"}


def decimal_numbers(text: str) -> list[float] | None:
    """The numbers of a DICOM text such as "0.0039\\0.0117"; a decimal comma counts as a point. None for other text."""
    try:
        return [float(part.replace(",", ".")) for part in text.strip(" \0").split("\\")]
    except ValueError:
        return None


def _value(group: Dataset, tag: int) -> Any:
    """The element's value, None if it is absent. Numbers are read without pydicom's value classes.

    Some writers store decimal numbers as a text of another kind (UT, LO, UN); they are read the same way.
    """
    element = group.get_item(tag)  # None without the element
    if element is None:
        return None
    raw = element.value
    if tag in _DECIMAL and isinstance(raw, str):
        return decimal_numbers(raw)
    if element.is_raw and isinstance(raw, bytes):
        if element.VR == "DS" or (tag in _DECIMAL and element.VR in _TEXTS):
            return decimal_numbers(raw.decode("ascii", "replace"))
        kind = _BINARY.get(element.VR or "")
        if kind and len(raw) % int(kind[1]) == 0:
            return np.frombuffer(raw, ("<" if element.is_little_endian else ">") + kind).tolist()
    return group[tag].value if element.is_raw else raw  # converting a sequence again takes as long as the first time


def _items(group: Dataset | None, tag: int) -> Iterator[Dataset]:
    """The items of a sequence; none where the element is something else."""
    value: Any = None if group is None else _value(group, tag)
    if hasattr(value, "__iter__"):
        yield from (item for item in value if hasattr(item, "get_item"))


def pixel_measures(group: Dataset | None) -> tuple[list[float] | None, float | None]:
    """((depth, column) spacing, slice thickness) in mm of a functional group's or a header's Pixel Measures."""
    pair, thickness = None, None
    for item in [*_items(group, _PIXEL_MEASURES), *([group] if group is not None else [])]:
        pair = pair or floats(_value(item, _PIXEL_SPACING), 2)
        for tag in (_BETWEEN_SLICES, _THICKNESS):
            number = floats(_value(item, tag), 1)
            if thickness is None and number is not None and number[0] > 0:  # 0 stands for unknown
                thickness = number[0]
    return pair, thickness


def has_decimal_comma(header: Dataset) -> bool:
    """Whether a spacing in the header is written with a comma, which is not a number in DICOM."""
    groups = [*_items(header, 0x52009229), *list(_items(header, _PER_FRAME))[:1], header]
    for group in groups:
        for item in [*_items(group, _PIXEL_MEASURES), group]:
            for tag in (_PIXEL_SPACING, _BETWEEN_SLICES, _THICKNESS):
                element = item.get_item(tag) if tag in item else None
                value = None if element is None else element.value
                if (isinstance(value, bytes) and b"," in value) or (isinstance(value, str) and "," in value):
                    return True
    return False


def check_one_eye(header: Dataset) -> None:
    """Raises VolumeRejected frames_unrelated where FrameLaterality names the right eye for some frames, the left for
    others: they are two scans."""
    eyes: list[str] = []
    for group in _items(header, _PER_FRAME):
        lateralities = [_value(item, _FRAME_LATERALITY) for item in _items(group, _FRAME_ANATOMY)]
        eye = lateralities[0] if lateralities else ""
        eyes.append(str(eye.decode("ascii", "replace") if isinstance(eye, bytes) else eye or "").strip(" \0").upper())
    right, left = (np.flatnonzero([eye == side for eye in eyes]) + 1 for side in ("R", "L"))
    if len(right) and len(left):
        raise rejection(
            "frames_unrelated",
            f"FrameLaterality says right eye for {_numbers(right)} and left eye for {_numbers(left)}: two scans; "
            "export each eye by itself",
        )


def _numbers(frames: np.ndarray) -> str:
    """ "frames 1 to 24", or how many they are where others lie between."""
    first, last = int(frames[0]), int(frames[-1])
    return f"frames {first} to {last}" if last - first + 1 == len(frames) else f"{len(frames)} frames"


def _orientation(group: Dataset | None) -> tuple[list[float], np.ndarray] | None:
    """(direction along a B-scan's row, normal), the last that is given."""
    orientation = None
    for item in _items(group, _PLANE_ORIENTATION):
        cosines = floats(_value(item, _ORIENTATION), 6)
        if cosines:
            orientation = cosines[:3], np.cross(cosines[:3], cosines[3:])
    return orientation


def _is_en_face(group: Dataset | None) -> bool:
    """Whether a frame is called a localizer, flow or an en face image, or cuts across the A-scans."""
    typed = [] if group is None else [group, *(item for tag in _FRAME_TYPE_SEQUENCES for item in _items(group, tag))]
    for item in typed:
        kind = _value(item, _FRAME_TYPE)
        if kind and other_image([kind] if isinstance(kind, str) else kind):
            return True
    orientations = (_value(item, _OPHTHALMIC_ORIENTATION) for item in _items(group, _FRAME_LOCATION))
    return any(str(orientation or "").strip().upper() == "TRANSVERSE" for orientation in orientations)


def read_frame_geometry(header: Dataset, frames: int) -> FrameGeometry:
    """The geometry of the first `frames` functional groups, NaN for frames without a group."""
    geometry = FrameGeometry.unknown(frames)
    positions, directions, normals = geometry.positions_mm, geometry.row_directions, geometry.normals
    lines, curved, in_stack = geometry.lines_px, geometry.curved, geometry.in_stack
    spacing, thickness = geometry.spacing_mm, geometry.thickness_mm
    shared = (header.get("SharedFunctionalGroupsSequence") or [None])[0]
    groups = header.get("PerFrameFunctionalGroupsSequence") or []
    shared_orientation = _orientation(shared)
    for index in range(frames):
        group = groups[index] if index < len(groups) else None
        geometry.en_face[index] = _is_en_face(group)
        if orientation := _orientation(group) or shared_orientation:
            directions[index], normals[index] = orientation
        for item in _items(group, _PLANE_POSITION):
            position = floats(_value(item, _POSITION), 3)
            if position:
                positions[index] = position
        for item in _items(group, _FRAME_CONTENT):
            number = floats(_value(item, _IN_STACK_POSITION), 1)
            if number:
                in_stack[index] = number[0]
        for item in _items(group, _FRAME_LOCATION):
            points = _value(item, _COORDINATES)
            points = floats(points, len(points)) if hasattr(points, "__len__") and not isinstance(points, str) else None
            # Only zeros are a placeholder; as lines without a length they would be those of a circle.
            if points and any(points) and len(points) >= 4 and len(points) % 2 == 0:
                lines[index] = [*points[:2], *points[-2:]]
                nonlinear = str(_value(item, _OPHTHALMIC_ORIENTATION) or "").strip().upper() == "NONLINEAR"
                curved[index] = nonlinear or len(points) > 4
        if group is not None:
            pair, thick = pixel_measures(group)
            if pair:
                spacing[index] = pair
            if thick is not None:
                thickness[index] = thick
    return geometry
