"""The cost of a run, before it runs: tokens, parameters, arithmetic, memory, updates, learning rate, hours.

The model is built without storage and run twice on shapes: torch's counter adds up its arithmetic, and `StorageCounter`
its memory. `time_run` times a few micro-batches.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from octjepa.distributed.precision import choose_precision, measured_rates, with_precision
from octjepa.distributed.runtime import Runtime, check_compiler
from octjepa.errors import UsageError, is_out_of_memory
from octjepa.machine import free_memory_bytes
from octjepa.model import VJEPA3D
from octjepa.objectives.loss import training_loss
from octjepa.progress import bar
from octjepa.recipe import Recipe
from octjepa.record import Record
from octjepa.train.data import batch_shares
from octjepa.train.engine import take_step
from octjepa.train.hardware_settings import choose_for_machine, compiles, describe_choices, loader_workers
from octjepa.train.optimizer import (
    build_optimizer,
    lr_curve,
    momentum,
    random_start_share,
    total_updates,
    update_target,
    warmup_updates,
)
from octjepa.train.step import accumulate, micro_batch_too_large
from octjepa.views.loader import TrainingDataset, collate

_FP32_BYTES = 4
METRICS_BYTES = 10**8  # metrics.jsonl of 100,000 updates, pictures with it
_WARMUP, _FEWEST, _MOST = 2, 3, 20  # micro-batches: not counted, at least, at most
SECONDS = 15.0  # after which the fewest are enough
FEW_SECONDS = 5.0  # the same if the user did not request a measurement
_QUICK_SECONDS = 0.3  # of the products of a micro-batch, at the measured rate


@dataclass(frozen=True)
class BatchDivision(Record):
    """How the global batch is divided: volumes of a micro-batch, devices, and micro-batches of an update on each."""

    micro: int
    devices: int
    accumulation: int


@dataclass(frozen=True)
class LearningRates(Record):
    """The learning rate of the first and the last update, and the highest."""

    first: float
    peak: float
    last: float


@dataclass(frozen=True)
class Plan(Record):
    """All numbers of a run before it runs.

    precision, threads, compile, attention, loader_workers, data_on: what the run would take of this machine, each with
    its reason. flops_per_volume: forward and backward. peak_memory_bytes: of one device, weights, gradients, moments,
    activations and views together (`peak_bytes` says of how many, and what is not in it; in sharded mode it is not
    divided). disk_bytes: of checkpoints and metrics. volumes_known: whether `volumes` was counted or stated, else it is
    a batch. ema_half_life_samples: None if a teacher is the target.
    """

    recipe: str
    precision: str
    precision_reason: str
    threads: int
    threads_reason: str
    compile: bool
    compile_reason: str
    attention: str
    attention_reason: str
    loader_workers: int
    loader_workers_reason: str
    data_on: str
    data_on_reason: str
    tokens: int
    grid: tuple[int, int, int]
    grid_tokens: int
    context_tokens: int
    target_tokens: int
    parameters: int
    trainable: int
    parameters_by_part: Mapping[str, int]
    flops_per_volume: int
    peak_memory_bytes: int
    disk_bytes: int
    volumes: int
    volumes_known: bool
    updates: int
    warmup_updates: int
    effective_batch: int
    batch: BatchDivision
    epochs: float
    lr: LearningRates
    ema_half_life_samples: float | None
    ema_random_start: float | None


@dataclass(frozen=True)
class TimedParts(Record):
    """The parts of the seconds of an update: medians over `laps` micro-batches on a device."""

    device: str
    threads: int
    micro_batch: int
    load_seconds: float
    work_seconds: float
    step_seconds: float
    laps: int


@dataclass(frozen=True)
class Timing(Record):
    """Seconds of an update and hours of a run, measured on this machine."""

    seconds_per_update: float
    hours: float
    measured: TimedParts


def plan(recipe: Recipe, volumes: int | None = None) -> Plan:
    """All numbers of a run. `volumes` counts training volumes; without it `data.expected_volumes`, then a batch.

    Raises UsageError when the batch cannot be divided over `machine.devices`, or the views cannot be made where the
    recipe wants them.
    """
    device = Runtime("fp32").device
    precision, reason = choose_precision(recipe.train.precision, device)
    recipe = with_precision(recipe, precision)
    devices = recipe.machine.devices or 1
    share, micro, accumulation = batch_shares(recipe, devices)
    n_volumes = volumes or recipe.data.expected_volumes
    if recipe.data.max_samples is not None:
        n_volumes = min(n_volumes or recipe.data.max_samples, recipe.data.max_samples)
    counted = n_volumes or recipe.train.global_batch
    with torch.device("meta"):
        model = VJEPA3D.from_recipe(recipe)
    flops = _step_flops(model, recipe)
    every = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    updates = total_updates(recipe.train, counted)
    curve = lr_curve(recipe.train, updates)
    context, target = recipe.mask_counts
    choices: Mapping[str, Any] = describe_choices(choose_for_machine(recipe, device, updates, counted))
    return Plan(
        recipe=recipe.name,
        precision=precision,
        precision_reason=reason,
        **choices,
        tokens=recipe.token_count,
        grid=recipe.grid,
        grid_tokens=recipe.grid_tokens,
        context_tokens=context,
        target_tokens=target,
        parameters=every,
        trainable=trainable,
        parameters_by_part={name: _count(part) for name, part in model.named_children()},
        flops_per_volume=flops,
        peak_memory_bytes=peak_bytes(recipe, micro, share),
        disk_bytes=_disk_bytes(recipe, every, trainable, updates),
        volumes=counted,
        volumes_known=n_volumes is not None,
        updates=updates,
        warmup_updates=warmup_updates(recipe.train, updates),
        effective_batch=recipe.train.global_batch,
        batch=BatchDivision(micro, devices, accumulation),
        epochs=updates * recipe.train.global_batch / counted,
        lr=LearningRates(curve[0], max(curve), curve[-1]),
        ema_half_life_samples=_half_life(recipe, updates),
        ema_random_start=None if recipe.objective.teacher else random_start_share(updates, recipe.objective),
    )


def _disk_bytes(recipe: Recipe, parameters: int, trainable: int, updates: int) -> int:
    """The most that checkpoints and metrics.jsonl take: the last k checkpoints, the permanent, the best, and one being
    written.

    A checkpoint holds the weights and two moments of each trained weight, all in fp32.
    """
    if recipe.checkpoint.dir is None:
        return METRICS_BYTES
    permanent = updates // recipe.checkpoint.keep_every_updates if recipe.checkpoint.keep_every_updates else 0
    return _FP32_BYTES * (parameters + 2 * trainable) * (recipe.checkpoint.keep_last + 2 + permanent) + METRICS_BYTES


def _count(part: torch.nn.Module) -> int:
    return sum(p.numel() for p in part.parameters())


def _half_life(recipe: Recipe, updates: int) -> float | None:
    """Samples until half of the target is new: by the horizon, or at the cosine schedule's first momentum.

    None where a teacher is the target.
    """
    if recipe.objective.teacher is not None:
        return None
    at = updates if recipe.objective.averaging_share is not None else 0
    m = momentum(at, updates, recipe.objective)
    return math.log(0.5) / math.log(m) * recipe.train.global_batch if m > 0 else 0.0


def _step_flops(model: VJEPA3D, recipe: Recipe) -> int:
    """Floating-point operations forward and backward of one volume."""
    voxels = math.prod(recipe.tokens.patch_size)
    tokens = recipe.token_count
    context_count, target_count = recipe.mask_counts
    patches = torch.empty(1, tokens, voxels, device="meta")
    positions = torch.empty(1, tokens, 3, device="meta")
    rows = recipe.masks.per_target
    context = torch.empty(rows, context_count, dtype=torch.int64, device="meta")
    target = torch.empty(rows, target_count, dtype=torch.int64, device="meta")
    counter = FlopCounterMode(display=False)
    with counter:
        prediction = model.predict(patches, patches, positions, context, target)
        training_loss(recipe.objective, prediction, positions, context, target, recipe.grid, update=0)[0].backward()
    return int(counter.get_total_flops())


class StorageCounter(TorchDispatchMode):
    """While open, adds up the storages that live; `peak` is the most there was, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._held = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self._held += storage.nbytes()
            self.peak = max(self.peak, self._held)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._held -= self._known.pop(key, 0)


