"""One eye per device as the store holds it: a central B-scan with its tissue band, en face view, and measured geometry.

The eye shown is not chosen by its looks: it is the device's first raster volume by id, held-out people first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int, Int16, UInt8
from markupsafe import Markup

from octjepa.notes import read_codes
from octjepa.report.figures import svg
from octjepa.store.index import IndexEntry, entries_of

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.recipe import Recipe
    from octjepa.store import Store
    from octjepa.volume import CanonicalVolume

BARS_MM = (0.2, 1.0)
SLAB_MM = 0.25
MAX_SLICES = 9  # of the strip through a volume


@dataclass(frozen=True)
class AxisGeometry:
    """One axis of a native scan: samples, spacing and where the spacing comes from."""

    axis: str
    meaning: str
    count: int
    spacing_mm: float
    extent_mm: float
    provenance: str
    uncertain: bool


# Axis, what it runs along, and the letters of its native size and of its spacing in a store's index.
AXES = (
    ("slice", "between B-scans", "d", "z"),
    ("depth", "along an A-scan", "h", "y"),
    ("column", "along a B-scan", "w", "x"),
)


@dataclass(frozen=True)
class EyePicture:
    """A row of the store's index with its two pictures and native geometry; `stretch` is the drawn depth's.

    `slices` are B-scans from first to last with tissue, each with its number from 1.
    """

    row: IndexEntry
    axes: tuple[AxisGeometry, ...]
    b_scan: Markup
    en_face: Markup
    stretch: float
    slices: tuple[tuple[int, Markup], ...] = ()


def volume_title(entry: IndexEntry) -> str:
    """Device, eye and id of a volume in one line."""
    return f"{entry.device}, {entry.eye or 'eye unknown'}, volume {entry.volume_id}"


def native_geometry(entry: IndexEntry) -> tuple[AxisGeometry, ...]:
    """The native geometry of a volume, axis by axis."""
    uncertain = read_codes(entry.uncertain)
    return tuple(
        AxisGeometry(axis, meaning, count, spacing_mm, count * spacing_mm, provenance, axis in uncertain)
        for (axis, meaning, *_), count, spacing_mm, provenance in zip(
            AXES, entry.shape, entry.spacing_mm, entry.provenance, strict=True
        )
    )


def en_face(
    pixels: UInt8[np.ndarray, "D H W"], band: Int16[np.ndarray, "2 D W"], depth_mm: float
) -> UInt8[np.ndarray, "D W"]:
    """Mean over the lowest `SLAB_MM` of every A-scan's tissue band, at full contrast; black if there is no tissue.

    The slab holds the photoreceptors, pigment epithelium and inner choroid: bright, even, and shadowed by vessels.
    `depth_mm` is the spacing in depth.
    """
    depths = np.arange(pixels.shape[1], dtype=np.int16)[None, :, None]
    top = np.maximum(band[0], band[1] - round(SLAB_MM / depth_mm))
    inside = (depths >= top[:, None]) & (depths < band[1][:, None]) & (band[0][:, None] >= 0)  # [D, H, W]
    count, total = (_three_columns(np.where(inside, values, 0).sum(axis=1)) for values in (1.0, pixels))  # [D, W]
    mean = total / np.maximum(count, 1)
    covered = mean[count > 0]
    if not covered.size:
        return np.zeros(mean.shape, np.uint8)
    low, high = np.percentile(covered, [0.5, 99.5])
    stretched = np.clip((mean - low) / max(high - low, 1e-6), 0, 1) * 255
    return np.where(count > 0, stretched, 0).astype(np.uint8)


def central(tissue: Int[np.ndarray, " n"]) -> int:
    """The slices, of n, to show of a scan that may fill a part of the grid alone, by their amounts of tissue.

    The slice nearest to the middle that holds at least half as much as the fullest; the middle if none holds any.
    """
    filled = np.flatnonzero(2 * tissue >= max(int(tissue.max()), 1))
    middle = len(tissue) // 2
    return int(filled[np.abs(filled - middle).argmin()]) if len(filled) else middle


def central_slice(volume: CanonicalVolume, recipe: Recipe, slab: int) -> int:
    """The slice of the centred view to show of the grid's `slab`, as `central` chooses it."""
    thick = recipe.tokens.patch_size[0]
    first = slab * thick
    start = recipe.preprocessing.margin[0] + first  # in the stored volume
    tissue = (np.asarray(volume.band[0])[start : start + thick] >= 0).sum(axis=1)
    return first + central(tissue)


