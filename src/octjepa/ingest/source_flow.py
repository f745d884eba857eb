"""The source flow: what became of every file that ingest found, by reason, device and site.

`record_ignored` writes the counts of side files into the store; `source_flow` combines them with the store's index and
its quarantine list into a `SourceFlow` for the report. It holds only counts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from octjepa.cohort.flow import UNKNOWN, Counts, count_entries, site_by_person
from octjepa.errors import OctjepaError
from octjepa.files import write_json
from octjepa.parsing import read_object
from octjepa.read.identity import identify
from octjepa.read.raw_scan import HeaderFields
from octjepa.reasons import REASONS

if TYPE_CHECKING:
    from octjepa.store.folder import Store

_FILE = "flow.json"


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

    `ignored` counts side files (tables, pictures, hidden files) by kind. Device and site of refused files are known
    only as far as their path names them.
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
    """The outcome of every file that was ingested into `store`, over all its ingests."""
    sites = site_by_person(store)
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
        content: dict[str, dict[str, int]] = read_object(path)["ignored"]
        return {key: {str(kind): int(number) for kind, number in counts.items()} for key, counts in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise OctjepaError(f"{path} is damaged: remove it and ingest again, which writes it again") from None
