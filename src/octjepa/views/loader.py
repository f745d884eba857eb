"""Batches of fixed shape, in an order that is a function of (seed, position) alone.

`octjepa.views.order` maps each position of an endless stream to a volume; update `u` takes positions
`u * global_batch ...`. No batch is short, no state is kept, and a resume starts at any update.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from octjepa import remote
from octjepa.cohort.selection import Selection, check_not_empty, select
from octjepa.errors import ContractError, OctjepaError, ResourceError, UsageError
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.store.contract import contract_differences
from octjepa.store.storage import ChangedVolume
from octjepa.views.order import VolumeOrder
from octjepa.views.sample import make_sample
from octjepa.views.workers import init_worker, translate_transfer_errors, translate_worker_errors
from octjepa.volume import CanonicalVolume

_WAITS_SECONDS = (0.5, 2.0, 5.0)  # between tries where the machine has no resources: other programs may free some
_MAX_CONSECUTIVE = 16  # unreadable volumes; with a fifth of all unreadable, 16 in a row have a chance of 1 in 10^11
_log = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Samples stacked: the fields of `Sample` with a leading batch axis, and the volumes they come from.

    `voxels` are those of a patch, k the selected tokens. Row `i * b + j` of `context` and `target` is mask `i` of
    sample `j`: with one mask a sample, r = b.
    """

    context_view: Float[Tensor, "b k voxels"]
    target_view: Float[Tensor, "b k voxels"]
    positions: Float[Tensor, "b k 3"]
    grid_index: Int[Tensor, "b k"]
    tissue: Float[Tensor, "b k"]
    context: Int[Tensor, "r n"]
    target: Int[Tensor, "r m"]
    volume_ids: tuple[str, ...]
    unreadable: tuple[tuple[str, str], ...] = ()  # (volume id, reason) of volumes that others replace
    read_retries: int = 0  # reads from a bucket that were tried again

    def micro_batch(self, start: int, stop: int) -> Batch:
        """Samples start..stop: a micro-batch."""
        return Batch(
            self.context_view[start:stop],
            self.target_view[start:stop],
            self.positions[start:stop],
            self.grid_index[start:stop],
            self.tissue[start:stop],
            self._masks_of(self.context, start, stop),
            self._masks_of(self.target, start, stop),
            self.volume_ids[start:stop],
        )

    def _masks_of(self, index: Int[Tensor, "r n"], start: int, stop: int) -> Int[Tensor, "q n"]:
        """The rows of samples start..stop, of every mask."""
        return index.unflatten(0, (-1, len(self.volume_ids)))[:, start:stop].flatten(0, 1)

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The arguments of `VJEPA3D.predict`, on `device`: both views, positions, context and target."""
        fields = (self.context_view, self.target_view, self.positions, self.context, self.target)
        context_view, target_view, positions, context, target = (
            tensor.to(device, non_blocking=True) for tensor in fields
        )
        return context_view, target_view, positions, context, target


def select_volumes(store: Store, recipe: Recipe, split: str, needed: bool = True) -> Selection:
    """The volumes of `split` that the recipe selects, with the flow of people, eyes and volumes.

    Raises ContractError when the store was preprocessed otherwise, UsageError when none is left although `needed`.
    """
    differences = contract_differences(store.preprocessing, recipe.preprocessing)
    if differences:
        raise ContractError(
            f"store {store.location} was made with another preprocessing than recipe {recipe.name} asks for:\n  "
            + "\n  ".join(differences)
            + "\nIngest into a new store with this recipe (octjepa ingest ... --recipe), or choose a recipe that fits."
        )
    if recipe.views.halves and not store.halves:
        raise UsageError(
            f"recipe {recipe.name} has views.halves=true, and the store {store.location} was made without halves: "
            "ingest into a new store with `octjepa ingest ... --halves`, or set views.halves=false"
        )
    selection = select(store, recipe.data, split, recipe.train.seed, recipe.views.halves)
    if needed:
        check_not_empty(selection, store, split)
    return selection


class LoadedSample(NamedTuple):
    """One sample before it is collated; `unreadable` are (volume id, reason) of those it replaces.

    `sample` is a `Sample`, or what else the dataset's `make` returns. `read_retries` counts reads from a bucket that
    were tried again for it.
    """

    volume_id: str
    sample: Any
    unreadable: tuple[tuple[str, str], ...] = ()
    read_retries: int = 0


class TrainingDataset(Dataset[LoadedSample]):
    """Positions of the training stream as a map-style dataset; picklable, so loader processes can hold it.

    Another volume replaces a volume that is excluded or cannot be read. Only the position decides which volume this is,
    so any number of ranks trains on the same volumes, and no other position has its crop and mask. If the machine lacks
    memory or files, the error is raised instead: the volume is fine, and another machine would train on it.
    """

    def __init__(
        self, store: Store, recipe: Recipe, volume_ids: Sequence[str], domains: Mapping[str, str] | None = None
    ) -> None:
        if domains is None and recipe.data.balance != "none":
            raise ValueError(f"data.balance {recipe.data.balance} needs the domains of the volumes (Selection.domains)")
        self.store, self.recipe, self.volume_ids = store, recipe, list(volume_ids)
        self.order = VolumeOrder(volume_ids, recipe.train.seed, domains, recipe.data.balance_power)
        self.excluded: frozenset[str] = frozenset()
        self.unreadable: Collection[str] = ()  # volumes that proved unreadable, for `volume_ids_of_update`
        self.make: Callable[[CanonicalVolume, Recipe, int], Any] = make_sample

    def exclude(self, volume_ids: Iterable[str]) -> None:
        """Leaves these volumes out from now on. Raises OctjepaError when none would be left."""
        self.excluded |= frozenset(volume_ids)
        if self.excluded >= set(self.volume_ids):
            raise OctjepaError("no training volume is left: all of them are excluded or cannot be read")

    def volume_at(self, position: int) -> tuple[int, str]:
        """(visit, volume id) at a position of the stream; a volume's visit is its epoch unless domains are balanced."""
        return next(self._volumes_for(position))

    def volume_ids_of_update(self, update: int) -> list[str]:
        """The volumes of the global batch of `update` (from 0), with the replacements of `unreadable` volumes."""
        size = self.recipe.train.global_batch
        return [
            next(name for _, name in self._volumes_for(position) if name not in self.unreadable)
            for position in range(update * size, (update + 1) * size)
        ]

    def _volumes_for(self, position: int) -> Iterator[tuple[int, str]]:
        """(visit, volume id) of the volume at `position`, then of its replacements, without excluded volumes."""
        for replaced in itertools.count():
            visit, volume_id = self.order.volume_at(position, replaced)
            if volume_id not in self.excluded:
                yield visit, volume_id

    def __getitem__(self, position: int) -> LoadedSample:
        unreadable: dict[str, str] = {}
        kinds: set[type[Exception]] = set()
        before = remote.retry_count()
        limit = min(_MAX_CONSECUTIVE, len(set(self.volume_ids) - self.excluded))
        volumes = self._volumes_for(position)
        while len(unreadable) < limit:
            visit, volume_id = next(volumes)
            if volume_id in unreadable:
                continue
            try:
                sample = self.make(_read(self.store, volume_id, self.recipe.views.halves), self.recipe, visit)
                return LoadedSample(volume_id, sample, (*unreadable.items(),), remote.retry_count() - before)
            except ResourceError:
                raise
            except (OctjepaError, OSError, ValueError) as error:
                unreadable[volume_id] = str(error)
                kinds.add(type(error))
        last = next(reversed(unreadable.values()))
        kind = ChangedVolume if kinds == {ChangedVolume} else OctjepaError
        raise kind(f"{limit} training volumes in a row cannot be read; the last: {last}")


