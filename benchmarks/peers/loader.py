"""Training samples a second, made in the process itself, against a plain pipeline on the same store.

A sample is two views of one geometry, flip and crop, with gain, gamma, blur and speckle each of its own, z-scored,
cut into patches, and a mask. Both sides take every patch of the grid (with `tokens.select=tissue`, as recipes have it,
ours lights only the chosen ones: that is not in the figure). Ours is a pure function of seed, epoch and volume: its
masks are connected shapes, its tissue shares are counted. The peers draw from torch's global state, hide patches by
`randperm` and count nothing. `torch` is a DataLoader over the store; `monai` a CacheDataset, which keeps all
volumes in memory, with MONAI's random transforms, `monai_persistent` a PersistentDataset, which keeps them as files of
torch; `decoding` keeps nothing, but reads, decodes and resamples the DICOM file for every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.peers.alternating_runs import Comparison, rate
from benchmarks.peers.data import WHOLE_GRID, bench_recipe, phantom_store
from benchmarks.peers.ingest import monai, resample_by_scipy
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.train.data import choose_cohort
from octjepa.views.loader import training_batches

PASSES = 2  # over the store, a turn
View = Float[Tensor, "d h w"]


def cut(view: View, patch: tuple[int, int, int]) -> Float[Tensor, "t voxels"]:
    """A view as flattened patches, in the order of the token grid."""
    (p, q, r), (d, h, w) = patch, view.shape
    tiles = view.reshape(d // p, p, h // q, q, w // r, r).permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(-1, p * q * r)


def sample_of(views: list[View], recipe: Recipe) -> tuple[Tensor, ...]:
    """Patches of both views, and which of them are shown and hidden."""
    order = torch.randperm(recipe.token_count)
    shown = recipe.mask_counts[0]
    return (*(cut(view, recipe.tokens.patch_size) for view in views), order[:shown], order[shown:])


class PlainViews(Dataset[tuple[Tensor, ...]]):
    """Volumes of a store with random transforms, as a person writes them in torch."""

    def __init__(self, store: Store, ids: list[str], recipe: Recipe) -> None:
        self.store, self.ids, self.recipe = store, ids, recipe

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        volume = self.store.read(self.ids[number])
        return self.sample(np.array(volume.pixels), volume.tissue_mean, volume.tissue_std)

    def sample(self, pixels: UInt8[np.ndarray, "D H W"], mean: float, std: float) -> tuple[Tensor, ...]:
        """Two views of a stored volume, cropped, flipped and changed in intensity at random."""
        prepared = self.recipe.preprocessing
        (a, b, c), (d, h, w) = (int(torch.randint(2 * m + 1, ())) for m in prepared.margin), prepared.image_size
        view = torch.from_numpy(pixels).float()[a : a + d, b : b + h, c : c + w]
        if torch.rand(()) < self.recipe.views.flip_slow:
            view = view.flip(0)
        return sample_of([self.augmented(view, mean, std) for _ in range(2)], self.recipe)

    def augmented(self, view: View, mean: float, std: float) -> View:
        views = self.recipe.views
        gain, gamma, speckle = (float(torch.rand(())) for _ in range(3))
        if torch.rand(()) < views.blur:
            line = torch.tensor([0.25, 0.5, 0.25])
            view = F.conv2d(view[:, None], torch.outer(line, line)[None, None], padding=1)[:, 0]
        bent = exp((2 * gamma - 1) * views.gamma)
        view = 255 * (view / 255) ** bent - 255 * (mean / 255) ** bent
        view = exp((2 * gain - 1) * views.gain) * view / max(std, 1.0)
        return view + speckle * views.speckle * torch.randn_like(view)


class DecodedViews(PlainViews):
    """The same from the DICOM files of the store's volumes, each decoded and resampled by SciPy for every sample."""

    def __init__(self, store: Store, ids: list[str], recipe: Recipe) -> None:
        super().__init__(store, ids, recipe)
        files = dict(zip(store.table["volume_id"], store.table["file"], strict=True))
        cohort = store.path.with_name("phantom")
        found = {path.name: path for path in cohort.rglob("*.dcm")}
        self.paths = [found[Path(files[name]).name] for name in ids]

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        pixels = resample_by_scipy(self.paths[number], self.recipe.preprocessing)
        return self.sample(pixels, float(pixels.mean()), float(pixels.std()))


