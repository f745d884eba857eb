"""What summing gradients during the backward pass would be worth on machines that nobody here has: a written model.

    .venv/bin/python benchmarks/overlap_prediction.py [--write]
    .venv/bin/python benchmarks/overlap_prediction.py --loader docs/loader_rates.json

`--write` puts its table, and that of docs/overlap.json (`benchmarks/overlap.py`), into docs/decisions/0004. `--loader`
measures the CPU time of a training sample of each recipe in one process of one thread, on full-size phantoms, as a
median over batches of 4, with collating: views made by the host, patches alone, and draws alone, for a device that
makes views of patches or has all voxels (`machine.data_on`). Nothing may run beside it. Later predictions read
docs/loader_rates.json.

An update on n devices, each of which takes its share of the global batch in `accumulation` micro-batches, takes

    apart    compute + sum                    sum = bytes of all gradients, each way of each rank, over the rate
    overlap  compute + max(last, sum - hidden)        last = the sum of the last bucket, which nothing hides
                                                      hidden = 0.26 of the arithmetic of the last micro-batch
    loader   max(overlap, share / (processes x rate of one))      samples are made ahead, beside the arithmetic, by as
                                                                  many processes as a run takes at most (16)

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
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from octjepa.bench.data import one_thread
from octjepa.config import load_recipe
from octjepa.distributed.overlap import split_into_buckets
from octjepa.files import write_json
from octjepa.ingest import build_store
from octjepa.model import VJEPA3D
from octjepa.phantom import write_cohort
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.train.data import batch_shares, choose_cohort
from octjepa.train.machine import MOST_WORKERS
from octjepa.train.plan import plan
from octjepa.views.cuts import collate_cuts, make_cut, make_patches
from octjepa.views.loader import TrainingDataset, collate
from octjepa.views.sample import make_sample

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
PEOPLE, BATCH, BATCHES, WARM_UP_BATCHES = 4, 4, 15, 3
# machine.data_on -> what a loader process makes of a volume, and of such samples
LOCATIONS = {
    "host": (make_sample, collate), "patches": (make_patches, collate_cuts), "device": (make_cut, collate_cuts),
}  # fmt: skip


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


def predict(recipe_name: str, machine: str, sample_seconds: Mapping[str, float]) -> dict[str, Any]:
    """Seconds and efficiencies of an update of a shipped recipe; `sample_seconds` of a loader process, by where views
    are made.

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
    locations = ("host",) if "TPU" in machine else tuple(LOCATIONS)  # on a TPU the host makes views
    seconds = [sample_seconds[location] for location in locations]
    found["delivered_by_a_process"] = [1 / one for one in seconds]
    found["with_loader"] = [compute / max(overlap, share * one / processes) for one in seconds]
    return found


def predictions() -> str:
    """The table of every recipe on every machine."""
    measured: dict[str, Any] = json.loads(LOADER_RATES.read_text(encoding="utf-8"))
    rows = []
    for recipe_name in RECIPES:
        for machine in MACHINES:
            one = predict(recipe_name, machine, measured[recipe_name]["cpu_seconds_a_sample"])
            rows.append(
                (
                    f"`{recipe_name}`", machine, f"{one['accumulation']} x {one['micro']}",
                    f"{one['compute'] * 1e3:.3g}", f"{one['sum'] * 1e3:.2g}", f"{one['apart']:.2f}",
                    f"{one['overlap']:.2f}", f"{one['wanted_of_a_process']:.3g} x {one['processes']}",
                    ", ".join(f"{rate:.3g}" for rate in one["delivered_by_a_process"]),
                    ", ".join(f"{efficiency:.2f}" for efficiency in one["with_loader"]),
                )
            )  # fmt: skip
    head = (
        "recipe", "machine", "micro-batches of a device", "arithmetic, ms", "sum, ms", "efficiency, sums after",
        "during", "samples/s wanted of a loader process x processes a device",
        "one delivers: views, patches, draws alone", "efficiency with loader",
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
            seconds = {location: round(sample_seconds(dataset, *how), 5) for location, how in LOCATIONS.items()}
            found[recipe_name] = {"cpu_seconds_a_sample": seconds, "batches": BATCHES, "batch": BATCH}
            print(recipe_name, found[recipe_name], flush=True)
    write_json(out, found)


def sample_seconds(dataset: TrainingDataset, make: Callable[..., Any], collate_samples: Callable[..., Any]) -> float:
    """Median CPU-seconds of a sample, in batches."""
    dataset.make = make
    seconds = []
    for number in range(WARM_UP_BATCHES + BATCHES):
        start = time.process_time()
        collate_samples([dataset[number * BATCH + one] for one in range(BATCH)])
        seconds.append((time.process_time() - start) / BATCH)
    return statistics.median(seconds[WARM_UP_BATCHES:])


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
