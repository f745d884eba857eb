"""Results by group: fairness within each subgroup, transfer to another site or scanner, and groups that are missing.

The groups are sites, devices and eyes, or those that the user names: `--subgroups sex,age:50,65` takes columns of the
label table or of the volumes, or bands of a quantity. A group with too few people of a class is listed with its count
and not scored, because its value would be noise. `subgroup_tables` arranges the results for a page.

ES-AUC = AUC / (1 + sum over groups of |AUC - AUC of the group|): equal to the AUC when every group has it, smaller
otherwise (Luo et al. 2024, FairVision). Groups in which the metric cannot be measured are named, never averaged away.
Leave one group out: the probe is fitted without a single label of a group (a vendor, a site) and tested on that group's
people, next to the same people under the probe with all groups; the difference also holds what fewer training people
cost. A threshold carried from site to site keeps its value while the scores shift, so its specificity is measured for
every pair of sites.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Shaped

from octjepa.errors import UsageError
from octjepa.evaluate.labels import LabelTable, label_columns, numbers_of, read_labels
from octjepa.evaluate.results import (
    ColumnScores,
    GroupDrop,
    GroupScores,
    GroupValue,
    LeaveOneGroupOut,
    MeanDrop,
    SiteThreshold,
    SubgroupResult,
)
from octjepa.evaluate.survival import MIN_EVENTS, TASK
from octjepa.evaluate.targets import Target
from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.intervals import LOWER_IS_BETTER, METRIC_SCALE, MIN_PEOPLE, scale_of
from octjepa.metrics.scores import PRIMARY_METRIC, TASK_METRICS, Figures, Predictions, Weights, measure
from octjepa.metrics.thresholds import threshold_at_specificity, threshold_scores

GROUP_COLUMNS = ("clinical_site", "device")
MIN_PEOPLE_PER_CLASS = 10
MAX_GROUPS = 20
# Columns of the volumes that a label table need not repeat.
_OF_VOLUMES = ("age", "clinical_site", "device", "eye")
Groups = Mapping[str, Shaped[np.ndarray, " cases"]]  # column -> group of every case, "" if it is not known
Fit = Callable[[Target], Predictions]
_Statistic = Callable[[Weights], Figures]


@dataclass(frozen=True)
class SubgroupScores:
    """groups: an estimate per group that can be measured. scaled: the equity-scaled metric over these, or None.

    left_out: group -> why it cannot be measured.
    """

    groups: dict[str, Estimate]
    scaled: Estimate | None
    left_out: dict[str, str]


def subgroup_scores(
    metric: str,
    predictions: Predictions,
    groups: np.ndarray,
    draws: Draws,
    person_ids: list[str],
    label_hash: str,
    min_per_class: int = 0,
) -> SubgroupScores:
    """`metric` within every group of test volumes ("" is a separate group, "unknown").

    min_per_class: people of each class that a group needs to be measured (of a quantity: people; of survival: people
    with the event).

    scaled is given where at least two groups are measured: for AUROC this is ES-AUC, for other shares of which more is
    better the same scaling of them. Of others there is none: dividing a negative R2 or kappa, or an error, by how
    unequal it is would make unequal groups look better. It is resampled jointly; a resample in which a group has no
    value is undefined.
    """
    names = np.array([str(group) or "unknown" for group in groups])
    people = np.array(person_ids)
    estimates: dict[str, Estimate] = {}
    left_out: dict[str, str] = {}
    measured: list[tuple[np.ndarray, _Statistic]] = []
    for name in np.unique(names).tolist():
        inside = names == name
        if reason := _why_not_measured(metric, predictions, inside, people, min_per_class):
            left_out[name] = reason
            continue
        of_group = predictions.subset(inside)
        statistic = partial(measure, metric, of_group)
        scale = scale_of(metric, of_group.scores)
        estimates[name] = draws.estimate(statistic, people[inside].tolist(), f"{label_hash}\x1f{name}", scale=scale)
        measured.append((inside, statistic))
    scaled = None
    if len(measured) > 1 and METRIC_SCALE[metric] == "share" and metric not in LOWER_IS_BETTER:

        def equity(weights: Weights) -> Figures:
            overall = measure(metric, predictions, weights)
            return overall / (1 + sum(np.abs(overall - of_group(weights[inside])) for inside, of_group in measured))

        scaled = draws.estimate(equity, person_ids, label_hash)
    return SubgroupScores(estimates, scaled, left_out)


def _why_not_measured(
    metric: str, predictions: Predictions, inside: np.ndarray, people: np.ndarray, min_per_class: int
) -> str:
    """Why the group of test volumes `inside` cannot be measured; "" if it can."""
    count = len(set(people[inside].tolist()))
    classes = np.unique(predictions.truth).tolist() if predictions.scores.shape[1] > 1 else []
    missing = len(classes) - len(np.unique(predictions.truth[inside])) if len(classes) else 0
    least = MIN_PEOPLE if len(classes) else max(MIN_PEOPLE, min_per_class)
    if count < least:
        return f"{count} test people, at least {least} are needed"
    if metric == "concordance":
        events = len(set(people[inside & (predictions.truth > 0)].tolist()))
        return f"{events} test people with the event, at least {least} are needed" if events < least else ""
    if missing:
        return f"{missing} of the classes are missing among its {count} test people"
    fewest = min((len(set(people[inside & (predictions.truth == code)].tolist())) for code in classes), default=count)
    if fewest < min_per_class:
        return f"{fewest} of its {count} test people are of the rarest class, at least {min_per_class} are needed"
    return ""


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

    groups, person_ids: of every volume of the embedding table; a case of several groups is named `a+b`, and its labels
    belong to each of them. full: predictions for the test volumes of `target` by the probe with all groups. fit: fits
    and selects on a target's train and val volumes and predicts its test volumes; it is called once per group.
    """
    rows, left_out = [], {}
    drops: list[tuple[np.ndarray, _Statistic]] = []
    test = target.indices["test"]
    for group in np.unique(groups[test]).tolist():
        name = str(group) or "unknown"
        inside = groups[test] == group
        others = _without_group(target, groups, group)
        reason = _why_not_measurable(target, others, person_ids)
        if reason:
            left_out[name] = reason
            continue
        without_it, with_it = fit(others), full.subset(inside)

        def drop(weights: Weights, with_it: Predictions = with_it, without_it: Predictions = without_it) -> Figures:
            return measure(metric, with_it, weights) - measure(metric, without_it, weights)

        estimate = draws.estimate(drop, person_ids[test[inside]].tolist(), "", scale="difference")
        if not np.isfinite(estimate.value):
            left_out[name] = f"{metric} has no value among its {estimate.n_people} test people"
            continue
        interval = estimate.interval()
        ones = np.ones((int(inside.sum()), 1))
        rows.append(
            GroupDrop(
                name,
                float(measure(metric, with_it, ones)[0]),
                float(measure(metric, without_it, ones)[0]),
                estimate.value,
                interval.low,
                interval.high,
                estimate.n,
                estimate.n_people,
            )
        )
        drops.append((inside, drop))
    mean: MeanDrop | None = None
    if drops:

        def mean_drop(weights: Weights) -> Figures:
            return np.mean([of_group(weights[inside]) for inside, of_group in drops], axis=0)

        estimate = draws.estimate(mean_drop, person_ids[test].tolist(), "", scale="difference")
        interval = estimate.interval()
        mean = MeanDrop(estimate.value, interval.low, interval.high, len(drops))
    return LeaveOneGroupOut(tuple(rows), mean, left_out)


