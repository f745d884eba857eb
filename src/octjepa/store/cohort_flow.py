"""The cohort flow: how many people, eyes, volumes and files there are at each stage, by device and site.

A `CohortFlow` describes a selection from the store (`octjepa.store.select`), a `SourceFlow` what became of the files
that ingest found. Both hold counts alone, so that they can be written into a run folder and a page.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from octjepa.errors import OctjepaError
from octjepa.files import write_json
from octjepa.ingest.identity import identify
from octjepa.ingest.raw_scan import HeaderFields
from octjepa.ingest.reasons import REASONS

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.store.folder import Store

_FILE = "flow.json"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Counts:
    """An eye is a person and a side; a side that no source names counts as one eye of its person."""

    people: int
    eyes: int
    volumes: int
    files: int


@dataclass(frozen=True)
class Stage:
    """What is left after one step of a selection and what the step took out; `why` states its rule."""

    name: str
    why: str
    left: Counts
    lost: Counts
    by_device: dict[str, Counts]
    by_site: dict[str, Counts]


@dataclass(frozen=True)
class CohortFlow:
    """The stages of a selection, the whole store first; each stage is a subset of the one before."""

    stages: tuple[Stage, ...]

    @classmethod
    def from_json(cls, stages: Sequence[Mapping[str, Any]]) -> CohortFlow:
        """The flow that `to_json` gave."""

        def by_value(counts: Mapping[str, Any]) -> dict[str, Counts]:
            return {name: Counts(**count) for name, count in counts.items()}

        return cls(tuple(
            Stage(
                stage["name"], stage["why"], Counts(**stage["left"]), Counts(**stage["lost"]),
                by_value(stage["by_device"]), by_value(stage["by_site"]),
            )
            for stage in stages
        ))  # fmt: skip

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data for JSON."""
        return [asdict(stage) for stage in self.stages]

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


def text_column(column: pd.Series) -> pd.Series:
    """A column of the index as text, "" where an older store has nothing."""
    return column.astype(object).where(column.notna(), "").astype(str)


def _keys(entries: pd.DataFrame) -> pd.DataFrame:
    """What is counted, an entry a line: the person, the eye (a number) and the file of each volume."""
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


def _site_by_person(store: Store) -> dict[str, str]:
    known = store.participants
    if "clinical_site" not in known:
        return {}
    sites = text_column(known["clinical_site"])
    return {str(person): site for person, site in zip(known["person_id"], sites, strict=True) if site}


def cohort_table(store: Store) -> pd.DataFrame:
    """The store's index with `site` filled from participants.tsv where the file itself names none; "" stays unknown."""
    own = text_column(store.table["site"])
    given = store.table["person_id"].map(_site_by_person(store))
    return store.table.assign(site=own.where(own != "", text_column(given)))


@dataclass(frozen=True)
class RefusedFiles:
    """The files refused for one reason. `lost` is false for what was rightly left out."""

    reason: str
    files: int
    lost: bool
    by_device: dict[str, int]
    by_site: dict[str, int]


@dataclass(frozen=True)
class SourceFlow:
    """From the files found to the volumes accepted: found = ignored + refused + accepted files.

    `ignored` counts side files (tables, pictures, hidden ones) by kind. Device and site of refused files are known only
    as far as their path names them.
    """

    ignored: dict[str, int]
    refused: tuple[RefusedFiles, ...]
    accepted: Counts

    @property
    def scans(self) -> int:
        """Files that were read, or tried, or listed in a manifest."""
        return self.accepted.files + sum(refusal.files for refusal in self.refused)

    @property
    def found(self) -> int:
        """All files."""
        return self.scans + sum(self.ignored.values())

    @property
    def lost(self) -> int:
        """Files that were refused but should have become volumes."""
        return sum(refusal.files for refusal in self.refused if refusal.lost)


def source_flow(store: Store) -> SourceFlow:
    """What became of every file that was ingested into `store`, over all its ingests."""
    sites = _site_by_person(store)
    devices: dict[str, Counter[str]] = {}
    sites_of_reason: dict[str, Counter[str]] = {}
    for entry in store.quarantine:
        by_path = identify(HeaderFields(), PurePath(str(entry["file"])), None)
        site = by_path.site or sites.get(by_path.person_id) or UNKNOWN
        devices.setdefault(entry["reason"], Counter())[by_path.device or UNKNOWN] += 1
        sites_of_reason.setdefault(entry["reason"], Counter())[site] += 1
    refused = [
        RefusedFiles(
            reason,
            by_device.total(),
            REASONS[reason].lost if reason in REASONS else True,
            dict(sorted(by_device.items())),
            dict(sorted(sites_of_reason[reason].items())),
        )
        for reason, by_device in devices.items()
    ]
    refused.sort(key=lambda refusal: (not refusal.lost, -refusal.files, refusal.reason))
    ignored = sum((Counter(counts) for counts in _read_ignored(store.path).values()), Counter())
    return SourceFlow(dict(sorted(ignored.items())), tuple(refused), count_entries(store.table))


def record_ignored(store: Path, sources: Sequence[str | Path], ignored: Mapping[str, int]) -> None:
    """Writes what one ingest left aside, replacing the record of an earlier ingest of the same `sources`.

    The sources are named by a hash: no path enters the store. Two ingests whose sources overlap count a file twice.
    """
    names = sorted(str(source) if "://" in str(source) else str(Path(source).resolve()) for source in sources)
    key = hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    write_json(store / _FILE, {"ignored": {**_read_ignored(store), key: dict(sorted(ignored.items()))}})


def _read_ignored(store: Path) -> dict[str, dict[str, int]]:
    """{hash of sources: {kind of file: count}}; empty for a store from before this file was written."""
    path = store / _FILE
    if not path.is_file():
        return {}
    try:
        content: dict[str, dict[str, int]] = json.loads(path.read_text(encoding="utf-8"))["ignored"]
        return {key: {str(kind): int(number) for kind, number in counts.items()} for key, counts in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise OctjepaError(f"{path} is damaged: remove it and ingest again, which writes it again") from None
