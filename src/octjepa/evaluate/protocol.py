"""The evaluation protocol: the sequence from labels to typed results, which every caller follows.

1. `Ledger.of`: the ledger of test-set uses can be written, so that a use that cannot be counted does not happen.
2. `prepare_evaluation`: labels; people in one split; multi-label columns; cases; targets; groups. `refuse_leaks`: the
   encoder was not pretrained on people of val or test.
3. The caller fits its candidates on train and selects on val, or inside train (`features.plan_selection`).
4. `open_test_set`: the only access to the test set. It writes one line per target into the ledger, before anything is
   predicted on test cases.
5. `TestSet.measure`: predictions become `Row`s with intervals over people. All candidates share the draws of
   people, so that every difference between two of them is paired (`Paired`).

Probes, leaderboard, fine-tuning, segmentation and the exam (benchmarks/exam) are callers: they bring candidates and get
typed results. Their differences are in docs/decisions/0006-evaluation-protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from octjepa.checkpoint.location import parse_location
from octjepa.embed.leakage import count_leaked_people, recorded_training_set
from octjepa.encoders.base import FrozenEncoder
from octjepa.errors import UsageError, counted
from octjepa.evaluate.cases import Cases, PreparedTarget, group_cases, prepare_targets
from octjepa.evaluate.labels import LabelTable, read_labels, split_multilabel
from octjepa.evaluate.measurements import MACRO, Measurements, PredictionsByKey, estimate_metric, measure_predictions
from octjepa.evaluate.results import ResultKey
from octjepa.evaluate.subgroups import Groups, SubgroupColumn, read_groups
from octjepa.evaluate.survival import join_events
from octjepa.evaluate.targets import Target, check_people, test_set_hash
from octjepa.metrics import test_set_ledger
from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.findings import Findings
from octjepa.metrics.scores import Predictions


@dataclass(frozen=True)
class ProtocolSettings:
    """The target to measure and its unit.

    task: one of `targets.TASKS`. level, several, visit_order: see `cases`. event: with task survival, the column that
    says whether the event happened; the targets are times. subgroups: columns by whose groups results are measured.
    resamples: of the bootstrap over people.
    """

    task: str = "auto"
    level: str = "volume"
    several: str = "features"
    visit_order: Mapping[str, float] | None = None
    event: str | None = None
    subgroups: Sequence[SubgroupColumn] = ()
    resamples: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class Ledger:
    """The place that counts uses of test sets, and the command that uses them."""

    folder: Path
    command: str

    @classmethod
    def of(cls, labels: str | Path, folder: Path | None, command: str) -> Ledger:
        """The ledger in `folder`, default next to the labels. Raises UsageError: it cannot be written."""
        ledger = cls(folder or test_set_ledger.default_folder(Path(labels)), command)
        test_set_ledger.check_writable(ledger.folder)
        return ledger


def refuse_leaks(leaked: int, encoder: str, remedy: str) -> None:
    """Raises UsageError if `leaked` people, whom the encoder was pretrained on, are in val or test."""
    if leaked:
        raise UsageError(
            f"leak: {encoder} was pretrained on eyes of {counted(leaked, 'person')} now in val or test, so the results "
            f"would be too good. Give the store the split it was trained with, or {remedy}"
        )


def refuse_pretraining_subjects(volumes: pd.DataFrame, encoder: FrozenEncoder, checkpoint: str | Path) -> None:
    """`refuse_leaks` of an encoder: `volumes` (of a store) against the volumes that it recorded in its pretraining."""
    leaked = count_leaked_people(volumes, recorded_training_set(encoder.recorded_training, parse_location(checkpoint)))
    refuse_leaks(leaked, f"the encoder of {checkpoint}", "take another encoder")


def read_target_labels(path: str | Path, targets: Sequence[str], event: str | None = None) -> LabelTable:
    """The labels of `targets`; with `event` as signed times.

    Raises UsageError as `read_labels` and `join_events`, and for a target with the name of the mean over targets.
    """
    if MACRO in targets:
        raise UsageError(f"{path}: results name the mean over targets {MACRO!r}; rename the column of that name")
    labels = read_labels(path, targets if event is None else [*targets, event])
    return labels if event is None else join_events(labels, targets, event)


@dataclass(frozen=True)
class Candidate:
    """A fitted predictor of one target: whose result it is, and its predictions of the target's test cases."""

    key: ResultKey
    target: PreparedTarget
    predictions: Predictions

    @classmethod
    def of_fit(cls, key: ResultKey, target: PreparedTarget, predictions: Predictions) -> Candidate:
        """From predictions of `target.fit_target`'s test volumes."""
        return cls(key, target, target.predictions(predictions))


