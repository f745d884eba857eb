"""What summing gradients during the backward pass is worth over a slow network, and what it would be worth elsewhere.

    .venv/bin/python benchmarks/overlap.py [--turns 3] [--updates 16] [--out docs/overlap.json]
    .venv/bin/python benchmarks/overlap.py --predict

`octjepa pretrain tiny_cpu_vjepa` as two processes of one thread, with `machine.overlap` on and off in turns, in a
network namespace of their own whose loopback a token bucket (`tc`, tbf) limits to the rates below; both ranks share
it. Needs Linux, `unshare`, `ip` and `tc`; without the rights of root a user namespace is tried. Medians of the
updates after the first ones.

The model beside each figure, which `--predict` applies to other machines: an update takes

    apart    compute + sum                       sum = bytes of all gradients, each way of each rank, over the rate
    overlap  compute + max(sum / buckets, sum - hidden)          hidden = 0.26 of compute

where compute is the update without a limit, and 0.26 was fitted to docs/overlap.json: the whole backward pass would be
two thirds, but its first half gives few gradients. On n devices a ring sends 2 (n - 1) / n times the gradients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from octjepa.bench.scaling import NOTHING_BESIDE_UPDATES, train
from octjepa.config import load_recipe
from octjepa.files import write_json
from octjepa.phantom import write_cohort
from octjepa.store import build_store
from octjepa.train.plan import plan

RATES_MBIT = (None, 4000, 1000, 400)
PEOPLE, WARM_UP_UPDATES, BUCKETS = 24, 6, 8
HIDDEN = 0.26  # of compute, at most
INSIDE = "OCTJEPA_BENCH_NAMESPACE"
# Assumed, not measured: bf16 FLOP/s that an update reaches of a device, bytes/s of its links in a ring.
MACHINES = {
    "8 x H100, NVLink": (8, 0.4 * 989e12, 450e9),
    "8 hosts x H100, 100 Gbit/s": (8, 0.4 * 989e12, 12.5e9),
    "TPU v4-32, 16 chips": (16, 0.4 * 275e12, 50e9),
}
RECIPES = ("one_gpu", "pretrain_vjepa_single_domain", "pretrain_vjepa_multi_domain")


def seconds_apart(compute: float, total: float) -> float:
    """Of an update whose gradients are summed after the backward pass."""
    return compute + total


def seconds_overlapped(compute: float, total: float) -> float:
    """Of an update whose gradients are summed bucket by bucket: the last one always waits."""
    return compute + max(total / BUCKETS, total - HIDDEN * compute)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--note", default="nothing else ran on the machine", help="what ran beside it")
    parser.add_argument("--predict", action="store_true", help="print what the model says of other machines")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.predict:
        predict()
    elif INSIDE not in os.environ:
        namespace = ["unshare", *(["-n"] if os.getuid() == 0 else ["-rn"])]
        sys.exit(subprocess.call([*namespace, sys.executable, *sys.argv], env=os.environ | {INSIDE: "1"}))
    else:
        measure(given.turns, given.updates, given.note, given.out)


def measure(turns: int, updates: int, note: str, out: Path | None) -> None:
    """Runs in the namespace, prints a line a rate and writes all to `out`."""
    _run("ip", "link", "set", "lo", "up")
    gradients = 4 * plan(load_recipe("tiny_cpu_vjepa"))["trainable"]
    seconds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_cohort(work / "phantom", PEOPLE, 1)
        build_store([work / "phantom"], work / "store", load_recipe("tiny_cpu_vjepa").preprocessing)
        for rate in RATES_MBIT:
            _limit(rate)
            modes: dict[str, list[float]] = {"overlap": [], "apart": []}
            for _ in range(turns):
                for mode, of_turns in modes.items():
                    recipe = [
                        "tiny_cpu_vjepa",
                        *NOTHING_BESIDE_UPDATES,
                        f"machine.overlap={str(mode == 'overlap').lower()}",
                    ]
                    _, each = train(2, 1, WARM_UP_UPDATES + updates, str(work / "store"), work / "run", recipe)
                    of_turns.append(round(statistics.median(each[WARM_UP_UPDATES:]), 4))
            seconds[f"{rate} Mbit/s" if rate else "no limit"] = modes
            print(rate, modes, flush=True)
    rows = []
    compute = statistics.median(seconds["no limit"]["apart"])
    for rate, (name, modes) in zip(RATES_MBIT, seconds.items(), strict=True):
        total = 2 * gradients / (rate * 1e6 / 8) if rate else 0.0  # both ranks' on one loopback
        apart, overlap = statistics.median(modes["apart"]), statistics.median(modes["overlap"])
        rows.append(
            {
                "rate": name, "apart": apart, "overlap": overlap, "ratio": round(apart / overlap, 3),
                "apart_predicted": round(seconds_apart(compute, total), 4),
                "overlap_predicted": round(seconds_overlapped(compute, total), 4),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    if out:
        write_json(out, {"beside": note, "gradient_bytes": gradients, "rows": rows, "seconds": seconds})


def predict() -> None:
    """Prints seconds and efficiency of an update of the shipped recipes on machines that nobody here has."""
    for recipe_name in RECIPES:
        recipe = load_recipe(recipe_name)
        numbers = plan(recipe)
        for machine, (devices, flops, link) in MACHINES.items():
            compute = numbers["flops_per_volume"] * recipe.train.global_batch / devices / flops
            total = 2 * (devices - 1) / devices * 4 * numbers["trainable"] / link
            apart, overlap = seconds_apart(compute, total), seconds_overlapped(compute, total)
            print(
                f"{recipe_name}, {machine}: {compute * 1e3:.1f} ms of arithmetic, sum {total * 1e3:.1f} ms; "
                f"efficiency {compute / apart:.2f} apart, {compute / overlap:.2f} overlapped"
            )


def _limit(rate: int | None) -> None:
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)
    if rate:
        _run(
            "tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", f"{rate}mbit", "burst", "1mb", "latency", "400ms"
        )


def _run(*command: str) -> Any:
    return subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
