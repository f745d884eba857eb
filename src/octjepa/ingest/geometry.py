"""The spacing of each axis, from ordered sources, within plausible limits, with its provenance; never a default.

Slice pitch: frame positions, frame location on the fundus image, per-frame and shared slice thickness, manifest, the
protocol's known field over its lines. Row and column: shared Pixel Measures, per-frame, manifest, protocol.
A value outside the limits is passed over and noted. DepthSpatialResolution is optical resolution and is not used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float

from octjepa.errors import VolumeRejected
from octjepa.ingest.protocols import ProtocolSpacing
from octjepa.ingest.raw_scan import FrameGeometry
from octjepa.ingest.reasons import rejection
from octjepa.volume import AXES, Pattern

LIMITS_MM = {"slice": (0.002, 0.5), "depth": (0.001, 0.01), "column": (0.002, 0.06)}
FIELD_RATIO = (
    0.25,
    4.0,
)  # slow extent over fast extent of a whole scan; outside, frames are missing or the pitch is wrong
EXTENT_MM = {"slice": (0.5, 30.0), "depth": (0.3, 8.0), "column": (0.5, 30.0)}  # of a whole scan; no OCT has another
_WHOLE = {"slice": 16, "depth": 160, "column": 128}  # samples; fewer may be a part of a scan
MAX_SPAN_MM = 40.0  # of all frame positions; the widest OCT fields are about 24 mm
_UNEVEN = 0.05  # relative deviation of a gap from the median gap that is worth a note


@dataclass
class Geometry:
    """`order` puts the file's frames into spatial order; `positions_mm` [D] are theirs along the slow axis, from 0."""

    spacing_mm: tuple[float, float, float]
    provenance: dict[str, str]
    order: np.ndarray
    positions_mm: Float[np.ndarray, " D"] | None = None
    uncertain: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SpacingSources:
    """Everything that names a spacing, in mm; None where silent."""

    facts: FrameGeometry
    shared_pair: tuple[float, float] | None
    shared_thickness: float | None
    manifest_pair: tuple[float, float] | None
    manifest_thickness: float | None
    known: ProtocolSpacing | None
    header: tuple[float | None, float | None, float | None] = (None, None, None)
    header_is: str = "header"  # or "sidecar": the JSON beside the scan
    option: tuple[float, float, float] | None = None


def plausible(axis: str, value: float | None) -> bool:
    low, high = LIMITS_MM[axis]
    return value is not None and low <= value <= high


def _along_normal(facts: FrameGeometry) -> np.ndarray | None:
    """Frame positions in mm along the slow axis, or None where any is missing or all are the same."""
    positions = facts.positions_mm
    if not np.isfinite(positions).all():
        return None
    normal = facts.normals[0]
    centred = positions - positions[0]
    if not np.isfinite(normal).all() or np.linalg.norm(normal) < 1e-6:
        normal = np.linalg.svd(centred - centred.mean(axis=0))[2][0]
        if normal @ (positions[-1] - positions[0]) < 0:
            normal = -normal
    along = centred @ (normal / np.linalg.norm(normal))
    return along if np.ptp(along) > 1e-6 else None


def _along_fundus(facts: FrameGeometry, column_mm: float, columns: int) -> np.ndarray | None:
    """Frame positions in mm from parallel lines on the fundus image, whose length in mm is the B-scan's width.

    They rise the way the plane normal does: with rows to the right and depth away from the viewer, it points up.
    """
    lines = facts.lines_px
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


def _ordered(positions: np.ndarray, notes: list[str]) -> np.ndarray | None:
    """Order of rising positions; None where frames share a position, so that they tell no order."""
    order = np.argsort(positions, kind="stable")
    if np.diff(positions[order]).min() < 1e-4:
        notes.append("positions_repeated")
        return None
    if np.array_equal(order, np.arange(len(order))[::-1]):
        notes.append("frames_reversed")
    elif not np.array_equal(order, np.arange(len(order))):
        notes.append("frames_unordered")
    return order


