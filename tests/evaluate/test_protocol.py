"""The protocol opens the test set once, after the use is in the ledger, and refuses what cannot be evaluated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from octjepa.errors import UsageError
from octjepa.evaluate.features import majority_predictions
from octjepa.evaluate.protocol import (
    Candidate,
    Ledger,
    ProtocolSettings,
    prepare_evaluation,
    read_target_labels,
    refuse_leaks,
)
from octjepa.evaluate.results import ResultKey
from octjepa.metrics.findings import Findings
from octjepa.metrics.scores import Predictions

Cohort = Callable[..., tuple[pd.DataFrame, pd.DataFrame]]


def test_rows_come_from_an_opened_test_set_whose_use_is_in_the_ledger(cohort: Cohort, tmp_path: Path) -> None:
    frame, labels = cohort(people=60)
    labels.to_csv(tmp_path / "labels.tsv", sep="\t", index=False)
    findings = Findings()
    table = read_target_labels(tmp_path / "labels.tsv", ["lesion0"])
    evaluation = prepare_evaluation(frame, table, ["lesion0"], ProtocolSettings(resamples=50), findings)
    (target,) = evaluation.targets
    ledger = Ledger.of(tmp_path / "labels.tsv", None, "octjepa test")
    key = ResultKey("majority", "lesion0", "constant", "none")
    test_set = evaluation.open_test_set(ledger, {"lesion0": ["one"]}, findings)
    (file,) = ledger.folder.iterdir()
    assert json.loads(file.read_text())["command"] == "octjepa test"
    candidate = Candidate(key, target, majority_predictions(target.test_target))
    predicted, measured = test_set.measure([candidate], ["auroc"], findings)
    assert [(row.key, row.metric, row.value) for row in measured.rows] == [(key, "auroc", 0.5)]
    assert measured.rows[0].n == len(evaluation.people["lesion0"]) == len(predicted[key][1].truth)
    assert findings.uses[0].looks == 1


def test_several_draws_of_labelled_subjects_give_the_mean_on_the_same_resamples(cohort: Cohort, tmp_path: Path) -> None:
    frame, labels = cohort(people=60)
    labels.to_csv(tmp_path / "labels.tsv", sep="\t", index=False)
    table = read_target_labels(tmp_path / "labels.tsv", ["lesion0"])
    evaluation = prepare_evaluation(frame, table, ["lesion0"], ProtocolSettings(resamples=50), Findings())
    target = evaluation.targets[0].test_target
    test_set = evaluation.open_test_set(
        Ledger.of(tmp_path / "labels.tsv", None, "octjepa test"), {"lesion0": ["one"]}, Findings()
    )
    truth, rng = target.values["test"], np.random.default_rng(0)
    draws = [Predictions(truth, scores, scores) for scores in rng.random((3, len(truth), 2))]
    each = [test_set.estimate(target, "auroc", [one]) for one in draws]
    mean = test_set.estimate(target, "auroc", draws)
    assert mean.value == pytest.approx(np.mean([one.value for one in each]))
    assert mean.samples == pytest.approx(np.mean([one.samples for one in each], axis=0))
    assert (mean.draws_id, mean.label_hash) == (evaluation.draws.id, target.label_hash)


def test_a_damaged_ledger_keeps_the_test_set_closed(cohort: Cohort, tmp_path: Path) -> None:
    frame, labels = cohort(people=60)
    labels.to_csv(tmp_path / "labels.tsv", sep="\t", index=False)
    table = read_target_labels(tmp_path / "labels.tsv", ["lesion0"])
    evaluation = prepare_evaluation(frame, table, ["lesion0"], ProtocolSettings(resamples=50), Findings())
    ledger = Ledger.of(tmp_path / "labels.tsv", None, "octjepa test")
    evaluation.open_test_set(ledger, {"lesion0": ["one"]}, Findings())
    (file,) = ledger.folder.iterdir()
    file.write_text("{not json\n")
    with pytest.raises(UsageError, match="is damaged"):
        evaluation.open_test_set(ledger, {"lesion0": ["one"]}, Findings())


def test_pretraining_on_test_people_is_refused() -> None:
    refuse_leaks(0, "the encoder", "take another")
    with pytest.raises(UsageError, match="the encoder was pretrained on eyes of 3 people now in val or test"):
        refuse_leaks(3, "the encoder", "take another")


def test_of_several_targets_those_that_cannot_be_measured_are_left_out(cohort: Cohort, tmp_path: Path) -> None:
    frame, labels = cohort(people=60)
    labels.assign(same=1).to_csv(tmp_path / "labels.tsv", sep="\t", index=False)
    table = read_target_labels(tmp_path / "labels.tsv", ["lesion0", "same"])
    evaluation = prepare_evaluation(frame, table, ["lesion0", "same"], ProtocolSettings(), Findings())
    assert [target.name for target in evaluation.targets] == ["lesion0"]
    assert evaluation.test_sets.keys() == {"lesion0"}
    assert evaluation.left_out.keys() == {"same"}
    with pytest.raises(UsageError, match="have the same value"):
        prepare_evaluation(frame, table, ["same"], ProtocolSettings(), Findings())
