"""Where the files of a store are: the files of one volume (a chunk), and the folder of all on a disk.

A store in a bucket (`octjepa.store.bucket`) offers the same functions as `DiskStorage`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np

from octjepa.errors import MORE_FILES, OctjepaError, ResourceError, UsageError
from octjepa.files import write_atomic, write_new_folder
from octjepa.locks import LOCK, writer_lock
from octjepa.store.index import IndexChange
from octjepa.volume import CanonicalVolume

MARKER = "store.json"
CHUNK_FILES = ("pixels.npy", "geometry.npz")
SHARDS = "shards"  # folder of the files that hold many volumes each
_ADVICE = {
    errno.ENOMEM: "use fewer processes or a smaller batch, or give the machine more memory",
    errno.EMFILE: MORE_FILES,
    errno.ENFILE: "end other programs on this machine, or let the administrator raise fs.file-max",
    errno.EACCES: "let its owner give you the right to read it",
    errno.EPERM: "let its owner give you the right to read it",
    errno.EIO: "check the disk and its connection",
    errno.ESTALE: "check the network disk and mount it again",
    errno.ETIMEDOUT: "check the network disk and mount it again",
}  # for errors of the machine, which leave the volume intact
_ID = re.compile(r"[\w-]+")
_OTHER_ADVICE = "check the disk or network that holds it"
_DAMAGE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)  # no such file; NumPy's own errors have no number


class DamagedVolume(OctjepaError):
    """The files of a volume are absent, or were read and differ from what was written."""


class ChangedVolume(DamagedVolume):
    """The files of a volume can be read, but their SHA-256 is not that of the index: they were changed."""

    exit_code = 2  # wrong input: the same command fails again, so that a launcher does not start it again


@dataclass(frozen=True)
class ChunkFile:
    """A file of a volume: `size` bytes of `path` from `start`, or the whole file."""

    path: Path
    start: int = 0
    size: int | None = None

    def read_bytes(self) -> bytes:
        """Its content. Raises OSError, ValueError: the file at `path` is too short."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            content = file.read(-1 if self.size is None else self.size)
        if self.size is not None and len(content) != self.size:
            raise ValueError(f"{len(content)} bytes of {self.size} are there")
        return content

    def memory_map(self) -> np.ndarray:
        """The array of a .npy file as a read-only memory map. Raises OSError, ValueError: it is not a such array."""
        if self.size is None:
            return np.lib.format.open_memmap(self.path, mode="r")
        with self.path.open("rb") as file:
            file.seek(self.start)
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("not written by octjepa")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            begin = file.tell()
        if fortran or dtype.hasobject or begin + dtype.itemsize * int(np.prod(shape)) != self.start + self.size:
            raise ValueError("its length is not that of the table of shards")
        return np.memmap(self.path, dtype, "r", begin, shape)

    @property
    def mtime_ns(self) -> int:
        """Time of the last change of the file at `path`. Raises OSError."""
        return self.path.stat().st_mtime_ns


@dataclass(frozen=True)
class ShardPart:
    """Where the files of a volume are in a shard: one after the other from byte `start`, with the lengths `sizes`."""

    shard: str
    start: int
    sizes: Mapping[str, int]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(self.sizes.values())

    def files(self, path: Path, start: int) -> dict[str, ChunkFile]:
        """{file name: file}, where the first begins at byte `start` of `path`."""
        files = {}
        for name, size in self.sizes.items():
            files[name] = ChunkFile(path, start, size)
            start += size
        return files


@contextmanager
def reading_chunk(name: str) -> Iterator[None]:
    """Translates errors while the chunk `name` is read. Raises ResourceError with the cause, or DamagedVolume."""
    try:
        yield
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, OSError) and error.errno not in _DAMAGE:
            advice = _ADVICE.get(error.errno or 0, _OTHER_ADVICE)
            message = f"{name} cannot be read: {error.strerror}. The volume is not at fault: {advice}"
            raise ResourceError(message) from None
        raise DamagedVolume(f"{name} is damaged ({error}): delete it and ingest again") from None


def stage_chunk(folder: Path, volume: CanonicalVolume) -> Path:
    """Writes pixels and geometry of one volume into a hidden folder next to `folder`, for `replace_folder` to
    rename.
    """
    return write_new_folder(
        folder.parent,
        {
            "pixels.npy": lambda file: np.save(file, volume.pixels, allow_pickle=False),
            "geometry.npz": lambda file: np.savez(file, allow_pickle=False, **volume.geometry()),
        },
    )


def read_arrays(file: ChunkFile, *names: str) -> list[np.ndarray]:
    """Arrays of a geometry.npz, which together take no more memory than the file has bytes.

    A store may come from another person, and compressed arrays of 0.4 MB would unpack to gigabytes. Raises KeyError: no
    such array. ValueError, zipfile.BadZipFile: not an archive that octjepa writes.
    """
    content = file.read_bytes()
    arrays: list[np.ndarray] = []
    with zipfile.ZipFile(BytesIO(content)) as archive:
        members = {member.filename: member for member in archive.infolist()}
        for name in names:
            member = members.get(f"{name}.npy")
            if member is None:
                raise KeyError(f"{name} is not in the archive")
            if member.compress_type != zipfile.ZIP_STORED or member.file_size > len(content):
                raise ValueError(f"{name} is compressed, and octjepa writes arrays as they are")
            with archive.open(member) as array:
                if np.lib.format.read_magic(array) != (1, 0):
                    raise ValueError(f"{name} was not written by octjepa")
                shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(array)
                data = bytearray(array.read())
                if dtype.itemsize * math.prod(shape) > len(data):
                    raise ValueError(f"{name} is shorter than its header says")
                values = np.frombuffer(data, dtype, math.prod(shape))  # ValueError: Python objects
            arrays.append(values.reshape(shape, order="F" if is_fortran else "C"))
    return arrays


