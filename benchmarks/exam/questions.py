"""The questions of the exam by the protocol of `octjepa.evaluate`: truth as labels, test people opened and counted.

A question about eyes is a target. The truth of the phantoms is its label table, and `open_eyes` calls
`prepare_evaluation` and `Evaluation.open_test_set`. A question about tokens, surfaces or pairs of eyes has no label for
each case: `open_people` opens its test people as `octjepa segment` does. Both return the `TestSet` that every metric is
measured with. The ledger is in the cohort's folder, so it also counts the uses of the sealed cohort.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from octjepa.evaluate.labels import LabelTable
from octjepa.evaluate.protocol import Ledger, ProtocolSettings, TestSet, open_test_set, prepare_evaluation
from octjepa.evaluate.targets import Target
from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.findings import Fault, Findings
from octjepa.metrics.scores import Predictions

from .cohorts import Cohort
from .settings import RESAMPLES

_SEED = 0  # of the draws of test people
TRUTH = "eyes.tsv"


class _SilentFindings(Findings):
    """Findings that are not logged: every row of the exam uses the same open test people, and its pages say so."""

    def add_note(self, text: str) -> None:
        """Adds a note."""
        self.notes.append(text)

    def add_fault(self, kind: str, what: str) -> None:
        """Adds a fault."""
        self.faults.append(Fault(kind, what))


@dataclass(frozen=True)
class OpenedEyes:
    """Questions about eyes whose test people are open. targets: by question; left_out: why others have none."""

    targets: Mapping[str, Target]
    left_out: Mapping[str, str]
    test_set: TestSet

    def auroc(self, question: str, fits: Sequence[Float[np.ndarray, " test"]]) -> Estimate:
        """AUROC of log-odds, the mean over fits to several draws of labelled people."""
        target = self.targets[question]
        truth = target.values["test"]
        # The protocol expects probabilities, of which AUROC takes the order alone.
        predictions = [Predictions(truth, both, both) for both in (np.stack([-one, one], axis=1) for one in fits)]
        return self.test_set.estimate(target, "auroc", predictions)

    def regression(self, question: str, metric: str, fits: Sequence[Float[np.ndarray, " test"]]) -> Estimate:
        """A metric of predicted quantities, the mean over fits to several draws of labelled people."""
        target = self.targets[question]
        predictions = [Predictions(target.values["test"], one[:, None], one[:, None]) for one in fits]
        return self.test_set.estimate(target, metric, predictions)


def labels_of(cohort: Cohort, truth: Mapping[str, Bool[np.ndarray, " V"] | Float[np.ndarray, " V"]]) -> LabelTable:
    """The truth about the eyes of a cohort as a label table: of each question whether, or how much; NaN: no label."""
    keys = list(zip(cohort.table["person_id"], cohort.table["eye"], strict=True))
    values = {
        question: {key: _text(one) for key, one in zip(keys, of_eyes.tolist(), strict=True) if one == one}  # not NaN
        for question, of_eyes in truth.items()
    }
    return LabelTable(cohort.truth_folder / TRUTH, True, values, (), {})


def _text(value: float | bool) -> str:
    return str(int(value)) if isinstance(value, bool) else repr(value)


def open_eyes(
    cohort: Cohort, task: str, truth: Mapping[str, np.ndarray], kind: str, measured: Sequence[str]
) -> OpenedEyes:
    """Opens the test people of the questions in `truth` for a task of the exam.

    truth: by question, of every volume; NaN: the volume has no label. kind: "binary" or "regression". measured: what
    identifies each predictor (`test_set_ledger.fingerprint`). Raises UsageError: a person in two splits, or none of the
    questions can be learned and tested.
    """
    findings, settings = _SilentFindings(), ProtocolSettings(task=kind, resamples=RESAMPLES, seed=_SEED)
    evaluation = prepare_evaluation(cohort.table, labels_of(cohort, truth), list(truth), settings, findings)
    ledger = Ledger.of(cohort.truth_folder / TRUTH, cohort.uses, f"exam {task}")
    test_set = evaluation.open_test_set(ledger, {target.name: measured for target in evaluation.targets}, findings)
    targets = {target.name: target.test_target for target in evaluation.targets}
    return OpenedEyes(targets, evaluation.left_out, test_set)


def open_people(cohort: Cohort, task: str, tested: Int[np.ndarray, " n"], measured: Sequence[str]) -> TestSet:
    """Opens the volumes `tested` of a cohort for a task whose truth is not a label of each eye."""
    people = cohort.people[tested].tolist()
    ids = sorted(cohort.ids[volume] for volume in tested)
    test_set = hashlib.sha256("\x1f".join([cohort.name, task, *ids]).encode()).hexdigest()
    ledger = Ledger.of(cohort.truth_folder / TRUTH, cohort.uses, f"exam {task}")
    draws = Draws(people, RESAMPLES, _SEED)
    return open_test_set(ledger, {task: test_set}, {task: measured}, _SilentFindings(), draws, {task: people})
