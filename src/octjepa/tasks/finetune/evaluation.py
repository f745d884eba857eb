"""Test figures of the tuned network beside the same encoder frozen and rows that know nothing, on the same people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from threadpoolctl import threadpool_limits

from octjepa.embed.alignment import feature_sets
from octjepa.embed.table import Embeddings
from octjepa.files import write_atomic
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.comparisons import paired_difference
from octjepa.metrics.intervals import LOWER_IS_BETTER
from octjepa.metrics.scores import Predictions
from octjepa.probe.aggregation import LEVELS, PreparedTarget, case_names
from octjepa.probe.calibration import ProbeFit, apply_logit_shift, calibrated_predictions
from octjepa.probe.features import covariate_features, feature_space, majority_predictions
from octjepa.probe.linear_knn import fit_linear
from octjepa.probe.results import (
    MACRO,
    Estimates,
    PredictionsByKey,
    ProbeResult,
    ResultKey,
    add_macro,
    estimate_metrics,
)
from octjepa.progress import bar
from octjepa.tasks.finetune.network import POOL
from octjepa.tasks.finetune.tuning_data import Cohort

TUNED = "tuned"  # the probe of a tuned network's rows
_BESIDE = (("untrained", "linear", POOL), ("intensity", "linear", "none"), ("histogram", "linear", "none"),
           ("covariates", "linear", "none"), ("majority", "constant", "none"))  # fmt: skip

Scores = list[Float[np.ndarray, "n _"]]  # of each target, by its labelled volumes
Shifts = list[Float[np.ndarray, " _"]]


def predictions_of(
    one: PreparedTarget, scores: Float[np.ndarray, "n classes"], shift: Float[np.ndarray, " classes"]
) -> Predictions:
    """Scores of test volumes as predictions of test cases."""
    return one.predictions(calibrated_predictions(one.fit_target, scores, shift))


def judge(
    cohort: Cohort,
    table: Embeddings,
    tuned: dict[str, tuple[Scores, Shifts]],
    resamples: int,
    seed: int,
    found: ProbeResult,
) -> list[dict[str, Any]]:
    """Fills the rows of `found`; returns the paired differences, tuned minus each of what stands beside it.

    `tuned`: row name -> test scores and decision shifts; the first is the network in question. `table`: the frozen
    encoder's embeddings of the cohort's volumes.
    """
    predicted: PredictionsByKey = {}
    for name, (scores, shifts) in tuned.items():
        for one, said, shift in zip(cohort.asked, scores, shifts, strict=True):
            predicted[ResultKey(name, one.test_target.name, TUNED, POOL)] = (
                one.test_target,
                predictions_of(one, said, shift),
            )
    _frozen_beside(cohort, table, predicted, found)
    draws = Draws([person for some in cohort.people.values() for person in some], resamples, seed)
    estimates = estimate_metrics(predicted, cohort.people, draws, None, found)
    targets = [one.test_target for one in cohort.asked]
    add_macro(targets, estimates, cohort.people, found)
    metrics = dict(cohort.metrics)
    if any(row.target == MACRO for row, _ in estimates) and set(metrics.values()) == {"auroc"}:
        metrics = {MACRO: "auroc", **metrics}
    others = [name for name in tuned if name != cohort.name]
    return [
        pair for target, metric in metrics.items() for pair in _paired(cohort.name, target, metric, others, estimates)
    ]


def _frozen_beside(cohort: Cohort, table: Embeddings, predicted: PredictionsByKey, found: ProbeResult) -> None:
    """Frozen linear probes of the encoder, its untrained twin, grey levels and the covariates; the majority."""

    def keep(row: ResultKey, one: PreparedTarget, probed: ProbeFit) -> None:
        predicted[row] = one.test_target, one.predictions(probed.predictions)
        found.choices.append(
            {**vars(row), "setting": probed.setting, "by": one.selection.by, "unconverged": probed.unconverged}
        )

    # One thread, as for the probes: the result then does not depend on the number of cores.
    with bar("beside", None, "fit") as shown, threadpool_limits(1):
        for name, pool, features in feature_sets([(cohort.name, table)], (POOL,)):
            for one in cohort.asked:
                probed = fit_linear(feature_space(features, one.fit_target), one.fit_target, one.selection)
                keep(ResultKey(name, one.test_target.name, "linear", pool), one, probed)
                shown.advance()
        for one in cohort.asked:
            features, notes = covariate_features(cohort.frame, one.fit_target)
            for text in notes:
                found.add_note(text)
            probed = fit_linear(feature_space(features, one.fit_target), one.fit_target, one.selection)
            keep(ResultKey("covariates", one.test_target.name, "linear", "none"), one, probed)
            predicted[ResultKey("majority", one.test_target.name, "constant", "none")] = (
                one.test_target,
                majority_predictions(one.test_target),
            )


def _paired(name: str, target: str, metric: str, others: Sequence[str], estimates: Estimates) -> list[dict[str, Any]]:
    """Tuned minus frozen, minus the best of the rows that know nothing (by the test figure, which favours it), minus
    other tuned networks."""
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0

    def value(row: ResultKey) -> float:
        return float(np.nan_to_num(sign * estimates[row, metric].value, nan=-np.inf))

    known = [
        row for row in (ResultKey(n, target, probe, pool) for n, probe, pool in _BESIDE) if (row, metric) in estimates
    ]
    references = [("frozen", ResultKey(name, target, "linear", POOL))]
    references += [("best_baseline", max(known, key=value))] if known else []
    references += [("tuned_from_scratch", ResultKey(other, target, TUNED, POOL)) for other in others]
    ours, pairs = estimates[ResultKey(name, target, TUNED, POOL), metric], []
    for against, row in references:
        pair = paired_difference(ours, estimates[row, metric])
        reference = {"against": against, "reference": row.name, "reference_probe": row.probe}
        pairs.append({"name": name, "target": target, "metric": metric, **reference, **vars(pair)})
    return pairs


def write_predictions(path: Path, cohort: Cohort, level: str, said: dict[str, tuple[Scores, Shifts]]) -> None:
    """What the tuned network says of every labelled volume, eye and person; `said` {split: scores and shifts}.

    `scores`: probabilities as if every class were equally common, or the quantity; of an eye or person the mean over
    its volumes. `truth` is empty where the eyes of a person differ, except at the level that was measured, whose rule
    holds.
    """
    rows: list[dict[str, Any]] = []
    for split, (scores, shifts) in said.items():
        for one, of_volumes, shift in zip(cohort.asked, scores, shifts, strict=True):
            balanced = apply_logit_shift(of_volumes, shift) if one.fit_target.classes else of_volumes
            for each in LEVELS:
                rows += _at_level(cohort, one, split, each, level, balanced)
    frame = pd.DataFrame(rows)
    write_atomic(path, lambda file: frame.to_parquet(file, index=False))


def _at_level(
    cohort: Cohort, one: PreparedTarget, split: str, each: str, level: str, balanced: Float[np.ndarray, "n classes"]
) -> list[dict[str, Any]]:
    at, values = one.fit_target.indices[split], one.fit_target.values[split]
    names = np.array(case_names(cohort.frame, each), dtype=object)
    ruled: dict[str, float] = {}
    if each == level and one.members is not None:
        cases = zip(one.test_target.indices[split], one.test_target.values[split], strict=True)
        ruled = {names[one.members[case][0]]: value.item() for case, value in cases}
    rows = []
    for name in dict.fromkeys(names[at]):
        here = names[at] == name
        first, mean, truths = cohort.frame.iloc[at[here][0]], balanced[here].mean(axis=0), set(values[here].tolist())
        truth = ruled.get(name, truths.pop() if len(truths) == 1 else None)
        rows.append(
            {
                "level": each, "target": one.test_target.name, "split": split, "person_id": first["person_id"],
                "eye": "" if each == "person" else first["eye"],
                "volume_id": first["volume_id"] if each == "volume" else "", "volumes": int(here.sum()),
                "truth": "" if truth is None else _word(one, truth),
                "said": _word(one, int(mean.argmax()) if one.fit_target.classes else float(mean[0])),
                "classes": list(one.fit_target.classes), "scores": mean.tolist(),
            }
        )  # fmt: skip
    return rows


def _word(one: PreparedTarget, value: float | int) -> str:
    return one.fit_target.classes[int(value)] if one.fit_target.classes else repr(float(value))
