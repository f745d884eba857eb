"""The leaderboard: entries embedded alike, selected on validation, tested once, compared, every fault named.

The order of work is the protocol: features; leak checks; labels; selection on validation; the use of the test set is
written into its ledger; only then are test predictions made and measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from octjepa.embed.alignment import align_tables
from octjepa.embed.embedding import add_participants
from octjepa.embed.table import complete_keys
from octjepa.encoders.external.prepared import PATTERNS
from octjepa.errors import UsageError, counted
from octjepa.evaluate.cases import group_cases
from octjepa.evaluate.features import TOKEN_PROBES, covariate_features, majority_predictions, plan_selection
from octjepa.evaluate.label_fractions import limit_target
from octjepa.evaluate.labels import LabelTable
from octjepa.evaluate.leaderboard.entries import EmbeddedCandidate, Entry, embed_entries, read_entries
from octjepa.evaluate.leaderboard.results import (
    LeaderboardRow,
    Training,
    compare,
    compare_with_strongest,
    constant_prediction,
    is_baseline,
    training_details,
)
from octjepa.evaluate.leaderboard.selection import (
    UNTRAINED,
    Choice,
    Option,
    check_probes,
    evaluate_option,
    feature_views,
    select_option,
    selection_note,
    token_volumes,
    view_options,
    without_test,
)
from octjepa.evaluate.protocol import (
    Evaluation,
    Ledger,
    ProtocolSettings,
    TestSet,
    prepare_evaluation,
    read_target_labels,
)
from octjepa.evaluate.results import (
    BoardRow,
    CaseProtocol,
    CorrectedPaired,
    RecipePaired,
    ScoredOption,
    SeedResult,
    TrainingDetails,
    WithFewerLabels,
    findings_json,
)
from octjepa.evaluate.subgroups import SubgroupColumn
from octjepa.evaluate.survival import DEFAULT_PROBES, check_survival
from octjepa.evaluate.targets import Target
from octjepa.metrics.findings import BASELINES, Findings
from octjepa.progress import bar
from octjepa.record import to_json
from octjepa.store import Store

Choices = dict[tuple[str, int], Choice]  # by row name and seed
COMMAND = "octjepa leaderboard"


@dataclass
class Board(Findings):
    """The results of a leaderboard; `payload` is plain data for JSON and for the page.

    rows: the mean of an entry over its seeds. comparisons: every entry minus `reference`, corrected over all of them.
    strongest: every entry minus the strongest baseline, which was selected by its test metric. trainings: every seed
    apart, and what validation selected. choices: every option it selected among. details: calibration, thresholds,
    subgroups, vendors. protocol: what a case is and how its volumes became one. labelled: by number of labelled
    training people, as text: rows, comparisons with the reference, and why targets are left out.
    """

    reference: str = ""
    rows: list[BoardRow] = field(default_factory=list)
    comparisons: list[CorrectedPaired] = field(default_factory=list)
    strongest: list[RecipePaired] = field(default_factory=list)
    trainings: list[SeedResult] = field(default_factory=list)
    choices: list[ScoredOption] = field(default_factory=list)
    details: list[TrainingDetails] = field(default_factory=list)
    protocol: CaseProtocol | None = None
    labelled: dict[str, WithFewerLabels] = field(default_factory=dict)

    def payload(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            **findings_json(self),
            "reference": self.reference,
            "rows": to_json(self.rows),
            "comparisons": to_json(self.comparisons),
            "strongest": to_json(self.strongest),
            "trainings": to_json(self.trainings),
            "choices": to_json(self.choices),
            "details": to_json(self.details),
            "protocol": {} if self.protocol is None else self.protocol.to_json(),
            "labelled": {count: fewer.to_json() for count, fewer in self.labelled.items()},
        }


@dataclass(frozen=True)
class BoardSettings:
    """How entries are compared.

    reference: the row that all others are compared with; default the randomly initialised network of the first entry.
    level: what a case is; the features of an eye or person are the mean of those of its volumes. probes: what
    validation selects among. labelled: numbers of training people; the selected options are fitted again on only their
    labels, with settings by cross-validation among these people. subgroups: columns by whose groups every training is
    measured as well. event: with task survival the column that says whether the event happened; the targets are times.
    """

    reference: str | None = None
    task: str = "auto"
    bootstrap: int = 2000
    seed: int = 0
    level: str = "volume"
    probes: Sequence[str] = DEFAULT_PROBES
    labelled: Sequence[int] = ()
    subgroups: Sequence[SubgroupColumn] = ()
    event: str | None = None

    def protocol(self) -> ProtocolSettings:
        """The part that the evaluation protocol needs."""
        return ProtocolSettings(
            self.task, self.level, "features", None, self.event, self.subgroups, self.bootstrap, self.seed
        )


def run_board(
    given: Sequence[str],
    labels_path: str | Path,
    targets: Sequence[str],
    store: Store | None,
    folder: Path,
    settings: BoardSettings | None = None,
    ledger_folder: Path | None = None,
) -> Board:
    """Compares the entries `given`. Embeddings go to `folder`; the ledger next to the labels, or to `ledger_folder`.

    Raises UsageError: entries, labels, targets, splits, a level or a probe that cannot be used, a reference that is on
    no row, no entry left without a leak, a ledger that cannot be written; and what embedding raises.
    """
    settings = settings or BoardSettings()
    probes, reference = settings.probes, settings.reference
    check_probes(probes)
    check_survival(settings.task, settings.event, probes)
    board = Board()
    entries = read_entries(given)
    targets = list(dict.fromkeys(targets))
    labels = read_target_labels(labels_path, targets, settings.event)
    ledger = Ledger.of(labels_path, ledger_folder, COMMAND)
    _check_reference(reference, entries)
    by_tokens = any(name in TOKEN_PROBES for name in probes)
    if store is not None:
        _check_before_embedding(store, labels, targets, settings, by_tokens)
    candidates = _without_leaks(embed_entries(entries, store, folder, by_tokens), board)
    names = {candidate.entry.name for candidate in candidates}
    if reference is not None and reference not in (*names, *BASELINES):
        raise UsageError(f"{reference} was left out, so nothing can be compared with it: name another --reference")
    board.reference = reference or UNTRAINED
    tables = align_tables([candidate.table for candidate in candidates], board)
    evaluation = prepare_evaluation(tables[0].frame, labels, targets, settings.protocol(), board)
    cases = evaluation.cases
    board.protocol = cases.about
    candidates = [
        replace(candidate, table=cases.aggregate(table)) for candidate, table in zip(candidates, tables, strict=True)
    ]
    token_ids = token_volumes(cases, evaluation.volumes) if by_tokens else None
    _report_origins(candidates, board)
    board.add_notes(evaluation.left_out.values())
    person_ids = evaluation.frame["person_id"].to_numpy(dtype=str)
    views = feature_views(candidates)
    choices: dict[str, Choices] = {}
    rows: list[LeaderboardRow] = []
    with bar("board", len(evaluation.targets) * (len(views) + 1), "row") as progress, threadpool_limits(1):
        for prepared in evaluation.targets:
            target = prepared.test_target
            prepared.report(board)
            board.add_note(selection_note(target, person_ids))
            selection = plan_selection(without_test(target), person_ids, settings.seed)
            choices[target.name] = {}
            for key, view in views.items():
                choices[target.name][key] = select_option(view_options(view, probes, token_ids), target, selection)
                progress.advance()
        limited = {count: _limited_targets(evaluation, person_ids, count, board) for count in settings.labelled}
        test_set = evaluation.open_test_set(ledger, _fingerprints(choices, limited), board)
        measuring = Measuring(evaluation, test_set)
        for prepared in evaluation.targets:
            rows += _test_target(prepared.test_target, choices[prepared.name], measuring, board)
            progress.advance()
        for count, (limited_targets, reasons) in limited.items():
            limited_rows = [
                row for target in limited_targets for row in _rows(target, choices[target.name], measuring, Findings())
            ]
            board.labelled[str(count)] = WithFewerLabels(
                tuple(row for limited_row in limited_rows for row in limited_row.results()),
                tuple(compare(limited_rows, board.reference)) if limited_rows else (),
                tuple(reasons),
            )
    board.comparisons = compare(rows, board.reference)
    board.strongest = compare_with_strongest(rows)
    return board


def _fingerprints(
    choices: Mapping[str, Choices], limited: Mapping[int, tuple[list[Target], list[str]]]
) -> dict[str, list[str]]:
    """By target, what the ledger knows the selected options by."""
    read = {name: [choice.option.fingerprint for choice in by_target.values()] for name, by_target in choices.items()}
    for count, (limited_targets, _) in limited.items():
        for target in limited_targets:
            read[target.name] += [
                f"{choice.option.fingerprint} labelled {count}" for choice in choices[target.name].values()
            ]
    return read


def _report_origins(candidates: Sequence[EmbeddedCandidate], board: Board) -> None:
    """Notes on encoders of other projects: their origin, and that leaks cannot be checked."""
    for name, about in {
        candidate.entry.name: candidate.about for candidate in candidates if candidate.about is not None
    }.items():
        board.add_note(
            f"{name}: its files do not say what it was pretrained on, so a leak of test people cannot be checked"
        )
        if about:
            board.add_note(f"{name}: " + ", ".join(f"{key} {value}" for key, value in about.items()))


def _check_reference(reference: str | None, entries: Sequence[Entry]) -> None:
    names = [*dict.fromkeys(entry.name for entry in entries)]
    if reference is not None and reference not in (*names, *BASELINES):
        raise UsageError(f"no row {reference!r} to compare with: the entries are {', '.join(names)}; also {UNTRAINED}")


def _check_before_embedding(
    store: Store, labels: LabelTable, targets: Sequence[str], settings: BoardSettings, by_tokens: bool
) -> None:
    """Reports what is wrong with people, labels or subgroups before the hours of embedding, not after them."""
    index = complete_keys(add_participants(store.table, store.participants))
    prepare_evaluation(index, labels, targets, settings.protocol(), Findings())
    if by_tokens:
        rasters = index[store.table["pattern"].isin(PATTERNS).to_numpy()].reset_index(drop=True)
        token_volumes(group_cases(rasters, settings.level, "features", by_visit=labels.by_visit), rasters)


def _without_leaks(candidates: Sequence[EmbeddedCandidate], board: Board) -> list[EmbeddedCandidate]:
    for candidate in candidates:
        if candidate.table.leaked:
            label, people = candidate.entry.label, candidate.table.leaked
            what = f"{label} was pretrained on eyes of {counted(people, 'person')} now in val or test"
            board.add_fault("leaked_person", f"{what}: its metrics would be too good, so it is left out")
    clean = [candidate for candidate in candidates if not candidate.table.leaked]
    if not clean:
        leaks = "\n  ".join(fault.what for fault in board.faults)
        raise UsageError(
            f"leak: no entry is left to compare.\n  {leaks}\nGive the store the split that the encoders were trained "
            "with, or pretrain anew."
        )
    return clean


def _limited_targets(
    evaluation: Evaluation, person_ids: np.ndarray, count: int, board: Board
) -> tuple[list[Target], list[str]]:
    """The targets with labels of `count` training people, and why others are left out."""
    limited, reasons = [], []
    for prepared in evaluation.targets:
        try:
            limited.append(limit_target(prepared.test_target, person_ids, count, evaluation.settings.seed))
        except UsageError as error:
            reasons.append(str(error))
    board.add_notes([f"{count} labelled people: {reason}; left out" for reason in reasons])
    return limited, reasons


@dataclass(frozen=True)
class Measuring:
    """The data that a row is measured with: the cases, and the opened test set."""

    evaluation: Evaluation
    test_set: TestSet

    @property
    def seed(self) -> int:
        """Of folds."""
        return self.evaluation.settings.seed


def _test_target(target: Target, choices: Choices, measuring: Measuring, board: Board) -> list[LeaderboardRow]:
    """The rows of a target: predictions on the test volumes, made once. Their metrics are added to `board`."""
    rows = _rows(target, choices, measuring, board)
    for (name, number), choice in choices.items():
        board.choices += [ScoredOption(name, number, target.name, option, value) for option, value in choice.scored]
    evaluation = measuring.evaluation
    for row in rows:
        board.rows += row.results()
        if is_baseline(row.name):
            continue
        board.trainings += row.training_results()
        for training in row.trainings:
            if sentence := constant_prediction(training, target):
                board.add_fault("constant_predictor", sentence)
            board.details.append(
                training_details(
                    training, target, evaluation.frame, measuring.test_set.draws, measuring.seed, evaluation.groups
                )
            )
    return rows


def _rows(target: Target, choices: Choices, measuring: Measuring, findings: Findings) -> list[LeaderboardRow]:
    """Every entry and baseline by its selected option, fitted to the labels of `target`."""
    frame, test_set = measuring.evaluation.frame, measuring.test_set
    selection = plan_selection(target, frame["person_id"].to_numpy(dtype=str), measuring.seed)
    if selection.by == "fixed":
        findings.add_note(
            f"{target.name}: too few people per class to choose settings; the middle of each grid is used"
        )
    trainings = []
    for (name, number), choice in choices.items():
        evaluated = evaluate_option(choice.option, target, selection)
        trainings.append(Training(name, number, choice.option, choice.validation, evaluated))
        if evaluated.fit.unconverged:
            findings.add_note(
                f"{counted(evaluated.fit.unconverged, 'fit')} of {name} for {target.name} stopped before convergence"
            )
    covariates, notes = covariate_features(frame, target)
    findings.add_notes(notes)
    option = Option("", "none", "linear", covariates)
    trainings.append(Training("covariates", 1, option, None, evaluate_option(option, target, selection)))
    trainings.append(Training.constant("majority", majority_predictions(target)))
    return [
        LeaderboardRow(
            name,
            [training for training in trainings if training.name == name],
            target,
            test_set.draws,
            test_set.people[target.name],
        )
        for name in dict.fromkeys(training.name for training in trainings)
    ]
