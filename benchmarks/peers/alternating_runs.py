"""Two ways to do the same work, measured in alternating runs.

Other load on a machine comes and goes. So both sides are measured in every run, which of them comes first alternates,
and the result is the ratio within a run: its median over the runs, with the smallest and the largest beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from octjepa.progress import bar, is_quiet, set_quiet

Measurement = Callable[[], float]
Run = dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """Each side does its work once and returns its figure; `setup` records what was worked on.

    With `warms_up` both work once before the first run, uncounted, so that what is loaded or built late is there.
    """

    ours: Measurement
    other: Measurement
    setup: Mapping[str, Any] = field(default_factory=dict)
    warms_up: bool = True


def rate(work: Callable[[], int], clock: Callable[[], float] = time.perf_counter) -> Measurement:
    """A side whose figure is volumes a second; `work` returns how many volumes it did."""

    def measure() -> float:
        start = clock()
        volumes = work()
        return volumes / (clock() - start)

    return measure


def run_alternately(comparison: Comparison, repeats: int, name: str = "bench") -> list[Run]:
    """`repeats` times {"ours", "other", "ratio"}; ratio is ours / other. Ours is first in the first, third ... run."""
    sides = {"ours": comparison.ours, "other": comparison.other}
    runs: list[Run] = []
    warm_up = 1 if comparison.warms_up else 0
    with bar(name, 2 * (repeats + warm_up), "side") as progress, _no_progress_bars():
        for number in range(-warm_up, repeats):
            figures: Run = {}
            for side in ("ours", "other") if number % 2 == 0 else ("other", "ours"):
                figures[side] = sides[side]()
                progress.advance()
            if number >= 0:
                ours, other = figures["ours"], figures["other"]
                runs.append({"ours": ours, "other": other, "ratio": ours / other})
                progress.say(f"ratio {runs[-1]['ratio']:.2f}")
    return runs


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians over the runs, each by itself, and `spread`: the smallest and the largest ratio of a run."""
    medians: dict[str, Any] = {key: statistics.median(run[key] for run in runs) for key in ("ours", "other", "ratio")}
    ratios = [run["ratio"] for run in runs]
    return {**medians, "spread": [min(ratios), max(ratios)], "runs": list(runs)}


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """The bars of the measured work would break that of the runs."""
    before = is_quiet()
    set_quiet(True)
    try:
        yield
    finally:
        set_quiet(before)
