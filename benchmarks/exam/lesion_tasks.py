"""Tasks 1 to 3: where a lesion is, whether an eye has it, and which of two matched eyes has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn.metrics import average_precision_score

from octjepa.metrics.bootstrap import Draws, Estimate, mean_estimate
from octjepa.metrics.scores import weighted_auroc
from octjepa.phantom import LESIONS

from .cohorts import Cohort
from .readings import Projection, choose_strength, draw_labelled, interleave, logistic_scores
from .results import Finding
from .settings import DRAWS, LABELLED_EYES, LABELLED_PEOPLE, MIN_POSITIVES, RESAMPLES, TOKEN_SHARE
from .tokens import TokenTable
from .truth import lesion_shares

_BINS = 2048  # of ranks, for the bootstrap of average precision
_TOKEN_STRENGTH = 1e-2  # C of the token probe, the same for every row


class TokenTruth:
    """Shares of the lesions in every token of a cohort's table, the same for all rows that cut the same patches."""

    def __init__(self, cohort: Cohort, table: TokenTable) -> None:
        shares = [
            lesion_shares(cohort, volume, table.patch, table.index[table.of(volume)])
            for volume in range(len(cohort.ids))
        ]
        self.positive: Bool[np.ndarray, "tokens lesions"] = np.concatenate(shares) >= TOKEN_SHARE


def measurable(cohort: Cohort) -> list[int]:
    """Lesions that enough test people have."""
    counts = cohort.lesions[cohort.indices("test")].sum(axis=0)
    return [number for number in range(len(LESIONS)) if counts[number] >= MIN_POSITIVES]


def token_lesion(cohort: Cohort, table: TokenTable, truth: TokenTruth) -> Iterator[Finding]:
    """Task 1: average precision by token, from few labelled eyes; depth and eccentricity are given to every row."""
    train, test = cohort.indices("train"), cohort.indices("test")
    draws = Draws(cohort.people[test].tolist(), RESAMPLES, 0)
    sample = _tokens_of(table, train)
    project = Projection(table.features[np.random.default_rng(0).permutation(sample)[:50_000]])
    tested = _tokens_of(table, test)
    volume_of = np.repeat(np.arange(len(test)), [table.of(volume).stop - table.of(volume).start for volume in test])
    x_test = interleave([project(table.features[tested]), _positions(table, tested)])
    for count in LABELLED_EYES:
        by_lesion = []
        for lesion in measurable(cohort):
            several = []
            for draw in range(DRAWS):
                eyes = draw_labelled(train, cohort.lesions[train, lesion], count, "eyes", lesion, draw)
                if eyes is None:
                    break
                tokens = _tokens_of(table, eyes)
                y = truth.positive[tokens, lesion]
                if y.sum() < 2:
                    continue
                x = interleave([project(table.features[tokens]), _positions(table, tokens)])
                scores = logistic_scores(x, y, x_test, _TOKEN_STRENGTH)
                several.append(_token_precision(truth.positive[tested, lesion], scores, volume_of, draws, cohort, test))
            if several:
                by_lesion.append(mean_estimate(several, len(test)))
                yield Finding("token_lesion", f"token_ap_{LESIONS[lesion]}", count, by_lesion[-1])
        if by_lesion:
            yield Finding("token_lesion", "token_ap", count, mean_estimate(by_lesion, len(test)))


def _tokens_of(table: TokenTable, volumes: Int[np.ndarray, " n"]) -> Int[np.ndarray, " k"]:
    return np.concatenate([np.arange(table.of(volume).start, table.of(volume).stop) for volume in volumes])


def _positions(table: TokenTable, tokens: Int[np.ndarray, " k"]) -> Float[np.ndarray, "k 5"]:
    """Depth and eccentricity in the view, their squares and product."""
    at = np.stack(np.unravel_index(table.index[tokens], table.grid), axis=1)
    at = (2 * at + 1) / np.array(table.grid) - 1  # -1 to 1 along each axis
    depth, eccentricity = at[:, 1], np.hypot(at[:, 0], at[:, 2])
    return np.stack([depth, eccentricity, depth**2, eccentricity**2, depth * eccentricity], axis=1).astype(np.float32)


def _token_precision(
    positive: Bool[np.ndarray, " k"],
    scores: Float[np.ndarray, " k"],
    volume_of: Int[np.ndarray, " k"],
    draws: Draws,
    cohort: Cohort,
    test: Int[np.ndarray, " n"],
) -> Estimate:
    """Average precision with its resamples of people.

    The resamples count tokens in bins of rank, fine at the top: people by bins is small enough to multiply with the
    drawn weights. Their mean is moved to the exact value.
    """
    exact = float(average_precision_score(positive, scores))
    rank = np.empty(len(scores), np.int64)
    rank[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
    edges = np.unique(np.geomspace(1, len(scores), _BINS).astype(np.int64))
    bins = np.searchsorted(edges, rank, side="right")
    cells = volume_of * (len(edges) + 1) + bins
    shape = (len(test), len(edges) + 1)
    total = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape).astype(np.float32)
    true = np.bincount(cells[positive], minlength=shape[0] * shape[1]).reshape(shape).astype(np.float32)

    def statistic(weights: Float[np.ndarray, "n resamples"]) -> Float[np.ndarray, " resamples"]:
        both, every = (np.cumsum(weights.T.astype(np.float32) @ part, axis=1) for part in (true, total))
        step = np.diff(both, axis=1, prepend=0)
        return np.asarray((step * both / np.maximum(every, 1)).sum(axis=1) / np.maximum(both[:, -1], 1), float)

    found = draws.estimate(statistic, cohort.people[test].tolist(), "token_ap")
    return Estimate(
        exact, np.clip(found.samples - found.value + exact, 1e-6, 1 - 1e-6), len(test), len(test), "token_ap", draws.id
    )


