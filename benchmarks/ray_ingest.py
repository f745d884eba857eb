"""Ingest and embedding over a local Ray cluster with one, two and four workers, and an ingest whose worker is killed.

    python -m benchmarks ray_ingest [--people 24] [--only ingest embed kill] [--out benchmarks/records/ray_ingest.json]
    python -m benchmarks ray_ingest --only --write

Ingest: a cohort of phantoms into a new store each time, against processes of the machine, the start of Ray included;
the stores must be equal. Embedding: `phantom-tiny` on one such store in parts of four volumes, against one process of
one thread; the tables must agree within 1e-5. Kill: an ingest over Ray with two workers, one of which gets SIGKILL when
a third of the files is stored; the store must be that of the others. Efficiency is the rate over that of one worker of
the same kind, divided by the workers or the cores, whichever are fewer. `--out` keeps what other runs measured there;
`--write` puts the table of benchmarks/records/ray_ingest.json into docs/scale.md. Nothing may run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.data import one_thread

from octjepa.config import load_recipe
from octjepa.embed.embedding import Division, embed_store
from octjepa.embed.table import read_embeddings
from octjepa.encoders import load_encoder
from octjepa.files import write_json
from octjepa.ingest import IngestOptions, build_store
from octjepa.phantom import write_cohort
from octjepa.store import Store

sys.path.insert(0, str(Path(__file__).resolve().parent))

from marked_tables import replace_marked, table

DOCS = Path(__file__).resolve().parents[1] / "docs"
WORKERS = (1, 2, 4)
ENCODER, PART = "phantom-tiny", 4
_MARK = "OCTJEPA_BENCH_RAY"  # in the environment of every process that this one starts


def ingest(cohort: Path, store: Path, engine: Any, workers: int) -> dict[str, Any]:
    """One ingest: its seconds, files a second, and the hashes of what it stored."""
    started = time.perf_counter()
    options = IngestOptions(engine=engine)
    summary = build_store([cohort], store, load_recipe("tiny_cpu").preprocessing, workers=workers, options=options)
    seconds = time.perf_counter() - started
    content = sorted(Store.open(store).table["chunk_hash"])
    return {
        "engine": engine,
        "workers": workers,
        "seconds": round(seconds, 2),
        "quarantined": summary.quarantined,
        "files_per_second": round(summary.accepted / seconds, 3),
        "content": content,
    }


def ingests(cohort: Path, work: Path) -> list[dict[str, Any]]:
    """Every number of workers of both kinds. Raises SystemExit where the stores differ."""
    runs = [ingest(cohort, work / f"{e}{workers}", e, workers) for e in ("local", "ray") for workers in WORKERS]
    contents = [run.pop("content") for run in runs]
    if any(content != contents[0] for content in contents):
        raise SystemExit("the stores differ")
    return with_efficiency(runs, "files_per_second")


def embeddings(cohort: Path, work: Path) -> list[dict[str, Any]]:
    """One process of one thread, then every number of Ray workers. Raises SystemExit where the tables differ."""
    build_store([cohort], work / "store", load_encoder(ENCODER).recipe.preprocessing, workers=os.cpu_count() or 1)
    store, runs, vectors = Store.open(work / "store"), [], []
    for engine, workers in [("local", 1), *(("ray", workers) for workers in WORKERS)]:
        out = work / f"{engine}{workers}.parquet"
        started = time.perf_counter()
        with one_thread():
            summary = embed_store(ENCODER, store, out, division=Division(engine=engine, workers=workers, part=PART))
        seconds = time.perf_counter() - started
        rate = round(summary.rows / seconds, 3)
        runs.append({"engine": engine, "workers": workers, "seconds": round(seconds, 2), "volumes_per_second": rate})
        vectors.append(read_embeddings(out).vector)
        if np.abs(vectors[-1] - vectors[0]).max() > 1e-5:
            raise SystemExit("the tables differ")
    return with_efficiency(runs, "volumes_per_second")


def with_efficiency(runs: list[dict[str, Any]], unit: str) -> list[dict[str, Any]]:
    """Adds it to each run, and prints the run."""
    cores = os.cpu_count() or 1
    for run in runs:
        one = next(other for other in runs if other["engine"] == run["engine"])
        run["efficiency"] = round(run[unit] / one[unit] / min(run["workers"], cores), 2)
        print(run, flush=True)
    return runs


def killed_ingest(cohort: Path, work: Path, files: int) -> dict[str, Any]:
    """An ingest with two Ray workers, one of which is killed. Raises SystemExit where its store differs."""
    os.environ[_MARK] = mark = uuid.uuid4().hex
    victims: list[int] = []
    ended = threading.Event()

    def kill_one() -> None:
        while not ended.wait(0.2):
            if len(list((work / "killed" / "chunks").rglob("pixels.npy"))) >= files / 3:
                for pid in ray_workers(mark)[:1]:
                    os.kill(pid, signal.SIGKILL)
                    victims.append(pid)
                    return

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        run = ingest(cohort, work / "killed", "ray", 2)
    finally:
        ended.set()
        killer.join()
    if not victims:
        raise SystemExit("no worker of Ray was found to be killed")
    if run.pop("content") != ingest(cohort, work / "whole", "local", os.cpu_count() or 1)["content"]:
        raise SystemExit("the store of the ingest whose worker was killed differs")
    print({**run, "killed": True}, flush=True)
    return run


def ray_workers(mark: str) -> list[int]:
    """Processes of this benchmark's Ray cluster that work on a file now: Ray names them after their task."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if name.startswith(b"ray::work_on_machine") and f"{_MARK}={mark}".encode() in environment:
            found.append(int(folder.name))
    return found


