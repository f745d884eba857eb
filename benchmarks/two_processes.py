"""What a second process is worth: two of one thread under torchrun against one of two threads, and of one, in turns.

    python benchmarks/two_processes.py [--turns 3] [--updates 40] [--note TEXT] [--out benchmarks/records/scaling.json]

`make bench ARGS="scaling"` is the short form, by the clock. Here `octjepa pretrain tiny_cpu_vjepa` runs as users run
it, on one small phantom store, again and again in turns. Updates a second come
from the run's journal without its first updates. CPU-seconds an update (of all processes, user and system) are what a
long run took more than a short one, so that starting and judging cancel out; other work on the machine disturbs them
less. Efficiency is that of two processes over that of one of two threads, by both figures; and over one of one thread
by CPU-seconds: what dealing a batch over two ranks adds (gradients summed, the step taken twice).

Threads that wait for each other spin, and spin for long where other work takes their core: set OMP_WAIT_POLICY=passive
on a machine that is not free.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.scaling import NOTHING_BESIDE_UPDATES, train

from octjepa.config import load_recipe
from octjepa.files import write_json
from octjepa.ingest import build_store
from octjepa.phantom import write_cohort

PEOPLE = 40
WARM_UP_UPDATES = 8  # first updates, which are not counted, and the length of the short run
OBJECTIVES = {
    "two_processes_of_one_thread": (2, 1),
    "one_process_of_two_threads": (1, 2),
    "one_process_of_one_thread": (1, 1),
}
RECIPE = ["tiny_cpu_vjepa", *NOTHING_BESIDE_UPDATES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--note", default="nothing else ran on the machine", help="what ran beside it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="recipe keys, k=v")
    given = parser.parse_args()
    turns: dict[str, list[dict[str, float]]] = {objective: [] for objective in OBJECTIVES}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_cohort(work / "phantom", PEOPLE, 1)
        build_store([work / "phantom"], work / "store", load_recipe("tiny_cpu_vjepa").preprocessing)
        for _ in range(given.turns):
            for objective, result in turns.items():
                recipe, location = [*RECIPE, *given.overrides], str(work / "store")
                short, _ = train(*OBJECTIVES[objective], WARM_UP_UPDATES, location, work / "run", recipe)
                whole, seconds = train(
                    *OBJECTIVES[objective], WARM_UP_UPDATES + given.updates, location, work / "run", recipe
                )
                result.append(
                    {
                        "updates_per_second": round(given.updates / sum(seconds[WARM_UP_UPDATES:]), 3),
                        "median_seconds": round(statistics.median(seconds[WARM_UP_UPDATES:]), 4),
                        "cpu_seconds_per_update": round((whole - short) / given.updates, 4),
                    }
                )
                print(objective, result[-1], flush=True)
    middle = {
        objective: {key: statistics.median(turn[key] for turn in result) for key in result[0]}
        for objective, result in turns.items()
    }
    two, one, single = middle.values()
    found: dict[str, Any] = {
        "efficiency": {
            "updates_per_second": round(two["updates_per_second"] / one["updates_per_second"], 3),
            "updates_per_cpu_second": round(one["cpu_seconds_per_update"] / two["cpu_seconds_per_update"], 3),
            "updates_per_cpu_second_against_one_thread": round(
                single["cpu_seconds_per_update"] / two["cpu_seconds_per_update"], 3
            ),
        },
        "median": middle,
        "turns": turns,
        "recipe": [*RECIPE, *given.overrides],
        "updates": given.updates,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "beside": given.note,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }
    print(json.dumps(found["efficiency"]))
    if given.out:
        write_json(given.out, found)


if __name__ == "__main__":
    main()
