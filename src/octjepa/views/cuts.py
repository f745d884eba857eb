"""Samples whose voxels become views on the device: the host draws, and sends a byte a voxel or none.

A view in fp32 has four bytes a voxel, and a sample has two of them; making and sending them is most of a sample's cost.
What is random comes from the same keys as on the host, so that the samples are those of `make_sample` to the bit.
`DeviceStore` cuts patches from voxels that lie on the device. Where a store is too large for that, `DeviceLookup` takes
patches of stored values from the host and z-scores them on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from octjepa.recipe import Recipe
from octjepa.views import geometry, intensity, tokens
from octjepa.views.loader import Batch, LoadedSample, TrainingDataset, collate, training_batches
from octjepa.views.sample import Draw, Sample, draw_sample
from octjepa.volume import CanonicalVolume


class Cut(NamedTuple):
    """A sample without its views, and how they are made: first stored voxel, flips, look-up table of each view."""

    sample: Sample
    corner: tuple[int, int, int]
    flips: tuple[bool, bool]  # along slices, along columns
    tables: Float[np.ndarray, "2 256"]  # stored value -> z-score, of the context view and the target view
    patches: UInt8[np.ndarray, "k voxels"]  # stored values; no voxels where the device has them


class CutBatch(NamedTuple):
    """Cuts stacked; `batch` has empty views. `one_view`: both views are the same."""

    batch: Batch
    corner: Int[Tensor, "b 3"]
    flips: Bool[Tensor, "b 2"]
    tables: Float[Tensor, "2 b 256"]
    patches: UInt8[Tensor, "b k voxels"]
    one_view: bool

    def to(self, device: torch.device) -> CutBatch:
        """On `device`, without waiting for it."""

        def here(part: Tensor) -> Tensor:
            return part.to(device, non_blocking=True)

        held_batch = self.batch
        batch = held_batch._replace(
            positions=here(held_batch.positions),
            grid_index=here(held_batch.grid_index),
            tissue=here(held_batch.tissue),
            context=here(held_batch.context),
            target=here(held_batch.target),
        )
        return CutBatch(
            batch, here(self.corner), here(self.flips), here(self.tables), here(self.patches), self.one_view
        )

    def with_views(self, stored: Int[Tensor, "b values"]) -> Batch:
        """The batch with views of the `stored` values, which are indices of the tables, patch after patch."""
        count = self.batch.grid_index.shape[1]
        context = torch.gather(self.tables[0], 1, stored).unflatten(1, (count, -1))
        target = context
        if not self.one_view:
            target = torch.gather(self.tables[1], 1, stored).unflatten(1, (count, -1))
        return self.batch._replace(context_view=context, target_view=target)


def make_cut(volume: CanonicalVolume, recipe: Recipe, epoch: int) -> Cut:
    """The draw of a training sample; reads no voxel."""
    draw = draw_sample(volume, recipe, epoch)
    return _cut(volume, draw, np.empty((len(draw.sample.grid_index), 0), dtype=np.uint8))


def make_patches(volume: CanonicalVolume, recipe: Recipe, epoch: int) -> Cut:
    """The draw of a training sample, and the stored values of its patches."""
    draw = draw_sample(volume, recipe, epoch)
    view = geometry.strided_view(volume.pixels, draw.transform, recipe.preprocessing.image_size)
    return _cut(volume, draw, tokens.extract_patches(view, recipe.tokens.patch_size, draw.sample.grid_index))


def _cut(volume: CanonicalVolume, draw: Draw, patches: UInt8[np.ndarray, "k voxels"]) -> Cut:
    tables = [
        intensity.lookup_table(volume.tissue_mean, volume.tissue_std, augmentation)
        for augmentation in draw.augmentations
    ]
    transform = draw.transform
    flips = (transform.flip_slow, transform.flip_fast)
    return Cut(draw.sample, transform.corner, flips, np.stack(tables), patches)


def collate_cuts(items: Sequence[LoadedSample]) -> CutBatch:
    """Cuts stacked along a new batch axis."""
    cuts: list[Cut] = [item.sample for item in items]
    tables = np.stack([cut.tables for cut in cuts], axis=1)  # [2, b, 256]
    return CutBatch(
        collate([item._replace(sample=cut.sample) for item, cut in zip(items, cuts, strict=True)]),
        torch.tensor([cut.corner for cut in cuts]),
        torch.tensor([cut.flips for cut in cuts]),
        torch.from_numpy(tables),
        torch.from_numpy(np.stack([cut.patches for cut in cuts])),
        bool((tables[0] == tables[1]).all()),
    )


def cut_batches(
    dataset: TrainingDataset,
    make: Callable[[CanonicalVolume, Recipe, int], Cut],
    share: tuple[int, int, int, int, int],
    device: torch.device,
) -> Iterator[CutBatch]:
    """`training_batches` of what `make` makes; `share`: first and total updates, workers, rank and world."""
    cuts = copy.copy(dataset)
    cuts.make = make
    yield from training_batches(cuts, *share, device.type == "cuda", collate_cuts)


class DeviceLookup:
    """Views of patches that the host cuts: stored values become z-scores on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def batches(
        self, dataset: TrainingDataset, first: int, total: int, workers: int, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """As `training_batches` of `dataset`, with the fields that training needs on the device."""
        for cut in cut_batches(dataset, make_patches, (first, total, workers, rank, world), self.device):
            here = cut.to(self.device)
            yield here.with_views(here.patches.flatten(1).long())
