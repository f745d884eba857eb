"""Occlusion maps of the page: which eyes get one, and the maps drawn over the scan.

Of a pretraining the held-out eyes of the token maps are shown, of a fine-tuning test cases that it classified correctly
and wrongly; their number is limited by the cost, so that a page does not take long. Each eye has an en face map by
whole columns and, for the B-scans of the strongest column, a map by depth. The stronger a cell's colour, the more the
answer changes without it; cells that change no more than as many tokens at random stay clear, as do cells without
tissue. All eyes of a page share one scale for each of the two maps, whose end is never less than a given
change: a map of nothing has no colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from markupsafe import Markup

from octjepa.errors import OctjepaError
from octjepa.parsing import read_parquet
from octjepa.report.figures import eyes, svg

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from octjepa.encoders import PretrainedEncoder
    from octjepa.recipe import Recipe
    from octjepa.store import Store
    from octjepa.tasks.finetune.network import TunableEncoder
    from octjepa.tasks.finetune.predict import TunedModel
    from octjepa.tasks.occlusion import Occlusion
    from octjepa.volume import CanonicalVolume

MAX_EYES = 4
MAX_CASES = 8
SCALE_EYES = 16
LEVELS = 8  # of a colour's strength; the page's style holds one rule for each
FLOP_PER_THREAD = 1e12  # that all maps of a page may cost: about 10 s of one core; 0.08e12 took 0.8 s
_FLOP_ACCELERATOR = 1e15
_LEAST = 0.05  # of the unit: the smallest change that is drawn in full colour


@dataclass(frozen=True)
class OccludedVolume:
    """A volume to draw: its row of the store's index, its occlusion, and the caption of its prediction."""

    row: Mapping[str, Any]
    volume: CanonicalVolume
    occlusion: Occlusion
    caption: str = ""


@dataclass(frozen=True)
class OcclusionPicture:
    """The maps of one volume; changes are in the page's unit.

    strongest: of the strongest column; scattered: of as many tokens at random; stands_out: whether the first is more.
    b_scan_number, a_scan_number: (the strongest column's centre in the native scan, counted from 1; their number).
    """

    row: Mapping[str, Any]
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


def occluded_eyes(store: Store, encoder: PretrainedEncoder) -> list[OccludedVolume]:
    """The held-out eyes of the token maps with the change of their embedding; none where the store holds none.

    Raises OctjepaError: too costly for a page.
    """
    from octjepa.tasks import occlusion

    rows = eyes.one_per_device(store.table, splits=("test", "val"))[:MAX_EYES]
    occluded = []
    for row in rows[: _affordable_eyes(encoder)] if rows else []:
        volume = store.read(str(row["volume_id"]))
        occluded.append(OccludedVolume(row, volume, occlusion.encoder_occlusion(encoder, volume)))
    return occluded


def run_maps(store: Store, path: Path) -> OcclusionMaps | None:
    """Maps of the embedding for the held-out eyes of the token maps; None where the store holds none.

    Raises OctjepaError: no encoder, too costly for a page, fewer than two held-out people to scale by.
    """
    from octjepa.encoders import load_encoder
    from octjepa.tasks import occlusion

    encoder = load_encoder(path).to(best_device())
    if not eyes.one_per_device(store.table, splits=("test", "val")):
        return None
    _affordable_eyes(encoder)
    held_out = store.table[(store.table["pattern"] == "raster") & store.table["split"].isin(["test", "val"])]
    first_of_person = held_out.sort_values("volume_id").drop_duplicates("person_id")["volume_id"]
    scale_ids = [str(volume_id) for volume_id in first_of_person[:SCALE_EYES]]
    embeddings = np.stack([encoder.embed(store.read(volume_id), occlusion.POOL) for volume_id in scale_ids])
    unit = occlusion.median_distance(embeddings)
    if not unit > 0:
        raise OctjepaError(f"{len(scale_ids)} held-out people give no distance between eyes to scale changes by")
    occluded = occluded_eyes(store, encoder)
    return replace(draw_maps(store, occluded, encoder.recipe, _LEAST * unit, unit), scale_eyes=len(scale_ids))


def occluded_cases(store: Store, path: Path, tuned: TunedModel) -> list[OccludedVolume]:
    """Test volumes of a fine-tuning with the change of the prediction of its first target; none without a label.

    Raises OctjepaError: a store of another contract, too costly for a page, damaged predictions, another project's
    encoder.
    """
    from octjepa.embed.embedding import require_same_contract
    from octjepa.tasks import occlusion
    from octjepa.tasks.finetune.external import TunableExternal

    if isinstance(tuned.encoder, TunableExternal):
        raise OctjepaError(
            f"{tuned.encoder.name} is an encoder of another project, which reads whole images: maps leave tokens out"
        )
    require_same_contract(tuned.encoder, store, path)
    head = tuned.heads[0]
    cases = select_test_cases(_read_predictions(path / "predictions.parquet"), head.target, head.classes)
    index = {str(row["volume_id"]): row for row in eyes.records(store.table)}
    occluded = []
    for case in cases[: _affordable_eyes(tuned.encoder)] if cases else []:
        volume = store.read(case["volume_id"])
        result = occlusion.tuned_occlusion(tuned, volume, 0, case["prediction"] if head.classes else None)
        occluded.append(OccludedVolume(index[case["volume_id"]], volume, result, case["caption"]))
    return occluded


