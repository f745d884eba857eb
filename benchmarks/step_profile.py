"""Where an update's time goes, by operator of torch: the default recipe and its V-JEPA, as `octjepa pretrain` takes it.

    python -m benchmarks step_profile [--precision auto] [--threads 1] [--updates 8] [--write]

torch's profiler over updates on random numbers in a batch's shapes, after some that are not counted; without shapes,
stacks and memory, which would cost time themselves. A share is of the time that all operators take by themselves: time
between operators (Python, autograd's own, the profiler) is in none, and that of a called operator is the called one's,
as `addmm` in `linear`. `--write` adds the record to benchmarks/records/step_profile.json by machine and precision;
`benchmarks/performance.py --page` then shows it. Nothing may run beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.data import bench_recipe, random_batch
from torch.profiler import ProfilerActivity, profile

from octjepa.distributed.precision import with_precision
from octjepa.distributed.runtime import Runtime
from octjepa.files import write_json
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe
from octjepa.train.engine import take_step
from octjepa.train.optimizer import build_optimizer, update_target
from octjepa.train.step import accumulate

sys.path.insert(0, str(Path(__file__).resolve().parent))

from performance import PROFILE, machine

RECIPES = ("tiny_cpu", "tiny_cpu_vjepa")
SHOWN, WARM_UP_UPDATES, MOMENTUM = 12, 3, 0.996
# Parts of the names of operators that multiply matrices: in fp32 and bf16, plain, batched and in attention.
PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "mkldnn_linear", "mkldnn_linear_backward")
ATTENTION = "scaled_dot_product"


def shares_by_operator(recipe: Recipe, updates: int) -> dict[str, Any]:
    """The operators with the most time of their own, and the share of matrix products, attention's included."""
    runtime = Runtime(recipe.train.precision)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    optimizer, batch = build_optimizer(model, recipe.train), random_batch(recipe)

    def update() -> None:
        metrics = accumulate(model, batch, recipe, runtime)
        metrics = take_step(model, optimizer, metrics, runtime, recipe.train.clip_norm, inf)
        update_target(model.target_encoder, model.context_encoder, MOMENTUM, metrics["healthy"])

    for _ in range(WARM_UP_UPDATES):
        update()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(updates):
            update()
    events = [event for event in profiled.key_averages() if event.key.startswith("aten::")]  # no ranges, no autograd
    seconds = {event.key: event.self_cpu_time_total / 1e6 for event in events}
    total = sum(seconds.values())
    shares = {name: own / total for name, own in sorted(seconds.items(), key=lambda item: -item[1])}
    return {
        "operator_seconds_an_update": round(total / updates, 4),
        "matrix_products": round(sum(share for name, share in shares.items() if multiplies_matrices(name)), 3),
        "operators": {name: round(share, 3) for name, share in list(shares.items())[:SHOWN]},
    }


def multiplies_matrices(operator: str) -> bool:
    """Whether an operator's own time is that of a matrix product: aten::addmm, attention forward and backward."""
    name = operator.removeprefix("aten::")
    return name in PRODUCTS or ATTENTION in name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found: dict[str, Any] = {}
    for name in RECIPES:
        recipe = bench_recipe(name=name)
        if given.precision != "auto":
            recipe = with_precision(recipe, given.precision)
        found[name] = {"precision": recipe.train.precision, **shares_by_operator(recipe, given.updates)}
        print(name, json.dumps(found[name], indent=1), flush=True)
    if given.write:
        every = json.loads(PROFILE.read_text(encoding="utf-8")) if PROFILE.is_file() else {}
        about = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", "threads": given.threads, "torch": torch.__version__}
        every[f"{machine()}, {found[RECIPES[0]]['precision']}"] = about | found
        write_json(PROFILE, every)


if __name__ == "__main__":
    main()
