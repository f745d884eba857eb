"""A store in a gs:// or s3:// bucket: laid out as on a disk, so that a copy of it is a store.

Reading takes a snapshot of the index files (a folder in the cache that never changes again) and fetches chunks through
the cache on demand. Writing works on a folder in the cache: chunks are uploaded as they are made, then the journal
lines that name them, as objects `journal-<number>.jsonl`, and at the end the index. An entry goes up after its chunk,
an index before the journals it replaces are removed, and the last journal says what the index says, so whoever reads
meanwhile, or after a kill, sees a whole store.
One object, `.lock`, keeps a second writer out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from octjepa import remote
from octjepa.errors import OctjepaError, UsageError
from octjepa.locks import writer_lock
from octjepa.store.index import IndexChange
from octjepa.store.storage import CHUNK_FILES, MARKER, SHARDS, ChunkFile, DamagedVolume, ShardPart, chunk_folder

ENTRIES_PER_JOURNAL = 32  # what a killed ingest may lose
_INDEX_SUFFIXES = {".json", ".jsonl", ".parquet", ".tsv"}
_LINES_SETTLED = 10_000  # of a journal, far below what `Journal` reads
_UPLOADS, _QUEUED = 4, 16  # uploads at once; chunks that may wait for theirs
_LOOKED_AT = 100  # objects, to learn whether a place is empty: a lock and some that stand for folders may be there
_OLD_SECONDS = 30 * 24 * 3600


class BucketStorage:
    """A store in a bucket. Picklable: loader processes open separate connections."""

    def __init__(self, url: str) -> None:
        self.url = remote.join(url)
        self._listings: dict[str, dict[str, remote.RemoteObject]] = {}  # first two letters of the id -> its objects
        self._shards: set[str] | None = None  # names of the shards that are there

    @property
    def location(self) -> str:
        """The URL."""
        return self.url

    @property
    def _cache(self) -> Path:
        return remote.cache_folder("stores", hashlib.sha256(self.url.encode()).hexdigest()[:24])

    def index_objects(self) -> list[remote.RemoteObject]:
        """The objects directly in the store's folder, so without the chunks."""
        return remote.list_objects(self.url, recursive=False)

    def create(self, marker: str) -> None:
        """Uploads store.json. Raises UsageError: other objects are there, also in the folders below."""
        lock = remote.join(self.url, ".lock")
        if any(url != lock for url in remote.first_objects(self.url, _LOOKED_AT)):
            raise UsageError(f"{self.url} holds objects and is not a store: name an empty or a new place")
        remote.put_bytes(marker.encode(), remote.join(self.url, MARKER), only_if_absent=True)

    # -- reading --

    def snapshot(self) -> Path | None:
        """A folder with the index files as they are now; None if there is no store. Raises as `octjepa.remote`."""
        for _ in range(8):
            objects = [entry for entry in self.index_objects() if Path(entry.url).suffix in _INDEX_SUFFIXES]
            if not any(entry.url.endswith(f"/{MARKER}") for entry in objects):
                return None
            version = "\n".join(f"{entry.url} {entry.version} {entry.size}" for entry in objects)
            folder = self._cache / hashlib.sha256(version.encode()).hexdigest()[:24]
            if folder.is_dir():
                os.utime(folder)  # another process removes those that were not used for a month
                return folder
            try:
                return self._download_index(objects, folder)
            except OctjepaError:
                if self.index_objects() == objects:  # not the work of a writer who changed them meanwhile
                    raise
        raise OctjepaError(f"the index of {self.url} changes faster than it can be read: try again in a minute")

    def _download_index(self, objects: list[remote.RemoteObject], folder: Path) -> Path:
        """Downloads the index into `folder`, whole or not at all; old copies are removed. Raises OctjepaError."""
        remote.clear_unfinished(self._cache)
        for old in self._cache.iterdir():
            is_snapshot = old.name != "writing" and not old.name.startswith(".")
            with suppress(FileNotFoundError):  # another process was first
                if is_snapshot and time.time() - old.stat().st_mtime > _OLD_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)
        try:
            with remote.temporary_folder(self._cache) as arriving:
                for entry in objects:
                    with remote.local_copy(entry) as copy:
                        shutil.copyfile(copy, arriving / entry.url.rpartition("/")[2])
                try:
                    os.replace(arriving, folder)
                except OSError:
                    if not folder.is_dir():  # else another process was first
                        raise
            return folder
        except OSError as error:
            raise OctjepaError(f"the cache {self._cache} cannot be written: {error.strerror or error}") from None

    def chunk_url(self, volume_id: str, name: str) -> str:
        """The URL of one file of a chunk."""
        return remote.join(self.url, "chunks", volume_id[:2], volume_id, name)

    def _chunk_objects(self, volume_id: str) -> dict[str, remote.RemoteObject]:
        """{file name: object} of one chunk; one listing serves all chunks whose ids begin alike."""
        prefix = volume_id[:2]
        if prefix not in self._listings:
            objects = remote.list_objects(remote.join(self.url, "chunks", prefix))
            self._listings[prefix] = {"/".join(entry.url.rsplit("/", 2)[1:]): entry for entry in objects}
        listing = self._listings[prefix]
        return {name: listing[f"{volume_id}/{name}"] for name in CHUNK_FILES if f"{volume_id}/{name}" in listing}

    def forget_listing(self, volume_id: str) -> None:
        """Lists this volume's chunk again at its next read."""
        self._listings.pop(volume_id[:2], None)

    def has_chunk(self, volume_id: str) -> bool:
        """Whether all files of a chunk are in the bucket."""
        return len(self._chunk_objects(volume_id)) == len(CHUNK_FILES)

    @contextmanager
    def chunk(self, volume_id: str) -> Iterator[dict[str, ChunkFile]]:
        """{file name: local copy} of a chunk, held in the cache within the context. Raises DamagedVolume: no chunk."""
        objects = self._chunk_objects(volume_id)
        if len(objects) < len(CHUNK_FILES):
            raise DamagedVolume(f"{self.url} lacks the chunk of volume {volume_id}: ingest its file again")
        with ExitStack() as stack:
            yield {name: ChunkFile(stack.enter_context(remote.local_copy(entry))) for name, entry in objects.items()}

    def shard_names(self) -> list[str]:
        """The shards that are there, whether or not the table names them."""
        return [entry.url.rpartition("/")[2] for entry in remote.list_objects(remote.join(self.url, SHARDS))]

    def has_shard(self, name: str) -> bool:
        """Whether the shard is there; listed once."""
        if self._shards is None:
            self._shards = set(self.shard_names())
        return name in self._shards

    def forget_shards(self) -> None:
        """Lists the shards again when one is next looked for."""
        self._shards = None

    @contextmanager
    def shard(self, part: ShardPart) -> Iterator[dict[str, ChunkFile]]:
        """{file name: part of a local copy} of a volume, for which one request asks for its bytes of the shard."""
        url = remote.join(self.url, SHARDS, part.shard)
        # A shard is named by its content, so the name is its version.
        wanted = remote.RemoteObject(url, part.size, part.shard, start=part.start)
        with remote.local_copy(wanted) as copy:
            yield part.files(copy, 0)

    # -- writing --

    @contextmanager
    def writing(self) -> Iterator[BucketWriter]:
        """A writer whose folder holds the index as it is now. Raises UsageError: another process writes."""
        folder = self._cache / "writing"
        folder.mkdir(exist_ok=True)
        with ExitStack() as locks:
            try:
                locks.enter_context(writer_lock(folder))
            except UsageError:
                raise UsageError(f"another process of this machine is writing to {self.url}: wait for it") from None
            locks.enter_context(remote.bucket_lock(self.url))
            _clear(folder)
            snapshot = self.snapshot()
            if snapshot is not None:
                shutil.copytree(snapshot, folder, dirs_exist_ok=True)
            with ThreadPoolExecutor(_UPLOADS, thread_name_prefix="upload") as pool:
                try:
                    yield BucketWriter(self, folder, pool)
                finally:
                    pool.shutdown(wait=True, cancel_futures=True)
            _clear(folder)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


