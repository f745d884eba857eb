"""Occlusion maps: how an encoder's embedding, or a tuned head's prediction, changes when tokens are left out.

Occlusion is that of Zeiler & Fergus (2014), who slid a uniform square over the image. Here nothing is painted: the
encoder takes any set of tokens, so those of a region are not given to it, and pooled statistics are taken over the
others. A patch of the tissue's mean intensity is something no scan holds; its features would enter the maximum, and the
prediction would change because of what was put there ("missingness bias", Jain et al. 2022, which leaving tokens out
lessens). Nor is the budget filled up again: patches that were not selected would add information. What the
smaller number of tokens does by itself is measured next to the maps (`Occlusion.scattered`).

Neighbouring tokens repeat what one token holds, so a region is at least `REGION_MM` wide. Layers at one position do so
as well: the en face map leaves out whole columns over the full depth; then the B-scans of the strongest column are
searched in depth. Encoders of objectives that hide tokens from the context encoder have learned to do without some;
`normalized_mse` and the heads of a fine-tuning have only been trained on whole sets.

A map shows what a prediction depends on, not why, nor what training contributed: that of an untrained encoder peaks at
what is unusual in a scan as well (`encoder_occlusion(encoder.untrained(), volume)`; Adebayo et al. 2018 ask this of
every such map).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from octjepa import keys
from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.pooling import POSITION_FREE_POOL
from octjepa.encoders.pretrained import SelectedTokens
from octjepa.errors import UsageError
from octjepa.evaluate.calibration import apply_logit_shift
from octjepa.recipe import Recipe
from octjepa.tasks.finetune.folder import HeadSpec
from octjepa.tasks.finetune.network import TunableEncoder, pooled
from octjepa.tasks.finetune.predict import TunedModel, in_label_units
from octjepa.views.tokens import holds_tissue
from octjepa.volume import CanonicalVolume

POOL = POSITION_FREE_POOL  # of the embedding: `octjepa embed` writes it, and it has a meaning for part of the tokens
REGION_MM = (1.0, 0.1, 1.0)  # across, the central subfield of the ETDRS grid; in depth, a third of the retina
SCATTERED_DRAWS = 8

Size3 = tuple[float, float, float]
# The outputs for sets of tokens (patches, positions): any vector for each set.
Predict = Callable[[Float[Tensor, "b t voxels"], Float[Tensor, "b t 3"]], Float[Tensor, "b n"]]
# How much the outputs for smaller sets differ from that for the whole one.
Change = Callable[[Float[np.ndarray, " n"], Float[np.ndarray, "p n"]], Float[np.ndarray, " p"]]


@dataclass(frozen=True)
class Occlusion:
    """Changes of one volume's output. NaN where the region holds no token of tissue.

    en_face: a whole column and its neighbours left out, by slab of B-scans and column of the token grid.
    b_scan: of the slab `slab`, a token and its neighbours left out, by depth and column of the token grid.
    slab, column: where `en_face` is furthest from zero.
    scattered: the greatest size of the change in `SCATTERED_DRAWS` draws, each of as many tokens at random, as many of
    them tissue, as the strongest region of en_face and the strongest of b_scan hold.
    background: every token left out that is not tissue; NaN if there is none.
    """

    en_face: Float[np.ndarray, "d w"]
    b_scan: Float[np.ndarray, "h w"]
    slab: int
    column: int
    scattered: tuple[float, float]
    background: float


def encoder_occlusion(encoder: PretrainedEncoder, volume: CanonicalVolume) -> Occlusion:
    """Cosine distances that the embedding of `volume` moves. Raises UsageError as `occlude`."""

    def predict(patches: Tensor, positions: Tensor) -> Tensor:
        return pooled(encoder.encoder(patches, positions).float())

    return _occlusion(encoder, volume, predict, cosine_distance)


def tuned_occlusion(
    tuned: TunedModel, volume: CanonicalVolume, head: int = 0, class_name: str | None = None
) -> Occlusion:
    """By how much the prediction of head number `head` for `volume` is higher with the region than without it.

    Of the probability of `class_name`, all classes being equally common; without one, of the quantity in its unit.
    Raises UsageError as `occlude`.
    """

    def predict(patches: Tensor, positions: Tensor) -> Tensor:
        outputs: Tensor = tuned.network.head_outputs(tuned.network(patches, positions))[head]
        return outputs

    return _occlusion(tuned.encoder, volume, predict, prediction_drop(tuned.heads[head], class_name))


def prediction_drop(head: HeadSpec, class_name: str | None) -> Change:
    """Whole minus rest: of the probability of `class_name`, or without one of the quantity in its unit."""

    def predicted(outputs: Float[np.ndarray, "p n"]) -> Float[np.ndarray, " p"]:
        scores = in_label_units(outputs, head.classes, head.scale)
        if class_name is None:
            return scores[:, 0]
        return apply_logit_shift(scores, np.array(head.shift))[:, head.classes.index(class_name)]

    return lambda whole, rest: predicted(whole[None]) - predicted(rest)


def occlusion_grid(
    encoder: TunableEncoder, volume: CanonicalVolume, occlusion: Occlusion
) -> Float[np.ndarray, "d h w"]:
    """The en face map of `occlusion` at every token of tissue of its column; NaN elsewhere."""
    selected = encoder.select_tokens(volume)
    slab, depth, column = np.unravel_index(selected.grid_index[holds_tissue(selected.tissue)], selected.grid)
    grid = np.full(selected.grid, np.nan, np.float32)
    grid[slab, depth, column] = occlusion.en_face[slab, column]
    return grid


def strongest_token(occlusion: Occlusion) -> tuple[int, int, int]:
    """The token (slice, depth, column) whose region changes the output most in the strongest column."""
    sizes = np.abs(occlusion.b_scan)
    in_column = sizes[:, occlusion.column]
    if np.isnan(in_column).all():  # no region there could be left out
        depth, column = np.unravel_index(np.nanargmax(sizes), sizes.shape)
        return occlusion.slab, int(depth), int(column)
    return occlusion.slab, int(np.nanargmax(in_column)), occlusion.column


def _occlusion(encoder: TunableEncoder, volume: CanonicalVolume, predict: Predict, change: Change) -> Occlusion:
    device = next(encoder.encoder.parameters()).device
    rng = keys.generator("occlusion", volume.volume_id)
    return occlude(encoder.select_tokens(volume), predict, change, patch_mm(encoder.recipe), rng, device)


def patch_mm(recipe: Recipe) -> Size3:
    """The size of a token (slice, depth, column)."""
    (p, q, r), (dz, dy, dx) = recipe.tokens.patch_size, recipe.preprocessing.target_spacing_mm
    return p * dz, q * dy, r * dx


def region_radius(token_mm: Size3) -> tuple[int, int, int]:
    """Tokens on either side of a region's central one, so that together they are at least `REGION_MM` wide."""
    slices, depth, columns = (
        max(0, math.ceil((region / size - 1) / 2 - 1e-9)) for region, size in zip(REGION_MM, token_mm, strict=True)
    )
    return slices, depth, columns


