"""What the monitor's figures mean: alarms that say what to change, and which checkpoint is the best so far.

An alarm does not end a run, for a short run may recover: it is logged once, journalled, and a checkpoint is kept as it
was then. Limits are far from what healthy runs show (docs/training.md has their figures); before the end of warm-up
nothing is judged.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from octjepa.objective.base import get_objective

_WINDOW = 20  # updates


@dataclass(frozen=True)
class Limit:
    """`figure` beyond `bound` (below it where `below`) trips the alarm."""

    figure: str
    bound: float
    below: bool
    message: str


LIMITS: dict[str, Limit] = {
    "diverging": Limit(
        "loss_over_constant", 1.25, False,
        "hidden tokens of the audit are predicted worse than by one vector for all of them. Lower train.base_lr "
        "(2.5e-4 trains at batch 512, 5e-4 diverged) or lengthen train.warmup_share.",
    ),
    "constant_solution": Limit(
        "pair_cosine_tissue", 0.95, False,
        "nearly all tissue tokens have the same features. Lower train.base_lr, raise objective.ema_base, or give "
        "objective.variance_covariance a weight (0.04 to start with).",
    ),
    "vanishing_features": Limit(
        "target_std_tissue", 0.1, True,
        "the target's features hardly vary over tissue tokens. Lower train.base_lr or raise objective.ema_base.",
    ),
    "position_only": Limit(
        "position_share_tissue", 0.8, False,
        "the features tell where a token lies and little else. Let the target move more slowly (objective.ema_base "
        "nearer to 1), hide more or larger blocks (masks), or give more light changes (views).",
    ),
    "low_rank": Limit(
        "rankme_tissue", 10.0, True,
        "the features of tissue span a handful of directions. Lower train.base_lr, let the target move more slowly "
        "(objective.ema_base nearer to 1), or give objective.variance_covariance a weight (0.04 to start with).",
    ),
}  # fmt: skip
DIVERGING = (
    "the loss of the last {window} updates ({loss:.3f}) is no better than that of a guess that knows nothing "
    "({trivial:.3f}). Lower train.base_lr (2.5e-4 trains at batch 512, 5e-4 diverged) or lengthen train.warmup_share."
)


class Health:
    """Follows losses and meters of one run of `objective`; judges after `warm` updates."""

    def __init__(self, objective: str, warm: int) -> None:
        chosen = get_objective(objective)
        self._trivial, self.warm = chosen.trivial_loss, warm
        self._limits = {
            name: replace(limit, bound=chosen.alarm_bounds.get(name, limit.bound)) for name, limit in LIMITS.items()
        }
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self.tripped: dict[str, int] = {}

    def follow(self, loss: float) -> None:
        self._losses.append(loss)

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes up where a journal ends: its lines in order."""
        self._losses.clear()
        self.tripped = {}
        for line in lines:
            if "train/loss" in line:
                self.follow(line.get("train/loss_hidden", line["train/loss"]))
            self.tripped |= dict.fromkeys(line.get("alarms", ()), line["update"])

    def judge(self, figures: Mapping[str, float], update: int) -> dict[str, str]:
        """Alarms (name -> what to change) that trip at this measurement for the first time in the run."""
        if update < self.warm + _WINDOW:
            return {}
        found = {
            name: f"{limit.figure} is {figures[limit.figure]:.3g}: {limit.message}"
            for name, limit in self._limits.items()
            if math.isfinite(value := figures.get(limit.figure, math.nan))  # what could not be had says nothing
            and (value < limit.bound) == limit.below and value != limit.bound
        }  # fmt: skip
        finite = [loss for loss in self._losses if math.isfinite(loss)]  # updates of the others were not taken
        loss = fmean(finite) if 2 * len(finite) > len(self._losses) else math.inf
        if loss > self._trivial:
            found["diverging"] = DIVERGING.format(window=len(self._losses), loss=loss, trivial=self._trivial)
        new = {name: message for name, message in found.items() if name not in self.tripped}
        self.tripped |= dict.fromkeys(new, update)
        return new
