"""Occlusion maps over the scan: en face by whole columns, and the B-scans of the strongest column by depth.

The stronger a square's colour, the more changes without it. Clear is what changes no more than as many tokens at random
do, and what holds no token of tissue. All eyes of a page share one scale for each of the two pictures, so that they can
be compared, and its end never stands for less than a given change: a map of nothing has no colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from markupsafe import Markup

from octjepa.report.figures import eyes, scan

if TYPE_CHECKING:
    from octjepa.recipe import Recipe
    from octjepa.store import CanonicalVolume, Store
    from octjepa.tasks.occlusion import Occlusion

LEVELS = 8  # of a colour's strength; the page's style holds one rule for each


@dataclass(frozen=True)
class Shown:
    """A volume to be drawn: its row of the store's table, its map, and what is said of it beside the picture."""

    row: Mapping[str, Any]
    volume: CanonicalVolume
    occlusion: Occlusion
    said: str = ""


@dataclass(frozen=True)
class OcclusionPicture:
    """Changes are in the page's unit; scattered: of as many tokens at random as the strongest column holds.

    stands_out: whether the strongest column changes more than that.
    b_scan_number, a_scan_number: the strongest column's middle in the native scan (from 1), of so many.
    """

    volume_id: str
    device: str
    eye: str
    mirrored: bool
    split: str
    said: str
    en_face: Markup
    b_scan: Markup
    strongest: float
    scattered: float
    background: float
    stands_out: bool
    b_scan_number: tuple[int, int]
    a_scan_number: tuple[int, int]


@dataclass(frozen=True)
class OcclusionMaps:
    """most_en_face, most_b_scan: what the full colour stands for. column_mm, place_mm: what is left out at once."""

    pictures: tuple[OcclusionPicture, ...]
    most_en_face: float
    most_b_scan: float
    column_mm: tuple[float, float]
    place_mm: tuple[float, float, float]


def occlusion_maps(
    store: Store, shown: Sequence[Shown], recipe: Recipe, least: float, unit: float = 1.0
) -> OcclusionMaps:
    """The pictures of `shown`, at least one; every change is divided by `unit`. `recipe` is that of the encoder.

    least: the change, before division, that the full colour stands for at the least.
    """
    from octjepa.tasks.occlusion import patch_mm, region_radius

    most_en_face, most_b_scan = (
        max(least, *(float(np.nanmax(np.abs(values))) for values in maps))
        for maps in zip(*((one.occlusion.en_face, one.occlusion.b_scan) for one in shown), strict=True)
    )
    pictures = tuple(_picture(store, one, recipe, most_en_face, most_b_scan, unit) for one in shown)
    wide = [(2 * n + 1) * size for n, size in zip(region_radius(patch_mm(recipe)), patch_mm(recipe), strict=True)]
    return OcclusionMaps(
        pictures, most_en_face / unit, most_b_scan / unit, (wide[0], wide[2]), (wide[0], wide[1], wide[2])
    )


def _picture(
    store: Store, shown: Shown, recipe: Recipe, most_en_face: float, most_b_scan: float, unit: float
) -> OcclusionPicture:
    from octjepa.views import geometry

    row, volume, found = shown.row, shown.volume, shown.occlusion
    (thick, high, wide), wanted = recipe.tokens.patch_size, recipe.preprocessing
    (a, _, c), (d, _, w) = wanted.margin, wanted.image_size
    view = geometry.apply_geometry(np.asarray(volume.pixels), geometry.center_crop(wanted), wanted.image_size)
    face = eyes.en_face(np.asarray(volume.pixels), np.asarray(volume.band), wanted.target_spacing_mm[1])
    middle = (found.slab + 0.5) * thick
    name = f"{row['device']}, {row['eye'] or 'eye unknown'}, volume {row['volume_id']}"
    en_face = scan.picture(
        face[a : a + d, c : c + w],
        f"En face occlusion map: {name}",
        [
            *shades(found.en_face, most_en_face, found.scattered[0], (thick, wide)),
            scan.line([(0, middle), (w, middle)], "cut"),
        ],
        aspect=d * wanted.target_spacing_mm[0] / (w * wanted.target_spacing_mm[2]),
        upscale=(8, 2),
    )
    b_scan = scan.picture(
        view[int(middle)],
        f"Occlusion map over the B-scan: {name}",
        shades(found.b_scan, most_b_scan, found.scattered[1], (high, wide)),
    )
    strongest = float(found.en_face[found.slab, found.column])
    native, shape = _native(store, str(row["volume_id"]), a + middle - 0.5, c + (found.column + 0.5) * wide - 0.5)
    return OcclusionPicture(
        str(row["volume_id"]), str(row["device"]), str(row["eye"]), bool(row["mirrored"]), str(row["split"]),
        shown.said, en_face, b_scan, strongest / unit, found.scattered[0] / unit, found.background / unit,
        abs(strongest) > found.scattered[0], (native[0], shape[0]), (native[1], shape[1]),
    )  # fmt: skip


def shades(
    values: Float[np.ndarray, "rows columns"], most: float, by_chance: float, size: tuple[int, int]
) -> list[Markup]:
    """Cells of a token grid in `LEVELS` strengths, `most` the fullest: one colour above zero, another below.

    NaN and sizes up to `by_chance` stay clear. `size` is (height, width) of a cell in voxels.
    """
    known = np.where(np.abs(values) > by_chance, values, 0.0)
    level = np.rint(LEVELS * np.abs(known) / most).astype(int)
    return [
        scan.cells((level == step) & (sign * known > 0), size, f"{css} s{step}")
        for css, sign in (("occ-for", 1), ("occ-against", -1))
        for step in range(1, LEVELS + 1)
    ]


def _native(store: Store, volume_id: str, slice_: float, column: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """(B-scan, A-scan) of the scan as it was read that lie nearest a stored place, from 1; and how many there are."""
    from octjepa.store.native_mapping import NativeMap

    mapped = NativeMap.from_store(store, volume_id)
    place = mapped.to_native(np.array([[slice_, 0.0, column]]))[0]
    count = mapped.shape[0], mapped.shape[2]
    b_scan, a_scan = (int(np.clip(round(place[axis]), 0, n - 1)) + 1 for axis, n in zip((0, 2), count, strict=True))
    return (b_scan, a_scan), count
