"""Local copies of remote objects: verified, bounded, shared by all processes of a user.

    <root>/objects/aa/<key of url, version, size>/<digest>/<file name>

A body is downloaded to a temporary folder, compared with the store's own length and checksum, and renamed. `digest` is
that of the content: a copy that was damaged later is detected and fetched again. Whoever uses a copy holds a shared
lock on it (flock, which the kernel releases when a process dies); the least recently used copies without a lock make
room for new copies.

The order of use and the removal of unfinished downloads do not rely on the time of day, which may be set forwards or
back: uses are numbered from the last one on, and a folder in use is locked.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from octjepa.errors import MORE_FILES, OctjepaError, ResourceError, UsageError
from octjepa.parsing import read_json
from octjepa.remote.address import parse
from octjepa.remote.bucket import RemoteObject, checksum_of, download, info
from octjepa.remote.retry import (
    AbsentObject,
    ChangedObject,
    DamagedBody,
    RetryPolicy,
    is_absent,
    user_error,
    with_retries,
)

_GB = 1_000_000_000
_STALE_SECONDS = 24 * 3600
_NEW = ".new-"  # begins the names of temporary folders
_LAST_USE = "last-use"  # a file dated with the last use of any copy
_STEP_NS = 1000  # between two uses after the clock was set back
_verified: dict[Path, tuple[int, int, int]] = {}  # copies this process has hashed: inode, mtime, size
_room: dict[tuple[Path, int], int] = {}  # bytes this process may add before it scans the cache again
_room_lock = threading.Lock()


def cache_root() -> Path:
    """OCTJEPA_CACHE, or octjepa/ in the user's cache folder (XDG_CACHE_HOME, ~/.cache; ~/Library/Caches on macOS)."""
    if named := os.environ.get("OCTJEPA_CACHE"):
        return Path(named).expanduser()
    usual = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "octjepa"


def cache_folder(*parts: str) -> Path:
    """The folder `parts` below the cache's root, made if it is absent; only its owner may open the root.

    Raises OctjepaError: it cannot be made.
    """
    root = cache_root()
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        folder = root.joinpath(*parts)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OctjepaError(
            f"the cache {root} cannot be written ({error.strerror}): name another by OCTJEPA_CACHE"
        ) from None
    return folder


def limit_bytes() -> int:
    """OCTJEPA_CACHE_GB, 20 if it is not set. Raises UsageError: no number above 0."""
    text = os.environ.get("OCTJEPA_CACHE_GB", "") or "20"
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise UsageError(f"OCTJEPA_CACHE_GB is {text!r}: expected a number of gigabytes above 0")
    return int(limit * _GB)


@contextmanager
def local_copy(source: str | RemoteObject) -> Iterator[Path]:
    """A verified local copy with the object's file name, which stays while the context is open. Read only.

    Raises AbsentObject: no such object, or it changed since it was listed (ChangedObject). UsageError: no access, no
    credentials. ResourceError: the disk is full, no open file is left. OctjepaError: what the store sends is never
    whole.
    """
    source_object = info(source) if isinstance(source, str) else source
    if source_object is None:
        raise AbsentObject(f"there is no object {source}")
    try:
        handle, path = _open_copy(source_object)
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            raise ResourceError(f"{source_object.url} cannot be read: {error.strerror}: {MORE_FILES}") from None
        why = "is full" if error.errno in {errno.ENOSPC, errno.EDQUOT} else f"cannot be written ({error.strerror})"
        raise ResourceError(f"the cache {cache_root()} {why}: make room, or name another by OCTJEPA_CACHE") from None
    try:
        yield path
    finally:
        os.close(handle)


def remembered(kind: str, objects: Iterable[RemoteObject], find: Callable[[], tuple[Any, bool]]) -> Any:
    """The result of `find()` on `objects` as JSON data, remembered in the cache for as long as they stay the same.

    `kind` names the question; the second value of `find()` is whether the answer may be remembered.
    """
    versions = sorted((entry.url, entry.version, entry.size) for entry in objects)
    path = cache_folder(kind) / f"{hashlib.sha256(repr(versions).encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError):
        return read_json(path)
    answer, stays = find()
    if stays:
        with suppress(OSError):
            path.write_text(json.dumps(answer), encoding="utf-8")
    return answer


def read_bytes(url: str) -> bytes:
    """The verified content of the object `url`. Raises as `local_copy`."""
    with local_copy(url) as path:
        return path.read_bytes()


def _open_copy(source: RemoteObject) -> tuple[int, Path]:
    """(open handle with a shared lock, path) of a good copy, downloaded if there is none."""
    folder = _folder(source)
    opened = _lock_copy(folder, source)
    if opened is None:
        with _downloading(folder.name):
            opened = _lock_copy(folder, source)  # another process may have downloaded it meanwhile
            while opened is None:
                _download(source, folder)
                opened = _lock_copy(folder, source)
    return opened


def _folder(source: RemoteObject) -> Path:
    parts = (source.url, source.version, str(source.size), *(() if source.start is None else (str(source.start),)))
    key = hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:32]
    return cache_root() / "objects" / key[:2] / key


