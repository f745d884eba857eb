"""The leaderboard: entries embedded alike, selected on validation, tested once, compared, every fault named.

The order of work is the protocol: features; leak checks; labels; selection on validation; the use of the test set is
written into its ledger; only then are test predictions made and measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from octjepa.embed.alignment import align_tables
from octjepa.embed.embedding import add_participants
from octjepa.embed.external import PATTERNS
from octjepa.errors import UsageError
from octjepa.evaluate.cases import Cases, group_cases, person_labels
from octjepa.evaluate.features import TOKEN_PROBES, covariate_features, majority_predictions, plan_selection
from octjepa.evaluate.label_fractions import limit_target
from octjepa.evaluate.labels import LabelTable, read_labels
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
from octjepa.evaluate.subgroup_columns import Groups, SubgroupColumn, read_groups
from octjepa.evaluate.subgroups import GROUP_COLUMNS, coverage_faults
from octjepa.evaluate.survival import DEFAULT_PROBES, check_survival, join_events
from octjepa.evaluate.targets import Target, check_people, join_labels, test_set_hash
from octjepa.metrics import test_set_ledger
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.findings import BASELINES, Findings
from octjepa.progress import bar
from octjepa.store import Store

COMMAND = "octjepa leaderboard"


@dataclass
class Board(Findings):
    """The results of a leaderboard; `payload` is plain data for JSON and for the page.

    rows: a figure each, the mean of an entry over its seeds; comparisons: every entry minus `reference`, corrected over
    all of them; strongest: every entry minus the strongest baseline, which was selected by its test figure. trainings:
    every seed apart, and what validation selected. choices: every option it selected among. details: calibration,
    thresholds, subgroups, vendors. protocol: what a case is and how its volumes became one. labelled:
    by number of labelled training people, as text: rows, comparisons with the reference, and why targets are left out.
    """

    reference: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    strongest: list[dict[str, Any]] = field(default_factory=list)
    trainings: list[dict[str, Any]] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    protocol: dict[str, Any] = field(default_factory=dict)
    labelled: dict[str, dict[str, Any]] = field(default_factory=dict)

    def payload(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dict(vars(self))


def run_board(
    given: Sequence[str],
    labels_path: str | Path,
    targets: Sequence[str],
    store: Store | None,
    folder: Path,
    reference: str | None = None,
    task: str = "auto",
    ledger_folder: Path | None = None,
    bootstrap: int = 2000,
    seed: int = 0,
    level: str = "volume",
    probes: Sequence[str] = DEFAULT_PROBES,
    labelled: Sequence[int] = (),
    work: Path | None = None,
    subgroups: Sequence[SubgroupColumn] = (),
    event: str | None = None,
) -> Board:
    """Compares the entries `given`. Embeddings go to `folder`; the ledger beside the labels, or to `ledger_folder`.

    reference: the row that all others are compared with; default the untrained network of the first entry. level: what
    is a case, an eye's or a person's features being the mean of its volumes' (`protocol`). probes: what validation
    selects among. labelled: numbers of training people on whose labels alone the selected options are fitted again,
    their settings by cross-validation among these people. work: where the board is written; a use of the test set whose
    board was not finished there is not counted again (`test_set_ledger.record_uses`). subgroups: columns by whose
    groups every training is measured, too. event: with task survival the column that says whether the event happened,
    the targets being times.

    Raises UsageError: entries, labels, targets, splits, a level or a probe that cannot be used, a reference that is on
    no row, no entry left without a leak, a ledger that cannot be written; and what embedding raises.
    """
    check_probes(probes)
    check_survival(task, event, probes)
    board = Board()
    entries = read_entries(given)
    targets = list(dict.fromkeys(targets))
    labels = read_labels(labels_path, targets if event is None else [*targets, event])
    if event is not None:
        labels = join_events(labels, targets, event)
    ledger = ledger_folder or test_set_ledger.default_folder(Path(labels_path))
    test_set_ledger.check_writable(ledger)
    _check_reference(reference, entries)
    if subgroups and store is not None:  # a wrong column is reported before the hours of embedding
        read_groups(subgroups, labels_path, add_participants(store.table, store.participants))
    by_tokens = any(name in TOKEN_PROBES for name in probes)
    if store is not None:
        _check_before_embedding(store, labels, targets, task, level, by_tokens)
    candidates = _without_leaks(embed_entries(entries, store, folder, by_tokens), board)
    names = {candidate.entry.name for candidate in candidates}
    if reference is not None and reference not in (*names, *BASELINES):
        raise UsageError(f"{reference} was left out, so nothing can be compared with it: name another --reference")
    board.reference = reference or UNTRAINED
    tables = align_tables([candidate.table for candidate in candidates], board)
    volumes = tables[0].frame
    board.add_notes(check_people(volumes))
    cases = group_cases(volumes, level, "features")
    board.protocol = cases.about
    candidates = [
        replace(candidate, table=cases.aggregate(table)) for candidate, table in zip(candidates, tables, strict=True)
    ]
    frame = candidates[0].table.frame
    groups_of = read_groups(subgroups, labels_path, frame)
    token_ids = token_volumes(cases, volumes) if by_tokens else None
    board.add_notes(labels.notes)
    for name, about in {one.entry.name: one.about for one in candidates if one.about is not None}.items():
        board.add_note(
            f"{name}: its files do not say what it was pretrained on, so a leak of test people cannot be checked"
        )
        if about:
            board.add_note(f"{name}: " + ", ".join(f"{key} {value}" for key, value in about.items()))
    joined, left_out = _join_targets(labels, volumes, cases, targets, task)
    board.add_notes(left_out)
    person_ids = frame["person_id"].to_numpy(dtype=str)
    tested = np.concatenate([target.indices["test"] for target in joined])
    draws = Draws(person_ids[tested].tolist(), bootstrap, seed)
    views = feature_views(candidates)
    choices: dict[str, dict[tuple[str, int], Choice]] = {}
    rows: list[LeaderboardRow] = []
    with bar("board", len(joined) * (len(views) + 1), "row") as progress, threadpool_limits(1):
        for target in joined:
            board.add_notes(target.notes)
            groups = (
                GROUP_COLUMNS if level == "volume" else GROUP_COLUMNS[:1]
            )  # cases of several devices have no device
            for kind, text in coverage_faults(frame, labels, target, groups):
                board.add_fault(kind, text)
            board.add_note(selection_note(target, person_ids))
            selection = plan_selection(without_test(target), person_ids, seed)
            choices[target.name] = {}
            for key, own in views.items():
                choices[target.name][key] = select_option(view_options(own, probes, token_ids), target, selection)
                progress.advance()
        test_sets = {name: test_set_hash(labels, volumes, name) for name in choices}
        limited = {count: _limited_targets(joined, person_ids, count, seed, board) for count in labelled}
        read = {name: [choice.option.fingerprint for choice in made.values()] for name, made in choices.items()}
        for count, some in limited.items():
            for target in some:
                read[target.name] += [
                    f"{choice.option.fingerprint} labelled {count}" for choice in choices[target.name].values()
                ]
        test_set_ledger.record_uses(ledger, COMMAND, test_sets, read, board, work)
        for target in joined:
            rows += _test_target(target, choices[target.name], frame, draws, seed, board, groups_of)
            progress.advance()
        for count, some in limited.items():
            found = [
                row for target in some for row in _rows(target, choices[target.name], frame, draws, seed, Findings())
            ]
            board.labelled[str(count)] |= {
                "rows": [figure for row in found for figure in row.figures()],
                "comparisons": compare(found, board.reference),
            }
    board.comparisons = compare(rows, board.reference)
    board.strongest = compare_with_strongest(rows)
    return board


def _check_reference(reference: str | None, entries: Sequence[Entry]) -> None:
    names = [*dict.fromkeys(entry.name for entry in entries)]
    if reference is not None and reference not in (*names, *BASELINES):
        raise UsageError(f"no row {reference!r} to compare with: the entries are {', '.join(names)}; also {UNTRAINED}")


def _check_before_embedding(
    store: Store, labels: LabelTable, targets: Sequence[str], task: str, level: str, by_tokens: bool
) -> None:
    """Reports what is wrong with people or labels before the hours of embedding, not after them."""
    index = add_participants(store.table, store.participants)
    check_people(index)
    _join_targets(labels, index, group_cases(index, level, "features"), targets, task)
    if by_tokens:
        rasters = index[store.table["pattern"].isin(PATTERNS).to_numpy()].reset_index(drop=True)
        token_volumes(group_cases(rasters, level, "features"), rasters)


def _join_targets(
    labels: LabelTable, volumes: pd.DataFrame, cases: Cases, targets: Sequence[str], task: str
) -> tuple[list[Target], list[str]]:
    """The targets that can be measured and, with several, why others cannot. Raises UsageError where none can."""
    joined, left_out = [], []
    frame = cases.frame(volumes)
    for name in targets:
        try:
            if cases.level == "person":
                by_person, kind, notes = person_labels(labels, volumes, name, task)
                target = join_labels(by_person, frame, name, kind)
                joined.append(replace(target, notes=(*notes, *target.notes)))
            else:
                joined.append(join_labels(labels, frame, name, task))
        except UsageError as error:
            if len(targets) == 1:
                raise
            left_out.append(f"target {name} is left out: {error}")
    if not joined:
        raise UsageError(f"none of the {len(targets)} targets can be measured:\n  " + "\n  ".join(left_out))
    return joined, left_out


def _without_leaks(candidates: Sequence[EmbeddedCandidate], board: Board) -> list[EmbeddedCandidate]:
    for candidate in candidates:
        if candidate.table.leaked:
            label, people = candidate.entry.label, candidate.table.leaked
            what = f"{label} was pretrained on eyes of {people} people who are now in val or test"
            board.add_fault("leaked_person", f"{what}: its figures would be too good, so it is left out")
    clean = [candidate for candidate in candidates if not candidate.table.leaked]
    if not clean:
        leaks = "\n  ".join(fault["what"] for fault in board.faults)
        raise UsageError(
            f"leak: no entry is left to compare.\n  {leaks}\nGive the store the split that the encoders were trained "
            "with, or pretrain anew."
        )
    return clean


def _limited_targets(
    targets: Sequence[Target], person_ids: np.ndarray, count: int, seed: int, board: Board
) -> list[Target]:
    """The targets with labels of `count` training people; why others are left out goes to `board`."""
    limited, reasons = [], []
    for target in targets:
        try:
            limited.append(limit_target(target, person_ids, count, seed))
        except UsageError as error:
            reasons.append(str(error))
    board.labelled[str(count)] = {"rows": [], "comparisons": [], "left_out": reasons}
    board.add_notes([f"{count} labelled people: {reason}; left out" for reason in reasons])
    return limited


def _test_target(
    target: Target,
    choices: dict[tuple[str, int], Choice],
    frame: pd.DataFrame,
    draws: Draws,
    seed: int,
    board: Board,
    subgroups: Groups,
) -> list[LeaderboardRow]:
    """The rows of a target: predictions on the test volumes, made once. Their figures are added to `board`."""
    rows = _rows(target, choices, frame, draws, seed, board)
    for (name, number), choice in choices.items():
        board.choices += [
            {"name": name, "seed": number, "target": target.name, "option": option, "validation": figure}
            for option, figure in choice.scored
        ]
    for row in rows:
        board.rows += row.figures()
        if is_baseline(row.name):
            continue
        board.trainings += row.training_figures()
        for training in row.trainings:
            if sentence := constant_prediction(training, target):
                board.add_fault("constant_predictor", sentence)
            board.details.append(training_details(training, target, frame, draws, seed, subgroups))
    return rows


def _rows(
    target: Target,
    choices: dict[tuple[str, int], Choice],
    frame: pd.DataFrame,
    draws: Draws,
    seed: int,
    findings: Findings,
) -> list[LeaderboardRow]:
    """Every entry and baseline by its selected option, fitted to the labels of `target`."""
    person_ids = frame["person_id"].to_numpy(dtype=str)
    selection = plan_selection(target, person_ids, seed)
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
                f"{evaluated.fit.unconverged} fit(s) of {name} for {target.name} stopped before convergence"
            )
    covariates, notes = covariate_features(frame, target)
    findings.add_notes(notes)
    option = Option("", "none", "linear", covariates)
    trainings.append(Training("covariates", 1, option, None, evaluate_option(option, target, selection)))
    trainings.append(Training.constant("majority", majority_predictions(target)))
    people = person_ids[target.indices["test"]].tolist()
    return [
        LeaderboardRow(name, [training for training in trainings if training.name == name], target, draws, people)
        for name in dict.fromkeys(training.name for training in trainings)
    ]
