"""The people in a store and how they got there, as counts; and what became of every file, by name.

A cohort of ten thousand files would make a page that no browser opens quickly, so the tables of files are cut and say
so: they show `MAX_VOLUMES` volumes, those with a doubt first, and `MAX_FILES_PER_REASON` files of each reason. The
store's own files hold all of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octjepa.cohort.flow import CohortFlow, Counts, Stage, cohort_table, count_entries
from octjepa.errors import counted
from octjepa.ingest.source_flow import RefusedFiles, source_flow
from octjepa.notes import read_notes
from octjepa.reasons import REASONS
from octjepa.report.figures.eyes import AxisGeometry, native_geometry
from octjepa.report.html import file_name, without_paths
from octjepa.store.index import IndexEntry, entries_of, text_column

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.store import Store

SPLITS = ("train", "val", "test")
MAX_VOLUMES = 300
MAX_FILES_PER_REASON = 40
FEWEST_PEOPLE = 6  # whose ages are summarised, and of whom a group or site is named


@dataclass(frozen=True)
class Exclusion:
    """The volumes that leave the flow at a stage: how many, what they are called, and the parts by name, most first."""

    number: int
    what: str
    parts: tuple[tuple[str, int], ...]
    bad: bool = False


@dataclass(frozen=True)
class FlowStage:
    """How many, of what, what they consist of, and what leaves before the next stage."""

    number: int
    what: str
    details: tuple[str, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()


@dataclass(frozen=True)
class CountTable:
    """`rows`: a device or site -> column (a split, "unassigned" or "all") -> counts; the last row is all of them."""

    title: str
    columns: tuple[str, ...]
    rows: dict[str, dict[str, Counts]]


@dataclass(frozen=True)
class Cohort:
    """`stages` from files to raster volumes, then `splits` side by side; the numbers are of files and volumes.

    `refused` are the files that count as lost scans, as `octjepa ingest --max-lost` counts them.
    """

    stages: tuple[FlowStage, ...]
    splits: tuple[tuple[str, Counts], ...]
    tables: tuple[CountTable, ...]
    volumes: int
    files: int
    refused: int
    uncertain: int
    people_in_two_splits: int
    participants: dict[str, str]


@dataclass(frozen=True)
class RefusalReason:
    """All files refused for one reason; `files` holds the first of them as (name, stage, detail)."""

    counts: RefusedFiles
    meaning: str
    action: str
    files: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class AcceptedFile:
    """One volume: its row of the index, the file's name as shown, its native geometry and its notes."""

    row: IndexEntry
    file: str
    axes: tuple[AxisGeometry, ...]
    notes: tuple[str, ...]


def summarise_cohort(store: Store) -> Cohort:
    """Counts of a store. Eyes are counted as person and side; an unknown side counts as one eye of its person."""
    table = cohort_table(store)
    sources = source_flow(store)
    rasters = table[table["pattern"] == "raster"]
    other = Counter(text_column(table.loc[table["pattern"] != "raster", "pattern"]))
    refused = {
        kind: {refusal.reason: refusal.files for refusal in sources.refused if refusal.lost == kind}
        for kind in (True, False)
    }
    accepted = sources.accepted
    stages = [
        FlowStage(sources.found, "files found or listed", (), _exclusions(("side files ignored", sources.ignored))),
        FlowStage(
            sources.scans,
            "scans to read",
            (),
            _exclusions(("refused", refused[True]), ("rightly left out", refused[False])),
        ),
        FlowStage(
            accepted.volumes,
            "volumes read and accepted",
            (f"{counted(accepted.people, 'person')}, {counted(accepted.eyes, 'eye')}", *_by_device_and_site(table)),
            _exclusions(("no raster scans", other)),
        ),
    ]
    if not stages[0].exclusions:
        del stages[0]
    if other:
        counts = count_entries(rasters)
        details = (f"{counted(counts.people, 'person')}, {counted(counts.eyes, 'eye')}", *_by_device_and_site(rasters))
        stages.append(FlowStage(len(rasters), "raster volumes", details))
    split = text_column(rasters["split"])
    by_split = [(name, rasters[split == name]) for name in (*SPLITS, "")]
    splits = tuple((name or "unassigned", count_entries(rows)) for name, rows in by_split if name or len(rows))
    columns = (*(name for name, _ in splits), "all")
    assigned = table[text_column(table["split"]) != ""]
    return Cohort(
        tuple(stages),
        splits,
        tuple(_count_table(rasters, column, columns) for column in ("device", "site") if _is_shown(rasters, column)),
        accepted.volumes,
        sources.scans,
        sources.lost,
        int((text_column(table["uncertain"]) != "").sum()),
        int((assigned.groupby("person_id")["split"].nunique() > 1).sum()),
        participant_facts(store),
    )


def _exclusions(*kinds: tuple[str, Mapping[str, int]]) -> tuple[Exclusion, ...]:
    return tuple(
        Exclusion(
            sum(counts.values()),
            what,
            tuple(sorted(counts.items(), key=lambda part: (-part[1], part[0]))),
            bad=what == "refused",
        )
        for what, counts in kinds
        if sum(counts.values())
    )


