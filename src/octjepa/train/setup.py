"""A run before its first update: who takes part, the model, the optimizer, and where it takes up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from octjepa.checkpoint.location import Location, parse_location
from octjepa.distributed.runtime import Runtime
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.train.cohort import choose_cohort
from octjepa.train.optimizer import build_optimizer
from octjepa.train.preflight import batch_shares, check_compiler, check_same_run
from octjepa.train.resume import Start, start_from
from octjepa.train.run_folder import chunks_hash, data_hash, open_run
from octjepa.train.schedule import lr_curve, total_updates
from octjepa.train.validate import judge
from octjepa.views.loader import Batch, TrainingDataset, training_batches

_log = logging.getLogger(__name__)


@dataclass
class Run:
    """What does not change while it trains, alike on every rank, but for the weights and their moments.

    `ids` are the training volumes, `held_out` those that validate; `saves` is where checkpoints lie, None for none;
    `micro` volumes are taken at once.
    """

    recipe: Recipe
    store: Store
    out: Path
    saves: Location | None
    runtime: Runtime
    ids: list[str]
    held_out: list[str]
    stream: TrainingDataset
    total: int
    micro: int
    model: VJEPA3D
    optimizer: torch.optim.AdamW
    start: Start

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes and tracks."""
        return self.runtime.rank == 0

    @property
    def judged_on(self) -> str:
        return "val" if self.held_out else "train_fixed"

    def batches_from(self, update: int) -> Iterator[Batch]:
        """This rank's share of every batch from `update` on."""
        workers, runtime = self.recipe.machine.loader_workers, self.runtime
        return training_batches(self.stream, update, self.total, workers, runtime.rank, runtime.world_size)

    def judged(self, recipe: Recipe) -> dict[str, float]:
        """Figures of the model on fixed samples, with the views of `recipe`."""
        return judge(self.model, self.runtime, self.store, self.ids, self.held_out or self.ids, recipe)

    def shard_and_compile(self) -> None:
        """The model over the ranks and its blocks compiled, where the recipe asks. Raises as `check_compiler`."""
        if self.recipe.machine.parallel == "sharded" and self.runtime.world_size > 1:
            from octjepa.train.sharding import shard  # half a second that few runs need

            self.model, self.optimizer = shard(self.model, self.optimizer, self.recipe, self.runtime)
            self.runtime.sharded = True
        if self.recipe.machine.compile:
            check_compiler(self.runtime.device)
            self.model.compile_blocks()


def prepare(recipe: Recipe, store: Store, out: Path, resume: bool, runtime: Runtime) -> Run:
    """Checks what can be checked, opens or resumes the folder `out`, fills the model. Raises as `pretrain`."""
    shares = batch_shares(recipe, runtime.world_size)
    cohort, stream = choose_cohort(store, recipe)
    ids, held_out = cohort.train.volume_ids, cohort.val.volume_ids
    seen = data_hash(store, ids), data_hash(store, held_out), chunks_hash(store, ids, recipe)
    check_same_run(runtime, recipe, "-".join(one[:8] for one in seen))
    total = total_updates(recipe.train, len(ids))
    lr_curve(recipe.train, total)
    saves = None if recipe.checkpoint.dir is None else parse_location(recipe.checkpoint.dir, within=out)
    runtime.run_on_rank_zero(lambda: open_run(out, saves, recipe, store, ids, runtime, resume, cohort.about()))
    if runtime.rank == 0:
        cohort.tell()
        if not held_out:
            _log.warning(
                "%s holds nobody of split val: the figures of this run are of the training volumes", store.location
            )
    torch.manual_seed(recipe.train.seed)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    optimizer = build_optimizer(model, recipe.train)
    start = start_from(out, saves, store, ids, model, optimizer, recipe, runtime, resume)
    stream.exclude(start.left_out)
    return Run(recipe, store, out, saves, runtime, ids, held_out, stream, total, shares.micro, model, optimizer, start)
