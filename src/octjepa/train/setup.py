"""A run before its first update: volumes, model, optimizer, the checkpoint to resume, and the checks that are
possible."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octjepa.checkpoint.location import Location, parse_location
from octjepa.distributed.precision import agree_on_precision, with_precision
from octjepa.distributed.runtime import Runtime, check_compiler, distributed_context
from octjepa.errors import OctjepaError, UsageError
from octjepa.locks import writer_lock
from octjepa.model import VJEPA3D
from octjepa.model.blocks import Block
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.train.checkpointing import RunLocation, Start, start_from
from octjepa.train.data import batch_shares, choose_cohort
from octjepa.train.hardware_settings import (
    Choice,
    choose_for_machine,
    compiles,
    describe_choices,
    print_choices,
)
from octjepa.train.optimizer import build_optimizer, lr_curve, total_updates
from octjepa.train.run_folder import (
    chunks_hash,
    code_hash,
    data_hash,
    forget_run,
    open_run,
    record_checkpoint_dir,
    recorded_precision,
)
from octjepa.train.validate import evaluate
from octjepa.views.loader import Batch, TrainingDataset, training_batches
from octjepa.views.workers import translate_worker_errors

if TYPE_CHECKING:
    from octjepa.views.cuts import DeviceLookup
    from octjepa.views.device_store import DeviceStore

_log = logging.getLogger(__name__)


@dataclass
class Run:
    """The parts of a run, equal on every rank; only the weights and their moments change while it trains.

    `checkpoint_dir` None: no checkpoints. `training_ids`, `validation_ids`: volume ids; the second may be empty.
    `micro_batch`: volumes in a forward pass. `total`: updates of the whole run. `choices`: what it takes of its
    machine, chosen before anything lies on the device. `on_device` None: the host makes views.
    """

    recipe: Recipe
    store: Store
    out: Path
    checkpoint_dir: Location | None
    runtime: Runtime
    training_ids: list[str]
    validation_ids: list[str]
    dataset: TrainingDataset
    total: int
    micro_batch: int
    model: VJEPA3D
    optimizer: torch.optim.AdamW
    start: Start
    choices: dict[str, Choice]
    on_device: DeviceStore | DeviceLookup | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files and sends metrics to trackers."""
        return self.runtime.rank == 0

    @property
    def validated_on(self) -> str:
        """The prefix of validation metrics: val, or train_fixed if no people are held out."""
        return "val" if self.validation_ids else "train_fixed"

    @property
    def loader_workers(self) -> int:
        """Processes that make samples."""
        return int(self.choices["loader_workers"].value)

    def batches_from(self, update: int) -> Iterator[Batch]:
        """This rank's share of every batch from `update` on."""
        runtime = self.runtime
        share = update, self.total, self.loader_workers, runtime.rank, runtime.world_size
        if self.on_device is not None:
            return self.on_device.batches(self.dataset, *share)
        return training_batches(self.dataset, *share, pin_memory=runtime.device.type == "cuda")

    def validate(self, recipe: Recipe | None = None) -> dict[str, float]:
        """Metrics of the model on fixed samples, with the views of the run's recipe or of another."""
        validation = self.validation_ids or self.training_ids
        return evaluate(self.model, self.runtime, self.store, self.training_ids, validation, recipe or self.recipe)

    def print_choices(self) -> None:
        """On rank 0, prints what the run takes of its machine, and warns of what that lacks."""
        if self.is_writer:
            runtime = self.runtime
            print_choices(runtime.device, runtime.precision, runtime.precision_reason, self.choices)

    def shard_and_compile(self) -> None:
        """Shards the model over the ranks, and compiles its blocks. Raises as `check_compiler`.

        All updates of the run count, not those left, so that a resumed run computes what an uninterrupted one does.
        """
        if self.recipe.machine.parallel == "sharded" and self.runtime.world_size > 1:
            self.model, self.optimizer = shard(self.model, self.optimizer, self.recipe, self.runtime)
            self.runtime.sharded = True
        if compiles(self.recipe, self.runtime.device, self.total):
            check_compiler(self.runtime.device)
            self.model.compile_blocks()


@contextmanager
def started_run(recipe: Recipe, store: Store, out: Path, resume: bool) -> Iterator[Run]:
    """Joins the processes, locks the folder `out` on rank 0, and opens or resumes the run; raises as `pretrain`.

    Inside the context, the death of a loader process is an OctjepaError that names its cause.
    """
    with translate_worker_errors(), distributed_context() as runtime, ExitStack() as lock:
        batch_shares(recipe, runtime.world_size)  # refuses a batch that these ranks cannot share, before they confer
        runtime.run_on_rank_zero(lambda: _lock(recipe, out, lock))
        recorded = partial(recorded_precision, out, resume)
        recipe = with_precision(recipe, agree_on_precision(recipe.train.precision, recorded, runtime))
        yield prepare_run(recipe, store, out, resume, runtime)


def _lock(recipe: Recipe, out: Path, lock: ExitStack) -> None:
    """Holds the run's folder, and that of its checkpoints if it lies outside of it on this machine."""
    lock.enter_context(writer_lock(out))
    checkpoints = None if recipe.checkpoint.dir is None else parse_location(recipe.checkpoint.dir, within=out)
    # By its name: a link in the run that leads out of it is refused later, and nothing is made through it.
    if isinstance(checkpoints, Path) and not Path(os.path.abspath(checkpoints)).is_relative_to(os.path.abspath(out)):
        lock.enter_context(writer_lock(checkpoints))


