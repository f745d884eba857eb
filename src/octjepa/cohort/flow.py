"""The cohort flow: how many people, eyes, volumes and files are left at each stage of a selection, by device and site.

`octjepa.cohort.selection` returns a `CohortFlow` with its selection. The flow holds only counts, so it can be written
into a run folder and a report. `octjepa.ingest.source_flow` describes the stage before: files to volumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from octjepa.record import Record
from octjepa.store.index import text_column

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.store.folder import Store

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Counts(Record):
    """An eye is a person and a side; a side that no source names counts as one eye of its person."""

    people: int
    eyes: int
    volumes: int
    files: int


@dataclass(frozen=True)
class Stage(Record):
    """The volumes left after one step of a selection and what the step took out; `why` states its rule."""

    name: str
    why: str
    left: Counts
    lost: Counts
    by_device: dict[str, Counts]
    by_site: dict[str, Counts]


@dataclass(frozen=True)
class CohortFlow:
    """The stages of a selection, the whole store first; each stage is a subset of the previous stage."""

    stages: tuple[Stage, ...]

    @classmethod
    def from_json(cls, stages: Sequence[Mapping[str, Any]]) -> CohortFlow:
        """The flow of the stages that `run.json` or `octjepa inspect` hold as JSON."""
        return cls(tuple(map(Stage.from_json, stages)))

    def lines(self) -> list[str]:
        """An aligned table with a line per stage."""
        table: list[tuple[str, ...]] = [("", "people", "eyes", "volumes", "lost", "by device", "by site")]
        for stage in self.stages:
            numbers = (stage.left.people, stage.left.eyes, stage.left.volumes, stage.lost.volumes or "")
            groups = (
                ", ".join(f"{name} {counts.volumes}" for name, counts in group.items()) or "none"
                for group in (stage.by_device, stage.by_site)
            )
            table.append((stage.why, *map(str, numbers), *groups))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return [
            "  ".join(f"{cell:{'>' if 1 <= i <= 4 else '<'}{widths[i]}}" for i, cell in enumerate(line)).rstrip()
            for line in table
        ]


def _keys(entries: pd.DataFrame) -> pd.DataFrame:
    """The counted entries, one per line: the person, the eye (a number) and the file of each volume."""
    key = text_column(entries["file_key"])
    files = key.where(key != "", entries["volume_id"])
    eyes = entries.groupby(["person_id", "eye"], dropna=False).ngroup()
    return entries[["person_id"]].assign(eyes=eyes, files=files)


def count_entries(entries: pd.DataFrame) -> Counts:
    """Counts the people, eyes, volumes and files among entries of a store's index."""
    return _count(_keys(entries))


def count_by(entries: pd.DataFrame, column: str) -> dict[str, Counts]:
    """{value of `column`: counts}, sorted; "" is called "unknown"."""
    return _count_by(_keys(entries), entries[column])


def _count(keys: pd.DataFrame) -> Counts:
    people, eyes, files = keys.nunique()
    return Counts(int(people), int(eyes), len(keys), int(files))


def _count_by(keys: pd.DataFrame, values: pd.Series) -> dict[str, Counts]:
    groups = keys.groupby(text_column(values).replace("", UNKNOWN))
    different, volumes = groups.nunique(), groups.size()
    return {
        str(value): Counts(int(people), int(eyes), int(volumes[value]), int(files))
        for value, people, eyes, files in different.itertuples()
    }


def stage(name: str, why: str, before: pd.DataFrame | None, entries: pd.DataFrame) -> Stage:
    """The stage that leaves `entries` of `before`."""
    keys = _keys(entries)
    left = _count(keys)
    was = left if before is None else count_entries(before)
    lost = Counts(*(a - b for a, b in zip(asdict(was).values(), asdict(left).values(), strict=True)))
    return Stage(name, why, left, lost, _count_by(keys, entries["device"]), _count_by(keys, entries["site"]))


def site_by_person(store: Store) -> dict[str, str]:
    """The site of each person, from participants.tsv."""
    participants = store.participants
    if "clinical_site" not in participants:
        return {}
    sites = text_column(participants["clinical_site"])
    return {str(person): site for person, site in zip(participants["person_id"], sites, strict=True) if site}


def cohort_table(store: Store) -> pd.DataFrame:
    """The store's index with `site` filled from participants.tsv where the file itself names none; "" stays unknown."""
    stored_sites = text_column(store.table["site"])
    stated_sites = store.table["person_id"].map(site_by_person(store))
    return store.table.assign(site=stored_sites.where(stored_sites != "", text_column(stated_sites)))
