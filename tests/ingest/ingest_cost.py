"""CPU seconds that reading and canonicalising an eye cost, per device, on one core.

Command: OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python tests/ingest/ingest_cost.py [--people N] [--size small|full]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from octjepa.canonical.pipeline import canonicalise
from octjepa.config import load_recipe
from octjepa.phantom import write_cohort
from octjepa.read.reader import read_volume


def table(people: int, size: str) -> dict[str, tuple[float, float]]:
    """device -> mean CPU milliseconds of (read_volume, canonicalise), imports left out."""
    preprocessing = load_recipe("tiny_cpu").preprocessing
    spent: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        write_cohort(Path(folder) / "cohort", people=people, seed=5, size=size)
        files = sorted(Path(folder).rglob("*.dcm"))
        canonicalise(read_volume(files[0]), preprocessing)
        for path in files:
            start = time.process_time()
            volume = read_volume(path)
            read = time.process_time()
            canonicalise(volume, preprocessing)
            spent[path.parent.parent.name].append((read - start, time.process_time() - read))
    return {
        device: (sum(r for r, _ in pairs) / len(pairs) * 1e3, sum(c for _, c in pairs) / len(pairs) * 1e3)
        for device, pairs in spent.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--people", type=int, default=8)
    parser.add_argument("--size", default="small")
    arguments = parser.parse_args()
    for device, (read, canonical) in table(arguments.people, arguments.size).items():
        print(f"{device}: read {read:.0f} ms, canonicalise {canonical:.0f} ms")
