"""Peak memory of an update: what `octjepa plan` predicts against what a process holds, and ours against transformers'.

Measured on `tiny_cpu_vjepa` with 64 volumes at once, so that activations exceed what the interpreter holds anyway.
A process never forgets its peak, so `python -m benchmarks.peers.memory NETWORK RECIPE k=v...` measures in a process of
its own and prints bytes: the peak over two updates, less the memory held before them, when all libraries are loaded and
one small update has been taken. It is not reduced by an earlier peak: on a CPU without bf16 arithmetic, loading peaks
56 MB above what is held afterwards. Reads /proc, so Linux alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.peers import data, transformers_vjepa2
from benchmarks.peers.alternating_runs import Comparison

from octjepa.config import load_recipe
from octjepa.errors import OctjepaError, UsageError
from octjepa.recipe import Recipe
from octjepa.train.plan import plan

VOLUMES = 64
STATUS = Path("/proc/self/status")
ROOT = Path(__file__).resolve().parents[2]
# Freed memory goes back to the system at once: else the peak is that of glibc's habits. Threads hold buffers each.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def peak_memory_bytes(recipe: Sequence[str], network: str = "octjepa") -> int:
    """Peak memory of two updates of a recipe (its name, then overrides), measured in a process of its own.

    network: whose update, one of `NETWORKS`. Raises UsageError where the system does not report it, OctjepaError where
    that process fails.
    """
    if not STATUS.is_file():
        raise UsageError(f"the peak of a process is read from {STATUS}, which this system has not: measure on Linux")
    command = [sys.executable, "-m", "benchmarks.peers.memory", network, *recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | _ENVIRONMENT, cwd=ROOT)
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise OctjepaError(f"the process that measures memory failed: {last}")
    return int(done.stdout)


@contextmanager
def compare_with_measured() -> Iterator[Comparison]:
    """`plan`'s prediction as ours, the measured peak as the other."""
    batch = f"train.global_batch={VOLUMES}"
    recipe = data.bench_recipe(batch)
    predicted = plan(recipe).peak_memory_bytes
    alike = [*data.RECIPE, batch, f"train.precision={recipe.train.precision}"]
    yield Comparison(lambda: predicted, lambda: peak_memory_bytes(alike), _setup(recipe), warms_up=False)


@contextmanager
def compare_with_vjepa2(network: str, *changes: str) -> Iterator[Comparison]:
    """Measured peaks: ours with `changes` of the recipe, VJEPA2Model's on every patch. Raises as `vjepa2_model`."""
    batch = f"train.global_batch={VOLUMES}"
    recipe = data.bench_recipe(batch, *changes)
    precision = f"train.precision={recipe.train.precision}"
    mine = [*data.RECIPE, batch, precision, *changes]
    theirs = [*data.RECIPE, batch, precision, *data.WHOLE_GRID, "model.positions=rope_tiled"]
    transformers_vjepa2.import_transformers()
    yield Comparison(
        lambda: peak_memory_bytes(mine), lambda: peak_memory_bytes(theirs, network), _setup(recipe), warms_up=False
    )


def _setup(recipe: Recipe) -> dict[str, str | int]:
    return {
        "recipe": recipe.name,
        "tokens": recipe.token_count,
        "batch": VOLUMES,
        "precision": recipe.train.precision,
        "device": "cpu",
        "threads": 1,
    }


def _status_bytes(field: str) -> int:
    """VmRSS (held now) or VmHWM (the peak). Not `ru_maxrss`, which a child inherits from the process that starts it."""
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def _octjepa_updates(recipe: Recipe, sizes: Sequence[int]) -> None:
    """An update of each batch size."""
    import torch

    from octjepa.distributed.runtime import Runtime
    from octjepa.model import VJEPA3D
    from octjepa.train.optimizer import build_optimizer, update_target
    from octjepa.train.step import accumulate

    runtime = Runtime(recipe.train.precision)
    model = VJEPA3D.from_recipe(recipe)
    optimizer = build_optimizer(model, recipe.train)
    for size in sizes:
        batch = data.random_batch(recipe, size)  # held to the end of the update, as in training
        accumulate(model, batch, recipe, runtime)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        update_target(model.target_encoder, model.context_encoder, 0.99)
        optimizer.zero_grad(set_to_none=True)


def _vjepa2_updates(predict: transformers_vjepa2.Predict, recipe: Recipe, sizes: Sequence[int]) -> None:
    """`UPDATES` updates (two) of the first batch size."""
    train = recipe.train.model_copy(update={"global_batch": sizes[0]})
    transformers_vjepa2.step_by_vjepa2(recipe.model_copy(update={"train": train}), predict)()


NETWORKS: dict[str, Callable[[Recipe, Sequence[int]], None]] = {
    "octjepa": _octjepa_updates,
    "transformers": partial(_vjepa2_updates, transformers_vjepa2.predicted_features),
    "shipped": partial(_vjepa2_updates, transformers_vjepa2.predicted_as_shipped),
}


def _measure(network: str, recipe: Recipe) -> int:
    """Bytes that two updates in this process add to what it holds."""
    updates = NETWORKS[network]
    updates(recipe, [1])  # libraries load their kernels
    before = _status_bytes("VmRSS")
    updates(recipe, [recipe.train.global_batch] * 2)
    return _status_bytes("VmHWM") - before


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    print(_measure(sys.argv[1], load_recipe(sys.argv[2], sys.argv[3:])))
