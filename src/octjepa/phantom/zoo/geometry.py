"""Scans whose spacing, order, axes or pattern is missing, wrong, contradictory or unusual."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from pydicom.dataset import Dataset

from octjepa.keys import generator
from octjepa.phantom.zoo.specimen import Files, Kind, Specimen, accepted, refused


def _item(**elements: object) -> Dataset:
    item = Dataset()
    for keyword, value in elements.items():
        setattr(item, keyword, value)
    return item


def _mm(value: float) -> str:
    return f"{value:.6f}"


def _place(s: Specimen, positions_mm: Any) -> None:
    """Frame positions along the slow axis; None empties them."""
    for index, group in enumerate(s.frames):
        where: Any = [] if positions_mm is None else ["0", _mm(positions_mm[index]), "0"]
        group.PlanePositionSequence = [_item(ImagePositionPatient=where)]


def _regular(s: Specimen) -> np.ndarray:
    return np.arange(len(s.eye.pixels)) * s.eye.spacing_mm[0]


def _no_location(s: Specimen) -> None:
    for group in s.frames:
        if "OphthalmicFrameLocationSequence" in group:
            del group.OphthalmicFrameLocationSequence


def _keep(s: Specimen, frames: list[int] | np.ndarray) -> None:
    """The frames of these numbers, with their functional groups, uncompressed."""
    groups = list(s.frames)
    s.store(s.eye.pixels[frames])
    s.data.PerFrameFunctionalGroupsSequence = [groups[int(index)] for index in frames]


def _every_spacing(s: Specimen, pair: list[str] | None, thickness: str | None) -> None:
    """Row and column spacing and thickness as given, or none; no positions, no lines on the fundus image."""
    for keyword, value in (("PixelSpacing", pair), ("SliceThickness", thickness)):
        if value is not None:
            setattr(s.measures, keyword, value)
        elif keyword in s.measures:
            delattr(s.measures, keyword)
    _place(s, None)


def _one_millimetre(s: Specimen) -> None:
    _every_spacing(s, ["1", "1"], "1")


def _one_millimetre_everywhere(s: Specimen) -> None:
    _one_millimetre(s)
    _no_location(s)
    s.silence_manifest()


def _spacing_absent(s: Specimen) -> None:
    _every_spacing(s, None, None)
    s.silence_manifest()


def _spacing_zero(s: Specimen) -> None:
    _every_spacing(s, ["0", "0"], "0")
    s.silence_manifest()


def _spacing_in_micrometres(s: Specimen) -> None:
    dz, dy, dx = (f"{1000 * value:.4g}" for value in s.eye.spacing_mm)
    _every_spacing(s, [dy, dx], dz)
    s.silence_manifest()


def _decimal_comma(s: Specimen) -> Files:
    s.silence_manifest()
    spacing = "\\".join(map(str, s.measures.PixelSpacing)).encode()
    return {s.path: s.content().replace(spacing, spacing.replace(b".", b","), 1)}


def _spacing_swapped(s: Specimen) -> None:
    s.measures.PixelSpacing = list(reversed(s.measures.PixelSpacing))
    s.silence_manifest()


def _spacing_per_frame(s: Specimen) -> None:
    measures = s.measures
    for group in s.frames:
        group.PixelMeasuresSequence = [measures]
    del s.shared.PixelMeasuresSequence


def _thickness_zero(s: Specimen) -> None:
    s.measures.SliceThickness = "0"


def _thickness_is_column(s: Specimen) -> None:
    s.measures.SliceThickness = s.measures.PixelSpacing[1]
    _place(s, None)
    _no_location(s)


def _positions_empty(s: Specimen) -> None:
    _place(s, None)


def _positions_identical(s: Specimen) -> None:
    _place(s, np.zeros(len(s.eye.pixels)))


def _positions_in_metres(s: Specimen) -> None:
    _place(s, _regular(s) / 1000)


def _position_outlier(s: Specimen) -> None:
    positions = _regular(s)
    positions[3] = 90_000.0
    _place(s, positions)


def _positions_wide(s: Specimen) -> None:
    _place(s, 1.6 * _regular(s))


def _shuffled(s: Specimen) -> None:
    _keep(s, generator("phantom zoo order", s.seed, s.eye.person.index).permutation(len(s.eye.pixels)))


def _numbered(s: Specimen) -> None:
    """Shuffled, and only the in-stack numbers tell the order."""
    _shuffled(s)
    _place(s, None)
    _no_location(s)


def _reversed(s: Specimen) -> None:
    _keep(s, np.arange(len(s.eye.pixels))[::-1])


def _positions_lie(s: Specimen) -> None:
    """Positions that would put neighbours far apart."""
    frames = len(s.eye.pixels)
    order = np.concatenate([np.arange(0, frames, 2), np.arange(1, frames, 2)])
    positions = np.empty(frames)
    positions[order] = _regular(s)
    _place(s, positions)
    _no_location(s)


def _uneven(s: Specimen) -> None:
    frames = len(s.eye.pixels)
    _keep(s, [index for index in range(frames) if index not in (6, 7, 13)])


def _sparse(s: Specimen) -> None:
    """Every sixth B-scan, laid side by side with the pitch of all."""
    kept = np.arange(0, len(s.eye.pixels), 6)
    _keep(s, kept)
    _place(s, _regular(s)[: len(kept)])
    _no_location(s)


def _located(group: Dataset, points: list[float]) -> None:
    (location,) = group.OphthalmicFrameLocationSequence
    location.ReferenceCoordinates = points
    location.OphthalmicImageOrientation = "LINEAR" if len(points) == 4 else "NONLINEAR"


def _circle(radius: float) -> list[float]:
    return [
        float(v) for t in np.linspace(0, 2 * np.pi, 24) for v in (384 + radius * np.sin(t), 384 + radius * np.cos(t))
    ]


def _radial(s: Specimen) -> None:
    """The optic disc programme: 24 lines through one centre and three circles, spacing in every frame."""
    _keep(s, [*range(24), 0, 1, 2])
    measures = s.measures
    pair = [float(value) for value in measures.PixelSpacing]
    groups = [_item(**{element.keyword: element.value for element in group}) for group in s.frames]
    for index, group in enumerate(groups):
        group.FrameContentSequence = [_item(StackID="1", InStackPositionNumber=index + 1)]
        group.OphthalmicFrameLocationSequence = [_item(OphthalmicImageOrientation="LINEAR")]
        if index < 24:
            y, x = 380 * np.sin(np.pi * index / 24), 380 * np.cos(np.pi * index / 24)
            _located(group, [384 - y, 384 - x, 384 + y, 384 + x])
        else:
            _located(group, _circle(100 + 20 * (index - 24)))
        wider = 1.0 if index < 24 else 1.2
        group.PixelMeasuresSequence = [_item(PixelSpacing=[_mm(pair[0]), _mm(pair[1] * wider)])]
    s.data.PerFrameFunctionalGroupsSequence = groups
    _place(s, None)
    del s.shared.PixelMeasuresSequence
    if s.row is not None:
        s.row |= {"pixel_spacing": "Varies by frame", "slice_thickness": "Not reported"}


def _circles(s: Specimen) -> None:
    for index, group in enumerate(s.frames):
        _located(group, _circle(100 + index))
    _place(s, None)


def _transposed(s: Specimen) -> None:
    """A-scans stored as rows, and the header's spacing with them."""
    s.store(np.ascontiguousarray(s.eye.pixels.swapaxes(1, 2)))
    s.measures.PixelSpacing = list(reversed(s.measures.PixelSpacing))
    s.silence_manifest()


