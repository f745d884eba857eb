"""How much of a scan's tissue is outside the part of the grid that encoders read, axis by axis.

A scan may be wider than the grid (a field of 12 mm), longer (more B-scans) or its retina thicker (macular oedema).
What is outside is cut without a trace in the pixels, so each volume's index entry holds the shares that are cut,
and `octjepa plan --store` reports them for the cohort of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int16

from octjepa.canonical.resample import centred_positions
from octjepa.recipe import Preprocessing
from octjepa.record import Record

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.canonical.surfaces import Surfaces

AXES = ("slice", "depth", "column")
COLUMNS = tuple(f"outside_{axis}" for axis in AXES)  # of a store's index
NOTE_FIELD = 0.2  # a volume with more of its field outside, across or along the B-scans, gets a note
NOTE_DEPTH = 0.001  # so does one with more of its tissue outside in depth: what is cut there is the height of an oedema


def share_of_positions_outside(positions_mm: Float[np.ndarray, " n"], count: int, spacing_mm: float) -> float:
    """Share of native samples beyond `count` canonical voxels of `spacing_mm` about 0."""
    return float((np.abs(positions_mm) > count * spacing_mm / 2 + 1e-9).mean())


def share_of_depth_outside(
    ilm: Float[np.ndarray, "N C"], bottom: Float[np.ndarray, "N C"], first: int, last: int
) -> float:
    """Share of the tissue between two surfaces, in depth indices, outside `first`..`last`."""
    above = np.minimum(first, bottom) - np.minimum(ilm, first)
    below = np.maximum(bottom, last) - np.maximum(last, ilm)
    thickness = np.maximum(bottom - ilm, 1e-6)
    return float((above + below).sum() / thickness.sum())


def shares_outside(
    frame_mm: Float[np.ndarray, " D"],
    width: int,
    column_mm: float,
    surfaces: Surfaces,
    shifts: Int16[np.ndarray, "N C"],
    below_bruch: float,
    preprocessing: Preprocessing,
) -> dict[str, float]:
    """{column of the index: share of the scan's tissue outside the centred view along that axis}.

    frame_mm: positions of the native B-scans. width, column_mm: native columns and their spacing. surfaces and shifts:
    of the B-scans and columns within the stored grid. below_bruch: depth indices of tissue under Bruch's membrane.
    """
    (d, h, w), (tz, _, tx) = preprocessing.image_size, preprocessing.target_spacing_mm
    first = preprocessing.margin[1]
    depth = share_of_depth_outside(surfaces.ilm + shifts, surfaces.bm + shifts + below_bruch, first, first + h - 1)
    return {
        "outside_slice": share_of_positions_outside(frame_mm, d, tz),
        "outside_depth": depth,
        "outside_column": share_of_positions_outside(centred_positions(width, column_mm), w, tx),
    }


def field_outside(shares: Mapping[str, float]) -> float:
    """The share of the field outside along the slices or the columns."""
    return 1 - (1 - shares["outside_slice"]) * (1 - shares["outside_column"])


def coverage_notes(shares: Mapping[str, float]) -> list[str]:
    """The notes `field_outside=0.33` and `depth_outside=0.012` where the shares are above their limits."""
    field, depth = field_outside(shares), shares["outside_depth"]
    notes = [f"field_outside={field:.2f}"] if field > NOTE_FIELD else []
    return [*notes, f"depth_outside={depth:.3f}"] if depth > NOTE_DEPTH else notes


@dataclass(frozen=True)
class CohortCoverage(Record):
    """How much of the tissue of a cohort's `volumes` is outside the grid: mean shares by axis.

    `field_cut` and `depth_cut` count the volumes above `NOTE_FIELD` and above `NOTE_DEPTH`. `image_size_needed` holds
    the slices and columns that would hold 95 % of the volumes whole.
    """

    slice: float
    depth: float
    column: float
    volumes: int
    field_cut: int
    depth_cut: int
    image_size_needed: dict[str, int]

    def describe(self) -> str:
        """One sentence for people."""
        parts = f"slice {self.slice:.1%}, depth {self.depth:.1%}, column {self.column:.1%}"
        needed = ", ".join(f"{count} voxels along {axis}" for axis, count in self.image_size_needed.items())
        return (
            f"{parts} outside the view of preprocessing.image_size. Of {self.volumes} volumes "
            f"{self.field_cut} lose more than {NOTE_FIELD:.0%} of the field, {self.depth_cut} more than "
            f"{NOTE_DEPTH:.1%} in depth. To hold 95 % of the fields whole it takes {needed}, or a coarser "
            "target_spacing_mm"
        )


def cohort_coverage(
    table: pd.DataFrame, volume_ids: Sequence[str], preprocessing: Preprocessing
) -> CohortCoverage | None:
    """The coverage that `octjepa plan` reports for the volumes `volume_ids` of a store's table.

    Volumes without these measurements are left out. Returns None if no volume is left.
    """
    chosen = table[table["volume_id"].isin(list(volume_ids))].dropna(subset=list(COLUMNS))
    if not len(chosen):
        return None
    shares = [dict(zip(COLUMNS, map(float, row), strict=True)) for row in chosen[list(COLUMNS)].to_numpy()]
    (tz, _, tx), (d, _, w) = preprocessing.target_spacing_mm, preprocessing.image_size
    extents = {
        "slice": (chosen["native_d"] * chosen["spacing_z_mm"] / tz, d),
        "column": (chosen["native_w"] * chosen["spacing_x_mm"] / tx, w),
    }
    return CohortCoverage(
        **{axis: float(np.mean([share[f"outside_{axis}"] for share in shares])) for axis in AXES},
        volumes=len(chosen),
        field_cut=sum(field_outside(share) > NOTE_FIELD for share in shares),
        depth_cut=sum(share["outside_depth"] > NOTE_DEPTH for share in shares),
        image_size_needed={
            axis: max(int(np.ceil(np.percentile(extent, 95) - 0.05)), now) for axis, (extent, now) in extents.items()
        },
    )
