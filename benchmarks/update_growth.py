"""How the cost of an update grows with the tokens of a volume and with the batch, on two threads.

    .venv/bin/python benchmarks/update_growth.py [--turns 3] [--out docs/update_growth.json]

Random numbers in the shapes of `tiny_cpu_vjepa` (width 192, depth 6, fp32). Tokens: all of grids of patches of
4 x 16 x 16 that grow in slices, depth and columns, eight volumes. Batch: volumes of 128 tokens, in one micro-batch.
Medians over the turns, every turn through all sizes; the exponent is the slope of the last two sizes in logarithms.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path

import torch

from octjepa.bench.data import bench_recipe
from octjepa.bench.step import UPDATES, Work, update_of
from octjepa.files import write_json

THREADS = 2
GRIDS = ([16, 64, 64], [16, 128, 64], [16, 128, 128], [32, 128, 128], [32, 256, 128], [32, 256, 256])
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FP32 = ("train.precision=fp32", "preprocessing.margin=[0,0,0]")


def works() -> dict[str, dict[int, Work]]:
    """What is measured: subject -> size -> two updates."""
    by_tokens: dict[int, Work] = {}
    for grid in GRIDS:
        recipe = bench_recipe(
            *FP32, f"preprocessing.image_size={grid}", "tokens.select=all", "tokens.budget=null", "train.global_batch=8"
        )
        by_tokens[recipe.token_count] = update_of(recipe)
    by_batch = {size: update_of(bench_recipe(*FP32, f"train.global_batch={size}")) for size in BATCHES}
    return {"tokens": by_tokens, "batch": by_batch}


def measure(turns: int) -> dict[str, list[dict[str, float]]]:
    """Subject -> lines of {size, seconds of an update}; the first turn is not counted."""
    subjects = works()
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(turns + 1):
        for subject, sizes in subjects.items():
            for size, work in sizes.items():
                started = time.perf_counter()
                work()
                if turn:
                    seconds.setdefault((subject, size), []).append((time.perf_counter() - started) / UPDATES)
    return {
        subject: [{"size": size, "seconds": round(statistics.median(seconds[subject, size]), 4)} for size in sizes]
        for subject, sizes in subjects.items()
    }


def exponent(lines: list[dict[str, float]]) -> float:
    """Slope between the last two sizes, both in logarithms."""
    first, last = lines[-2:]
    return round(math.log(last["seconds"] / first["seconds"]) / math.log(last["size"] / first["size"]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(THREADS)
    curves = measure(given.turns)
    for subject, lines in curves.items():
        for line in lines:
            print(f"{subject:8} {line['size']:>6g} {line['seconds']:.3f} s")
        print(f"{subject:8} exponent {exponent(lines)}")
    if given.out is not None:
        exponents = {subject: exponent(lines) for subject, lines in curves.items()}
        write_json(given.out, {"threads": THREADS, "turns": given.turns, "curves": curves, "exponents": exponents})


if __name__ == "__main__":
    main()