def _without_group(target: Target, groups: np.ndarray, group: str) -> Target:
    """`target` trained and selected on cases that share nothing with this group, tested on this one."""
    shares = {name: not set(group.split("+")).isdisjoint(name.split("+")) for name in np.unique(groups).tolist()}
    masks = {
        split: groups[at] == group if split == "test" else ~np.array([shares[name] for name in groups[at]], bool)
        for split, at in target.indices.items()
    }
    return replace(
        target,
        indices={split: target.indices[split][mask] for split, mask in masks.items()},
        values={split: target.values[split][mask] for split, mask in masks.items()},
    )


def _why_not_measurable(target: Target, others: Target, person_ids: np.ndarray) -> str:
    """Why a group cannot be tested by a model trained on the others; "" if it can."""
    people = len(set(person_ids[others.indices["test"]].tolist()))
    if people < MIN_PEOPLE:
        return f"{people} test people, at least {MIN_PEOPLE} are needed"
    if target.task == TASK:
        events = int((others.values["test"] > 0).sum()), int((others.values["train"] > 0).sum())
        if min(events) < MIN_EVENTS:
            return f"{events[0]} events in its test and {events[1]} in train of the others: {MIN_EVENTS} are needed"
    if target.classes:
        if set(target.values["test"].tolist()) - set(others.values["test"].tolist()):
            return f"a class is missing among its {people} test people"
        if set(range(len(target.classes))) - set(others.values["train"].tolist()):
            return "no other group has a training label of every class"
    elif len(others.values["train"]) < 2:
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
) -> list[SiteThreshold]:
    """A threshold chosen on the validation people of each site, measured on the test people of every site.

    sites, person_ids: of every volume of the embedding table; scores of the validation and test volumes of a two-class
    `target`, in its order. A site without a negative validation case chooses no threshold; a site with fewer than
    MIN_PEOPLE test people is left out.
    """
    rows = []
    val, test = target.indices["val"], target.indices["test"]
    val_positive, test_positive = target.values["val"] == 1, target.values["test"] == 1
    for source in np.unique(sites[val]).tolist():
        at_source = sites[val] == source
        if val_positive[at_source].all():
            continue
        threshold = threshold_at_specificity(val_positive[at_source], val_score[at_source], specificity)
        for site in np.unique(sites[test]).tolist():
            inside = sites[test] == site
            people = person_ids[test[inside]].tolist()
            if len(set(people)) < MIN_PEOPLE:
                continue
            scores = threshold_scores(threshold, test_positive[inside], test_score[inside], draws, people, "")
            sensitivity, true_negative = scores.sensitivity.measured(), scores.specificity.measured()
            rows.append(
                SiteThreshold(
                    source or "unknown",
                    site or "unknown",
                    threshold,
                    sensitivity.value,
                    sensitivity.low,
                    sensitivity.high,
                    true_negative.value,
                    true_negative.low,
                    true_negative.high,
                    int(inside.sum()),
                    len(set(people)),
                )
            )
    return rows


