"""What a network's delay costs an update, with gradients summed during the backward pass and after it.

    .venv/bin/python benchmarks/network_delay.py [--turns 7] [--updates 24] [--out docs/network_delay.json] [--write]
    .venv/bin/python benchmarks/network_delay.py --write --turns 0

`octjepa pretrain tiny_cpu_vjepa` as two processes of one thread, `machine.overlap` on and off in turns, the first of
the two by turns. The kernel delays nothing here; instead every `torch.distributed.all_reduce` of both processes ends
the delay after it would have ended, by a `sitecustomize` module on their path: a sum that takes T takes T + d. Of a sum
that goes on during the backward pass a thread waits for the end, so that its delay passes beside the pass, too; sums
that are under way together share the time, as messages on a wire do. Medians of the updates after the first ones.
`--write` puts the table of docs/network_delay.json into docs/decisions/0004; with no turns nothing is measured.
`benchmarks/overlap.py` limits the rate. Nothing may run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octjepa.bench.scaling import NOTHING_BESIDE_UPDATES, train
from octjepa.config import load_recipe
from octjepa.files import write_json
from octjepa.ingest import build_store
from octjepa.phantom import write_cohort

sys.path.insert(0, str(Path(__file__).resolve().parent))

from marked_tables import replace_marked, table

DOCS = Path(__file__).resolve().parents[1] / "docs"
DECISION, RECORD = DOCS / "decisions" / "0004-reduce-after-agreeing.md", DOCS / "network_delay.json"
RULE = "a sum that takes T takes T + d, d being the delay"
DELAYS_MS = (0, 5, 20, 50)
RECIPE, PEOPLE, WARM_UP_UPDATES = "tiny_cpu_vjepa", 24, 6
_DELAY, _COUNTS = "OCTJEPA_BENCH_DELAY_MS", "OCTJEPA_BENCH_COUNTS"
_PATCH = f'''
import atexit, os, threading, time
import torch.distributed as dist

delay, calls, sum_ = float(os.environ["{_DELAY}"]) / 1e3, [0, 0], dist.all_reduce

class Delayed:
    def __init__(self, work):
        self.work, self.error = work, None
        self.thread = threading.Thread(target=self.end_later, daemon=True)
        self.thread.start()
    def end_later(self):
        try:
            self.work.wait()
        except RuntimeError as error:
            self.error = error
        time.sleep(delay)
    def wait(self):
        self.thread.join()
        if self.error is not None:
            raise self.error
        return True

def all_reduce(*arguments, async_op=False, **named):
    calls[async_op] += 1
    work = sum_(*arguments, async_op=async_op, **named)
    if async_op:
        return Delayed(work)
    time.sleep(delay)
    return work

@atexit.register
def count():
    if os.environ.get("RANK") == "0" and any(calls):
        open(os.environ["{_COUNTS}"], "w").write(" ".join(map(str, calls)))

dist.all_reduce = all_reduce
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table of --out into the decision")
    given = parser.parse_args()
    if given.turns:
        record = {"recipe": RECIPE, "rule": RULE, "turns": given.turns, "rows": measure(given.turns, given.updates)}
        if given.out:
            write_json(given.out, record)
    if given.write:
        replace_marked(DECISION, "delays", delays(json.loads((given.out or RECORD).read_text(encoding="utf-8"))))


def measure(turns: int, updates: int) -> list[dict[str, Any]]:
    """A row for each delay: medians of the turns, each turn's median, and how many sums an update makes."""
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
            for turn in range(turns):
                for mode in sorted(seconds, reverse=turn % 2 == 0):
                    with _delayed(work, delay_ms):
                        overlap = f"machine.overlap={str(mode == 'overlap').lower()}"
                        count = WARM_UP_UPDATES + updates
                        recipe = [RECIPE, *NOTHING_BESIDE_UPDATES, overlap]
                        _, each = train(2, 1, count, str(work / "store"), work / "run", recipe)
                    seconds[mode].append(round(statistics.median(each[WARM_UP_UPDATES:]), 4))
                    calls = (work / "counts").read_text(encoding="utf-8").split()
                    sums[mode] = [round(int(number) / count, 1) for number in calls]  # waited for, beside the pass
            row: dict[str, Any] = {"delay_ms": delay_ms, "sums_per_update": sums, "seconds": seconds}
            row |= {mode: statistics.median(of_turns) for mode, of_turns in seconds.items()}
            rows.append(row)
            print(row, flush=True)
    return rows


def delays(record: dict[str, Any]) -> str:
    """The table of a record, with the rule by which its sums were delayed: seconds, and what the delay adds to them."""
    rows = record["rows"]
    cells = []
    for row in rows:
        cell: list[str] = [f"{row['delay_ms']} ms"]
        for mode in ("apart", "overlap"):
            low, high = min(row["seconds"][mode]), max(row["seconds"][mode])
            added = (row[mode] - rows[0][mode]) * 1e3
            cell += [f"{row[mode]:.3f} s ({low:.3f} to {high:.3f})", f"{added:+.0f} ms"]
        cells.append(cell)
    head = ("delay of a sum", "sums after the pass", "more than without", "during it", "more than without")
    waited = {mode: rows[-1]["sums_per_update"][mode] for mode in ("apart", "overlap")}
    turns = len(rows[0]["seconds"]["apart"])
    return (
        f"{table(head, cells)}\n\nIn this record {record['rule']}. Medians of {turns} turns (least to "
        f"greatest). Sums of an update: {waited['apart'][0]:g} after the pass; or "
        f"{waited['overlap'][1]:g} during it and {waited['overlap'][0]:g} after it."
    )


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
