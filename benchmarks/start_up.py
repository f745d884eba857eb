"""Seconds to `octjepa --help`, and from the launch of `octjepa pretrain` to its first update on a store that is there.

    python benchmarks/start_up.py [--turns 5] [--out benchmarks/records/start_up.json]

Beside them what octjepa has no hand in: the bare interpreter, and the import of torch. Medians of alternating runs,
after one that is not counted. Nothing may run beside it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from octjepa.config import load_recipe
from octjepa.files import write_json
from octjepa.ingest import build_store
from octjepa.phantom import write_cohort

RECIPE = "tiny_cpu"
PEOPLE = 24
_POLL_SECONDS = 0.01
_COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "python -c 'import torch'": ["-c", "import torch"],
    "octjepa --help": ["-m", "octjepa", "--help"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_cohort(work / "phantom", PEOPLE, 1)
        build_store([work / "phantom"], work / "store", load_recipe(RECIPE).preprocessing)
        measured: dict[str, Callable[[], float]] = {name: _of_command(one) for name, one in _COMMANDS.items()}
        measured[f"octjepa pretrain {RECIPE}: first update"] = lambda: seconds_to_first_update(work)
        seconds: dict[str, list[float]] = {name: [] for name in measured}
        for turn in range(-1, given.turns):
            for name, one in measured.items():
                found = one()
                if turn >= 0:
                    seconds[name].append(round(found, 3))
    found = {name: {"median": statistics.median(all_), "seconds": all_} for name, all_ in seconds.items()}
    for name, one in found.items():
        print(f"{one['median']:6.2f} s  {name}")
    if given.out:
        write_json(given.out, found)


def _of_command(arguments: list[str]) -> Callable[[], float]:
    """Measures a command of this interpreter from its start to its end."""

    def measure() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    return measure


def seconds_to_first_update(work: Path) -> float:
    """From the launch of a new run on `work`/store until its journal has an update; the run is then ended."""
    out = Path(tempfile.mkdtemp(dir=work)) / "run"
    journal = out / "metrics.jsonl"
    command = [sys.executable, "-m", "octjepa", "pretrain", RECIPE, "--store", str(work / "store"), "--out", str(out)]
    start = time.perf_counter()
    with subprocess.Popen([*command, "--quiet"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (journal.is_file() and '"train/loss"' in journal.read_text(encoding="utf-8")):
            if process.poll() is not None:
                raise SystemExit(f"octjepa pretrain ended with {process.returncode} before its first update")
            time.sleep(_POLL_SECONDS)
        seconds = time.perf_counter() - start
        process.kill()
    return seconds


if __name__ == "__main__":
    main()