def coverage_faults(
    frame: pd.DataFrame, labels: LabelTable, target: Target, columns: Sequence[str] = GROUP_COLUMNS
) -> Iterator[tuple[str, str]]:
    """Faults (kind, text): groups without a labelled scan, sites without any scan, groups on one side of the split.

    `frame`: the scans or cases that `target.indices` point to. A total over all groups would hide such a loss.
    """
    used = np.concatenate(list(target.indices.values()))
    lost, one_sided = "lost_group", "one_sided_group"
    for column in columns:
        names = frame[column]
        present = set(names.iloc[used])
        for name, count in sorted(Counter(names).items()):
            if name and name not in present:
                text = f"{column} {name} is lost: none of its {count} scans or cases has a label and a split"
                yield lost, f"{target.name}: {text}"
        train, test = (set(names.iloc[target.indices[split]]) - {""} for split in ("train", "test"))
        for name in sorted(test - train):
            yield one_sided, f"{target.name}: {column} {name} is tested and has nothing to train on"
        for name in sorted(train - test):
            text = f"{column} {name} is trained on and never tested: the metrics do not describe it"
            yield one_sided, f"{target.name}: {text}"
    labelled = labels.people(target.name)
    by_site = Counter(labels.sites.get(person, "") for person in labelled)
    scanned = Counter(labels.sites.get(person, "") for person in labelled & set(frame["person_id"]))
    for site, count in sorted(by_site.items()):
        if site and not scanned[site]:
            text = f"site {site} is lost: none of its {count} people with a label has an embedded scan"
            yield lost, f"{target.name}: {text}"


