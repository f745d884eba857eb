"""The spacing of each axis, from ordered sources, within plausible limits, with its provenance; never a default.

Slice pitch: frame positions, frame location on the fundus image, per-frame and shared slice thickness, manifest, the
protocol's known field over its lines. Depth and column: shared Pixel Measures, per-frame, manifest, protocol.
A JSON file next to the scan comes before all of them; positions that contradict it only order the B-scans.
A value outside the limits is passed over and noted. DepthSpatialResolution is optical resolution and is not used.
Gaps between positions are real up to 1.5 mm, even or not: five-line rasters and lines that a study follows have them.
A slice thickness above 0.5 mm is ignored, because some writers use 1 mm as a placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float, Int

from octjepa.errors import VolumeRejected
from octjepa.read.orientation import DIRECTION_UNSTATED, ORDER_FROM_POSITIONS
from octjepa.read.protocols import ProtocolSpacing
from octjepa.read.raw_scan import AxisSpacing, FrameGeometry
from octjepa.reasons import rejection
from octjepa.volume import AXES, Pattern

Shape = tuple[int, int, int]  # [D, H, W]
LIMITS_MM = {"slice": (0.002, 1.5), "depth": (0.001, 0.01), "column": (0.002, 0.06)}
# Of a spacing that the user states, for cubes that were resampled: the scan's extent has to be plausible instead.
STATED_LIMITS_MM = {"slice": (0.002, 1.5), "depth": (0.0005, 0.05), "column": (0.001, 0.5)}
_STATED = ("option", "sidecar")  # --spacing and the JSON next to the scan
MAX_THICKNESS_MM = 0.5  # of SliceThickness and of the manifest's
# Slow over fast extent of a whole scan; outside, frames are missing or the pitch is wrong.
FIELD_RATIO = (0.25, 4.0)
EXTENT_MM = {"slice": (0.5, 30.0), "depth": (0.3, 8.0), "column": (0.5, 30.0)}  # of a whole scan; no OCT has another
_WHOLE = {"slice": 16, "depth": 160, "column": 128}  # samples; fewer may be a part of a scan
MAX_SPAN_MM = 40.0  # of all frame positions; the widest OCT fields are about 24 mm
_ASIDE = 100.0  # times as far as along the stated normal, positions lie aside of it: it is not that of the B-scans
_ALONG_ROWS = 0.5  # cosine between positions and rows, at most: B-scans may be displaced along themselves
_UNEVEN = 0.05  # relative deviation of a gap from the median gap that is worth a note


@dataclass
class Geometry:
    """`order` sorts the file's frames in space; `positions_mm` [D] are theirs along the slow axis, from 0."""

    spacing_mm: tuple[float, float, float]
    provenance: dict[str, str]
    order: Int[np.ndarray, " F"]
    positions_mm: Float[np.ndarray, " D"] | None = None
    uncertain: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SpacingSources:
    """Everything that states a spacing, in mm; None where absent. Pixel spacings are (depth, column)."""

    frame_geometry: FrameGeometry
    shared_pixel_spacing: tuple[float, float] | None
    shared_thickness: float | None
    manifest_pixel_spacing: tuple[float, float] | None
    manifest_thickness: float | None
    protocol: ProtocolSpacing | None
    header: AxisSpacing = (None, None, None)
    header_source: str = "header"  # or "sidecar": the JSON next to the scan
    option: tuple[float, float, float] | None = None

    def thicknesses(self) -> list[tuple[str, float]]:
        """(source, slice thickness), the most trusted first."""
        per_frame = self.frame_geometry.thickness_mm[np.isfinite(self.frame_geometry.thickness_mm)]
        median = float(np.median(per_frame)) if len(per_frame) else None
        values = (("per_frame", median), ("shared", self.shared_thickness), ("manifest", self.manifest_thickness))
        return [(source, value) for source, value in values if value is not None]

    def plausible_thicknesses(self) -> list[float]:
        """Those of `thicknesses` that can be the thickness of a B-scan."""
        return [value for _, value in self.thicknesses() if is_plausible_thickness(value)]


def is_plausible(axis: str, value: float | None) -> bool:
    """Whether a spacing in mm is within `LIMITS_MM` of its axis."""
    low, high = LIMITS_MM[axis]
    return value is not None and low <= value <= high


