"""Every comparison of `make bench` in turn, and the page of their ratios: `make bench ARGS=all`.

    python -m benchmarks performance [--only SUBJECT] [--again]
    python -m benchmarks performance --page

Writes benchmarks/records/performance.json after each comparison, by machine, and goes on with what is missing here;
`--again` measures anew, `--page` measures nothing and writes the page of what there is. ATEN_CPU_CAPABILITY and
ONEDNN_MAX_CPU_ISA hide instruction sets: a machine so restricted counts as another. Nothing may run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, mode
from string import ascii_uppercase
from typing import Any

import torch
from benchmarks.peers.benchmarks import BENCHMARKS, run_benchmark
from benchmarks.svg import save_svg

from octjepa.distributed.precision import choose_precision, measured_rates
from octjepa.distributed.runtime import Runtime
from octjepa.errors import OctjepaError
from octjepa.files import write_json
from octjepa.machine import processor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from marked_tables import replace_marked
from performance_aims import aims_table, notes

Results = dict[str, dict[str, Any]]  # comparison, as "step plain" -> what the comparison measured
RESTRICTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "performance"
RECORDS = Path(__file__).resolve().parent / "records"
PROFILE = RECORDS / "step_profile.json"  # of benchmarks/step_profile.py


def main() -> int:
    """Measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(BENCHMARKS))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--page", action="store_true", help="write the page, measure nothing")
    given = parser.parse_args()
    path = RECORDS / "performance.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    every: dict[str, Results] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not given.page:
        measure(path, every, given.only, given.again)
    every = dict(sorted(every.items()))  # as the file has them, so that a machine's letter stays
    replace_marked(FOLDER / "README.md", "performance", page(every).rstrip())
    plot_ratios(every, FOLDER / "ratios.svg")
    return 0


def measure(path: Path, every: dict[str, Results], only: str | None, again: bool) -> None:
    """Adds to `every` what is missing on this machine, or all of it anew; writes `path` after each comparison."""
    known = every.setdefault(machine(), {})
    for subject, benchmark in BENCHMARKS.items():
        for peer in benchmark.peers:
            name = f"{subject} {peer}"
            if only not in (None, subject) or (name in known and not again):
                continue
            started = time.monotonic()
            try:
                result = run_benchmark(subject, peer)
            except OctjepaError as error:  # a library or a compiler that is absent
                known[name] = {"subject": subject, "against": peer, "missing": str(error).splitlines()[0]}
            else:
                seconds = round(time.monotonic() - started)
                known[name] = {**result, "measured": f"{datetime.now(UTC):%Y-%m-%d}", "seconds": seconds} | rates()
            write_json(path, every)
            print(name, known[name].get("ratio", "missing"), flush=True)


def machine() -> str:
    """The processor, its bf16 instructions, and what hides instruction sets from torch and oneDNN.

    The sets are the processor's own, hidden or not: two processors of one name, hidden alike, are two machines. (A
    record of 2026-11-24 has only what hid them, and is not added to.)
    """
    hidden = [f"{name}={os.environ[name]}" for name in RESTRICTIONS if name in os.environ]
    return ", ".join([processor_name(), *(processor().bf16_sets or ["no bf16"]), *hidden])


def rates() -> dict[str, Any]:
    """What this machine computes, threads, and the precision that `auto` chooses."""
    device = Runtime("fp32").device
    bf16, fp32 = measured_rates(device)
    return {
        "processor_name": processor_name(),
        "threads": torch.get_num_threads(),
        "gflops_fp32": round(fp32),
        "gflops_bf16": round(bf16),
        "precision": choose_precision("auto", device)[0],
    }


