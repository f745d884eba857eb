"""Peak memory of two updates of a recipe on a CPU: `python -m octjepa.bench.peak_memory RECIPE k=v...`.

It prints bytes: the peak of the process over two whole updates, less what it holds before them, when everything is
loaded and a small update has been taken. Less what it holds, not less an earlier peak: where the CPU has no bf16
arithmetic, loading alone peaks 56 MB above. A process of its own, for a peak is never forgotten; `bench.memory`
starts it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from octjepa.bench.data import random_batch
from octjepa.config import load_recipe
from octjepa.distributed.runtime import Runtime
from octjepa.model import VJEPA3D
from octjepa.objective.ema import update_target
from octjepa.recipe import Recipe
from octjepa.train.optimizer import build_optimizer
from octjepa.train.step import accumulate
from octjepa.views.loader import Batch


def status_bytes(field: str) -> int:
    """VmRSS (held now) or VmHWM (the peak). Not `ru_maxrss`, which a child inherits from the process that starts it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def held(recipe: Recipe) -> int:
    """Bytes."""
    runtime = Runtime(recipe.train.precision)

    def build() -> tuple[VJEPA3D, torch.optim.AdamW]:
        model = VJEPA3D.from_recipe(recipe)
        return model, build_optimizer(model, recipe.train)

    def step(model: VJEPA3D, optimizer: torch.optim.AdamW, batch: Batch) -> None:
        accumulate(model, batch, recipe, runtime)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        update_target(model.target_encoder, model.context_encoder, 0.99)
        optimizer.zero_grad(set_to_none=True)

    warm = build()
    step(*warm, random_batch(recipe, 1))  # libraries load their kernels
    del warm
    before = status_bytes("VmRSS")
    model, optimizer = build()
    for _ in range(2):
        step(model, optimizer, random_batch(recipe))
    return status_bytes("VmHWM") - before


def main(arguments: Sequence[str]) -> None:
    name, *overrides = arguments
    torch.set_num_threads(1)
    print(held(load_recipe(name, overrides)))


if __name__ == "__main__":
    main(sys.argv[1:])