def figures(record: dict[str, Any]) -> str:
    """The table of a record, and what became of the killed worker."""
    by_kind = {
        (kind, run["engine"], run["workers"]): run for kind in ("runs", "embedding") for run in record.get(kind, ())
    }

    def cells(kind: str, engine: str, workers: int, unit: str) -> tuple[str, str]:
        run = by_kind.get((kind, engine, workers))
        return ("not measured", "") if run is None else (f"{run[unit]:.1f}", f"{run['efficiency']:g}")

    rows = [
        (
            workers,
            *cells("runs", "local", workers, "files_per_second"),
            *cells("runs", "ray", workers, "files_per_second"),
            *cells("embedding", "ray", workers, "volumes_per_second"),
        )
        for workers in WORKERS
    ]
    head = (
        "workers",
        "processes, files/s",
        "efficiency",
        "Ray, files/s",
        "efficiency",
        "Ray, volumes/s embedded",
        "efficiency",
    )
    lines = [table(head, rows)]
    if one := by_kind.get(("embedding", "local", 1)):
        lines.append(f"One process of one thread, without Ray, embeds {one['volumes_per_second']:.1f} volumes/s.")
    if killed := record.get("killed"):
        lines.append(
            f"An ingest with {killed['workers']} Ray workers, one of which was killed (SIGKILL) after a third of the "
            f"files, took {killed['seconds']:.0f} s, quarantined {killed['quarantined']} files and left the same store."
        )
    return "\n\n".join(lines)


def measure(people: int, only: Sequence[str]) -> dict[str, Any]:
    """What `only` names, on one cohort."""
    found: dict[str, Any] = {"cores": os.cpu_count() or 1, "people": people}
    with tempfile.TemporaryDirectory(prefix="octjepa-ray-") as folder:
        cohort, work = Path(folder, "phantom"), Path(folder)
        files = write_cohort(cohort, people, seed=23, workers=os.cpu_count() or 1)["files"]
        if "ingest" in only:
            found["runs"] = ingests(cohort, work / "ingest")
        if "embed" in only:
            found["embedding"] = embeddings(cohort, work)
        if "kill" in only:
            found["killed"] = killed_ingest(cohort, work, files)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=24)
    parser.add_argument("--only", nargs="*", choices=("ingest", "embed", "kill"), default=["ingest", "embed", "kill"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into docs/scale.md")
    given = parser.parse_args()
    if given.only:
        found = measure(given.people, given.only)
        if given.out is not None:
            before = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else {}
            if before.get("people") not in (None, given.people):
                raise SystemExit(f"{given.out} has figures of {before['people']} people: give --people as many")
            write_json(given.out, before | found)
    if given.write:
        record = json.loads((DOCS / "ray_ingest.json").read_text(encoding="utf-8"))
        replace_marked(DOCS / "scale.md", "ray", figures(record))


if __name__ == "__main__":
    main()
