"""How sure a figure is: the bootstrap by person, and differences on the same resamples.

The two eyes and the repeated scans of a person are not independent, so whole people are drawn with replacement (cluster
bootstrap; Efron & Tibshirani 1993, Field & Welsh 2007). The interval is Student's: the figure plus and minus t standard
errors, the error being the spread of the copies times sqrt(n / (n - 1)) and t that of n - 1 people; on the scale that
follows from what the figure is (`scales`), so that no interval leaves what the figure can be. Plain percentiles are too
narrow for 30 people and fewer: `benchmarks/coverage.py` counts how often each kind holds the truth.

All figures of a run share one set of draws, which makes every difference between two rows a paired one. Before two rows
are compared their label hashes must be equal: the same test volumes with the same labels. Probes are not refitted in a
resample, so an interval holds the chance of who is in the test set, not the chance of training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from octjepa import keys
from octjepa.errors import UsageError
from octjepa.metrics.interval_scales import Scale, around, steepness

LEVEL = 0.95
# With fewer people even the wide interval holds the truth less than nine times in ten (benchmarks/coverage.py).
LEAST_PEOPLE = 6
# Below this share of resamples in which the figure exists, an interval would speak of luckier test sets than ours.
LEAST_DEFINED_SHARE = 0.2
_CELLS_AT_ONCE = 40_000  # weights looked at together: 0.3 MB stays in the cache, four times faster than all at once


@dataclass(frozen=True)
class Interval:
    """low and high are None where no honest interval exists; undefined: the number of resamples without a figure.

    None exists for fewer than LEAST_PEOPLE people, where too few resamples hold the figure, and where no resample moves
    it: a perfect score of a few people, or a figure fixed by construction. The bootstrap cannot tell these two apart,
    and an interval without width would look like certainty.
    """

    low: float | None
    high: float | None
    undefined: int


@dataclass(frozen=True)
class Estimate:
    """A figure, its bootstrap copies, and what it was measured on.

    samples: the figure in every resample, NaN where it does not exist. n: volumes; n_people: people behind them.
    scale: what the figure is by definition (`scales`).
    """

    value: float
    samples: Float[np.ndarray, " resamples"]
    n: int
    n_people: int
    label_hash: str
    draws_id: str
    scale: Scale = "share"

    def interval(self) -> Interval:
        return student(self.value, self.samples, self.n_people, self.scale)

    def figure(self) -> dict[str, Any]:
        """For JSON; None where the figure or an honest interval does not exist."""
        interval = self.interval()
        value = self.value if np.isfinite(self.value) else None
        return {
            "value": value, "low": interval.low, "high": interval.high, "n": self.n, "n_people": self.n_people
        }  # fmt: skip


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


class Draws:
    """`resamples` draws of len(people) people with replacement, a function of the seed and the set of people alone."""

    def __init__(self, person_ids: Sequence[str], resamples: int, seed: int) -> None:
        if resamples < 1:
            raise UsageError(f"bootstrap is {resamples}, expected at least 1 resample (2000 for a report)")
        self.people = sorted(set(person_ids))
        if not self.people:
            raise UsageError("no people to draw: the test split is empty")
        count = len(self.people)
        rng = keys.generator(seed, "bootstrap", count, resamples)
        drawn = rng.multinomial(count, np.full(count, 1 / count), size=resamples)
        self.counts: Float[np.ndarray, "people resamples"] = np.ascontiguousarray(drawn.T, dtype=np.float64)
        text = "\x1f".join([str(seed), str(resamples), *self.people])
        self.id = hashlib.sha256(text.encode()).hexdigest()

    def estimate(
        self,
        statistic: Callable[[Float[np.ndarray, "n resamples"]], Float[np.ndarray, " resamples"]],
        person_ids: Sequence[str],
        label_hash: str,
        centred: bool = False,
        scale: Scale = "share",
    ) -> Estimate:
        """`statistic` of weights [n, resamples] on n volumes whose people are `person_ids`, with its bootstrap copies.

        centred: shift the copies so that their mean is the value. For figures that grow with noise, such as a
        calibration error, every resample reads higher than the sample it is drawn from; the shift removes that bias.
        scale: as in Estimate.
        Raises UsageError if a person is not among those drawn.
        """
        place = {person: index for index, person in enumerate(self.people)}
        unknown = {person for person in person_ids if person not in place}
        if unknown:
            raise UsageError(f"{len(unknown)} people of this figure are not among the {len(place)} people drawn")
        rows = np.array([place[person] for person in person_ids], dtype=np.int64)
        value = float(statistic(np.ones((len(rows), 1)))[0])
        step = max(1, _CELLS_AT_ONCE // max(1, len(rows)))
        samples = np.concatenate(
            [statistic(self.counts[rows, start : start + step]) for start in range(0, self.counts.shape[1], step)]
        )
        if centred and np.isfinite(samples).any():
            samples = np.maximum(samples - np.nanmean(samples) + value, 0.0)
        return Estimate(value, samples, len(rows), len(set(person_ids)), label_hash, self.id, scale)


def standard_error(samples: Float[np.ndarray, " resamples"], n_people: int) -> float | None:
    """Spread of the bootstrap copies, as of `n_people` people and not of their plug-in twins; None where none exists.

    See Interval for where that is.
    """
    defined = samples[np.isfinite(samples)]
    if n_people < LEAST_PEOPLE or len(defined) < max(2, LEAST_DEFINED_SHARE * len(samples)):
        return None
    if np.ptp(defined) <= 1e-12 * max(1.0, float(np.abs(defined).max())):
        return None
    return float(defined.std(ddof=1) * np.sqrt(n_people / (n_people - 1)))


def student(
    value: float,
    samples: Float[np.ndarray, " resamples"],
    n_people: int,
    scale: Scale,
    more: Sequence[tuple[float, int]] = (),
) -> Interval:
    """value +- t standard errors on `scale`, by the delta method.

    Of figures that end at 1 the copies themselves are moved there, where they have no long tail.
    more: (variance, degrees of freedom) of further sources of error of `value`, such as the seeds; they add up as
    squares, degrees of freedom by Welch and Satterthwaite.
    """
    defined = samples[np.isfinite(samples)]
    undefined = len(samples) - len(defined)
    error = standard_error(samples, n_people)
    if error is None or not np.isfinite(value):
        return Interval(None, None, undefined)
    steep = steepness(scale, value, defined)
    apart = steep * error
    if scale in ("below_one", "of_constant") and defined.max() < 1:
        apart = standard_error(np.log(1 - defined), n_people) or apart
    low, high = around(scale, value, defined, _half(apart, n_people, more, steep))
    return Interval(low, high, undefined)


def _half(error: float, n_people: int, more: Sequence[tuple[float, int]], steep: float) -> float:
    """Half the interval's width; `steep` takes the variances of `more` to the scale of `error`."""
    from scipy.stats import t

    total, freedom = total_error(error, n_people, [(variance * steep**2, degrees) for variance, degrees in more])
    return float(t.ppf(0.5 + LEVEL / 2, freedom)) * total


