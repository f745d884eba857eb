"""Two real processes that train together, started without a launcher, each with the environment of one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch

from fork_server import ForkedProcess, start
from octjepa.checkpoint import folder
from octjepa.files import read_json_lines
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe

SUPPORT = Path(__file__).parent
PYTHONPATH = f"{SUPPORT.parents[1] / 'src'}:{SUPPORT}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_ranks(code: str, *arguments: object, world: int = 2) -> list[ForkedProcess]:
    """Processes that run `code` with `arguments` in sys.argv, as ranks 0 .. world - 1 of one job.

    They are forked from a process that has imported torch and this module (`fork_server`).
    """
    job = os.environ | {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PYTHONPATH,
    }
    return [
        start(code, [str(argument) for argument in arguments], job | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]


def finish(processes: list[ForkedProcess], seconds: float = 300) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each."""
    try:
        result = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.poll() or 0, out, err) for process, (out, err) in zip(processes, result, strict=True)]


BEGIN = """
import os, signal, sys, json
from pathlib import Path
import torch
import torch.distributed as dist
from octjepa.errors import OctjepaError
from octjepa.train import checkpointing, loop
from octjepa.train.loop import pretrain
from ranks import SIXTEEN, recipe_of
from synthetic import MemoryStore

torch.set_num_threads(1)
out = Path(sys.argv[1])
rank = int(os.environ["RANK"])
"""


SIXTEEN = {"max_updates": 4, "global_batch": 16, "base_lr": 1e-3, "precision": "fp32"}


def recipe_of(updates=6, **sections):
    train = {"max_updates": updates, "global_batch": 4, "base_lr": 1e-3, "precision": "fp32"}
    given = {"checkpoint": {"every_updates": 2, "keep_last": 9}, "machine": {"micro_batch": 2}, **sections}
    return small_recipe(**{"train": train, **given})


def run_alone(out, updates=6, resume=False, **sections):
    recipe = recipe_of(updates, **sections)
    torch.set_num_threads(1)
    return pretrain(recipe, MemoryStore(recipe.preprocessing), out, resume)


def weights_of(run, update=None):
    retained = folder.list_checkpoints(run / "checkpoints")
    chosen = retained[-1] if update is None else next(one for one in retained if one.name == f"step-{update:08d}")
    return {
        f"{file}/{name}": value
        for file in ("model.safetensors", "optimiser.safetensors")
        for name, value in folder.read_tensors(chosen, file).items()
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def losses_of(run):
    return [
        (line["update"], line["train/loss"]) for line in read_json_lines(run / "metrics.jsonl") if "train/loss" in line
    ]
