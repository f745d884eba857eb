"""Two ways to do the same work, measured one after the other again and again.

Other work on a machine comes and goes. So both sides are measured in every run, which of them comes first alternates,
and what counts is the ratio within a run: its median over the runs, with the least and the largest beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from octjepa.progress import bar, is_quiet, set_quiet

Side = Callable[[], float]
Run = dict[str, float]


@dataclass(frozen=True)
class Contest:
    """Each side does its work once and returns its figure. `setup` says what was worked on, for the record.

    `warms_up`: both work once before the first run, uncounted, so that what is loaded or built late is there.
    """

    ours: Side
    other: Side
    setup: Mapping[str, Any] = field(default_factory=dict)
    warms_up: bool = True


def rate_of(work: Callable[[], int], clock: Callable[[], float] = time.perf_counter) -> Side:
    """A side whose figure is volumes a second; `work` returns how many volumes it did."""

    def side() -> float:
        start = clock()
        volumes = work()
        return volumes / (clock() - start)

    return side


def take_turns(contest: Contest, repeats: int, name: str = "bench") -> list[Run]:
    """`repeats` times {"ours", "other", "ratio"}; ratio is ours / other. Ours is first in the first, third ... run."""
    sides = {"ours": contest.ours, "other": contest.other}
    runs: list[Run] = []
    warm_up = 1 if contest.warms_up else 0
    with bar(name, 2 * (repeats + warm_up), "turn") as progress, _hushed():
        for turn in range(-warm_up, repeats):
            figures: Run = {}
            for who in ("ours", "other") if turn % 2 == 0 else ("other", "ours"):
                figures[who] = sides[who]()
                progress.advance()
            if turn >= 0:
                ours, other = figures["ours"], figures["other"]
                runs.append({"ours": ours, "other": other, "ratio": ours / other})
                progress.say(f"ratio {runs[-1]['ratio']:.2f}")
    return runs


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians of the runs, each by itself, and `spread`: the least and the largest ratio of a run."""
    middle: dict[str, Any] = {key: statistics.median(run[key] for run in runs) for key in ("ours", "other", "ratio")}
    ratios = [run["ratio"] for run in runs]
    return {**middle, "spread": [min(ratios), max(ratios)], "runs": list(runs)}


@contextmanager
def _hushed() -> Iterator[None]:
    """No bars of what is measured: they would stand in that of the turns."""
    before = is_quiet()
    set_quiet(True)
    try:
        yield
    finally:
        set_quiet(before)
