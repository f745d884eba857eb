"""The store on disk: an index, a ledger, and a folder per volume named by its content.

    store.json            schema version, version of the canonicalisation, preprocessing contract and its hash
    volumes.parquet       a row per volume           quarantine.jsonl   a line per refused file
    participants.parquet  person, site, group, age, recommended split
    journal.jsonl         what the running (or killed) ingest added since the last two were written
    chunks/aa/<id>/       pixels.npy (memory-mapped), geometry.npz

Plain .npy memory maps: a canonical volume is small, is read in one sequential pass and cropped by whole voxels, and
needs no decoder. No compressed chunk format has been measured against them yet.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octjepa.config import science_hash
from octjepa.errors import ContractError, OctjepaError, UsageError
from octjepa.recipe import Preprocessing
from octjepa.store.canonical import CANONICAL_VERSION, CanonicalVolume
from octjepa.store.disk import Journal, swap_in, write_atomic, write_json, write_new_folder

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
TEXT_COLUMNS = (
    "volume_id", "content_hash", "person_id", "eye", "laterality_source", "device", "protocol", "region", "pattern",
    "sop_instance_uid", "source", "visit", "site", "format", "personal",
)  # fmt: skip
COLUMNS = (
    *TEXT_COLUMNS, "native_d", "native_h", "native_w", "spacing_z_mm", "spacing_y_mm", "spacing_x_mm",
    "provenance_slice", "provenance_row", "provenance_column", "uncertain", "notes", "mirrored",
    "tissue_mean", "tissue_std", "tissue_share", "quality", "split",
    "file", "file_key", "file_size", "file_mtime_ns", "manifest_hash",
)  # fmt: skip
PARTICIPANT_COLUMNS = ("person_id", "clinical_site", "study_group", "age", "recommended_split")


# The file could not be looked at: what the store holds of it is as good as before.
_NOT_JUDGED = {"unreadable_file", "manifest_row_without_file"}


def file_key(row: Mapping[str, Any]) -> str:
    """What names the file of an index or ledger row; the relative path where no key came with it."""
    return str(row.get("file_key") or row["file"])


class _State:
    """Index and ledger in memory: rows by volume id, quarantine rows by file; a file stands in one of the two."""

    def __init__(self, rows: Iterable[dict[str, Any]], quarantine: Iterable[dict[str, str]]) -> None:
        self.rows = {str(row["volume_id"]): row for row in rows}
        self.quarantine = {file_key(row): row for row in quarantine}
        self._volume_of = {file_key(row): name for name, row in self.rows.items()}

    def apply(self, entry: Mapping[str, Any]) -> str:
        """The id of a volume that this entry takes out of the index, or ""."""
        row = dict(entry.get("volume") or entry.get("refused") or {})
        if not row:
            return ""
        file = file_key(row)
        before = self._volume_of.get(file, "")
        if "refused" in entry:
            self.quarantine[file] = row
            gone = "" if row["reason"] in _NOT_JUDGED else before
        else:
            gone = before if before != row["volume_id"] else ""
        if gone:
            del self.rows[gone], self._volume_of[file]
        if "volume" in entry:
            self.quarantine.pop(file, None)
            if replaced := self.rows.get(row["volume_id"]):
                self._volume_of.pop(file_key(replaced), None)
            self.rows[row["volume_id"]] = row
            self._volume_of[file] = row["volume_id"]
        return gone


@lru_cache(maxsize=4096)
def _geometry(folder: Path, mtime_ns: int) -> tuple[np.ndarray, np.ndarray]:
    """Band and shifts of a chunk: a few kilobytes whose archive costs more to open than the pixels' memory map.

    `mtime_ns` is the archive's, so that a chunk that was made anew is read anew.
    """
    with np.load(folder / "geometry.npz", allow_pickle=False) as geometry:
        return geometry["band"], geometry["shifts"]


class Store:
    """A folder of canonical volumes made with one preprocessing contract."""

    def __init__(self, path: Path, preprocessing: Preprocessing, canonical_version: int = CANONICAL_VERSION) -> None:
        self.path = path
        self.preprocessing = preprocessing
        self.canonical_version = canonical_version
        self.contract_hash = science_hash(preprocessing)
        self._journal = Journal(path / "journal.jsonl")
        self._state = self._load()
        self._table: pd.DataFrame | None = None

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Raises UsageError: no such folder, not a store, a newer schema, a damaged store.json."""
        path = Path(path)
        if not path.is_dir():
            raise UsageError(f"no store at {path}: make one with `octjepa ingest SOURCE --store {path}`")
        marker = path / "store.json"
        if not marker.is_file():
            raise UsageError(f"{path} is no store (it has no store.json): make one with `octjepa ingest`")
        try:
            found = json.loads(marker.read_text(encoding="utf-8"))
            schema = int(found["schema_version"])
            if schema > SCHEMA_VERSION:
                raise UsageError(
                    f"the store {path} has schema {schema}, this octjepa reads up to {SCHEMA_VERSION}: update octjepa"
                )
            preprocessing = Preprocessing.model_validate(found["contract"])
            version = int(found.get("canonical_version", 0))  # the first stores did not say
        except UsageError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{marker} cannot be read as a store's contract: {error}") from None
        return cls(path, preprocessing, version)

    @classmethod
    def create(cls, path: str | Path, preprocessing: Preprocessing) -> Store:
        """A new store, or the one that is there if its contract is equal. Raises ContractError with a diff."""
        path = Path(path)
        if (path / "store.json").is_file():
            store = cls.open(path)
            store.check_contract(preprocessing)
            return store
        if path.exists() and (not path.is_dir() or any(child.name != ".lock" for child in path.iterdir())):
            raise UsageError(f"{path} exists and is no store: name an empty or a new folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make a store at {path}: {error.strerror or error}") from None
        about = {
            "schema_version": SCHEMA_VERSION,
            "canonical_version": CANONICAL_VERSION,
            "contract": preprocessing.model_dump(mode="json"),
            "contract_hash": science_hash(preprocessing),
        }
        write_json(path / "store.json", about)
        return cls(path, preprocessing)

    def check_contract(self, preprocessing: Preprocessing) -> None:
        """For writing. Raises ContractError: another canonicalisation made the store, or every field that differs."""
        if self.canonical_version != CANONICAL_VERSION:
            raise ContractError(
                f"the store {self.path} was made by canonicalisation {self.canonical_version}, this octjepa makes "
                f"{CANONICAL_VERSION}: volumes of both would not be comparable; ingest into a new --store folder"
            )
        if science_hash(preprocessing) == self.contract_hash:
            return
        ours, theirs = self.preprocessing.model_dump(mode="json"), preprocessing.model_dump(mode="json")
        diff = "\n".join(
            f"  preprocessing.{key}: store {ours[key]}, asked {theirs[key]}" for key in ours if ours[key] != theirs[key]
        )
        raise ContractError(
            f"the store {self.path} was made with another preprocessing contract:\n{diff}\n"
            "name another --store folder for these settings, or use a recipe with the store's"
        )

    def _load(self) -> _State:
        import pandas as pd

        records: list[dict[Any, Any]] = []
        index = self.path / "volumes.parquet"
        if index.is_file():
            try:
                records = pd.read_parquet(index).to_dict("records")
            except (OSError, ValueError) as error:
                raise OctjepaError(f"{index} is damaged: {error}") from error
        rows = ({str(k): v for k, v in row.items()} for row in records)
        state = _State(rows, Journal(self.path / "quarantine.jsonl").read())
        for entry in self._journal.read():
            state.apply(entry)
        return state

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
        """Columns `PARTICIPANT_COLUMNS`; empty where no participants.tsv came with the files."""
        import pandas as pd

        path = self.path / "participants.parquet"
        return pd.read_parquet(path) if path.is_file() else pd.DataFrame(columns=list(PARTICIPANT_COLUMNS))

    @property
    def quarantine(self) -> list[dict[str, str]]:
        """Rows {file, hash, stage, reason, detail, when, file_key}, sorted by file."""
        return sorted(self._state.quarantine.values(), key=lambda row: (row["file"], file_key(row)))

    def chunk(self, volume_id: str) -> Path:
        return self.path / "chunks" / volume_id[:2] / volume_id

    def read(self, volume_id: str) -> CanonicalVolume:
        """`pixels` is a read-only memory map. Raises UsageError: no such volume; OctjepaError: damaged files."""
        row = self._state.rows.get(volume_id)
        if row is None:
            raise UsageError(f"the store {self.path} has no volume {volume_id}")
        folder = self.chunk(volume_id)
        try:
            pixels = np.load(folder / "pixels.npy", mmap_mode="r", allow_pickle=False)
            band, shifts = _geometry(folder, (folder / "geometry.npz").stat().st_mtime_ns)
        except (OSError, ValueError, KeyError) as error:
            raise OctjepaError(f"{folder} is damaged ({error}): delete it and ingest again") from None
        if pixels.shape != self.preprocessing.stored_size:
            raise OctjepaError(f"{folder} holds {pixels.shape}, the contract says {self.preprocessing.stored_size}")
        return CanonicalVolume(volume_id, pixels, band, float(row["tissue_mean"]), float(row["tissue_std"]), shifts)

    def set_split(self, splits: Mapping[str, str]) -> None:
        """Writes person -> "train" | "val" | "test" ("" takes it away). Raises UsageError for another word."""
        strange = sorted(set(splits.values()) - {"train", "val", "test", ""})
        if strange:
            raise UsageError(f"split {strange[0]!r} is none of train, val, test")
        for row in self._state.rows.values():
            row["split"] = splits.get(row["person_id"], row["split"])
        self.consolidate()

    def describe(self) -> dict[str, Any]:
        """What `octjepa inspect STORE` says."""
        table = self.table
        return {
            "kind": "store",
            "volumes": len(table),
            "people": int(table["person_id"].nunique()),
            "people_unknown": people_unknown(table),
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

    def known_files(self) -> dict[str, tuple[int, int, str]]:
        """file key -> (size, mtime_ns, hash of the manifest row) of every accepted file."""
        return {
            file_key(row): (int(row["file_size"]), int(row["file_mtime_ns"]), str(row["manifest_hash"]))
            for row in self._state.rows.values()
        }

    def rows(self) -> Iterable[dict[str, Any]]:
        return self._state.rows.values()

    def add(self, row: dict[str, Any]) -> None:
        self._record({"volume": row})

    def refuse(self, row: dict[str, str]) -> None:
        self._record({"refused": row})

    def _record(self, entry: dict[str, Any]) -> None:
        self._journal.append(entry)
        gone = self._state.apply(entry)
        self._table = None
        if gone and gone not in self._state.rows:
            shutil.rmtree(self.chunk(gone), ignore_errors=True)

    def add_participants(self, people: list[dict[str, object]]) -> None:
        """Adds or replaces persons."""
        import pandas as pd

        if not people:
            return
        old = {row["person_id"]: row for row in self.participants.to_dict("records")}
        merged = {**old, **{str(row["person_id"]): row for row in people}}
        frame = pd.DataFrame([merged[key] for key in sorted(merged)], columns=list(PARTICIPANT_COLUMNS))
        write_atomic(self.path / "participants.parquet", lambda file: frame.to_parquet(file, index=False))

    def consolidate(self) -> None:
        """Folds the journal into volumes.parquet and quarantine.jsonl; the next opening repeats what a kill left."""
        self._table = None
        table = self.table
        lines = "".join(json.dumps(row) + "\n" for row in self.quarantine)
        write_atomic(self.path / "volumes.parquet", lambda file: table.to_parquet(file, index=False))
        write_atomic(self.path / "quarantine.jsonl", lambda file: file.write(lines.encode()))
        self._journal.remove()


def people_unknown(table: pd.DataFrame) -> int:
    """Volumes of a store's table whose person no source named: each stands there as a person of its own."""
    return sum("person_unknown" in str(notes).split(";") for notes in table["notes"])


def stage_chunk(folder: Path, volume: CanonicalVolume) -> Path:
    """Pixels and geometry of one volume in a hidden folder beside `folder`, for `swap_in` to put in its place."""
    return write_new_folder(
        folder.parent,
        {
            "pixels.npy": lambda file: np.save(file, volume.pixels, allow_pickle=False),
            "geometry.npz": lambda file: np.savez(file, band=volume.band, shifts=volume.shifts),
        },
    )


def write_chunk(folder: Path, volume: CanonicalVolume) -> None:
    """Pixels and geometry of one volume, whole or not at all, in the place of what was there."""
    swap_in(stage_chunk(folder, volume), folder)
