"""Ingest over a local Ray cluster: files a second with one, two and four workers, against processes of the machine.

    .venv/bin/python benchmarks/ray_ingest.py [--people 24] [--out docs/ray_ingest.json]

A cohort of phantoms is ingested into a new store each time, the start of Ray included. Efficiency is the rate over that
of one worker of the same kind, divided by the workers or the cores, whichever are fewer. The stores must be equal.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from octjepa.config import load_recipe
from octjepa.files import write_json
from octjepa.phantom import write_cohort
from octjepa.store import Store, build_store

WORKERS = (1, 2, 4)


def ingest(cohort: Path, store: Path, engine: Any, workers: int) -> dict[str, Any]:
    """One ingest: its seconds, files a second, and the hashes of what it stored."""
    started = time.perf_counter()
    summary = build_store([cohort], store, load_recipe("tiny_cpu").preprocessing, workers=workers, engine=engine)
    seconds = time.perf_counter() - started
    table = Store.open(store).table
    return {
        "engine": engine, "workers": workers, "seconds": round(seconds, 2),
        "files_per_second": round(summary["accepted"] / seconds, 3), "content": sorted(table["chunk_hash"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=24)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cores = os.cpu_count() or 1
    runs = []
    with tempfile.TemporaryDirectory(prefix="octjepa-ray-") as folder:
        cohort = Path(folder, "phantom")
        write_cohort(cohort, given.people, seed=23, workers=cores)
        for engine in ("local", "ray"):
            for workers in WORKERS:
                runs.append(ingest(cohort, Path(folder, f"{engine}{workers}"), engine, workers))
                one = next(run for run in runs if run["engine"] == engine)
                run = runs[-1]
                gain = run["files_per_second"] / one["files_per_second"]
                run["efficiency"] = round(gain / min(workers, cores), 2)
                print({key: value for key, value in run.items() if key != "content"}, flush=True)
    if any(run.pop("content") != runs[0].get("content", None) for run in runs[1:]):
        raise SystemExit("the stores differ")
    runs[0].pop("content")
    if given.out is not None:
        write_json(given.out, {"cores": cores, "people": given.people, "runs": runs})


if __name__ == "__main__":
    main()
