"""The leaderboard: entries embedded alike, chosen on validation, read on test once, compared, every fault named.

Order of work, which is the protocol: features; leak checks; labels; validation chooses; the look at the test set is
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
from octjepa.errors import UsageError
from octjepa.leaderboard.choose import ATTENTIVE, DEFAULT, Choice, Option, choose, note_on, read, without_test
from octjepa.leaderboard.details import details_of
from octjepa.leaderboard.embedding import PATTERNS, Featured, featured
from octjepa.leaderboard.entries import read_entries
from octjepa.leaderboard.measure import Arm, Training, compare, constant, rows_of, training_row
from octjepa.leaderboard.options import UNTRAINED, check_probes, options_of, sources_of, tokens_of
from octjepa.metrics import test_set_ledger
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.findings import BASELINES, Findings
from octjepa.probe.aggregation import Cases, group_cases, person_labels
from octjepa.probe.features import covariate_features, majority_predictions, plan_selection
from octjepa.probe.labels import LabelTable, read_labels
from octjepa.probe.subgroups import GROUP_COLUMNS, coverage_faults
from octjepa.probe.targets import Target, check_people, join_labels, test_set_hash
from octjepa.progress import bar
from octjepa.store import Store

COMMAND = "octjepa leaderboard"


@dataclass
class Board(Findings):
    """What a board says; `payload` is plain data for JSON and for the page.

    rows: a figure each, of an arm's mean over its seeds; comparisons: every arm against `reference`, with correction
    over all of them. trainings: every seed apart, and what validation chose. choices: every option it chose among.
    details: calibration, decisions, subgroups, vendors. protocol: what a case is and how its volumes became one.
    """

    reference: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    trainings: list[dict[str, Any]] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    protocol: dict[str, Any] = field(default_factory=dict)

    def payload(self) -> dict[str, Any]:
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
    probes: Sequence[str] = DEFAULT,
) -> Board:
    """Compares the entries `given`. Embeddings go to `folder`; the ledger beside the labels, or to `ledger_folder`.

    reference: the row that all others are compared with; default the untrained network of the first entry. level: what
    is a case, an eye's or a person's features being the mean of its volumes' (`protocol`). probes: what validation
    chooses among. Raises UsageError: entries, labels, targets, splits, a level or a probe that cannot be used, a
    reference that is on no row, no entry left without a leak, a ledger that cannot be written; and what embedding
    raises.
    """
    check_probes(probes)
    board = Board()
    entries = read_entries(given)
    targets = list(dict.fromkeys(targets))
    labels = read_labels(labels_path, targets)
    looks = ledger_folder or test_set_ledger.default_folder(Path(labels_path))
    test_set_ledger.check_writable(looks)
    names = [*dict.fromkeys(entry.arm for entry in entries)]
    if reference is not None and reference not in (*names, *BASELINES):
        raise UsageError(f"no row {reference!r} to compare with: the entries are {', '.join(names)}; also {UNTRAINED}")
    if store is not None:  # what is wrong with people or labels is told before the hours of embedding, not after them
        index = add_participants(store.table, store.participants)
        check_people(index)
        _joined(labels, index, group_cases(index, level, "features"), targets, task)
        if ATTENTIVE in probes:
            rasters = index[store.table["pattern"].isin(PATTERNS).to_numpy()].reset_index(drop=True)
            tokens_of(group_cases(rasters, level, "features"), rasters)
    found = _without_leaks(featured(entries, store, folder, ATTENTIVE in probes), board)
    tables = align_tables([one.table for one in found], board)
    volumes = tables[0].frame
    for text in check_people(volumes):
        board.add_note(text)
    cases = group_cases(volumes, level, "features")
    board.protocol = cases.about
    found = [replace(one, table=cases.aggregate(table)) for one, table in zip(found, tables, strict=True)]
    frame = found[0].table.frame
    tokens = tokens_of(cases, volumes) if ATTENTIVE in probes else None
    for text in labels.notes:
        board.add_note(text)
    for arm in dict.fromkeys(one.entry.arm for one in found if one.foreign):
        board.add_note(
            f"{arm}: its files do not say what it was pretrained on, so a leak of test people cannot be checked"
        )
    joined, left_out = _joined(labels, volumes, cases, targets, task)
    for text in left_out:
        board.add_note(text)
    person_ids = frame["person_id"].to_numpy(dtype=str)
    tested = np.concatenate([target.indices["test"] for target in joined])
    draws = Draws(person_ids[tested].tolist(), bootstrap, seed)
    board.reference = _reference(reference, found)
    with bar("board", len(joined) * (len(sources_of(found)) + 1), "row") as shown, threadpool_limits(1):
        chosen = {}
        for target in joined:
            for text in target.notes:
                board.add_note(text)
            groups = GROUP_COLUMNS if level == "volume" else GROUP_COLUMNS[:1]  # cases of several devices are no device
            for fault, text in coverage_faults(frame, labels, target, groups):
                board.add_fault(fault, text)
            board.add_note(note_on(target, person_ids))
            chosen[target.name] = _choices(target, found, probes, tokens, person_ids, seed, shown.advance)
        test_sets = {name: test_set_hash(labels, volumes, name) for name in chosen}
        measured = {name: [choice.option.fingerprint for _, _, choice in of] for name, of in chosen.items()}
        test_set_ledger.record_uses(looks, COMMAND, test_sets, measured, board)
        families = []
        for target in joined:
            families.append((target, _test(target, chosen[target.name], found, person_ids, draws, seed, board)))
            shown.advance()
    board.comparisons = compare(families, board.reference)
    return board


def _joined(
    labels: LabelTable, volumes: pd.DataFrame, cases: Cases, targets: Sequence[str], task: str
) -> tuple[list[Target], list[str]]:
    """The targets that can be measured and, with several, why others cannot. Raises UsageError where none can."""
    joined, left_out = [], []
    frame = cases.frame(volumes)
    for name in targets:
        try:
            if cases.level == "person":
                of_people, kind, notes = person_labels(labels, volumes, name, task)
                target = join_labels(of_people, frame, name, kind)
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


def _without_leaks(found: list[Featured], board: Board) -> list[Featured]:
    for one in found:
        if one.table.leaked:
            what = f"{one.entry.name} was pretrained on eyes of {one.table.leaked} people who are now in val or test"
            board.add_fault("leaked_person", f"{what}: its figures would be too good, so it is left out")
    kept = [one for one in found if not one.table.leaked]
    if not kept:
        said = "\n  ".join(fault["what"] for fault in board.faults)
        raise UsageError(
            f"leak: no entry is left to compare.\n  {said}\nGive the store the split that the encoders were trained "
            "with, or pretrain anew."
        )
    return kept


def _reference(asked: str | None, found: list[Featured]) -> str:
    left = {one.entry.arm for one in found}
    if asked is not None and asked not in (*left, *BASELINES):
        raise UsageError(f"{asked} was left out, so nothing can be compared with it: name another --reference")
    return asked or UNTRAINED


def _choices(
    target: Target,
    found: list[Featured],
    probes: Sequence[str],
    tokens: list[str] | None,
    person_ids: np.ndarray,
    seed: int,
    advance: Any,
) -> list[tuple[str, int, Choice]]:
    chosen = []
    how = plan_selection(without_test(target), person_ids, seed)
    for (name, number), views in sources_of(found).items():
        chosen.append((name, number, choose(options_of(views, probes, tokens), target, how)))
        advance()
    return chosen


def _test(
    target: Target,
    chosen: list[tuple[str, int, Choice]],
    found: list[Featured],
    person_ids: np.ndarray,
    draws: Draws,
    seed: int,
    board: Board,
) -> list[Arm]:
    """Predictions on the test volumes, once, and everything that is measured of them."""
    frame = found[0].table.frame
    how = plan_selection(target, person_ids, seed)
    if how.by == "fixed":
        board.add_note(f"{target.name}: too few people per class to choose settings; the middle of each grid is used")
    trainings = []
    for name, number, choice in chosen:
        said = read(choice.option, target, how)
        trainings.append(Training(name, number, choice.option, choice.validation, said))
        board.choices += [
            {"name": name, "seed": number, "target": target.name, "option": option, "validation": figure}
            for option, figure in choice.judged
        ]
        if said.probed.unconverged:
            board.add_note(f"{said.probed.unconverged} fit(s) of {name} for {target.name} stopped before convergence")
    covariates, notes = covariate_features(frame, target)
    for text in notes:
        board.add_note(text)
    option = Option("", "none", "linear", covariates)
    trainings.append(Training("covariates", 1, option, None, read(option, target, how)))
    trainings.append(Training.constant("majority", majority_predictions(target)))
    people = person_ids[target.indices["test"]].tolist()
    arms = [
        Arm(name, [one for one in trainings if one.name == name], target, draws, people)
        for name in dict.fromkeys(one.name for one in trainings)
    ]
    encoders = {one.entry.arm for one in found}
    for arm in arms:
        board.rows += rows_of(arm)
        if arm.name not in encoders:
            continue
        for one in arm.trainings:
            board.trainings.append(training_row(one, arm))
            what = constant(one, target)
            if what:
                board.add_fault("constant_predictor", what)
            board.details.append(details_of(one, target, frame, draws, seed))
    return arms