def stated_spacing_fault(spacing_mm: tuple[float, float, float], shape: Shape | None = None) -> str:
    """The fault of a spacing (slice, depth, column) that the user states, in words; "" for nothing.

    Outside `LIMITS_MM` it has to be within `STATED_LIMITS_MM` and to give the scan, where its `shape` is known, the
    extent of an OCT scan; a spacing whose depth and column are plausible the other way round is a mistake.
    """
    coarse = [axis for axis, mm in zip(AXES, spacing_mm, strict=True) if not is_plausible(axis, mm)]
    for axis, mm in zip(AXES, spacing_mm, strict=True):
        low, high = STATED_LIMITS_MM[axis]
        if not low <= mm <= high:
            low, high = LIMITS_MM[axis]
            return f"{mm:g} mm along {axis} is outside {low} to {high}"
    _, depth, column = spacing_mm
    if coarse and is_plausible("depth", column) and is_plausible("column", depth):
        return f"depth {depth:g} and column {column:g} mm are those of a scan the other way round"
    if shape is not None:
        for axis, length, mm in zip(AXES, shape, spacing_mm, strict=True):
            low, high = EXTENT_MM[axis]
            if axis in coarse and not low <= length * mm <= high:
                return f"{mm:g} mm along {axis} make {length * mm:.3g} mm; a scan has {low:g} to {high:g}"
    return ""


def _is_credible(source: str, sources: SpacingSources, pair: tuple[float, float], shape: Shape) -> bool:
    """Whether a (depth, column) spacing is plausible, or the user states it and it fits the scan."""
    if is_plausible("depth", pair[0]) and is_plausible("column", pair[1]):
        return True
    stated = sources.option if source == "option" else sources.header
    dz, dy, dx = stated if stated is not None else (None, None, None)
    if source not in _STATED or dz is None or dy is None or dx is None:
        return False
    return not stated_spacing_fault((dz, dy, dx), shape)


def is_plausible_thickness(value: float) -> bool:
    """Whether a slice thickness in mm can be taken for the pitch of the B-scans."""
    return LIMITS_MM["slice"][0] <= value <= MAX_THICKNESS_MM


def implausible_extents(shape: Shape, spacing_mm: tuple[float, float, float]) -> tuple[str, ...]:
    """The axes along which the scan is shorter or longer than any OCT; a part of a scan may be short."""
    candidates = []
    for axis, length, mm in zip(AXES, shape, spacing_mm, strict=True):
        low, high = EXTENT_MM[axis]
        if length * mm > high or (length * mm < low and length >= _WHOLE[axis]):
            candidates.append(axis)
    return tuple(candidates)


def resolve_geometry(sources: SpacingSources, shape: Shape, pattern: Pattern) -> Geometry:
    """Spacing, order and provenance for `shape` [D, H, W]. Raises VolumeRejected spacing_unknown."""
    geometry = _resolve(sources, shape, pattern)
    extents = implausible_extents(shape, geometry.spacing_mm)
    doubtful = [axis for axis in extents if axis != "slice" or pattern == "raster"]
    if doubtful:
        geometry.notes.append("extent_implausible")
        geometry.uncertain = tuple(axis for axis in AXES if axis in doubtful or axis in geometry.uncertain)
    return geometry