class EyeProbe:
    """Logistic regressions on one vector an eye; the scores of test eyes are kept, since several rows ask for them."""

    def __init__(self, cohort: Cohort, x: Float[np.ndarray, "V f"]) -> None:
        self.cohort, self.x = cohort, x
        self._scores: dict[tuple[int, int | None], list[Float[np.ndarray, " test"]]] = {}

    def scores(self, lesion: int, count: int | None) -> list[Float[np.ndarray, " test"]]:
        """Of test eyes, for each draw of `count` labelled people; none where there are too few of them."""
        if (lesion, count) not in self._scores:
            train, truth = self.cohort.indices("train"), self.cohort.lesions[:, lesion]
            draws = [train] if count is None else [
                draw_labelled(train, truth[train], count, "people", lesion, draw) for draw in range(DRAWS)
            ]  # fmt: skip
            self._scores[lesion, count] = fit_draws(self.cohort, self.x, truth, draws)
        return self._scores[lesion, count]


def fit_draws(
    cohort: Cohort,
    x: Float[np.ndarray, "V f"],
    truth: Bool[np.ndarray, " V"],
    draws: Sequence[Int[np.ndarray, " n"] | None],
) -> list[Float[np.ndarray, " test"]]:
    """Scores of test eyes from each draw of labelled eyes; the penalty is chosen on the first."""
    known = [eyes for eyes in draws if eyes is not None]
    if not known:
        return []
    strength = choose_strength(x[known[0]], truth[known[0]])
    test = x[cohort.indices("test")]
    return [logistic_scores(x[eyes], truth[eyes], test, strength) for eyes in known]


def eye_lesion(cohort: Cohort, probe: EyeProbe, intensity: EyeProbe | None) -> Iterator[Finding]:
    """Task 2: AUROC of each lesion; with `intensity` also what the row adds to it."""
    test = cohort.indices("test")
    people = cohort.people[test]
    draws = Draws(people.tolist(), RESAMPLES, 0)
    both = None if intensity is None else EyeProbe(cohort, interleave([intensity.x, probe.x]))
    for count in (*LABELLED_PEOPLE, None):
        alone, added = [], []
        for lesion in measurable(cohort):
            truth, scores = cohort.lesions[test, lesion], probe.scores(lesion, count)
            if not scores:
                continue
            alone.append(auroc(truth, scores, draws, people, LESIONS[lesion]))
            yield Finding("eye_lesion", f"auroc_{LESIONS[lesion]}", count, alone[-1])
            if intensity is not None and both is not None:
                with_it, without = (
                    auroc(truth, one.scores(lesion, count), draws, people, "added") for one in (both, intensity)
                )
                added.append(difference(with_it, without))
        if alone:
            yield Finding("eye_lesion", "auroc", count, mean_estimate(alone, len(test)))
        if added:
            yield Finding("added_value", "added_auroc", count, mean_estimate(added, len(test)))


def decoys(cohort: Cohort, x: Float[np.ndarray, "V f"]) -> Iterator[Finding]:
    """Task 3, one kind of pair: AUROC of the lesion against its decoy."""
    train, test = cohort.indices("train"), cohort.indices("test")
    truth = cohort.column("decoy_member") == 1
    draws = Draws(cohort.people[test].tolist(), RESAMPLES, 0)
    for count in LABELLED_PEOPLE[1:]:
        eyes = [draw_labelled(train, truth[train], count, "decoys", cohort.name, draw) for draw in range(DRAWS)]
        scores = fit_draws(cohort, x, truth, eyes)
        if scores:
            found = auroc(truth[test], scores, draws, cohort.people[test], cohort.name)
            yield Finding("decoys", f"auroc_{cohort.name}", count, found)


def auroc(
    truth: Bool[np.ndarray, " n"], scores: list[Float[np.ndarray, " n"]], draws: Draws, people: np.ndarray, name: str
) -> Estimate:
    """Mean AUROC over several fits of one question."""

    def statistic(weights: Float[np.ndarray, "n resamples"]) -> Float[np.ndarray, " resamples"]:
        return np.asarray(np.mean([weighted_auroc(truth, one, weights) for one in scores], axis=0))

    return draws.estimate(statistic, people.tolist(), name)


def difference(one: Estimate, other: Estimate) -> Estimate:
    """One figure less another of the same people, resample by resample."""
    return Estimate(
        one.value - other.value, one.samples - other.samples, one.n, one.n_people, one.label_hash, one.draws_id,
        "difference",
    )  # fmt: skip
