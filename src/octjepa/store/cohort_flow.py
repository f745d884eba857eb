"""The cohort flow: how many people, eyes, volumes and files there are at each stage, by device and site.

A `CohortFlow` describes a selection from the store (`octjepa.store.select`), a `SourceFlow` what became of the files
that ingest found. Both hold counts alone, so that they can stand in a run folder and on a page.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
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
    """What is left after one step, and what the step took out. `why` says by which rule."""

    name: str
    why: str
    left: Counts
    lost: Counts
    by_device: dict[str, Counts]
    by_site: dict[str, Counts]


@dataclass(frozen=True)
class CohortFlow:
    """The stages of a selection, the whole store first; each stage is a part of the one before."""

    stages: tuple[Stage, ...]

    @classmethod
    def from_json(cls, payload: Sequence[Mapping[str, Any]]) -> CohortFlow:
        """What `payload` was made of, read back."""

        def counts(given: Mapping[str, Any]) -> dict[str, Counts]:
            return {name: Counts(**one) for name, one in given.items()}

        return cls(tuple(
            Stage(
                one["name"], one["why"], Counts(**one["left"]), Counts(**one["lost"]), counts(one["by_device"]),
                counts(one["by_site"]),
            )
            for one in payload
        ))  # fmt: skip

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data for JSON."""
        return [asdict(stage) for stage in self.stages]

    def lines(self) -> list[str]:
        """An aligned table, a line a stage."""
        cells: list[tuple[str, ...]] = [("", "people", "eyes", "volumes", "lost", "by device", "by site")]
        for stage in self.stages:
            devices, sites = (_listed(part) for part in (stage.by_device, stage.by_site))
            lost = str(stage.lost.volumes) if stage.lost.volumes else ""
            left = (str(number) for number in (stage.left.people, stage.left.eyes, stage.left.volumes))
            cells.append((stage.why, *left, lost, devices, sites))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        aligned = [
            [f"{cell:>{width}}" if 1 <= place <= 4 else f"{cell:<{width}}" for place, (cell, width) in enumerate(row)]
            for row in (list(zip(line, widths, strict=True)) for line in cells)
        ]
        return ["  ".join(line).rstrip() for line in aligned]


def _listed(counts: Mapping[str, Counts]) -> str:
    return ", ".join(f"{name} {counted.volumes}" for name, counted in counts.items()) or "none"


def text_column(column: pd.Series) -> pd.Series:
    """A column of the index as text, "" where an older store has nothing."""
    return column.astype(object).where(column.notna(), "").astype(str)


def count_entries(rows: pd.DataFrame) -> Counts:
    """Counts of rows of a store's index."""
    named = text_column(rows["file_key"])
    files = named.where(named != "", rows["volume_id"])
    eyes = rows[["person_id", "eye"]].drop_duplicates()
    return Counts(int(rows["person_id"].nunique()), len(eyes), len(rows), int(files.nunique()))


def count_by(rows: pd.DataFrame, column: str) -> dict[str, Counts]:
    """value of `column` -> counts, sorted; "" is told as "unknown"."""
    return {
        str(name): count_entries(part) for name, part in rows.groupby(text_column(rows[column]).replace("", UNKNOWN))
    }


def stage(name: str, why: str, before: pd.DataFrame | None, rows: pd.DataFrame) -> Stage:
    """The stage that leaves `rows` of `before`."""
    left = count_entries(rows)
    was = left if before is None else count_entries(before)
    gone = (was.people - left.people, was.eyes - left.eyes, was.volumes - left.volumes, was.files - left.files)
    return Stage(name, why, left, Counts(*gone), count_by(rows, "device"), count_by(rows, "site"))


def cohort_table(store: Store) -> pd.DataFrame:
    """The store's index with `site` filled from participants.tsv where the file itself names none; "" stays unknown."""
    table = store.table.copy()
    known = store.participants
    sites: dict[str, str] = {}
    if "clinical_site" in known:
        sites = {
            str(person): str(site)
            for person, site in zip(known["person_id"], known["clinical_site"], strict=True)
            if site is not None and str(site) not in {"", "nan"}
        }
    own = text_column(table["site"])
    table["site"] = own.where(own != "", [sites.get(person, "") for person in table["person_id"]])
    return table


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

    `ignored` counts side files (tables, pictures, hidden ones) by kind. Files refused have device and site as far as
    their path tells them: nothing else of them is known.
    """

    ignored: dict[str, int]
    refused: tuple[RefusedFiles, ...]
    accepted: Counts

    @property
    def scans(self) -> int:
        """Files that were read, or tried, or listed in a manifest."""
        return self.accepted.files + sum(one.files for one in self.refused)

    @property
    def found(self) -> int:
        return self.scans + sum(self.ignored.values())

    @property
    def lost(self) -> int:
        return sum(one.files for one in self.refused if one.lost)


def source_flow(store: Store) -> SourceFlow:
    """What became of every file that was ingested into `store`, over all its ingests."""
    known = store.participants
    sites = dict(zip(known["person_id"], known["clinical_site"], strict=True)) if "clinical_site" in known else {}
    devices: dict[str, Counter[str]] = defaultdict(Counter)
    places: dict[str, Counter[str]] = defaultdict(Counter)
    for row in store.quarantine:
        seen = identify(HeaderFields(), PurePath(str(row["file"])), None)
        devices[row["reason"]][seen.device or UNKNOWN] += 1
        places[row["reason"]][seen.site or str(sites.get(seen.person_id) or UNKNOWN)] += 1
    refused = [
        RefusedFiles(
            reason,
            sum(found.values()),
            REASONS[reason].lost if reason in REASONS else True,
            dict(sorted(found.items())),
            dict(sorted(places[reason].items())),
        )
        for reason, found in devices.items()
    ]
    refused.sort(key=lambda one: (not one.lost, -one.files, one.reason))
    return SourceFlow(_ignored(store.path), tuple(refused), count_entries(store.table))


def record_ignored(store: Path, sources: Sequence[str | Path], ignored: Mapping[str, int]) -> None:
    """Keeps what one ingest left aside, in the place of what an earlier ingest of the same `sources` did.

    The sources are named by a hash: no path enters the store. Two ingests whose sources overlap count a file twice.
    """
    named = "\0".join(
        sorted(str(source) if "://" in str(source) else str(Path(source).resolve()) for source in sources)
    )
    key = hashlib.sha256(named.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    write_json(store / _FILE, {"ignored": {**_read(store), key: dict(sorted(ignored.items()))}})


def _ignored(store: Path) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in _read(store).values():
        total.update(counts)
    return dict(sorted(total.items()))


def _read(store: Path) -> dict[str, dict[str, int]]:
    path = store / _FILE
    if not path.is_file():
        return {}  # a store from before this file was kept
    try:
        found: dict[str, dict[str, int]] = json.loads(path.read_text(encoding="utf-8"))["ignored"]
        return {key: {str(kind): int(number) for kind, number in counts.items()} for key, counts in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise OctjepaError(f"{path} is damaged: remove it and ingest again, which writes it anew") from None
