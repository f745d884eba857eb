"""Part 2, is it fast: share of the device's own product rate, other implementations, loaders, memory at each size."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from functools import partial
from math import inf

import torch
from benchmarks.peers.alternating_runs import Comparison, rate, run_alternately, summary
from benchmarks.peers.data import WHOLE_GRID, random_batch
from benchmarks.peers.sparse_vjepa import FAMILIES, sparse_update
from benchmarks.peers.step import update_of
from benchmarks.peers.transformers_vjepa2 import step_by_vjepa2

from octjepa.distributed.runtime import Runtime, check_compiler
from octjepa.errors import OctjepaError
from octjepa.files import read_json_lines
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe
from octjepa.train.data import choose_cohort
from octjepa.train.engine import take_step
from octjepa.train.hardware_settings import loader_workers
from octjepa.train.optimizer import build_optimizer, update_target
from octjepa.train.plan import peak_bytes, plan
from octjepa.train.step import accumulate
from octjepa.views.cuts import DeviceLookup
from octjepa.views.device_store import DeviceStore
from octjepa.views.loader import Batch, training_batches

from .campaign import Campaign, Figures, Step
from .device import copy_gigabytes, forget, free_bytes, gemm_tflops, largest_that_fits, on_device, peak_memory, timed
from .learn import encoder_recipe
from .right import resolved, small_run

GOAL = 0.45  # of the rate of a plain product
_LARGEST_MICRO = 128
_FREE_SHARE = 0.9  # of the memory: the rest is for kernels and what an allocator keeps back
_COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 24}


def rates(campaign: Campaign) -> Figures:
    """What the device can do: products of random matrices, copies."""
    campaign.wait_for_cohorts()
    device, repeats = campaign.device, campaign.settings.repeats
    found: Figures = {}
    for side in campaign.settings.gemm_sides:
        for dtype in (torch.bfloat16, torch.float32):
            name = f"{str(dtype).removeprefix('torch.')}_{side}"
            found[f"tflops_{name}"] = gemm_tflops(device, dtype, side, repeats)
    found["copy_gb_per_second"] = copy_gigabytes(device, _COPY_BYTES.get(device.type, 1 << 24), repeats)
    return found


def best_gemm(campaign: Campaign, precision: str) -> float:
    """The best rate of products in a precision, in FLOP/s. Raises OctjepaError where `rates` is not there."""
    name = "bfloat16" if precision == "bf16" else "float32"
    known = [value for key, value in campaign.figures("rates").items() if key.startswith(f"tflops_{name}_")]
    if not known:
        raise OctjepaError("the step `rates` has to be done first")
    return max(known) * 1e12


def micro_batches(recipe: Recipe, free: int) -> list[int]:
    """Micro-batches from the largest power of two that fits into `free` bytes by `plan`, downwards to 1."""
    size = 1 << (min(_LARGEST_MICRO, recipe.train.global_batch).bit_length() - 1)
    while size > 1 and peak_bytes(recipe, size) > _FREE_SHARE * free:
        size //= 2
    return [size >> halvings for halvings in range(size.bit_length())]


class Trainer:
    """Updates of one micro-batch that lies on the device, as `octjepa pretrain` takes them."""

    def __init__(self, recipe: Recipe, micro: int, compiled: bool) -> None:
        self.recipe, self.runtime, self.micro = recipe, Runtime(recipe.train.precision), micro
        torch.manual_seed(0)
        self.model = VJEPA3D.from_recipe(recipe).to(self.runtime.device)
        if compiled:
            check_compiler(self.runtime.device)
            torch.compiler.reset()  # blocks of another size count against the limit of recompilations
            self.model.compile_blocks()
        self.optimizer = build_optimizer(self.model, recipe.train)
        self.batch: Batch = on_device(random_batch(recipe, micro), self.runtime.device)

    def update(self) -> None:
        """One update."""
        metrics = accumulate(self.model, self.batch, self.recipe, self.runtime, 0, self.micro)
        metrics = take_step(self.model, self.optimizer, metrics, self.runtime, self.recipe.train.clip_norm, inf)
        update_target(self.model.target_encoder, self.model.context_encoder, 0.99, metrics["healthy"])


def step_of(campaign: Campaign, name: str) -> Figures:
    """Updates of one size: the micro-batch that fits, rate plain and compiled, share of products, memory."""
    settings, device = campaign.settings, campaign.device
    if name not in settings.steps:
        return {"left_out": f"not in the settings {settings.name}"}
    recipe = resolved(campaign.recipe(settings.steps[name]))
    flops, best = plan(recipe).flops_per_volume, best_gemm(campaign, recipe.train.precision)

    def fits(size: int) -> None:
        Trainer(recipe, size, compiled=False).update()

    sizes = micro_batches(recipe, free_bytes(device))
    micro = largest_that_fits(sizes, fits, device)
    if not micro:
        raise OctjepaError(f"not one volume of {name} fits into the memory of {device}")
    found: Figures = {
        "planned_micro_batch": sizes[0],
        "micro_batch": micro,
        "precision": recipe.train.precision,
        "tokens": recipe.token_count,
        "gflops_per_volume": flops / 1e9,
    }
    for compiled in (False, True) if settings.compiled else (False,):
        kind = "compiled" if compiled else "plain"
        gc.collect()
        forget(device)
        try:
            started = time.monotonic()
            with peak_memory(device) as peak:
                trainer = Trainer(recipe, micro, compiled)
                trainer.update()
                trainer.update()
            first = time.monotonic() - started
            seconds = timed(trainer.update, device, settings.repeats, settings.turns)
        except Exception as error:  # without a compiler the plain figures stand
            found[kind] = {"missing": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            continue
        found[kind] = {
            "volumes_per_second": micro / seconds,
            "tflops": micro / seconds * flops / 1e12,
            "share_of_gemm": micro / seconds * flops / best,
            "peak_bytes": peak.bytes,
            "planned_bytes": peak_bytes(recipe, micro),
            "first_two_updates_seconds": first,
        }
        del trainer
    shares = [one["share_of_gemm"] for one in map(found.get, ("plain", "compiled")) if one and "share_of_gemm" in one]
    return {**found, "goal": GOAL, "reached": bool(shares) and max(shares) >= GOAL}


def peers(campaign: Campaign) -> Figures:
    """An update against `transformers`' V-JEPA 2 and a sparse V-JEPA in plain PyTorch; every patch on both sides."""
    found: Figures = {}
    for name in ("transformers", "sparse"):
        gc.collect()
        forget(campaign.device)
        more = ["model.positions=rope_tiled"] if name == "transformers" else [f"masks.per_target={FAMILIES}"]
        recipe = resolved(campaign.recipe(campaign.settings.peers, *WHOLE_GRID, *more))
        try:
            theirs = step_by_vjepa2(recipe) if name == "transformers" else sparse_update(recipe)
            both = Comparison(rate(update_of(recipe)), rate(theirs), {})
            runs = run_alternately(both, max(1, campaign.settings.repeats), name)
        except Exception as error:  # an absent library, or too little memory for the peer
            found[name] = {"missing": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            continue
        found[name] = {key: value for key, value in summary(runs).items() if key != "runs"}
    return found


def loader(campaign: Campaign) -> Figures:
    """Samples a second of loader processes, alone, with views made on the device, and with voxels there; then runs."""
    store, device = campaign.small_store(), campaign.device
    found: Figures = {}
    for name in list(campaign.settings.encoders)[:2]:
        recipe = resolved(encoder_recipe(campaign.settings, name, updates=campaign.settings.loader_updates + 10))
        workers = max(1, loader_workers(recipe, device))
        _, dataset = choose_cohort(store, recipe)
        here = DeviceStore(store, recipe, dataset.volume_ids, device)
        total = campaign.settings.loader_updates
        pinned = device.type == "cuda"
        host = training_batches(dataset, 0, total, workers, pin_memory=pinned)
        found[name] = {
            "workers": workers,
            "batch": recipe.train.global_batch,
            "host": _volumes_per_second((on_device(one, device) for one in host), campaign),
            "patches": _volumes_per_second(DeviceLookup(device).batches(dataset, 0, total, workers), campaign),
            "device": _volumes_per_second(here.batches(dataset, 0, total, workers), campaign),
            "store_bytes": here.pixels.numel(),
        }
    for where in ("host", "patches", "device"):
        lines = read_json_lines(small_run(campaign, f"data-on-{where}", f"machine.data_on={where}") / "metrics.jsonl")
        seconds = [float(line["seconds"]) for line in lines if "train/loss" in line]
        found[f"seconds_per_update_{where}"] = statistics.median(seconds)
    return found


def _volumes_per_second(batches: Iterator[Batch], campaign: Campaign) -> float:
    """From the second batch on: processes start with the first."""
    first = next(batches)
    start, volumes = time.perf_counter(), 0
    for batch in batches:
        volumes += len(batch.volume_ids)
    if campaign.device.type != "cpu":
        torch.accelerator.synchronize()
    del first
    return volumes / (time.perf_counter() - start)


STEPS = (
    Step("fast", "rates", 15, rates),
    Step("fast", "step_small", 100, partial(step_of, name="small")),
    Step("fast", "step_base", 120, partial(step_of, name="base")),
    Step("fast", "peers", 60, peers),
    Step("fast", "loader", 60, loader),
)
