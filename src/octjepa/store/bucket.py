"""A store in a gs:// or s3:// bucket: laid out as on a disk, so that a copy of it is a store.

Reading takes a snapshot of the index files (a folder in the cache that never changes again) and fetches chunks through
the cache when they are asked for. Writing works on a folder in the cache: chunks go up as they are made, what the
journal says of them follows in parts `journal-<number>.jsonl`, and the index when it is written. A row goes up after
its chunk, an index before the journal it replaces is removed: whoever reads meanwhile, or after a kill, sees a store
that is whole. One object, `.lock`, keeps a second writer out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octjepa import remote
from octjepa.errors import OctjepaError, UsageError
from octjepa.files import CHUNK_FILES, clear_folder, writer_lock
from octjepa.store.chunk import DamagedVolume

_log = logging.getLogger(__name__)
_INDEX = {".json", ".jsonl", ".parquet", ".tsv"}
_UPLOADS, _WAITING = 4, 16  # at once; chunks that may wait for their turn
_ROWS_PER_PART = 32  # what a killed ingest may lose
_OLD_SECONDS = 30 * 24 * 3600


class Bucket:
    """The place of a store in a bucket. Picklable: loader processes open connections of their own."""

    def __init__(self, url: str) -> None:
        self.url = remote.join(url)
        self._listed: dict[str, dict[str, remote.RemoteObject]] = {}

    @property
    def _cache(self) -> Path:
        return remote.cache_folder("stores", hashlib.sha256(self.url.encode()).hexdigest()[:24])

    def files(self) -> list[remote.RemoteObject]:
        """The objects of the store's own folder, chunks left out."""
        return remote.list_objects(self.url, recursive=False)

    # -- reading --

    def snapshot(self) -> Path | None:
        """A folder with the index files as they are now; None where there is no store. Raises as `octjepa.remote`."""
        for _ in range(8):
            found = [one for one in self.files() if Path(one.url).suffix in _INDEX]
            if not any(one.url.endswith("/store.json") for one in found):
                return None
            state = "\n".join(f"{one.url} {one.version} {one.size}" for one in found)
            folder = self._cache / hashlib.sha256(state.encode()).hexdigest()[:24]
            if folder.is_dir():
                return folder
            try:
                return self._take(found, folder)
            except OctjepaError:
                if self.files() == found:  # not the work of a writer who changed them meanwhile
                    raise
        raise OctjepaError(f"the index of {self.url} changes faster than it can be read: try again in a minute")

    def _take(self, found: list[remote.RemoteObject], folder: Path) -> Path:
        self._forget_old()
        arriving = Path(tempfile.mkdtemp(prefix=".new-", dir=self._cache))
        try:
            for one in found:
                with remote.local_copy(one) as copy:
                    shutil.copyfile(copy, arriving / one.url.rpartition("/")[2])
            try:
                os.replace(arriving, folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
            return folder
        except OSError as error:
            raise OctjepaError(f"the cache {self._cache} cannot be written: {error.strerror or error}") from None
        finally:
            shutil.rmtree(arriving, ignore_errors=True)

    def _forget_old(self) -> None:
        for folder in self._cache.iterdir():
            if folder.name != "writing" and time.time() - folder.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)

    def _chunk(self, volume_id: str) -> dict[str, remote.RemoteObject]:
        """File name -> object of one chunk; one listing serves all chunks of a prefix."""
        prefix = volume_id[:2]
        if prefix not in self._listed:
            found = remote.list_objects(remote.join(self.url, "chunks", prefix))
            self._listed[prefix] = {"/".join(one.url.rsplit("/", 2)[1:]): one for one in found}
        listed = self._listed[prefix]
        return {part: listed[f"{volume_id}/{part}"] for part in CHUNK_FILES if f"{volume_id}/{part}" in listed}

    def has_chunk(self, volume_id: str) -> bool:
        return len(self._chunk(volume_id)) == len(CHUNK_FILES)

    @contextmanager
    def chunk(self, volume_id: str) -> Iterator[dict[str, Path]]:
        """File name -> local copy of one chunk, held while the context is open. Raises DamagedVolume: there is none."""
        found = self._chunk(volume_id)
        if len(found) < len(CHUNK_FILES):
            raise DamagedVolume(f"{self.url} lacks the chunk of volume {volume_id}: ingest its file again")
        with ExitStack() as held:
            yield {part: held.enter_context(remote.local_copy(one)) for part, one in found.items()}

    # -- writing --

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """A `Writer` with the index as it is now, while this process is the only one. Raises UsageError: it is not."""
        folder = self._cache / "writing"
        folder.mkdir(exist_ok=True)
        with ExitStack() as alone:
            try:
                alone.enter_context(writer_lock(folder))
            except UsageError:
                raise UsageError(f"another process of this machine is writing to {self.url}: wait for it") from None
            alone.enter_context(_remote_lock(remote.join(self.url, ".lock")))
            clear_folder(folder, keep=".lock")
            snapshot = self.snapshot()
            if snapshot is not None:
                shutil.copytree(snapshot, folder, dirs_exist_ok=True)
            with Writer(self, folder) as writer:
                yield writer
            clear_folder(folder, keep=".lock")

    def forget(self, volume_id: str) -> None:
        """The listing with this volume's chunk is no longer true."""
        self._listed.pop(volume_id[:2], None)


