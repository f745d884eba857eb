"""The store on disk: an index, a ledger, and a folder per volume named by its content.

    store.json            schema version, version of the canonicalisation, preprocessing contract and its hash
    volumes.parquet       a row per volume           quarantine.jsonl   a line per refused file
    participants.parquet  person, site, group, age, recommended split
    labels.tsv            labels that came in the files, a row per volume that has any
    journal.jsonl         what the running (or killed) ingest added since the last two were written; in a bucket
                          journal-<number>.jsonl, a part each time
    chunks/aa/<id>/       pixels.npy (memory-mapped), geometry.npz

Plain .npy memory maps: a canonical volume is small, is read in one sequential pass and cropped by whole voxels, and
needs no decoder. No compressed chunk format has been measured against them yet.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octjepa.config import science_hash
from octjepa.errors import OctjepaError, UsageError
from octjepa.files import (
    CHUNK_FILES,
    Journal,
    chunk_hash,
    write_atomic,
    write_json,
    writer_lock,
)
from octjepa.ingest.personal_data import count_fields
from octjepa.recipe import Preprocessing
from octjepa.remote import is_remote, put_bytes
from octjepa.store.bucket import Bucket, Writer
from octjepa.store.canonical import CANONICAL_VERSION, CanonicalVolume
from octjepa.store.chunk import DamagedVolume, geometry_of, reading_chunk
from octjepa.store.contract import MARKER, contract_of, read_contract, refuse_another_contract
from octjepa.store.labels import LABELS_FILE, labels_table
from octjepa.store.participants import PARTICIPANT_COLUMNS, merged_people
from octjepa.store.rows import Rows
from octjepa.store.rows import file_key as file_key

if TYPE_CHECKING:
    import pandas as pd

TEXT_COLUMNS = (
    "volume_id", "content_hash", "person_id", "eye", "laterality_source", "device", "protocol", "region", "pattern",
    "sop_instance_uid", "source", "visit", "site", "format", "personal",
    "enface_hash", "labels",
)  # fmt: skip
COLUMNS = (
    *TEXT_COLUMNS, "native_d", "native_h", "native_w", "spacing_z_mm", "spacing_y_mm", "spacing_x_mm",
    "provenance_slice", "provenance_depth", "provenance_column", "uncertain", "notes", "mirrored",
    "tissue_mean", "tissue_std", "tissue_share", "quality", "snr_db", "blank_share", "clipped_share", "motion_um",
    "fill_share", "split", "chunk_hash",
    "file", "file_key", "file_size", "file_mtime_ns", "manifest_hash",
)  # fmt: skip


class Store:
    """A folder of canonical volumes made with one preprocessing contract, on a disk or in a bucket.

    `path` is the folder; of a store in a bucket the local one with the index, while chunks come through the cache.
    """

    _bucket: Bucket | None = None
    _writer: Writer | None = None
    _alone = False

    def __init__(
        self,
        path: Path,
        preprocessing: Preprocessing,
        canonical_version: int = CANONICAL_VERSION,
        bucket: Bucket | None = None,
    ) -> None:
        self.preprocessing = preprocessing
        self.canonical_version = canonical_version
        self.contract_hash = science_hash(preprocessing)
        self._bucket = bucket
        self._verified: set[tuple[str, int]] = set()
        self._settle_in(path)

    def _settle_in(self, path: Path) -> None:
        self.path = path
        self._journal = Journal(path / "journal.jsonl")
        self._state = self._load()
        self._table: pd.DataFrame | None = None

    @property
    def location(self) -> str:
        """Where the store lies, for the user: a path or a url."""
        return str(self.path) if self._bucket is None else self._bucket.url

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Raises UsageError: no such folder, not a store, a newer schema, a damaged store.json; as `octjepa.remote`."""
        if is_remote(path):
            bucket = Bucket(str(path))
            snapshot = bucket.snapshot()
            if snapshot is None:
                raise UsageError(f"no store at {path}: make one with `octjepa ingest SOURCE --store {path}`")
            return cls._open(snapshot, bucket)
        path = Path(path)
        if not path.is_dir():
            raise UsageError(f"no store at {path}: make one with `octjepa ingest SOURCE --store {path}`")
        return cls._open(path, None)

    @classmethod
    def _open(cls, path: Path, bucket: Bucket | None) -> Store:
        preprocessing, version = read_contract(path)
        return cls(path, preprocessing, version, bucket)

    @classmethod
    def create(cls, path: str | Path, preprocessing: Preprocessing) -> Store:
        """A new store, or the one that is there if its contract is equal. Raises ContractError with a diff."""
        if is_remote(path):
            return cls._create_in_bucket(Bucket(str(path)), preprocessing)
        path = Path(path)
        if (path / MARKER).is_file():
            store = cls.open(path)
            store.check_contract(preprocessing)
            return store
        if path.exists() and (not path.is_dir() or any(child.name != ".lock" for child in path.iterdir())):
            raise UsageError(f"{path} exists and is no store: name an empty or a new folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make a store at {path}: {error.strerror or error}") from None
        write_json(path / MARKER, contract_of(preprocessing))
        return cls(path, preprocessing)

    @classmethod
    def _create_in_bucket(cls, bucket: Bucket, preprocessing: Preprocessing) -> Store:
        if bucket.snapshot() is None:
            if any(not one.url.endswith("/.lock") for one in bucket.files()):
                raise UsageError(f"{bucket.url} holds objects and is no store: name an empty or a new place")
            content = json.dumps(contract_of(preprocessing), indent=1, sort_keys=True).encode()
            put_bytes(content, f"{bucket.url}/{MARKER}", only_if_absent=True)
        store = cls.open(bucket.url)
        store.check_contract(preprocessing)
        return store

    def check_contract(self, preprocessing: Preprocessing) -> None:
        """For writing. Raises ContractError: another canonicalisation made the store, or every field that differs."""
        refuse_another_contract(self.location, (self.preprocessing, self.canonical_version), preprocessing)

    def _load(self) -> Rows:
        import pandas as pd

        records: list[dict[Any, Any]] = []
        index = self.path / "volumes.parquet"
        if index.is_file():
            try:
                table = pd.read_parquet(index)
                if "provenance_row" in table:  # earlier stores call the depth axis "row"
                    table = table.rename(columns={"provenance_row": "provenance_depth"})
                    table["uncertain"] = table["uncertain"].str.replace(r"\brow\b", "depth", regex=True)
                records = table.to_dict("records")
            except (OSError, ValueError) as error:
                raise OctjepaError(f"volumes.parquet of the store {self.location} is damaged: {error}") from error
        rows = ({str(k): v for k, v in row.items()} for row in records)
        state = Rows(rows, Journal(self.path / "quarantine.jsonl").read())
        for journal in (*map(Journal, self._journal_parts()), self._journal):
            for entry in journal.read():
                state.apply(entry)
        return state

    def _journal_parts(self) -> list[Path]:
        """What a killed ingest into a bucket left of its journal."""
        return sorted(self.path.glob("journal-*.jsonl"))

    @property
    def table(self) -> pd.DataFrame:
        """One row per volume, sorted by volume_id, columns `COLUMNS`."""
        import pandas as pd

        if self._table is None:
            rows = [self._state.rows[key] for key in sorted(self._state.rows)]
            self._table = pd.DataFrame(rows, columns=list(COLUMNS))
        return self._table

    @property
    def participants(self) -> pd.DataFrame:
        """Columns `PARTICIPANT_COLUMNS`; empty where no participants.tsv came with the files.

        Raises OctjepaError: participants.parquet is damaged.
        """
        import pandas as pd

        path = self.path / "participants.parquet"
        if not path.is_file():
            return pd.DataFrame(columns=list(PARTICIPANT_COLUMNS))
        try:
            return pd.read_parquet(path)[list(PARTICIPANT_COLUMNS)]
        except (OSError, ValueError, KeyError) as error:
            raise OctjepaError(
                f"participants.parquet of the store {self.location} is damaged ({type(error).__name__}): remove it and "
                "ingest again with the participants.tsv it came from"
            ) from None

    @property
    def quarantine(self) -> list[dict[str, str]]:
        """Rows {file, hash, stage, reason, detail, when, file_key}, sorted by file."""
        return sorted(self._state.quarantine.values(), key=lambda row: (row["file"], file_key(row)))

    def chunk_folder(self, volume_id: str) -> Path:
        return self.path / "chunks" / volume_id[:2] / volume_id

    def read(self, volume_id: str) -> CanonicalVolume:
        """`pixels` is a read-only memory map.

        Raises UsageError: no such volume; MachineRefuses: no memory, files or right to read it; DamagedVolume;
        OctjepaError: its bucket fails. A chunk from a bucket is held against the SHA-256 of the index at first.
        """
        return self._read(volume_id, verify=self._bucket is not None)

    def _read(self, volume_id: str, verify: bool) -> CanonicalVolume:
        row = self._state.rows.get(volume_id)
        if row is None:
            raise UsageError(f"the store {self.location} has no volume {volume_id}")
        name = self.chunk_location(volume_id)
        with reading_chunk(name), self.chunk_files(volume_id) as parts:
            if verify:
                self._check(row, parts)
            pixels = np.lib.format.open_memmap(parts["pixels.npy"], mode="r")
            band, shifts = geometry_of(parts["geometry.npz"], parts["geometry.npz"].stat().st_mtime_ns)
        if pixels.shape != self.preprocessing.stored_size:
            raise DamagedVolume(f"{name} holds {pixels.shape}, the contract says {self.preprocessing.stored_size}")
        return CanonicalVolume(volume_id, pixels, band, float(row["tissue_mean"]), float(row["tissue_std"]), shifts)

    def chunk_location(self, volume_id: str) -> str:
        """Where a volume lies, for the user."""
        return f"{self.location}/chunks/{volume_id[:2]}/{volume_id}"

    @contextmanager
    def chunk_files(self, volume_id: str) -> Iterator[dict[str, Path]]:
        """The files of a chunk by name; those of a bucket are held in the cache meanwhile."""
        local = {name: self.chunk_folder(volume_id) / name for name in CHUNK_FILES}
        with nullcontext(local) if self._bucket is None else self._bucket.chunk(volume_id) as parts:
            yield parts

    def _check(self, row: Mapping[str, Any], parts: Mapping[str, Path]) -> None:
        """Raises ValueError where a chunk is not the one that was written; the first indexes do not say."""
        state = (str(row["volume_id"]), parts["pixels.npy"].stat().st_mtime_ns)
        expected = row.get("chunk_hash")
        if state in self._verified or not isinstance(expected, str) or not expected:
            return
        if chunk_hash(parts) != expected:
            raise ValueError("its SHA-256 is not that of the index")
        self._verified.add(state)

    def damaged(self) -> list[str]:
        """The ids of volumes whose chunk is absent or not the one that was written. Reads every chunk.

        What cannot be read now is not known to be damaged: raises MachineRefuses, or as `octjepa.remote` where a bucket
        fails.
        """
        found = []
        for volume_id in sorted(self._state.rows):
            try:
                self._read(volume_id, verify=True)
            except DamagedVolume:
                found.append(volume_id)
        return found

    def set_split(self, splits: Mapping[str, str]) -> None:
        """Writes person -> "train" | "val" | "test" ("" takes it away). Raises UsageError for another word."""
        strange = sorted(set(splits.values()) - {"train", "val", "test", ""})
        if strange:
            raise UsageError(f"split {strange[0]!r} is none of train, val, test")
        with self.writing():
            for row in self._state.rows.values():
                row["split"] = splits.get(row["person_id"], row["split"])
            self.consolidate()

    def describe(self) -> dict[str, Any]:
        """What `octjepa inspect STORE` says."""
        from octjepa.store.cohort_flow import text_column

        table = self.table
        return {
            "kind": "store",
            "volumes": len(table),
            "people": int(table["person_id"].nunique()),
            "people_unknown": people_unknown(table),
            "personal_data": count_fields(text_column(table["personal"])),
            "eyes": int(table[["person_id", "eye"]].drop_duplicates().shape[0]),
            "by_device": dict(sorted(Counter(table["device"]).items())),
            "by_pattern": dict(sorted(Counter(table["pattern"]).items())),
            "by_split": dict(sorted(Counter(table["split"]).items())),
            "quarantined": len(self._state.quarantine),
            "by_reason": dict(sorted(Counter(row["reason"] for row in self._state.quarantine.values()).items())),
            "stored_size": list(self.preprocessing.stored_size),
            "preprocessing": self.preprocessing.model_dump(mode="json"),
            "contract_hash": self.contract_hash,
            "canonical_version": self.canonical_version,
        }

    # -- writing, by the one process that holds the store --

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the store for this process, with all that others wrote before. Raises UsageError: another has it."""
        if self._alone:
            yield
            return
        self._alone = True
        try:
            if self._bucket is None:
                with writer_lock(self.path):
                    self._settle_in(self.path)
                    yield
                return
            with self._bucket.writing() as self._writer:
                self._settle_in(self._writer.folder)
                yield
                self._writer.send_index()
        finally:
            self._alone, self._writer = False, None

    def _has_chunk(self, volume_id: str) -> bool:
        if self._bucket is not None:
            return self._bucket.has_chunk(volume_id)
        return all((self.chunk_folder(volume_id) / name).is_file() for name in CHUNK_FILES)

    def known_files(self) -> dict[str, tuple[int, int, str]]:
        """file key -> (size, mtime_ns, hash of the manifest row) of every accepted file whose chunk is there."""
        return {
            file_key(row): (int(row["file_size"]), int(row["file_mtime_ns"]), str(row["manifest_hash"]))
            for name, row in self._state.rows.items()
            if self._has_chunk(name)
        }

    def entries(self) -> Iterable[dict[str, Any]]:
        return self._state.rows.values()

    def add(self, row: dict[str, Any]) -> None:
        self._record({"volume": row})

    def refuse(self, row: dict[str, str]) -> None:
        self._record({"refused": row})

    def _record(self, entry: dict[str, Any]) -> None:
        self._journal.append(entry)
        gone = self._state.apply(entry)
        self._table = None
        if self._writer is not None:
            self._writer.add(entry, self.chunk_folder)
        if gone and gone not in self._state.rows:
            if self._writer is None:
                shutil.rmtree(self.chunk_folder(gone), ignore_errors=True)
            else:
                self._writer.drop(gone)

    def add_participants(self, people: list[dict[str, object]]) -> None:
        """Adds or replaces persons; warns where two tables say different things of one."""
        import pandas as pd

        if not people:
            return
        merged = merged_people([*self.participants.to_dict("records"), *people])
        frame = pd.DataFrame(merged, columns=list(PARTICIPANT_COLUMNS))
        write_atomic(self.path / "participants.parquet", lambda file: frame.to_parquet(file, index=False))

    def consolidate(self) -> None:
        """Folds the journal into volumes.parquet and quarantine.jsonl; the next opening repeats what a kill left."""
        self._table = None
        table = self.table
        lines = "".join(json.dumps(row) + "\n" for row in self.quarantine)
        write_atomic(self.path / "volumes.parquet", lambda file: table.to_parquet(file, index=False))
        write_atomic(self.path / "quarantine.jsonl", lambda file: file.write(lines.encode()))
        labels = labels_table(self._state.rows.values())
        if labels or (self.path / LABELS_FILE).is_file():
            write_atomic(self.path / LABELS_FILE, lambda file: file.write(labels.encode()))
        self._journal.remove()
        for part in self._journal_parts():
            part.unlink()
        if self._writer is not None:
            self._writer.send_index()


def people_unknown(table: pd.DataFrame) -> int:
    """Volumes of a store's table whose person no source named: each stands there as a person of its own."""
    return sum("person_unknown" in str(notes).split(";") for notes in table["notes"])