@lru_cache(maxsize=4096)
def read_geometry(file: ChunkFile, mtime_ns: int) -> tuple[np.ndarray, np.ndarray]:
    """(tissue band [2, D, W], shifts [D, W]) of a chunk, cached: opening the archive costs more than mapping pixels.

    `mtime_ns` is the archive's, so that a chunk that was written again is read again. Raises as `read_arrays`.
    """
    band, shifts = read_arrays(file, "band", "shifts")
    if band.shape != (2, *shifts.shape) or shifts.ndim != 2:
        raise ValueError(f"a tissue band {band.shape} and shifts {shifts.shape} do not belong together")
    return band, shifts


def read_half_difference(file: ChunkFile) -> np.ndarray:
    """The `half_difference` [D, H, W] of a chunk. Raises KeyError if it has none."""
    return read_arrays(file, "half_difference")[0]


def chunk_hash(files: Mapping[str, ChunkFile | Path]) -> str:
    """SHA-256 over the `CHUNK_FILES` of a chunk, one after the other."""
    digest = hashlib.sha256()
    for name in CHUNK_FILES:
        digest.update(files[name].read_bytes())
    return digest.hexdigest()


class DiskStorage:
    """A store in a folder of a disk. What is written there is published at once, so it is its own writer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def location(self) -> str:
        """The folder."""
        return str(self.folder)

    def snapshot(self) -> Path | None:
        """The folder itself; None if there is none."""
        return self.folder if self.folder.is_dir() else None

    def create(self, marker: str) -> None:
        """Makes the folder. Raises UsageError: it is a file, holds something, or cannot be made."""
        path = self.folder
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} exists and is not a store: name an empty or a new folder")
        with writer_lock(path):
            names = {child.name for child in path.iterdir()}
            if MARKER in names:
                return  # another process was first
            if names - {LOCK, f".{MARKER}.tmp"}:  # the second is what a killed ingest left
                raise UsageError(f"{path} exists and is not a store: name an empty or a new folder")
            write_atomic(path / MARKER, lambda file: file.write(marker.encode()))

    def _chunk_files(self, volume_id: str) -> dict[str, Path]:
        folder = chunk_folder(self.folder, volume_id)
        return {name: folder / name for name in CHUNK_FILES}

    def has_chunk(self, volume_id: str) -> bool:
        """Whether all files of a chunk are there."""
        return all(path.is_file() for path in self._chunk_files(volume_id).values())

    @contextmanager
    def chunk(self, volume_id: str) -> Iterator[dict[str, ChunkFile]]:
        """{file name: file} of a chunk, whether or not the files are there."""
        yield {name: ChunkFile(path) for name, path in self._chunk_files(volume_id).items()}

    def has_shard(self, name: str) -> bool:
        """Whether the shard is there."""
        return (self.folder / SHARDS / name).is_file()

    def shard_names(self) -> list[str]:
        """The shards that are there, whether or not the table names them."""
        return [path.name for path in (self.folder / SHARDS).glob("*.bin")]

    @contextmanager
    def shard(self, part: ShardPart) -> Iterator[dict[str, ChunkFile]]:
        """{file name: file} of a volume in a shard, whether or not the shard is there."""
        yield part.files(self.folder / SHARDS / part.shard, part.start)

    @contextmanager
    def writing(self) -> Iterator[DiskStorage]:
        """Holds the lock of the folder."""
        with writer_lock(self.folder):
            yield self

    def add(self, change: IndexChange) -> None:
        """Nothing to do: the chunk is in the folder."""

    def settle(self, changes: Iterable[IndexChange]) -> None:
        """Replaces the journal by one with these lines. Raises OctjepaError."""
        lines = (json.dumps(change.to_json()) + "\n" for change in changes)
        write_atomic(self.folder / "journal.jsonl", lambda file: file.writelines(map(str.encode, lines)))

    def drop(self, volume_id: str) -> None:
        """Deletes a chunk."""
        shutil.rmtree(chunk_folder(self.folder, volume_id), ignore_errors=True)

    def add_shard(self, path: Path) -> None:
        """Nothing to do: the shard is in the folder."""

    def drop_shard(self, name: str) -> None:
        """Deletes a shard."""
        (self.folder / SHARDS / name).unlink(missing_ok=True)

    def publish(self) -> None:
        """Nothing to do: the index is in the folder."""


def chunk_folder(folder: Path, volume_id: str) -> Path:
    """The folder of one chunk in a store's folder. Raises OctjepaError: an id that would lead out of it."""
    if not _ID.fullmatch(volume_id):
        raise OctjepaError(f"the index of the store {folder} is damaged: {volume_id[:80]!r} is not a volume id")
    return folder / "chunks" / volume_id[:2] / volume_id
