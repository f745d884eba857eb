"""What another scanner or hospital does to a result: one group left out of the labels, one threshold carried over.

Leave-one-vendor-out: the probe is fitted without a single label of a vendor and tested on that vendor's people, beside
the same people under the probe that knew all vendors. The difference also holds what fewer training people cost. A
threshold carried from site to site keeps its number while the scores move: its specificity where it is used is often
not the one it was chosen for, and that is told for every pair of sites.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.intervals import LOWER_IS_BETTER, METRIC_SCALE, MIN_PEOPLE, scale_of
from octjepa.metrics.scores import Figures, Predictions, Weights, measure
from octjepa.metrics.thresholds import threshold_at_specificity, threshold_scores
from octjepa.probe.labels import LabelTable
from octjepa.probe.targets import Target

Fit = Callable[[Target], Predictions]
_Figure = Callable[[Weights], Figures]


@dataclass(frozen=True)
class LeaveOneGroupOut:
    """What a group's own labels are worth on its own test people.

    rows: {group, with_it, without_it, drop, low, high, n, n_people}. mean_drop: {drop, low, high, groups} over these,
    or None. left_out: group -> why it could not be measured.
    """

    rows: list[dict[str, Any]]
    mean_drop: dict[str, Any] | None
    left_out: dict[str, str]


def leave_one_group_out(
    metric: str,
    target: Target,
    groups: np.ndarray,
    person_ids: np.ndarray,
    full: Predictions,
    fit: Fit,
    draws: Draws,
) -> LeaveOneGroupOut:
    """`metric` within each group with and without the group's own labels.

    groups, person_ids: of every row of the embedding table. full: what the probe that knew all groups says of the test
    volumes of `target`. fit: fits and chooses on a target's train and val rows and says what it thinks of its test
    rows; it is called once per group.
    """
    rows, reasons = [], {}
    drops: list[_Figure] = []
    test = target.indices["test"]
    for group in np.unique(groups[test]).tolist():
        here = groups[test] == group
        held = _held_out(target, groups, group)
        why = _unfit(target, held, person_ids)
        if why:
            reasons[str(group) or "unknown"] = why
            continue
        without = fit(held)
        with_it = Predictions(full.truth[here], full.scores[here], full.calibrated[here])

        def drop(weights: Weights, with_it: Predictions = with_it, without: Predictions = without) -> Figures:
            return measure(metric, with_it, weights) - measure(metric, without, weights)

        people = person_ids[test[here]].tolist()
        found = draws.estimate(drop, people, "", scale="difference")
        interval = found.interval()
        once = np.ones((int(here.sum()), 1))
        rows.append(
            {
                "group": str(group) or "unknown",
                "with_it": float(measure(metric, with_it, once)[0]),
                "without_it": float(measure(metric, without, once)[0]),
                "drop": found.value,
                "low": interval.low,
                "high": interval.high,
                "n": found.n,
                "n_people": found.n_people,
            }
        )

        def part(weights: Weights, here: np.ndarray = here, drop: _Figure = drop) -> Figures:
            return drop(weights[here])

        drops.append(part)
    mean: dict[str, Any] | None = None
    if drops:
        people = person_ids[test].tolist()
        found = draws.estimate(
            lambda weights: np.mean([one(weights) for one in drops], axis=0), people, "", scale="difference"
        )
        interval = found.interval()
        mean = {"drop": found.value, "low": interval.low, "high": interval.high, "groups": len(drops)}
    return LeaveOneGroupOut(rows, mean, reasons)


def _held_out(target: Target, groups: np.ndarray, group: str) -> Target:
    """`target` trained and chosen on the other groups, tested on this one."""
    kept = {
        split: (groups[rows] == group) if split == "test" else (groups[rows] != group)
        for split, rows in target.indices.items()
    }
    return replace(
        target,
        indices={split: target.indices[split][which] for split, which in kept.items()},
        values={split: target.values[split][which] for split, which in kept.items()},
    )


def _unfit(target: Target, held: Target, person_ids: np.ndarray) -> str:
    people = len(set(person_ids[held.indices["test"]].tolist()))
    if people < MIN_PEOPLE:
        return f"{people} test people, at least {MIN_PEOPLE} are needed"
    if target.classes:
        codes = set(np.unique(target.values["test"]).tolist())
        if codes - set(np.unique(held.values["test"]).tolist()):
            return f"a class is missing among its {people} test people"
        if set(range(len(target.classes))) - set(np.unique(held.values["train"]).tolist()):
            return "no other group has a training label of every class"
    elif len(held.values["train"]) < 2:
        return "no other group has training labels"
    return ""


def transfer_thresholds(
    target: Target,
    sites: np.ndarray,
    person_ids: np.ndarray,
    val_score: np.ndarray,
    test_score: np.ndarray,
    draws: Draws,
    specificity: float = 0.9,
) -> list[dict[str, Any]]:
    """A threshold chosen on the validation people of each site, and what it does to the test people of every site.

    sites, person_ids: of every row of the embedding table; scores of the validation and test volumes of a two-class
    `target`, in its order. Rows {chosen_at, used_at, threshold, sensitivity, specificity, each with low and high, n,
    n_people}. A site without a negative validation case chooses none; one with fewer than LEAST_PEOPLE test people is
    not judged.
    """
    rows = []
    val, test = target.indices["val"], target.indices["test"]
    val_positive, test_positive = target.values["val"] == 1, target.values["test"] == 1
    for source in np.unique(sites[val]).tolist():
        chosen_on = sites[val] == source
        if val_positive[chosen_on].all():
            continue
        threshold = threshold_at_specificity(val_positive[chosen_on], val_score[chosen_on], specificity)
        for place in np.unique(sites[test]).tolist():
            here = sites[test] == place
            people = person_ids[test[here]].tolist()
            if len(set(people)) < MIN_PEOPLE:
                continue
            found = threshold_scores(threshold, test_positive[here], test_score[here], draws, people, "")
            row: dict[str, Any] = {"chosen_at": source or "unknown", "used_at": place or "unknown"}
            row["threshold"] = threshold
            for name, estimate in (("sensitivity", found.sensitivity), ("specificity", found.specificity)):
                interval = estimate.interval()
                value = estimate.value if np.isfinite(estimate.value) else None
                row |= {name: value, f"{name}_low": interval.low, f"{name}_high": interval.high}
            rows.append(row | {"n": int(here.sum()), "n_people": len(set(people))})
    return rows


@dataclass(frozen=True)
class SubgroupScores:
    """groups: an estimate per group that can be measured. scaled: the equity-scaled figure over these, or None.

    left_out: group -> why it cannot be measured.
    """

    groups: dict[str, Estimate]
    scaled: Estimate | None
    left_out: dict[str, str]


def subgroup_scores(
    metric: str, predictions: Predictions, groups: np.ndarray, draws: Draws, person_ids: list[str], label_hash: str
) -> SubgroupScores:
    """`metric` within every group of test volumes ("" is a group of its own, "unknown").

    scaled is given where at least two groups are measured: for AUROC this is ES-AUC, for other shares of which more is
    better the same scaling of them. Of others there is none: dividing a negative R2 or kappa, or an error, by how
    unequal it is would make unequal groups look better. It is resampled jointly; a resample in which a group has no
    figure is undefined.
    """
    names = np.array([str(group) or "unknown" for group in groups])
    people = np.array(person_ids)
    found: dict[str, Estimate] = {}
    left_out: dict[str, str] = {}
    parts: list[_Figure] = []
    for name in np.unique(names).tolist():
        inside = names == name
        count = len(set(people[inside].tolist()))
        missing = len(np.unique(predictions.truth)) - len(np.unique(predictions.truth[inside]))
        if count < MIN_PEOPLE:
            left_out[name] = f"{count} test people, at least {MIN_PEOPLE} are needed"
            continue
        if missing and predictions.scores.shape[1] > 1:
            left_out[name] = f"{missing} of the classes are missing among its {count} test people"
            continue
        cut = Predictions(predictions.truth[inside], predictions.scores[inside], predictions.calibrated[inside])

        def figure(weights: Weights, cut: Predictions = cut) -> Figures:
            return measure(metric, cut, weights)

        estimate = draws.estimate(
            figure, people[inside].tolist(), f"{label_hash}\x1f{name}", scale=scale_of(metric, cut.scores)
        )
        found[name] = estimate

        def part(weights: Weights, inside: np.ndarray = inside, figure: _Figure = figure) -> Figures:
            return figure(weights[inside])

        parts.append(part)
    scaled = None
    if len(found) > 1 and METRIC_SCALE[metric] == "share" and metric not in LOWER_IS_BETTER:

        def equity(weights: Weights) -> Figures:
            overall = measure(metric, predictions, weights)
            return overall / (1 + sum(np.abs(overall - part(weights)) for part in parts))

        scaled = draws.estimate(equity, person_ids, label_hash)
    return SubgroupScores(found, scaled, left_out)


GROUP_COLUMNS = ("clinical_site", "device")


LOST, ONE_SIDED = "lost_group", "one_sided_group"


def coverage_faults(
    frame: pd.DataFrame, labels: LabelTable, target: Target, groups: Sequence[str] = GROUP_COLUMNS
) -> Iterator[tuple[str, str]]:
    """Faults (kind, text): groups without a labelled scan, sites without any scan, groups on one side of the split.

    `frame` are the scans or cases that the rows of `target` count.
    """
    for kind, text in _lost(frame, labels, target, groups):
        yield kind, f"{target.name}: {text}"


def _lost(frame: pd.DataFrame, labels: LabelTable, target: Target, groups: Sequence[str]) -> Iterator[tuple[str, str]]:
    used = np.concatenate(list(target.indices.values()))
    for column in groups:
        names = frame[column]
        kept = set(names.iloc[used])
        for name, count in sorted(Counter(names).items()):
            if name and name not in kept:
                yield LOST, f"{column} {name} is lost: none of its {count} scans or cases has a label and a split"
        sides = {split: set(names.iloc[target.indices[split]]) - {""} for split in ("train", "test")}
        for name in sorted(sides["test"] - sides["train"]):
            yield ONE_SIDED, f"{column} {name} is tested and has nothing to train on"
        for name in sorted(sides["train"] - sides["test"]):
            yield ONE_SIDED, f"{column} {name} is trained on and never tested: the figures do not speak of it"
    scanned = set(frame["person_id"])
    labelled = {person for person, _ in labels.values[target.name]}
    by_site = Counter(labels.sites.get(person, "") for person in labelled)
    here = Counter(labels.sites.get(person, "") for person in labelled & scanned)
    for site, count in sorted(by_site.items()):
        if site and not here[site]:
            yield LOST, f"site {site} is lost: none of its {count} people with a label has an embedded scan"
