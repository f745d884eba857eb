"""Who takes part in a run: training and validation volumes, how they were chosen, how often each domain is drawn."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from octjepa.progress import is_quiet
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.store.select import Selection
from octjepa.views.loader import TrainingDataset, select_volumes


@dataclass(frozen=True)
class Cohort:
    """`per_epoch` maps each domain to its draws in an epoch; one domain, "all", unless the recipe balances."""

    train: Selection
    val: Selection
    per_epoch: dict[str, int]

    def about(self) -> dict[str, Any]:
        """For run.json: counts alone."""
        flow = {"train": self.train.flow.to_json(), "val": self.val.flow.to_json()}
        return {"flow": flow, "domains": self.domains()}

    def domains(self) -> dict[str, dict[str, int]]:
        """domain -> its training volumes and its draws in an epoch."""
        names = list(self.train.domains.values())
        return {name: {"volumes": names.count(name), "per_epoch": draws} for name, draws in self.per_epoch.items()}

    def tell(self) -> None:
        """People, eyes and volumes at every stage on stderr, unless --quiet."""
        if is_quiet():
            return
        lines = ["training cohort", *self.train.flow.lines(), "validation cohort", *self.val.flow.lines()]
        if len(self.per_epoch) > 1:
            told = (f"{name} {of['per_epoch']} of {of['volumes']} volumes" for name, of in self.domains().items())
            lines.append("draws in an epoch: " + ", ".join(told))
        print("\n".join(lines), file=sys.stderr, flush=True)


def choose_cohort(store: Store, recipe: Recipe) -> tuple[Cohort, TrainingDataset]:
    """The cohort and the stream of its training volumes. Raises as `select_volumes` does; validation may be empty."""
    train = select_volumes(store, recipe, "train")
    stream = TrainingDataset(store, recipe, train.volume_ids, train.domains)
    return Cohort(train, select_volumes(store, recipe, "val", needed=False), stream.order.draws_per_epoch), stream
