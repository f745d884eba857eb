"""From predictions to what a probe run says: figures with intervals, their mean over labels, paired differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octjepa.embed.alignment import NamedTables, untrained_name
from octjepa.embed.table import SPLITS
from octjepa.errors import UsageError
from octjepa.metrics.bootstrap import Draws, Estimate, mean_estimate
from octjepa.metrics.comparisons import paired_difference
from octjepa.metrics.findings import BASELINES, Findings
from octjepa.metrics.intervals import scale_of
from octjepa.metrics.scores import PRIMARY_METRIC, TASK_METRICS, Predictions, confusion, measure
from octjepa.probe.calibration import class_weights
from octjepa.probe.targets import Target

MACRO = "macro"


@dataclass(frozen=True)
class ResultKey:
    """What was read (encoder or baseline), for which target, by which probe, from which pooling."""

    name: str
    target: str
    probe: str
    pool: str


PredictionsByKey = dict[ResultKey, tuple[Target, Predictions]]
Estimates = dict[tuple[ResultKey, str], Estimate]


@dataclass
class ProbeResult(Findings):
    """What a probe run found; `payload` is what `octjepa probe` prints and the report draws.

    rows: a figure each; value, low and high are None where the figure or an honest interval does not exist; n counts
        test cases (volumes, eyes or people), n_people the people behind them.
    paired: the first encoder minus its untrained twin on the same people (empty if a figure is missing).
    comparisons: the same for every encoder, target, probe and pool: for reading, not for picking the best.
    choices: the setting chosen per row, how, and how many fits stopped early. confusions: counts on the test cases.
    targets: task, classes, counts by split and class weights. protocol: what a case is and how its volumes became one.
    predicted: target and test predictions of every row, in memory only.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    paired: dict[str, Any] = field(default_factory=dict)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)
    confusions: list[dict[str, Any]] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    protocol: dict[str, Any] = field(default_factory=dict)
    predicted: PredictionsByKey = field(default_factory=dict)

    def payload(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: value for name, value in vars(self).items() if name != "predicted"}


def describe_target(target: Target) -> dict[str, Any]:
    """Plain data on a target: task, counts by split and class, and the class weights that every probe uses."""
    found: dict[str, Any] = {"target": target.name, "task": target.task, "label_hash": target.label_hash}
    if not target.classes:
        return found | {"counts": {split: len(target.indices[split]) for split in SPLITS}}
    counts = {split: np.bincount(target.values[split], minlength=len(target.classes)).tolist() for split in SPLITS}
    weights = class_weights(target.values["train"], len(target.classes))
    return found | {"classes": list(target.classes), "counts": counts, "class_weights": weights.round(6).tolist()}


def estimate_metrics(
    predicted: PredictionsByKey,
    people_of: Mapping[str, Sequence[str]],
    draws: Draws,
    metric_names: Sequence[str] | None,
    result: ProbeResult,
) -> Estimates:
    """Every metric of every row with its bootstrap; fills rows, confusions and the notes on them.

    people_of: the people of a target's test cases, in their order.
    """
    estimates: Estimates = {}
    for row, (target, predictions) in predicted.items():
        people = list(people_of[target.name])
        primary = PRIMARY_METRIC[target.task]
        wanted = [name for name in TASK_METRICS[target.task] if metric_names is None or name in metric_names]
        if not wanted and metric_names is not None:
            known = ", ".join(TASK_METRICS[target.task])
            raise UsageError(f"{target.name} is {target.task}: none of the metrics asked for fits; it has {known}")
        for metric in dict.fromkeys((*wanted, primary)):

            def statistic(weights: np.ndarray, metric: str = metric, of: Predictions = predictions) -> np.ndarray:
                return measure(metric, of, weights)

            scale = scale_of(metric, predictions.scores)
            estimate = draws.estimate(statistic, people, target.label_hash, metric == "ece", scale)
            estimates[row, metric] = estimate
            if metric in wanted:
                result.rows.append(_as_row(row, metric, estimate))
            lost = estimate.interval().undefined
            if metric == primary and lost:
                result.add_note(
                    f"{target.name}: {lost} of {len(estimate.samples)} resamples of {estimate.n_people} test people "
                    f"hold too few classes for {metric}; intervals cover the others"
                )
        if target.classes:
            result.confusions.append({**vars(row), "classes": list(target.classes), "counts": confusion(predictions)})
        _tell_constant(row, target, predictions, result)
    return estimates


def _tell_constant(row: ResultKey, target: Target, predictions: Predictions, result: ProbeResult) -> None:
    """The founding failure of this kind of work: an encoder of which one answer is read for everybody."""
    said = np.unique(predictions.predicted_classes() if target.classes else predictions.scores[:, 0].round(9))
    if len(said) == 1 and row.name not in BASELINES:
        answer = repr(target.classes[int(said[0])]) if target.classes else f"{said[0]:.4g}"
        result.add_fault(
            "constant_predictor",
            f"{row.name} ({row.probe}, {row.pool}) says {answer} of every test case of {row.target}: a constant "
            "predictor",
        )


def _as_row(row: ResultKey, metric: str, estimate: Estimate) -> dict[str, Any]:
    return {**vars(row), "metric": metric, **estimate.as_dict()}


def differences_by_name(
    paired: Sequence[Mapping[str, Any]], named: Callable[[Mapping[str, Any]], str]
) -> dict[str, Any]:
    """Paired differences as `inspect` says them: {value, low, high, n_people} by the name that `named` gives each."""
    return {
        named(pair): {"value": pair["difference"], **{key: pair[key] for key in ("low", "high", "n_people")}}
        for pair in paired
    }


def add_macro(
    targets: Sequence[Target], estimates: Estimates, people_of: Mapping[str, Sequence[str]], result: ProbeResult
) -> None:
    """Adds the mean AUROC over the binary targets, resampled jointly, where there are at least two."""
    binary = [target for target in targets if target.task == "binary"]
    if len(binary) < 2:
        return
    people = len({person for target in binary for person in people_of[target.name]})
    for row, metric in [key for key in estimates if key[0].target == binary[0].name and key[1] == "auroc"]:
        parts = [estimates[ResultKey(row.name, target.name, row.probe, row.pool), metric] for target in binary]
        whole = ResultKey(row.name, MACRO, row.probe, row.pool)
        estimates[whole, metric] = mean_estimate(parts, people)
        result.rows.append(_as_row(whole, metric, estimates[whole, metric]))


def compare_with_untrained(
    targets: Sequence[Target], tables: NamedTables, estimates: Estimates, result: ProbeResult, probe: str, pool: str
) -> None:
    """Every encoder row against its untrained twin; the one named beforehand becomes `paired`."""
    metrics = {target.name: PRIMARY_METRIC[target.task] for target in targets} | {MACRO: "auroc"}
    twins = {name: untrained_name(tables, index) for index, (name, _) in enumerate(tables)}
    for (row, metric), ours in estimates.items():
        if row.name not in twins or metric != metrics[row.target]:
            continue
        reference = estimates[ResultKey(twins[row.name], row.target, row.probe, row.pool), metric]
        paired = paired_difference(ours, reference)
        result.comparisons.append({**vars(row), "metric": metric, "reference": twins[row.name], **vars(paired)})
    names = {one["target"] for one in result.comparisons}
    headline = MACRO if MACRO in names else targets[0].name
    for one in result.comparisons:
        if (one["name"], one["target"], one["probe"], one["pool"]) == (tables[0][0], headline, probe, pool):
            result.paired = one