def monai_views(store: Store, ids: list[str], recipe: Recipe) -> Any:
    """The like by MONAI's own transforms on volumes kept in memory. Raises UsageError where it is not installed."""
    volumes = [{"seen": np.array(store.read(name).pixels, np.float32)[None]} for name in ids]
    return monai("data").CacheDataset(volumes, _monai_transforms(recipe), progress=False)


def monai_persistent_views(store: Store, ids: list[str], recipe: Recipe) -> Any:
    """The same with volumes kept by MONAI as files beside the store. Raises UsageError where it is not installed."""

    known = monai("transforms")

    def read(item: dict[str, str]) -> dict[str, Tensor]:
        return {"seen": torch.from_numpy(np.array(store.read(item["volume"]).pixels, np.float32)[None])}

    # as a transform of MONAI's: what comes before the first random one is kept
    steps = known.Compose([known.Lambda(read), *_monai_transforms(recipe).transforms])
    items = [{"volume": name} for name in ids]
    dataset = monai("data").PersistentDataset(items, steps, cache_dir=store.path.with_name("monai"))
    for number in range(len(dataset)):
        dataset[number]  # fills the cache: what is measured is reading from it
    return dataset


def _monai_transforms(recipe: Recipe) -> Any:
    """MONAI's random crop, flip and changes of intensity of two views, and our patches and mask."""
    known, views = monai("transforms"), recipe.views
    both = ["seen", "other"]
    each = [
        step
        for key in both
        for step in (
            known.RandGaussianSmoothd(key, prob=views.blur, sigma_x=(0.5, 0.7), sigma_y=(0.5, 0.7), sigma_z=(0.5, 0.7)),
            known.RandAdjustContrastd(key, prob=1.0, gamma=(exp(-views.gamma), exp(views.gamma))),
            known.RandScaleIntensityd(key, factors=views.gain, prob=1.0),
            known.NormalizeIntensityd(key),
            known.RandGaussianNoised(key, prob=1.0, std=views.speckle),
        )
    ]
    steps = [
        known.RandSpatialCropd("seen", roi_size=recipe.preprocessing.image_size, random_size=False),
        known.RandFlipd("seen", prob=views.flip_slow, spatial_axis=0),
        known.CopyItemsd("seen", names="other"),
        *each,
        partial(_monai_sample, recipe=recipe),
    ]
    return known.Compose(steps)


def _monai_sample(found: dict[str, Any], recipe: Recipe) -> tuple[Tensor, ...]:
    return sample_of([found[key].as_tensor()[0] for key in ("seen", "other")], recipe)


@contextmanager
def compare_with(dataset: Callable[[Store, list[str], Recipe], Any]) -> Iterator[Comparison]:
    """Against a DataLoader over `PlainViews` of the same store, or another of the datasets above.

    Raises UsageError where MONAI is needed and not installed.
    """
    if dataset in (monai_views, monai_persistent_views):
        monai("data")  # refused before anything is drawn
    recipe = bench_recipe(*WHOLE_GRID)
    with phantom_store(recipe.preprocessing) as (_, store):
        _, stream = choose_cohort(store, recipe)
        size, ids = recipe.train.global_batch, stream.volume_ids
        plain = DataLoader(dataset(store, ids, recipe), batch_size=size, shuffle=True, drop_last=True)
        batches = PASSES * (len(ids) // size)
        endless = training_batches(stream, 0, 10**5, workers=0)

        def ours() -> int:
            return sum(len(next(endless).volume_ids) for _ in range(batches))

        def other() -> int:
            return sum(len(batch[0]) for _ in range(PASSES) for batch in plain)

        setup = {
            "volumes": len(ids),
            "patches": recipe.token_count,
            "batch": size,
            "loader_processes": 0,
            "threads": torch.get_num_threads(),
        }
        yield Comparison(rate(ours), rate(other), setup)
