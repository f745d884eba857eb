"""What another scanner or hospital does to a result: one group left out of the labels, one threshold carried over.

Leave-one-vendor-out: the probe is fitted without a single label of a vendor and tested on that vendor's people, beside
the same people under the probe that knew all vendors. The difference also holds what fewer training people cost. A
threshold carried from site to site keeps its number while the scores move: its specificity where it is used is often
not the one it was chosen for, and that is told for every pair of sites.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octjepa.metrics.bootstrap import LEAST_PEOPLE, Draws
from octjepa.metrics.scores import Figures, Predictions, Weights, measure
from octjepa.metrics.thresholds import carried, threshold_at_specificity
from octjepa.probe.labels import Target

Fit = Callable[[Target], Predictions]
_Figure = Callable[[Weights], Figures]


@dataclass(frozen=True)
class LeftOut:
    """What a group's own labels are worth on its own test people.

    rows: {group, with_it, without_it, drop, low, high, n, n_people}. mean_drop: {drop, low, high, groups} over these,
    or None. left_out: group -> why it could not be measured.
    """

    rows: list[dict[str, Any]]
    mean_drop: dict[str, Any] | None
    left_out: dict[str, str]


def leave_one_out(
    metric: str,
    target: Target,
    groups: np.ndarray,
    person_ids: np.ndarray,
    full: Predictions,
    fit: Fit,
    draws: Draws,
) -> LeftOut:
    """`metric` within each group with and without the group's own labels.

    groups, person_ids: of every row of the embedding table. full: what the probe that knew all groups says of the test
    volumes of `target`. fit: fits and chooses on a target's train and val rows and says what it thinks of its test
    rows; it is called once per group.
    """
    rows, reasons = [], {}
    drops: list[_Figure] = []
    test = target.rows["test"]
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
    return LeftOut(rows, mean, reasons)


def _held_out(target: Target, groups: np.ndarray, group: str) -> Target:
    """`target` trained and chosen on the other groups, tested on this one."""
    kept = {
        split: (groups[rows] == group) if split == "test" else (groups[rows] != group)
        for split, rows in target.rows.items()
    }
    return replace(
        target,
        rows={split: target.rows[split][which] for split, which in kept.items()},
        values={split: target.values[split][which] for split, which in kept.items()},
    )


def _unfit(target: Target, held: Target, person_ids: np.ndarray) -> str:
    people = len(set(person_ids[held.rows["test"]].tolist()))
    if people < LEAST_PEOPLE:
        return f"{people} test people, at least {LEAST_PEOPLE} are needed"
    if target.classes:
        codes = set(np.unique(target.values["test"]).tolist())
        if codes - set(np.unique(held.values["test"]).tolist()):
            return f"a class is missing among its {people} test people"
        if set(range(len(target.classes))) - set(np.unique(held.values["train"]).tolist()):
            return "no other group has a training label of every class"
    elif len(held.values["train"]) < 2:
        return "no other group has training labels"
    return ""


def carry_thresholds(
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
    val, test = target.rows["val"], target.rows["test"]
    val_positive, test_positive = target.values["val"] == 1, target.values["test"] == 1
    for source in np.unique(sites[val]).tolist():
        chosen_on = sites[val] == source
        if val_positive[chosen_on].all():
            continue
        threshold = threshold_at_specificity(val_positive[chosen_on], val_score[chosen_on], specificity)
        for place in np.unique(sites[test]).tolist():
            here = sites[test] == place
            people = person_ids[test[here]].tolist()
            if len(set(people)) < LEAST_PEOPLE:
                continue
            found = carried(threshold, test_positive[here], test_score[here], draws, people, "")
            row: dict[str, Any] = {"chosen_at": source or "unknown", "used_at": place or "unknown"}
            row["threshold"] = threshold
            for name, estimate in (("sensitivity", found.sensitivity), ("specificity", found.specificity)):
                interval = estimate.interval()
                value = estimate.value if np.isfinite(estimate.value) else None
                row |= {name: value, f"{name}_low": interval.low, f"{name}_high": interval.high}
            rows.append(row | {"n": int(here.sum()), "n_people": len(set(people))})
    return rows
