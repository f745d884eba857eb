"""Volumes per second of `octjepa ingest` against a plain MONAI pipeline by several processes, in turn in one run.

    .venv/bin/python benchmarks/ingest_against_monai.py [--volumes 200] [--size small|full] [--workers 2] [--repeats 5]

`make bench ARGS="ingest --against monai"` runs the same in one process each; the head of
`benchmarks.peers.ingest` says what each side does and leaves out. Here both get as many spawned processes of one thread
each, which are started and have read a few files before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.peers.alternating_runs import Comparison, run_alternately, summary
from benchmarks.peers.ingest import by_monai

from octjepa.config import load_recipe
from octjepa.ingest import SourceFile, build, build_store
from octjepa.ingest.one_file import ingest_one
from octjepa.ingest.worker_pool import WorkerPool
from octjepa.phantom import write_cohort
from octjepa.recipe import Preprocessing
from octjepa.store import Store


def _one_thread() -> None:
    import torch
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)
    torch.set_num_threads(1)


@contextmanager
def monai_workers(
    workers: int, warm: Path, preprocessing: Preprocessing
) -> Iterator[Callable[[Sequence[Path], Path], tuple[int, float]]]:
    """A function that runs files through the pipeline and gives (their number, seconds)."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_one_thread) as pool:

        def run(files: Sequence[Path], out: Path) -> tuple[int, float]:
            out.mkdir()
            start = time.perf_counter()
            list(pool.map(partial(by_monai, out=out, preprocessing=preprocessing), files))
            seconds = time.perf_counter() - start
            return len(list(out.glob("*.npy"))), seconds

        with tempfile.TemporaryDirectory() as folder:
            run([warm] * 4 * workers, Path(folder, "warm"))
        yield run


def octjepa_run(source: Path, store: Path, workers: int, warm: Path, preprocessing: Preprocessing) -> tuple[int, float]:
    """(volumes in the store, seconds) of `build_store`, whose workers have read a file before the clock starts."""
    work = partial(ingest_one, store=Store.create(store, preprocessing).path, preprocessing=preprocessing)
    with WorkerPool(work, workers, build.SECONDS_PER_FILE) as pool:
        list(pool.results([SourceFile(warm, str(number)) for number in range(4 * workers)]))
        build.WorkerPool = lambda *_: nullcontext(pool)  # type: ignore[assignment,misc]
        try:
            start = time.perf_counter()
            made = build_store([source], store, preprocessing, workers=workers)
            return made.accepted, time.perf_counter() - start
        finally:
            build.WorkerPool = WorkerPool  # type: ignore[misc]


def compare(files: int, size: str, workers: int, repeats: int) -> dict[str, Any]:
    """The summary of the turns, in volumes per second."""
    preprocessing = load_recipe("tiny_cpu").preprocessing
    with tempfile.TemporaryDirectory() as name:
        folder, number = Path(name), count()
        write_cohort(folder / "cohort", people=(files + 1) // 2, seed=41, size=size, workers=workers)
        paths = sorted((folder / "cohort").rglob("*.dcm"))

        def rate(who: str, made: int, seconds: float) -> float:
            if made != len(paths):
                raise SystemExit(f"{who}: {made} of {len(paths)} volumes made")
            print(f"{who}: {made / seconds:.2f} volumes/s", flush=True)
            return made / seconds

        def out() -> Path:
            return folder / f"run {next(number)}"

        with monai_workers(workers, paths[0], preprocessing) as monai:
            comparison = Comparison(
                lambda: rate("octjepa", *octjepa_run(folder / "cohort", out(), workers, paths[0], preprocessing)),
                lambda: rate("MONAI", *monai(paths, out())),
                warms_up=False,
            )
            result = summary(run_alternately(comparison, repeats))
    return {**result, "volumes": len(paths), "workers": workers, "size": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--volumes", type=int, default=200)
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    result = compare(arguments.volumes, arguments.size, arguments.workers, arguments.repeats)
    print(f"octjepa {result['ours']:.2f} volumes/s, MONAI {result['other']:.2f} volumes/s, ratio {result['ratio']:.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
