"""Which positions of a scan an answer depends on: what changes when the tokens of a place are left out.

Occlusion is that of Zeiler & Fergus (2014), who slid a grey square over the picture. Here nothing is painted: the
encoder takes any set of tokens, so those of the place are not given to it. Pooled statistics (mean, standard deviation,
maximum) are taken over the tokens that remain, as if the place had never been selected. A patch of the tissue's mean
grey is a thing that no scan holds; its features would enter the maximum, and the answer would change because of what
was put there ("missingness bias", Jain et al. 2022, which leaving tokens out lessens). Nor is the budget filled up
again: patches that were not selected would bring news of their own. What the smaller number of tokens does by itself
is measured beside the maps (`Occlusion.scattered`).

A single token is told again by its neighbours, so a place is at least `PLACE_MM` wide. Layers at one place tell of each
other, too: the en face map leaves out whole columns, from the first row to the last; then the B-scans of the strongest
column are searched in depth. Encoders of the arms that hide tokens from the context encoder have learnt to do without
some; the arm `normalized_mse` and the heads of a fine-tuning have only seen whole sets.

A map tells where an answer hangs, not why, nor what training taught: that of an untrained encoder peaks at what is
unusual in a scan, too (`of_encoder(encoder.untrained(), volume)`; Adebayo et al. 2018 ask this of every such map).
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
from octjepa.checkpoint import PretrainedEncoder
from octjepa.checkpoint.encoder import SelectedTokens
from octjepa.errors import UsageError
from octjepa.probe.calibration import apply_logit_shift
from octjepa.recipe import Recipe
from octjepa.store import CanonicalVolume
from octjepa.tasks.finetune.folder import Head
from octjepa.tasks.finetune.network import pooled
from octjepa.tasks.finetune.predict import Tuned
from octjepa.tasks.finetune.scores import in_own_unit
from octjepa.views.tokens import TISSUE_SHARE

POOL = "mean_std_max"  # of the embedding, as `octjepa embed` writes it
PLACE_MM = (1.0, 0.1, 1.0)  # across, the central subfield of the ETDRS grid; in depth, a third of the retina
SCATTERED_DRAWS = 8

Size3 = tuple[float, float, float]
# What is asked of sets of tokens (patches, positions): any vector a set.
Answer = Callable[[Float[Tensor, "b t voxels"], Float[Tensor, "b t 3"]], Float[Tensor, "b n"]]
# How much the answers to smaller sets differ from that to the whole one.
Change = Callable[[Float[np.ndarray, " n"], Float[np.ndarray, "p n"]], Float[np.ndarray, " p"]]


@dataclass(frozen=True)
class Occlusion:
    """Changes of one volume's answer. NaN where the place holds no token of tissue.

    en_face: a whole column and its neighbours left out, by slab of B-scans and column of the token grid.
    b_scan: of the slab `slab`, a token and its neighbours left out, by row and column of the token grid.
    slab, column: where `en_face` is furthest from zero.
    scattered: the greatest size of the change in `SCATTERED_DRAWS` draws, each of as many tokens at random, as many of
    them tissue, as the strongest place of en_face and the strongest of b_scan hold.
    background: every token left out that is no tissue; NaN where there is none.
    """

    en_face: Float[np.ndarray, "d w"]
    b_scan: Float[np.ndarray, "h w"]
    slab: int
    column: int
    scattered: tuple[float, float]
    background: float


def of_encoder(encoder: PretrainedEncoder, volume: CanonicalVolume) -> Occlusion:
    """Cosine distances by which the embedding of `volume` moves. Raises UsageError as `occlude`."""

    def answer(patches: Tensor, positions: Tensor) -> Tensor:
        return pooled(encoder.encoder(patches, positions).float())

    return _of(encoder, volume, answer, cosine_distance)


def of_tuned(tuned: Tuned, volume: CanonicalVolume, head: int = 0, class_name: str | None = None) -> Occlusion:
    """By how much the answer of head number `head` to `volume` is higher with the place than without it.

    Of the probability of `class_name`, all classes being equally common; without one, of the quantity in its unit.
    Raises UsageError as `occlude`.
    """

    def answer(patches: Tensor, positions: Tensor) -> Tensor:
        said: Tensor = tuned.network.say(tuned.network(patches, positions))[head]
        return said

    return _of(tuned.encoder, volume, answer, support(tuned.heads[head], class_name))


def support(head: Head, class_name: str | None) -> Change:
    """Whole minus rest: of the probability of `class_name`, or without one of the quantity in its unit."""

    def in_unit(said: Float[np.ndarray, "p n"]) -> Float[np.ndarray, " p"]:
        scores = in_own_unit(said, head.classes, head.scale)
        if class_name is None:
            return scores[:, 0]
        return apply_logit_shift(scores, np.array(head.shift))[:, head.classes.index(class_name)]

    return lambda whole, rest: in_unit(whole[None]) - in_unit(rest)


def _of(encoder: PretrainedEncoder, volume: CanonicalVolume, answer: Answer, change: Change) -> Occlusion:
    device = next(encoder.encoder.parameters()).device
    rng = keys.generator("occlusion", volume.volume_id)
    return occlude(encoder.selected(volume), answer, change, patch_mm(encoder.recipe), rng, device)


def patch_mm(recipe: Recipe) -> Size3:
    """The size of a token."""
    (p, q, r), (z, y, x) = recipe.tokens.patch_size, recipe.preprocessing.target_spacing_mm
    return p * z, q * y, r * x


def reach(token_mm: Size3) -> tuple[int, int, int]:
    """Tokens on either side of a place's own, so that together they are at least `PLACE_MM` wide."""
    slow, deep, fast = (
        max(0, math.ceil((wanted / size - 1) / 2 - 1e-9)) for wanted, size in zip(PLACE_MM, token_mm, strict=True)
    )
    return slow, deep, fast


