"""Choose the hardware settings that the recipe leaves open: threads, compiled blocks, loader processes, views.

`choose_for_machine` lists the choices with their reasons. `plan` and `doctor` print them. A run prints them when it
begins and records them in run.json. They change the results only by rounding. `docs/launch.md` has the rules in one
table.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import shutil
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch

from octjepa.distributed.runtime import free_device_bytes
from octjepa.errors import UsageError
from octjepa.machine import cores
from octjepa.model.blocks import PLAIN_TOKENS, trains_by_plain_products
from octjepa.objectives.base import get_objective
from octjepa.progress import is_quiet
from octjepa.recipe import Recipe

MOST_WORKERS = 16
COMPILE_FROM = 1000  # updates: building the blocks takes a minute or so
DEVICE_SHARE = 0.25  # of the device's free memory that stored voxels may fill by default
_REQUESTED = "the recipe asks for it"
_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A hardware setting of a run, and its reason. `to_do` is for a machine that lacks something: the run continues,
    with a warning.
    """

    value: bool | int | str
    reason: str
    to_do: str = ""

    @property
    def text(self) -> str:
        """The value for people."""
        return {True: "yes", False: "no"}[self.value] if isinstance(self.value, bool) else str(self.value)


def choose_for_machine(recipe: Recipe, device: torch.device, updates: int, volumes: int) -> dict[str, Choice]:
    """Every choice for a run of `updates` on `volumes` on `device`; the precision of `recipe` is fp32 or bf16.

    Raises as `choose_data_on`.
    """
    return {
        "threads": choose_threads(),
        "compile": choose_compile(recipe, device, updates),
        "attention": choose_attention(recipe, device),
        "loader_workers": choose_loader_workers(recipe.machine.loader_workers, device),
        "data_on": choose_data_on(recipe, device, volumes),
    }


def describe_choices(choices: Mapping[str, Choice]) -> dict[str, object]:
    """Each choice and, as `..._reason`, why."""
    described: dict[str, object] = {}
    for name, choice in choices.items():
        described |= {name: choice.value, f"{name}_reason": choice.reason}
    return described


def print_choices(device: torch.device, precision: str, reason: str, choices: Mapping[str, Choice]) -> None:
    """Prints a line on stderr, unless --quiet, and a warning for everything that the machine lacks."""
    if not is_quiet():
        parts = [f"precision {precision} ({reason})", *(f"{name} {choice.text}" for name, choice in choices.items())]
        print(f"on {device}: {', '.join(parts)}", file=sys.stderr, flush=True)
    for name, choice in choices.items():
        if choice.to_do:
            _log.warning("%s: %s; %s", name, choice.reason, choice.to_do)


def local_processes() -> int:
    """The processes that a launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def choose_threads() -> Choice:
    """torch's threads, which octjepa leaves as they are; more of all processes than cores are a warning."""
    threads, processes, available = torch.get_num_threads(), local_processes(), cores()
    origin = "OMP_NUM_THREADS sets them" if os.environ.get("OMP_NUM_THREADS") else "torch sets them"
    if threads * processes <= available:
        return Choice(threads, f"{origin}, {_each(processes)} on {_count(available, 'core')}")
    threads_text = f"{_count(threads, 'thread')} {_each(processes)} on {_count(available, 'core')} slow each other down"
    if processes > available:
        return Choice(threads, threads_text, f"start {_count(available, 'process')}, each with OMP_NUM_THREADS=1")
    return Choice(threads, threads_text, f"set OMP_NUM_THREADS={available // processes}")


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}" + ("" if number == 1 else "es" if unit.endswith("s") else "s")


def _each(processes: int) -> str:
    return "in one process" if processes == 1 else f"in each of {processes} processes"


def choose_loader_workers(workers: int | None, device: torch.device) -> Choice:
    """Processes that make samples, `workers` in the recipe. Left open: none on a CPU, which has the arithmetic to do;
    next to an accelerator every core of this process's share but one."""
    processes, available = local_processes(), cores()
    if workers is not None:
        if workers * processes <= available:
            return Choice(workers, _REQUESTED)
        workers_text = f"{_count(workers, 'loader process')} {_each(processes)} share {_count(available, 'core')}"
        key = "machine.loader_workers (of a fine-tuning: loader_workers)"
        return Choice(workers, workers_text, f"lower {key} to {available // processes}")
    if device.type == "cpu":
        return Choice(0, "a CPU has the arithmetic to do")
    share = available // processes
    workers = max(1, min(MOST_WORKERS, share - 1))
    return Choice(workers, f"all but one of a process's {_count(share, 'core')}, {MOST_WORKERS} at most")


