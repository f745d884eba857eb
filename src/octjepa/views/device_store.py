"""The stored voxels of a run on its device, as uint8: views are cut, flipped and z-scored there.

A batch then sends only its tokens and masks: a few kilobytes a volume in place of megabytes. 2 GB hold 6,000 volumes
of the default size. Rotation, zoom, blur, speckle and halves are left to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.views.cuts import CutBatch, cut_batches, make_cut
from octjepa.views.loader import Batch, TrainingDataset


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
        """As `training_batches` of `dataset`, with the fields that training needs on the device.

        Raises as `Store.read` for a volume that was not read yet.
        """
        for cut in cut_batches(dataset, make_cut, (first, total, workers, rank, world), self.device):
            volume_ids = cut.batch.volume_ids
            self._fill(volume_ids)
            numbers = torch.tensor([self.number[name] for name in volume_ids])
            if self.device.type == "cuda":
                numbers = numbers.pin_memory()
            here = cut.to(self.device)
            numbers = numbers.to(self.device, non_blocking=True)
            yield here.with_views(self._patches(numbers, here))

    def _fill(self, volume_ids: Sequence[str]) -> None:
        for volume_id in set(volume_ids) - self._filled:
            pixels = np.array(self.store.read(volume_id).pixels)
            self.pixels[self.number[volume_id]] = torch.from_numpy(pixels).to(self.device)
            self._filled.add(volume_id)

    def _patches(self, numbers: Int[Tensor, " b"], cut: CutBatch) -> Int[Tensor, "b values"]:
        """Stored values of the patches of each view, patch after patch, as indices of a table."""
        size, patch, grid = self.recipe.preprocessing.image_size, self.recipe.tokens.patch_size, self.recipe.grid
        corner, flips, index = cut.corner, cut.flips, cut.batch.grid_index
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
