"""Comparisons of results: paired differences on the same people, several seeds of one recipe, families of p-values.

The value of training s on test people t is modelled as mu + a_s + b_t + noise. The trainings of one recipe are tested
on the same people, so their mean has two sources of error that do not shrink together: b shrinks with more people, a
with more seeds. The interval of the mean over seeds holds only b: "these trained networks, other people". The recipe's
interval adds the spread of a: "this recipe, trained again, on other people". A single training does not estimate a, so
it has no such interval (Bouthillier et al. 2021, Accounting for variance in machine learning benchmarks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from octjepa.errors import UsageError
from octjepa.metrics.bootstrap import Estimate
from octjepa.metrics.intervals import Interval, combined_error, standard_error, student_interval


@dataclass(frozen=True)
class PairedDifference:
    """ours - reference on the same people; low and high as in Interval.

    p: two-sided, of no difference, from the same standard error as the interval: below 0.05 exactly where the interval
    leaves out zero. None if there is no interval.
    """

    difference: float
    low: float | None
    high: float | None
    undefined: int
    n_people: int
    p: float | None


def difference_estimate(ours: Estimate, reference: Estimate) -> Estimate:
    """ours - reference, resample by resample.

    Raises UsageError if the two were not measured on the same volumes with the same labels, or not on the same draws.
    """
    if ours.label_hash != reference.label_hash:
        raise UsageError(
            f"the two rows were measured on different labels (hash {ours.label_hash[:12]} against "
            f"{reference.label_hash[:12]}; {ours.n} and {reference.n} volumes): probe both in one run"
        )
    if ours.draws_id != reference.draws_id:
        raise UsageError("the two rows were resampled with different draws: probe both in one run with one seed")
    value, samples = ours.value - reference.value, ours.samples - reference.samples
    return replace(ours, value=value, samples=samples, scale="difference")


def paired_difference(ours: Estimate, reference: Estimate) -> PairedDifference:
    """ours - reference with its interval and p-value. Raises UsageError as `difference_estimate`."""
    estimate = difference_estimate(ours, reference)
    interval, people = estimate.interval(), estimate.n_people
    error = standard_error(estimate.samples, people) if interval.low is not None else None
    p = _two_sided_p(estimate.value, error, people - 1) if error else None
    return PairedDifference(estimate.value, interval.low, interval.high, interval.undefined, people, p)


def _two_sided_p(difference: float, error: float, freedom: float) -> float:
    from scipy.stats import t

    return float(2 * t.sf(abs(difference) / error, freedom))


@dataclass(frozen=True)
class SeedSpread:
    """Over the seeds of one recipe. sd: sample standard deviation, None for one seed; low, high: the extremes."""

    seeds: int
    sd: float | None
    low: float
    high: float


def seed_spread(estimates: Sequence[Estimate]) -> SeedSpread:
    """How far the trainings differ. Raises UsageError if none is given."""
    if not estimates:
        raise UsageError("no training was given to summarise")
    values = [estimate.value for estimate in estimates]
    sd = float(np.std(values, ddof=1)) if len(values) > 1 and np.isfinite(values).all() else None
    return SeedSpread(len(values), sd, min(values), max(values))


def mean_over_seeds(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over the seeds of a recipe with its joint resamples: its `interval` is that of these trained networks.

    Raises UsageError: none given, or not all on the same test volumes, labels and draws.
    """
    seed_spread(estimates)
    if len({(estimate.label_hash, estimate.draws_id) for estimate in estimates}) != 1:
        raise UsageError("the seeds of one recipe were measured on different labels or draws: probe them in one run")
    # A seed with a constant prediction is bounded by 0; the mean is bounded only if every seed has one.
    first = next((estimate for estimate in estimates if estimate.scale != "of_constant"), estimates[0])
    return replace(
        first,
        value=float(np.mean([estimate.value for estimate in estimates])),
        samples=np.mean([estimate.samples for estimate in estimates], axis=0),
    )


def recipe_interval(estimates: Sequence[Estimate]) -> Interval:
    """Interval of the mean over seeds that holds both the people and the seeds; empty for a single seed."""
    mean = mean_over_seeds(estimates)
    if len(estimates) < 2:
        return Interval(None, None, int((~np.isfinite(mean.samples)).sum()))
    return student_interval(mean.value, mean.samples, mean.n_people, mean.scale, more=[_seed_variance(estimates)])


def recipe_difference(
    ours: Sequence[Estimate], reference: Sequence[Estimate]
) -> tuple[PairedDifference, Interval, float | None]:
    """Mean of one recipe minus mean of another on the same people: of these networks, and of the two recipes.

    The recipes' interval and p-value are empty unless both have at least two seeds. Raises UsageError as
    `paired_difference` does.
    """
    first, second = mean_over_seeds(ours), mean_over_seeds(reference)
    paired = paired_difference(first, second)
    samples = first.samples - second.samples
    error = standard_error(samples, first.n_people)
    if error is None or len(ours) < 2 or len(reference) < 2:
        return paired, Interval(None, None, paired.undefined), None
    more = [_seed_variance(ours), _seed_variance(reference)]
    interval = student_interval(paired.difference, samples, first.n_people, "difference", more=more)
    return paired, interval, _two_sided_p(paired.difference, *combined_error(error, first.n_people, more))


def _seed_variance(estimates: Sequence[Estimate]) -> tuple[float, int]:
    """Variance of a mean over seeds due to their choice, and its degrees of freedom."""
    values = [estimate.value for estimate in estimates]
    return float(np.var(values, ddof=1)) / len(values), len(values) - 1


def holm(p: Sequence[float | None]) -> list[float | None]:
    """p-values adjusted so that the chance of even one false claim in the family is bounded (Holm 1979).

    The family is everything that was compared. The order is kept; None (no p-value exists) stays None and is not
    counted. Raises UsageError for a value outside 0..1.
    """

    def adjust(values: np.ndarray) -> np.ndarray:
        order = np.argsort(values, kind="stable")
        adjusted = np.empty_like(values)
        adjusted[order] = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
        return np.minimum(adjusted, 1.0)

    return _over_family(p, adjust)


def benjamini_hochberg(p: Sequence[float | None]) -> list[float | None]:
    """As `holm`, bounding the expected share of false claims among those made (Benjamini & Hochberg 1995).

    It holds for independent and positively dependent comparisons, such as those on the same people (Benjamini &
    Yekutieli 2001).
    """
    from scipy.stats import false_discovery_control

    return _over_family(p, false_discovery_control)


def _over_family(p: Sequence[float | None], adjust: Callable[[np.ndarray], np.ndarray]) -> list[float | None]:
    """`adjust` applied to the p-values that are known. Raises UsageError for one outside 0..1."""
    tested = [index for index, value in enumerate(p) if value is not None]
    values = np.array([p[index] for index in tested], dtype=np.float64)
    if ((values < 0) | (values > 1) | np.isnan(values)).any():
        raise UsageError("a family of comparisons holds a p-value outside 0..1")
    adjusted: list[float | None] = [None] * len(p)
    for index, value in zip(tested, adjust(values) if tested else (), strict=True):
        adjusted[index] = float(value)
    return adjusted
