"""What the model is asked to do, as a picture: of a few samples, what it sees and what it must predict.

Two rows a sample. Above, the context view as the student sees it: context tokens alone. Below, the target view, with
target tokens in orange, other hidden ones in blue, and tokens that no encoder sees left dark. A column is the middle
B-scan of a slab of patches; long grids show a few slabs, evenly spread.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.recipe import Recipe
from octjepa.views.loader import Batch

SAMPLES = 2
SLABS = 4
DARK = 24
TARGET, HIDDEN = (255, 140, 0), (60, 120, 255)
_GAP = 4
_SIDE = 256  # pixels that a B-scan has at most, so that a picture stays below a megabyte or two
_SPARSE = 7  # of that many pixels one tells the range of grey
_TINT = 0.45


def draw(batch: Batch, recipe: Recipe) -> UInt8[np.ndarray, "H W 3"]:
    """The picture of the batch's first samples."""
    chosen = np.unique(np.linspace(0, recipe.grid[0] - 1, SLABS).round().astype(int))
    rows = [row for n in range(min(SAMPLES, len(batch.volume_ids))) for row in _rows(batch, n, recipe, chosen)]
    width = max(row.shape[1] for row in rows)
    line = np.full((_GAP, width, 3), 255, np.uint8)
    return np.concatenate([part for row in rows for part in (row, line)][:-1])


def _rows(batch: Batch, n: int, recipe: Recipe, slabs: np.ndarray) -> list[UInt8[np.ndarray, "H W 3"]]:
    index, context, target = (part[n].numpy() for part in (batch.grid_index, batch.context, batch.target))
    seen = np.isin(np.arange(len(index)), context)
    predicted = np.isin(np.arange(len(index)), target)
    p, q, r = recipe.tokens.patch_size
    # The middle B-scan of each patch alone: a whole sample has tens of millions of voxels.
    views = [
        part[n].reshape(-1, p, q, r)[:, p // 2].float().numpy() for part in (batch.context_view, batch.target_view)
    ]
    some = np.concatenate([view.ravel()[::_SPARSE] for view in views])
    low, high = np.percentile(some, (1, 99))
    above, below = (np.clip((view - low) / max(high - low, 1e-6), 0, 1) * 255 for view in views)
    colours = [
        (above, np.where(seen, 0, -1)),
        (below, np.where(predicted, 1, np.where(seen, 0, 2))),
    ]
    return [_row(grey, kinds, index, recipe, slabs) for grey, kinds in colours]


def _row(
    grey: Float[np.ndarray, "k q r"], kinds: np.ndarray, index: np.ndarray, recipe: Recipe, slabs: np.ndarray
) -> UInt8[np.ndarray, "H W 3"]:
    """Tokens put back where they come from; `kinds`: -1 not shown, 0 plain, 1 target, 2 hidden."""
    (d, h, w), (_, q, r) = recipe.grid, recipe.tokens.patch_size
    cells = np.full((d * h * w, q, r, 3), DARK, np.float32)
    cells[index[kinds >= 0]] = grey[kinds >= 0][..., None]
    for kind, colour in ((1, TARGET), (2, HIDDEN)):
        mine = index[kinds == kind]
        cells[mine] = (1 - _TINT) * cells[mine] + _TINT * np.asarray(colour, np.float32)
    pictures = cells.reshape(d, h, w, q, r, 3).transpose(0, 1, 3, 2, 4, 5).reshape(d, h * q, w * r, 3)
    step = -(-max(pictures.shape[1:3]) // _SIDE)
    pictures = pictures[slabs, ::step, ::step]
    line = np.full((pictures.shape[1], _GAP, 3), 255, np.float32)
    return np.concatenate([part for picture in pictures for part in (picture, line)][:-1], axis=1).astype(np.uint8)