class Writer:
    """Carries what is written in `folder` into the bucket; uploads run beside the work."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self.bucket, self.folder = bucket, folder
        self._uploads = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="upload")
        self._waiting: deque[Future[None]] = deque()
        self._rows: list[str] = []
        self._gone: list[str] = []
        self._sent = {path.name: path.read_bytes() for path in self._index()}
        self._part = max((int(path.stem.partition("-")[2]) for path in folder.glob("journal-*.jsonl")), default=0)
        self._failed: OctjepaError | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._uploads.shutdown(wait=True, cancel_futures=True)

    def _index(self) -> list[Path]:
        """The index files in the folder; the journal goes up in parts instead."""
        return sorted(path for path in self.folder.iterdir() if path.suffix in _INDEX and path.name != "journal.jsonl")

    def add(self, entry: dict[str, Any], chunk_of: Callable[[str], Path]) -> None:
        """One line of the journal, and the chunk it speaks of, whose local files are removed when they are up."""
        if "volume" in entry:
            volume_id = str(entry["volume"]["volume_id"])
            while len(self._waiting) >= _WAITING:
                self._settle(self._waiting.popleft())
            self.bucket.forget(volume_id)
            self._waiting.append(self._uploads.submit(self._send_chunk, chunk_of(volume_id), volume_id))
        self._rows.append(json.dumps(entry))
        if len(self._rows) >= _ROWS_PER_PART:
            self.flush()

    def drop(self, volume_id: str) -> None:
        """The chunk is to be removed as soon as no index names it."""
        self._gone.append(volume_id)

    def _send_chunk(self, chunk: Path, volume_id: str) -> None:
        for part in CHUNK_FILES:
            remote.put(chunk / part, remote.join(self.bucket.url, "chunks", volume_id[:2], volume_id, part))
        shutil.rmtree(chunk, ignore_errors=True)

    def _settle(self, upload: Future[None]) -> None:
        try:
            upload.result()
        except OctjepaError as error:
            self._failed = self._failed or error
        if self._failed is not None:  # for ever: an index that names a chunk which is not there must not go up
            raise self._failed

    def flush(self) -> None:
        """All chunks so far are in the bucket, and after them what the journal says."""
        while self._waiting:
            self._settle(self._waiting.popleft())
        if self._failed is not None:
            raise self._failed
        if self._rows:
            self._part += 1
            lines = "".join(row + "\n" for row in self._rows)
            remote.put_bytes(lines.encode(), remote.join(self.bucket.url, f"journal-{self._part:08d}.jsonl"))
            self._rows.clear()

    def send_index(self) -> None:
        """The index files that changed, store.json last; then journal parts and chunks that nothing names any more."""
        while self._waiting:
            self._settle(self._waiting.popleft())
        if self._failed is not None:
            raise self._failed
        for path in sorted(self._index(), key=lambda path: path.name == "store.json"):
            content = path.read_bytes()
            if self._sent.get(path.name) != content:
                remote.put(path, remote.join(self.bucket.url, path.name))
                self._sent[path.name] = content
        if not (self.folder / "journal.jsonl").exists():
            self._rows.clear()
            for one in self.bucket.files():
                name = one.url.rpartition("/")[2]
                if name.startswith("journal") and not (self.folder / name).exists():
                    remote.remove(one.url)
            for volume_id in self._gone:
                for part in CHUNK_FILES:
                    remote.remove(remote.join(self.bucket.url, "chunks", volume_id[:2], volume_id, part))
                self.bucket.forget(volume_id)
            self._gone.clear()


def _machine() -> str:
    """Names this machine since it was started, and the process numbers that are seen here."""
    parts = [socket.gethostname()]
    for path, read in (("/proc/sys/kernel/random/boot_id", Path.read_text), ("/proc/self/ns/pid", Path.readlink)):
        try:
            parts.append(str(read(Path(path))).strip())
        except OSError:
            continue  # no Linux: the host's name has to do
    return " ".join(parts)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def _remote_lock(url: str) -> Iterator[None]:
    """Holds the lock object. What a killed process of this machine left is taken away; another's is told."""
    me = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "machine": _machine(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "token": uuid.uuid4().hex,
    }
    mine = json.dumps(me).encode()
    while not remote.put_bytes(mine, url, only_if_absent=True):
        holder = _holder(url)
        if holder is None:
            continue  # it was let go of in this moment
        if holder.get("machine") == me["machine"] and not _is_alive(int(holder.get("process", 0))):
            _log.warning("%s was left by process %s, which is no more: taken over", url, holder["process"])
            remote.remove(url)
            continue
        raise UsageError(
            f"another process is writing to {url.rpartition('/')[0]}: number {holder.get('process', 'unknown')} on "
            f"{holder.get('host', 'an unknown machine')}, for {_age(str(holder.get('since', '')))}. Wait for it to "
            f"end. If you are sure that it was killed, remove the object {url} and run the same command again"
        )
    try:
        yield
    finally:
        if _holder(url) == me:
            remote.remove(url)
        else:
            _log.warning("%s was taken away while this process was writing: look whether another one wrote too", url)


def _holder(url: str) -> dict[str, Any] | None:
    try:
        found = json.loads(remote.read_bytes(url))
        return found if isinstance(found, dict) else {}
    except ValueError:
        return {}
    except OctjepaError:
        if remote.info(url) is None:
            return None
        raise


def _age(since: str) -> str:
    try:
        minutes = (datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds() / 60
    except (ValueError, TypeError):
        return "an unknown time"
    return f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
