"""Pairs of visits of an eye: the change of its features, and the change of its labels.

In: an embedding table, the order of visits, and label tables with a column `visit`. Out: an embedding table with an
entry for each pair, whose features are the features of the later visit minus the features of the earlier visit, and a
label table that is keyed by person, eye and the later visit. Both are read by every evaluation as they are, so splits
and intervals stay by person. Features of several volumes of a visit are averaged first, and eyes that are unknown are
left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from octjepa.embed.table import Embeddings
from octjepa.errors import UsageError, counted
from octjepa.evaluate.labels import LabelTable, numbers_of

Pairing = Literal["consecutive", "first"]


@dataclass(frozen=True)
class VisitPair:
    """Two visits of an eye: their pseudonyms, and the order of the later visit minus the order of the earlier visit."""

    person_id: str
    eye: str
    earlier: str
    later: str
    interval: float


@dataclass(frozen=True)
class VisitPairs:
    """The pairs and the table of their changes, in the same order. notes: volumes and eyes that are in no pair."""

    pairs: tuple[VisitPair, ...]
    table: Embeddings
    notes: tuple[str, ...]


def pair_visits(table: Embeddings, order: Mapping[str, float], pairing: Pairing = "consecutive") -> VisitPairs:
    """Pairs of visits of each eye, and the change of every feature between them.

    `order` maps pseudonyms of visits to numbers, in days or another unit. `pairing` joins each visit with the next one,
    or the first one with each later one. Raises UsageError: a visit of an eye with several has no order, two visits
    have the same order, or no eye has two visits.
    """
    frame = table.frame
    members: dict[tuple[str, str], dict[str, list[int]]] = {}
    has_both = (frame["eye"] != "") & (frame["visit"] != "")
    for position in np.flatnonzero(has_both):
        entry = frame.iloc[position]
        members.setdefault((entry["person_id"], entry["eye"]), {}).setdefault(entry["visit"], []).append(int(position))
    several = {key: visits for key, visits in members.items() if len(visits) > 1}
    names = {visit for visits in several.values() for visit in visits}
    if unknown := names - set(order):
        raise UsageError(
            f"{len(unknown)} of {len(names)} visits of eyes with several have no order: give --visit-order a table "
            "with the columns visit and order, and person_id if it names visits as the scans' files do"
        )
    pairs: list[VisitPair] = []
    for (person, eye), visits in sorted(several.items()):
        ordered = sorted(visits, key=lambda visit: order[visit])
        if len({order[visit] for visit in ordered}) < len(ordered):
            raise UsageError("two visits of one eye have the same order: their change has no direction")
        joined = pairwise(ordered) if pairing == "consecutive" else ((ordered[0], later) for later in ordered[1:])
        pairs += [VisitPair(person, eye, earlier, later, order[later] - order[earlier]) for earlier, later in joined]
    if not pairs:
        raise UsageError(f"no eye of {len(members)} with a known visit has two visits: there is no change to measure")
    once = len(members) - len(several)
    notes = [f"{counted(len(pairs), 'pair')} of visits of {counted(len(several), 'eye')}; one visit: {once}"]
    if left_out := int((~has_both).sum()):
        notes.append(f"in no pair, because eye or visit is not known: {counted(left_out, 'volume')}")
    return VisitPairs(tuple(pairs), _changes(table, pairs, members), tuple(notes))


def _changes(
    table: Embeddings, pairs: Sequence[VisitPair], members: Mapping[tuple[str, str], Mapping[str, list[int]]]
) -> Embeddings:
    """The table of the pairs: keys of the later visit, and the difference of every feature."""
    sides = [
        (members[pair.person_id, pair.eye][pair.earlier], members[pair.person_id, pair.eye][pair.later])
        for pair in pairs
    ]

    def difference(block: np.ndarray) -> np.ndarray:
        changes = [block[later].mean(axis=0) - block[earlier].mean(axis=0) for earlier, later in sides]
        return np.stack(changes).astype(np.float32)

    frame = table.frame.iloc[[later[0] for _, later in sides]].reset_index(drop=True)
    for column in ("volume_id", "content_hash"):
        texts = table.frame[column]
        frame[column] = [
            _joined_hash([*texts.iloc[earlier], "to", *texts.iloc[later]])[: 16 if column == "volume_id" else 64]
            for earlier, later in sides
        ]
    return replace(
        table,
        frame=frame,
        vector=difference(table.vector),
        untrained=difference(table.untrained),
        histogram=difference(table.histogram),
        intensity=None if table.intensity is None else difference(table.intensity),
    )


def _joined_hash(parts: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def change_labels(
    pairs: Sequence[VisitPair], labels: LabelTable, targets: Sequence[str]
) -> tuple[list[str], list[list[object]]]:
    """(columns, rows) of the label table of `pairs`, keyed by person, eye and the later visit.

    For each target `NAME_before`, `NAME_after`, and `NAME_change` of numbers; a pair without both values has empty
    cells. A row without a visit holds for the visits that have no row. `interval` is the difference in
    order. Raises UsageError: the labels are not by visit, or fit no pair.
    """
    if not labels.by_visit:
        raise UsageError(f"{labels.path} has no column visit with values: a change needs a label for each visit")
    columns = ["person_id", "eye", "visit", "interval"]
    for target in targets:
        columns += [f"{target}_before", f"{target}_after", f"{target}_change"]
    rows: list[list[object]] = []
    complete = 0
    for pair in pairs:
        row: list[object] = [pair.person_id, pair.eye, pair.later, pair.interval]
        for target in targets:
            visits, always = labels.visits[target], labels.values[target].get((pair.person_id, pair.eye))
            before, after = (
                visits.get((pair.person_id, pair.eye, visit), always) for visit in (pair.earlier, pair.later)
            )
            if before is None or after is None:
                row += [None, None, None]
                continue
            complete += 1
            numbers = numbers_of([before, after])
            row += [before, after, None if numbers is None else float(numbers[1] - numbers[0])]
        rows.append(row)
    if not complete:
        raise UsageError(
            f"{labels.path}: no pair of {len(pairs)} has a label at both visits: expected a row "
            "for each visit, named as in the store or as the scans' files do"
        )
    return columns, rows
