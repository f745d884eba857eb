"""One writer at a time: a folder or a file is held by the process that writes it, and a second one reports which.

The lock is the kernel's (`flock`), so it ends with its process; its file is removed when it is given back, and what a
killed process left of it is taken over. It never follows a link that came with a folder.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from octjepa.errors import LINK, UsageError
from octjepa.parsing import parse_json_object, read_limited

LOCK = ".lock"  # the file in a folder that a process writes to


@contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Holds a store, a run or an output folder for one writing process; a folder that is absent is made.

    One that was made and is still empty at the end is removed. Raises UsageError where another process holds it, or
    the disk knows no locks. A forked child does not inherit the lock, so that it ends with the process that took it.
    """
    with _made(folder), _held(folder / LOCK, folder):
        yield


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """As `writer_lock`, of the file `path`: the lock is a hidden neighbour of it, and its folder is made."""
    path = path.absolute()
    with _made(path.parent), _held(path.with_name(f".{path.name}{LOCK}"), path):
        yield


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Makes `folder`; at the end those that were new and are still empty are removed. Raises UsageError."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: name a folder, new or not")
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except NotADirectoryError:
        raise UsageError(
            f"{folder} cannot be made: there is a file where a folder is needed; name another path"
        ) from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be made ({error.strerror}): name another folder") from None
    try:
        yield
    finally:
        for absent_folder in absent:  # the innermost first
            with suppress(OSError):  # it holds something by now
                absent_folder.rmdir()


@contextmanager
def _held(lock_path: Path, held: Path) -> Iterator[None]:
    lock = FileLock(lock_path, blocking=False, fallback_to_soft=False)
    if lock_path.is_symlink() or (lock_path.exists() and lock_path.stat().st_nlink > 1):
        raise UsageError(f"{lock_path} {LINK}")
    try:
        lock.acquire()
        _write_holder(lock_path)
    except Timeout:
        raise UsageError(f"another process is writing to {held}{_holder(lock_path)}: wait for it to end") from None
    except OSError as error:
        lock.release()
        if isinstance(error, PermissionError):
            raise UsageError(f"{held} may not be written ({error.strerror}): name another place") from None
        raise UsageError(
            f"{held} cannot be locked ({error.strerror}): name a place on a file system that knows locks, which you "
            "may write to"
        ) from None
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:
            with suppress(OSError):
                lock_path.unlink()  # while it is held: whoever opened it meanwhile sees that it has no name any more
            lock.release()


def _write_holder(lock_path: Path) -> None:
    handle = os.open(lock_path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        about = {
            "process": os.getpid(),
            "machine": socket.gethostname(),
            "command": " ".join(word for word in sys.argv[1:2] if not word.startswith("-")),
            "since": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(about).encode())
    finally:
        os.close(handle)


def _holder(lock_path: Path) -> str:
    """` (process 7 on host, octjepa embed, since ...)`; "" where the lock does not say."""
    try:
        about = parse_json_object(read_limited(lock_path, 10_000))
        machine, since = str(about["machine"])[:80], str(about["since"])[:40]
        command = f", octjepa {about['command']}" if about["command"].isidentifier() else ""
        return f" (process {int(about['process'])} on {machine}{command}, since {since})"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