class BucketWriter:
    """Uploads what is put into `folder`, which is laid out as the store; uploads of chunks run next to the work."""

    def __init__(self, bucket: BucketStorage, folder: Path, pool: ThreadPoolExecutor) -> None:
        self.bucket, self.folder, self._pool = bucket, folder, pool
        self._uploads: deque[Future[None]] = deque()
        self._failure: OctjepaError | None = None
        self._lines: list[str] = []
        self._dropped: list[str] = []
        self._dropped_shards: list[str] = []
        self._sent = {path.name: path.read_bytes() for path in self._index_files()}
        self._journals = max((int(path.stem.partition("-")[2]) for path in folder.glob("journal-*.jsonl")), default=0)

    def _index_files(self) -> list[Path]:
        """The index files in the folder; journal.jsonl goes up in numbered objects instead."""
        return sorted(p for p in self.folder.iterdir() if p.suffix in _INDEX_SUFFIXES and p.name != "journal.jsonl")

    def add(self, change: IndexChange) -> None:
        """Uploads one journal line after the chunk it names, whose local files are then removed."""
        if change.volume is not None:
            volume_id = change.volume.volume_id
            if volume_id in self._dropped:  # it came back, from another file
                self._dropped.remove(volume_id)
            self._wait_for_uploads(_QUEUED - 1)
            self.bucket.forget_listing(volume_id)
            self._uploads.append(self._pool.submit(self._upload_chunk, volume_id))
        self._lines.append(json.dumps(change.to_json()) + "\n")
        if len(self._lines) >= ENTRIES_PER_JOURNAL:
            self._put_journal()

    def settle(self, changes: Iterable[IndexChange]) -> None:
        """Uploads these lines as the last journals, if there are others. Raises OctjepaError."""
        if not self._journals:
            return  # the index is newer than what the bucket holds
        self._lines.clear()
        for change in changes:
            self._lines.append(json.dumps(change.to_json()) + "\n")
            if len(self._lines) >= _LINES_SETTLED:
                self._put_journal()
        self._put_journal()

    def _put_journal(self) -> None:
        """Uploads the lines that wait, after the chunks that they name."""
        self._wait_for_uploads()
        self._journals += 1
        url = remote.join(self.bucket.url, f"journal-{self._journals:08d}.jsonl")
        remote.put_bytes("".join(self._lines).encode(), url)
        self._lines.clear()

    def drop(self, volume_id: str) -> None:
        """Removes a chunk when the index that no longer names it is in the bucket."""
        self._dropped.append(volume_id)

    def add_shard(self, path: Path) -> None:
        """Uploads a shard, whose local file is then removed. Raises OctjepaError."""
        remote.put(path, remote.join(self.bucket.url, SHARDS, path.name))
        self.bucket.forget_shards()
        path.unlink()

    def drop_shard(self, name: str) -> None:
        """Removes a shard when the table that no longer names it is in the bucket."""
        self._dropped_shards.append(name)

    def _upload_chunk(self, volume_id: str) -> None:
        chunk = chunk_folder(self.folder, volume_id)
        for name in CHUNK_FILES:
            remote.put(chunk / name, self.bucket.chunk_url(volume_id, name))
        shutil.rmtree(chunk, ignore_errors=True)

    def _wait_for_uploads(self, remaining: int = 0) -> None:
        """Raises OctjepaError once an upload has failed, and ever after: no index may name an absent chunk."""
        while len(self._uploads) > remaining:
            try:
                self._uploads.popleft().result()
            except OctjepaError as error:
                self._failure = self._failure or error
        if self._failure is not None:
            raise self._failure

    def publish(self) -> None:
        """Uploads the index files that changed, store.json last, then removes journals and chunks it replaces."""
        self._wait_for_uploads()
        for path in sorted(self._index_files(), key=lambda path: path.name == MARKER):
            content = path.read_bytes()
            if self._sent.get(path.name) != content:
                remote.put(path, remote.join(self.bucket.url, path.name))
                self._sent[path.name] = content
        if (self.folder / "journal.jsonl").exists():
            return  # the index does not hold all of it yet
        self._lines.clear()
        for entry in sorted(self.bucket.index_objects(), key=lambda entry: entry.url):  # the last journal goes last
            name = entry.url.rpartition("/")[2]
            if name.startswith("journal") and not (self.folder / name).exists():
                remote.remove(entry.url)
        for volume_id in self._dropped:
            for name in CHUNK_FILES:
                remote.remove(self.bucket.chunk_url(volume_id, name))
            self.bucket.forget_listing(volume_id)
        for name in self._dropped_shards:
            remote.remove(remote.join(self.bucket.url, SHARDS, name))
        self._dropped.clear()
        self._dropped_shards.clear()
