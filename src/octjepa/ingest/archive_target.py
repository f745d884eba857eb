"""Where the members of archives are written: a folder on a disk or in a bucket, each member atomically."""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO
from zipfile import BadZipFile, ZipFile

from octjepa import remote
from octjepa.errors import OctjepaError, UsageError
from octjepa.files import open_temporary
from octjepa.ingest.archive_members import Member
from octjepa.ingest.source_file import printable
from octjepa.locks import writer_lock
from octjepa.progress import Bar

MB = 1_000_000
_BLOCK_BYTES = 1 << 20
_SPARE_BYTES = 64 << 20  # room on the disk that stays free
UNREADABLE = (
    BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    struct.error,
)


class Meter:
    """Bytes to the whole megabytes that the progress bar shows."""

    def __init__(self, progress: Bar) -> None:
        self._progress, self._bytes = progress, 0

    def add(self, count: int) -> None:
        """Counts `count` more bytes; the bar moves by whole megabytes."""
        before = self._bytes // MB
        self._bytes += count
        self._progress.advance(self._bytes // MB - before)


class FolderTarget:
    """A folder on a disk that members are written to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Makes the folder and holds it for one process. Raises UsageError where another one has it."""
        with writer_lock(self._folder):
            yield

    def check_room(self, needed: int) -> None:
        """Raises OctjepaError where `needed` bytes have no room."""
        _check_room(needed, self._folder)

    def has(self, path: str) -> bool:
        """Whether something exists at `path`."""
        return os.path.lexists(self._folder / path)

    def is_same(self, member: Member) -> bool:
        """By size and checksum."""
        path = self._folder / member.path
        if path.is_symlink() or not path.is_file() or path.stat().st_size != member.info.file_size:
            return False
        checksum = 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                checksum = zlib.crc32(block, checksum)
        return checksum == member.info.CRC

    def is_free(self, path: str) -> bool:
        """Whether no part of the path is a file, or a link that leads out of the target."""
        parents = (self._folder / path).parents
        above = next(parent for parent in parents if os.path.lexists(parent) or parent == self._folder)
        return above == self._folder or (above.is_dir() and above.resolve().is_relative_to(self._folder))

    def write(self, opened: ZipFile, member: Member, meter: Meter) -> bool:
        """Writes one member; False where its content is damaged."""
        path = self._folder / member.path
        path.parent.mkdir(parents=True, exist_ok=True)
        # The name depends on the path alone: what a killed run leaves is overwritten by the next one.
        part = path.with_name(f".{hashlib.sha256(member.path.encode()).hexdigest()[:16]}.part")
        try:
            with open_temporary(part) as file:
                whole = stream(opened, member, file, meter)
                if whole:
                    file.flush()
                    os.fsync(file.fileno())  # after a power cut a file with its final name is complete
                    os.replace(part, path)
            return whole
        finally:
            part.unlink(missing_ok=True)


class BucketTarget:
    """Objects below a url, with the methods of `FolderTarget`.

    They are written atomically by the store; an object of the member's size counts as the member.
    """

    def __init__(self, url: str) -> None:
        self._url = remote.join(url)
        self._sizes = {obj.url.removeprefix(self._url).lstrip("/"): obj.size for obj in remote.list_objects(self._url)}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the place in the bucket for one process. Raises UsageError where another one has it."""
        with remote.bucket_lock(self._url):
            yield

    def check_room(self, needed: int) -> None:
        pass

    def has(self, path: str) -> bool:
        return path in self._sizes

    def is_same(self, member: Member) -> bool:
        return self._sizes[member.path] == member.info.file_size

    def is_free(self, path: str) -> bool:
        return True

    def write(self, opened: ZipFile, member: Member, meter: Meter) -> bool:
        root = remote.cache_folder()
        _check_room(member.info.file_size, root)
        with TemporaryDirectory(prefix=".expand-", dir=root) as folder:
            path = Path(folder, "member")
            with path.open("wb") as file:
                whole = stream(opened, member, file, meter)
            if whole:
                remote.put(path, remote.join(self._url, member.path))
            return whole


Target = FolderTarget | BucketTarget


def make_target(target: str | Path) -> Target:
    """Raises UsageError: there is a file, or no access to the bucket."""
    if remote.is_remote(target):
        return BucketTarget(str(target))
    folder = Path(target)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{printable(str(folder))} is a file: name a folder, new or not")
    return FolderTarget(folder.resolve())


def _check_room(needed: int, folder: Path) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed and needed + _SPARE_BYTES > free:
        raise OctjepaError(
            f"too little room in {folder}: {needed / 1e9:.2f} GB are to be written and {free / 1e9:.2f} GB are free; "
            "nothing was started"
        )


def stream(opened: ZipFile, member: Member, file: IO[bytes] | None, meter: Meter) -> bool:
    """Block by block; zipfile holds the checksum against the table's, and reads no more than the size it names.

    False where the content is damaged. `file` None reads and checks only.
    """
    size = 0
    try:
        source = opened.open(member.info)
    except UNREADABLE:
        return False
    with source:
        while True:
            try:
                block = source.read(_BLOCK_BYTES)
            except UNREADABLE:
                return False
            if not block:
                return size == member.info.file_size
            if file is not None:
                file.write(block)  # not in the try: a full disk is not a fault of the archive
            size += len(block)
            meter.add(len(block))