def processor_name() -> str:
    """The processor's name, from /proc/cpuinfo on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def page(every: dict[str, Results]) -> str:
    """The results as Markdown: the part between the marks of docs/performance/README.md."""
    letters = dict(zip(every, ascii_uppercase, strict=False))
    lines = [
        "Ratio: octjepa over the reference implementation, median of the ratios of alternating runs (minimum to",
        "maximum), in one process except for memory, peak and scaling; the two rates are medians of their own.",
        "A comparison that a machine lacks was not run there. "
        "[Scale](../scale.md) has the growth with files and volumes.",
        "",
        "| machine | measured | processor | cores | threads | torch | GFLOP/s fp32 | bf16 | `auto` |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, known in every.items():
        done = [one for one in known.values() if "measured" in one]
        if done:
            dates = sorted({one["measured"] for one in done})
            rates = (f"{median(one[key] for one in done):.0f}" for key in ("gflops_fp32", "gflops_bf16"))
            cells = [
                letters[name],
                " to ".join(dict.fromkeys((dates[0], dates[-1]))),
                name,
                done[0]["machine"]["cores"],
                done[0]["threads"],
                done[0]["machine"]["torch"],
                *rates,
                mode(one["precision"] for one in done),
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "![Ratios of every comparison on every machine](ratios.svg)", ""]
    lines += [
        "### Aims",
        "",
        "The table compares the aims that were set before the measurement with the measured values. A letter names a",
        "machine. Values without a letter come from other records.",
        "",
        *aims_table(every, letters),
        "",
    ]
    for subject, benchmark in BENCHMARKS.items():
        lines += [f"### {subject}", ""]
        lines += [f"Measured: {benchmark.ours}, in {benchmark.unit}. {benchmark.interpretation}.", ""]
        lines += ["| reference implementation | machine | ratio | octjepa | reference |", "|---|---|---|---|---|"]
        for peer, about in benchmark.peers.items():
            for name, known in every.items():
                if (one := known.get(f"{subject} {peer}")) is not None:
                    lines.append(f"| `{peer}`: {about.description} | {letters[name]} | {_figures(one)} |")
        if ahead := notes(every, subject):
            lines += ["", "Reasons why the reference is ahead on some machines:", "", *ahead]
        lines.append("")
    if PROFILE.is_file():
        lines += operators_by_time(json.loads(PROFILE.read_text(encoding="utf-8")))
    return "\n".join(lines).rstrip() + "\n"


def operators_by_time(record: dict[str, Any]) -> list[str]:
    """The section of the record of `benchmarks/step_profile.py`."""
    lines = [
        "### Where an update's time goes",
        "",
        "Share of the time of all operators of torch (`benchmarks/step_profile.py`, record in "
        "`benchmarks/records/step_profile.json`).",
        "",
        "| machine, precision | threads | recipe | matrix products | operators |",
        "|---|---|---|---|---|",
    ]
    for name, found in record.items():
        for recipe, one in found.items():
            if isinstance(one, dict):
                operators = ", ".join(
                    f"{operator.removeprefix('aten::')} {share:.2f}" for operator, share in one["operators"].items()
                )
                products = f"{one['matrix_products']:.2f}"
                lines.append(f"| {name} | {found['threads']} | `{recipe}` | {products} | {operators} |")
    return lines


def _figures(one: dict[str, Any]) -> str:
    """Ratio with its range, and both rates, as the last cells of a line."""
    if "missing" in one:
        return f"not measured: {one['missing']} | |"
    low, high = one["spread"]
    return f"{one['ratio']:.2f} ({low:.2f} to {high:.2f}) | {one['ours']:.4g} | {one['other']:.4g}"


def plot_ratios(every: dict[str, Results], path: Path) -> None:
    """A line for each comparison, a mark with its range for each machine."""
    from matplotlib.figure import Figure

    names = [f"{subject} {peer}" for subject, benchmark in BENCHMARKS.items() for peer in benchmark.peers]
    figure = Figure(figsize=(8, 0.34 * len(names) + 1), layout="constrained")
    axes = figure.add_subplot()
    for number, (letter, known) in enumerate(zip(ascii_uppercase, every.values(), strict=False)):
        offset = 0.22 * (number - (len(every) - 1) / 2)
        done = [(row, known[name]) for row, name in enumerate(names) if "ratio" in known.get(name, {})]
        ratios = [one["ratio"] for _, one in done]
        below = [one["ratio"] - one["spread"][0] for _, one in done]
        above = [one["spread"][1] - one["ratio"] for _, one in done]
        rows = [row + offset for row, _ in done]
        axes.errorbar(ratios, rows, xerr=(below, above), fmt="osD^v"[number % 5], ms=4, lw=1, label=letter)
    axes.axvline(1, color="0.6", lw=1, zorder=0)
    axes.set_xscale("log")
    axes.set_xticks(ticks := [0.2, 0.5, 1, 2, 5, 10, 100], list(map(str, ticks)))
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", lw=0.3)
    axes.set_xlabel("octjepa over the reference: rates above 1 are faster, a peak below 1 is lower")
    axes.legend(title="machine")
    save_svg(figure, path)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    raise SystemExit(main())