@dataclass(frozen=True)
class SubgroupColumn:
    """A column, and the edges of its bands (none: every value is a group)."""

    name: str
    edges: tuple[float, ...] = ()

    def group_of(self, text: str) -> str:
        """The group of a value: "under 50", "50 to under 65", "65 and over"; "" of nothing. Raises UsageError."""
        if not self.edges or not text:
            return text
        numbers = numbers_of([text])
        if numbers is None:
            raise UsageError(
                f"--subgroups {self.name}: {text!r} is not a number, and bands need numbers: drop the edges"
            )
        band = int(np.searchsorted(self.edges, numbers[0], side="right"))
        low, high = (f"{self.edges[at]:g}" if 0 <= at < len(self.edges) else "" for at in (band - 1, band))
        return f"{low} to under {high}" if low and high else f"under {high}" if high else f"{low} and over"


def parse_subgroups(text: str | None) -> tuple[SubgroupColumn, ...]:
    """The columns in a list such as "sex,age:50,65": numbers after a colon are edges of bands. Raises UsageError."""
    bands: list[tuple[str, list[float]]] = []
    for part in (text or "").split(",") if text is not None else ():
        name, colon, edge = (piece.strip() for piece in part.rpartition(":"))
        is_edge = not colon and bool(bands) and bool(bands[-1][1])
        numbers = numbers_of([edge]) if colon or is_edge else None
        if numbers is not None and colon and name:
            bands.append((name, [float(numbers[0])]))
        elif numbers is not None and is_edge:
            bands[-1][1].append(float(numbers[0]))
        elif not colon and edge:
            bands.append((edge, []))
        else:
            raise UsageError(f"--subgroups {text!r}: give columns, with edges of bands after a colon, as sex,age:50,65")
    for name, edges in bands:
        if sorted(set(edges)) != edges:
            raise UsageError(f"--subgroups {name}: the edges of its bands do not rise")
    if len({name for name, _ in bands}) < len(bands):
        raise UsageError(f"--subgroups {text!r} names a column twice")
    return tuple(SubgroupColumn(name, tuple(edges)) for name, edges in bands)


def read_groups(columns: Sequence[SubgroupColumn], labels_path: str | Path, frame: pd.DataFrame) -> Groups:
    """The group of every case of `frame` (person_id, eye, ...) in every column; the label table takes precedence.

    If labels name visits, the group is that of the case's visit. A person whose two eyes differ in a column belongs
    to no group of it at the level of people. Raises UsageError: a column that neither has, a band of what is not a
    number, more than MAX_GROUPS groups.
    """
    if not columns:
        return {}
    in_labels = label_columns(labels_path)
    of_volumes = [name for name in _OF_VOLUMES if name in frame.columns]
    for column in columns:
        if column.name not in (*in_labels, *of_volumes):
            raise UsageError(
                f"--subgroups {column.name}: {labels_path} has no such column, it has {', '.join(in_labels)}; of the "
                f"volumes {', '.join(of_volumes)} are known"
            )
    named = [column.name for column in columns if column.name in in_labels]
    labels = read_labels(labels_path, named) if named else None
    groups: dict[str, np.ndarray] = {}
    for column in columns:
        if labels is not None and column.name in named:
            values = labels.values[column.name]
            cells = [
                (text or "") if eye else text or _of_both_eyes(values, person)
                for text, person, eye in zip(
                    labels.texts(column.name, frame), frame["person_id"], frame["eye"], strict=True
                )
            ]
        else:
            cells = ["" if pd.isna(cell) else str(cell) for cell in frame[column.name]]
        groups[column.name] = np.array([column.group_of(cell) for cell in cells], dtype=object)
        count = len(set(groups[column.name].tolist()) - {""})
        if count > MAX_GROUPS:
            raise UsageError(
                f"--subgroups {column.name} has {count} values, at most {MAX_GROUPS} are groups: of a quantity give "
                f"the edges of bands, as {column.name}:50,65"
            )
    return groups


