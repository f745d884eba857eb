"""Scans whose spacing, order, axes or pattern is missing, wrong, contradictory or unusual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from pydicom.dataset import Dataset

from octjepa.keys import generator
from octjepa.phantom.broken import Apply, Defect, Files, ScanFile, accepted, refused
from octjepa.phantom.dicom import item

Positions = Callable[[np.ndarray], Any]  # true positions [D] in mm -> the positions to write, None to empty them


def _mm(value: float) -> str:
    return f"{value:.6f}"


def _set_positions(scan: ScanFile, positions_mm: Any) -> None:
    """Frame positions along the slow axis; None empties them."""
    for index, group in enumerate(scan.frame_groups):
        position: Any = [] if positions_mm is None else ["0", _mm(positions_mm[index]), "0"]
        group.PlanePositionSequence = [item(ImagePositionPatient=position)]


def _true_positions(scan: ScanFile) -> np.ndarray:
    return np.arange(len(scan.pixels)) * scan.eye.spacing_mm[0]


def _positions(change: Positions, located: bool = True) -> Apply:
    """Frame positions as `change` makes them; not `located`: without lines on the fundus image."""

    def apply(scan: ScanFile) -> None:
        _set_positions(scan, change(_true_positions(scan)))
        if not located:
            _remove_locations(scan)

    return apply


def _remove_locations(scan: ScanFile) -> None:
    for group in scan.frame_groups:
        if "OphthalmicFrameLocationSequence" in group:
            del group.OphthalmicFrameLocationSequence


def _select_frames(scan: ScanFile, frames: list[int] | np.ndarray) -> None:
    """Stores the frames of these numbers, with their functional groups, uncompressed."""
    groups = list(scan.frame_groups)
    scan.store(scan.pixels[frames])
    scan.data.PerFrameFunctionalGroupsSequence = [groups[int(index)] for index in frames]


def _spacing(
    values: Callable[[float, float, float], tuple[str, str, str]] | None, located: bool = True, listed: bool = False
) -> Apply:
    """Spacing and thickness as `values` makes them of the true ones (slice, depth, column), or none; no positions.

    Not `located`: without lines on the fundus image. Not `listed`: the manifest does not give the spacing either.
    """

    def apply(scan: ScanFile) -> None:
        if values is None:
            del scan.measures.PixelSpacing, scan.measures.SliceThickness
        else:
            dz, dy, dx = values(*scan.eye.spacing_mm)
            scan.measures.PixelSpacing, scan.measures.SliceThickness = [dy, dx], dz
        _set_positions(scan, None)
        if not located:
            _remove_locations(scan)
        if not listed:
            scan.silence_manifest()

    return apply


def _decimal_comma(scan: ScanFile) -> Files:
    scan.silence_manifest()
    spacing = "\\".join(map(str, scan.measures.PixelSpacing)).encode()
    return scan.replaced(spacing, spacing.replace(b".", b","))


def _spacing_swapped(scan: ScanFile) -> None:
    scan.measures.PixelSpacing = list(reversed(scan.measures.PixelSpacing))
    scan.silence_manifest()


def _spacing_per_frame(scan: ScanFile) -> None:
    measures = scan.measures
    for group in scan.frame_groups:
        group.PixelMeasuresSequence = [measures]
    del scan.shared.PixelMeasuresSequence


def _thickness_is_column(scan: ScanFile) -> None:
    scan.measures.SliceThickness = scan.measures.PixelSpacing[1]
    _set_positions(scan, None)
    _remove_locations(scan)


def _outlier(positions_mm: np.ndarray) -> np.ndarray:
    positions_mm[3] = 90_000.0
    return positions_mm


def _torn(positions_mm: np.ndarray) -> np.ndarray:
    """Positions that put neighbours far apart."""
    frames = len(positions_mm)
    torn = np.empty(frames)
    torn[np.concatenate([np.arange(0, frames, 2), np.arange(1, frames, 2)])] = positions_mm
    return torn


def _shuffled(scan: ScanFile) -> None:
    order = generator("phantom zoo order", scan.seed, scan.eye.person.index).permutation(len(scan.pixels))
    _select_frames(scan, order)


def _numbered(scan: ScanFile) -> None:
    _shuffled(scan)
    _set_positions(scan, None)
    _remove_locations(scan)


def _sparse(scan: ScanFile) -> None:
    selected = np.arange(0, len(scan.pixels), 6)
    _select_frames(scan, selected)
    _set_positions(scan, _true_positions(scan)[: len(selected)])
    _remove_locations(scan)


def _set_location(group: Dataset, points: list[float]) -> None:
    (location,) = group.OphthalmicFrameLocationSequence
    location.ReferenceCoordinates = points
    location.OphthalmicImageOrientation = "LINEAR" if len(points) == 4 else "NONLINEAR"


def _circle(radius: float) -> list[float]:
    angles = np.linspace(0, 2 * np.pi, 24)
    return [float(v) for a in angles for v in (384 + radius * np.sin(a), 384 + radius * np.cos(a))]


def _radial(scan: ScanFile) -> None:
    """The optic disc programme: 24 lines through one centre and three circles, spacing in every frame."""
    _select_frames(scan, [*range(24), 0, 1, 2])
    dy, dx = (float(value) for value in scan.measures.PixelSpacing)
    groups = [item(**{element.keyword: element.value for element in group}) for group in scan.frame_groups]
    for index, group in enumerate(groups):
        group.FrameContentSequence = [item(StackID="1", InStackPositionNumber=index + 1)]
        group.OphthalmicFrameLocationSequence = [item(OphthalmicImageOrientation="LINEAR")]
        if index < 24:
            y, x = 380 * np.sin(np.pi * index / 24), 380 * np.cos(np.pi * index / 24)
            _set_location(group, [384 - y, 384 - x, 384 + y, 384 + x])
        else:
            _set_location(group, _circle(100 + 20 * (index - 24)))
        wider = 1.0 if index < 24 else 1.2
        group.PixelMeasuresSequence = [item(PixelSpacing=[_mm(dy), _mm(dx * wider)])]
    scan.data.PerFrameFunctionalGroupsSequence = groups
    _set_positions(scan, None)
    del scan.shared.PixelMeasuresSequence
    if scan.manifest_row is not None:
        scan.manifest_row |= {"pixel_spacing": "Varies by frame", "slice_thickness": "Not reported"}


def _circles(scan: ScanFile) -> None:
    for index, group in enumerate(scan.frame_groups):
        _set_location(group, _circle(100 + index))
    _set_positions(scan, None)


def _transposed(scan: ScanFile) -> None:
    scan.store(np.ascontiguousarray(scan.pixels.swapaxes(1, 2)))
    _spacing_swapped(scan)


def _en_face_stack(scan: ScanFile) -> None:
    scan.store(np.ascontiguousarray(scan.pixels.swapaxes(0, 1)), PerFrameFunctionalGroupsSequence=None)
    dz, dy, dx = map(_mm, scan.eye.spacing_mm)
    scan.measures.PixelSpacing, scan.measures.SliceThickness = [dz, dx], dy


def _orientation_of_zeros(scan: ScanFile) -> None:
    scan.shared.PlaneOrientationSequence = [item(ImageOrientationPatient=["0"] * 6)]


def _left_out(scan: ScanFile) -> None:
    _select_frames(scan, [index for index in range(len(scan.pixels)) if index not in (6, 7, 13)])


_FIXED_FIELD: Final = ("topcon_maestro2", "topcon_triton", "zeiss_cirrus")
_PITCH_IN_THICKNESS: Final = ("heidelberg_spectralis", "topcon_maestro2", "topcon_triton")
_BY_LOCATION: Final = (("slice", "frame_location"),)
DEFECTS: Final[tuple[Defect, ...]] = (
    refused(
        "spacing_one",
        "1 mm on every axis and no other source",
        _spacing(lambda *_: ("1", "1", "1"), located=False),
        "spacing_unknown",
    ),
    refused("spacing_absent", "no spacing in any element", _spacing(None), "spacing_unknown"),
    refused("spacing_zero", "0 on every axis", _spacing(lambda *_: ("0", "0", "0")), "spacing_unknown"),
    refused(
        "spacing_in_micrometres",
        "micrometres instead of millimetres",
        _spacing(lambda dz, dy, dx: (f"{1000 * dz:.4g}", f"{1000 * dy:.4g}", f"{1000 * dx:.4g}")),
        "spacing_unknown",
    ),
    accepted("spacing_decimal_comma", "a comma as the decimal point", _decimal_comma, "decimal_comma"),
    accepted(
        "spacing_swapped",
        "row and column spacing swapped",
        _spacing_swapped,
        "spacing_swapped",
        uncertain=("depth", "column"),
    ),
    accepted(
        "spacing_per_frame",
        "spacing per frame instead of shared",
        _spacing_per_frame,
        provenance=(("depth", "per_frame"), ("column", "per_frame")),
    ),
    accepted(
        "thickness_zero",
        "SliceThickness 0, positions present",
        lambda scan: setattr(scan.measures, "SliceThickness", "0"),
    ),
    accepted(
        "thickness_is_column",
        "SliceThickness is the column spacing, and no positions",
        _thickness_is_column,
        "positions_missing",
        "slice_thickness_is_column_spacing",
        devices=_FIXED_FIELD,
    ),
    accepted("positions_empty", "empty positions", _positions(lambda _: None), provenance=_BY_LOCATION),
    accepted(
        "positions_identical",
        "one position for all frames",
        _positions(np.zeros_like),
        "positions_repeated",
        provenance=_BY_LOCATION,
    ),
    accepted("positions_in_metres", "positions in metres", _positions(lambda mm: mm / 1000), provenance=_BY_LOCATION),
    accepted(
        "position_outlier",
        "one position 90 m away",
        _positions(_outlier),
        "slice_positions_implausible",
        provenance=_BY_LOCATION,
    ),
    accepted(
        "positions_wide",
        "distance of positions is 1.6 times SliceThickness",
        _positions(lambda mm: 1.6 * mm),
        "pitch_disagrees_with_thickness",
        uncertain=("slice",),
        same_pixels=False,
        devices=_PITCH_IN_THICKNESS,
    ),
    accepted("frames_shuffled", "frames not in the order of their positions", _shuffled, "frames_unordered"),
    accepted(
        "frames_numbered",
        "shuffled; only InStackPositionNumber gives the order",
        _numbered,
        "frames_unordered",
        uncertain=("slice",),
    ),
    accepted(
        "frames_reversed",
        "frames stored in reverse order",
        lambda scan: _select_frames(scan, np.arange(len(scan.pixels))[::-1]),
    ),
    accepted(
        "positions_lie",
        "positions that separate adjacent frames",
        _positions(_torn, located=False),
        "order_by_correlation",
        uncertain=("slice",),
        same_pixels=False,
    ),
    accepted("pitch_uneven", "three B-scans missing", _left_out, "pitch_uneven", same_pixels=False, fewer_frames=3),
    accepted(
        "sparse_lines",
        "every sixth B-scan, with the spacing of the full scan",
        _sparse,
        "field_implausible",
        uncertain=("slice",),
        same_pixels=False,
    ),
    accepted(
        "radial",
        "24 radial lines and three circles, spacing per frame",
        _radial,
        "circle_frames_dropped",
        uncertain=("slice",),
        pattern="radial",
        same_pixels=False,
    ),
    accepted(
        "circles", "circles instead of lines", _circles, uncertain=("slice",), pattern="circle", same_pixels=False
    ),
    accepted("transposed", "A-scans stored as rows", _transposed, "axes_transposed"),
    refused("en_face_stack", "en face slices instead of B-scans", _en_face_stack, "not_b_scans"),
    accepted(
        "upside_down",
        "upside down: the sclera on top",
        lambda scan: scan.store(np.ascontiguousarray(scan.pixels[:, ::-1])),
        "turned_upright",
    ),
    accepted("orientation_of_zeros", "direction cosines of length zero", _orientation_of_zeros, same_pixels=False),
)
