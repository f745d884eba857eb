"""Masks: three families of shapes over several B-scans, and random tokens, with exact counts of hidden tokens.

Neighbouring B-scans are nearly copies, so a hidden patch must not be filled from the slice next to it. `tubes` are
rectangles through all slices, `blocks` boxes over some slices, `runs` whole runs of B-scans. `random` hides tokens
independently of each other, as the masked autoencoder does: most of them have a visible neighbour. Shapes are added
until enough selected tokens are hidden, and the last one is shrunk, so the count is exact for every sample.

No edge is favoured: along an axis that it does not span, a shape's start is uniform over all positions where it still
touches the grid, overhang cut off, and it shrinks towards its centre. Along an axis that it spans, shrinking towards
the centre, which is the grid's own, would hide the borders a fifth too seldom: there the last shape is cut from a
random position on, wrapped around. Cutting in raster order would rarely hide the last B-scans.
`octjepa plan --masks` measures all this (docs/pretext.md).
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Int

from octjepa.recipe import MaskRecipe

FAMILIES = ("tubes", "blocks", "runs", "random")
SPANNED = {"tubes": (0,), "blocks": (), "runs": (1, 2), "random": ()}  # axes that a shape of the family always spans
_MOST_SHAPES = 64


def sample_mask(
    grid_positions: Int[np.ndarray, "t 3"],
    grid: tuple[int, int, int],
    recipe: MaskRecipe,
    counts: tuple[int, int],
    rng: np.random.Generator,
    tissue: Bool[np.ndarray, " t"] | None = None,
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"]]:
    """(context, target) as sorted indices into the `t` selected tokens at `grid_positions`; disjoint, exactly `counts`.

    `counts` is `Recipe.mask_counts`; what is hidden but not a target (target_share < 1) is in neither. Hidden tokens
    with `tissue` become targets first, in random order; None: all alike.
    """
    weights = np.array(
        [recipe.tubes, recipe.blocks, recipe.runs, recipe.random], dtype=np.float64
    )  # in the order of FAMILIES
    family = FAMILIES[rng.choice(len(FAMILIES), p=weights / weights.sum())]
    context_count, target_count = counts
    hidden_count = len(grid_positions) - context_count
    order = _hiding_order(grid_positions, grid, family, hidden_count, rng)
    hidden = order[:hidden_count]
    if target_count < hidden_count:
        hidden = rng.permutation(hidden)
        if tissue is not None:
            hidden = hidden[np.argsort(~tissue[hidden], kind="stable")]
    return np.sort(order[hidden_count:]), np.sort(hidden[:target_count])


def _hiding_order(
    grid_positions: Int[np.ndarray, "t 3"],
    grid: tuple[int, int, int],
    family: str,
    count: int,
    rng: np.random.Generator,
) -> Int[np.ndarray, " t"]:
    """All tokens in the order in which shapes hide them; ties, and tokens that no shape reached, in random order."""
    if family == "random":
        return rng.permutation(len(grid_positions))
    spanned = SPANNED[family]
    shrinking = [axis for axis in range(3) if axis not in spanned]
    shape_of = np.full(len(grid_positions), _MOST_SHAPES, dtype=np.float64)
    free = np.arange(len(grid_positions))  # tokens that no shape has reached, and their positions
    left = grid_positions
    for number in range(_MOST_SHAPES):
        size = _size(family, grid, rng)
        start = [0 if a in spanned else int(rng.integers(1 - size[a], grid[a])) for a in range(3)]
        jitter = rng.uniform(-0.25, 0.25, size=3)
        inside = np.ones(len(free), dtype=bool)
        for axis in shrinking:
            along = left[:, axis]
            inside &= (along >= start[axis]) & (along < start[axis] + size[axis])
        taken = left[inside]  # [n, 3]
        # within a shape the centre is hidden first; jitter keeps opposite sides from being hidden at once
        away = np.zeros(len(taken))
        for axis in shrinking:
            centre = start[axis] + (size[axis] - 1) / 2 + jitter[axis]
            np.maximum(away, np.abs(taken[:, axis] - centre) / (size[axis] + 1), out=away)
        shape_of[free[inside]] = number + away
        free, left = free[~inside], left[~inside]
        if len(grid_positions) - len(free) >= count:
            break
    tie_break = rng.random(len(grid_positions))
    if not spanned:
        return np.lexsort((tie_break, shape_of))
    axis = spanned[-1]
    return np.lexsort((tie_break, (grid_positions[:, axis] - rng.integers(grid[axis])) % grid[axis], shape_of))


def _size(family: str, grid: tuple[int, int, int], rng: np.random.Generator) -> tuple[int, int, int]:
    """Size of a shape in tokens (slices, depth, columns); aspect ratio 0.75 to 1.5 as in V-JEPA 2."""
    d, h, w = grid
    if family == "runs":
        return int(rng.integers(max(1, d // 4), max(2, d // 2 + 1))), h, w
    area = rng.uniform(0.15, 0.4) * w * w
    aspect = rng.uniform(0.75, 1.5)
    tall = min(max(round(math.sqrt(area * aspect)), 1), h)
    wide = min(max(round(math.sqrt(area / aspect)), 1), w)
    if family == "tubes":
        return d, tall, wide
    return int(rng.integers(max(1, d // 4), max(2, d // 2 + 1))), tall, wide
