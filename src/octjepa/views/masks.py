"""What is hidden: three families of shapes that span the slow axis, in exact counts.

Neighbouring B-scans are nearly copies, so a hole must not be filled from the slice beside it. `tubes` are
rectangles through all slices, `blocks` boxes of limited depth, `runs` whole runs of B-scans. Shapes are laid until
enough selected tokens are hidden; the last one is shrunk about its centre, so the count is exact for every sample
and no edge is favoured: a shape's start is uniform over every place where it still touches the grid, overhang cut
off, which covers the border as often as the middle. Cutting in raster order instead would starve the last B-scans.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from octjepa.recipe import MaskRecipe

FAMILIES = ("tubes", "blocks", "runs")
_MOST_SHAPES = 64


def draw(
    steps: Int[np.ndarray, "t 3"],
    grid: tuple[int, int, int],
    recipe: MaskRecipe,
    counts: tuple[int, int],
    rng: np.random.Generator,
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"]]:
    """(context, target) as sorted indices into the `t` selected tokens at grid `steps`; disjoint, exactly `counts`.

    `counts` is `Recipe.mask_counts`; what is hidden but not a target (target_share < 1) is in neither.
    """
    weights = np.array([recipe.tubes, recipe.blocks, recipe.runs], dtype=np.float64)  # in the order of FAMILIES
    family = FAMILIES[rng.choice(len(FAMILIES), p=weights / weights.sum())]
    context_count, target_count = counts
    hidden_count = len(steps) - context_count
    order = _hiding_order(steps, grid, family, hidden_count, rng)
    hidden = order[:hidden_count]
    target = hidden if target_count == hidden_count else rng.choice(hidden, target_count, replace=False)
    return np.sort(order[hidden_count:]), np.sort(target)


def _hiding_order(
    steps: np.ndarray, grid: tuple[int, int, int], family: str, wanted: int, rng: np.random.Generator
) -> np.ndarray:
    """Tokens in the order in which shapes hide them; ties and tokens no shape reached by chance."""
    shape_of = np.full(len(steps), _MOST_SHAPES, dtype=np.float64)
    for number in range(_MOST_SHAPES):
        size = _size(family, grid, rng)
        start = [int(rng.integers(1 - s, n)) for s, n in zip(size, grid, strict=True)]
        if family != "blocks":  # these span an axis, or two, whole
            start = [0 if s == n else at for at, s, n in zip(start, size, grid, strict=True)]
        centre = np.asarray(start) + (np.asarray(size) - 1) / 2
        away = np.abs(steps - centre) / np.asarray(size)
        inside = (away < 0.5).all(axis=1) & (shape_of == _MOST_SHAPES)
        # within a shape the centre is hidden first: this is how the last one shrinks
        shape_of[inside] = number + away[inside].max(axis=1)
        if np.count_nonzero(shape_of < _MOST_SHAPES) >= wanted:
            break
    return np.lexsort((rng.random(len(steps)), shape_of))


def _size(family: str, grid: tuple[int, int, int], rng: np.random.Generator) -> tuple[int, int, int]:
    """A shape in tokens. Aspect 0.75-1.5 as in V-JEPA 2; at least a third of the fast axis for blocks and tubes."""
    d, h, w = grid
    if family == "runs":
        return int(rng.integers(max(1, d // 4), max(2, d // 2 + 1))), h, w
    area = rng.uniform(0.15, 0.4) * w * w
    aspect = rng.uniform(0.75, 1.5)
    high = int(np.clip(round(np.sqrt(area * aspect)), 1, h))
    wide = int(np.clip(round(np.sqrt(area / aspect)), 1, w))
    if family == "tubes":
        return d, high, wide
    return int(rng.integers(max(1, d // 4), max(2, d // 2 + 1))), high, wide
