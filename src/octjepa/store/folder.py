"""A store of canonical volumes: an index, a quarantine list, and a folder per volume named by its content.

    store.json            schema version, canonical version, preprocessing contract and its hash
    volumes.parquet       an entry per volume        quarantine.jsonl   a line per refused file
    participants.parquet  person, site, group, age, recommended split
    labels.tsv            labels that came in the files, a line per volume that has any
    past_splits.json      split by pseudonym of people whose volumes have left, if there are any
    journal.jsonl         what the running (or killed) ingest added since the last two were written; in a bucket
                          a file journal-<number>.jsonl each time
    chunks/aa/<id>/       pixels.npy (memory-mapped), geometry.npz
    shards/, shards.parquet  the same files of many volumes, one after the other, where a store was packed

Plain .npy memory maps: a canonical volume is small, is read in one sequential pass and cropped by whole voxels, and
needs no decoder. docs/decisions/0003-store-format.md has the measurements.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octjepa.config import science_hash
from octjepa.errors import ContractError, UsageError
from octjepa.files import Journal, write_atomic, write_json
from octjepa.notes import read_codes
from octjepa.recipe import Preprocessing
from octjepa.record import Record
from octjepa.remote import is_remote
from octjepa.store.contract import check_same_contract, contract_text, read_contract
from octjepa.store.index import (
    COLUMNS,
    LABELS_FILE,
    PAST_SPLITS_FILE,
    FileState,
    Index,
    IndexChange,
    IndexEntry,
    entries_of,
    format_labels,
    merge_participants,
    people_unknown,
    read_change,
    read_past_splits,
    read_people,
    read_refusal,
    read_volumes,
    refused_file_key,
    text_cells,
)
from octjepa.store.shards import ShardTable
from octjepa.store.storage import (
    MARKER,
    ChangedVolume,
    ChunkFile,
    DamagedVolume,
    DiskStorage,
    chunk_folder,
    chunk_hash,
    read_arrays,
    read_geometry,
    read_half_difference,
    reading_chunk,
)
from octjepa.volume import CanonicalVolume

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.canonical.native_mapping import NativeMap
    from octjepa.store.bucket import BucketStorage, BucketWriter

    Storage = DiskStorage | BucketStorage  # where the files of a store are
    # Publishes the files that the writing process puts into a folder that is laid out as the store.
    Writer = DiskStorage | BucketWriter

SPLIT_NAMES = ("train", "val", "test")


def _storage_at(location: str | Path) -> Storage:
    if not is_remote(location):
        return DiskStorage(Path(location))
    from octjepa.store.bucket import BucketStorage  # a store on a disk needs nothing of it

    return BucketStorage(str(location))


@dataclass(frozen=True)
class StoreFacts(Record):
    """The content of a store.

    `people_unknown` counts volumes whose person no source names, `personal_data` the files by the field of personal
    data that they hold, `packed` the volumes in shards. With `bscan_slices` the store holds single B-scans, each in so
    many stored slices.
    """

    volumes: int
    people: int
    people_unknown: int
    personal_data: dict[str, dict[str, int | str | bool]]
    eyes: int
    by_device: dict[str, int]
    by_pattern: dict[str, int]
    by_split: dict[str, int]
    quarantined: int
    by_reason: dict[str, int]
    packed: int
    stored_size: tuple[int, int, int]
    preprocessing: Preprocessing
    contract_hash: str
    halves: bool
    bscan_slices: int
    canonical_version: int


class Store:
    """Canonical volumes with one preprocessing contract, in a folder on a disk or in a bucket.

    A map-style data set of PyTorch: `len(store)` is the number of volumes, `store[i]` that of line `i` of `table`.

    `path` is the folder; of a store in a bucket it is the local copy of the index, and chunks come through the cache.
    """

    _writer: Writer | None = None  # while this process writes
    bscan_slices: int = 0  # stored slices that a single B-scan fills; 0: the store holds volumes

    def __init__(self, storage: Storage, folder: Path) -> None:
        self.storage = storage
        self.preprocessing, self.canonical_version, self.halves, self.bscan_slices = read_contract(folder)
        self.contract_hash = science_hash(self.preprocessing)
        self._verified: set[tuple[str, int, int]] = set()  # (volume id, modification times)
        self._load(folder)

    def _load(self, folder: Path) -> None:
        """Reads the index from `folder`, with the journals of an ingest that was killed."""
        self.path = folder
        self._journal = Journal(folder / "journal.jsonl")
        self._journalled: set[str] = set()  # keys of the files that the journal names
        self._table: pd.DataFrame | None = None
        self._lines: dict[str, int] | None = None  # of the table, by volume id
        self._moments = np.empty((0, 2))
        refused = folder / "quarantine.jsonl"
        entries = [read_refusal(entry, str(refused)) for entry in Journal(refused).read()]
        self.index = Index(read_volumes(folder, self.location), entries, read_past_splits(folder, self.location))
        self.shards = ShardTable.read(folder)
        for journal in (*map(Journal, self._journal_parts()), self._journal):
            for line in journal.read():
                self._apply(read_change(line, str(journal.path)))

    def _apply(self, change: IndexChange) -> str:
        """As `Index.apply`; a volume that was written anew is no longer in a shard."""
        if change.volume is not None:
            self.shards.forget(change.volume.volume_id)
            self._journalled.add(change.volume.key)
        if change.refused is not None:
            self._journalled.add(refused_file_key(change.refused))
        return self.index.apply(change)

    def _journal_parts(self) -> list[Path]:
        """The journal that a killed ingest into a bucket left."""
        return sorted(self.path.glob("journal-*.jsonl"))

    @property
    def location(self) -> str:
        """Path or URL of the store, for messages."""
        return self.storage.location

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Opens an existing store at a path, gs:// or s3:// address.

        Raises UsageError if there is no such folder, it is not a store, has a newer schema or a damaged store.json; for
        a bucket also the errors of `octjepa.remote`.
        """
        storage = _storage_at(path)
        folder = storage.snapshot()
        if folder is None:
            raise UsageError(
                f"no store at {path}: make one with `octjepa ingest SOURCE --store {shlex.quote(str(path))}`"
            )
        return cls(storage, folder)

    @classmethod
    def create(
        cls, path: str | Path, preprocessing: Preprocessing, halves: bool = False, bscan_slices: int = 0
    ) -> Store:
        """Creates a store, or opens an existing one with an equal contract; `halves` are stored if it has them.

        With `bscan_slices` it holds single B-scans, each in so many stored slices. Raises ContractError with the
        differences if the contract of the existing store is another, it was made without the requested halves, or it
        holds volumes where B-scans are wanted, or the reverse.
        """
        storage = _storage_at(path)
        folder = storage.snapshot()
        if folder is None or not (folder / MARKER).is_file():
            storage.create(contract_text(preprocessing, halves, bscan_slices))
        store = cls.open(path)
        check_same_contract(store.location, store.preprocessing, store.canonical_version, preprocessing)
        if halves and not store.halves:
            raise ContractError(
                f"the store {store.location} was made without halves, and its volumes would not have them: name a new "
                "--store folder, or drop --halves"
            )
        if bscan_slices != store.bscan_slices:
            kinds = [
                f"single B-scans in {count} slices (--images)" if count else "volumes"
                for count in (store.bscan_slices, bscan_slices)
            ]
            raise ContractError(
                f"the store {store.location} holds {kinds[0]}, and this command reads {kinds[1]}: name another --store"
            )
        return store

    @property
    def table(self) -> pd.DataFrame:
        """One line per volume, sorted by volume_id, columns `COLUMNS`."""
        import pandas as pd

        if self._table is None:
            table = self.index.table
            if table is None:
                entries = [self.index.volumes[key] for key in sorted(self.index.volumes)]
                self._table = pd.DataFrame(map(attrgetter(*COLUMNS), entries), columns=list(COLUMNS))
            else:
                self._table = table.reindex(columns=list(COLUMNS)).sort_values("volume_id", ignore_index=True)
            self._lines = None
        return self._table

    @property
    def participants(self) -> pd.DataFrame:
        """Columns `PARTICIPANT_COLUMNS`; empty if no participants.tsv came with the files.

        Raises OctjepaError: participants.parquet is damaged.
        """
        return read_people(self.path, self.location)

    @property
    def quarantine(self) -> list[dict[str, str]]:
        """Entries {file, hash, stage, reason, detail, when, file_key}, sorted by file.

        Those of the stage "discover" also have `found_in`, the hashed name of the source that was searched.
        """
        return sorted(self.index.quarantine.values(), key=lambda entry: (entry["file"], refused_file_key(entry)))

    def entries(self) -> Iterable[IndexEntry]:
        """The index entries of all volumes, in no particular order."""
        return self.index.volumes.values()

    def entry(self, volume_id: str) -> IndexEntry:
        """The index entry of a volume. Raises KeyError: no such volume."""
        return self.index.volumes[volume_id]

    # -- reading volumes --

    def chunk_folder(self, volume_id: str) -> Path:
        """The folder of a volume's files under `path`."""
        return chunk_folder(self.path, volume_id)

    def chunk_location(self, volume_id: str) -> str:
        """Path or URL of a volume's files, for messages."""
        return f"{self.location}/chunks/{volume_id[:2]}/{volume_id}"

    def __len__(self) -> int:
        """Number of volumes."""
        return len(self.table)

    def __getitem__(self, index: int) -> CanonicalVolume:
        """The volume on line `index` of `table`, so that a store is a map-style data set of PyTorch. As `read`."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"volume {index} of a store of {len(self)}")
        return self.read(str(self.table["volume_id"].iloc[index]))

    def read(self, volume_id: str, halves: bool = False) -> CanonicalVolume:
        """One volume; `pixels` is a read-only memory map. `halves`: with `half_difference`.

        This process compares a chunk with the SHA-256 of the index when it first reads it, on a disk and from a bucket.
        Raises UsageError: no such volume. ResourceError: no memory, files or right to read it. DamagedVolume, also
        if it has no halves. OctjepaError: its bucket fails.
        """
        table = self.table
        if self._lines is None:
            self._lines = {name: line for line, name in enumerate(table["volume_id"])}
            self._moments = table[["tissue_mean", "tissue_std"]].to_numpy(float)
        line = self._lines.get(volume_id)
        if line is None:
            raise UsageError(f"the store {self.location} has no volume {volume_id}")
        name = self.chunk_location(volume_id)
        with reading_chunk(name), self.chunk_files(volume_id) as files:
            self._check_hash(volume_id, name, table["chunk_hash"].iloc[line], files)
            pixels = files["pixels.npy"].memory_map()
            band, shifts = read_geometry(files["geometry.npz"], files["geometry.npz"].mtime_ns)
            half_difference = read_half_difference(files["geometry.npz"]) if halves else None
        size = self.preprocessing.stored_size
        if pixels.shape != size:
            raise DamagedVolume(f"{name} holds {pixels.shape}, the contract says {size}")
        if band.shape != (2, size[0], size[2]) or (half_difference is not None and half_difference.shape != size):
            raise DamagedVolume(f"{name} holds a geometry of another shape than its voxels {size}")
        mean, std = self._moments[line].tolist()
        return CanonicalVolume(
            volume_id,
            pixels,
            band,
            mean,
            std,
            shifts,
            half_difference=half_difference,
            bscan_slices=self.bscan_slices,
        )

    @contextmanager
    def chunk_files(self, volume_id: str) -> Iterator[dict[str, ChunkFile]]:
        """{file name: file} of a volume, in its folder or its shard; from a bucket, local copies within the context.

        Raises DamagedVolume (a bucket has no such chunk) and OctjepaError (it fails).
        """
        part = self.shards.part(volume_id)
        if part is None and isinstance(self.storage, DiskStorage) and not self.storage.has_chunk(volume_id):
            self.shards = ShardTable.read(self.path)  # it may have been packed since the store was opened
            part = self.shards.part(volume_id)
        with self.storage.chunk(volume_id) if part is None else self.storage.shard(part) as files:
            yield files

    def has_files(self, volume_id: str) -> bool:
        """Whether the files of a volume, or the shard with them, are there."""
        part = self.shards.part(volume_id)
        return self.storage.has_chunk(volume_id) if part is None else self.storage.has_shard(part.shard)

    def _check_hash(self, volume_id: str, name: str, expected: object, files: Mapping[str, ChunkFile]) -> None:
        """Raises ChangedVolume where a chunk differs from what was written. An entry without a hash is not checked.

        `name` is the location of the chunk for the message.
        """
        version = (volume_id, files["pixels.npy"].mtime_ns, files["geometry.npz"].mtime_ns)
        if version in self._verified or not isinstance(expected, str) or not expected:
            return
        if chunk_hash(files) != expected:
            raise ChangedVolume(
                f"{name} changed after ingest (its SHA-256 is not that of the index): `octjepa inspect STORE --verify` "
                "lists all volumes that changed; delete their folders and ingest again"
            )
        self._verified.add(version)

    def native_map(self, volume_id: str) -> NativeMap:
        """The map between a stored volume and its native scan.

        Raises UsageError if the store has no such volume, DamagedVolume if its geometry cannot be read.
        """
        from octjepa.canonical.native_mapping import NativeMap  # training needs no native geometry

        entries = entries_of(self.table[self.table["volume_id"] == volume_id])
        if not entries:
            raise UsageError(f"the store {self.location} has no volume {volume_id}")
        entry = entries[0]
        with reading_chunk(self.chunk_location(volume_id)), self.chunk_files(volume_id) as files:
            shifts, frame_mm = read_arrays(files["geometry.npz"], "frame_shifts", "frame_mm")
        # A single B-scan is as thick as the stored slices that it fills: all of these map to it, and no other does.
        filled_mm = self.bscan_slices * self.preprocessing.target_spacing_mm[0]
        slice_mm = filled_mm or entry.spacing_mm[0]
        return NativeMap(
            shape=entry.shape,
            spacing_mm=(slice_mm, *entry.spacing_mm[1:]),
            preprocessing=self.preprocessing,
            frame_shifts=shifts,
            frame_mm=frame_mm,
            mirrored=entry.mirrored,
        )

    def damaged(self) -> list[str]:
        """Reads every chunk; the ids of volumes whose chunk is absent or differs from what was written.

        A chunk that cannot be read now is not reported as damaged: raises ResourceError, or as `octjepa.remote` where
        a bucket fails.
        """
        damaged = []
        for volume_id in self.table["volume_id"]:
            try:
                self.read(volume_id)
            except DamagedVolume:
                damaged.append(volume_id)
        return damaged

    def describe(self) -> StoreFacts:
        """The content of the store, as `octjepa inspect STORE` prints it."""
        from octjepa.read.personal_data import count_fields  # only `octjepa inspect` needs the readers' vocabulary

        table, refused = self.table, self.index.quarantine.values()
        return StoreFacts(
            volumes=len(table),
            people=int(table["person_id"].nunique()),
            people_unknown=people_unknown(table),
            personal_data=count_fields(map(read_codes, table["personal"])),
            eyes=len(table[["person_id", "eye"]].drop_duplicates()),
            by_device=dict(sorted(Counter(table["device"]).items())),
            by_pattern=dict(sorted(Counter(table["pattern"]).items())),
            by_split=dict(sorted(Counter(table["split"]).items())),
            quarantined=len(refused),
            by_reason=dict(sorted(Counter(entry["reason"] for entry in refused).items())),
            packed=len(self.shards),
            stored_size=self.preprocessing.stored_size,
            preprocessing=self.preprocessing,
            contract_hash=self.contract_hash,
            halves=self.halves,
            bscan_slices=self.bscan_slices,
            canonical_version=self.canonical_version,
        )

    # -- writing, by one process at a time --

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Makes this process the only writer, with everything that others wrote before.

        Raises UsageError: another process writes.
        """
        if self._writer is not None:
            yield
            return
        try:
            with self.storage.writing() as self._writer:
                self._load(self._writer.folder)
                yield
                self._writer.publish()
        finally:
            self._writer = None

    def known_files(self) -> dict[str, FileState]:
        """file key -> the state in which it was read, of every accepted file whose chunk is there."""
        volumes = self.index.volumes.items()
        return {entry.key: entry.file_state for name, entry in volumes if self.has_files(name)}

    def add(self, entry: IndexEntry) -> None:
        """Adds the index entry of a volume whose chunk is in its folder."""
        self._record(IndexChange(volume=entry))

    def change(self, entry: IndexEntry) -> None:
        """Replaces the entry of a volume with `entry`; `consolidate` writes it."""
        self.index.volumes[entry.volume_id] = entry
        self._table = None

    def refuse(self, entry: dict[str, str]) -> None:
        """Adds the quarantine entry of a file."""
        self._record(IndexChange(refused=entry))

    def clear_refusals(self, file_keys: Iterable[str]) -> None:
        """Removes the quarantine entries of files whose volumes are valid; `consolidate` writes it."""
        for key in file_keys:
            self.index.quarantine.pop(key, None)

    def _record(self, change: IndexChange) -> None:
        writer = self.writer
        self._journal.append(change.to_json())
        removed = self._apply(change)
        self._table = None
        writer.add(change)
        if removed and removed not in self.index.volumes:
            writer.drop(removed)

    @property
    def writer(self) -> Writer:
        """The object that publishes the files that the writing process puts into `path`."""
        return self._writer or DiskStorage(self.path)

    def set_split(self, splits: Mapping[str, str]) -> None:
        """Writes person -> "train" | "val" | "test" ("" takes it away). Raises UsageError for another word.

        Within `writing` the caller writes the index with `consolidate` when everything is done.
        """
        unknown = sorted(set(splits.values()) - {*SPLIT_NAMES, ""})
        if unknown:
            raise UsageError(f"split {unknown[0]!r} is none of train, val, test")
        is_within = self._writer is not None
        with self.writing():
            table = self.table
            chosen = table["person_id"].map(dict(splits))
            table = table.assign(split=chosen.where(chosen.notna(), table["split"]))
            self.index = Index(table, self.quarantine, self.index.past_splits)
            self._table = None
            if not is_within:
                self.consolidate()

    def add_participants(self, people: list[dict[str, object]]) -> None:
        """Adds persons, and replaces values of a stored person by filled values; warns where two tables differ."""
        if people:
            table = merge_participants(self.participants, people)
            write_atomic(self.path / "participants.parquet", lambda file: table.to_parquet(file, index=False))

    def consolidate(self) -> None:
        """Writes volumes.parquet and quarantine.jsonl and removes the journal; a kill in between loses nothing.

        Splits and masked names are newer than the lines of the journal, and whoever opens the store replays the journal
        over the table. So the journal first gets the entries as they are now.
        """
        self._table = None
        table = self.table
        if self._journalled:
            self.writer.settle(self._changes_of_journalled())
        lines = "".join(json.dumps(entry) + "\n" for entry in self.quarantine)
        self.index.forget_present()
        if self.index.past_splits or (self.path / PAST_SPLITS_FILE).is_file():
            write_json(self.path / PAST_SPLITS_FILE, self.index.past_splits)  # before the volumes leave
        write_atomic(self.path / "volumes.parquet", lambda file: table.to_parquet(file, index=False))
        write_atomic(self.path / "quarantine.jsonl", lambda file: file.write(lines.encode()))
        self.shards.write(self.path)
        is_labelled = np.array([bool(cell) for cell in text_cells(table["labels"])], bool)
        labels = format_labels(entries_of(table[is_labelled])) if is_labelled.any() else ""
        if labels or (self.path / LABELS_FILE).is_file():
            write_atomic(self.path / LABELS_FILE, lambda file: file.write(labels.encode()))
        for part in self._journal_parts():
            part.unlink()
        self._journal.remove()  # last: it settles what the parts say
        self._journalled.clear()
        if self._writer is not None:
            self._writer.publish()

    def _changes_of_journalled(self) -> Iterator[IndexChange]:
        """The entries of the files that the journal names, as journal lines that give what the index holds now."""
        for entry in self.index.volumes.values():
            if entry.key in self._journalled:
                yield IndexChange(volume=entry)
        for key, refused in self.index.quarantine.items():
            if key in self._journalled:
                yield IndexChange(refused=refused)
