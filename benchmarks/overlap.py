"""What summing gradients during the backward pass is worth over a slow network.

    .venv/bin/python benchmarks/overlap.py [--turns 3] [--updates 16] [--out docs/overlap.json]

`octjepa pretrain tiny_cpu_vjepa` as two processes of one thread, with `machine.overlap` on and off in turns, in a
network namespace of their own whose loopback a token bucket (`tc`, tbf) limits to the rates below; both ranks share
it. Needs Linux, `unshare`, `ip` and `tc`; without the rights of root a user namespace is tried. Medians of the
updates after the first ones.

The figures that `benchmarks/overlap_prediction.py` predicts stand beside them in the record; that script writes both
into docs/decisions/0004.
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
from octjepa.ingest import build_store
from octjepa.phantom import write_cohort
from octjepa.train.plan import plan

sys.path.insert(0, str(Path(__file__).resolve().parent))

from overlap_prediction import bucket_bytes, seconds_apart, seconds_overlapped

RATES_MBIT = (None, 4000, 1000, 400)
PEOPLE, WARM_UP_UPDATES = 24, 6
INSIDE = "OCTJEPA_BENCH_NAMESPACE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--note", default="nothing else ran on the machine", help="what ran beside it")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if INSIDE not in os.environ:
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
    rows = predicted_rows(seconds)
    print(*rows, sep="\n", flush=True)
    if out:
        write_json(out, {"beside": note, "gradient_bytes": gradients, "rows": rows, "seconds": seconds})


def predicted_rows(seconds: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Medians of each rate, and what is predicted from the update without a limit."""
    buckets = bucket_bytes(load_recipe("tiny_cpu_vjepa"))
    compute = statistics.median(seconds["no limit"]["apart"])
    rows = []
    for rate in RATES_MBIT:
        name = f"{rate} Mbit/s" if rate else "no limit"
        total = 2 * sum(buckets) / (rate * 1e6 / 8) if rate else 0.0  # both ranks' on one loopback
        apart, overlap = (statistics.median(seconds[name][mode]) for mode in ("apart", "overlap"))
        rows.append(
            {
                "rate": name, "apart": apart, "overlap": overlap, "ratio": round(apart / overlap, 3),
                "apart_predicted": round(seconds_apart(compute, total), 4),
                "overlap_predicted": round(seconds_overlapped(compute, total, buckets[-1] / sum(buckets)), 4),
            }
        )  # fmt: skip
    return rows


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