def loader_workers(recipe: Recipe, device: torch.device) -> int:
    """Processes that make samples."""
    return int(choose_loader_workers(recipe.machine.loader_workers, device).value)


def choose_compile(recipe: Recipe, device: torch.device, updates: int) -> Choice:
    """Whether blocks are compiled. Left open: on a GPU with Triton and a C compiler, for `COMPILE_FROM` updates."""
    if recipe.machine.compile is not None:
        return Choice(recipe.machine.compile, _REQUESTED)
    if device.type == "cpu":
        return Choice(False, "a CPU gains little by it and waits for the compiler; machine.compile=true asks for it")
    if device.type != "cuda":
        return Choice(False, "untried on this device")
    if updates < COMPILE_FROM:
        return Choice(False, f"{updates} updates: it takes about a minute, which pays from {COMPILE_FROM:,} on")
    compiler = os.environ.get("CC")
    names = [compiler] if compiler else ["gcc", "clang", "cc"]
    missing = [] if importlib.util.find_spec("triton") is not None else ["Triton"]
    missing += [] if any(map(shutil.which, names)) else [f"a C compiler ({', '.join(names)})"]
    if missing:
        missing_text = f"{' and '.join(missing)} not found: blocks run uncompiled, which is slower"
        return Choice(
            False, missing_text, "install what is missing (CC names a compiler), or set machine.compile=false"
        )
    return Choice(True, f"a GPU with a compiler, {updates:,} updates")


def compiles(recipe: Recipe, device: torch.device, updates: int) -> bool:
    """Whether blocks are compiled."""
    return bool(choose_compile(recipe, device, updates).value)


def choose_attention(recipe: Recipe, device: torch.device) -> Choice:
    """How attention is computed while a run trains; the precision of `recipe` is fp32 or bf16."""
    dtype = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
    lengths = {recipe.mask_counts[0], sum(recipe.mask_counts)}  # of the encoder and of the predictor
    predictor = get_objective(recipe.objective.name).predictor
    if predictor == "projector":
        lengths = set(recipe.mask_counts)  # of its two views
    if predictor == "mlp":
        lengths = {recipe.token_count}  # the encoder's: hidden tokens are in it
    if not trains_by_plain_products(dtype, device) or min(lengths) > PLAIN_TOKENS:
        return Choice("scaled_dot_product_attention", f"{recipe.train.precision} on {device.type}")
    lengths_text = f"bf16 on cpu, {min(lengths)} to {max(lengths)} tokens"
    if max(lengths) <= PLAIN_TOKENS:
        return Choice("plain products", lengths_text)
    return Choice(f"plain products up to {PLAIN_TOKENS} tokens, else scaled_dot_product_attention", lengths_text)


def host_only(recipe: Recipe) -> str | None:
    """The augmentations of the recipe that only the host computes; None if there is none."""
    views = recipe.views
    names = ("rotation_degrees", "zoom", "blur", "speckle", "halves")
    return next((f"views.{name}" for name in names if getattr(views, name)), None)


def stored_bytes(recipe: Recipe, volumes: int) -> int:
    """Bytes of the voxels of so many stored volumes."""
    return volumes * math.prod(recipe.preprocessing.stored_size)


def choose_data_on(recipe: Recipe, device: torch.device, volumes: int) -> Choice:
    """Where views are made: "host", "patches" or "device", as `MachineRecipe.data_on` has them.

    Raises UsageError where the recipe asks for the device and for an augmentation that only the host computes.
    """
    wanted, reason = recipe.machine.data_on, host_only(recipe)
    if wanted not in ("auto", "host") and reason is not None:
        raise UsageError(
            f"machine.data_on={wanted} does not support {reason}, which only the host computes: switch {reason} off, "
            "or set machine.data_on=auto"
        )
    if wanted != "auto":
        return Choice(wanted, _REQUESTED)
    if device.type != "cuda":
        return Choice("host", f"views are made on a GPU or by the host, and this is {device.type}")
    if reason is not None:
        return Choice("host", f"only the host computes {reason}")
    needed, free = stored_bytes(recipe, volumes), free_device_bytes(device)
    memory_text = f"{needed / 1e9:.3g} GB of stored voxels, {free / 1e9:.3g} GB free"
    return Choice("device" if needed <= DEVICE_SHARE * free else "patches", memory_text)
