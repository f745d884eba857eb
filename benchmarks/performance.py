"""Every comparison of `octjepa bench` in turn, and the page of their ratios: `make bench ARGS=all`.

    .venv/bin/python benchmarks/performance.py [--only SUBJECT] [--again]

Writes docs/performance/results.json after each comparison, and goes on with what is missing; `--again` measures anew.
Nothing may run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from octjepa.bench.benchmarks import BENCHMARKS, run_benchmark
from octjepa.distributed.precision import choose_precision, measured_rates
from octjepa.distributed.runtime import Runtime
from octjepa.errors import OctjepaError
from octjepa.files import write_json

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "performance"


def main() -> int:
    """Measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(BENCHMARKS))
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    path = FOLDER / "results.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for subject, benchmark in BENCHMARKS.items():
        for peer in benchmark.peers:
            name = f"{subject} {peer}"
            if given.only not in (None, subject) or (name in known and not given.again):
                continue
            started = time.monotonic()
            try:
                result = run_benchmark(subject, peer)
            except OctjepaError as error:  # a library or a compiler that is absent
                known[name] = {"subject": subject, "against": peer, "missing": str(error).splitlines()[0]}
            else:
                seconds = round(time.monotonic() - started)
                known[name] = {**result, "measured": f"{datetime.now(UTC):%Y-%m-%d}", "seconds": seconds} | rates()
            write_json(path, known)
            (FOLDER / "README.md").write_text(page(known), encoding="utf-8")
            print(name, known[name].get("ratio", "missing"), flush=True)
    (FOLDER / "README.md").write_text(page(known), encoding="utf-8")
    return 0


def rates() -> dict[str, Any]:
    """What this machine computes, threads, and the precision that `auto` chooses."""
    device = Runtime("fp32").device
    bf16, fp32 = measured_rates(device)
    return {
        "processor_name": processor(), "threads": torch.get_num_threads(), "gflops_fp32": round(fp32),
        "gflops_bf16": round(bf16), "precision": choose_precision("auto", device)[0],
    }  # fmt: skip


def processor() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def page(known: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Performance: ratios against other ways", "",
        "Written by `make bench ARGS=all` from `results.json`; do not edit. A ratio is ours over the other's, median",
        "of alternating runs in one process, with the least and the largest: above 1 octjepa is faster. What each",
        "comparison holds equal, and what it leaves out, stands in [bench](../bench.md).", "",
    ]  # fmt: skip
    for subject, benchmark in BENCHMARKS.items():
        mine = [one for one in known.values() if one["subject"] == subject]
        if not mine:
            continue
        lines += [f"## {subject}", "", f"Ours: {benchmark.ours}; {benchmark.unit}. {benchmark.interpretation}.", ""]
        lines += ["| against | ratio | ours | other | threads |", "|---|---|---|---|---|"]
        for one in mine:
            if "missing" in one:
                lines.append(f"| `{one['against']}` | not measured: {one['missing']} | | | |")
                continue
            low, high = one["spread"]
            figures = f"{one['ratio']:.2f} ({low:.2f} to {high:.2f}) | {one['ours']:.4g} | {one['other']:.4g}"
            lines.append(f"| `{one['against']}`: {one['other_is']} | {figures} | {one['threads']} |")
        lines.append("")
    measured = [one for one in known.values() if "measured" in one]
    if measured:
        lines += ["## Machine", "", "| measured | processor | cores | torch | GFLOP/s fp32 | bf16 | `auto` |"]
        lines.append("|---|---|---|---|---|---|---|")
        rows = {
            f"| {one['measured']} | {one['processor_name']} | {one['machine']['cores']} | {one['machine']['torch']} "
            f"| {one['gflops_fp32']} | {one['gflops_bf16']} | {one['precision']} |"
            for one in measured
        }
        lines += sorted(rows)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    raise SystemExit(main())