def forward_passes(grid: tuple[int, int, int]) -> int:
    """The most sets of tokens that `occlude` asks of a volume."""
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
def answers_without(
    answer: Answer,
    patches: Float[Tensor, "k voxels"],
    positions: Float[Tensor, "k 3"],
    left_out: Bool[np.ndarray, "p k"],
    batch: int = 16,
) -> Float[np.ndarray, "p n"]:
    """Row i is the answer to the tokens that `left_out[i]` does not name.

    Rows that leave equally many tokens share a pass, so that nothing is padded. Raises ValueError: a row leaves none.
    """
    kept = (~left_out).sum(axis=1)
    if not kept.all():
        raise ValueError("a place holds every token: nothing would be left to answer by")
    found: dict[int, np.ndarray] = {}
    for count in np.unique(kept):
        rows = np.flatnonzero(kept == count)
        for some in np.split(rows, range(batch, len(rows), batch)):
            index = torch.from_numpy(np.stack([np.flatnonzero(~left_out[row]) for row in some])).to(patches.device)
            found |= zip(some.tolist(), answer(patches[index], positions[index]).cpu().double().numpy(), strict=True)
    return np.stack([found[row] for row in range(len(left_out))])


def occlude(
    selected: SelectedTokens,
    answer: Answer,
    change: Change,
    token_mm: Size3,
    rng: np.random.Generator,
    device: torch.device | None = None,
) -> Occlusion:
    """The maps of one volume's `answer`; `rng` draws the scattered tokens.

    Raises UsageError where no place can be left out: no token of tissue, or all tokens in one place.
    """
    patches, positions = (torch.from_numpy(part).to(device or "cpu") for part in (selected.patches, selected.positions))
    steps = np.stack(np.unravel_index(selected.grid_index, selected.grid), axis=-1)
    tissue = selected.tissue >= TISSUE_SHARE
    near = np.array(reach(token_mm))
    across = [0, 2]
    columns = np.unique(steps[tissue][:, across], axis=0)
    in_column = (np.abs(columns[:, None] - steps[None, :, across]) <= near[across]).all(axis=-1)
    columns, in_column = columns[~in_column.all(axis=1)], in_column[~in_column.all(axis=1)]
    if not len(columns):
        raise UsageError(f"none of {len(steps)} tokens can be left out as a place: {int(tissue.sum())} hold tissue")
    nothing, background = np.zeros_like(tissue)[None], ~tissue[None]
    asked = [nothing, in_column, background] if background.any() else [nothing, in_column]
    said = answers_without(answer, patches, positions, np.concatenate(asked))
    whole, changes = said[0], change(said[0], said[1:])
    of_columns = changes[: len(columns)]

    strongest = int(np.abs(of_columns).argmax())
    slab, column = (int(step) for step in columns[strongest])
    centres = steps[tissue & (steps[:, 0] == slab)]
    in_place = (np.abs(centres[:, None] - steps[None]) <= near).all(axis=-1)
    centres, in_place = centres[~in_place.all(axis=1)], in_place[~in_place.all(axis=1)]
    of_positions = change(whole, answers_without(answer, patches, positions, in_place))

    beside = in_column[strongest], in_place[int(np.abs(of_positions).argmax())]
    drawn = np.stack([_scattered(place, tissue, rng) for place in beside for _ in range(SCATTERED_DRAWS)])
    by_chance = np.abs(change(whole, answers_without(answer, patches, positions, drawn))).reshape(2, -1).max(axis=1)

    d, h, w = selected.grid
    en_face, b_scan = np.full((d, w), np.nan), np.full((h, w), np.nan)
    en_face[columns[:, 0], columns[:, 1]] = of_columns
    b_scan[centres[:, 1], centres[:, 2]] = of_positions
    rest = float(changes[-1]) if background.any() else math.nan
    return Occlusion(en_face, b_scan, slab, column, (float(by_chance[0]), float(by_chance[1])), rest)


def _scattered(
    place: Bool[np.ndarray, " k"], tissue: Bool[np.ndarray, " k"], rng: np.random.Generator
) -> Bool[np.ndarray, " k"]:
    """As many tokens of tissue and as many others as `place` holds, anywhere."""
    drawn = np.zeros_like(place)
    for kind in (tissue, ~tissue):
        drawn[rng.choice(np.flatnonzero(kind), int((place & kind).sum()), replace=False)] = True
    return drawn
