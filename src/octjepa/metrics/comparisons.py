"""Many comparisons at once: p-values that stay honest when a family of them is read together.

Holm's step-down rule bounds the chance of even one false claim in the family, whatever the dependence between its
members (Holm 1979). Benjamini and Hochberg's bounds the expected share of false claims among those made; it holds for
independent and positively dependent ones, such as rows measured on the same people (Benjamini & Hochberg 1995,
Benjamini & Yekutieli 2001). The family is everything that was compared, not what looked worth showing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from octjepa.errors import UsageError
from octjepa.metrics.bootstrap import Estimate
from octjepa.metrics.intervals import (
    Interval,
    combined_error,
    standard_error,
    student_interval,
)


def holm(p: Sequence[float | None]) -> list[float | None]:
    """Adjusted p-values in the order given; None (no p-value exists) stays None and is not counted in the family."""

    def adjusted(ordered: Float[np.ndarray, " family"]) -> Float[np.ndarray, " family"]:
        steps: np.ndarray = np.maximum.accumulate(ordered * np.arange(len(ordered), 0, -1))
        return steps

    return _over_family(p, adjusted)


def benjamini_hochberg(p: Sequence[float | None]) -> list[float | None]:
    """As `holm`, for the false discovery rate."""

    def adjusted(ordered: Float[np.ndarray, " family"]) -> Float[np.ndarray, " family"]:
        steps = ordered * len(ordered) / np.arange(1, len(ordered) + 1)
        from_above: np.ndarray = np.minimum.accumulate(steps[::-1])[::-1]
        return from_above

    return _over_family(p, adjusted)


def _over_family(p: Sequence[float | None], adjusted: Callable[[np.ndarray], np.ndarray]) -> list[float | None]:
    known = [index for index, one in enumerate(p) if one is not None]
    values = np.array([p[index] for index in known], dtype=np.float64)
    if ((values < 0) | (values > 1) | np.isnan(values)).any():
        raise UsageError("a family of comparisons holds a p-value outside 0..1")
    order = np.argsort(values, kind="stable")
    found: list[float | None] = [None] * len(p)
    if len(known):
        for place, value in zip(order, np.minimum(adjusted(values[order]), 1.0), strict=True):
            found[known[place]] = float(value)
    return found


@dataclass(frozen=True)
class PairedDifference:
    """ours - reference on the same people; low and high as in Interval.

    p: two-sided, of no difference, from the same standard error as the interval: below 0.05 exactly where the interval
    leaves out zero. None where there is no interval.
    """

    difference: float
    low: float | None
    high: float | None
    undefined: int
    n_people: int
    p: float | None


def paired_difference(ours: Estimate, reference: Estimate) -> PairedDifference:
    """ours - reference with its interval and p-value, resample by resample.

    Raises UsageError if the two were not measured on the same volumes with the same labels, or not on the same draws.
    """
    from scipy.stats import t

    if ours.label_hash != reference.label_hash:
        raise UsageError(
            f"the two rows were measured on different labels (hash {ours.label_hash[:12]} against "
            f"{reference.label_hash[:12]}; {ours.n} and {reference.n} volumes): probe both in one run"
        )
    if ours.draws_id != reference.draws_id:
        raise UsageError("the two rows were resampled with different draws: probe both in one run with one seed")
    difference, samples, people = ours.value - reference.value, ours.samples - reference.samples, ours.n_people
    interval = student_interval(difference, samples, people, "difference")
    p = None
    if interval.low is not None:
        error = standard_error(samples, people)
        p = float(2 * t.sf(abs(difference) / error, people - 1)) if error else None
    return PairedDifference(difference, interval.low, interval.high, interval.undefined, people, p)


@dataclass(frozen=True)
class SeedSpread:
    """Of one arm's figure over its seeds. sd: sample standard deviation, None for one seed; low, high: the extremes."""

    seeds: int
    sd: float | None
    low: float
    high: float


def seed_spread(estimates: Sequence[Estimate]) -> SeedSpread:
    """How far the trainings differ. Raises UsageError where none is given."""
    if not estimates:
        raise UsageError("an arm has no training to summarise")
    values = [estimate.value for estimate in estimates]
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return SeedSpread(len(values), sd, min(values), max(values))


def mean_over_seeds(estimates: Sequence[Estimate]) -> Estimate:
    """The mean figure of an arm with its joint resamples: its `interval` is that of these trained networks.

    Raises UsageError: none given, or not all on the same test volumes, labels and draws.
    """
    seed_spread(estimates)
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
    return student_interval(mean.value, mean.samples, mean.n_people, mean.scale, more=[_of_seeds(estimates)])


def recipe_difference(
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
    interval = student_interval(paired.difference, samples, first.n_people, "difference", more=more)
    total, freedom = combined_error(error, first.n_people, more)
    return paired, interval, float(2 * t.sf(abs(paired.difference) / total, freedom))


def _of_seeds(estimates: Sequence[Estimate]) -> tuple[float, int]:
    """Variance that the choice of seeds gives an arm's mean, and its degrees of freedom."""
    values = [estimate.value for estimate in estimates]
    return float(np.var(values, ddof=1)) / len(values), len(values) - 1
