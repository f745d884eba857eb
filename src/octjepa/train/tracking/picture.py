"""The pretext task as a picture: of a few samples, what the student sees and what it must predict; and their folder.

Two strips a sample. Above, the context view as the student sees it: only context tokens. Below, the target view, with
target tokens in orange, other hidden tokens in blue, and tokens that no encoder sees left dark. A column is the middle
B-scan of a slab of patches; long grids show a few slabs, evenly spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.files import write_atomic
from octjepa.recipe import Recipe
from octjepa.train.tracking.base import png
from octjepa.views.loader import Batch

SAMPLES = 2
SLABS = 4
DARK = 24
TARGET, HIDDEN = (255, 140, 0), (60, 120, 255)
_GAP = 4
_SIDE = 256  # pixels that a B-scan has at most, so that a picture stays below a megabyte or two
_SPARSE = 7  # every so many voxels are enough for the range of intensities
_TINT = 0.45


def draw(batch: Batch, recipe: Recipe) -> UInt8[np.ndarray, "H W 3"]:
    """The picture of the batch's first samples."""
    slabs = np.unique(np.linspace(0, recipe.grid[0] - 1, SLABS).round().astype(int))
    samples = range(min(SAMPLES, len(batch.volume_ids)))
    strips = [strip for sample in samples for strip in _draw_sample(batch, sample, recipe, slabs)]
    line = np.full((_GAP, max(strip.shape[1] for strip in strips), 3), 255, np.uint8)
    return np.concatenate([part for strip in strips for part in (strip, line)][:-1])


def _draw_sample(batch: Batch, sample: int, recipe: Recipe, slabs: np.ndarray) -> list[UInt8[np.ndarray, "H W 3"]]:
    """The two strips of one sample."""
    index, context, target = (field[sample].cpu().numpy() for field in (batch.grid_index, batch.context, batch.target))
    visible = np.isin(np.arange(len(index)), context)
    predicted = np.isin(np.arange(len(index)), target)
    p, q, r = recipe.tokens.patch_size
    # [k, q, r]: only the middle B-scan of each patch, because a whole sample has tens of millions of voxels
    views = [
        view[sample].reshape(-1, p, q, r)[:, p // 2].float().cpu().numpy()
        for view in (batch.context_view, batch.target_view)
    ]
    low, high = np.percentile(np.concatenate([view.ravel()[::_SPARSE] for view in views]), (1, 99))
    context_view, target_view = (np.clip((view - low) / max(high - low, 1e-6), 0, 1) * 255 for view in views)
    strips = [
        (context_view, np.where(visible, 0, -1)),
        (target_view, np.where(predicted, 1, np.where(visible, 0, 2))),
    ]
    return [_draw_strip(intensity, kinds, index, recipe, slabs) for intensity, kinds in strips]


def _draw_strip(
    intensity: Float[np.ndarray, "k q r"], kinds: np.ndarray, index: np.ndarray, recipe: Recipe, slabs: np.ndarray
) -> UInt8[np.ndarray, "H W 3"]:
    """Tokens at their position in the grid; `kinds` [k]: -1 not shown, 0 plain, 1 target, 2 hidden."""
    (d, h, w), (_, q, r) = recipe.grid, recipe.tokens.patch_size
    cells = np.full((d * h * w, q, r, 3), DARK, np.float32)
    cells[index[kinds >= 0]] = intensity[kinds >= 0][..., None]
    for kind, colour in ((1, TARGET), (2, HIDDEN)):
        tinted = index[kinds == kind]
        cells[tinted] = (1 - _TINT) * cells[tinted] + _TINT * np.asarray(colour, np.float32)
    bscans = cells.reshape(d, h, w, q, r, 3).transpose(0, 1, 3, 2, 4, 5).reshape(d, h * q, w * r, 3)
    step = -(-max(bscans.shape[1:3]) // _SIDE)
    bscans = bscans[slabs, ::step, ::step]
    line = np.full((bscans.shape[1], _GAP, 3), 255, np.float32)
    return np.concatenate([part for bscan in bscans for part in (bscan, line)][:-1], axis=1).astype(np.uint8)


class PictureFolder:
    """The tracker that every run has: writes `update-00000001.png` and so on into the run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        """Metrics are in metrics.jsonl already."""

    def picture(self, update: int, image: UInt8[np.ndarray, "H W 3"]) -> None:
        write_atomic(self._folder / f"update-{update:08d}.png", lambda file: file.write(png(image)))

    def close(self, finished: bool) -> None:
        """Every picture is written already."""

    def checkpoint(self, update: int, address: str) -> None:
        """Checkpoints are in their folder already."""