def _pair(sources: SpacingSources, notes: list[str]) -> tuple[float, float, str, bool]:
    """(row, column, provenance, uncertain). Raises VolumeRejected spacing_unknown."""
    per_frame = sources.facts.spacing_mm[np.isfinite(sources.facts.spacing_mm).all(axis=1)]
    median = None if not len(per_frame) else (float(np.median(per_frame[:, 0])), float(np.median(per_frame[:, 1])))
    if len(per_frame) and np.ptp(per_frame[:, 1]) > 0.02 * np.median(per_frame[:, 1]):
        notes.append("column_spacing_varies")
    known = sources.known
    fixed = (
        None if known is None or known.row_mm is None or known.column_mm is None else (known.row_mm, known.column_mm)
    )
    _, row_mm, column_mm = sources.header
    in_header = None if row_mm is None or column_mm is None else (row_mm, column_mm)
    option = None if sources.option is None else sources.option[1:]
    named = [
        ("option", option), ("shared", sources.shared_pair), ("per_frame", median), (sources.header_is, in_header),
        ("manifest", sources.manifest_pair),
    ]  # fmt: skip
    swapped: tuple[float, float, str] | None = None
    for source, pair in named:
        if pair is None:
            continue
        row, column = pair
        if plausible("depth", row) and plausible("column", column):
            native = known.row_mm if known is not None else None
            if native is not None and not _agree(row, native, 0.25):
                notes.append(f"depth_disagrees_with_protocol_{source}")
                if _agree(column, native, 0.25) and plausible("column", row):
                    notes.append("spacing_swapped")
                    return column, row, source, True
                return row, column, source, True
            return row, column, source, False
        notes.append(f"spacing_implausible_{source}")
        if swapped is None and plausible("depth", column) and plausible("column", row):
            swapped = (column, row, source)
    if fixed is not None and plausible("depth", fixed[0]) and plausible("column", fixed[1]):
        return *fixed, "protocol", not (known is not None and known.exact)
    if swapped is not None:
        notes.append("spacing_swapped")
        return *swapped, True
    raise _unknown(sources, [(source, pair) for source, pair in named if pair])


def _unknown(sources: SpacingSources, pairs: list[tuple[str, tuple[float, float]]]) -> VolumeRejected:
    """Names every axis that has no plausible value, and what each source said, in the order slice, depth, column."""
    nominal = sources.known.slice_mm if sources.known else None
    pitches = [sources.header[0], nominal, *(value for _, value in _thickness_sources(sources))]
    placed = any(np.isfinite(values).all() for values in (sources.facts.positions_mm, sources.facts.lines_px))
    missing = AXES[1:] if placed or any(plausible("slice", pitch) for pitch in pitches) else AXES
    said = [f"{source} (depth, column) = ({row:g}, {column:g})" for source, (row, column) in pairs]
    if any(mm is not None for mm in sources.header):
        texts = ", ".join("unknown" if mm is None else f"{mm:g}" for mm in sources.header)
        said = [text for text in said if not text.startswith(sources.header_is)]
        said.append(f"{sources.header_is} (slice, depth, column) = ({texts})")
    limits = ", ".join(f"{axis} {LIMITS_MM[axis][0]:g} to {LIMITS_MM[axis][1]:g}" for axis in AXES)
    return rejection(
        "spacing_unknown",
        f"no plausible spacing of {', '.join(missing)}: {'; '.join(said) or 'no source names one'}; expected in mm "
        f"{limits}, in this order in a JSON file beside it or by --spacing, or in the header or manifest.tsv",
    )


def far_from_any_oct(shape: tuple[int, int, int], spacing_mm: tuple[float, float, float]) -> tuple[str, ...]:
    """The axes along which the scan is shorter or longer than any OCT; a part of a scan may be short."""
    found = []
    for axis, length, mm in zip(AXES, shape, spacing_mm, strict=True):
        low, high = EXTENT_MM[axis]
        if length * mm > high or (length * mm < low and length >= _WHOLE[axis]):
            found.append(axis)
    return tuple(found)


