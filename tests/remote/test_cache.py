"""The cache of remote objects: verified, bounded, one download for all, right with several processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from bucket_servers import Bucket
from octjepa.errors import OctjepaError, UsageError
from octjepa.remote import AbsentObject, info, join, list_objects, local_copy, put_bytes, remove
from octjepa.remote.cache import cache_root, limit_bytes

EYE = bytes(range(256)) * 40


def some(bucket: Bucket, count: int) -> list[str]:
    urls = [join(bucket.url, f"eye-{number}.dcm") for number in range(count)]
    for number, url in enumerate(urls):
        put_bytes(bytes([number]) * 100_000, url)
    return urls


def test_a_second_reading_downloads_nothing_and_keeps_the_name(bucket: Bucket) -> None:
    (url,) = some(bucket, 1)
    with local_copy(url) as path:
        assert path.name == "eye-0.dcm"
        content = path.read_bytes()
    assert bucket.cache.stat().st_mode & 0o777 == 0o700  # it holds scans as they are
    found = list_objects(url)[0]
    bucket.proxy.requests.clear()
    with local_copy(found) as path:
        assert path.read_bytes() == content
    assert bucket.proxy.requests == []


def test_new_content_is_fetched_and_the_old_listing_is_reported(bucket: Bucket) -> None:
    (url,) = some(bucket, 1)
    before = info(url)
    assert before is not None
    put_bytes(b"new", url)
    with local_copy(url) as path:
        assert path.read_bytes() == b"new"
    with pytest.raises(AbsentObject, match="has other content since") as changed, local_copy(before):
        pass
    assert changed.value.exit_code == 1  # the same command may succeed
    remove(url)
    with pytest.raises(AbsentObject, match="is gone since"), local_copy(before):
        pass
    with pytest.raises(AbsentObject, match="there is no object") as absent, local_copy(url):
        pass
    assert absent.value.exit_code == 2


def test_a_damaged_copy_is_found_and_fetched_again(bucket: Bucket) -> None:
    (url,) = some(bucket, 1)
    with local_copy(url) as path:
        good = path.read_bytes()
    for bad in (good[:-1], b"\x01" + good[1:]):
        path.chmod(0o600)
        path.write_bytes(bad)
        with local_copy(url) as again:
            assert again.read_bytes() == good
    assert bucket.proxy.bodies_sent("eye-0.dcm") == 3


def cached_bytes() -> int:
    return sum(path.stat().st_size for path in (cache_root() / "objects").glob("*/*/*/*"))


@pytest.mark.slow
def test_eviction_keeps_the_limit_the_recent_and_what_is_in_use(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTJEPA_CACHE_GB", "0.00035")  # three of the objects
    urls = some(bucket, 7)
    with local_copy(urls[0]) as held:
        for url in urls[1:]:
            with local_copy(url):
                pass
            assert cached_bytes() <= limit_bytes()
        assert held.is_file()
    names = {path.name for path in bucket.cache.glob("objects/*/*/*/*")}
    assert names == {"eye-0.dcm", "eye-5.dcm", "eye-6.dcm"}
    with local_copy(urls[5]), local_copy(urls[1]):
        names = {path.name for path in bucket.cache.glob("objects/*/*/*/*")}
    assert names == {"eye-5.dcm", "eye-6.dcm", "eye-1.dcm"}  # the one used longest ago went
    assert not list(bucket.cache.glob(".new-*"))


def _read_many(urls: list[str], rounds: int, results: multiprocessing.Queue) -> None:
    from octjepa.remote.bucket import disconnect

    total = 0
    for turn in range(rounds):
        for url in urls if turn % 2 else reversed(urls):
            with local_copy(url) as path:
                content = path.read_bytes()
                total += len(content) == 100_000 and len(set(content)) == 1
    disconnect()
    results.put(total)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["1", "0.00025"])
def test_two_processes_share_one_cache(bucket: Bucket, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTJEPA_CACHE_GB", limit)
    monkeypatch.setenv("OCTJEPA_REMOTE_TIMEOUT", "20")
    urls = some(bucket, 4)
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue = context.Queue()
    readers = [context.Process(target=_read_many, args=(urls, 6, results)) for _ in range(2)]
    for reader in readers:
        reader.start()
    assert [results.get(timeout=60) for _ in readers] == [24, 24]
    for reader in readers:
        reader.join()
    if limit == "1":
        assert [bucket.proxy.bodies_sent(f"eye-{number}.dcm") for number in range(4)] == [1] * 4
    assert cached_bytes() <= limit_bytes() + 100_000  # each may add what it fetches while the other looks


def test_a_forked_reader_opens_its_own_connection(bucket: Bucket) -> None:
    urls = some(bucket, 1)
    info(urls[0])  # the parent is connected
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue = context.Queue()
    reader = context.Process(target=_read_many, args=(urls, 1, results))
    reader.start()
    assert results.get(timeout=20) == 1
    reader.join()


def test_the_limit_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTJEPA_CACHE_GB", "all")
    with pytest.raises(UsageError, match="OCTJEPA_CACHE_GB is 'all'"):
        limit_bytes()


def test_a_cache_that_cannot_be_written_is_reported(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (url,) = some(bucket, 1)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("OCTJEPA_CACHE", str(tmp_path / "file"))
    with pytest.raises(OctjepaError, match="OCTJEPA_CACHE"), local_copy(url):
        pass