def peak_bytes(recipe: Recipe, micro: int, share: int | None = None) -> int:
    """The most memory that one device needs for an update of `micro` volumes at once; its optimizer has moments.

    `share` is what the device takes of the global batch, by default one micro-batch. Of several, sums of gradients wait
    to be added in pairs; and on the CPU, the views of all of them are in the same memory.

    torch's fake tensors have shapes, types and lifetimes, but no bytes; every storage is counted from its first use
    until it is freed. What a kernel takes for itself, and what an allocator keeps back, is not in it. A test holds the
    result within 15 % of the peak measured on a CPU.
    """
    tokens, (context_count, target_count) = recipe.token_count, recipe.mask_counts
    voxels = math.prod(recipe.tokens.patch_size)
    with torch.device("meta"):
        model = VJEPA3D.from_recipe(recipe)
    runtime = Runtime(recipe.train.precision)
    bf16, share = runtime.precision == "bf16", share or micro
    views = share if runtime.device.type == "cpu" else micro
    sums = max(number.bit_count() for number in range(math.ceil(share / micro)))  # waiting, while the last is computed
    with FakeTensorMode(allow_non_fake_inputs=True), StorageCounter() as storages:
        model = model.to_empty(device="cpu")
        optimizer = build_optimizer(model, recipe.train)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        optimizer.step()  # the first step makes the moments
        optimizer.zero_grad(set_to_none=True)
        pending = [[torch.empty_like(p) for p in model.parameters() if p.requires_grad] for _ in range(sums)]
        batch = torch.empty(views, tokens, voxels), torch.empty(views, tokens, voxels)
        context_view, target_view = batch[0][:micro], batch[1][:micro]
        positions = torch.empty(micro, tokens, 3)
        index = torch.empty(micro * recipe.masks.per_target, tokens, dtype=torch.int64)
        context, target = index[:, :context_count], index[:, context_count : context_count + target_count]
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            prediction = model.predict(context_view, target_view, positions, context, target)
        loss, _ = training_loss(recipe.objective, prediction, positions, context, target, recipe.grid, update=1)
        loss.backward()
        del prediction, loss, pending
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        update_target(model.target_encoder, model.context_encoder, 0.99)
    return storages.peak


