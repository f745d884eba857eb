"""Test metrics of the tuned network next to the same encoder frozen and baselines, on the same people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from threadpoolctl import threadpool_limits

from octjepa.embed.alignment import feature_sets
from octjepa.embed.table import Embeddings
from octjepa.evaluate.calibration import ProbeFit, apply_logit_shift, calibrated_predictions
from octjepa.evaluate.case_predictions import CasePrediction, write_case_predictions
from octjepa.evaluate.cases import LEVELS, PreparedTarget, case_names
from octjepa.evaluate.features import covariate_features, feature_space, majority_predictions
from octjepa.evaluate.linear_knn import fit_linear
from octjepa.evaluate.measurements import MACRO, Estimates, best_by_test, measure_subgroups
from octjepa.evaluate.probe import ProbeResult
from octjepa.evaluate.protocol import Candidate, TestSet
from octjepa.evaluate.results import Choice, ResultKey, TunedPaired
from octjepa.metrics.comparisons import paired_difference
from octjepa.metrics.scores import Predictions
from octjepa.progress import bar
from octjepa.tasks.finetune.network import TUNED_POOL
from octjepa.tasks.finetune.tuning_data import TuningData

TUNED = "tuned"  # the probe of a tuned network's results
_BASELINES = (
    ("intensity", "linear", "none"),
    ("histogram", "linear", "none"),
    ("covariates", "linear", "none"),
    ("majority", "constant", "none"),
)

Scores = list[Float[np.ndarray, "n _"]]  # of each target, by its labelled volumes
Shifts = list[Float[np.ndarray, " _"]]


def case_predictions(
    target: PreparedTarget, scores: Float[np.ndarray, "n classes"], shift: Float[np.ndarray, " classes"]
) -> Predictions:
    """Scores of test volumes as predictions of test cases."""
    return target.predictions(calibrated_predictions(target.fit_target, scores, shift))


def evaluate(
    data: TuningData,
    table: Embeddings,
    tuned: dict[str, tuple[Scores, Shifts]],
    test_set: TestSet,
    probe_result: ProbeResult,
) -> list[TunedPaired]:
    """Fills the results in `probe_result`; returns the paired differences, tuned minus each reference.

    `tuned`: name -> test scores and decision shifts; the first is the network in question. `table`: the frozen
    encoder's embeddings of the volumes of `data`.
    """
    predicted, measured = test_set.measure(_candidates(data, table, tuned, probe_result), None, probe_result)
    probe_result.rows, probe_result.confusions, estimates = measured.rows, measured.confusions, measured.estimates
    no_majority = {key: predictions for key, predictions in predicted.items() if key.probe != "constant"}
    probe_result.subgroups = measure_subgroups(no_majority, data.evaluation.groups, test_set.people, test_set.draws)
    metrics = dict(data.metrics)
    if any(row.target == MACRO for row, _ in estimates) and set(metrics.values()) == {"auroc"}:
        metrics = {MACRO: "auroc", **metrics}
    others = [name for name in tuned if name != data.name]
    return [
        pair
        for target_name, metric in metrics.items()
        for pair in _paired(data.name, target_name, metric, table.default_pool, others, estimates)
    ]


def _candidates(
    data: TuningData, table: Embeddings, tuned: dict[str, tuple[Scores, Shifts]], probe_result: ProbeResult
) -> Iterator[Candidate]:
    """The tuned networks, then frozen linear probes of the encoder, the same network randomly initialised,
    intensities and covariates, and the majority."""
    for name, (scores, shifts) in tuned.items():
        for target, of_target, shift in zip(data.targets, scores, shifts, strict=True):
            yield Candidate(
                ResultKey(name, target.name, TUNED, TUNED_POOL), target, case_predictions(target, of_target, shift)
            )

    def frozen(key: ResultKey, target: PreparedTarget, features: np.ndarray) -> Candidate:
        probed: ProbeFit = fit_linear(feature_space(features, target.fit_target), target.fit_target, target.selection)
        by, unconverged = target.selection.by, probed.unconverged
        probe_result.choices.append(Choice(**vars(key), setting=probed.setting, by=by, unconverged=unconverged))
        return Candidate.of_fit(key, target, probed.predictions)

    # One thread, as for the probes: the result then does not depend on the number of cores.
    with bar("frozen probes", None, "fit") as progress, threadpool_limits(1):
        for name, pool, features in feature_sets([(data.name, table)], (table.default_pool,)):
            for target in data.targets:
                yield frozen(ResultKey(name, target.name, "linear", pool), target, features)
                progress.advance()
        for target in data.targets:
            features, notes = covariate_features(data.frame, target.fit_target)
            for text in notes:
                probe_result.add_note(text)
            yield frozen(ResultKey("covariates", target.name, "linear", "none"), target, features)
            key = ResultKey("majority", target.name, "constant", "none")
            yield Candidate(key, target, majority_predictions(target.test_target))


def _paired(
    name: str, target: str, metric: str, pool: str, others: Sequence[str], estimates: Estimates
) -> list[TunedPaired]:
    """Tuned minus frozen, minus the best baseline (by the test metric, which favours it), minus other tuned
    networks."""
    references = [("frozen", ResultKey(name, target, "linear", pool))]
    baselines = {
        row: estimates[row, metric].value
        for row in (ResultKey(n, target, probe, of) for n, probe, of in (("untrained", "linear", pool), *_BASELINES))
        if (row, metric) in estimates
    }
    best = best_by_test(baselines, metric)
    references += [("best_baseline", best)] if best is not None else []
    references += [("tuned_from_scratch", ResultKey(other, target, TUNED, TUNED_POOL)) for other in others]
    ours = estimates[ResultKey(name, target, TUNED, TUNED_POOL), metric]
    return [
        TunedPaired(
            name=name,
            target=target,
            metric=metric,
            reference=row.name,
            against=against,
            reference_probe=row.probe,
            **vars(paired_difference(ours, estimates[row, metric])),
        )
        for against, row in references
        if np.isfinite(ours.value - estimates[row, metric].value)  # R2 of equal truths has no value
    ]


def write_predictions(path: Path, data: TuningData, level: str, scored: dict[str, tuple[Scores, Shifts]]) -> None:
    """Writes the prediction for every labelled volume, eye and person; `scored` {split: scores and shifts}.

    `scores`: probabilities as if every class were equally common, or the quantity; of an eye or person the mean over
    its volumes. `truth` is empty where the eyes of a person differ, except at the level that was measured, whose rule
    holds. Labels by visit have no rows of people.
    """
    entries: list[CasePrediction] = []
    for split, (scores, shifts) in scored.items():
        for target, of_volumes, shift in zip(data.targets, scores, shifts, strict=True):
            balanced = apply_logit_shift(of_volumes, shift) if target.fit_target.classes else of_volumes
            for each in LEVELS:
                if each == "person" and data.evaluation.cases.by_visit:
                    continue  # scores of several visits are not averaged
                entries += _at_level(data, target, split, each, level, balanced)
    write_case_predictions(path, entries)


def _at_level(
    data: TuningData,
    target: PreparedTarget,
    split: str,
    each: str,
    level: str,
    balanced: Float[np.ndarray, "n classes"],
) -> list[CasePrediction]:
    at, values = target.fit_target.indices[split], target.fit_target.values[split]
    by_visit = data.evaluation.cases.by_visit
    names = np.array(case_names(data.frame, each, by_visit), dtype=object)
    case_truth: dict[str, float] = {}
    if each == level and target.members is not None:
        cases = zip(target.test_target.indices[split], target.test_target.values[split], strict=True)
        case_truth = {names[target.members[case][0]]: value.item() for case, value in cases}
    entries = []
    for name in dict.fromkeys(names[at]):
        here = names[at] == name
        first, mean, truths = data.frame.iloc[at[here][0]], balanced[here].mean(axis=0), set(values[here].tolist())
        truth = case_truth.get(name, truths.pop() if len(truths) == 1 else None)
        decision = int(mean.argmax()) if target.fit_target.classes else float(mean[0])
        entries.append(
            CasePrediction(
                level=each,
                target=target.test_target.name,
                split=split,
                person_id=first["person_id"],
                eye="" if each == "person" else first["eye"],
                volume_id=first["volume_id"] if each == "volume" else "",
                volumes=int(here.sum()),
                truth="" if truth is None else _as_text(target, truth),
                predicted=_as_text(target, decision),
                classes=list(target.fit_target.classes),
                scores=mean.tolist(),
                visit=first["visit"] if by_visit else None,
            )
        )
    return entries


def _as_text(target: PreparedTarget, value: float | int) -> str:
    return target.fit_target.classes[int(value)] if target.fit_target.classes else repr(float(value))
