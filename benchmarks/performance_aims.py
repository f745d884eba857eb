"""What was aimed at for speed, memory and start-up before it was measured, and why a reference is ahead where it is.

`benchmarks/performance.py` writes both into docs/performance beside the figures. A reason is a few words; what supports
it is in docs/performance/README.md, docs/scale.md or lab/2026-11.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).resolve().parent / "records"


@dataclass(frozen=True)
class Aim:
    """An aim with its figures: ratios of a `comparison` by machine, or `figures` of another record by what they are of.

    `wanted` is the least figure that meets it, with `at_most` the greatest. `reason`: why it is missed, where it is.
    """

    text: str
    wanted: float
    comparison: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    at_most: bool = False
    reason: str = ""


def full_size_scans() -> dict[str, float]:
    """MONAI's CPU time over octjepa's, by scan."""
    record = json.loads((RECORDS / "full_size_ingest.json").read_text(encoding="utf-8"))
    return {scan.replace("_", " "): one["monai"] / one["octjepa"] for scan, one in record.items()}


def start_up(command: str) -> dict[str, float]:
    """Seconds of the command that contains `command`, by machine."""
    found = {}
    for machine, file in (("EPYC", "start_up.json"), ("Xeon with AMX", "start_up_amx.json")):
        record = json.loads((RECORDS / file).read_text(encoding="utf-8"))
        found[machine] = next(one["median"] for name, one in record.items() if command in name)
    return found


_SMALL_PRODUCTS = "products of this width reach less of the rate of large ones; the rest is memory traffic and calls"
_CHECKS = "decoding is alike; beyond it, octjepa finds surfaces and checks content, which MONAI does not"

AIMS = (
    Aim(
        "an update 6 times as fast as `VJEPA2Model` as it is shipped, with its objective, width and depth",
        6,
        "step shipped",
        reason="leaving out the student's hidden patches and the patches without tissue saves no more than this; the "
        "default recipe, another objective, is 10 times as fast (`shipped_default`)",
    ),
    Aim("1.3 times as fast as a sparse V-JEPA step as published", 1.3, "step sparse"),
    Aim(
        "the same if octjepa also encodes every patch",
        1.3,
        "step sparse_alike",
        reason="at equal tokens both compute the same products, which take most of an update in fp32",
    ),
    Aim("60 % of the rate of plain matrix products, width 192, 6 blocks", 0.6, "step matmul", reason=_SMALL_PRODUCTS),
    Aim("the same, width 384, 12 blocks", 0.6, "step matmul_384", reason=_SMALL_PRODUCTS),
    Aim(
        "less than 2 % of a run's time spent waiting for data, without a core to spare",
        0.02,
        figures={
            "by default, two idle cores": 0.29,
            "by default, both cores busy": 0.19,
            "a loader process, two idle cores": 0.024,
            "a loader process, both cores busy": 0.013,
        },
        at_most=True,
        reason="by default a run on a CPU makes its samples itself, and that counts as waiting; a loader process takes "
        "a core from the arithmetic: updates on two idle cores took 0.20 to 0.21 s with it, 0.18 to 0.19 without "
        "(2026-11-22)",
    ),
    Aim(
        "ingest of full-size scans 3 times as fast as MONAI's pipeline, in every transfer syntax "
        "(`benchmarks/full_size_ingest.py`)",
        3,
        figures=full_size_scans(),
        reason=f"{_CHECKS} ([scale](../scale.md#against-plain-monai)); decoding takes four fifths of the time for "
        "JPEG 2000",
    ),
    Aim("samples 20 times as fast as decoding the files", 20, "loader decoding"),
    Aim("samples twice as fast as MONAI's `CacheDataset`", 2, "loader monai"),
    Aim("samples twice as fast as MONAI's `PersistentDataset`", 2, "loader monai_persistent"),
    Aim("half of the peak memory of `VJEPA2Model` as it is shipped", 0.5, "peak shipped", at_most=True),
    Aim(
        "half of the peak memory if both sides encode every patch",
        0.5,
        "peak transformers",
        at_most=True,
        reason="the activations of as many tokens are as large",
    ),
    Aim("`octjepa --help` in 0.3 s (`benchmarks/start_up.py`)", 0.3, figures=start_up("--help"), at_most=True),
    Aim(
        "the first update 5 s after launch (`benchmarks/start_up.py`)",
        5,
        figures=start_up("first update"),
        at_most=True,
        reason="importing torch takes 3.4 s of it on the EPYC, 2.2 on the Xeon",
    ),
    Aim(
        "`make demo` in 6 minutes on two cores of any kind",
        6,
        figures={
            "EPYC, 2026-11-23, defaults of then": 7.35,
            "another EPYC, 2026-11-25": 5.42,
            "Xeon with AMX, 2026-11-26": 3.75,
            "Xeon with AMX, bf16 hidden": 3.87,
            "Xeon with AMX at its slowest, when 600 updates were the fewest": 6.57,
        },
        at_most=True,
        reason="it made 600 updates however long they took; the demo now makes at least 300 updates, and its results "
        "still hold ([demo](../demo.md#fewer-updates))",
    ),
)

# Comparison -> why the reference is ahead on some machine. The page has each where that is so.
NOTES = {
    "step plain": "the same network and products: no difference beyond the spread of the runs",
    "step matmul": f"a share, which the aim above is about: {_SMALL_PRODUCTS}",
    "step matmul_384": "as `matmul`",
    "step fp32": "where `auto` chose fp32 both sides are the same program, and the difference is noise",
    "step bf16": "where `auto` chose bf16 both sides are the same program, and the difference is noise",
    "step compiled": "compiled blocks fuse what is between the products. On a CPU they are off by default: building "
    "them takes some 20 s, which this gain earns back after about a thousand updates of these sizes",
    "step sincos": "rotary positions, the default, turn queries and keys in every layer; sin-cos ones are added once",
    "ingest pydicom": "it trusts the header, finds no surfaces, checks nothing and writes no index; decoding is alike",
    "ingest monai": "as `pydicom`; MONAI's resampling costs more",
    "embed single": "the same networks on the same volumes: no difference beyond the spread of the runs. Ours also "
    "hashes weights and contents and writes parts that survive a kill",
    "segment monai": "ours runs the network twice for each B-scan (as it is and mirrored), finds eight boundaries and "
    "runs the surface finder as well",
    "segment surface_finder": "it has no network, and finds neither fluid nor the six boundaries between",
    "memory measured": "what a kernel takes for itself, and an allocator holds back, is not predicted",
}


def aims_table(every: Mapping[str, Mapping[str, Mapping[str, Any]]], letters: Mapping[str, str]) -> list[str]:
    """Lines of Markdown: each aim with its figures from the worst to the best, where it is met, why not elsewhere."""
    lines = ["| aim | values, from the worst | met by | reason if missed |", "|---|---|---|---|"]
    for aim in AIMS:
        figures = dict(aim.figures) or {
            letters[name]: known[aim.comparison]["ratio"]
            for name, known in every.items()
            if "ratio" in known.get(aim.comparison, {})
        }
        ordered = sorted(figures, key=lambda name: figures[name], reverse=aim.at_most)
        met = [
            name for name in ordered if (figures[name] <= aim.wanted if aim.at_most else figures[name] >= aim.wanted)
        ]
        source = f" (`{aim.comparison}`)" if aim.comparison else ""
        shown = "; ".join(f"{name}: {figures[name]:.3g}" for name in ordered)
        verdict = "yes" if len(met) == len(ordered) else "; ".join(met) or "no"
        reason = aim.reason if len(met) < len(ordered) else ""
        lines.append(f"| {aim.text}{source} | {shown or 'not measured'} | {verdict if ordered else '-'} | {reason} |")
    return lines


def reference_is_ahead(one: Mapping[str, Any]) -> bool:
    """Whether the median of a comparison is on the side of the reference; for bytes, needing more than it."""
    if "ratio" not in one:
        return False
    return bool(one["ratio"] > 1 if one["subject"] == "peak" else one["ratio"] < 1)


def notes(every: Mapping[str, Mapping[str, Mapping[str, Any]]], subject: str) -> list[str]:
    """Lines of Markdown about the comparisons of `subject` in which the reference is ahead on some machine."""
    ahead = {name for known in every.values() for name, one in known.items() if reference_is_ahead(one)}
    found = [(name, note) for name, note in NOTES.items() if name in ahead and name.split()[0] == subject]
    return [f"- `{name.split()[1]}`: {note}." for name, note in found]
