"""From test predictions to metrics with intervals, their macro mean, and paired differences on the same people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from octjepa.embed.alignment import NamedTables, untrained_name
from octjepa.embed.table import SPLITS
from octjepa.errors import UsageError
from octjepa.evaluate.calibration import class_weights
from octjepa.evaluate.results import Confusion, ProbePaired, ResultKey, Row, SubgroupResult, TargetSummary
from octjepa.evaluate.subgroups import Groups, score_groups
from octjepa.evaluate.survival import TASK
from octjepa.evaluate.targets import Target
from octjepa.metrics.bootstrap import Draws, Estimate, mean_estimate
from octjepa.metrics.comparisons import paired_difference
from octjepa.metrics.findings import BASELINES, Findings
from octjepa.metrics.intervals import LOWER_IS_BETTER, scale_of
from octjepa.metrics.scores import (
    PRIMARY_METRIC,
    TASK_METRICS,
    Figures,
    Predictions,
    Weights,
    brier,
    confusion,
    measure,
)

MACRO = "macro"

PredictionsByKey = dict[ResultKey, tuple[Target, Predictions]]
Estimates = dict[tuple[ResultKey, str], Estimate]


@dataclass(frozen=True)
class Measurements:
    """Bootstrap estimates by key and metric, and the rows and confusions made from them."""

    estimates: Estimates
    rows: list[Row]
    confusions: list[Confusion]


def estimate_metric(
    metric: str,
    predictions: Predictions | Sequence[Predictions],
    draws: Draws,
    people: Sequence[str],
    label_hash: str,
) -> Estimate:
    """`metric` ("brier" as well) of the predictions of test cases, resampled by person.

    predictions: of one predictor, or of several that were fitted to draws of labelled people: then the mean over
    these draws, on the same resamples. people: of the test cases, in order. label_hash: of the test cases and their
    labels (`Target.label_hash`).
    """
    fits = [predictions] if isinstance(predictions, Predictions) else predictions
    metric_of: Callable[[Predictions, Weights], Figures] = brier if metric == "brier" else partial(measure, metric)

    def statistic(weights: Weights) -> Figures:
        return np.asarray(np.mean([metric_of(scores, weights) for scores in fits], axis=0))

    scale = scale_of(metric, np.concatenate([fit.scores for fit in fits]))
    return draws.estimate(statistic, list(people), label_hash, centred=metric == "ece", scale=scale)


def describe_target(target: Target) -> TargetSummary:
    """The task of a target, counts by split and class, and the class weights that every probe uses."""
    if target.classes:
        counts = {split: np.bincount(target.values[split], minlength=len(target.classes)).tolist() for split in SPLITS}
        weights = class_weights(target.values["train"], len(target.classes)).round(6).tolist()
        return TargetSummary(target.name, target.task, target.label_hash, tuple(target.classes), counts, weights)
    events = {split: int((target.values[split] > 0).sum()) for split in SPLITS} if target.task == TASK else None
    of_split = {split: len(target.indices[split]) for split in SPLITS}
    return TargetSummary(target.name, target.task, target.label_hash, counts=of_split, events=events)


def measure_predictions(
    predicted: PredictionsByKey,
    people: Mapping[str, Sequence[str]],
    draws: Draws,
    metric_names: Sequence[str] | None,
    findings: Findings,
) -> Measurements:
    """Estimates every metric of every prediction, and the macro AUROC of at least two binary targets.

    people: the people of each target's test cases, in order. metric_names: None for all of the task; the primary metric
    is always estimated. Raises UsageError if none of `metric_names` fits a target's task.
    """
    estimates: Estimates = {}
    rows: list[Row] = []
    confusions: list[Confusion] = []
    for key, (target, predictions) in predicted.items():
        primary, all_metrics = PRIMARY_METRIC[target.task], TASK_METRICS[target.task]
        shown = [name for name in all_metrics if metric_names is None or name in metric_names]
        if not shown and metric_names is not None:
            raise UsageError(
                f"{target.name} is {target.task}: none of the requested metrics fits; it has {', '.join(all_metrics)}"
            )
        for metric in dict.fromkeys((*shown, primary)):
            estimate = estimate_metric(metric, predictions, draws, people[target.name], target.label_hash)
            estimates[key, metric] = estimate
            if metric in shown:
                rows.append(result_row(key, metric, estimate))
            undefined = estimate.interval().undefined
            if metric == primary and undefined:
                findings.add_note(
                    f"{target.name}: {undefined} of {len(estimate.samples)} resamples of {estimate.n_people} test "
                    f"people hold too few classes for {metric}; intervals cover the others"
                )
        if target.classes:
            confusions.append(Confusion(**vars(key), classes=target.classes, counts=confusion(predictions)))
        _report_constant(key, target, predictions, findings)
    macro = _macro_estimates({target.name: target for target, _ in predicted.values()}, estimates, people)
    rows += [result_row(key, metric, estimate) for (key, metric), estimate in macro.items()]
    return Measurements(estimates | macro, rows, confusions)


def measure_subgroups(
    predicted: PredictionsByKey,
    groups: Groups,
    people: Mapping[str, Sequence[str]],
    draws: Draws,
    metric_names: Sequence[str] | None = None,
) -> list[SubgroupResult]:
    """`score_groups` of every prediction of `predicted`, with its key; people: of each target's test cases."""
    return [
        SubgroupResult(**vars(scored), **vars(key))
        for key, (target, predictions) in predicted.items()
        for scored in score_groups(groups, target, predictions, people[target.name], draws, metric_names)
    ]


