"""The volumes that train and validate, how often each domain is drawn, and how a batch is divided over processes."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

from octjepa.cohort.selection import Selection
from octjepa.errors import UsageError
from octjepa.progress import is_quiet
from octjepa.recipe import Recipe
from octjepa.record import to_json
from octjepa.store import Store
from octjepa.views.loader import TrainingDataset, select_volumes


@dataclass(frozen=True)
class Cohort:
    """Training and validation volumes; `per_epoch` maps each domain to its draws in an epoch.

    There is one domain, "all", unless the recipe balances.
    """

    train: Selection
    val: Selection
    per_epoch: dict[str, int]

    def about(self) -> dict[str, object]:
        """For run.json: only counts."""
        flow = {"train": to_json(self.train.flow.stages), "val": to_json(self.val.flow.stages)}
        return {"flow": flow, "domains": self.domains()}

    def domains(self) -> dict[str, dict[str, int]]:
        """domain -> its training volumes and its draws in an epoch."""
        names = list(self.train.domains.values())
        return {name: {"volumes": names.count(name), "per_epoch": draws} for name, draws in self.per_epoch.items()}

    def print_flow(self) -> None:
        """Prints people, eyes and volumes at every stage on stderr, unless --quiet."""
        if is_quiet():
            return
        lines = ["training cohort", *self.train.flow.lines(), "validation cohort", *self.val.flow.lines()]
        if len(self.per_epoch) > 1:
            draws = (f"{name} {of['per_epoch']} of {of['volumes']} volumes" for name, of in self.domains().items())
            lines.append("draws in an epoch: " + ", ".join(draws))
        print("\n".join(lines), file=sys.stderr, flush=True)


def choose_cohort(store: Store, recipe: Recipe) -> tuple[Cohort, TrainingDataset]:
    """The cohort and its training dataset. Raises as `select_volumes` does; validation may be empty."""
    train = select_volumes(store, recipe, "train")
    dataset = TrainingDataset(store, recipe, train.volume_ids, train.domains)
    return Cohort(train, select_volumes(store, recipe, "val", needed=False), dataset.order.draws_per_epoch), dataset


class BatchShares(NamedTuple):
    """Volumes of an update that one process takes: `share`, in `accumulation` parts of at most `micro`."""

    share: int
    micro: int
    accumulation: int


def batch_shares(recipe: Recipe, processes: int) -> BatchShares:
    """Divides the global batch, which never changes, over the processes.

    Raises UsageError if they cannot take equal whole shares, or a regulariser needs the whole batch.
    """
    batch, regulariser = recipe.train.global_batch, recipe.objective.regulariser
    if regulariser is not None and processes > 1:
        raise UsageError(
            f"objective.{regulariser} needs the whole batch in one process, but {processes} processes would divide it. "
            f"Start one process, or set objective.{regulariser} to 0 (measured, not trained) or null"
        )
    if batch % processes:
        divisors = [n for n in range(1, batch + 1) if batch % n == 0]
        below = max(n for n in divisors if n <= processes)
        near = [str(below), *(str(n) for n in divisors if n > processes)][:2]
        rounded = sorted({max(batch // processes, 1) * processes, math.ceil(batch / processes) * processes})
        raise UsageError(
            f"train.global_batch {batch} cannot be divided evenly over {processes} processes: start "
            f"{' or '.join(near)} of them, or change train.global_batch to {' or '.join(map(str, rounded))} (another "
            "run: the batch is part of the result)"
        )
    share = batch // processes
    micro = min(recipe.machine.micro_batch or share, share)
    return BatchShares(share, micro, math.ceil(share / micro))
