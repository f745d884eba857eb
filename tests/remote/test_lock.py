"""The lock of a folder in a bucket, with a bucket that is a dictionary."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from octjepa.errors import UsageError
from octjepa.remote import lock
from octjepa.remote.lock import bucket_lock

URL = "s3://bucket/store/.lock"
KILLED = 4711


def record(process: int) -> bytes:
    """The lock of a process of this machine."""
    return json.dumps({"host": "here", "process": process, "machine": lock._machine()}).encode()


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bytes]:
    objects: dict[str, bytes] = {}

    def read(url: str) -> bytes:
        if url not in objects:
            raise UsageError(f"there is no object {url}")
        return objects[url]

    def put(data: bytes, url: str, only_if_absent: bool) -> bool:
        return objects.setdefault(url, data) is data

    monkeypatch.setenv("OCTJEPA_CACHE", str(tmp_path / "cache"))
    for name, fake in (("read_bytes", read), ("info", objects.get), ("put_bytes", put), ("remove", objects.pop)):
        monkeypatch.setattr(lock, name, fake)
    return objects


def test_the_lock_of_a_killed_process_is_replaced(objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_is_alive", lambda process: process != KILLED)
    objects[URL] = record(KILLED)
    with bucket_lock("s3://bucket/store"):
        assert json.loads(objects[URL])["process"] == os.getpid()
    assert objects == {}


def test_the_lock_of_another_process_that_took_over_first_stays(
    objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_alive(process: int) -> bool:
        if process == KILLED:
            objects[URL] = record(1)  # at this moment the other process takes the lock over
        return process != KILLED

    monkeypatch.setattr(lock, "_is_alive", is_alive)
    objects[URL] = record(KILLED)
    with pytest.raises(UsageError, match="another process is writing"), bucket_lock("s3://bucket/store"):
        pass
    assert objects == {URL: record(1)}