def _is_shown(rows: pd.DataFrame, column: str) -> bool:
    """Devices always are; sites only where any is known."""
    return column == "device" or bool((text_column(rows[column]) != "").any())


def _by_device_and_site(rows: pd.DataFrame) -> tuple[str, ...]:
    lines = []
    for column in ("device", "site"):
        if _is_shown(rows, column):
            counts = Counter(text_column(rows[column]).replace("", "unknown"))
            lines.append(", ".join(f"{name.replace('_', ' ')} {number}" for name, number in sorted(counts.items())))
    return tuple(line for line in lines if line)


def _count_table(rows: pd.DataFrame, column: str, columns: Sequence[str]) -> CountTable:
    def by_split(part: pd.DataFrame) -> dict[str, Counts]:
        split = text_column(part["split"]).replace("", "unassigned")
        return {name: count_entries(part if name == "all" else part[split == name]) for name in columns}

    values = text_column(rows[column]).replace("", "unknown")
    counted = {str(name): by_split(part) for name, part in rows.groupby(values)}
    if len(counted) > 1:
        counted[f"all {column}s"] = by_split(rows)
    return CountTable(column, tuple(columns), counted)


def run_flow(about: Mapping[str, Any]) -> dict[str, tuple[Stage, ...]]:
    """split -> stages of the selection that run.json records; empty for a run that does not record them."""
    flow = about.get("flow")
    if not isinstance(flow, dict):
        return {}
    return {split: CohortFlow.from_json(flow[split]).stages for split in SPLITS if split in flow}


def participant_facts(store: Store) -> dict[str, str]:
    """Age, site and group of the people who have a volume, as counts and ranges; of no fewer than `FEWEST_PEOPLE`."""
    import pandas as pd

    participants = store.participants
    if participants.empty:
        return {}
    participants = participants[participants["person_id"].isin(store.table["person_id"])].drop_duplicates("person_id")
    facts: dict[str, str] = {}
    if "age" in participants:
        age = pd.to_numeric(participants["age"], errors="coerce").dropna()
        if len(age) >= FEWEST_PEOPLE:
            low, high = age.quantile(0.25), age.quantile(0.75)
            facts["Age"] = f"median {age.median():.0f} years, middle half {low:.0f} to {high:.0f} ({len(age)} people)"
    for column, title in (("clinical_site", "Site"), ("study_group", "Study group")):
        if column in participants:
            values = Counter(
                str(value).replace("_", " ") for value in participants[column] if str(value) not in ("", "nan")
            )
            named = [f"{name} {number}" for name, number in sorted(values.items()) if number >= FEWEST_PEOPLE]
            if small := len(values) - len(named):
                named.append(f"{small}{' more' if named else ''} of fewer than {FEWEST_PEOPLE} people")
            if named:
                facts[title] = ", ".join(named)
    return facts


def refused_files(store: Store, root: Path) -> list[RefusalReason]:
    """The quarantined files by reason, losses and long lists first."""
    common = _common_folder(store)
    rows: dict[str, list[tuple[str, str, str]]] = {}
    for row in store.quarantine:  # sorted by file
        files = rows.setdefault(str(row["reason"]), [])
        if len(files) < MAX_FILES_PER_REASON:
            detail = without_paths(str(row.get("detail") or ""), root)
            files.append((file_name(str(row["file"]), common), str(row.get("stage") or ""), detail))
    return [
        RefusalReason(counts, *reason_meaning(counts.reason), tuple(rows[counts.reason]))
        for counts in source_flow(store).refused
    ]


def reason_meaning(reason: str) -> tuple[str, str]:
    """The meaning of a reason code, and the advice."""
    reason_entry = REASONS.get(reason)
    if reason_entry is None:
        return "a reason that this version of octjepa does not know", "report with the version that made the store"
    return reason_entry.meaning, reason_entry.action


def _common_folder(store: Store) -> str:
    """The folder that every file of the store came from, or "" if they share none but the root of the machine."""
    files = [*store.table["file"], *(str(row["file"]) for row in store.quarantine)]
    absolute = [path for path in files if os.path.isabs(path)]
    common = os.path.commonpath([os.path.dirname(path) for path in absolute]) if absolute else ""
    return common if common.count(os.sep) > 1 else ""


def accepted_files(store: Store) -> list[AcceptedFile]:
    """The stored volumes by device and file; of more than `MAX_VOLUMES`, those with a doubt come first.

    An uncertain spacing precedes a note, and a note neither; among equals the lowest quality comes first.
    """
    table = cohort_table(store)
    if len(table) > MAX_VOLUMES:
        doubt = 2 * (text_column(table["uncertain"]) != "").astype(int) + (text_column(table["notes"]) != "").astype(
            int
        )
        ordered = table.assign(_doubt=doubt).sort_values(
            ["_doubt", "quality", "volume_id"], ascending=[False, True, True]
        )
        table = ordered.head(MAX_VOLUMES)
    files = [
        AcceptedFile(entry, file_name(entry.source), native_geometry(entry), read_notes(entry.notes))
        for entry in entries_of(table)
    ]
    return sorted(files, key=lambda file: (file.row.device, file.file))