class ValidationDataset(Dataset[LoadedSample]):
    """The fixed validation samples of `volume_ids`. A volume that cannot be read is replaced by the next one."""

    def __init__(self, store: Store, recipe: Recipe, volume_ids: Sequence[str]) -> None:
        self.store, self.recipe, self.volume_ids = store, recipe, list(volume_ids)

    def __len__(self) -> int:
        return len(self.volume_ids)

    def __getitem__(self, number: int) -> LoadedSample:
        for volume_id in self.volume_ids[number:] + self.volume_ids[:number]:
            volume = read_or_warn(self.store, volume_id, self.recipe.views.halves)
            if volume is not None:
                return LoadedSample(volume_id, make_sample(volume, self.recipe, None))
        raise OctjepaError(f"none of {len(self.volume_ids)} validation volumes can be read")


def read_or_warn(store: Store, volume_id: str, halves: bool = False) -> CanonicalVolume | None:
    """The volume, on request with its halves; None, and a warning, if it cannot be read.

    ResourceError passes, for then it is readable.
    """
    try:
        return _read(store, volume_id, halves)
    except ResourceError:
        raise
    except (OctjepaError, OSError, ValueError) as error:
        _log.warning("volume %s cannot be read and is left out of validation: %s", volume_id, error)
        return None


