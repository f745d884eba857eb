"""Volumes packed into shards: a few large files in place of two small files per volume.

    shards/<SHA-256>.bin   the files of many volumes, one after the other, as they were in chunks/
    shards.parquet         volume id, its shard, the first byte of its files there, their lengths

A volume is read from its part of the shard: a memory map on a disk, one request for a range of bytes in a bucket. So
any order of reading remains possible, and batches and resumed runs are those of the store before it was packed, to the
bit. Volumes that are ingested later are in chunks/ until the store is packed again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octjepa.errors import OctjepaError, UsageError
from octjepa.files import open_temporary, write_atomic
from octjepa.parsing import read_parquet, shown
from octjepa.progress import bar
from octjepa.record import Record
from octjepa.store.storage import CHUNK_FILES, SHARDS, DamagedVolume, ShardPart, reading_chunk

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.store.folder import Store

SHARDS_FILE = "shards.parquet"
_COLUMNS = ("volume_id", "shard", "start", "pixels_bytes", "geometry_bytes")
_SHARD = re.compile(r"[0-9a-f]{64}\.bin")
_MB = 1_000_000
_PENDING = 0.1  # of the packed volumes: for fewer the table, which grows, is not written anew


class ShardTable:
    """The shard and position of each packed volume of a store."""

    def __init__(self, table: pd.DataFrame) -> None:
        self._table = table
        self._forgotten: set[str] = set()  # removed together: each removal copies the table
        self._changed = False

    @classmethod
    def read(cls, folder: Path) -> ShardTable:
        """The table in the folder of a store's index; empty if nothing is packed. Raises UsageError: damaged."""
        import pandas as pd

        path = folder / SHARDS_FILE
        if not path.is_file():
            return cls(pd.DataFrame(columns=list(_COLUMNS)))
        try:
            table = read_parquet(path, _COLUMNS)
            strange = [name for name in map(str, table["shard"].unique()) if not _SHARD.fullmatch(name)]
            if strange:  # a path could lead out of the store
                raise ValueError(f"{shown(strange[0])} is not a name of a shard")
            return cls(table)
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(
                f"{path} is damaged ({error}): restore it from a copy, or remove it and ingest again"
            ) from None

    @property
    def table(self) -> pd.DataFrame:
        """One line for each packed volume."""
        if self._forgotten:
            self._replace(self._table[~self._table["volume_id"].isin(list(self._forgotten))].reset_index(drop=True))
            self._forgotten = set()
        return self._table

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def _lines(self) -> dict[str, int]:
        return {str(name): line for line, name in enumerate(self.table["volume_id"])}

    @cached_property
    def _parts(self) -> list[np.ndarray]:
        return [self.table[name].to_numpy() for name in _COLUMNS[1:]]

    def part(self, volume_id: str) -> ShardPart | None:
        """Where the files of a volume are; None if it is not packed."""
        line = self._lines.get(volume_id)
        if line is None or volume_id in self._forgotten:
            return None
        shard, start, *sizes = (column[line] for column in self._parts)
        return ShardPart(str(shard), int(start), dict(zip(CHUNK_FILES, map(int, sizes), strict=True)))

    def names(self) -> set[str]:
        """The shards of the table."""
        return set(map(str, self.table["shard"]))

    def add(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Adds volumes, as lines of `_COLUMNS`."""
        import pandas as pd

        table = self.table
        lines = {**self._lines, **{str(row[0]): len(table) + number for number, row in enumerate(rows)}}
        added = pd.DataFrame(rows, columns=list(_COLUMNS))
        self._replace(pd.concat([table, added], ignore_index=True) if len(table) else added)
        self._lines = lines

    def keep(self, volume_ids: set[str]) -> None:
        """Forgets all others."""
        selected = self.table["volume_id"].isin(list(volume_ids))
        if not selected.all():
            self._replace(self.table[selected].reset_index(drop=True))

    def forget(self, volume_id: str) -> None:
        """The volume was written to chunks/ anew."""
        if self.part(volume_id) is not None:
            self._forgotten.add(volume_id)
            self._changed = True

    def _replace(self, table: pd.DataFrame) -> None:
        self._table, self._changed = table, True
        for name in ("_lines", "_parts"):
            self.__dict__.pop(name, None)

    def write(self, folder: Path) -> None:
        """Writes the table if it was changed. Raises OctjepaError."""
        if self._changed:
            write_atomic(folder / SHARDS_FILE, lambda file: self.table.to_parquet(file, index=False))
            self._changed = False


@dataclass(frozen=True)
class _Shard:
    path: Path
    rows: list[tuple[Any, ...]]
    damaged: list[str]


@dataclass(frozen=True)
class Packed(Record):
    """The result of `pack`: `volumes` in shards now, `packed` of them by this call, and the shards and bytes written.

    `damaged` are the ids of volumes that are not what was written. They are left in place.
    """

    volumes: int
    packed: int
    shards: int
    bytes: int
    damaged: list[str]


def pack(store: Store, shard_mb: float = 256) -> Packed:
    """Packs the volumes in chunks/ into shards of about `shard_mb` million bytes and removes their folders.

    A call that was killed loses nothing; the next one continues. A process that reads a store in a bucket meanwhile
    has to open it again.
    Raises UsageError (no size above 0, another process writes), OctjepaError (disk full, the bucket fails).
    """
    if not 0 < shard_mb < float("inf"):
        raise UsageError(f"a shard of {shard_mb:g} million bytes: expected a number above 0")
    damaged: list[str] = []
    packed = written = shards = 0
    with store.writing():
        store.consolidate()
        _remove_leftovers(store)
        waiting = [name for name in map(str, store.table["volume_id"]) if store.shards.part(name) is None]
        pending: list[str] = []
        with bar("pack", len(waiting), "volumes") as progress:
            for shard in _write_shards(store, waiting, shard_mb * _MB):
                damaged += shard.damaged
                if shard.rows:
                    written, shards, packed = written + shard.path.stat().st_size, shards + 1, packed + len(shard.rows)
                    store.writer.add_shard(shard.path)
                    store.shards.add(shard.rows)
                    pending += [str(row[0]) for row in shard.rows]
                    if len(pending) >= _PENDING * len(store.shards):
                        _publish(store, pending)
                        pending = []
                progress.advance(len(shard.rows) + len(shard.damaged))
        _publish(store, pending)
    return Packed(len(store.shards), packed, shards, written, damaged)


def _publish(store: Store, packed: Iterable[str]) -> None:
    """Writes the table of shards, then removes the chunks of the volumes `packed`."""
    store.shards.write(store.path)
    for volume_id in packed:
        store.writer.drop(volume_id)
    store.writer.publish()


def _remove_leftovers(store: Store) -> None:
    """Removes unfinished shards, those without a volume of the index, and chunks of volumes that are in a shard."""
    for left in (store.path / SHARDS).glob(".new-*"):
        left.unlink()
    store.shards.keep(set(store.table["volume_id"]))
    for name in set(store.storage.shard_names()) - store.shards.names():
        store.writer.drop_shard(name)
    _publish(store, [name for name in map(str, store.shards.table["volume_id"]) if store.storage.has_chunk(name)])


def _write_shards(store: Store, waiting: Sequence[str], size: float) -> Iterator[_Shard]:
    """Shards with the volumes `waiting`, each written when the previous shard is in the store."""
    hashes = dict(zip(store.table["volume_id"], store.table["chunk_hash"], strict=True))
    left = iter(waiting)
    name = next(left, None)
    folder = store.path / SHARDS
    while name is not None:
        rows: list[tuple[Any, ...]] = []
        damaged: list[str] = []
        digest = hashlib.sha256()
        try:
            folder.mkdir(exist_ok=True)
            new = folder / ".new-shard"  # one process packs at a time
            with open_temporary(new) as file:
                start = 0
                while name is not None and start < size:
                    try:
                        parts = _read(store, name, hashes[name])
                    except DamagedVolume:
                        damaged.append(name)
                    else:
                        content = b"".join(parts)
                        file.write(content)
                        digest.update(content)
                        rows.append((name, start, *map(len, parts)))
                        start += len(content)
                    name = next(left, None)
                file.flush()
                os.fsync(file.fileno())
            path = folder / f"{digest.hexdigest()}.bin"
            os.replace(new, path) if rows else os.unlink(new)
        except OSError as error:
            raise OctjepaError(f"{folder} cannot be written: {error.strerror}: make room and run again") from None
        yield _Shard(path, [(row[0], path.name, *row[1:]) for row in rows], damaged)


def _read(store: Store, volume_id: str, expected: object) -> list[bytes]:
    """The files of a chunk in the order of CHUNK_FILES. Raises DamagedVolume: they are not what was written."""
    with reading_chunk(store.chunk_location(volume_id)), store.chunk_files(volume_id) as files:
        parts = [files[name].read_bytes() for name in CHUNK_FILES]
        if isinstance(expected, str) and expected and hashlib.sha256(b"".join(parts)).hexdigest() != expected:
            raise ValueError("its SHA-256 is not that of the index")
    return parts
