"""What a run does with the index of a store before its first update, from 10 to 1,000,000 volumes.

    python benchmarks/index_growth.py [COUNT ...] [--out docs/index_growth.json]

The index of a small phantom store is repeated under other names: two eyes a person, volumes without chunks, for no step
here reads any. CPU-seconds of each step and the peak memory, in a process of its own for every count; the exponent
is that of the growth between the last two counts (1: linear), of the steps that take over 20 ms.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from octjepa.cohort.leaks import find_leaks
from octjepa.cohort.split import split_stratified
from octjepa.config import load_recipe
from octjepa.files import write_json
from octjepa.ingest import build_store
from octjepa.phantom import write_cohort
from octjepa.store import Store
from octjepa.train.data import choose_cohort
from octjepa.train.run_folder import chunks_hash, data_hash

COUNTS = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
OVERRIDES = ("data.balance=device",)
LEAST_SECONDS = 0.02


def grow(store: Path, count: int) -> None:
    """Replaces the index of `store` by one of `count` volumes of `count` / 2 people."""
    table = pd.read_parquet(store / "volumes.parquet")
    grown = table.iloc[np.arange(count) % len(table)].reset_index(drop=True)
    number = pd.Series(np.arange(count))
    rng = np.random.default_rng(0)
    for column in ("volume_id", "content_hash", "chunk_hash", "file", "sop_instance_uid"):
        if column in grown:
            grown[column] = number.map(lambda n, name=column: f"{name[0]}{n:015x}")
    grown["enface_hash"] = [code.tobytes().hex() for code in rng.integers(0, 256, (count, 32), dtype=np.uint8)]
    grown["person_id"] = (number // 2).map(lambda n: f"p{n:07d}")
    grown["eye"] = np.where(number % 2, "OD", "OS")
    grown.to_parquet(store / "volumes.parquet")


def steps(folder: Path) -> dict[str, float]:
    """CPU-seconds of each step."""
    recipe = load_recipe("tiny_cpu", OVERRIDES)
    taken: dict[str, float] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = step()
        taken[name] = round(time.process_time() - started, 4)
        return result

    store = timed("open", lambda: Store.open(folder))
    splits = timed("split", lambda: split_stratified(store))
    timed("set_split", lambda: store.set_split(splits))
    timed("leaks", lambda: find_leaks(store.table))
    cohort, dataset = timed("cohort", lambda: choose_cohort(store, recipe))
    ids = cohort.train.volume_ids
    timed("data_hash", lambda: data_hash(store, ids))
    timed("chunks_hash", lambda: chunks_hash(store, ids, recipe))
    timed("100_batches", lambda: [dataset.volume_ids_of_update(update) for update in range(0, 100_000, 1_000)])
    timed("describe", lambda: store.describe())
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", nargs="*", type=int, default=COUNTS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.store:
        grow(given.store, given.counts[0])
        taken = steps(given.store)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"volumes": given.counts[0], "peak_mib": round(peak), **taken}))
        return
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_cohort(work / "phantom", 12, 1)
        for count in given.counts:
            build_store([work / "phantom"], work / f"store{count}", load_recipe("tiny_cpu").preprocessing)
            line = [sys.executable, __file__, str(count), "--store", str(work / f"store{count}")]
            rows.append(json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout))
            print(rows[-1], flush=True)
    exponents = {}
    for step in rows[0].keys() - {"volumes", "peak_mib"} if len(rows) > 1 else ():
        if rows[-1][step] >= LEAST_SECONDS:
            growth = math.log(rows[-1][step] / rows[-2][step])
            exponents[step] = round(growth / math.log(rows[-1]["volumes"] / rows[-2]["volumes"]), 2)
    print("exponents", exponents)
    if given.out:
        write_json(given.out, {"rows": rows, "exponents": exponents})


if __name__ == "__main__":
    main()