def _resolve(sources: SpacingSources, shape: Shape, pattern: Pattern) -> Geometry:
    """As `resolve_geometry`, without the check of the extent."""
    frames, _, columns = shape
    notes: list[str] = []
    if sources.option is not None and (fault := stated_spacing_fault(sources.option, shape)):
        raise rejection("spacing_unknown", f"the spacing that was given does not fit this scan: {fault}")
    depth, column, source, is_uncertain = _pixel_spacing(sources, shape, notes)
    uncertain = ["depth", "column"] if is_uncertain else []
    provenance = {"slice": "", "depth": source, "column": source}
    if pattern != "raster":
        # The lines rotate about one centre: the arc between neighbours, half way out, is taken as the pitch.
        pitch = float(np.pi * column * columns / 2 / (2 * frames))
        provenance["slice"] = "scan_pattern"
        order = _order_by_number(sources.frame_geometry, notes)
        return Geometry((pitch, depth, column), provenance, order, None, (*uncertain, "slice"), notes)
    if sources.option is not None and is_plausible("slice", sources.option[0]):
        return _geometry_from_option(sources, sources.option, shape, pattern, notes)

    positions_mm = None
    placed = _pitch_from_positions(sources.frame_geometry, column, columns, notes)
    if placed is not None:
        pitch, provenance["slice"], order, positions_mm = placed
        span = float(positions_mm[-1])
        stated_mm = sources.header[0] if sources.header_source == "sidecar" else None
        if stated_mm is not None and is_plausible("slice", stated_mm) and not _is_close(stated_mm, pitch, 0.02):
            notes += [ORDER_FROM_POSITIONS, "positions_disagree_with_sidecar"]
            pitch, provenance["slice"], positions_mm, span = stated_mm, "sidecar", None, 0.0
        is_uncertain = _is_pitch_doubtful(pitch, column, shape, sources, notes, span)
        lines = _positions_on_fundus(sources.frame_geometry, column, columns)
        if provenance["slice"] == "positions" and _gap_differs(pitch, lines):
            notes.append("positions_disagree_with_location")  # no doubt: converters invent lines
    else:
        if not {"positions_repeated", "slice_positions_implausible", "slice_frame_location_implausible"} & set(notes):
            notes.append("positions_missing")
        stated = _describe_gaps(sources.frame_geometry, column, columns)
        pitch, provenance["slice"], is_uncertain = _pitch_without_positions(sources, shape, column, notes, stated)
        is_uncertain = _is_pitch_doubtful(pitch, column, shape, sources, notes) or is_uncertain
        order = _order_by_number(sources.frame_geometry, notes)
    if is_uncertain:
        uncertain.append("slice")
    return Geometry((pitch, depth, column), provenance, order, positions_mm, tuple(uncertain), notes)


def _geometry_from_option(
    sources: SpacingSources, spacing: tuple[float, float, float], shape: Shape, pattern: Pattern, notes: list[str]
) -> Geometry:
    """The user's spacing with the file's frame order; where the file states another spacing, it is noted.

    Uneven positions in the file remain those of the B-scans if their pitch is the user's.
    """
    positions_mm = None
    in_file = _geometry_in_file(sources, spacing, shape, pattern)
    if in_file is None:
        order = _order_by_number(sources.frame_geometry, notes)
    else:
        order = in_file.order
        retained = (DIRECTION_UNSTATED, ORDER_FROM_POSITIONS)
        notes += [note for note in in_file.notes if note.startswith("frames_") or note in retained]
        if in_file.positions_mm is not None:
            notes.append(ORDER_FROM_POSITIONS)
            if "pitch_uneven" in in_file.notes and _is_close(spacing[0], in_file.spacing_mm[0], 0.02):
                positions_mm = in_file.positions_mm * (spacing[0] / in_file.spacing_mm[0])
                notes.append("pitch_uneven")
        axes = zip(AXES, spacing, in_file.spacing_mm, strict=True)
        notes += [
            f"option_disagrees_{axis}"
            for axis, stated_mm, header_mm in axes
            if not _is_close(stated_mm, header_mm, 0.02)
        ]
    _is_pitch_doubtful(spacing[0], spacing[2], shape, sources, notes)
    return Geometry(spacing, dict.fromkeys(AXES, "option"), order, positions_mm, (), notes)


def _geometry_in_file(
    sources: SpacingSources, spacing: tuple[float, float, float], shape: Shape, pattern: Pattern
) -> Geometry | None:
    """The geometry without the user's spacing, or with the user's depth and column spacing if the file states none.

    None if the file states no pitch of its B-scans either.
    """
    in_file = replace(sources, option=None)
    for candidate in (in_file, replace(in_file, shared_pixel_spacing=spacing[1:])):
        try:
            return resolve_geometry(candidate, shape, pattern)
        except VolumeRejected:  # the file states no spacing, which is why the user gives one
            continue
    return None


# Depth and column


