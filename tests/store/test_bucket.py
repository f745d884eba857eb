"""A store in an emulated bucket: ingested, read, split and gone on with, with faults on the way."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bucket_servers import Bucket
from faulty_proxy import Fault
from octjepa.cohort.split import apply_split
from octjepa.config import load_recipe
from octjepa.errors import OctjepaError, ResourceError, UsageError
from octjepa.ingest import build_store
from octjepa.ingest.build import IngestSummary
from octjepa.remote import info, join, list_objects, put_bytes, read_bytes, remove
from octjepa.store import Store
from octjepa.store.index import IndexEntry
from octjepa.store.storage import CHUNK_FILES

PREPROCESSING = load_recipe("tiny_cpu").preprocessing


@pytest.fixture(scope="module")
def local(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same eyes in a store on disk."""
    path = tmp_path_factory.mktemp("local") / "store"
    build_store([tiny], path, PREPROCESSING)
    return path


def ingest(bucket: Bucket, tiny: Path, **how) -> IngestSummary:
    return build_store([tiny], join(bucket.url, "store"), PREPROCESSING, **how)


def copied(bucket: Bucket, to: Path) -> Path:
    """The store as a user would copy it out of the bucket."""
    for one in list_objects(join(bucket.url, "store")):
        path = to / one.url.partition("/store/")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_bytes(one.url))
    return to


def same(one: Store, other: Store) -> None:
    columns = [name for name in one.table.columns if not name.startswith("file_")]
    assert one.table[columns].equals(other.table[columns])
    for volume_id in one.table["volume_id"]:
        a, b = one.read(volume_id), other.read(volume_id)
        assert np.array_equal(a.pixels, b.pixels)
        assert np.array_equal(a.shifts, b.shifts)