def _three_columns(sums: Float[np.ndarray, "D W"]) -> Float[np.ndarray, "D W"]:
    """Sums over each column and its two neighbours: speckle is finer than the distance between B-scans anyway."""
    padded = np.pad(sums.astype(np.float64), ((0, 0), (1, 1)))
    return padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]


def en_face_scan(
    face: UInt8[np.ndarray, "D W"], alt: str, overlays: list[Markup], cut: float, spacing_mm: tuple[float, float, float]
) -> Markup:
    """An en face view in true proportions, with the line of the B-scan at slice position `cut`."""
    depth, width = face.shape
    return svg.scan(
        face,
        alt,
        [*overlays, svg.line([(0, cut), (width, cut)], "cut")],
        aspect=depth * spacing_mm[0] / (width * spacing_mm[2]),
        upscale=(8, 2),
    )


def through_the_volume(tissue: Int[np.ndarray, " n"], count: int = MAX_SLICES) -> list[int]:
    """At most `count` of n slices, evenly from the first to the last that holds tissue."""
    filled = np.flatnonzero(tissue > 0)
    if not len(filled):
        return []
    return [int(number) for number in np.unique(np.linspace(filled[0], filled[-1], count).round())]


def extreme_volumes(table: pd.DataFrame, count: int = 3) -> dict[str, list[IndexEntry]]:
    """The raster volumes of lowest and of highest quality, `count` of each at most and none in both."""
    rasters = table[(table["pattern"] == "raster") & table["quality"].notna()].sort_values(["quality", "volume_id"])
    each = min(count, len(rasters) // 2)
    return {"lowest": entries_of(rasters.head(each)), "highest": entries_of(rasters.tail(each))[::-1]}


def central_picture(store: Store, entry: IndexEntry) -> Markup:
    """The central B-scan of a volume."""
    volume = store.read(entry.volume_id)
    centre = central((np.asarray(volume.band[0]) >= 0).sum(axis=1))
    return svg.scan(np.asarray(volume.pixels[centre]), f"Central B-scan: {volume_title(entry)}")


def eye_picture(store: Store, entry: IndexEntry) -> EyePicture:
    """The pictures of a volume."""
    volume = store.read(entry.volume_id)
    spacing = store.preprocessing.target_spacing_mm
    pixels, band = np.asarray(volume.pixels), np.asarray(volume.band)
    centre = central((band[0] >= 0).sum(axis=1))
    surfaces = band[:, centre].astype(np.float64)  # [2, W]
    lines = [part for surface in np.where(surfaces[0] < 0, np.nan, surfaces) for part in svg.boundary(surface, "band")]
    bars = svg.scale_bars(pixels.shape[1:], spacing[1:], BARS_MM)
    title = volume_title(entry)
    return EyePicture(
        entry,
        native_geometry(entry),
        svg.scan(pixels[centre], f"Central B-scan with tissue mask: {title}", [*lines, bars]),
        en_face_scan(en_face(pixels, band, spacing[1]), f"En face projection: {title}", [], centre + 0.5, spacing),
        svg.depth_stretch(pixels.shape[1:], spacing[1:]),
        tuple(
            (number + 1, svg.scan(pixels[number], f"B-scan {number + 1}: {title}", upscale=(1, 1)))
            for number in through_the_volume((band[0] >= 0).sum(axis=1))
        ),
    )