@dataclass(frozen=True)
class Evaluation:
    """Everything that is fixed before a predictor exists.

    volumes: the table of volumes; frame: of its cases, which targets, people and groups point into. test_sets: by
    target, what the ledger knows its test set by. left_out: by name, why targets cannot be measured. names: all
    targets that were requested, in order.
    """

    volumes: pd.DataFrame
    cases: Cases
    targets: list[PreparedTarget]
    test_sets: Mapping[str, str]
    groups: Groups
    left_out: Mapping[str, str]
    names: Sequence[str]
    settings: ProtocolSettings

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row for each case."""
        return self.cases.frame(self.volumes)

    @cached_property
    def people(self) -> dict[str, list[str]]:
        """By target, the people of its test cases, in order."""
        ids = self.frame["person_id"].to_numpy(dtype=str)
        return {target.name: ids[target.test_target.indices["test"]].tolist() for target in self.targets}

    @cached_property
    def draws(self) -> Draws:
        """The draws of test people that all results share."""
        people = [person for ids in self.people.values() for person in ids]
        return Draws(people, self.settings.resamples, self.settings.seed)

    def with_targets(self, targets: Sequence[PreparedTarget]) -> Evaluation:
        """The same cases with other targets: some of these, or these with fewer labels."""
        test_sets = {target.name: self.test_sets[target.name] for target in targets}
        return replace(self, targets=list(targets), test_sets=test_sets)

    def report_targets(self, findings: Findings) -> None:
        """The targets that are left out, and the data that the others lack."""
        targets = {target.name: target for target in self.targets}
        for name in self.names:
            if name in self.left_out:
                findings.add_note(self.left_out[name])
            elif name in targets:
                targets[name].report(findings)

    def open_test_set(self, ledger: Ledger, measured: Mapping[str, Sequence[str]], findings: Findings) -> TestSet:
        """Records the use of every target's test set and opens it (`open_test_set`); `measured`: by target.

        The same predictor measured as another task, or on mean scores by another level, is another use.
        """
        level = f" scores by {self.cases.level}" if self.cases.averages_scores else ""
        ways = {target.name: target.test_target.task + level for target in self.targets}
        by_way = {
            name: [f"{identity} {ways[name]}" for identity in identities] for name, identities in measured.items()
        }
        return open_test_set(ledger, self.test_sets, by_way, findings, self.draws, self.people)


def prepare_evaluation(
    volumes: pd.DataFrame,
    labels: LabelTable,
    targets: Sequence[str],
    settings: ProtocolSettings,
    findings: Findings,
) -> Evaluation:
    """Checks people, joins labels to the volumes, groups them to cases, and prepares every target.

    labels: of `read_target_labels`. Notes on people and labels go to `findings`; those on targets are for
    `Evaluation.report_targets`. Raises UsageError: a person in two splits, an empty split, an unknown level or rule,
    no target that can be measured (of a single target its own error), a column of subgroups that does not exist.
    """
    findings.add_notes(check_people(volumes))
    findings.add_notes(labels.notes)
    names, task = list(targets), settings.task
    if task == "multilabel":
        labels, names = split_multilabel(labels, names)
        task = "binary"
    cases = group_cases(volumes, settings.level, settings.several, settings.visit_order, labels.by_visit)
    prepared, left_out = prepare_targets(labels, volumes, cases, names, task, settings.seed)
    test_sets = {target.name: test_set_hash(labels, volumes, target.name) for target in prepared}
    groups = read_groups(settings.subgroups, labels.path, cases.frame(volumes))
    return Evaluation(volumes, cases, prepared, test_sets, groups, left_out, names, settings)


@dataclass(frozen=True)
class TestSet:
    """An opened test set: draws of its people, and by target the people of its test cases, in order.

    Only `open_test_set` makes it, after the use was written into the ledger.
    """

    __test__ = False  # not a test class, although its name begins like one

    draws: Draws
    people: Mapping[str, Sequence[str]]

    def estimate(self, target: Target, metric: str, predictions: Sequence[Predictions]) -> Estimate:
        """`metric` of a target's test cases: the mean over fits to several draws of labelled people."""
        return estimate_metric(metric, predictions, self.draws, self.people[target.name], target.label_hash)

    def measure(
        self, candidates: Iterable[Candidate], metrics: Sequence[str] | None, findings: Findings
    ) -> tuple[PredictionsByKey, Measurements]:
        """Predictions by key, and their rows with intervals. `metrics`: None for all of the task."""
        predicted = {candidate.key: (candidate.target.test_target, candidate.predictions) for candidate in candidates}
        return predicted, measure_predictions(predicted, self.people, self.draws, metrics, findings)


def open_test_set(
    ledger: Ledger,
    test_sets: Mapping[str, str],
    measured: Mapping[str, Sequence[str]],
    findings: Findings,
    draws: Draws,
    people: Mapping[str, Sequence[str]],
) -> TestSet:
    """The only access to the test sets: writes a line for each into the ledger, then gives what is measured with.

    test_sets: by target, the hash of its test volumes and labels. measured: by target, what identifies each predictor
    (`test_set_ledger.fingerprint`). How often each test set was used goes to `findings`, with a fault for those that
    were used before. Raises UsageError: a ledger that is damaged or cannot be written.
    """
    test_set_ledger.record_uses(ledger.folder, ledger.command, test_sets, measured, findings)
    return TestSet(draws, people)
