"""The results on disk: `results.json`, a flat list of figures, and `runs.json`, what each run was. Written atomically.

A figure is {arm, seed, metric, value, low, high, n, run}: value null where it does not exist, low and high the 95 %
interval (null without one), n what it was measured on, run a key of runs.json. A newer figure of the same arm, seed and
metric takes the place of the older one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from octjepa.errors import OctjepaError
from octjepa.files import write_json

from .plan import ABLATIONS, ARMS, LATENT, Chosen, Settings

FIELDS = {
    "arm": str, "seed": int, "metric": str, "value": (float, int, type(None)), "low": (float, int, type(None)),
    "high": (float, int, type(None)), "n": int, "run": str,
}  # fmt: skip
Row = dict[str, Any]


def row(arm: str, seed: int, metric: str, value: float, low: float | None, high: float | None, n: int, run: str) -> Row:
    """A figure; what is not finite becomes null."""
    known = [None if number is None or not math.isfinite(number) else float(number) for number in (value, low, high)]
    return dict(zip(FIELDS, (arm, seed, metric, *known, int(n), run), strict=True))


def check(rows: Any, where: str) -> list[Row]:
    """Raises OctjepaError naming the first row that is no figure."""
    if not isinstance(rows, list):
        raise OctjepaError(f"{where} holds {type(rows).__name__}, expected a list of figures")
    seen = set()
    for number, one in enumerate(rows):
        if not isinstance(one, dict) or set(one) != set(FIELDS):
            raise OctjepaError(f"{where}, figure {number}: expected exactly the fields {', '.join(FIELDS)}")
        wrong = [name for name, kind in FIELDS.items() if not isinstance(one[name], kind) or one[name] is True]
        if wrong:
            raise OctjepaError(f"{where}, figure {number}: {wrong[0]} holds {one[wrong[0]]!r}")
        key = one["arm"], one["seed"], one["metric"]
        if key in seen:
            raise OctjepaError(f"{where}: {key} is there twice")
        seen.add(key)
    return rows


class Results:
    """The two files of `folder`, read when opened. Raises OctjepaError where they are damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[Row] = check(_read(folder / "results.json", []), str(folder / "results.json"))
        self.runs: dict[str, Any] = _read(folder / "runs.json", {})

    def done(self) -> set[str]:
        """Runs with at least one figure."""
        return {one["run"] for one in self.rows}

    def add(self, run: str, about: Mapping[str, Any], rows: Iterable[Row]) -> None:
        """Adds the figures of a run that has ended, and writes both files: runs first, so that no figure lacks one."""
        new = list(rows)
        keys = {(one["arm"], one["seed"], one["metric"]) for one in new}
        kept = [one for one in self.rows if (one["arm"], one["seed"], one["metric"]) not in keys]
        rows_now = check(
            sorted(kept + new, key=lambda one: (one["arm"], one["seed"], one["metric"])), f"the figures of {run}"
        )
        used = {one["run"] for one in rows_now}
        runs_now = {name: value for name, value in {**self.runs, run: dict(about)}.items() if name in used}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "runs.json", {**self.runs, **runs_now})
        write_json(self.folder / "results.json", rows_now)
        write_json(self.folder / "runs.json", runs_now)
        self.rows, self.runs = rows_now, runs_now

    def values(self, arm: str, metric: str) -> dict[int, float]:
        """seed -> value, of the figures that exist."""
        return {
            one["seed"]: one["value"]
            for one in self.rows
            if one["arm"] == arm and one["metric"] == metric and one["value"] is not None
        }


def minus(ours: Mapping[int, float], others: Mapping[int, float]) -> dict[int, float]:
    """Differences of what both have, seed by seed."""
    return {seed: ours[seed] - others[seed] for seed in sorted(set(ours) & set(others))}


def spread(values: Iterable[float], sign: bool = False) -> str:
    """Mean [lowest, highest]; of a single value that. `sign`: of differences, with their plus."""
    known, form = list(values), "+.3f" if sign else ".3f"
    return f"{mean(known):{form}}" + (f" [{min(known):{form}}, {max(known):{form}}]" if len(known) > 1 else "")


def best_arm(results: Results, arms: Iterable[str], seeds: Iterable[int]) -> str | None:
    """The arm with the highest mean macro lesion AUROC on *validation* people; None until every run of each is there.

    Test people choose nothing.
    """
    wanted = set(seeds)
    means = {}
    for arm in arms:
        known = results.values(arm, "lesion_auroc_macro_val")
        if not wanted <= set(known):
            return None
        means[arm] = sum(known[seed] for seed in wanted) / len(wanted)
    return max(means, key=lambda arm: means[arm]) if means else None


def chosen(results: Results, settings: Settings) -> Chosen:
    """The arms of the curve and of the ablations and those that go on to the main budget, as far as they are known."""
    arms = [arm for arm in settings.arms if arm in ARMS]
    latent = [arm for arm in arms if arm in LATENT]
    ablated = best_arm(results, latent, settings.seeds)
    further = () if ablated is None else finalists(results, ablated, settings.ablation_seeds)
    return Chosen(best_arm(results, arms, settings.seeds), ablated, further)


def finalists(results: Results, arm: str, seeds: Iterable[int]) -> tuple[str, ...]:
    """Ablations of `arm` that beat `reference` on *validation* people with every seed; none until all are there."""
    wanted = set(seeds)
    reference, *others = (results.values(f"{arm}:{word}", "lesion_auroc_macro_val") for word in ABLATIONS)
    gains = [minus(values, reference) for values in others]
    if any(not wanted <= set(gain) for gain in gains):
        return ()
    words = list(ABLATIONS)[1:]
    return tuple(word for word, gain in zip(words, gains, strict=True) if min(gain[seed] for seed in wanted) > 0)


def _read(path: Path, empty: Any) -> Any:
    if not path.is_file():
        return empty
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise OctjepaError(f"{path} is damaged ({error}): restore it from version control, or remove it") from None
    if not isinstance(value, type(empty)):
        raise OctjepaError(f"{path} holds {type(value).__name__}, expected {type(empty).__name__}")
    return value
