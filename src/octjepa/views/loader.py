"""Batches of fixed shape, in an order that is a function of (seed, position) alone.

`octjepa.views.order` says which volume stands at each position of the endless stream; update `u` takes positions
`u * global_batch ...`. No batch is short, no state is kept, and a resume asks for its first update.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from octjepa.errors import ContractError
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.store.select import Selection, refuse_empty, select
from octjepa.views.order import Order
from octjepa.views.sample import Sample, check_contract, make_sample


class Batch(NamedTuple):
    """Samples stacked: the fields of `Sample` with a leading batch axis, and the volumes they come from."""

    context_view: Float[Tensor, "b k voxels"]
    target_view: Float[Tensor, "b k voxels"]
    places: Float[Tensor, "b k 3"]
    grid_index: Int[Tensor, "b k"]
    tissue: Float[Tensor, "b k"]
    context: Int[Tensor, "b n"]
    target: Int[Tensor, "b m"]
    volume_ids: tuple[str, ...]

    def part(self, start: int, stop: int) -> Batch:
        """Samples start..stop: a micro-batch."""
        return Batch(
            self.context_view[start:stop],
            self.target_view[start:stop],
            self.places[start:stop],
            self.grid_index[start:stop],
            self.tissue[start:stop],
            self.context[start:stop],
            self.target[start:stop],
            self.volume_ids[start:stop],
        )

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What `VJEPA3D.predict` takes, on `device`."""
        asked = (self.context_view, self.target_view, self.places, self.context, self.target)
        a, b, c, d, e = (tensor.to(device, non_blocking=True) for tensor in asked)
        return a, b, c, d, e


def select_volumes(store: Store, recipe: Recipe, split: str, needed: bool = True) -> Selection:
    """What the recipe takes of `split`, with the flow of people, eyes and volumes that led there.

    Raises ContractError when the store was preprocessed otherwise, UsageError when nothing is left but `needed`.
    """
    differences = check_contract(store.preprocessing, recipe)
    if differences:
        raise ContractError(
            f"store {store.location} was made with another preprocessing than recipe {recipe.name} asks for:\n  "
            + "\n  ".join(differences)
            + "\nIngest into a new store with this recipe (octjepa ingest ... --recipe), or choose a recipe that fits."
        )
    selection = select(store, recipe.data, split, recipe.train.seed)
    if needed:
        refuse_empty(selection, store, split)
    return selection


class Stream(Dataset[Sample]):
    """Positions of the training stream as a map-style dataset; picklable, so loader processes can hold it."""

    def __init__(
        self, store: Store, recipe: Recipe, volume_ids: Sequence[str], domains: Mapping[str, str] | None = None
    ) -> None:
        if domains is None and recipe.data.balance != "none":
            raise ValueError(f"data.balance {recipe.data.balance} needs the domains of the volumes (Selection.domains)")
        self.store, self.recipe, self.volume_ids = store, recipe, list(volume_ids)
        self.order = Order(volume_ids, recipe.train.seed, domains, recipe.data.balance_power)

    def place(self, position: int) -> tuple[int, str]:
        """(visit, volume id) at a position of the stream; a volume's visit is its epoch unless domains are balanced."""
        return self.order.place(position)

    def __getitem__(self, position: int) -> tuple[str, Sample]:  # type: ignore[override]
        visit, volume_id = self.place(position)
        return volume_id, make_sample(self.store.read(volume_id), self.recipe, visit)


class FixedSamples(Dataset[Sample]):
    """The fixed validation samples of `volume_ids`."""

    def __init__(self, store: Store, recipe: Recipe, volume_ids: Sequence[str]) -> None:
        self.store, self.recipe, self.volume_ids = store, recipe, list(volume_ids)

    def __len__(self) -> int:
        return len(self.volume_ids)

    def __getitem__(self, number: int) -> tuple[str, Sample]:  # type: ignore[override]
        volume_id = self.volume_ids[number]
        return volume_id, make_sample(self.store.read(volume_id), self.recipe, None)


def collate(items: Sequence[tuple[str, Sample]]) -> Batch:
    ids, samples = zip(*items, strict=True)
    a, b, c, d, e, f, g = (torch.from_numpy(np.stack(field)) for field in zip(*samples, strict=True))
    return Batch(a, b, c, d, e, f, g, tuple(ids))


def training_batches(stream: Stream, first_update: int, total_updates: int, workers: int) -> Iterator[Batch]:
    """One batch of recipe.train.global_batch volumes for each update first_update .. total_updates - 1."""
    size = stream.recipe.train.global_batch
    positions = [range(u * size, (u + 1) * size) for u in range(first_update, total_updates)]
    yield from _loader(stream, positions, workers)


def fixed_batches(samples: FixedSamples, batch: int, workers: int = 0) -> Iterator[Batch]:
    """Every fixed sample once, in order; the last batch may be short."""
    count = len(samples)
    yield from _loader(samples, [range(i, min(i + batch, count)) for i in range(0, count, batch)], workers)


def _leave_signals_to_the_run(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the run finishes its update, and needs its loader until then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _loader(dataset: Dataset[Sample], positions: Sequence[range], workers: int) -> DataLoader[Batch]:
    return DataLoader(  # collate makes Batches of Samples
        dataset,  # type: ignore[arg-type]
        batch_sampler=positions,  # type: ignore[arg-type] # a list of ranges is an iterable of index lists
        collate_fn=collate,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        worker_init_fn=_leave_signals_to_the_run,
    )