@contextmanager
def _downloading(key: str) -> Iterator[None]:
    """One download of an object at a time on this machine; 256 lock files serve all."""
    with (cache_folder("locks") / key[:2]).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _lock_copy(folder: Path, source: RemoteObject) -> tuple[int, Path] | None:
    """A lock on the copy in `folder` if there is one and it is complete; a damaged one is removed."""
    for path in folder.glob("*/*"):
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(handle, fcntl.LOCK_SH)
        stat = os.fstat(handle)
        if stat.st_nlink == 0:  # evicted between opening and locking
            os.close(handle)
            continue
        state = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        whole = stat.st_size == source.size and (
            _verified.get(path) == state or checksum_of(path, "blake2b") == path.parent.name
        )
        if whole:
            _verified[path] = state
            os.utime(path, ns=(_use_time_ns(), stat.st_mtime_ns))  # the time of access orders eviction
            return handle, path
        os.close(handle)
        _evict(path)
    return None


def _download(source: RemoteObject, folder: Path) -> None:
    """Fetches and verifies one object, and moves it into the cache."""
    now = source if source.start is not None else info(source.url)
    if now is None or now.version != source.version:
        what = "is gone" if now is None else "has other content"
        raise ChangedObject(f"{source.url} {what} since it was listed: run the same command again")
    _make_room(source.size)
    with temporary_folder(cache_folder()) as arriving:
        name = parse(source.url).key.rpartition("/")[2].encode()[-200:].decode(errors="ignore")
        body = arriving / name
        try:
            with_retries(lambda: _download_once(now, body), "read", source.url, RetryPolicy.from_environment())
        except OctjepaError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise
            if is_absent(error):
                raise ChangedObject(f"{source.url} is gone since it was listed: run the same command again") from None
            raise user_error(error, "read", source.url) from None
        if source.start is None and not now.checksum and info(source.url) != now:
            raise ChangedObject(f"{source.url} changed while it was read: run the same command again")
        _move(body, folder / checksum_of(body, "blake2b"))


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new hidden folder in `parent`, which is removed at the end unless it was renamed. Raises OSError.

    It is locked until then, so that `clear_unfinished` of another process leaves it alone.
    """
    folder = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # a network disk without locks: then its age protects it
                fcntl.flock(handle, fcntl.LOCK_SH)
            yield folder
        finally:
            os.close(handle)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(body: Path, folder: Path) -> None:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            os.replace(body, folder / body.name)
            return
        except FileNotFoundError:  # an evicting process removed the empty folder in between
            continue


def _download_once(source: RemoteObject, body: Path) -> None:
    """One try to download to `body`. Raises DamagedBody where size or checksum is not the store's."""
    download(source, body)
    size = body.stat().st_size
    if size != source.size:
        raise DamagedBody(f"{size} bytes of {source.size} arrived")
    kind, _, expected = source.checksum.partition(":")
    if expected and checksum_of(body, kind) != expected:
        raise DamagedBody(f"its {kind} differs from the store's")


def _copies() -> list[tuple[int, int, Path]]:
    """(last used, size, path) of every copy."""
    copies = []
    for path in (cache_root() / "objects").glob("*/*/*/*"):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        copies.append((stat.st_atime_ns, stat.st_size, path))
    return copies


def _make_room(size: int) -> None:
    """Evicts the least recently used copies until `size` more bytes fit below the limit, or all others are locked.

    Scanning the cache takes time, so one scan makes room for a fiftieth of the limit beyond `size`, and the next one
    waits until that is used up.
    """
    limit = limit_bytes()
    key = (cache_root(), limit)
    with _room_lock:
        if size <= _room.get(key, 0):
            _room[key] -= size
            return
        ahead = limit // 50
        copies = _copies()
        over = sum(used for _, used, _ in copies) + size + ahead - limit
        for _, used, path in sorted(copies):
            if over <= 0:
                break
            if _evict(path):
                over -= used
        _room[key] = ahead
        clear_unfinished(cache_root())


def _evict(path: Path) -> bool:
    """Removes a copy unless a process has locked it; False if a process has."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    _verified.pop(path, None)
    for folder in (path.parent, path.parent.parent):
        try:
            folder.rmdir()
        except OSError:  # it holds another copy, or one is arriving
            break
    return True


def clear_unfinished(parent: Path) -> None:
    """Removes the folders of `temporary_folder` that killed processes left in `parent`.

    They are dated a day or more before now, or after it if the clock was set back, and no process has locked them.
    """
    for left in parent.glob(f"{_NEW}*"):
        with suppress(OSError):  # another process removes it, or is making it
            if abs(time.time() - left.stat().st_mtime) > _STALE_SECONDS and not _is_locked(left):
                shutil.rmtree(left, ignore_errors=True)


def _is_locked(folder: Path) -> bool:
    """Whether a process is in its `temporary_folder`. Raises OSError: the folder is gone."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or the disk knows no locks: it stays
        return True
    finally:
        os.close(handle)
    return False


def _use_time_ns() -> int:
    """The time of a use of a copy: now, or shortly after the last use if the clock was set back since."""
    last = cache_folder() / _LAST_USE
    try:
        now = max(time.time_ns(), last.stat().st_mtime_ns + _STEP_NS)
    except FileNotFoundError:
        last.touch()
        now = time.time_ns()
    os.utime(last, ns=(now, now))
    return now