def _thickness_sources(sources: SpacingSources) -> Iterable[tuple[str, float | None]]:
    thickness = sources.facts.thickness_mm[np.isfinite(sources.facts.thickness_mm)]
    yield "per_frame", float(np.median(thickness)) if len(thickness) else None
    yield "shared", sources.shared_thickness
    yield "manifest", sources.manifest_thickness


def _agree(a: float, b: float | None, tolerance: float) -> bool:
    return b is not None and abs(a - b) <= tolerance * b


def _pitch_without_positions(
    sources: SpacingSources, shape: tuple[int, int, int], column: float, notes: list[str]
) -> tuple[float, str, bool]:
    """(pitch, provenance, uncertain) from header, thickness or protocol. Raises VolumeRejected spacing_unknown."""
    in_header = sources.header[0]
    if in_header is not None:
        if plausible("slice", in_header):
            return in_header, sources.header_is, False
        notes.append(f"slice_spacing_implausible_{sources.header_is}")
    frames, _, columns = shape
    nominal = sources.known.slice_mm if sources.known else None
    for source, value in _thickness_sources(sources):
        if value is None:
            continue
        if not plausible("slice", value):
            notes.append(f"slice_thickness_implausible_{source}")
        elif _agree(value, nominal, 0.1):
            return value, source, False
        elif _agree(value, column, 0.01) and frames != columns:
            # Cirrus exports overwrite SliceThickness with the column spacing, about four times too small.
            notes.append("slice_thickness_is_column_spacing")
            if nominal is None and FIELD_RATIO[0] * 2 <= frames * value / (columns * column):
                return value, source, True
        else:
            return value, source, True
    if plausible("slice", nominal) and sources.known is not None and nominal is not None:
        return nominal, "protocol", not sources.known.exact
    raise rejection(
        "spacing_unknown",
        "slice pitch: no frame positions, no plausible slice thickness and no known protocol; expected "
        f"{LIMITS_MM['slice'][0]} to {LIMITS_MM['slice'][1]} mm; add slice_thickness to manifest.tsv or give --spacing",
    )


def _order_without_positions(facts: FrameGeometry, frames: int, notes: list[str]) -> np.ndarray:
    order = np.arange(frames)
    numbers = facts.in_stack
    if np.isfinite(numbers).all() and len(np.unique(numbers)) == frames:
        order = np.argsort(numbers, kind="stable")
        if not np.array_equal(order, np.arange(frames)):
            notes.append("frames_unordered")
    return order


def resolve(sources: SpacingSources, shape: tuple[int, int, int], pattern: Pattern) -> Geometry:
    """Spacing, order and provenance for `shape` [D, H, W]. Raises VolumeRejected spacing_unknown."""
    geometry = _resolved(sources, shape, pattern)
    far = [axis for axis in far_from_any_oct(shape, geometry.spacing_mm) if axis != "slice" or pattern == "raster"]
    if far:
        geometry.notes.append("extent_implausible")
        geometry.uncertain = tuple(axis for axis in AXES if axis in far or axis in geometry.uncertain)
    return geometry


