"""Lesions: where a lesion is, whether an eye has it, and which of two matched eyes has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn.metrics import average_precision_score

from octjepa.metrics.bootstrap import Draws, Estimate, mean_estimate
from octjepa.metrics.comparisons import difference_estimate
from octjepa.metrics.test_set_ledger import fingerprint
from octjepa.phantom import LESIONS

from .cohorts import Cohort
from .questions import open_eyes, open_people
from .readings import Projection, choose_strength, draw_labelled, interleave, logistic_scores
from .results import Finding, LeftOut, left_out_mean
from .settings import DRAWS, LABELLED_EYES, LABELLED_PEOPLE, MIN_POSITIVES, TOKEN_SHARE
from .tokens import TokenTable, positions_in_view
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


def too_few_to_test(has: Bool[np.ndarray, " test"]) -> str | None:
    """The reason why a question about test people is left out: too few have it, or too few have it not."""
    positives = int(has.sum())
    if min(positives, len(has) - positives) >= MIN_POSITIVES:
        return None
    return f"{positives} of {len(has)} test people have it; {MIN_POSITIVES} with it and as many without are needed"


def can_be_learned(has: Bool[np.ndarray, " train"]) -> bool:
    """Whether at least two training people have it, and two have it not."""
    return min(int(has.sum()), int((~has).sum())) >= 2


def too_few_to_label(has: Bool[np.ndarray, " train"], count: int | None) -> str:
    """The reason why nobody could be drawn as labelled."""
    return f"{int(has.sum())} of {len(has)} training people have it; {count or 'all'} are to be labelled"


def lesions_mean(task: str, metric: str, count: int | None, parts: Mapping[str, Estimate], n: int) -> Finding | LeftOut:
    """The mean over all lesions; left out where one of them is, since lesions are not equally hard."""
    missing = [name for name in LESIONS if name not in parts]
    if missing:
        return left_out_mean(task, metric, count, missing)
    return Finding(task, metric, count, mean_estimate([parts[name] for name in LESIONS], n))


def token_lesion(cohort: Cohort, table: TokenTable, truth: TokenTruth) -> Iterator[Finding | LeftOut]:
    """Average precision by token, from few labelled eyes; depth and eccentricity are given to every row.

    A draw whose labelled eyes hold fewer than two tokens of the lesion teaches nothing: the figure is the mean over the
    other draws, and left out where there is none.
    """
    train, test = cohort.indices("train"), cohort.indices("test")
    draws = open_people(cohort, "token_lesion", test, [fingerprint(table.features, "tokens")]).draws
    sample = _tokens_of(table, train)
    project = Projection(table.features[np.random.default_rng(0).permutation(sample)[:50_000]])
    tested = _tokens_of(table, test)
    volume_of = np.repeat(np.arange(len(test)), [table.of(volume).stop - table.of(volume).start for volume in test])
    x_test = interleave([project(table.features[tested]), _positions(table, tested)])
    for count in LABELLED_EYES:
        by_lesion: dict[str, Estimate] = {}
        for lesion, name in enumerate(LESIONS):
            several: list[Estimate] = []
            reason = too_few_to_test(cohort.lesions[test, lesion])
            if reason is None and not truth.positive[tested, lesion].any():
                reason = "no token of a test eye holds enough of it"
            for draw in range(DRAWS) if reason is None else ():
                eyes = draw_labelled(train, cohort.lesions[train, lesion], count, "eyes", lesion, draw)
                if eyes is None:
                    reason = too_few_to_label(cohort.lesions[train, lesion], count)
                    break
                tokens = _tokens_of(table, eyes)
                y = truth.positive[tokens, lesion]
                if y.sum() < 2:
                    continue
                x = interleave([project(table.features[tokens]), _positions(table, tokens)])
                scores = logistic_scores(x, y, x_test, _TOKEN_STRENGTH)
                several.append(_token_precision(truth.positive[tested, lesion], scores, volume_of, draws, cohort, test))
            if several:
                by_lesion[name] = mean_estimate(several, len(test))
                yield Finding("token_lesion", f"token_ap_{name}", count, by_lesion[name])
            else:
                reason = reason or f"fewer than two tokens of the {count} labelled eyes hold enough of it"
                yield LeftOut("token_lesion", f"token_ap_{name}", count, reason)
        yield lesions_mean("token_lesion", "token_ap", count, by_lesion, len(test))


def _tokens_of(table: TokenTable, volumes: Int[np.ndarray, " n"]) -> Int[np.ndarray, " k"]:
    return np.concatenate([np.arange(table.of(volume).start, table.of(volume).stop) for volume in volumes])


def _positions(table: TokenTable, tokens: Int[np.ndarray, " k"]) -> Float[np.ndarray, "k 5"]:
    return positions_in_view(table.index[tokens], table.grid)


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
            everybody = train if can_be_learned(truth[train]) else None
            draws = (
                [everybody]
                if count is None
                else [draw_labelled(train, truth[train], count, "people", lesion, draw) for draw in range(DRAWS)]
            )
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


def eye_lesion(
    cohort: Cohort, probe: EyeProbe, intensity: EyeProbe | None, task: str = "eye_lesion"
) -> Iterator[Finding | LeftOut]:
    """AUROC of each lesion; with `intensity` also what the row adds to it. task: its name in the results."""
    train, test = cohort.indices("train"), cohort.indices("test")
    both = None if intensity is None else EyeProbe(cohort, interleave([intensity.x, probe.x]))
    measured = [fingerprint(one.x, "logistic") for one in (probe, both, intensity) if one is not None]
    truth = {
        name: cohort.lesions[:, lesion]
        for lesion, name in enumerate(LESIONS)
        if too_few_to_test(cohort.lesions[test, lesion]) is None and can_be_learned(cohort.lesions[train, lesion])
    }
    opened = open_eyes(cohort, task, truth, "binary", measured) if truth else None
    for count in (*LABELLED_PEOPLE, None):
        alone: dict[str, Estimate] = {}
        added: dict[str, Estimate] = {}
        for lesion, name in enumerate(LESIONS):
            reason = too_few_to_test(cohort.lesions[test, lesion])
            scores = probe.scores(lesion, count) if name in truth else []
            if opened is None or not scores:
                reason = reason or too_few_to_label(cohort.lesions[train, lesion], count)
                yield LeftOut(task, f"auroc_{name}", count, reason)
                continue
            alone[name] = opened.auroc(name, scores)
            yield Finding(task, f"auroc_{name}", count, alone[name])
            if intensity is not None and both is not None:
                with_it, without = (opened.auroc(name, one.scores(lesion, count)) for one in (both, intensity))
                added[name] = difference_estimate(with_it, without)
        yield lesions_mean(task, "auroc", count, alone, len(test))
        if intensity is not None:
            yield lesions_mean("added_value", "added_auroc", count, added, len(test))


def decoys(cohort: Cohort, x: Float[np.ndarray, "V f"]) -> Iterator[Finding | LeftOut]:
    """One kind of pair: AUROC of the lesion against its decoy."""
    train, test = cohort.indices("train"), cohort.indices("test")
    truth = cohort.column("decoy_member") == 1
    for count in LABELLED_PEOPLE[1:]:
        eyes = [draw_labelled(train, truth[train], count, "decoys", cohort.name, draw) for draw in range(DRAWS)]
        reason = too_few_to_test(truth[test])
        if reason is None and all(one is None for one in eyes):
            reason = too_few_to_label(truth[train], count)
        if reason is not None:
            yield LeftOut("decoys", f"auroc_{cohort.name}", count, reason)
            continue
        measured = [fingerprint(x, f"logistic {count}")]
        opened = open_eyes(cohort, "decoys", {cohort.name: truth}, "binary", measured)
        found = opened.auroc(cohort.name, fit_draws(cohort, x, truth, eyes))
        yield Finding("decoys", f"auroc_{cohort.name}", count, found)
