"""Occlusion maps of the page, drawn over the scan.

Each eye of `explain.eyes` has an en face map by whole columns and, for the B-scans of the strongest column, a map by
depth. The stronger a cell's colour, the more the answer changes without it; cells that change no more than as many
tokens at random stay clear, as do cells without tissue. All eyes of a page share one scale for each of the two maps,
whose end is never less than a given change: a map of nothing has no colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from markupsafe import Markup

from octjepa.report.figures import eyes, svg
from octjepa.store.index import IndexEntry

if TYPE_CHECKING:
    from octjepa.explain.eyes import ExplainedEyes, OccludedVolume
    from octjepa.recipe import Recipe
    from octjepa.store import Store

LEVELS = 8  # of a colour's strength; the page's style holds one rule for each
_LEAST = 0.05  # of a great change: the smallest change that is drawn in full colour


@dataclass(frozen=True)
class OcclusionPicture:
    """The maps of one volume; changes are in the page's unit.

    strongest: of the strongest column. scattered: of as many tokens at random. stands_out: whether the first is more.
    b_scan_number, a_scan_number: (the strongest column's centre in the native scan, counted from 1; their number).
    """

    row: IndexEntry
    caption: str
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
    """The maps of a page.

    max_en_face, max_b_scan: the change of the full colour. column_mm, position_mm: the size of what is left out at
    once. draws: of tokens at random. target, classes: of a fine-tuning; `classes` is false for a quantity. scale_eyes:
    how many eyes, each of another person, gave the distances of an encoder their unit.
    """

    pictures: tuple[OcclusionPicture, ...]
    max_en_face: float
    max_b_scan: float
    column_mm: tuple[float, float]
    position_mm: tuple[float, float, float]
    draws: int
    target: str = ""
    classes: bool = False
    scale_eyes: int = 0


def run_maps(store: Store, path: Path) -> OcclusionMaps | None:
    """Maps of the embedding for the held-out eyes of the token maps; None where the store holds none.

    Raises as `explain_encoder` and `change_scale`.
    """
    from octjepa.explain.eyes import explain_encoder

    return _explained_maps(store, explain_encoder(store, path))


def tuning_maps(store: Store, path: Path) -> OcclusionMaps | None:
    """Maps of the prediction of the first target, for test volumes; None if none of them has a label.

    Raises as `explain_tuning`.
    """
    from octjepa.explain.eyes import explain_tuning

    return _explained_maps(store, explain_tuning(store, path))


def _explained_maps(store: Store, explained: ExplainedEyes) -> OcclusionMaps | None:
    from octjepa.explain.eyes import change_scale

    if not explained.eyes:
        return None
    scale = change_scale(store, explained)
    maps = draw_maps(store, explained.eyes, explained.encoder.recipe, _LEAST * scale.great, scale.unit)
    if explained.tuned is None:
        return replace(maps, scale_eyes=scale.people)
    head = explained.tuned.heads[0]
    return replace(maps, target=head.target, classes=bool(head.classes))


def draw_maps(
    store: Store, volumes: Sequence[OccludedVolume], recipe: Recipe, least: float, unit: float = 1.0
) -> OcclusionMaps:
    """The pictures of `volumes`, at least one; every change is divided by `unit`. `recipe` is that of the encoder.

    least: the change, before division, that is drawn in full colour, at least.
    """
    from octjepa.explain.occlusion import SCATTERED_DRAWS, region_mm

    max_en_face, max_b_scan = (
        max(least, *(float(np.nanmax(np.abs(values))) for values in maps))
        for maps in zip(*((volume.occlusion.en_face, volume.occlusion.b_scan) for volume in volumes), strict=True)
    )
    pictures = tuple(_picture(store, volume, recipe, max_en_face, max_b_scan, unit) for volume in volumes)
    z, y, x = region_mm(recipe)
    return OcclusionMaps(pictures, max_en_face / unit, max_b_scan / unit, (z, x), (z, y, x), SCATTERED_DRAWS)


def _picture(
    store: Store, occluded: OccludedVolume, recipe: Recipe, max_en_face: float, max_b_scan: float, unit: float
) -> OcclusionPicture:
    from octjepa.views import geometry

    row, result, preprocessing = occluded.row, occluded.occlusion, recipe.preprocessing
    (thick, high, wide), spacing = recipe.tokens.patch_size, preprocessing.target_spacing_mm
    (slice_margin, _, column_margin), (d, _, w) = preprocessing.margin, preprocessing.image_size
    pixels = np.asarray(occluded.volume.pixels)
    view = geometry.apply_transform(pixels, geometry.center_crop(preprocessing), preprocessing.image_size)
    face = eyes.en_face(pixels, np.asarray(occluded.volume.band), spacing[1])
    face = face[slice_margin : slice_margin + d, column_margin : column_margin + w]
    middle = (result.slab + 0.5) * thick
    title = eyes.volume_title(row)
    en_face = eyes.en_face_scan(
        face,
        f"En face occlusion map: {title}",
        colour_levels(result.en_face, max_en_face, result.scattered[0], (thick, wide)),
        middle,
        spacing,
    )
    b_scan_levels = colour_levels(result.b_scan, max_b_scan, result.scattered[1], (high, wide))
    b_scan = svg.scan(
        view[eyes.central_slice(occluded.volume, recipe, result.slab)],
        f"Occlusion map over the B-scan: {title}",
        b_scan_levels,
    )
    strongest = float(result.en_face[result.slab, result.column])
    stored = slice_margin + middle - 0.5, column_margin + (result.column + 0.5) * wide - 0.5
    return OcclusionPicture(
        row,
        occluded.caption,
        en_face,
        b_scan,
        strongest / unit,
        result.scattered[0] / unit,
        result.background / unit,
        abs(strongest) > result.scattered[0],
        *_native_numbers(store, row.volume_id, *stored),
    )


def colour_levels(
    values: Float[np.ndarray, "r c"], most: float, by_chance: float, size: tuple[int, int]
) -> list[Markup]:
    """Cells of a token grid in `LEVELS` strengths, `most` the fullest: one colour above zero, another below.

    NaN and sizes up to `by_chance` stay clear. `size` is the (height, width) of a cell in voxels.
    """
    clear = np.where(np.abs(values) > by_chance, values, 0.0)
    level = np.rint(LEVELS * np.abs(clear) / most).astype(int)
    return [
        svg.cells((level == step) & (sign * clear > 0), size, f"{css} s{step}")
        for css, sign in (("occ-for", 1), ("occ-against", -1))
        for step in range(1, LEVELS + 1)
    ]


def _native_numbers(
    store: Store, volume_id: str, slice_: float, column: float
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(number, of how many) of the native B-scan and of the A-scan nearest to a stored position, counted from 1."""

    mapping = store.native_map(volume_id)
    native = mapping.to_native(np.array([[slice_, 0.0, column]]))[0]
    b_scan, a_scan = ((int(np.clip(round(native[axis]), 0, mapping.shape[axis] - 1)) + 1) for axis in (0, 2))
    return (b_scan, mapping.shape[0]), (a_scan, mapping.shape[2])
