"""What is done about unfit updates: none of them is taken, and after too many in a row the run goes back.

An update is unfit when its loss or gradient is not finite, or its gradient norm is a spike: `train.spike_factor` times
the median of the healthy ones before. It is skipped by all ranks alike (`octjepa.train.step`), and journalled with
its volumes. After `IN_A_ROW` of them the run returns to its last checkpoint and leaves their volumes out from there on.
Everything here follows from the journal, so a run that was killed and resumed decides as the uninterrupted one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

IN_A_ROW = 5
_WINDOW = 100  # healthy updates whose median a norm is held against
_LEAST = 20  # of them before anything is called a spike
# Norms of healthy runs leap up to 60-fold over the first hundred updates, while the target learns to tell tokens apart;
# after 200 none of eleven rose above 6.3 times the median (lab/LOG.md).
ARMED_FROM = 200
_LAG = 2  # norms of this many updates before the one in hand are known: they come off the device one update late


class Guard:
    """`limit(update)` is the norm above which that update is a spike; `follow` tells it what came of one."""

    def __init__(self, spike_factor: float | None) -> None:
        self._factor = spike_factor
        self._norms: deque[tuple[int, float]] = deque(maxlen=_WINDOW + _LAG)
        self.row: list[int] = []  # unfit updates since the last healthy one

    def limit(self, update: int) -> float:
        """Infinite for the first updates, and until enough healthy ones are known."""
        known = [norm for done, norm in self._norms if done <= update - _LAG][-_WINDOW:]
        if self._factor is None or update < ARMED_FROM or len(known) < _LEAST:
            return math.inf
        return self._factor * median(known)

    def follow(self, update: int, healthy: bool, norm: float) -> bool:
        """True when too many updates in a row were unfit: go back."""
        if healthy:
            self._norms.append((update, norm))
            self.row = []
        else:
            self.row.append(update)
        return len(self.row) >= IN_A_ROW

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes up where a journal ends: its lines of updates in order (numbers from 1)."""
        self._norms.clear()
        self.row = []
        for line in lines:
            if "train/grad_norm" in line:
                self.follow(line["update"] - 1, "skipped" not in line, line["train/grad_norm"])
