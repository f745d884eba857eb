"""Who is in the store and what became of every file, as counts: the tables of the page's first and last sections."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octjepa.ingest.reasons import REASONS
from octjepa.report.figures.eyes import AxisGeometry, geometry_of, records
from octjepa.report.wording import file_name, without_paths

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.store import Store

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Step:
    """A box of the flow: how many, of what, and what was lost on the way to it."""

    count: int
    what: str
    lost: str = ""


@dataclass(frozen=True)
class Counted:
    people: int
    eyes: int
    volumes: int


@dataclass(frozen=True)
class Cohort:
    """`table` maps device -> column (a split, "unassigned" or "all") -> counts; "all devices" is the last device."""

    steps: tuple[Step, ...]
    splits: tuple[Step, ...]
    columns: tuple[str, ...]
    table: dict[str, dict[str, Counted]]
    people_in_two_splits: int
    participants: dict[str, str]


@dataclass(frozen=True)
class Refused:
    """A file that is not in the store. `lost` is false for one that was rightly left out."""

    file: str
    reason: str
    meaning: str
    action: str
    stage: str
    detail: str
    lost: bool


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
    axes: tuple[AxisGeometry, ...]
    quality: float
    tissue_share: float
    mirrored: bool
    notes: tuple[str, ...]


def cohort(store: Store) -> Cohort:
    """Counts of a store. Eyes are counted as person and side; an unknown side counts as one eye of its person."""
    table = store.table
    refused = store.quarantine
    rasters = table[table["pattern"] == "raster"]
    other = Counter(table.loc[table["pattern"] != "raster", "pattern"])
    set_aside = [row for row in refused if row["reason"] in REASONS and not REASONS[row["reason"]].lost]
    steps = (
        Step(len(table) + len(refused), "files found or listed"),
        Step(len(table), "read and accepted", _lost(len(refused) - len(set_aside), len(set_aside))),
        Step(len(rasters), "raster volumes", ", ".join(f"{count} {name}" for name, count in sorted(other.items()))),
    )
    named = [(split, rasters[rasters["split"] == split]) for split in (*SPLITS, "")]
    splits = tuple(Step(len(rows), split or "unassigned") for split, rows in named if split or len(rows))
    columns = (*(step.what for step in splits), "all")
    counted = {str(device): _columns(rows, columns) for device, rows in rasters.groupby("device")}
    if len(counted) > 1:
        counted["all devices"] = _columns(rasters, columns)
    per_person = table[table["split"] != ""].groupby("person_id")["split"].nunique()
    return Cohort(steps, splits, columns, counted, int((per_person > 1).sum()), _participants(store))


def _lost(lost: int, set_aside: int) -> str:
    parts = [f"{lost} refused"] if lost else []
    return ", ".join(parts + ([f"{set_aside} rightly left out"] if set_aside else []))


def _columns(rows: pd.DataFrame, columns: Sequence[str]) -> dict[str, Counted]:
    return {
        name: _count(rows if name == "all" else rows[rows["split"] == ("" if name == "unassigned" else name)])
        for name in columns
    }


def _count(rows: pd.DataFrame) -> Counted:
    eyes = rows[["person_id", "eye"]].drop_duplicates()
    return Counted(int(rows["person_id"].nunique()), len(eyes), len(rows))


def _participants(store: Store) -> dict[str, str]:
    """What participants.tsv says of the people who have a volume, as counts and ranges; never of one person."""
    import pandas as pd

    known = store.participants
    if known.empty:
        return {}
    known = known[known["person_id"].isin(store.table["person_id"])].drop_duplicates("person_id")
    facts: dict[str, str] = {}
    if "age" in known:
        age = pd.to_numeric(known["age"], errors="coerce").dropna()
        if len(age):
            low, high = age.quantile(0.25), age.quantile(0.75)
            facts["Age"] = f"median {age.median():.0f} years, middle half {low:.0f} to {high:.0f} ({len(age)} people)"
    for column, title in (("clinical_site", "Site"), ("study_group", "Study group")):
        if column in known:
            values = Counter(str(value).replace("_", " ") for value in known[column] if str(value) not in ("", "nan"))
            if values:
                facts[title] = ", ".join(f"{name} {count}" for name, count in sorted(values.items()))
    return facts


def refused(store: Store, root: Path) -> list[Refused]:
    """Every quarantine row, sorted by reason and file, with what the reason means and what to do about it."""
    rows = [_refused(row, root, _common(store)) for row in store.quarantine]
    return sorted(rows, key=lambda row: (not row.lost, row.reason, row.file))


def _common(store: Store) -> str:
    """The folder that every file of the store came from, or "" where they share none but the root of the machine."""
    known = [*store.table["file"], *(str(row["file"]) for row in store.quarantine)]
    absolute = [path for path in known if os.path.isabs(path)]
    common = os.path.commonpath([os.path.dirname(path) for path in absolute]) if absolute else ""
    return common if common.count(os.sep) > 1 else ""


def _refused(row: Mapping[str, Any], root: Path, common: str) -> Refused:
    code = str(row["reason"])
    known = REASONS.get(code)
    return Refused(
        file_name(str(row["file"]), common),
        code,
        known.meaning if known else "a reason that this version of octjepa does not know",
        known.action if known else "report with the version that made the store",
        str(row.get("stage") or ""),
        without_paths(str(row.get("detail") or ""), root),
        known.lost if known else True,
    )


def accepted(store: Store) -> list[Accepted]:
    """Every stored volume, by device and file."""
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
            geometry_of(row),
            float(row["quality"]),
            float(row["tissue_share"]),
            bool(row["mirrored"]),
            tuple(note for note in str(row["notes"]).split(";") if note),
        )
        for row in records(store.table)
    ]
    return sorted(rows, key=lambda row: (row.device, row.file))
