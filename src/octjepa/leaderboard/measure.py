"""Rows and differences: every figure of an arm over its seeds, and each arm against the reference, corrected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from octjepa.errors import UsageError
from octjepa.leaderboard.choose import Option, Read
from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.comparisons import (
    benjamini_hochberg,
    holm,
    mean_over_seeds,
    recipe_difference,
    recipe_interval,
    seed_spread,
)
from octjepa.metrics.findings import BASELINES
from octjepa.metrics.intervals import scale_of
from octjepa.metrics.scores import PRIMARY_METRIC, TASK_METRICS, Figures, Predictions, Weights, brier, measure
from octjepa.probe.calibration import ProbeFit
from octjepa.probe.targets import Target


@dataclass(frozen=True)
class Training:
    """One seed of an arm, or a baseline: what was chosen for it and what it says."""

    name: str
    seed: int
    option: Option
    validation: float | None
    said: Read

    @classmethod
    def constant(cls, name: str, predictions: Predictions) -> Training:
        """A baseline that fits nothing and says the same of everyone."""
        nothing = np.zeros((0, predictions.scores.shape[1]))
        nobody = Predictions(predictions.truth[:0], nothing, nothing)
        option = Option("", "none", "constant", np.zeros((0, 1)))
        return cls(name, 1, option, None, Read(nobody, predictions, ProbeFit(predictions, 0.0, 0)))


@dataclass
class Arm:
    """All seeds of one name for one target; `people` are those of the test volumes, in their order."""

    name: str
    trainings: list[Training]
    target: Target
    draws: Draws
    people: list[str]
    _made: dict[str, list[Estimate]] = field(default_factory=dict)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        return (*TASK_METRICS[self.target.task], *(("brier",) if self.target.classes else ()))

    def estimates(self, metric: str) -> list[Estimate]:
        """The figure of every seed."""
        if metric not in self._made:
            self._made[metric] = [self._estimate(metric, one.said.test) for one in self.trainings]
        return self._made[metric]

    def _estimate(self, metric: str, said: Predictions) -> Estimate:
        def statistic(weights: Weights) -> Figures:
            return brier(said, weights) if metric == "brier" else measure(metric, said, weights)

        scale = scale_of(metric, said.scores)
        return self.draws.estimate(statistic, self.people, self.target.label_hash, metric == "ece", scale)


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _joined(parts: Sequence[str]) -> str:
    """What the seeds of an arm were read by: one word where they agree."""
    return ", ".join(dict.fromkeys(part for part in parts if part))


def rows_of(arm: Arm) -> list[dict[str, Any]]:
    """A row for every metric: the mean over seeds, its interval, and the spread of the seeds apart from it."""
    rows = []
    for metric in arm.metrics:
        found = arm.estimates(metric)
        mean, seeds = mean_over_seeds(found), seed_spread(found)
        recipe = recipe_interval(found)
        rows.append(
            {
                "name": arm.name,
                "target": arm.target.name,
                "probe": _joined([one.option.probe for one in arm.trainings]),
                "pool": _joined([one.option.pool for one in arm.trainings]),
                "metric": metric,
                **mean.as_dict(),
                "primary": metric == PRIMARY_METRIC[arm.target.task],
                "seeds": seeds.seeds,
                "seed_sd": seeds.sd,
                "recipe_low": recipe.low,
                "recipe_high": recipe.high,
            }
        )
    return rows


def training_row(one: Training, arm: Arm) -> dict[str, Any]:
    """One seed with what validation chose for it."""
    metric = PRIMARY_METRIC[arm.target.task]
    figure = arm.estimates(metric)[arm.trainings.index(one)].as_dict()
    return {
        "name": one.name,
        "seed": one.seed,
        "target": arm.target.name,
        "metric": metric,
        "checkpoint": one.option.checkpoint,
        "pool": one.option.pool,
        "probe": one.option.probe,
        "setting": one.said.probed.setting,
        "validation": one.validation,
        **{key: figure[key] for key in ("value", "low", "high")},
    }


def constant(one: Training, target: Target) -> str:
    """What to say of a training of which one answer is read for everybody; "" if it gives several."""
    said = one.said.test
    answers = np.unique(said.predicted_classes() if target.classes else said.scores[:, 0].round(9))
    if len(answers) > 1:
        return ""
    answer = repr(target.classes[int(answers[0])]) if target.classes else f"{answers[0]:.4g}"
    who = one.name if one.seed == 1 else f"{one.name} (seed {one.seed})"
    return f"{who} says {answer} of every test volume of {target.name}: a constant predictor"


def compare(families: Sequence[tuple[Target, Sequence[Arm]]], reference: str) -> list[dict[str, Any]]:
    """Every encoder arm minus the reference on the primary metric, with p-values corrected over all targets and arms.

    p is of the recipes where both have at least two seeds, else of these networks. Baselines are compared where one of
    them is the reference only through the encoders: they are not claims. Raises UsageError: no such row.
    """
    found: list[dict[str, Any]] = []
    for target, arms in families:
        metric = PRIMARY_METRIC[target.task]
        other = next((arm for arm in arms if arm.name == reference), None)
        if other is None:
            raise UsageError(f"no row {reference!r} to compare with: rows are {', '.join(arm.name for arm in arms)}")
        for arm in arms:
            if arm is other or arm.name.partition(":")[0] in BASELINES:
                continue
            paired, recipe, p = recipe_difference(arm.estimates(metric), other.estimates(metric))
            found.append(
                {
                    "name": arm.name,
                    "reference": reference,
                    "target": target.name,
                    "metric": metric,
                    "difference": _known(paired.difference),
                    "low": paired.low,
                    "high": paired.high,
                    "recipe_low": recipe.low,
                    "recipe_high": recipe.high,
                    "n_people": paired.n_people,
                    "seeds": len(arm.trainings),
                    "p_of": "networks" if p is None else "recipes",
                    "p": paired.p if p is None else p,
                }
            )
    for name, corrected in (("p_holm", holm), ("q_bh", benjamini_hochberg)):
        for row, value in zip(found, corrected([row["p"] for row in found]), strict=True):
            row[name] = value
    return found
