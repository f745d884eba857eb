"""Jobs in processes of their own: a training that is killed, one without the GPU, ranks, phantoms, a row of the exam.

python -m benchmarks.gpu.child SETTINGS WORK JOB [ARGUMENT...]
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from math import inf
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.exam.cohorts import EXAMINED, PRETRAINING, make_cohorts
from benchmarks.peers.data import random_batch

from octjepa.cli.failures import exit_with_message
from octjepa.config import load_recipe
from octjepa.distributed.runtime import Runtime
from octjepa.files import write_json
from octjepa.model import VJEPA3D
from octjepa.progress import set_quiet
from octjepa.store import Store
from octjepa.train.engine import take_step
from octjepa.train.loop import pretrain
from octjepa.train.optimizer import build_optimizer, update_target
from octjepa.train.setup import shard
from octjepa.train.step import accumulate

from .learn import read_row
from .settings import FULL, REHEARSAL, SMALLEST, Settings

SIZES = {one.name: one for one in (FULL, REHEARSAL, SMALLEST)}
_RANK_UPDATES = 3


def train(settings: Settings, work: Path, store: str, out: str, *recipe: str) -> None:
    """`octjepa pretrain`, resumed where `out` is a run. OCTJEPA_DETERMINISTIC: sums in one order on a GPU."""
    if os.environ.get("OCTJEPA_DETERMINISTIC"):
        torch.use_deterministic_algorithms(True, warn_only=True)
    name, *overrides = recipe
    summary = pretrain(load_recipe(name, overrides), Store.open(store), Path(out), (Path(out) / "run.json").is_file())
    print(json.dumps(summary.to_json()), flush=True)


def one_rank(settings: Settings, work: Path, out: str) -> None:
    """The losses of a few updates alone, in a process group of one rank, and sharded over it (FSDP2)."""
    recipe = load_recipe(settings.small[0], [*settings.small[1:], "train.precision=fp32"])
    torch.manual_seed(0)
    batch = random_batch(recipe)
    losses = {"alone": _losses(recipe, batch, sharded=False)}
    device = Runtime("fp32").device
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    method, minutes = f"tcp://127.0.0.1:{port}", timedelta(minutes=2)
    dist.init_process_group(backend, init_method=method, rank=0, world_size=1, timeout=minutes)
    try:
        losses["replicated"] = _losses(recipe, batch, sharded=False)
        losses["sharded"] = _losses(recipe, batch, sharded=True)
    finally:
        dist.destroy_process_group()
    write_json(Path(out), {"backend": backend, "losses": losses})


def _losses(recipe, batch, sharded: bool) -> list[float]:
    runtime = Runtime("fp32")
    torch.manual_seed(0)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    optimizer = build_optimizer(model, recipe.train)
    if sharded:
        model, optimizer = shard(model, optimizer, recipe, runtime)
        runtime.sharded = True
    losses = []
    for update in range(_RANK_UPDATES):
        metrics = accumulate(model, batch, recipe, runtime, update)
        metrics = take_step(model, optimizer, metrics, runtime, recipe.train.clip_norm, inf)
        update_target(model.target_encoder, model.context_encoder, 0.99, metrics["healthy"])
        losses.append(float(metrics["train/loss"]))
    return losses


def cohorts(settings: Settings, work: Path) -> None:
    """The phantoms and stores of the exam, and of the encoders' pretraining."""
    os.nice(10)
    make_cohorts(work, settings.exam, (PRETRAINING, *EXAMINED), settings.workers)


def row(settings: Settings, work: Path, name: str) -> None:
    """One row of the exam."""
    read_row(settings, work, name)


JOBS: dict[str, Callable[..., None]] = {"train": train, "one_rank": one_rank, "cohorts": cohorts, "row": row}


def main(arguments: list[str]) -> None:
    """Runs a job."""
    settings, work, job, *rest = arguments
    set_quiet(True)
    torch.set_num_threads(1 if job == "cohorts" else min(4, torch.get_num_threads()))
    JOBS[job](SIZES[settings], Path(work), *rest)


if __name__ == "__main__":
    with exit_with_message(lambda: None):
        main(sys.argv[1:])