def tuning_maps(store: Store, path: Path) -> OcclusionMaps | None:
    """Maps of the prediction of the first target, for test volumes; None where none of them has a label.

    Raises OctjepaError: no tuned network, and as `occluded_cases`.
    """
    from octjepa.tasks.finetune.predict import load_tuned

    tuned = load_tuned(path, best_device())
    occluded, head = occluded_cases(store, path, tuned), tuned.heads[0]
    if not occluded:
        return None
    least = _LEAST * (1.0 if head.classes else head.scale[1])
    maps = draw_maps(store, occluded, tuned.encoder.recipe, least)
    return replace(maps, target=head.target, classes=bool(head.classes))


def select_test_cases(frame: pd.DataFrame, target: str, classes: Sequence[str]) -> list[dict[str, str]]:
    """Test volumes {volume_id, prediction, caption} to show, `MAX_CASES` at most.

    Of each class the first by id that was recognised and the first that was not; of a quantity the volume of median
    error and that of the greatest.
    """
    wanted = (frame["level"] == "volume") & (frame["target"] == target) & (frame["split"] == "test")
    rows = eyes.records(frame[wanted & (frame["truth"] != "")].sort_values("volume_id", kind="stable"))
    cases = []
    if not classes and rows:
        rows.sort(key=lambda row: abs(float(row["predicted"]) - float(row["truth"])))
        chosen = {"median error": rows[(len(rows) - 1) // 2], "greatest error": rows[-1]}
        for kind, row in list(chosen.items())[: len(rows)]:
            caption = f"{kind}: predicted {float(row['predicted']):.3g}, true {float(row['truth']):.3g}"
            cases.append((row, caption))
    for name in classes:
        for correct in (True, False):
            for row in [row for row in rows if row["truth"] == name and (row["predicted"] == name) == correct][:1]:
                probability = float(row["scores"][list(classes).index(row["predicted"])])
                verdict = "correct" if correct else f"wrong, it is {name}"
                cases.append((row, f"predicted {row['predicted']} with {probability:.2f}: {verdict}"))
    return [
        {"volume_id": str(row["volume_id"]), "prediction": str(row["predicted"]), "caption": caption}
        for row, caption in cases[:MAX_CASES]
    ]


def _read_predictions(path: Path) -> pd.DataFrame:
    try:
        return read_parquet(path, columns=["level", "target", "split", "volume_id", "truth", "predicted", "scores"])
    except (OSError, ValueError) as error:
        raise OctjepaError(f"{path.name} cannot be read ({str(error).splitlines()[0]})") from None


def best_device() -> torch.device:
    """The accelerator where there is one, else the processor."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def _affordable_eyes(encoder: TunableEncoder) -> int:
    """How many eyes a page may map with `encoder`. Raises OctjepaError: none."""
    import torch

    from octjepa.tasks.occlusion import forward_passes

    on_cpu = next(encoder.encoder.parameters()).device.type == "cpu"
    most = FLOP_PER_THREAD * torch.get_num_threads() if on_cpu else _FLOP_ACCELERATOR
    recipe = encoder.recipe
    flop = 2.0 * encoder.parameters * recipe.token_count * forward_passes(recipe.grid)
    if flop > most:
        raise OctjepaError(
            f"the map of an eye costs {flop / 1e12:.0f} TFLOP, more than the {most / 1e12:.0f} that a page may take on "
            "this machine: make the report on one with an accelerator, or call octjepa.tasks.occlusion"
        )
    return int(most / flop)


def draw_maps(
    store: Store, volumes: Sequence[OccludedVolume], recipe: Recipe, least: float, unit: float = 1.0
) -> OcclusionMaps:
    """The pictures of `volumes`, at least one; every change is divided by `unit`. `recipe` is that of the encoder.

    least: the change, before division, that is drawn in full colour, at least.
    """
    from octjepa.tasks.occlusion import SCATTERED_DRAWS, patch_mm, region_radius

    max_en_face, max_b_scan = (
        max(least, *(float(np.nanmax(np.abs(values))) for values in maps))
        for maps in zip(*((volume.occlusion.en_face, volume.occlusion.b_scan) for volume in volumes), strict=True)
    )
    pictures = tuple(_picture(store, volume, recipe, max_en_face, max_b_scan, unit) for volume in volumes)
    z, y, x = ((2 * n + 1) * size for n, size in zip(region_radius(patch_mm(recipe)), patch_mm(recipe), strict=True))
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
        row, occluded.caption, en_face, b_scan, strongest / unit, result.scattered[0] / unit, result.background / unit,
        abs(strongest) > result.scattered[0], *_native_numbers(store, str(row["volume_id"]), *stored),
    )  # fmt: skip


def colour_levels(
    values: Float[np.ndarray, "r c"], most: float, by_chance: float, size: tuple[int, int]
) -> list[Markup]:
    """Cells of a token grid in `LEVELS` strengths, `most` the fullest: one colour above zero, another below.

    NaN and sizes up to `by_chance` stay clear. `size` is the (height, width) of a cell in voxels.
    """
    known = np.where(np.abs(values) > by_chance, values, 0.0)
    level = np.rint(LEVELS * np.abs(known) / most).astype(int)
    return [
        svg.cells((level == step) & (sign * known > 0), size, f"{css} s{step}")
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