def total_error(error: float, n_people: int, more: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Standard error of several sources together, and its degrees of freedom."""
    parts = [(error**2, n_people - 1), *more]
    variance = sum(part for part, _ in parts)
    return float(np.sqrt(variance)), variance**2 / sum(part**2 / degrees for part, degrees in parts)


def mean_estimate(estimates: Sequence[Estimate], n_people: int) -> Estimate:
    """The plain mean of several figures of one run (the macro row), resampled jointly.

    A resample in which one of them does not exist is undefined for the mean. `n_people`: people behind any of them.
    Raises UsageError if they do not share their draws.
    """
    if len({estimate.draws_id for estimate in estimates}) != 1:
        raise UsageError("a mean over figures of different draws has no joint interval: measure them in one run")
    together = "\x1f".join(estimate.label_hash for estimate in estimates)
    return replace(
        estimates[0],
        value=float(np.mean([estimate.value for estimate in estimates])),
        samples=np.mean([estimate.samples for estimate in estimates], axis=0),
        n=max(estimate.n for estimate in estimates),
        n_people=n_people,
        label_hash=hashlib.sha256(together.encode()).hexdigest(),
    )


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
    interval = student(difference, samples, people, "difference")
    p = None
    if interval.low is not None:
        error = standard_error(samples, people)
        p = float(2 * t.sf(abs(difference) / error, people - 1)) if error else None
    return PairedDifference(difference, interval.low, interval.high, interval.undefined, people, p)
