"""Several trainings of one recipe: how far they differ, kept apart from who happened to be tested.

The figure of training s on test people t is taken as mu + a_s + b_t + noise. Trainings of one arm are read on the same
people, so their mean has two sources of error that do not shrink together: b shrinks with more people, a with more
seeds. The interval of an arm's mean holds b alone: "these trained networks, other people". The recipe's interval adds
the spread of a over the number of seeds: "this recipe, trained anew, on other people". A single training says nothing
of a, so it has no such interval (Bouthillier et al. 2021, Accounting for variance in machine learning benchmarks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from octjepa.errors import UsageError
from octjepa.metrics.bootstrap import (
    Estimate,
    Interval,
    PairedDifference,
    paired_difference,
    standard_error,
    student,
    total_error,
)


@dataclass(frozen=True)
class Spread:
    """Of one arm's figure over its seeds. sd: sample standard deviation, None for one seed; low, high: the extremes."""

    seeds: int
    sd: float | None
    low: float
    high: float


def spread(estimates: Sequence[Estimate]) -> Spread:
    """How far the trainings differ. Raises UsageError where none is given."""
    if not estimates:
        raise UsageError("an arm has no training to summarise")
    values = [estimate.value for estimate in estimates]
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(len(values), sd, min(values), max(values))


def mean_over_seeds(estimates: Sequence[Estimate]) -> Estimate:
    """The mean figure of an arm with its joint resamples: its `interval` is that of these trained networks.

    Raises UsageError: none given, or not all on the same test volumes, labels and draws.
    """
    spread(estimates)
    if len({(estimate.label_hash, estimate.draws_id) for estimate in estimates}) != 1:
        raise UsageError("the seeds of an arm were measured on different labels or draws: probe them in one run")
    return replace(
        estimates[0],
        value=float(np.mean([estimate.value for estimate in estimates])),
        samples=np.mean([estimate.samples for estimate in estimates], axis=0),
    )


def recipe_interval(estimates: Sequence[Estimate]) -> Interval:
    """Interval of an arm's mean that holds both the people and the seeds; empty for a single seed."""
    mean = mean_over_seeds(estimates)
    undefined = int((~np.isfinite(mean.samples)).sum())
    if len(estimates) < 2:
        return Interval(None, None, undefined)
    return student(mean.value, mean.samples, mean.n_people, mean.scale, more=[_of_seeds(estimates)])


def arms_difference(
    ours: Sequence[Estimate], reference: Sequence[Estimate]
) -> tuple[PairedDifference, Interval, float | None]:
    """Mean of one arm minus mean of another on the same people: of these networks, and of the two recipes.

    The recipes' interval and p-value are empty unless both arms have at least two seeds. `paired_difference` tells what
    is refused.
    """
    from scipy.stats import t

    first, second = mean_over_seeds(ours), mean_over_seeds(reference)
    paired = paired_difference(first, second)
    samples = first.samples - second.samples
    error = standard_error(samples, first.n_people)
    if error is None or len(ours) < 2 or len(reference) < 2:
        return paired, Interval(None, None, paired.undefined), None
    more = [_of_seeds(ours), _of_seeds(reference)]
    interval = student(paired.difference, samples, first.n_people, "difference", more=more)
    total, freedom = total_error(error, first.n_people, more)
    return paired, interval, float(2 * t.sf(abs(paired.difference) / total, freedom))


def _of_seeds(estimates: Sequence[Estimate]) -> tuple[float, int]:
    """Variance that the choice of seeds gives an arm's mean, and its degrees of freedom."""
    values = [estimate.value for estimate in estimates]
    return float(np.var(values, ddof=1)) / len(values), len(values) - 1
