"""Before the first update: how the recipe's global batch is dealt over the processes, or why it cannot be; whether all
of them run the same; whether there is what compiling needs.

The global batch is science and never changes; what each process takes of it follows from their number.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from typing import NamedTuple

import torch

from octjepa.distributed.runtime import Runtime
from octjepa.errors import UsageError
from octjepa.recipe import Recipe
from octjepa.train.run_folder import code_hash


class Shares(NamedTuple):
    """Volumes an update that one process takes, in `accumulation` parts of at most `micro`."""

    share: int
    micro: int
    accumulation: int


def batch_shares(recipe: Recipe, processes: int) -> Shares:
    """Raises UsageError where the processes cannot take equal whole shares of the global batch, or a regulariser must
    not be given a share of it."""
    batch, added = recipe.train.global_batch, recipe.objective.regulariser
    if added is not None and processes > 1:
        raise UsageError(
            f"objective.{added} looks at the spread within what it is given: on {processes} processes each would look "
            f"at its share of the batch alone, which is another objective. Start one process, or set objective.{added} "
            "to 0 (a meter) or null"
        )
    if batch % processes:
        fitting = [n for n in range(1, batch + 1) if batch % n == 0]
        below = max(n for n in fitting if n <= processes)
        near = [str(below), *(str(n) for n in fitting if n > processes)][:2]
        rounded = sorted({max(batch // processes, 1) * processes, math.ceil(batch / processes) * processes})
        raise UsageError(
            f"train.global_batch {batch} cannot be dealt evenly over {processes} processes: start {' or '.join(near)} "
            f"of them, or change train.global_batch to {' or '.join(map(str, rounded))} (another run: the batch is "
            "part of the result)"
        )
    share = batch // processes
    micro = min(recipe.machine.micro_batch or share, share)
    return Shares(share, micro, math.ceil(share / micro))


def check_same_run(runtime: Runtime, recipe: Recipe, data: str) -> None:
    """Raises UsageError on every rank where processes differ in octjepa's source, in torch, in the recipe or in `data`.

    Each host may have a copy of the store: of copies that differ, the ranks would deal out different orders.
    """
    if runtime.world_size == 1:
        return
    asked = hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()
    told = runtime.all_gather(
        [f"code {code_hash()[:12]} with torch {torch.__version__}, recipe {asked[:12]}, volumes {data}"]
    )
    other = next((rank for rank, what in enumerate(told) if what != told[0]), None)
    if other is not None:
        raise UsageError(
            f"the processes do not run the same: rank 0 has {told[0]}, rank {other} {told[other]}. Bring one commit, "
            "environment (scripts/launch/tpu deploy does both), recipe and store to all hosts, then start again"
        )


def check_compiler(device: torch.device) -> None:
    """Raises UsageError where `machine.compile` asks for kernels that nothing here can build, or needs."""
    if device.type == "xla":
        raise UsageError("machine.compile=true is unused on XLA, which compiles everything: set machine.compile=false")
    asked = os.environ.get("CXX")
    names = [asked] if asked else ["g++", "clang++"]
    if device.type == "cpu" and not any(map(shutil.which, names)):
        raise UsageError(
            f"machine.compile=true needs a C++ compiler on a CPU, and {' and '.join(names)} are not to be found: "
            "install one (Debian: apt install g++), name it in CXX, or set machine.compile=false"
        )
