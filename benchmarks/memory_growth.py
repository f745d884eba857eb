"""Does memory grow? 10,000 updates of the smallest model, as `octjepa pretrain` runs them, watched from outside.

    .venv/bin/python benchmarks/memory_growth.py [--updates 10000] [--out docs/memory_growth.json]

Resident memory of the run and of its loader process, every 500 updates. A leak is a slope over the second half: by then
allocators and caches are full. More than 1 KB an update is called growth: a forgotten batch would be 270 KB here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from octjepa.config import load_recipe
from octjepa.files import write_json
from octjepa.ingest import build_store
from octjepa.phantom import write_cohort

PEOPLE = 20
EVERY = 500
LIMIT_BYTES_PER_UPDATE = 1024
RECIPE = {
    "name": "memory_growth",
    "preprocessing": {"image_size": [8, 64, 64], "margin": [0, 4, 4], "target_spacing_mm": [0.4, 0.016, 0.1]},
    "tokens": {"patch_size": [4, 16, 16], "select": "tissue", "budget": 16},
    "model": {"size": "test"},
    "train": {"max_updates": 10000, "global_batch": 2, "base_lr": 1e-3, "precision": "fp32"},
    "validation": {"max_samples": 4},
    "monitor": {"every_updates": 500, "volumes": 4},
    "checkpoint": {"every_updates": 1000, "keep_last": 1},
    "machine": {"loader_workers": 1},
}


def resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(process: int) -> list[int]:
    found = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")]
    return sorted(int(child) for text in found for child in text.split())


def reached(journal: Path) -> int:
    """The update of the last whole line."""
    if not journal.is_file():
        return 0
    with journal.open("rb") as file:
        file.seek(max(0, journal.stat().st_size - 8192))
        lines = file.read().split(b"\n")[1:-1]
    return int(json.loads(lines[-1])["update"]) if lines else 0


def slope(points: list[tuple[int, int]]) -> float:
    """Bytes an update, by least squares over the second half of (update, bytes)."""
    late = [point for point in points if point[0] > points[-1][0] / 2]
    return float(np.polyfit([update for update, _ in late], [held for _, held in late], 1)[0])


def watch(command: list[str], run: Path, updates: int) -> dict[str, list[tuple[int, int]]]:
    """(update, resident bytes) of the run and of its loader, at every `EVERY` updates."""
    seen: dict[str, list[tuple[int, int]]] = {"run": [], "loader": []}
    loader = None
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            time.sleep(0.3)
            done = reached(run / "metrics.jsonl")
            if done < EVERY * (len(seen["run"]) + 1) or done == updates:
                continue
            loader = loader or next(iter(children(process.pid)))
            seen["run"].append((done, resident_bytes(process.pid)))
            seen["loader"].append((done, resident_bytes(loader)))
            print(done, *(f"{name} {points[-1][1] / 1e6:.1f} MB" for name, points in seen.items()), flush=True)
    if process.returncode:
        sys.exit(f"the run ended with {process.returncode}")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=10000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
        write_cohort(work / "phantom", PEOPLE, 1)
        build_store([work / "phantom"], work / "store", load_recipe(str(work / "recipe.yaml")).preprocessing)
        command = [sys.executable, "-m", "octjepa", "pretrain", str(work / "recipe.yaml")]
        command += [f"train.max_updates={given.updates}", "--store", str(work / "store"), "--out", str(work / "run")]
        started = time.monotonic()
        seen = watch([*command, "--quiet"], work / "run", given.updates)
        summary: dict[str, Any] = json.loads((work / "run" / "summary.json").read_text())
        found = {
            "updates": summary["updates"],
            "skipped_updates": summary["skipped_updates"],
            "seconds": round(time.monotonic() - started),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "limit_bytes_per_update": LIMIT_BYTES_PER_UPDATE,
            "bytes_per_update": {name: round(slope(points), 1) for name, points in seen.items()},
            "resident_mb": {name: {at: round(held / 1e6, 1) for at, held in points} for name, points in seen.items()},
        }
    found["grows"] = [name for name, value in found["bytes_per_update"].items() if value > LIMIT_BYTES_PER_UPDATE]
    print(json.dumps(found, indent=1))
    if given.out:
        write_json(given.out, found)
    sys.exit(1 if found["grows"] else 0)


if __name__ == "__main__":
    main()