def _read(store: Store, volume_id: str, halves: bool) -> CanonicalVolume:
    """As `Store.read`, tried again a few times where the machine lacks resources."""
    for seconds in _WAITS_SECONDS:
        try:
            return store.read(volume_id, halves)
        except ResourceError:
            time.sleep(seconds)
    return store.read(volume_id, halves)


def collate(items: Sequence[LoadedSample]) -> Batch:
    """Samples stacked along a new batch axis."""
    ids, samples, unreadable, retried = zip(*items, strict=True)
    context_views, target_views, *fields, further_masks = zip(*samples, strict=True)
    context_view, positions, grid_index, tissue, context, target = (
        torch.from_numpy(np.stack(field)) for field in (context_views, *fields)
    )
    target_view = context_view  # without an augmentation both views are one: it is copied and sent once
    if any(first is not other for first, other in zip(context_views, target_views, strict=True)):
        target_view = torch.from_numpy(np.stack(target_views))
    for mask in zip(*further_masks, strict=True):  # the same number of every sample
        further_context, further_target = (torch.from_numpy(np.stack(part)) for part in zip(*mask, strict=True))
        context, target = torch.cat([context, further_context]), torch.cat([target, further_target])  # [r, n], [r, m]
    return Batch(
        context_view,
        target_view,
        positions,
        grid_index,
        tissue,
        context,
        target,
        tuple(ids),
        tuple(pair for pairs in unreadable for pair in pairs),
        sum(retried),
    )


def training_batches(
    stream: TrainingDataset,
    first_update: int,
    total_updates: int,
    workers: int,
    rank: int = 0,
    world: int = 1,
    pin_memory: bool = False,
    collate_samples: Callable[[Sequence[LoadedSample]], Any] = collate,
) -> Iterator[Any]:
    """The share of `rank` in the batch of each update first_update .. total_updates - 1: a `Batch`, or what
    `collate_samples` makes. With `pin_memory` in memory from which a GPU copies while it computes.

    A batch is recipe.train.global_batch volumes; the shares of all `world` ranks, in their order, are the batch that
    one process would take. Raises OctjepaError naming the cause when a loader process dies or too many volumes in a row
    cannot be read, ResourceError where the machine lacks the resources to read.
    """
    size = stream.recipe.train.global_batch
    share = size // world
    starts = [u * size + rank * share for u in range(first_update, total_updates)]
    positions = [range(start, start + share) for start in starts]
    yield from _loader(stream, positions, workers, pin_memory, collate_samples)


def validation_batches(samples: ValidationDataset, batch: int) -> Iterator[Batch]:
    """Every fixed sample once, in order; the last batch may be short."""
    count = len(samples)
    yield from _loader(samples, [range(i, min(i + batch, count)) for i in range(0, count, batch)], 0)


def _loader(
    dataset: Dataset[LoadedSample],
    positions: Sequence[range],
    workers: int,
    pin_memory: bool = False,
    collate_samples: Callable[[Sequence[LoadedSample]], Any] = collate,
) -> Iterator[Any]:
    """Batches of `dataset` at `positions`, in order; errors of worker processes are translated."""
    with warnings.catch_warnings():
        # of more processes than cores, which the trainings report themselves (`octjepa.train.hardware_settings`)
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=positions,  # type: ignore[arg-type] # a list of ranges is an iterable of index lists
            collate_fn=collate_samples,
            pin_memory=pin_memory,
            num_workers=workers,
            prefetch_factor=2 if workers else None,
            worker_init_fn=init_worker,
        )
        batches = iter(loader)
    with translate_worker_errors(), translate_transfer_errors(multiprocessing.active_children() if workers else ()):
        yield from batches