def _resolved(sources: SpacingSources, shape: tuple[int, int, int], pattern: Pattern) -> Geometry:
    frames, _, columns = shape
    notes: list[str] = []
    row, column, pair_source, pair_uncertain = _pair(sources, notes)
    uncertain = ["depth", "column"] if pair_uncertain else []
    provenance = {"slice": "", "depth": pair_source, "column": pair_source}
    if pattern != "raster":
        # The lines turn round one centre: the arc between neighbours, half way out, stands for a pitch.
        pitch = float(np.pi * column * columns / 2 / (2 * frames))
        provenance["slice"] = "scan_pattern"
        order = _order_without_positions(sources.facts, frames, notes)
        return Geometry((pitch, row, column), provenance, order, None, (*uncertain, "slice"), notes)

    if sources.option is not None and plausible("slice", sources.option[0]):
        return _as_asked(sources, sources.option, shape, pattern, notes)
    for source, positions in (
        ("positions", _along_normal(sources.facts)),
        ("frame_location", _along_fundus(sources.facts, column, columns)),
    ):
        if positions is None:
            if source == "positions" and np.isfinite(sources.facts.positions_mm).all():
                notes.append("positions_repeated")
            continue
        if np.ptp(positions) > MAX_SPAN_MM:
            notes.append(f"slice_{source}_implausible")
            continue
        rising = _ordered(positions, notes)
        if rising is None:
            continue
        order = rising
        placed = positions[order] - positions[order[0]]
        gaps = np.diff(placed)
        pitch = round(float(np.median(gaps)), 7)  # differences of decimal texts carry float dust
        if not plausible("slice", pitch):
            notes.append(f"slice_{source}_implausible")
            continue
        if np.abs(gaps - pitch).max() > _UNEVEN * pitch:
            notes.append("pitch_uneven")
        provenance["slice"] = source
        doubt = _doubtful(pitch, column, shape, sources, notes)
        if source == "positions" and _elsewhere(pitch, _along_fundus(sources.facts, column, columns)):
            notes.append("positions_disagree_with_location")  # no doubt: converters make lines up
        if doubt:
            uncertain.append("slice")
        return Geometry((pitch, row, column), provenance, order, placed, tuple(uncertain), notes)

    notes.append("positions_missing")
    pitch, provenance["slice"], doubt = _pitch_without_positions(sources, shape, column, notes)
    if _doubtful(pitch, column, shape, sources, notes) or doubt:
        uncertain.append("slice")
    order = _order_without_positions(sources.facts, frames, notes)
    return Geometry((pitch, row, column), provenance, order, None, tuple(uncertain), notes)


def _as_asked(
    sources: SpacingSources, spacing: tuple[float, float, float], shape: tuple[int, int, int], pattern: Pattern,
    notes: list[str],
) -> Geometry:  # fmt: skip
    """The user's spacing, and the order that the file tells; where the file says another spacing, it is noted."""
    provenance = dict.fromkeys(AXES, "option")
    try:
        told = resolve(replace(sources, option=None), shape, pattern)
    except VolumeRejected:  # the file knows no spacing: the very reason to be asked
        order = _order_without_positions(sources.facts, shape[0], notes)
    else:
        order = told.order
        notes += [note for note in told.notes if note.startswith("frames_")]
        axes = zip(AXES, spacing, told.spacing_mm, strict=True)
        notes += [f"option_disagrees_{axis}" for axis, asked, found in axes if not _agree(asked, found, 0.02)]
    _doubtful(spacing[0], spacing[2], shape, sources, notes)
    return Geometry(spacing, provenance, order, None, (), notes)


def _elsewhere(pitch: float, location: np.ndarray | None) -> bool:
    """Whether the lines on the fundus image lie more than a quarter closer or wider than `pitch` mm."""
    if location is None:
        return False
    gap = float(np.median(np.diff(np.sort(location))))
    return gap > 1e-4 and not _agree(pitch, gap, 0.25)


def _doubtful(
    pitch: float, column: float, shape: tuple[int, int, int], sources: SpacingSources, notes: list[str]
) -> bool:
    """True where the slow extent does not fit the fast one, or the pitch does not fit a protocol of fixed field.

    A dense programme's B-scans, picked out and laid side by side, keep the header's line pitch; the small field is then
    the only trace that the true gaps are wider.
    """
    frames, _, columns = shape
    named = [value for _, value in _thickness_sources(sources) if plausible("slice", value)]
    thickness = next((value for value in named if not _agree(column, value, 0.01)), None)
    thick = thickness is not None and not _agree(pitch, thickness, 0.25)
    if thick:
        notes.append("pitch_disagrees_with_thickness")
    ratio = frames * pitch / (columns * column)
    implausible = not FIELD_RATIO[0] <= ratio <= FIELD_RATIO[1]
    if implausible:
        notes.append("field_implausible")
    known = sources.known
    disagrees = (
        known is not None and known.exact and known.slice_mm is not None and not _agree(pitch, known.slice_mm, 0.25)
    )
    if disagrees:
        notes.append("pitch_disagrees_with_protocol")
    return implausible or disagrees or thick