def _pixel_spacing(sources: SpacingSources, shape: Shape, notes: list[str]) -> tuple[float, float, str, bool]:
    """(depth, column, provenance, uncertain). Raises VolumeRejected spacing_unknown."""
    spacing_mm = sources.frame_geometry.spacing_mm
    per_frame = spacing_mm[np.isfinite(spacing_mm).all(axis=1)]
    median = None if not len(per_frame) else (float(np.median(per_frame[:, 0])), float(np.median(per_frame[:, 1])))
    if len(per_frame) and np.ptp(per_frame[:, 1]) > 0.02 * np.median(per_frame[:, 1]):
        notes.append("column_spacing_varies")
    _, depth_mm, column_mm = sources.header
    stated = [
        ("option", None if sources.option is None else sources.option[1:]),
        ("shared", sources.shared_pixel_spacing),
        ("per_frame", median),
        (sources.header_source, None if depth_mm is None or column_mm is None else (depth_mm, column_mm)),
        ("manifest", sources.manifest_pixel_spacing),
    ]
    pairs = [(source, pair) for source, pair in stated if pair is not None]
    protocol = sources.protocol
    native = protocol.depth_mm if protocol else None
    swapped: tuple[float, float, str] | None = None
    for source, (depth, column) in pairs:
        if _is_credible(source, sources, (depth, column), shape):
            if not (is_plausible("depth", depth) and is_plausible("column", column)):
                notes.append("spacing_coarse_as_stated")
                return depth, column, source, False
            if native is None or _is_close(depth, native, 0.25):
                return depth, column, source, False
            notes.append(f"depth_disagrees_with_protocol_{source}")
            if _is_close(column, native, 0.25) and is_plausible("column", depth):
                notes.append("spacing_swapped")
                return column, depth, source, True
            return depth, column, source, True
        notes.append(f"spacing_implausible_{source}")
        if swapped is None and is_plausible("depth", column) and is_plausible("column", depth):
            swapped = (column, depth, source)
    fixed = (protocol.depth_mm, protocol.column_mm) if protocol else (None, None)
    if protocol and fixed[0] and fixed[1] and is_plausible("depth", fixed[0]) and is_plausible("column", fixed[1]):
        return fixed[0], fixed[1], "protocol", not protocol.exact
    if swapped is not None:
        notes.append("spacing_swapped")
        return *swapped, True
    raise _spacing_unknown(sources, pairs)


def _spacing_unknown(sources: SpacingSources, pairs: Sequence[tuple[str, tuple[float, ...]]]) -> VolumeRejected:
    """Names every axis without a plausible value, and what each source states, in the order slice, depth, column."""
    nominal = sources.protocol.slice_mm if sources.protocol else None
    pitches = [sources.header[0], nominal, *sources.plausible_thicknesses()]
    frames = sources.frame_geometry
    positioned = any(np.isfinite(values).all() for values in (frames.positions_mm, frames.lines_px))
    missing = AXES[1:] if positioned or any(is_plausible("slice", pitch) for pitch in pitches) else AXES
    in_header = any(mm is not None for mm in sources.header)
    stated = [
        f"{source} (depth, column) = ({depth:g}, {column:g})"
        for source, (depth, column) in pairs
        if not (in_header and source == sources.header_source)
    ]
    if in_header:
        texts = ", ".join("unknown" if mm is None else f"{mm:g}" for mm in sources.header)
        stated.append(f"{sources.header_source} (slice, depth, column) = ({texts})")
    limits = ", ".join(f"{axis} {LIMITS_MM[axis][0]:g} to {LIMITS_MM[axis][1]:g}" for axis in AXES)
    return rejection(
        "spacing_unknown",
        f"no plausible spacing of {', '.join(missing)}: {'; '.join(stated) or 'no source names one'}; expected in mm "
        f"{limits}, in this order in a JSON file next to it or by --spacing, or in the header or manifest.tsv",
    )


# Slice


