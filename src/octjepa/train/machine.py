"""What a run takes of its machine where the recipe leaves that open: loader processes, compiled blocks, views on a GPU.

None of it changes what a run computes beyond rounding. `docs/gpu.md` has the rules in one table.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from octjepa.errors import UsageError
from octjepa.recipe import Recipe
from octjepa.views.device_store import host_only, stored_bytes

MOST_WORKERS = 16
COMPILE_FROM = 1000  # updates: building the blocks takes a minute or so
DEVICE_SHARE = 0.25  # of the device's free memory that stored voxels may fill by default


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def loader_workers(recipe: Recipe, device: torch.device) -> int:
    """Processes that make samples. Left open: none on a CPU, which has the arithmetic to do; beside an accelerator
    every core of this process's share but one."""
    if recipe.machine.loader_workers is not None:
        return recipe.machine.loader_workers
    if device.type == "cpu":
        return 0
    share = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_WORKERS, share - 1))


def compiles(recipe: Recipe, device: torch.device, updates: int) -> bool:
    """Whether blocks are compiled. Left open: on a GPU with Triton and a C compiler, for `COMPILE_FROM` updates."""
    if recipe.machine.compile is not None:
        return recipe.machine.compile
    if device.type != "cuda" or updates < COMPILE_FROM:
        return False
    compiler = os.environ.get("CC")
    names = [compiler] if compiler else ["gcc", "clang", "cc"]
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, names))


def cuts_on_device(recipe: Recipe, device: torch.device, volumes: int) -> bool:
    """Whether views are cut on the device, from voxels that are kept there.

    Raises UsageError where the recipe asks for that and for an augmentation that only the host computes.
    """
    wanted, reason = recipe.machine.data_on, host_only(recipe)
    if wanted == "device" and reason is not None:
        raise UsageError(
            f"machine.data_on=device cannot do {reason}, which is for the host: set it to 0, or data_on=auto"
        )
    if wanted != "auto":
        return wanted == "device"
    if device.type != "cuda" or reason is not None:
        return False
    free, _ = torch.accelerator.get_memory_info(device)
    return stored_bytes(recipe, volumes) <= DEVICE_SHARE * free
