"""What summing gradients during the backward pass would be worth on machines that nobody here has: a written model.

    .venv/bin/python benchmarks/overlap_prediction.py [--write]
    .venv/bin/python benchmarks/overlap_prediction.py --loader docs/loader_rates.json

`--write` puts its table, and that of docs/overlap.json (`benchmarks/overlap.py`), into docs/decisions/0004. `--loader`
measures the CPU time of a training sample of each recipe in one process of one thread, on full-size phantoms, as a
median; nothing may run beside it. Later predictions read docs/loader_rates.json.

An update on n devices, each of which takes its share of the global batch in `accumulation` micro-batches, takes

    apart    compute + sum                    sum = bytes of all gradients, each way of each rank, over the rate
    overlap  compute + max(last, sum - hidden)        last = the sum of the last bucket, which nothing hides
                                                      hidden = 0.26 of the arithmetic of the last micro-batch
    loader   max(overlap, share / (processes x rate of one))      samples are made ahead, beside the arithmetic

where compute is the update without sums. Gradients of earlier micro-batches wait for the last one, so the sums hide
behind its backward pass alone. 0.26 was fitted to docs/overlap.json, where there is one micro-batch: the whole backward
pass would be two thirds, but its first half gives few gradients. On n devices a ring sends 2 (n - 1) / n times the
gradients. A sample is both views of one volume, with its masks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from octjepa.bench.data import one_thread
from octjepa.config import load_recipe
from octjepa.distributed.overlap import split_into_buckets
from octjepa.files import write_json
from octjepa.model import VJEPA3D
from octjepa.phantom import write_cohort
from octjepa.recipe import Recipe
from octjepa.store import Store, build_store
from octjepa.train.data import batch_shares, choose_cohort
from octjepa.train.machine import MOST_WORKERS
from octjepa.train.plan import plan

sys.path.insert(0, str(Path(__file__).resolve().parent))

from marked_tables import replace_marked, table

DOCS = Path(__file__).resolve().parents[1] / "docs"
DECISION, LOADER_RATES = DOCS / "decisions" / "0004-reduce-after-agreeing.md", DOCS / "loader_rates.json"
HIDDEN = 0.26  # of the arithmetic of the last micro-batch, at most
# Assumed, not measured: devices, bf16 FLOP/s that an update reaches of one, bytes/s of its links in a ring.
MACHINES = {
    "8 x H100, NVLink": (8, 0.4 * 989e12, 450e9),
    "8 hosts x H100, 100 Gbit/s": (8, 0.4 * 989e12, 12.5e9),
    "TPU v4-32, 16 chips": (16, 0.4 * 275e12, 50e9),
}
RECIPES = ("pretrain_vjepa_single_domain", "pretrain_vjepa_multi_domain", "one_gpu")
PEOPLE, SAMPLES, WARM_UP_SAMPLES = 4, 60, 10


def seconds_apart(compute: float, total: float) -> float:
    """Of an update whose gradients are summed after the backward pass."""
    return compute + total


def seconds_overlapped(compute: float, total: float, last_bucket: float, accumulation: int = 1) -> float:
    """Of an update whose gradients are summed during the last of its `accumulation` backward passes.

    `last_bucket` is the share of the gradients in the last bucket.
    """
    return compute + max(total * last_bucket, total - HIDDEN * compute / accumulation)


@cache
def flops_per_volume(recipe_name: str) -> int:
    """Operations of an update, forward and backward."""
    return int(plan(load_recipe(recipe_name))["flops_per_volume"])


def bucket_bytes(recipe: Recipe) -> list[int]:
    """Bytes of gradients in each bucket, in the order in which they are sent."""
    with torch.device("meta"):
        model = VJEPA3D.from_recipe(recipe)
    buckets = split_into_buckets(model.parameters())
    return [sum(p.numel() * p.element_size() for p in bucket) for bucket in buckets]


def predict(recipe_name: str, machine: str, sample_seconds: float | None) -> dict[str, Any]:
    """Seconds and efficiencies of an update of a shipped recipe; `sample_seconds` of a loader process, None: unknown.

    Efficiency is the time of the arithmetic over that of the update.
    """
    recipe = load_recipe(recipe_name)
    devices, flops, link = MACHINES[machine]
    share, micro, accumulation = batch_shares(recipe, devices)
    buckets = bucket_bytes(recipe)
    compute = flops_per_volume(recipe_name) * share / flops
    total = 2 * (devices - 1) / devices * sum(buckets) / link
    apart = seconds_apart(compute, total)
    overlap = seconds_overlapped(compute, total, buckets[-1] / sum(buckets), accumulation)
    processes = recipe.machine.loader_workers or MOST_WORKERS
    found = {
        "recipe": recipe_name, "machine": machine, "share": share, "micro": micro, "accumulation": accumulation,
        "compute": compute, "sum": total, "apart": compute / apart, "overlap": compute / overlap,
        "processes": processes, "wanted_of_a_process": share / overlap / processes,
    }  # fmt: skip
    if sample_seconds is not None:
        delivered = 1 / sample_seconds
        with_loader = max(overlap, share / (processes * delivered))
        found |= {"delivered_by_a_process": delivered, "with_loader": compute / with_loader}
    return found


def predictions() -> str:
    """The table of every recipe on every machine."""
    measured: dict[str, Any] = json.loads(LOADER_RATES.read_text(encoding="utf-8")) if LOADER_RATES.is_file() else {}
    rows = []
    for recipe_name in RECIPES:
        seconds = measured.get(recipe_name, {}).get("cpu_seconds_a_sample")
        for machine in MACHINES:
            one = predict(recipe_name, machine, seconds)
            delivered, with_loader = one.get("delivered_by_a_process"), one.get("with_loader")
            rows.append(
                (
                    f"`{recipe_name}`", machine, f"{one['accumulation']} x {one['micro']}",
                    f"{one['compute'] * 1e3:.3g}", f"{one['sum'] * 1e3:.2g}", f"{one['apart']:.2f}",
                    f"{one['overlap']:.2f}", f"{one['wanted_of_a_process']:.3g} x {one['processes']}",
                    "not measured" if delivered is None else f"{delivered:.2g}",
                    "not known" if with_loader is None else f"{with_loader:.2f}",
                )
            )  # fmt: skip
    head = (
        "recipe", "machine", "micro-batches of a device", "arithmetic, ms", "sum, ms", "efficiency, sums after",
        "during", "samples/s wanted of a loader process x processes a device", "one delivers", "efficiency with loader",
    )  # fmt: skip
    return table(head, rows)


def measured_rates() -> str:
    """The table of docs/overlap.json."""
    rows = json.loads((DOCS / "overlap.json").read_text(encoding="utf-8"))["rows"]
    head = ("rate", "sums after the pass", "during it", "ratio", "predicted, after and during")
    return table(
        head,
        [
            (
                row["rate"], f"{row['apart']:.3f} s", f"{row['overlap']:.3f} s", f"{row['ratio']:.2f}",
                f"{row['apart_predicted']:.3f}, {row['overlap_predicted']:.3f}",
            )
            for row in rows
        ],
    )  # fmt: skip


def measure_loader(out: Path) -> None:
    """CPU-seconds of a training sample of each recipe, in one process of one thread; writes them to `out`."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="octjepa-loader-") as name, one_thread():
        work = Path(name)
        write_cohort(work / "phantom", PEOPLE, 5, ("topcon_triton",), "full", (1.0, 0.0, 0.0), eyes_per_person=1)
        for recipe_name in RECIPES:
            recipe = load_recipe(recipe_name)
            build_store([work / "phantom"], work / recipe_name, recipe.preprocessing)
            _, dataset = choose_cohort(Store.open(work / recipe_name), recipe)
            seconds = []
            for position in range(WARM_UP_SAMPLES + SAMPLES):
                start = time.process_time()
                dataset[position]
                seconds.append(time.process_time() - start)
            median = statistics.median(seconds[WARM_UP_SAMPLES:])
            found[recipe_name] = {"cpu_seconds_a_sample": round(median, 5), "samples": SAMPLES}
            print(recipe_name, found[recipe_name], flush=True)
    write_json(out, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put both tables into the decision")
    parser.add_argument("--loader", type=Path, help="measure samples, and write their CPU time there")
    given = parser.parse_args()
    if given.loader:
        measure_loader(given.loader)
    predicted = predictions()
    print(predicted)
    if given.write:
        replace_marked(DECISION, "rates", measured_rates())
        replace_marked(DECISION, "prediction", predicted)


if __name__ == "__main__":
    main()
