"""The stored voxels of a run on its device, as uint8: views are cut, flipped and z-scored there.

What is random comes from the same keys as on the host (`octjepa.views.sample.draw_sample`), so the samples are those of
`make_sample` to the bit. A batch then sends its tokens and masks alone: a few kilobytes a volume in place of megabytes.
2 GB hold 6,000 volumes of the default size. Rotation, zoom, blur, speckle and halves are left to the host.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from octjepa.recipe import Recipe
from octjepa.store import CanonicalVolume, Store
from octjepa.views import intensity
from octjepa.views.loader import Batch, LoadedSample, TrainingDataset, collate, training_batches
from octjepa.views.sample import Sample, draw_sample

_MOVED = ("positions", "grid_index", "tissue", "context", "target")  # of a batch, as they come from the host


class Cut(NamedTuple):
    """A sample without its voxels, and how they are cut: first stored voxel, flips, look-up table of each view."""

    sample: Sample
    corner: tuple[int, int, int]
    flips: tuple[bool, bool]  # along slices, along columns
    tables: Float[np.ndarray, "2 256"]  # stored value -> z-score, of the context view and the target view


class CutBatch(NamedTuple):
    """Cuts stacked; `batch` has empty views. `one_view`: both views are the same."""

    batch: Batch
    corner: Int[Tensor, "b 3"]
    flips: Bool[Tensor, "b 2"]
    tables: Float[Tensor, "2 b 256"]
    one_view: bool


def host_only(recipe: Recipe) -> str | None:
    """Which of the recipe's augmentations only the host computes; None where there is none."""
    views = recipe.views
    names = ("rotation_degrees", "zoom", "blur", "speckle", "halves")
    return next((f"views.{name}" for name in names if getattr(views, name)), None)


def stored_bytes(recipe: Recipe, volumes: int) -> int:
    """Bytes that so many stored volumes take."""
    return volumes * int(np.prod(recipe.preprocessing.stored_size))


def make_cut(volume: CanonicalVolume, recipe: Recipe, epoch: int) -> Cut:
    """The draw of a training sample; reads no voxel."""
    draw = draw_sample(volume, recipe, epoch)
    tables = [intensity.lookup_table(volume.tissue_mean, volume.tissue_std, one) for one in draw.augmentations]
    transform = draw.transform
    return Cut(draw.sample, transform.corner, (transform.flip_slow, transform.flip_fast), np.stack(tables))


def collate_cuts(items: Sequence[LoadedSample]) -> CutBatch:
    """Cuts stacked along a new batch axis."""
    cuts: list[Cut] = [item.sample for item in items]
    tables = np.stack([cut.tables for cut in cuts], axis=1)  # [2, b, 256]
    return CutBatch(
        collate([item._replace(sample=cut.sample) for item, cut in zip(items, cuts, strict=True)]),
        torch.tensor([cut.corner for cut in cuts]),
        torch.tensor([cut.flips for cut in cuts]),
        torch.from_numpy(tables),
        bool((tables[0] == tables[1]).all()),
    )


class DeviceStore:
    """Stored volumes of `volume_ids` on `device`, each read when it is first needed."""

    def __init__(self, store: Store, recipe: Recipe, volume_ids: Sequence[str], device: torch.device) -> None:
        self.store, self.recipe, self.device = store, recipe, device
        self.number = {volume_id: number for number, volume_id in enumerate(volume_ids)}
        self.pixels = torch.zeros(len(self.number), *store.preprocessing.stored_size, dtype=torch.uint8, device=device)
        self._filled: set[str] = set()

    def batches(
        self, dataset: TrainingDataset, first: int, total: int, workers: int, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """As `training_batches` of `dataset`, with the fields that training needs on the device."""
        cuts = copy.copy(dataset)
        cuts.make = make_cut
        pin = self.device.type == "cuda"
        for cut in training_batches(cuts, first, total, workers, rank, world, pin, collate_cuts):
            yield self.batch(cut)

    def batch(self, cut: CutBatch) -> Batch:
        """The batch with its two views, on the device. Raises as `Store.read` for a volume that was not read yet."""
        batch = cut.batch
        for volume_id in set(batch.volume_ids) - self._filled:
            pixels = np.array(self.store.read(volume_id).pixels)
            self.pixels[self.number[volume_id]] = torch.from_numpy(pixels).to(self.device)
            self._filled.add(volume_id)
        numbers = torch.tensor([self.number[name] for name in batch.volume_ids])
        if self.device.type == "cuda":
            numbers = numbers.pin_memory()
        here = [part.to(self.device, non_blocking=True) for part in (numbers, cut.corner, cut.flips, cut.tables)]
        moved = {name: getattr(batch, name).to(self.device, non_blocking=True) for name in _MOVED}
        index = moved["grid_index"]
        stored = self._patches(here[0], here[1], here[2], index)
        context = torch.gather(here[3][0], 1, stored).unflatten(1, (index.shape[1], -1))
        target = context
        if not cut.one_view:
            target = torch.gather(here[3][1], 1, stored).unflatten(1, (index.shape[1], -1))
        return batch._replace(context_view=context, target_view=target, **moved)

    def _patches(
        self, numbers: Int[Tensor, " b"], corner: Int[Tensor, "b 3"], flips: Bool[Tensor, "b 2"], index: Tensor
    ) -> Int[Tensor, "b values"]:
        """Stored values of the patches `index` [b, k] of each view, patch after patch, as indices of a table."""
        size, patch, grid = self.recipe.preprocessing.image_size, self.recipe.tokens.patch_size, self.recipe.grid
        steps = (index // (grid[1] * grid[2]), index // grid[2] % grid[1], index % grid[2])  # each [b, k]
        along = []
        for axis in range(3):
            voxels = steps[axis].unsqueeze(-1) * patch[axis] + torch.arange(patch[axis], device=self.device)
            if axis != 1:  # depth is never flipped
                flipped = flips[:, axis // 2, None, None]
                voxels = torch.where(flipped, size[axis] - 1 - voxels, voxels)
            along.append(voxels + corner[:, axis, None, None])  # [b, k, p]
        first, depth, column = along
        values = self.pixels[
            numbers[:, None, None, None, None],
            first[:, :, :, None, None],
            depth[:, :, None, :, None],
            column[:, :, None, None, :],
        ]  # [b, k, p, q, r]
        return values.flatten(1).long()
