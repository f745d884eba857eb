"""One eye per device as the store holds it: central B-scan with its tissue band, en face, and the measured geometry.

Which eye is shown is not chosen by its looks: it is the device's first raster volume by id, held-out people first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int16, UInt8
from markupsafe import Markup

from octjepa.report.figures import scan

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.store import CanonicalVolume, Store

AXES = (("slice", "z", "between B-scans"), ("depth", "y", "along an A-scan"), ("column", "x", "along a B-scan"))
BARS_MM = (0.2, 1.0)
SLAB_MM = 0.25
_HELD_OUT_FIRST = {"test": 0, "val": 1, "train": 2}


@dataclass(frozen=True)
class AxisGeometry:
    axis: str
    meaning: str
    count: int
    spacing_mm: float
    extent_mm: float
    provenance: str
    uncertain: bool


@dataclass(frozen=True)
class EyePicture:
    """One eye's two pictures and its native geometry per axis."""

    volume_id: str
    device: str
    eye: str
    laterality_source: str
    split: str
    protocol: str
    axes: tuple[AxisGeometry, ...]
    b_scan: Markup
    en_face: Markup
    stretch: float


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a store's table, keyed by column."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def one_per_device(table: pd.DataFrame, splits: tuple[str, ...] = ("test", "val", "train", "")) -> list[dict[str, Any]]:
    """The first raster volume by id of each device, from the first of `splits` in which the device has one."""
    rows = [row for row in records(table) if row["pattern"] == "raster" and row["split"] in splits]
    rows.sort(key=lambda row: (row["device"], _HELD_OUT_FIRST.get(row["split"], 3), row["volume_id"]))
    chosen: dict[str, dict[str, Any]] = {}
    for row in rows:
        chosen.setdefault(row["device"], row)
    return list(chosen.values())


def geometry_of(row: Mapping[str, Any]) -> tuple[AxisGeometry, ...]:
    """The native geometry of a store row, axis by axis, with where each spacing comes from."""
    uncertain = set(str(row["uncertain"]).split(";"))
    counts = (row["native_d"], row["native_h"], row["native_w"])
    return tuple(
        AxisGeometry(
            axis,
            meaning,
            int(count),
            float(row[f"spacing_{letter}_mm"]),
            int(count) * float(row[f"spacing_{letter}_mm"]),
            str(row[f"provenance_{axis}"]),
            axis in uncertain,
        )
        for (axis, letter, meaning), count in zip(AXES, counts, strict=True)
    )


def en_face(
    pixels: UInt8[np.ndarray, "D H W"], band: Int16[np.ndarray, "2 D W"], row_mm: float
) -> UInt8[np.ndarray, "D W"]:
    """Mean over the lowest `SLAB_MM` of every A-scan's tissue band, at full contrast; black where there is no tissue.

    The slab holds the photoreceptors, pigment epithelium and inner choroid: bright, even, and shadowed by vessels.
    """
    rows = np.arange(pixels.shape[1], dtype=np.int16)[None, :, None]
    top = np.maximum(band[0], band[1] - round(SLAB_MM / row_mm))
    inside = (rows >= top[:, None]) & (rows < band[1][:, None]) & (band[0][:, None] >= 0)
    count, total = (_three_columns(np.where(inside, values, 0).sum(axis=1)) for values in (1.0, pixels))
    mean = total / np.maximum(count, 1)
    known = mean[count > 0]
    if not known.size:
        return np.zeros(mean.shape, np.uint8)
    low, high = np.percentile(known, [0.5, 99.5])
    stretched = np.clip((mean - low) / max(high - low, 1e-6), 0, 1) * 255
    return np.where(count > 0, stretched, 0).astype(np.uint8)


def _three_columns(sums: Float[np.ndarray, "D W"]) -> Float[np.ndarray, "D W"]:
    """Sums over each column and its two neighbours: speckle is finer than the distance between B-scans anyway."""
    padded = np.pad(sums.astype(np.float64), ((0, 0), (1, 1)))
    return padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]


def eye_picture(store: Store, row: Mapping[str, Any]) -> EyePicture:
    """The pictures of one row of the store's table."""
    volume = store.read(str(row["volume_id"]))
    spacing = store.preprocessing.target_spacing_mm
    pixels = np.asarray(volume.pixels)
    depth, height, width = pixels.shape
    centre = depth // 2
    name = f"{row['device']}, {row['eye'] or 'eye unknown'}, volume {row['volume_id']}"
    stretch = scan.SHOWN_ASPECT * width * spacing[2] / (height * spacing[1])
    overlays = [*_band(volume, centre), scan.scale_bars((height, width), spacing[1:], BARS_MM)]
    b_scan = scan.picture(pixels[centre], f"Central B-scan with tissue band: {name}", overlays)
    face = scan.picture(
        en_face(pixels, np.asarray(volume.band), spacing[1]),
        f"En face projection: {name}",
        [scan.line([(0, centre + 0.5), (width, centre + 0.5)], "cut")],
        aspect=depth * spacing[0] / (width * spacing[2]),
        upscale=(8, 2),
    )
    return EyePicture(
        str(row["volume_id"]),
        str(row["device"]),
        str(row["eye"]),
        str(row["laterality_source"]),
        str(row["split"]),
        str(row["protocol"]),
        geometry_of(row),
        b_scan,
        face,
        stretch,
    )


def _band(volume: CanonicalVolume, slice_number: int) -> list[Markup]:
    top, bottom = np.asarray(volume.band)[:, slice_number].astype(np.float64)
    none = top < 0
    return [
        *scan.boundary(np.where(none, np.nan, top), "band"),
        *scan.boundary(np.where(none, np.nan, bottom), "band"),
    ]
