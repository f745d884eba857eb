"""The list of a store's volumes as the viewer shows it: searched, filtered, sorted and given out page by page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd

from octjepa.cohort.flow import cohort_table
from octjepa.notes import Note, read_notes
from octjepa.record import Record
from octjepa.report.figures import eyes
from octjepa.report.html import file_name
from octjepa.store import Store
from octjepa.store.index import IndexEntry, entries_of, text_column

MAX_PAGE = 200
_COLUMNS = ("eye", "device", "protocol", "pattern", "region", "split", "site")
_SEARCHED = ("volume_id", "file", "device", "site", "protocol", "notes", "eye", "split")
_NONE = "\0"  # the filter that asks for volumes without a value


@dataclass(frozen=True)
class AxisFacts(Record):
    """The native geometry along one axis; `provenance` names the source of the spacing."""

    ALIASES: ClassVar[Mapping[str, str]] = {"from": "provenance"}
    axis: str
    count: int
    spacing_mm: float
    extent_mm: float
    provenance: str
    uncertain: bool


@dataclass(frozen=True)
class VolumeFacts(Record):
    """The facts that the page shows about one volume; `quality` is None if it could not be computed.

    `person` is the number of the person in the store (`person_numbers`), not an id.
    """

    id: str
    person: int
    file: str
    eye: str
    device: str
    protocol: str
    pattern: str
    region: str
    split: str
    site: str
    mirrored: bool
    quality: float | None
    notes: tuple[Note, ...]
    axes: list[AxisFacts]


@dataclass(frozen=True)
class VolumePage(Record):
    """A page of the list: `volumes` from `offset` on of the `matching` volumes, of `total` in the store."""

    total: int
    matching: int
    offset: int
    volumes: list[VolumeFacts]


class VolumeList:
    """The index of `store`. Of a person only a number is shown (`person_numbers`), never the id."""

    def __init__(self, store: Store) -> None:
        table = cohort_table(store)
        texts = {name: text_column(table[name]) for name in (*_COLUMNS, "uncertain", "notes")}
        table = table.assign(**texts, volume_id=table["volume_id"].astype(str))
        table["file"] = [file_name(str(name)) for name in table["source"]]
        table["doubt"] = [
            (uncertain != "") * 1000 + len(read_notes(notes))
            for uncertain, notes in zip(table["uncertain"], table["notes"], strict=True)
        ]
        self.table = table.sort_values(["device", "volume_id"], ignore_index=True)
        self.ids = frozenset(self.table["volume_id"])
        joined = self.table[_SEARCHED[0]]
        for name in _SEARCHED[1:]:
            joined = joined + " " + self.table[name].astype(str)
        self._text = joined.str.lower()
        self._entries = store.table.set_index("volume_id", drop=False)
        self.people = person_numbers(store)
        self._person_ids = self.table["person_id"].astype(str).str.lower()

    def entry(self, volume_id: str) -> IndexEntry:
        """The entry of a volume in the store's index. Raises KeyError."""
        (entry,) = entries_of(self._entries.loc[[volume_id]])
        return entry

    def choices(self) -> dict[str, list[str]]:
        """The values that filter the list."""
        return {name: sorted(set(self.table[name])) for name in ("device", "split")}

    def page(
        self,
        search: str = "",
        device: str = "",
        split: str = "",
        order: str = "device",
        offset: int = 0,
        limit: int = MAX_PAGE,
        around: str = "",
    ) -> VolumePage:
        """At most `limit` volumes from `offset` on, or the page with the volume `around`.

        A word of `search` that equals a person id chooses the volumes of that person.
        """
        chosen = pd.Series(True, index=self.table.index)
        for word in search.lower().split():
            chosen &= self._text.str.contains(word, regex=False) | (self._person_ids == word)
        for name, value in (("device", device), ("split", split)):
            if value:
                chosen &= self.table[name] == ("" if value == _NONE else value)
        matching = self.table[chosen]
        if order == "worst":
            matching = matching.sort_values("quality", kind="stable", na_position="first")
        elif order == "doubt":
            matching = matching.sort_values(["doubt", "quality"], ascending=[False, True], kind="stable")
        limit = max(1, min(limit, MAX_PAGE))
        if around and (matching["volume_id"] == around).any():
            offset = int((matching["volume_id"] == around).to_numpy().argmax()) // limit * limit
        offset = max(0, offset)
        volumes = [self._facts(entry) for entry in entries_of(matching.iloc[offset : offset + limit])]
        return VolumePage(len(self.table), len(matching), offset, volumes)

    def facts(self, volume_id: str) -> VolumeFacts:
        """The facts that the page shows about one volume."""
        return self._facts(entries_of(self.table[self.table["volume_id"] == volume_id])[0])

    def _facts(self, entry: IndexEntry) -> VolumeFacts:
        return volume_facts(entry, self.people[entry.volume_id])

    def same_person(self, volume_id: str) -> list[VolumeFacts]:
        """The other volumes of the same person, the same eye first."""
        person = self._entries.loc[volume_id, "person_id"]
        ids = set(self._entries.index[self._entries["person_id"] == person]) - {volume_id}
        eye = self.facts(volume_id).eye
        others = [self._facts(entry) for entry in entries_of(self.table[self.table["volume_id"].isin(ids)])]
        return sorted(others, key=lambda facts: (facts.eye != eye, facts.device, facts.id))[:MAX_PAGE]


def person_numbers(store: Store) -> dict[str, int]:
    """Volume id -> number of its person, from 1 in the order of the ids of a store.

    A PatientID can be the number of a hospital's record, and every account of a machine can open the page. A number
    tells which volumes belong together, without naming the person.
    """
    numbers = pd.factorize(store.table["person_id"].astype(str), sort=True)[0] + 1
    return dict(zip(store.table["volume_id"].astype(str), map(int, numbers), strict=True))


def volume_facts(entry: IndexEntry, person: int) -> VolumeFacts:
    """Device, eye, quality, notes and native axes of a volume; its `file` is shown as it is."""
    return VolumeFacts(
        id=entry.volume_id,
        person=person,
        file=entry.file,
        eye=entry.eye,
        device=entry.device,
        protocol=entry.protocol,
        pattern=entry.pattern,
        region=entry.region,
        split=entry.split,
        site=entry.site,
        mirrored=entry.mirrored,
        quality=round(entry.quality, 3) if math.isfinite(entry.quality) else None,
        notes=read_notes(entry.notes),
        axes=[
            AxisFacts(
                axis=axis.axis,
                count=axis.count,
                spacing_mm=round(axis.spacing_mm, 6),
                extent_mm=round(axis.extent_mm, 2),
                provenance=axis.provenance,
                uncertain=axis.uncertain,
            )
            for axis in eyes.native_geometry(entry)
        ],
    )
