"""Who is in the store and how they got there: the flow from the files found to the people in each split, as counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octjepa.store.cohort_flow import Counts, cohort_table, count_entries, source_flow, text_column

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.store import Store

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Out:
    """What leaves the flow beside a box: how many, what they are called, and the parts by name."""

    number: int
    what: str
    parts: tuple[tuple[str, int], ...]
    bad: bool = False


@dataclass(frozen=True)
class Box:
    """A stage: how many, of what, what they consist of, and what leaves before the next box."""

    number: int
    what: str
    details: tuple[str, ...] = ()
    out: tuple[Out, ...] = ()


@dataclass(frozen=True)
class Table:
    """`rows`: a device or site -> column (a split, "unassigned" or "all") -> counts; the last row is all of them."""

    title: str
    columns: tuple[str, ...]
    rows: dict[str, dict[str, Counts]]


@dataclass(frozen=True)
class Cohort:
    """`boxes` from files to raster volumes, `splits` the last stage side by side."""

    boxes: tuple[Box, ...]
    splits: tuple[tuple[str, Counts], ...]
    tables: tuple[Table, ...]
    volumes: int
    files: int
    refused: int
    uncertain: int
    people_in_two_splits: int
    participants: dict[str, str]


def cohort(store: Store) -> Cohort:
    """Counts of a store. Eyes are counted as person and side; an unknown side counts as one eye of its person."""
    table = cohort_table(store)
    sources = source_flow(store)
    rasters = table[table["pattern"] == "raster"]
    other = Counter(text_column(table.loc[table["pattern"] != "raster", "pattern"]))
    ignored = Out(sum(sources.ignored.values()), "side files ignored", _parts(sources.ignored))
    lost = {one.reason: one.files for one in sources.refused if one.lost}
    set_aside = {one.reason: one.files for one in sources.refused if not one.lost}
    everyone = sources.accepted
    boxes = (
        *([Box(sources.found, "files found or listed", out=(ignored,))] if ignored.number else []),
        Box(
            sources.scans,
            "scans to read",
            out=_some(
                Out(sum(lost.values()), "refused", _parts(lost), bad=True),
                Out(sum(set_aside.values()), "rightly left out", _parts(set_aside)),
            ),
        ),
        Box(
            everyone.volumes,
            "volumes read and accepted",
            (f"{everyone.people} people, {everyone.eyes} eyes", *_by(table)),
            _some(Out(len(table) - len(rasters), "no raster scans", _parts(other))),
        ),
        *([Box(len(rasters), "raster volumes", (_told(count_entries(rasters)), *_by(rasters)))] if other else []),
    )
    of_split = text_column(rasters["split"])
    named = [(split, rasters[of_split == split]) for split in (*SPLITS, "")]
    splits = tuple((split or "unassigned", count_entries(rows)) for split, rows in named if split or len(rows))
    columns = (*(name for name, _ in splits), "all")
    per_person = table[text_column(table["split"]) != ""].groupby("person_id")["split"].nunique()
    return Cohort(
        boxes,
        splits,
        tuple(
            _table(rasters, column, columns) for column in ("device", "site") if column == "device" or _named(rasters)
        ),
        everyone.volumes,
        sources.scans,
        sources.lost,
        int((text_column(table["uncertain"]) != "").sum()),
        int((per_person > 1).sum()),
        participant_facts(store),
    )


def _some(*outs: Out) -> tuple[Out, ...]:
    return tuple(out for out in outs if out.number)


def _parts(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Name and number, the most first."""
    return tuple(sorted(counts.items(), key=lambda part: (-part[1], part[0])))


def _told(counts: Counts) -> str:
    return f"{counts.people} people, {counts.eyes} eyes"


def _named(rows: pd.DataFrame) -> bool:
    return bool((text_column(rows["site"]) != "").any())


def _by(rows: pd.DataFrame) -> tuple[str, ...]:
    """Volumes by device, and by site where any is known."""
    told = []
    for column in ("device", "site"):
        values = text_column(rows[column]).replace("", "unknown")
        if column == "device" or _named(rows):
            told.append(
                ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in sorted(Counter(values).items()))
            )
    return tuple(line for line in told if line)


def _table(rows: pd.DataFrame, column: str, columns: Sequence[str]) -> Table:
    values = text_column(rows[column]).replace("", "unknown")
    counted = {str(name): _columns(part, columns) for name, part in rows.groupby(values)}
    if len(counted) > 1:
        counted[f"all {column}s"] = _columns(rows, columns)
    return Table(column, tuple(columns), counted)


def _columns(rows: pd.DataFrame, columns: Sequence[str]) -> dict[str, Counts]:
    split = text_column(rows["split"]).replace("", "unassigned")
    return {name: count_entries(rows if name == "all" else rows[split == name]) for name in columns}


def run_flow(about: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """split -> stages as run.json keeps them; empty for a run that does not say."""
    flow = about.get("flow")
    return {split: flow[split] for split in SPLITS if split in flow} if isinstance(flow, dict) else {}


def participant_facts(store: Store) -> dict[str, str]:
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
                facts[title] = ", ".join(f"{name} {number}" for name, number in sorted(values.items()))
    return facts