def _pitch_from_positions(
    frames: FrameGeometry, column_mm: float, columns: int, notes: list[str]
) -> tuple[float, str, Int[np.ndarray, " F"], Float[np.ndarray, " F"]] | None:
    """(pitch, source, frame order, positions from 0) by frame positions, else by the scan lines on the fundus image."""
    for source, positions in (
        ("positions", _positions_along_normal(frames)),
        ("frame_location", _positions_on_fundus(frames, column_mm, columns)),
    ):
        if positions is None:
            if source == "positions" and np.isfinite(frames.positions_mm).all():
                notes.append("positions_repeated")
            continue
        if np.ptp(positions) > MAX_SPAN_MM:
            notes.append(f"slice_{source}_implausible")
            continue
        order = np.argsort(positions, kind="stable")
        if np.diff(positions[order]).min() < 1e-4:  # frames that share a position define no order
            notes.append("positions_repeated")
            continue
        sorted_mm = positions[order] - positions[order[0]]
        gaps = np.diff(sorted_mm)
        pitch = round(float(np.median(gaps)), 7)  # differences of decimal texts carry rounding errors
        if not is_plausible("slice", pitch):
            notes.append(f"slice_{source}_implausible")
            continue
        if np.array_equal(order, np.arange(len(order))[::-1]):
            notes.append("frames_reversed")
        elif not np.array_equal(order, np.arange(len(order))):
            notes.append("frames_unordered")
        if np.abs(gaps - pitch).max() > _UNEVEN * pitch:
            notes.append("pitch_uneven")
        if source == "positions" and not _has_fitting_normal(frames):
            notes.append(DIRECTION_UNSTATED)
        return pitch, source, order, sorted_mm
    return None


def _positions_along_normal(frames: FrameGeometry) -> Float[np.ndarray, " F"] | None:
    """Frame positions in mm along the slow axis, or None where any is missing or all are the same."""
    positions = frames.positions_mm
    if not np.isfinite(positions).all():
        return None
    normal = frames.normals[0]
    if not _has_fitting_normal(frames):  # the order of the file decides which end is the first
        normal = _direction_of(positions)
        if normal @ (positions[-1] - positions[0]) < 0:
            normal = -normal
    along = (positions - positions[0]) @ (normal / np.linalg.norm(normal))
    return along if np.ptp(along) > 1e-6 else None


def _direction_of(positions: Float[np.ndarray, "F 3"]) -> Float[np.ndarray, " 3"]:
    """The unit vector along which positions differ most."""
    return np.asarray(np.linalg.svd(positions - positions.mean(axis=0))[2][0])


def _has_fitting_normal(frames: FrameGeometry) -> bool:
    """Whether the first frame states the normal of its plane, which says to which side positions rise.

    A program that does not know the orientation may write a default one (1, 0, 0, 0, 1, 0). Positions that are all in
    its plane, and not along its rows, show that it is not that of the B-scans.
    """
    normal, rows, positions = frames.normals[0], frames.row_directions[0], frames.positions_mm
    length = float(np.linalg.norm(normal))
    if not np.isfinite(normal).all() or length < 1e-6:
        return False
    centred = positions - positions[0]
    spread = float(np.linalg.norm(centred, axis=1).max())
    if spread < 1e-6 or spread < _ASIDE * float(np.ptp(centred @ normal)) / length:
        return True
    return bool(abs(_direction_of(positions) @ rows) > _ALONG_ROWS * np.linalg.norm(rows))


def _positions_on_fundus(frames: FrameGeometry, column_mm: float, columns: int) -> Float[np.ndarray, " F"] | None:
    """Frame positions in mm from parallel lines on the fundus image, whose length in mm is the B-scan's width.

    They rise the way the plane normal does: with columns to the right and depth away from the viewer, it points up.
    """
    lines = frames.lines_px
    if not np.isfinite(lines).all():
        return None
    along = lines[0, 2:] - lines[0, :2]
    length_px = float(np.linalg.norm(along))
    if length_px < 2:
        return None
    across = np.array([-along[1], along[0]]) / length_px
    centres = (lines[:, :2] + lines[:, 2:]) / 2
    offsets = (centres - centres[0]) @ across * (column_mm * columns / length_px)
    return offsets if np.ptp(offsets) > 1e-6 else None


