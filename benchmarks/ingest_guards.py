"""CPU time of an ingest of real scans with the guards against untrusted files, over that without them.

    python -m benchmarks ingest_guards FOLDER... [--pairs 9] [--out benchmarks/records/ingest_guards.json]

Each run ingests all scans of the folders with one worker into a new store. Runs with and without guards take turns in
one process, in an order that is reversed from pair to pair, after one pair that is not counted. The result is the ratio
of the medians of user plus system time, with a 95 % interval by bootstrap over the pairs. `GUARDS` lists what is
switched off: the memory budget, links, bounded reads of DICOM, headers of code streams, texts that name the person, the
time limit. Both ways must accept the same volumes with the same pixels.

On a machine with other work the ratio varies by more than the guards cost. So the share of the CPU time that passes
inside the guards is measured too, by a timer around each of their calls (`--pairs 0`: only this). The timer counts as
cost. Bounded reads and the thread of the time limit are left out.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.data import bench_recipe, one_thread

from octjepa import time_limit
from octjepa.errors import TooManyLostError
from octjepa.files import write_json
from octjepa.ingest import build_store
from octjepa.progress import set_quiet
from octjepa.read import dicom_file, encapsulated, links, memory_budget, personal_data, pixels
from octjepa.store import Store

sys.path.insert(0, str(Path(__file__).resolve().parent))

from performance import machine

_RESAMPLES = 10_000
Guards = Mapping[Callable[..., Any], Callable[..., Any]]


def _no_fault(*_: object) -> str:
    return ""


def _nothing(*_: object, **__: object) -> None:
    return None


def _false(*_: object, **__: object) -> bool:
    return False


# Every guard and what stands in for it.
GUARDS: Guards = {
    memory_budget.check_memory: _nothing,
    pixels.check_size: _nothing,
    links.leads_out: _false,
    links.check_inside: _nothing,
    links.check_beside: _nothing,
    encapsulated.decoding_fault: _no_fault,
    personal_data.identifies_person: _false,
    personal_data.identifies_person_in_path: _false,
    personal_data.repeats_personal_text: _false,
    personal_data.repeats_birth_date: _false,
    personal_data.mask_path: lambda path, *_: path,
    time_limit.time_limit: lambda seconds: nullcontext(),
}


@contextmanager
def switched_off(guards: Guards, reads: bool = True) -> Iterator[None]:
    """Replaces the guards in every module of octjepa that holds them; `reads`: bounded reads of DICOM files too."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.partition(".")[0] == "octjepa"]
    attributes = [
        (module, name, guard)
        for module in modules
        for name, value in list(vars(module).items())
        for guard in guards
        if value is guard
    ]
    bounded = dicom_file.BoundedReader.read
    for module, name, guard in attributes:
        setattr(module, name, guards[guard])
    if reads:
        dicom_file.BoundedReader.read = io.BufferedReader.read  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, name, guard in attributes:
            setattr(module, name, guard)
        dicom_file.BoundedReader.read = bounded  # type: ignore[method-assign]


class Timer:
    """CPU time of this thread inside the guards, counted once where they call each other."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._depth = 0.0, 0, 0

    def around(self, guard: Callable[..., Any]) -> Callable[..., Any]:
        """The guard with a timer."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            start = time.thread_time()
            try:
                return guard(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - start
                    self.calls += 1

        return timed


def share_inside(sources: Sequence[Path], runs: int = 3) -> dict[str, Any]:
    """The share of an ingest's CPU time that passes inside the guards, in each of some runs."""
    timer, shares = Timer(), []
    guards = {guard: timer.around(guard) for guard in GUARDS if guard is not time_limit.time_limit}
    with tempfile.TemporaryDirectory() as folder, one_thread():
        ingest(sources, Path(folder, "warm"))
        for run in range(runs):
            timer.seconds, timer.calls = 0.0, 0
            with switched_off(guards, reads=False):
                total, _ = ingest(sources, Path(folder, str(run)))
            shares.append(round(timer.seconds / total, 5))
    return {"share_inside": shares, "calls": timer.calls}


def cpu_seconds() -> float:
    """User and system time of this process and of its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def ingest(sources: Sequence[Path], store: Path) -> tuple[float, dict[str, str]]:
    """(CPU-seconds of one ingest, {content hash: chunk hash} of its volumes)."""
    start = cpu_seconds()
    try:
        build_store(sources, store, bench_recipe().preprocessing, workers=1, max_lost=1.0)
    except TooManyLostError as error:
        raise SystemExit(f"nothing to compare: {error}") from None
    seconds = cpu_seconds() - start
    table = Store.open(store).table
    return seconds, dict(zip(table["content_hash"], table["chunk_hash"], strict=True))


def interval(guarded: Sequence[float], unguarded: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the ratio of the medians, over pairs drawn with replacement."""
    pairs = np.array([guarded, unguarded])
    drawn = np.random.default_rng(0).integers(len(guarded), size=(_RESAMPLES, len(guarded)))
    medians = np.median(pairs[:, drawn], axis=2)
    low, high = np.quantile(medians[0] / medians[1], (0.025, 0.975))
    return float(low), float(high)


def compare(sources: Sequence[Path], pairs: int) -> dict[str, Any]:
    """Alternating runs and their ratio. Ends the program if the stores differ."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder, one_thread():
        for pair in range(-1, pairs):
            stores = {}
            for guarded in (True, False) if pair % 2 else (False, True):
                with nullcontext() if guarded else switched_off(GUARDS):
                    taken, stores[guarded] = ingest(sources, Path(folder, f"{pair} {guarded}"))
                if pair >= 0:
                    seconds[guarded].append(round(taken, 3))
            if stores[True] != stores[False]:
                raise SystemExit("the stores with and without guards differ")
            if pair >= 0:
                print(f"{seconds[True][-1]:.2f} s with guards, {seconds[False][-1]:.2f} s without", flush=True)
    low, high = interval(seconds[True], seconds[False])
    ratio = statistics.median(seconds[True]) / statistics.median(seconds[False])
    return {
        "ratio": round(ratio, 4),
        "interval": [round(low, 4), round(high, 4)],
        "pairs": pairs,
        "volumes": len(stores[True]),
        "guarded_cpu_seconds": seconds[True],
        "unguarded_cpu_seconds": seconds[False],
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    set_quiet(True)
    result = share_inside(given.folders)
    print(f"share of the CPU time inside the guards: {result['share_inside']}, {result['calls']} calls")
    if given.pairs:
        result |= compare(given.folders, given.pairs)
        low, high = result["interval"]
        print(f"with guards over without, {result['volumes']} volumes: {result['ratio']:.3f} ({low:.3f} to {high:.3f})")
    if given.out:
        write_json(given.out, result)


if __name__ == "__main__":
    main()