def _report_constant(key: ResultKey, target: Target, predictions: Predictions, findings: Findings) -> None:
    """Adds a fault for an encoder whose probe predicts one value for every test case."""
    answers = predictions.predicted_classes() if target.classes else predictions.scores[:, 0]
    is_constant = len(answers) > 0 and np.ptp(answers) <= 1e-9 * np.abs(answers).max()
    if is_constant and key.name not in BASELINES:
        answer = repr(target.classes[int(answers[0])]) if target.classes else f"{answers[0]:.4g}"
        findings.add_fault(
            "constant_predictor",
            f"{key.name} ({key.probe}, {key.pool}) predicts {answer} for every test case of {key.target}: a constant "
            "predictor",
        )


def result_row(key: ResultKey, metric: str, estimate: Estimate) -> Row:
    """The row of an estimate."""
    return Row(**vars(key), metric=metric, **vars(estimate.measured()))


def _macro_estimates(
    targets: Mapping[str, Target], estimates: Estimates, people: Mapping[str, Sequence[str]]
) -> Estimates:
    """The mean AUROC over the binary targets, resampled jointly; empty if there are fewer than two."""
    binary = [name for name, target in targets.items() if target.task == "binary"]
    if len(binary) < 2:
        return {}
    n_people = len({person for name in binary for person in people[name]})
    macro: Estimates = {}
    for key, metric in estimates:
        if key.target == binary[0] and metric == "auroc":
            parts = [estimates[ResultKey(key.name, name, key.probe, key.pool), metric] for name in binary]
            macro[ResultKey(key.name, MACRO, key.probe, key.pool), metric] = mean_estimate(parts, n_people)
    return macro


def compare_with_untrained(targets: Sequence[Target], tables: NamedTables, estimates: Estimates) -> list[ProbePaired]:
    """The paired difference of every encoder result and its randomly initialised encoder, in the primary metric of each
    target. There is none where the metric has no value, as R2 of equal truths.
    """
    metrics = {target.name: PRIMARY_METRIC[target.task] for target in targets} | {MACRO: "auroc"}
    twins = {name: untrained_name(tables, index) for index, (name, _) in enumerate(tables)}
    comparisons = []
    for (key, metric), ours in estimates.items():
        if key.name in twins and metric == metrics[key.target]:
            twin = twins[key.name]
            reference = estimates[ResultKey(twin, key.target, key.probe, key.pool), metric]
            if not np.isfinite(ours.value - reference.value):
                continue
            difference = vars(paired_difference(ours, reference))
            comparisons.append(ProbePaired(**vars(key), metric=metric, reference=twin, **difference))
    return comparisons


def compare_with_baselines(paired: ProbePaired | None, estimates: Estimates) -> list[ProbePaired]:
    """The paired differences of the result that `paired` names and of every other baseline, in the same metric.

    A baseline is read under the same pool or without one; of several probes that read it, the probe of `paired` counts.
    """
    if paired is None:
        return []
    ours = paired.key
    baselines: dict[str, ResultKey] = {}
    for (key, metric), estimate in estimates.items():
        read_alike = (metric, key.target) == (paired.metric, ours.target) and key.pool in (ours.pool, "none")
        other = key.name in BASELINES and key.name != paired.reference
        if read_alike and other and np.isfinite(estimate.value):
            baselines[key.name] = key if key.probe == ours.probe else baselines.get(key.name, key)
    return [
        ProbePaired(
            **vars(ours),
            metric=paired.metric,
            reference=name,
            **vars(paired_difference(estimates[ours, paired.metric], estimates[key, paired.metric])),
        )
        for name, key in baselines.items()
    ]


def best_by_test(values: Mapping[Any, float], metric: str) -> Any | None:
    """The key with the best finite value of `metric`; None if no value is finite.

    Chosen by the test set, which favours it: comparisons with it are conservative and have no corrected p-value.
    """
    sign = -1 if metric in LOWER_IS_BETTER else 1
    finite_values = {key: sign * value for key, value in values.items() if np.isfinite(value)}
    return max(finite_values, key=lambda key: finite_values[key]) if finite_values else None
