"""Intervals of means over seeds, and of differences between rows: `pairs.json`, from the bootstrap copies of every run.

All runs are measured on the same test people with the same draws of them, so a difference is paired person by person.
Two intervals each (`octjepa.metrics.comparisons`): of these trained networks on other people, and of the recipes
trained anew on other people, which holds the seeds, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.files import write_json
from octjepa.metrics.bootstrap import Estimate
from octjepa.metrics.comparisons import mean_over_seeds, recipe_difference, recipe_interval
from octjepa.metrics.intervals import Scale

from .frozen import COPIED
from .one import COPIES
from .plan import ABLATIONS, ARMS, LATENT, Chosen, Settings, finalist, seeds_of
from .results import Results

PAIRS = "pairs.json"
_SCALES: dict[str, Scale] = {"leave_vendor_out_drop": "difference", "fovea_error_mm": "error"}
Pair = dict[str, Any]


def wanted(settings: Settings, chosen: Chosen) -> list[tuple[str, str | None]]:
    """(row, what it is compared with; None: the row itself)."""
    rows = [arm for arm in settings.arms if arm in (*ARMS, "untrained", "supervised")]
    found: list[tuple[str, str | None]] = [(arm, None) for arm in rows]
    found += [(arm, "untrained") for arm in rows if arm in ARMS]
    if (ablated := chosen.ablated) is not None:
        found += [(ablated, other) for other in ARMS if other != ablated]
        reference, *others = (f"{ablated}:{name}" for name in ABLATIONS)
        found += [(reference, None), *((one, reference) for one in others)]
        found += [(f"{ablated}:tokens_all", f"{ablated}:tokens_third")]
        found += [(finalist(ablated, word), ablated) for word in chosen.finalists]
    return found


def pairs(results: Results, runs: Path, settings: Settings, chosen: Chosen, people: int) -> list[Pair]:
    """Every wanted figure whose runs are all there. runs: the folder of the runs; people: in the test set."""
    assert chosen.ablated is None or chosen.ablated in LATENT
    known, found = _estimates(results, runs, people), []
    for arm, other in wanted(settings, chosen):
        for metric in COPIED:
            ours, theirs = known.get((arm, metric), []), known.get((other or "", metric), [])
            seeds = seeds_of(arm, settings)
            if len(ours) == len(seeds) and (other is None or len(theirs) == len(seeds)):
                found.append({"arm": arm, "minus": other, "metric": metric, **figure(ours, theirs)})
    return found


def write_pairs(folder: Path, found: list[Pair]) -> None:
    write_json(folder / PAIRS, found)


def read_pairs(folder: Path) -> list[Pair]:
    """What `write_pairs` wrote; nothing before it did."""
    path = folder / PAIRS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def told_interval(found: list[Pair], arm: str, other: str | None, metric: str) -> str:
    """ " (low to high)" of people and seeds; nothing where there is no such interval."""
    for one in found:
        if (one["arm"], one["minus"], one["metric"]) == (arm, other, metric):
            low, high = one["recipe_low"], one["recipe_high"]
            return "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    return ""


def figure(ours: list[Estimate], theirs: list[Estimate]) -> Pair:
    """The mean over seeds with its intervals; with `theirs`, of as many seeds, the difference (`recipe_difference`)."""
    if theirs:
        networks, recipes, p = recipe_difference(ours, theirs)
        value, low, high = networks.difference, networks.low, networks.high
    else:
        mean, recipes, p = mean_over_seeds(ours), recipe_interval(ours), None
        value, (low, high) = mean.value, (mean.interval().low, mean.interval().high)
    return {
        "value": value, "low": low, "high": high, "recipe_low": recipes.low, "recipe_high": recipes.high, "p": p,
        "n_people": ours[0].n_people, "seeds": len(ours),
    }  # fmt: skip


def _estimates(results: Results, runs: Path, people: int) -> dict[tuple[str, str], list[Estimate]]:
    """(row, metric) -> its estimate of every seed whose copies are there; each run is read once."""
    copies: dict[str, dict[str, np.ndarray]] = {}
    for run in results.runs:
        if (path := runs / run / COPIES).is_file():
            with np.load(path, allow_pickle=False) as file:
                copies[run] = {metric: file[metric].astype(np.float64) for metric in file.files}
    found: dict[tuple[str, str], list[Estimate]] = {}
    for one in results.rows:
        run, metric = one["run"], one["metric"]
        if metric in COPIED and one["value"] is not None and metric in copies.get(run, {}):
            eyes = results.runs[run].get("eyes_hash", "")
            scale = _SCALES.get(metric, "share")
            estimate = Estimate(one["value"], copies[run][metric], one["n"], people, eyes, eyes, scale)
            found.setdefault((one["arm"], metric), []).append(estimate)
    return found
