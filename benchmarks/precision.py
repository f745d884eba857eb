"""One training step in bf16 against fp32, and RoPE against sin-cos positions, in turn in one run.

    .venv/bin/python benchmarks/precision.py [RECIPE] [ROUNDS]

Prints the median seconds of each and their ratio. Everything is that of `octjepa pretrain`: model, loss, optimiser,
EMA; only the data is random numbers.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from octjepa.config import load_recipe
from octjepa.model import VJEPA3D
from octjepa.objective.ema import update_target
from octjepa.recipe import Recipe
from octjepa.train.optimiser import build_optimiser
from octjepa.train.runtime import Runtime
from octjepa.train.update import accumulate
from octjepa.views.loader import Batch

VARIANTS = {
    "bf16, rope": ["train.precision=bf16", "model.positions=rope"],
    "fp32, rope": ["train.precision=fp32", "model.positions=rope"],
    "bf16, sincos": ["train.precision=bf16", "model.positions=sincos"],
}


def random_batch(recipe: Recipe) -> Batch:
    size, count, (context, _) = recipe.train.global_batch, recipe.token_count, recipe.mask_counts
    p, q, r = recipe.tokens.patch_size
    view = torch.randn(size, count, p * q * r)
    order = torch.stack([torch.randperm(count) for _ in range(size)])
    index = torch.arange(count).expand(size, -1)
    places = torch.rand(size, count, 3) * 8
    share = torch.ones(size, count)
    names = tuple(map(str, range(size)))
    return Batch(view, view, places, index, share, order[:, :context], order[:, context:], names)


def main(name: str, rounds: int) -> None:
    setups = {}
    for label, overrides in VARIANTS.items():
        recipe = load_recipe(name, overrides)
        model = VJEPA3D.from_recipe(recipe)
        setups[label] = (recipe, model, build_optimiser(model, recipe.train), random_batch(recipe))
    seconds: dict[str, list[float]] = {label: [] for label in VARIANTS}
    for turn in range(rounds + 1):
        for label, (recipe, model, optimiser, batch) in setups.items():
            start = time.perf_counter()
            accumulate(model, batch, recipe, Runtime(recipe.train.precision))
            optimiser.step()
            update_target(model.target_encoder, model.context_encoder, 0.99)
            optimiser.zero_grad(set_to_none=True)
            if turn:  # the first round warms up
                seconds[label].append(time.perf_counter() - start)
    base = statistics.median(seconds["bf16, rope"])
    print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, median of {rounds} steps")
    for label, values in seconds.items():
        middle = statistics.median(values)
        print(f"{label:<14} {middle:.3f} s  (min {min(values):.3f}, max {max(values):.3f})  ratio {middle / base:.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tiny_cpu", int(sys.argv[2]) if len(sys.argv) > 2 else 10)
