"""One training step in bf16 against fp32, and RoPE against sin-cos positions, in turn in one run.

    .venv/bin/python benchmarks/precision.py [RECIPE] [ROUNDS]

`octjepa bench step --against fp32` and `--against sincos` do it for `tiny_cpu`; this takes any recipe. Prints the
median volumes a second of both sides and the median of the ratios, with the least and the largest.
"""

from __future__ import annotations

import sys

import torch

from octjepa.bench.alternating_runs import Comparison, run_alternately, summary, volumes_per_second
from octjepa.bench.step import update_of
from octjepa.config import load_recipe

BASE = ["train.precision=bf16", "model.positions=rope"]
VARIANTS = {"fp32, rope": "train.precision=fp32", "bf16, sincos": "model.positions=sincos"}


def main(name: str, rounds: int) -> None:
    print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, median of {rounds} runs")
    ours = volumes_per_second(update_of(load_recipe(name, BASE)))
    for label, change in VARIANTS.items():
        other = volumes_per_second(update_of(load_recipe(name, [*BASE, change])))
        told = summary(run_alternately(Comparison(ours, other), rounds, label))
        low, high = told["spread"]
        sides = f"bf16, rope {told['ours']:.1f} volumes/s, {label} {told['other']:.1f}"
        print(f"{sides}: {told['ratio']:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tiny_cpu", int(sys.argv[2]) if len(sys.argv) > 2 else 10)
