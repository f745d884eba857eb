"""What a network's delay costs an update, with gradients summed during the backward pass and after it.

    .venv/bin/python benchmarks/network_delay.py [--turns 3] [--updates 16] [--out docs/network_delay.json]

`octjepa pretrain tiny_cpu_vjepa` as two processes of one thread, `machine.overlap` on and off in turns. The kernel
delays nothing here; instead every `torch.distributed.all_reduce` of both processes ends no earlier than the delay
after it began, by a `sitecustomize` module on their path. Sums that are under way together share the time, as messages
on a wire do. Medians of the updates after the first ones. `benchmarks/overlap.py` limits the rate. Nothing may run
beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octjepa.bench.scaling import NOTHING_BESIDE_UPDATES, train
from octjepa.config import load_recipe
from octjepa.files import write_json
from octjepa.phantom import write_cohort
from octjepa.store import build_store

DELAYS_MS = (0, 5, 20, 50)
RECIPE, PEOPLE, WARM_UP_UPDATES = "tiny_cpu_vjepa", 24, 6
_DELAY, _COUNTS = "OCTJEPA_BENCH_DELAY_MS", "OCTJEPA_BENCH_COUNTS"
_PATCH = f'''
import atexit, os, time
import torch.distributed as dist

delay, calls, sum_ = float(os.environ["{_DELAY}"]) / 1e3, [0, 0], dist.all_reduce

class Delayed:
    def __init__(self, work, end):
        self.work, self.end = work, end
    def wait(self, *arguments):
        found = self.work.wait(*arguments)
        time.sleep(max(0.0, self.end - time.monotonic()))
        return found

def all_reduce(*arguments, async_op=False, **named):
    calls[async_op] += 1
    end = time.monotonic() + delay
    work = sum_(*arguments, async_op=async_op, **named)
    if async_op:
        return Delayed(work, end)
    time.sleep(max(0.0, end - time.monotonic()))
    return work

@atexit.register
def count():
    if os.environ.get("RANK") == "0" and any(calls):
        open(os.environ["{_COUNTS}"], "w").write(" ".join(map(str, calls)))

dist.all_reduce = all_reduce
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_cohort(work / "phantom", PEOPLE, 1)
        build_store([work / "phantom"], work / "store", load_recipe(RECIPE).preprocessing)
        (work / "patch").mkdir()
        (work / "patch" / "sitecustomize.py").write_text(_PATCH, encoding="utf-8")
        for delay_ms in DELAYS_MS:
            seconds: dict[str, list[float]] = {"overlap": [], "apart": []}
            sums: dict[str, list[float]] = {}
            for _ in range(given.turns):
                for mode, of_turns in seconds.items():
                    with _delayed(work, delay_ms):
                        overlap = f"machine.overlap={str(mode == 'overlap').lower()}"
                        updates = WARM_UP_UPDATES + given.updates
                        recipe = [RECIPE, *NOTHING_BESIDE_UPDATES, overlap]
                        _, each = train(2, 1, updates, str(work / "store"), work / "run", recipe)
                    of_turns.append(round(statistics.median(each[WARM_UP_UPDATES:]), 4))
                    counts = (work / "counts").read_text(encoding="utf-8").split()
                    sums[mode] = [round(int(count) / updates, 1) for count in counts]  # waited for, beside the pass
            row: dict[str, Any] = {"delay_ms": delay_ms, "sums_per_update": sums, "seconds": seconds}
            row |= {mode: statistics.median(of_turns) for mode, of_turns in seconds.items()}
            rows.append(row)
            print(row, flush=True)
    if given.out:
        write_json(given.out, {"recipe": RECIPE, "rows": rows})


@contextmanager
def _delayed(work: Path, delay_ms: float) -> Iterator[None]:
    """Processes that are started inside wait for their sums."""
    names = {"PYTHONPATH": str(work / "patch"), _DELAY: str(delay_ms), _COUNTS: str(work / "counts")}
    before = {name: os.environ.get(name) for name in names}
    names["PYTHONPATH"] = os.pathsep.join(filter(None, (names["PYTHONPATH"], before["PYTHONPATH"])))
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


if __name__ == "__main__":
    main()