def _en_face_stack(s: Specimen) -> None:
    s.store(np.ascontiguousarray(s.eye.pixels.swapaxes(0, 1)))
    del s.data.PerFrameFunctionalGroupsSequence
    dz, dy, dx = map(_mm, s.eye.spacing_mm)
    s.measures.PixelSpacing, s.measures.SliceThickness = [dz, dx], dy


def _upside_down(s: Specimen) -> None:
    s.store(np.ascontiguousarray(s.eye.pixels[:, ::-1]))


def _orientation_of_zeros(s: Specimen) -> None:
    s.shared.PlaneOrientationSequence = [_item(ImageOrientationPatient=["0"] * 6)]


ONE_MILLIMETRE: Final = accepted(
    "wrong_spacing", "1 mm in every direction, and no positions; the manifest knows better", _one_millimetre,
    "spacing_implausible_shared", provenance=(("depth", "manifest"), ("column", "manifest")),
)  # fmt: skip
_FIXED_FIELD: Final = ("topcon_maestro2", "topcon_triton", "zeiss_cirrus")
_PITCH_IN_THICKNESS: Final = ("heidelberg_spectralis", "topcon_maestro2", "topcon_triton")
_BY_LOCATION: Final = (("slice", "frame_location"),)
KINDS: Final[tuple[Kind, ...]] = (
    refused("spacing_one", "1 mm in every direction, and no other source", _one_millimetre_everywhere,
            "spacing_unknown"),
    refused("spacing_absent", "no spacing anywhere", _spacing_absent, "spacing_unknown"),
    refused("spacing_zero", "zero in every direction", _spacing_zero, "spacing_unknown"),
    refused("spacing_in_micrometres", "micrometres where millimetres belong", _spacing_in_micrometres,
            "spacing_unknown"),
    refused("spacing_decimal_comma", "a comma as the decimal point", _decimal_comma, "spacing_unknown"),
    accepted("spacing_swapped", "depth and column spacing changed places", _spacing_swapped, "spacing_swapped",
             doubtful=("depth", "column")),
    accepted("spacing_per_frame", "spacing in every frame, none for all", _spacing_per_frame,
             provenance=(("depth", "per_frame"), ("column", "per_frame"))),
    accepted("thickness_zero", "a slice thickness of zero beside positions", _thickness_zero),
    accepted("thickness_is_column", "the column spacing as slice thickness, and no positions", _thickness_is_column,
             "positions_missing", "slice_thickness_is_column_spacing", devices=_FIXED_FIELD),
    accepted("positions_empty", "empty positions", _positions_empty, provenance=_BY_LOCATION),
    accepted("positions_identical", "one position for all frames", _positions_identical, "positions_repeated",
             provenance=_BY_LOCATION),
    accepted("positions_in_metres", "positions in metres", _positions_in_metres, provenance=_BY_LOCATION),
    accepted("position_outlier", "one position 90 m away", _position_outlier, "slice_positions_implausible",
             provenance=_BY_LOCATION),
    accepted("positions_wide", "positions 1.6 times too far apart for the slice thickness", _positions_wide,
             "pitch_disagrees_with_thickness", doubtful=("slice",), same_pixels=False, devices=_PITCH_IN_THICKNESS),
    accepted("frames_shuffled", "frames in another order than their positions", _shuffled, "frames_unordered"),
    accepted("frames_numbered", "shuffled, and only the in-stack numbers tell", _numbered, "frames_unordered",
             doubtful=("slice",)),
    accepted("frames_reversed", "stored from last to first", _reversed),
    accepted("positions_lie", "positions that tear neighbours apart", _positions_lie, "order_by_correlation",
             doubtful=("slice",), same_pixels=False),
    accepted("pitch_uneven", "three B-scans left out", _uneven, "pitch_uneven", same_pixels=False, fewer_frames=3),
    accepted("sparse_lines", "every sixth B-scan with the pitch of all", _sparse, "field_implausible",
             doubtful=("slice",), same_pixels=False),
    accepted("radial", "24 radial lines and three circles, spacing by frame", _radial, "circle_frames_dropped",
             doubtful=("slice",), pattern="radial", same_pixels=False),
    accepted("circles", "circles instead of lines", _circles, doubtful=("slice",), pattern="circle",
             same_pixels=False),
    accepted("transposed", "A-scans stored as rows", _transposed, "axes_transposed"),
    refused("en_face_stack", "en face slices instead of B-scans", _en_face_stack, "not_b_scans"),
    accepted("upside_down", "the sclera on top", _upside_down, "turned_upright"),
    accepted("orientation_of_zeros", "direction vectors of length zero", _orientation_of_zeros, same_pixels=False),
)  # fmt: skip