def prepare_run(recipe: Recipe, store: Store, out: Path, resume: bool, runtime: Runtime) -> Run:
    """Checks what can be checked, opens or resumes the folder `out`, fills the model. Raises as `pretrain`."""
    micro_batch = batch_shares(recipe, runtime.world_size).micro
    cohort, dataset = choose_cohort(store, recipe)
    training_ids, validation_ids = cohort.train.volume_ids, cohort.val.volume_ids
    hashes = data_hash(store, training_ids), data_hash(store, validation_ids), chunks_hash(store, training_ids, recipe)
    check_same_run(runtime, recipe, "-".join(digest[:8] for digest in hashes))
    total = total_updates(recipe.train, len(training_ids))
    lr_curve(recipe.train, total)  # raises if a rate is not positive
    checkpoint_dir = None if recipe.checkpoint.dir is None else parse_location(recipe.checkpoint.dir, within=out)
    choices = choose_for_machine(recipe, runtime.device, total, len(training_ids))
    devices = runtime.describe() | describe_choices(choices)
    runtime.run_on_rank_zero(
        lambda: open_run(out, checkpoint_dir, recipe, store, training_ids, devices, resume, cohort.about())
    )
    if runtime.rank == 0:
        cohort.print_flow()
        if not validation_ids:
            _log.warning(
                "%s has no validation people: the metrics of this run are of the training volumes", store.location
            )
    torch.manual_seed(recipe.train.seed)
    location = RunLocation(out, checkpoint_dir, resume)
    try:
        model = VJEPA3D.from_recipe(recipe).to(runtime.device)
        optimizer = build_optimizer(model, recipe.train)
        start = start_from(location, store, training_ids, model, optimizer, recipe, runtime)
    except OctjepaError:
        if runtime.rank == 0 and not resume:
            forget_run(out)  # so that the corrected command finds no run in the way
        raise
    runtime.run_on_rank_zero(lambda: record_checkpoint_dir(out, recipe))
    dataset.exclude(start.excluded)
    return Run(
        recipe=recipe,
        store=store,
        out=out,
        checkpoint_dir=checkpoint_dir,
        runtime=runtime,
        training_ids=training_ids,
        validation_ids=validation_ids,
        dataset=dataset,
        total=total,
        micro_batch=micro_batch,
        model=model,
        optimizer=optimizer,
        start=start,
        choices=choices,
        on_device=views_on_device(choices["data_on"].value, store, recipe, training_ids, runtime.device),
    )


def views_on_device(
    data_on: int | str, store: Store, recipe: Recipe, volume_ids: list[str], device: torch.device
) -> DeviceStore | DeviceLookup | None:
    """The object that makes views on the device, by the choice `data_on`; None where the host makes them."""
    if data_on == "device":
        from octjepa.views.device_store import DeviceStore  # only runs on a GPU need it

        return DeviceStore(store, recipe, volume_ids, device)
    if data_on == "patches":
        from octjepa.views.cuts import DeviceLookup

        return DeviceLookup(device)
    return None


def shard(
    model: VJEPA3D, optimizer: torch.optim.AdamW, recipe: Recipe, runtime: Runtime
) -> tuple[VJEPA3D, torch.optim.AdamW]:
    """Shards weights, gradients, moments and EMA target over the ranks (FSDP2), for models larger than one device.

    Encoders and predictor are sharded block by block alike, so that a shard of the target averages the same shard of
    the student. Checkpoints stay whole: a sharded run continues replicated, and the other way round.
    """
    # these imports take half a second, and few runs need them
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from torch.distributed.tensor import DTensor, distribute_tensor

    moments = {
        name: optimizer.state[parameter] for name, parameter in model.named_parameters() if parameter in optimizer.state
    }
    mesh = init_device_mesh(runtime.device.type, (runtime.world_size,))
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in ("predict", "encode", "targets"):  # ways into the model next to forward; none calls another
        register_fsdp_forward_method(model, method)
    sharded = build_optimizer(model, recipe.train)
    for name, parameter in model.named_parameters():
        for kind, value in moments.get(name, {}).items():
            if kind != "step":
                assert isinstance(parameter, DTensor)
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            sharded.state[parameter][kind] = value
    return model, sharded


def check_same_run(runtime: Runtime, recipe: Recipe, data: str) -> None:
    """Raises UsageError on every rank where processes differ in octjepa's source, in torch, in the recipe or in `data`.

    Each host may have a copy of the store: from copies that differ, the ranks would draw different batches.
    """
    if runtime.world_size == 1:
        return
    recipe_hash = hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()
    versions = runtime.all_gather(
        [f"code {code_hash()[:12]} with torch {torch.__version__}, recipe {recipe_hash[:12]}, volumes {data}"]
    )
    other = next((rank for rank, version in enumerate(versions) if version != versions[0]), None)
    if other is not None:
        raise UsageError(
            f"the processes do not run the same: rank 0 has {versions[0]}, rank {other} {versions[other]}. Bring one "
            "commit, environment (scripts/launch/tpu deploy does both), recipe and store to all hosts, then start again"
        )