def is_quick_to_time(planned: Plan, device: torch.device) -> bool:
    """Whether timing micro-batches of a run on `device` takes seconds, and fits into memory with room to spare.

    A micro-batch takes 6 to 50 times as long as its products at the measured rate of large matrices (small models on
    two CPU cores), so the arithmetic does not predict hours.
    """
    if device.type not in ("cpu", "cuda") or 2 * planned.peak_memory_bytes > free_memory_bytes():
        return False
    bf16, fp32 = measured_rates(device)
    rate = (bf16 if planned.precision == "bf16" else fp32) * 1e9
    return planned.flops_per_volume * planned.batch.micro / rate < _QUICK_SECONDS


def time_run(recipe: Recipe, dataset: TrainingDataset, updates: int, enough_seconds: float | None = None) -> Timing:
    """Seconds of an update and hours of `updates` on devices like this one.

    Only one of `machine.devices` is timed, with its share of the global batch; communication is not in it, nor are
    validation, the monitor and checkpoints. With loader processes, loading costs what it exceeds the arithmetic by.
    After `enough_seconds` (SECONDS unless given) three micro-batches are enough. Raises UsageError where a micro-batch
    does not fit into memory.
    """
    enough_seconds = SECONDS if enough_seconds is None else enough_seconds
    runtime = Runtime(recipe.train.precision)
    _, micro, accumulation = batch_shares(recipe, recipe.machine.devices or 1)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    optimizer = build_optimizer(model, recipe.train)
    if compiles(recipe, runtime.device, updates):
        check_compiler(runtime.device)
        model.compile_blocks()
    laps: list[tuple[float, float, float]] = []
    began = time.perf_counter()
    with bar("time", _WARMUP + _FEWEST, "micro-batch") as progress:
        while len(laps) < _WARMUP + _FEWEST or (len(laps) < _MOST and time.perf_counter() - began < enough_seconds):
            start = time.perf_counter()
            batch = collate([dataset[len(laps) * micro + position] for position in range(micro)])
            loaded = time.perf_counter()
            try:
                metrics = accumulate(model, batch, recipe, runtime, len(laps), micro)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise UsageError(micro_batch_too_large(recipe, micro, f"the memory of {runtime.device}")) from None
            float(metrics["train/loss"])  # waits for the device
            worked = time.perf_counter()
            metrics = take_step(model, optimizer, metrics, runtime, recipe.train.clip_norm, float("inf"))
            update_target(model.target_encoder, model.context_encoder, 0.99, metrics["healthy"])
            float(metrics["healthy"])
            laps.append((loaded - start, worked - loaded, time.perf_counter() - worked))
            progress.advance()
    load, work, step = (statistics.median(lap) for lap in zip(*laps[_WARMUP:], strict=True))
    workers = loader_workers(recipe, runtime.device)
    each = max(work, load / workers) if workers else load + work
    seconds = accumulation * each + step
    parts = TimedParts(str(runtime.device), torch.get_num_threads(), micro, load, work, step, len(laps) - _WARMUP)
    return Timing(seconds, updates * seconds / 3600, parts)
