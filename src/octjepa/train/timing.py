"""How long a run will take: a few of its micro-batches and steps timed on this device, with nothing kept of them."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from octjepa.distributed.runtime import Runtime
from octjepa.errors import UsageError
from octjepa.model import VJEPA3D
from octjepa.progress import bar
from octjepa.recipe import Recipe
from octjepa.train.micro_batch import is_out_of_memory, too_much
from octjepa.train.optimizer import build_optimizer
from octjepa.train.preflight import batch_shares, check_compiler
from octjepa.train.step import accumulate, take_step
from octjepa.views.loader import TrainingDataset, collate

_SETTLE, _LEAST, _MOST = 2, 3, 20  # micro-batches: not counted, at least, at most
_SECONDS = 15.0  # after which the least is enough


def time_run(recipe: Recipe, stream: TrainingDataset, updates: int) -> dict[str, Any]:
    """`seconds_per_update` and `hours` of `updates` on devices like this one, and what they are made of (medians).

    Of `machine.devices` only one is timed, with its share of the global batch; what they say to each other is not in
    it, nor are validation, the monitor and checkpoints. With loader processes, loading costs what it exceeds the
    arithmetic by. Raises UsageError where a micro-batch does not fit into memory.
    """
    runtime = Runtime(recipe.train.precision)
    _, micro, accumulation = batch_shares(recipe, recipe.machine.devices or 1)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    optimizer = build_optimizer(model, recipe.train)
    if recipe.machine.compile:
        check_compiler(runtime.device)
        model.compile_blocks()
    laps: list[tuple[float, float, float]] = []
    began = time.perf_counter()
    with bar("time", _SETTLE + _LEAST, "micro-batch") as progress:
        while len(laps) < _SETTLE + _LEAST or (len(laps) < _MOST and time.perf_counter() - began < _SECONDS):
            start = time.perf_counter()
            batch = collate([stream[len(laps) * micro + place] for place in range(micro)])
            loaded = time.perf_counter()
            try:
                figures = accumulate(model, batch, recipe, runtime, len(laps), micro)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise UsageError(too_much(recipe, micro, f"the memory of {runtime.device}")) from None
            float(figures["train/loss"])  # waits for the device
            worked = time.perf_counter()
            taken = take_step(model, optimizer, figures, runtime, 0.99, recipe.train.clip_norm, float("inf"))
            float(taken["healthy"])
            laps.append((loaded - start, worked - loaded, time.perf_counter() - worked))
            progress.advance()
    load, work, step = (statistics.median(one) for one in zip(*laps[_SETTLE:], strict=True))
    workers = recipe.machine.loader_workers
    each = max(work, load / workers) if workers else load + work
    seconds = accumulation * each + step
    return {
        "seconds_per_update": seconds,
        "hours": updates * seconds / 3600,
        "measured": {
            "device": str(runtime.device), "threads": torch.get_num_threads(), "micro_batch": micro,
            "load_seconds": load, "work_seconds": work, "step_seconds": step, "laps": len(laps) - _SETTLE,
        },
    }  # fmt: skip
