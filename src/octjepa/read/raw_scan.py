"""The result of a format's reader: the pixels in stored order and everything that the file states, uninterpreted.

`octjepa.read.reader` decides for all formats alike which spacing, frame order, eye and person to believe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, UInt8

from octjepa.volume import Pattern

AxisSpacing = tuple[float | None, float | None, float | None]  # (slice, depth, column) in mm, None where unknown


@dataclass(frozen=True)
class FrameGeometry:
    """The geometry of each frame (first axis F), NaN where the file does not state it.

    `row_directions` point along a B-scan's columns, as DICOM's row direction cosines do. `lines_px` are the first and
    last point (row, column) of the scan line on the fundus image; `curved` marks lines with more than two points, or
    called NONLINEAR. `in_stack` is InStackPositionNumber. `spacing_mm` is (depth, column). `en_face` marks
    frames that are called a localizer, an en face or another image than a B-scan. `by_line` marks frames whose
    direction and normal follow from their line on the fundus image, whichever way their rows run.
    """

    positions_mm: Float[np.ndarray, "F 3"]
    row_directions: Float[np.ndarray, "F 3"]
    normals: Float[np.ndarray, "F 3"]
    lines_px: Float[np.ndarray, "F 4"]
    curved: Bool[np.ndarray, " F"]
    in_stack: Float[np.ndarray, " F"]
    spacing_mm: Float[np.ndarray, "F 2"]
    thickness_mm: Float[np.ndarray, " F"]
    en_face: Bool[np.ndarray, " F"]
    by_line: Bool[np.ndarray, " F"]

    @classmethod
    def unknown(cls, frames: int) -> FrameGeometry:
        """The geometry of a format that states nothing about single frames."""

        def missing(*shape: int) -> Float[np.ndarray, "F ..."]:
            return np.full((frames, *shape), np.nan)

        return cls(
            missing(3),
            missing(3),
            missing(3),
            missing(4),
            np.zeros(frames, bool),
            missing(),
            missing(2),
            missing(),
            np.zeros(frames, bool),
            np.zeros(frames, bool),
        )

    def take(self, index: np.ndarray) -> FrameGeometry:
        """The frames that `index`, an index array or a mask, selects."""
        return FrameGeometry(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class HeaderFields:
    """Identity and acquisition as the file states them, verbatim; "" where absent.

    `person_name`, `birth_date` and `also_personal` (other ids, numbers and names) only serve to detect texts that
    repeat them, and with `sex` to detect two people under one id. They are never stored. `visit` names the
    session (a study UID, a date), of which only a hash is stored. `burned_in` is BurnedInAnnotation = YES.
    """

    person_id: str = ""
    person_name: str = ""
    birth_date: str = ""
    sex: str = ""
    also_personal: tuple[str, ...] = ()
    laterality: str = ""
    frame_laterality: str = ""
    manufacturer: str = ""
    model: str = ""
    protocol: str = ""
    region: str = ""
    site: str = ""
    visit: str = ""
    uid: str = ""
    burned_in: bool = False


@dataclass(frozen=True)
class StoredAxes:
    """The statement of a format about the order in which an array stores its axes; words of D, H and W, "" for nothing.

    `stated` is what the file itself states, `convention` what the format's users do, which is `known` to hold where
    the format has no other order (a stack of B-scan images). `spacing_mm` is that of the axes as they are stored, and
    `uncertain` lists those of them (0, 1, 2) whose spacing the file contradicts.
    """

    convention: str = ""
    known: bool = False
    stated: str = ""
    spacing_mm: AxisSpacing = (None, None, None)
    uncertain: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class RawScan:
    """One scan as its file stores it; axis 0 are the frames, unless `axes` are still open.

    `pixel_spacing_mm` (depth, column) and `thickness_mm` are DICOM's shared Pixel Measures; `spacing_mm` is the
    spacing of other formats' headers, and `spacing_from` is "sidecar" where the JSON next to the scan states it.
    `pattern` is None where the format does not name it. `uncertain` lists axes whose spacing the format only
    estimates. `labels` come from the same file. `personal` names the fields of personal data that the file fills.
    `localizer` is the fundus picture of the same file.
    """

    format: str
    pixels: UInt8[np.ndarray, "F H W"]
    frame_geometry: FrameGeometry
    header: HeaderFields = HeaderFields()
    pixel_spacing_mm: tuple[float, float] | None = None
    thickness_mm: float | None = None
    spacing_mm: AxisSpacing = (None, None, None)
    spacing_from: str = "header"
    pattern: Pattern | None = None
    uncertain: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    labels: Mapping[str, float | str] = field(default_factory=dict)
    localizer: UInt8[np.ndarray, "h w"] | None = None
    personal: tuple[str, ...] = ()
    axes: StoredAxes | None = None