def _of_both_eyes(values: Mapping[tuple[str, str], str], person: str) -> str:
    """The text that both eyes of a person share, else ""."""
    texts = {values[person, side] for side in ("OD", "OS", "") if (person, side) in values}
    return texts.pop() if len(texts) == 1 else ""


def score_groups(
    groups: Groups,
    target: Target,
    predictions: Predictions,
    people: Sequence[str],
    draws: Draws,
    metrics: Sequence[str] | None = None,
) -> list[ColumnScores]:
    """The scores of every column and metric.

    people: of the test cases of `target`. metrics: None for all of the task.
    """
    shown = [name for name in TASK_METRICS[target.task] if metrics is None or name in metrics]
    names = shown or [PRIMARY_METRIC[target.task]]
    scored = []
    for column, values in groups.items():
        of_test = values[target.indices["test"]]
        for metric in names:
            by_group = subgroup_scores(
                metric, predictions, of_test, draws, list(people), target.label_hash, MIN_PEOPLE_PER_CLASS
            )
            scored.append(ColumnScores(**vars(group_scores(metric, by_group, target, of_test, people)), column=column))
    return scored


def group_scores(
    metric: str, scores: SubgroupScores, target: Target, groups: np.ndarray, people: Sequence[str]
) -> GroupScores:
    """The values in `scores` with their intervals, cases and people. groups, people: of the test cases."""
    names, ids = np.array([str(group) or "unknown" for group in groups]), np.asarray(people)

    def by_class(name: str) -> dict[str, int]:
        truth = target.values["test"]
        return {
            of_class: len(set(ids[(names == name) & (truth == code)].tolist()))
            for code, of_class in enumerate(target.classes)
        }

    values = {
        name: GroupValue(**vars(estimate.measured()), people_by_class=by_class(name))
        for name, estimate in scores.groups.items()
    }
    scaled = None if scores.scaled is None else scores.scaled.measured()
    return GroupScores(metric, values, scaled, scores.left_out)


@dataclass(frozen=True)
class SubgroupTableRow:
    """A group of a table: its people, and its values in the order of the table's names, None if there is none."""

    group: str
    people: int
    results: tuple[GroupValue | None, ...]


@dataclass(frozen=True)
class SubgroupTable:
    """The groups of a column for a target, in the target's primary metric.

    names: headings of the results. left_out: by group, why it is not measured.
    """

    target: str
    column: str
    metric: str
    names: tuple[str, ...]
    rows: tuple[SubgroupTableRow, ...]
    left_out: Mapping[str, str]


def subgroup_tables(scored: Sequence[SubgroupResult]) -> list[SubgroupTable]:
    """A table for every target and column, in the target's primary metric."""
    tables: dict[tuple[str, str, str], list[SubgroupResult]] = {}
    for result in scored:
        if result.metric in PRIMARY_METRIC.values():
            tables.setdefault((result.target, result.column, result.metric), []).append(result)
    subgroup_tables = []
    for (target, column, metric), members in tables.items():
        groups = {group: value for result in members for group, value in result.groups.items()}
        rows = tuple(
            SubgroupTableRow(group, value.n_people, tuple(result.groups.get(group) for result in members))
            for group, value in sorted(groups.items())
        )
        names = tuple(_heading(result, members) for result in members)
        left_out = {group: reason for result in members for group, reason in result.left_out.items()}
        subgroup_tables.append(SubgroupTable(target, column, metric, names, rows, left_out))
    return subgroup_tables


def _heading(member: SubgroupResult, members: Sequence[SubgroupResult]) -> str:
    """The name of a result, with its probe if the name occurs twice (an encoder frozen and tuned)."""
    twice = [other.name for other in members].count(member.name) > 1
    return f"{member.name} ({member.probe})" if twice else member.name