@pytest.mark.slow
def test_a_store_in_a_bucket_is_the_store_on_disk(
    bucket: Bucket, tiny: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = "PUT" if bucket.scheme == "s3" else "POST"
    bucket.proxy.faults += [
        Fault("503", write),
        Fault("reset", write, "pixels" if write == "PUT" else ""),
        Fault("500", "GET"),
    ]
    made = ingest(bucket, tiny)
    bucket.proxy.faults += [Fault("truncate", "GET", "pixels.npy"), Fault("429", "GET", "geometry.npz")]
    url = join(bucket.url, "store")
    store = Store.open(url)
    assert made.accepted == len(store.table) == 10
    assert store.location == url
    same(Store.open(local), store)
    assert not any(fault.times for fault in bucket.proxy.faults)
    names = {one.url.partition("/store/")[2] for one in list_objects(url)}
    assert {name for name in names if "/" not in name} == {path.name for path in local.iterdir() if path.is_file()} - {
        ".lock"
    }
    assert {name for name in names if "/" in name} == {
        str(path.relative_to(local)) for path in local.glob("chunks/*/*/*")
    }
    same(Store.open(copied(bucket, tmp_path / "copy")), store)
    bucket.proxy.requests.clear()
    same(pickle.loads(pickle.dumps(store)), store)
    assert bucket.proxy.requests == []  # all chunks lie in the cache
    again = ingest(bucket, tiny)
    assert (again.accepted, again.skipped) == (0, 10)
    monkeypatch.setenv("OCTJEPA_CACHE", str(tmp_path / "elsewhere"))  # another machine
    same(Store.open(local), Store.open(url))


@pytest.mark.slow
def test_splits_are_written_by_one_and_seen_by_all(bucket: Bucket, tiny: Path) -> None:
    ingest(bucket, tiny)
    url = join(bucket.url, "store")
    apply_split(Store.open(url), "stratified", seed=3)
    before = dict(zip(Store.open(url).table["volume_id"], Store.open(url).table["split"], strict=True))
    person = Store.open(url).table["person_id"].iloc[0]
    other = "test" if before[Store.open(url).table["volume_id"].iloc[0]] != "test" else "val"
    Store.open(url).set_split({person: other})
    table = Store.open(url).table
    assert set(table[table["person_id"] == person]["split"]) == {other}
    assert info(join(url, ".lock")) is None


@pytest.mark.slow
def test_a_second_writer_is_reported_who_writes(bucket: Bucket, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    ingest(bucket, tiny)
    url = join(bucket.url, "store")
    with Store.open(url).writing():
        with pytest.raises(UsageError, match="of this machine is writing to"):
            Store.open(url).set_split({})
        monkeypatch.setenv("OCTJEPA_CACHE", str(tmp_path / "elsewhere"))
        with pytest.raises(UsageError, match=rf"is writing to {url}: number {os.getpid()} on"):
            Store.open(url).set_split({})
    left = {"host": "far", "process": 7, "machine": "another", "since": "2020-01-01T00:00:00+00:00"}
    put_bytes(json.dumps(left).encode(), join(url, ".lock"))
    with pytest.raises(UsageError, match=r"number 7 on far, for \d+ hours.*remove the object .*/\.lock"):
        ingest(bucket, tiny)
    remove(join(url, ".lock"))
    ingest(bucket, tiny)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_a_damaged_chunk_in_the_bucket_is_found(bucket: Bucket, tiny: Path, damage: str) -> None:
    ingest(bucket, tiny)
    url = join(bucket.url, "store")
    first, second = Store.open(url).table["volume_id"].iloc[:2]
    pixels = join(url, "chunks", first[:2], first, "pixels.npy")
    if damage == "gone":
        remove(pixels)
    else:
        content = bytearray(read_bytes(pixels))
        content[-1] ^= 1
        put_bytes(bytes(content), pixels)
    store = Store.open(url)
    with pytest.raises(OctjepaError, match="changed .*SHA-256" if damage == "flipped" else "lacks the chunk"):
        store.read(first)
    assert store.read(second).volume_id == second
    assert store.damaged() == [first]
    remove(pixels)
    assert ingest(bucket, tiny).accepted == 1  # as the message advises
    assert Store.open(url).damaged() == []


@pytest.mark.slow
def test_a_bucket_that_fails_damages_nothing(
    bucket: Bucket, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(bucket, tiny)
    store = Store.open(join(bucket.url, "store"))
    monkeypatch.setenv("OCTJEPA_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("OCTJEPA_REMOTE_TRIES", "2")
    bucket.proxy.faults.append(Fault("503", "GET", "pixels.npy", times=99))
    with pytest.raises(OctjepaError, match=r"cannot (read|look up) .*pixels\.npy: 503.*does not answer as it should"):
        store.damaged()
    bucket.proxy.faults.clear()
    assert store.damaged() == []


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_damages_nothing(
    bucket: Bucket, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(bucket, tiny)
    store = Store.open(join(bucket.url, "store"))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("octjepa.remote.cache.os.open", full)
    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(ResourceError, match=r"cannot be read: Too many open files.*ulimit -n"):
        store.damaged()


@pytest.mark.slow
def test_a_killed_ingest_goes_on(bucket: Bucket, tiny: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = join(bucket.url, "store")
    program = (
        "import sys\nfrom octjepa.ingest import build\nfrom octjepa.store import bucket\n"
        "from octjepa.config import load_recipe\n"
        "bucket.ENTRIES_PER_JOURNAL = 3\nrecord, count = build.record_result, [0]\n"
        "def slow(*args):\n"
        "    count[0] += 1\n"
        "    if count[0] == 8:\n        print('eight', flush=True)\n        import time; time.sleep(60)\n"
        "    return record(*args)\n"
        "build.record_result = slow\n"
        "build.build_store([sys.argv[1]], sys.argv[2], load_recipe('tiny_cpu').preprocessing)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tiny), url], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "eight\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    left = Store.open(url)
    assert len(left.table) == 6  # two journals of three entries; readers see them, with their chunks
    assert left.damaged() == []
    assert info(join(url, ".lock")) is not None
    result = ingest(bucket, tiny)  # takes over the lock of a process that is no more
    assert (result.skipped, result.accepted) == (6, 4)
    same(Store.open(local), Store.open(url))
    assert not any("journal" in one.url or one.url.endswith(".lock") for one in list_objects(url, recursive=False))


@pytest.mark.slow
def test_an_upload_that_fails_leaves_an_index_without_its_row(bucket: Bucket, tiny: Path) -> None:
    write = "PUT" if bucket.scheme == "s3" else "POST"
    where = "geometry.npz" if write == "PUT" else "upload"
    Store.create(join(bucket.url, "store"), PREPROCESSING)
    bucket.proxy.faults.append(Fault("403", write, where, times=99))
    with pytest.raises(UsageError, match="access is denied"):
        ingest(bucket, tiny)
    bucket.proxy.faults.clear()
    assert info(join(bucket.url, "store", ".lock")) is None
    store = Store.open(join(bucket.url, "store"))
    assert store.damaged() == []
    assert ingest(bucket, tiny).accepted == 10 - len(store.table)


def add(store: Store, volume_id: str, file: str) -> None:
    """A volume whose chunk holds no pixels."""
    chunk = store.chunk_folder(volume_id)
    chunk.mkdir(parents=True)
    for name in CHUNK_FILES:
        (chunk / name).write_bytes(b"chunk")
    texts = dict.fromkeys(("content_hash", "eye", "personal", "notes", "split"), "")
    store.add(IndexEntry(volume_id=volume_id, person_id="P1", file=file, file_key=file, **texts))


@pytest.mark.slow
def test_a_kill_before_the_journals_are_removed_loses_no_split(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octjepa.store.bucket.ENTRIES_PER_JOURNAL", 1)
    url = join(bucket.url, "store")
    store = Store.create(url, PREPROCESSING)

    def write() -> None:
        with store.writing():
            add(store, "v", "a.dcm")
            store.set_split({"P1": "train"})
            monkeypatch.setattr("octjepa.remote.remove", killed)
            store.consolidate()

    with pytest.raises(KeyboardInterrupt):
        write()
    assert any("volumes.parquet" in one.url for one in store.storage.index_objects())
    assert Store.open(url).entry("v").split == "train"


@pytest.mark.slow
def test_two_files_that_swap_their_scans_keep_both_chunks(bucket: Bucket) -> None:
    store = Store.create(join(bucket.url, "store"), PREPROCESSING)
    for files in (("a.dcm", "b.dcm"), ("b.dcm", "a.dcm")):
        with store.writing():
            add(store, "v1", files[0])
            add(store, "v2", files[1])
            store.consolidate()
    assert Store.open(store.location).has_files("v1")
    assert Store.open(store.location).has_files("v2")


def test_what_is_no_store_is_reported(bucket: Bucket) -> None:
    with pytest.raises(UsageError, match=f"no store at {bucket.url}"):
        Store.open(bucket.url)
    put_bytes(b"notes", join(bucket.url, "notes.txt"))
    with pytest.raises(UsageError, match="holds objects and is not a store"):
        Store.create(bucket.url, PREPROCESSING)
    with pytest.raises(UsageError, match="lost a slash"):
        Store.open(Path(bucket.url))
    put_bytes(b"a scan", join(bucket.url, "set/1001/a.dcm"))
    with pytest.raises(UsageError, match="holds objects and is not a store"):
        Store.create(join(bucket.url, "set"), PREPROCESSING)
    assert [one.url for one in list_objects(join(bucket.url, "set"))] == [join(bucket.url, "set/1001/a.dcm")]
    put_bytes(b"{}", join(bucket.url, "new/.lock"))
    put_bytes(b"a neighbour", join(bucket.url, "new2/a.dcm"))
    assert len(Store.create(join(bucket.url, "new"), PREPROCESSING)) == 0


def test_a_deleted_chunk_on_disk_is_made_again_and_damage_is_found(tiny: Path, local: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    shutil.copytree(local, path)
    store = Store.open(path)
    first, second = store.table["volume_id"].iloc[:2]
    shutil.rmtree(store.chunk_folder(first))
    pixels = store.chunk_folder(second) / "pixels.npy"
    content = bytearray(pixels.read_bytes())
    content[-1] ^= 1
    pixels.write_bytes(content)
    assert store.damaged() == [first, second]
    assert build_store([tiny], path, PREPROCESSING).accepted == 1
    assert Store.open(path).damaged() == [second]


def test_damaged_participants_are_reported(local: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    shutil.copytree(local, path)
    (path / "participants.parquet").write_bytes(b"torn")
    with pytest.raises(OctjepaError, match=r"participants\.parquet of the store .* is damaged"):
        _ = Store.open(path).participants


def test_a_split_waits_for_no_other_writer(local: Path) -> None:
    store = Store.open(local)
    with store.writing(), pytest.raises(UsageError, match="another process is writing"):
        apply_split(Store.open(local), "stratified", seed=1)
