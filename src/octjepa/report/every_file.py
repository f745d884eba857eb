"""What became of every file: what was read, or why it was refused. Long lists are cut, and say so.

A cohort of ten thousand files would make a page that no browser likes to open. The tables show `ROWS` volumes, those
that someone should look at first, and `ROWS_OF_A_REASON` files of each reason; the store's own files hold all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octjepa.ingest.reasons import REASONS
from octjepa.report.figures.eyes import AxisGeometry, geometry_of, records
from octjepa.report.wording import file_name, without_paths
from octjepa.store.cohort_flow import cohort_table, source_flow, text_column

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.store import Store

ROWS = 300
ROWS_OF_A_REASON = 40


@dataclass(frozen=True)
class RefusedFile:
    file: str
    stage: str
    detail: str


@dataclass(frozen=True)
class RefusedFor:
    """All files of one reason, the first of them by name. `lost` is false for what was rightly left out."""

    reason: str
    meaning: str
    action: str
    lost: bool
    number: int
    by_device: dict[str, int]
    by_site: dict[str, int]
    files: tuple[RefusedFile, ...]


@dataclass(frozen=True)
class Accepted:
    file: str
    volume_id: str
    eye: str
    laterality_source: str
    device: str
    protocol: str
    pattern: str
    split: str
    site: str
    format: str
    axes: tuple[AxisGeometry, ...]
    quality: float
    mirrored: bool
    notes: tuple[str, ...]


def refused(store: Store, root: Path) -> list[RefusedFor]:
    """The ledger by reason, losses and long lists first."""
    common = _common(store)
    rows: dict[str, list[RefusedFile]] = {}
    for row in store.quarantine:  # sorted by file
        files = rows.setdefault(str(row["reason"]), [])
        if len(files) < ROWS_OF_A_REASON:
            files.append(_refused(row, root, common))
    found = []
    for one in source_flow(store).refused:
        meaning, action = meaning_of(one.reason)
        files = rows[one.reason]
        found.append(
            RefusedFor(one.reason, meaning, action, one.lost, one.files, one.by_device, one.by_site, tuple(files))
        )
    return found


def meaning_of(reason: str) -> tuple[str, str]:
    """What a reason code means, and what to do about it."""
    known = REASONS.get(reason)
    if known is None:
        return "a reason that this version of octjepa does not know", "report with the version that made the store"
    return known.meaning, known.action


def _common(store: Store) -> str:
    """The folder that every file of the store came from, or "" where they share none but the root of the machine."""
    known = [*store.table["file"], *(str(row["file"]) for row in store.quarantine)]
    absolute = [path for path in known if os.path.isabs(path)]
    common = os.path.commonpath([os.path.dirname(path) for path in absolute]) if absolute else ""
    return common if common.count(os.sep) > 1 else ""


def _refused(row: Mapping[str, Any], root: Path, common: str) -> RefusedFile:
    return RefusedFile(
        file_name(str(row["file"]), common),
        str(row.get("stage") or ""),
        without_paths(str(row.get("detail") or ""), root),
    )


def accepted(store: Store) -> list[Accepted]:
    """The stored volumes by device and file; of more than `ROWS`, those with something to look at come first."""
    table = cohort_table(store)
    if len(table) > ROWS:
        table = _doubts_first(table).head(ROWS)
    rows = [
        Accepted(
            file_name(str(row["source"])),
            str(row["volume_id"]),
            str(row["eye"]),
            str(row["laterality_source"]),
            str(row["device"]),
            str(row["protocol"]),
            str(row["pattern"]),
            str(row["split"]),
            str(row["site"]),
            str(row["format"]),
            geometry_of(row),
            float(row["quality"]),
            bool(row["mirrored"]),
            tuple(note for note in str(row["notes"]).split(";") if note),
        )
        for row in records(table.assign(format=text_column(table["format"])))
    ]
    return sorted(rows, key=lambda row: (row.device, row.file))


def _doubts_first(table: pd.DataFrame) -> pd.DataFrame:
    """An uncertain spacing before a note before neither; the lowest quality first among equals."""
    doubt = 2 * (text_column(table["uncertain"]) != "").astype(int) + (text_column(table["notes"]) != "").astype(int)
    return table.assign(_doubt=doubt).sort_values(["_doubt", "quality", "volume_id"], ascending=[False, True, True])
