"""Writing so that a crash leaves the old file or the new one, never half of one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from octjepa.errors import OctjepaError, UsageError

_locks: set[IO[str]] = set()  # that this process holds
CHUNK_FILES = ("pixels.npy", "geometry.npz")  # the files of a chunk


def chunk_hash(parts: Mapping[str, Path]) -> str:
    """SHA-256 over the files of a chunk as they were written, one after the other: {name of `CHUNK_FILES`: path}."""
    digest = hashlib.sha256()
    for name in CHUNK_FILES:
        with parts[name].open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def clear_folder(folder: Path, keep: str) -> None:
    """Removes all that `folder` holds but `keep`."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != keep:
            path.unlink()


def _told(error: OSError, path: Path) -> OctjepaError:
    import errno

    # NumPy tells of a write that came out short in words of its own, without a number.
    if error.errno in {errno.ENOSPC, errno.EDQUOT, None}:
        return OctjepaError(f"the disk is full while writing {path}; free some space and run the same command again")
    return OctjepaError(f"cannot write {path}: {error.strerror or error}")


def write_atomic(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """`write(file)` into a temporary neighbour, flushed to disk, then renamed to `path`. Raises OctjepaError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _told(error, path) from error


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, sort_keys=True)
    write_atomic(path, lambda file: file.write(text.encode()))


def write_new_folder(parent: Path, parts: dict[str, Callable[[IO[bytes]], object]]) -> Path:
    """Writes `parts` into a new hidden folder in `parent`, which `replace_folder` then renames. Raises OctjepaError."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
        try:
            for name, write in parts.items():
                with (temporary / name).open("wb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise _told(error, parent) from error
    return temporary


def replace_folder(new: Path, path: Path) -> None:
    """Puts the folder `new` in the place of `path`, whole; who has the old one open keeps it. Raises OctjepaError."""
    old = new.with_name(new.name.replace(".new-", ".old-"))
    try:
        if path.is_dir():
            os.replace(path, old)
        os.replace(new, path)
    except OSError as error:
        raise _told(error, path) from error
    shutil.rmtree(old, ignore_errors=True)


def remove_unfinished(chunks: Path) -> None:
    """Takes out what `write_new_folder` and `replace_folder` left behind when they were killed."""
    for pattern in ("*/.new-*", "*/.old-*"):
        for left in chunks.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def read_json_object(path: Path, to_do: str) -> dict[str, Any]:
    """The JSON object in `path`. Raises OctjepaError ending in `to_do`: absent, another thing, or half of one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        value = None
    except FileNotFoundError:
        raise OctjepaError(f"{path} is not there: {to_do}") from None
    except OSError as error:
        raise OctjepaError(f"{path} cannot be read ({error.strerror}): {to_do}") from None
    if not isinstance(value, dict):
        raise OctjepaError(f"{path} is damaged: {to_do}")
    return value


class Journal:
    """Append-only JSON lines; a line is on the way to disk when `append` returns, and a torn last line is ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        if not self._path.is_file():
            return []
        lines: list[dict[str, Any]] = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # cut off by a crash: that file is simply ingested again
        return lines

    def append(self, entry: dict[str, Any]) -> None:
        line = (json.dumps(entry) + "\n").encode()
        try:
            with self._path.open("ab") as file:
                if file.tell() and not self._ends_whole():
                    line = b"\n" + line
                file.write(line)
        except OSError as error:
            raise _told(error, self._path) from error

    def _ends_whole(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


@contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Holds a store or a run for one writing process. Raises UsageError where another one has it."""
    import fcntl

    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is writing to {folder}: wait for it to end") from None
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be locked ({error.strerror}): name a folder on a file system that knows locks"
            ) from None
        _locks.add(lock)
        try:
            yield
        finally:
            if lock in _locks:  # a forked process has let go of it
                _locks.discard(lock)
                # Closing the file is not enough: one forked a moment ago may still have it open.
                fcntl.flock(lock, fcntl.LOCK_UN)


def _let_go() -> None:
    """In a forked process: a lock is its parent's, and must not outlive that where it is killed."""
    for lock in _locks:
        lock.close()
    _locks.clear()


os.register_at_fork(after_in_child=_let_go)