def _pitch_without_positions(
    sources: SpacingSources, shape: Shape, column: float, notes: list[str], positions: str
) -> tuple[float, str, bool]:
    """(pitch, provenance, uncertain) from header, thickness or protocol; `positions` is what they state, in words.

    Raises VolumeRejected spacing_unknown.
    """
    in_header = sources.header[0]
    if in_header is not None:
        if is_plausible("slice", in_header):
            return in_header, sources.header_source, False
        notes.append(f"slice_spacing_implausible_{sources.header_source}")
    frames, _, columns = shape
    nominal = sources.protocol.slice_mm if sources.protocol else None
    for source, value in sources.thicknesses():
        if not is_plausible_thickness(value):
            notes.append(f"slice_thickness_implausible_{source}")
        elif _is_close(value, nominal, 0.1):
            return value, source, False
        elif _is_close(value, column, 0.01) and frames != columns:
            # Cirrus exports overwrite SliceThickness with the column spacing, about four times too small.
            notes.append("slice_thickness_is_column_spacing")
            if nominal is None and FIELD_RATIO[0] * 2 <= frames * value / (columns * column):
                return value, source, True
        else:
            return value, source, True
    if sources.protocol is not None and nominal is not None and is_plausible("slice", nominal):
        return nominal, "protocol", not sources.protocol.exact
    low, high = LIMITS_MM["slice"]
    thicknesses = ", ".join(f"{source} {value:g} mm" for source, value in sources.thicknesses()) or "none is stated"
    raise rejection(
        "spacing_unknown",
        f"slice pitch: none is plausible. Frame positions: {positions} (expected {low:g} to {high:g} mm apart, over "
        f"{MAX_SPAN_MM:g} mm at most). Slice thickness: {thicknesses} (expected {low:g} to {MAX_THICKNESS_MM:g}). No "
        "known protocol. Add slice_thickness to manifest.tsv or give --spacing",
    )


def _describe_gaps(frames: FrameGeometry, column_mm: float, columns: int) -> str:
    """The facts that frame positions, or else the lines on the fundus image, say of the gaps between B-scans, in
    words.
    """
    has_position = np.isfinite(frames.positions_mm).all(axis=1)
    positions = _positions_along_normal(frames)
    positions = _positions_on_fundus(frames, column_mm, columns) if positions is None else positions
    if positions is None:
        missing = (
            f"missing for {int((~has_position).sum())} of {len(has_position)} frames"
            if has_position.any()
            else "none are stated"
        )
        if not has_position.all():
            return missing
        are_equal = np.ptp(frames.positions_mm, axis=0).max() < 1e-6
        return "all the same" if are_equal else "all in the plane of the B-scans"
    gaps = np.diff(np.sort(positions))
    return f"{gaps.min():.3g} to {gaps.max():.3g} mm apart, over {gaps.sum():.3g} mm"


def _is_pitch_doubtful(
    pitch: float, column: float, shape: Shape, sources: SpacingSources, notes: list[str], span: float = 0.0
) -> bool:
    """Whether the slow extent does not fit the fast one, or the pitch does not fit thickness or protocol.

    `span` is from the first position to the last; uneven gaps make it another than pitch times gaps.

    Selected B-scans of a dense scan keep the header's line pitch; the small field is then the only sign that the true
    gaps are wider.
    """
    frames, _, columns = shape
    thickness = next((value for value in sources.plausible_thicknesses() if not _is_close(column, value, 0.01)), None)
    protocol = sources.protocol
    nominal = protocol.slice_mm if protocol is not None and protocol.exact else None
    doubts = {
        "pitch_disagrees_with_thickness": thickness is not None and not _is_close(pitch, thickness, 0.25),
        "field_implausible": not FIELD_RATIO[0]
        <= max(frames * pitch, span + pitch) / (columns * column)
        <= FIELD_RATIO[1],
        "pitch_disagrees_with_protocol": nominal is not None and not _is_close(pitch, nominal, 0.25),
    }
    notes += [note for note, holds in doubts.items() if holds]
    return any(doubts.values())


def _gap_differs(pitch: float, positions: Float[np.ndarray, " F"] | None) -> bool:
    """Whether the median gap between positions differs from `pitch` by more than a quarter."""
    if positions is None:
        return False
    gap = float(np.median(np.diff(np.sort(positions))))
    return gap > 1e-4 and not _is_close(pitch, gap, 0.25)


def _order_by_number(frames: FrameGeometry, notes: list[str]) -> Int[np.ndarray, " F"]:
    """The order of the in-stack numbers if they are complete, else that of the file."""
    numbers = frames.in_stack
    stored = np.arange(len(numbers))
    if not np.isfinite(numbers).all() or len(np.unique(numbers)) != len(numbers):
        return stored
    order = np.argsort(numbers, kind="stable")
    if not np.array_equal(order, stored):
        notes.append("frames_unordered")
    return order


def _is_close(a: float, b: float | None, tolerance: float) -> bool:
    return b is not None and abs(a - b) <= tolerance * b