def region_mm(recipe: Recipe) -> Size3:
    """The size of a region (slice, depth, column), at least `REGION_MM`."""
    slices, depth, columns = (
        (2 * radius + 1) * size for radius, size in zip(region_radius(patch_mm(recipe)), patch_mm(recipe), strict=True)
    )
    return slices, depth, columns


def forward_passes(grid: tuple[int, int, int]) -> int:
    """The most sets of tokens that `occlude` gives to the encoder for one volume."""
    d, h, w = grid
    return (d + h) * w + 2 * SCATTERED_DRAWS + 2


def cosine_distance(whole: Float[np.ndarray, " n"], rest: Float[np.ndarray, "p n"]) -> Float[np.ndarray, " p"]:
    """1 - cosine, 0 to 2: a `Change` of embeddings."""
    lengths = np.linalg.norm(whole) * np.linalg.norm(rest, axis=1)
    distance: np.ndarray = 1 - rest @ whole / np.maximum(lengths, 1e-12)
    return distance


def median_distance(vectors: Float[np.ndarray, "e n"]) -> float:
    """The median cosine distance between two of `vectors`, which gives the distances of a map a scale; NaN of one."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    between = (1 - unit @ unit.T)[np.triu_indices(len(unit), 1)]
    return float(np.median(between)) if len(between) else math.nan


@torch.no_grad()
def predict_without(
    predict: Predict,
    patches: Float[Tensor, "k voxels"],
    positions: Float[Tensor, "k 3"],
    left_out: Bool[np.ndarray, "p k"],
    batch: int = 16,
) -> Float[np.ndarray, "p n"]:
    """Output i is that for the tokens which `left_out[i]` does not name.

    Sets of equally many tokens share a pass, so that nothing is padded. Raises ValueError: a set is empty.
    """
    counts = (~left_out).sum(axis=1)
    if not counts.all():
        raise ValueError("a region holds every token: nothing would be left to predict from")
    outputs: dict[int, np.ndarray] = {}
    for count in np.unique(counts):
        sets = np.flatnonzero(counts == count)
        for batch_sets in np.split(sets, range(batch, len(sets), batch)):
            index = torch.from_numpy(np.stack([np.flatnonzero(~left_out[number]) for number in batch_sets])).to(
                patches.device
            )
            outputs |= zip(
                batch_sets.tolist(), predict(patches[index], positions[index]).cpu().double().numpy(), strict=True
            )
    return np.stack([outputs[number] for number in range(len(left_out))])


def occlude(
    selected: SelectedTokens,
    predict: Predict,
    change: Change,
    token_mm: Size3,
    rng: np.random.Generator,
    device: torch.device | None = None,
) -> Occlusion:
    """The maps of one volume; `rng` draws the scattered tokens.

    Raises UsageError if no region can be left out: no token of tissue, or all tokens in one region.
    """
    patches, positions = (torch.from_numpy(part).to(device or "cpu") for part in (selected.patches, selected.positions))
    grid = np.stack(np.unravel_index(selected.grid_index, selected.grid), axis=-1)  # k 3
    tissue = holds_tissue(selected.tissue)
    radius = np.array(region_radius(token_mm))
    across = [0, 2]
    columns, in_column = _regions(np.unique(grid[tissue][:, across], axis=0), grid[:, across], radius[across])
    if not len(columns):
        raise UsageError(f"none of {len(grid)} tokens can be left out as a region: {int(tissue.sum())} hold tissue")
    nothing, background = np.zeros_like(tissue)[None], ~tissue[None]
    left_out = [nothing, in_column, background] if background.any() else [nothing, in_column]
    outputs = predict_without(predict, patches, positions, np.concatenate(left_out))
    whole, changes = outputs[0], change(outputs[0], outputs[1:])
    column_changes = changes[: len(columns)]

    strongest = int(np.abs(column_changes).argmax())
    slab, column = (int(step) for step in columns[strongest])
    centres, in_region = _regions(grid[tissue & (grid[:, 0] == slab)], grid, radius)
    region_changes = change(whole, predict_without(predict, patches, positions, in_region))

    references = in_column[strongest], in_region[int(np.abs(region_changes).argmax())]
    drawn = np.stack([_scattered(region, tissue, rng) for region in references for _ in range(SCATTERED_DRAWS)])
    scattered = change(whole, predict_without(predict, patches, positions, drawn))
    largest = np.abs(scattered).reshape(2, -1).max(axis=1)

    d, h, w = selected.grid
    en_face, b_scan = np.full((d, w), np.nan), np.full((h, w), np.nan)
    en_face[columns[:, 0], columns[:, 1]] = column_changes
    b_scan[centres[:, 1], centres[:, 2]] = region_changes
    rest = float(changes[-1]) if background.any() else math.nan
    return Occlusion(en_face, b_scan, slab, column, (float(largest[0]), float(largest[1])), rest)


def _regions(
    centres: np.ndarray, tokens: np.ndarray, radius: np.ndarray
) -> tuple[np.ndarray, Bool[np.ndarray, "regions k"]]:
    """(centres, which tokens are within `radius` of each) of the regions that do not hold every token."""
    inside = (np.abs(centres[:, None] - tokens[None]) <= radius).all(axis=-1)
    is_partial = ~inside.all(axis=1)
    return centres[is_partial], inside[is_partial]


def _scattered(
    region: Bool[np.ndarray, " k"], tissue: Bool[np.ndarray, " k"], rng: np.random.Generator
) -> Bool[np.ndarray, " k"]:
    """As many tokens of tissue and as many others as `region` holds, anywhere."""
    drawn = np.zeros_like(region)
    for kind in (tissue, ~tissue):
        drawn[rng.choice(np.flatnonzero(kind), int((region & kind).sum()), replace=False)] = True
    return drawn
