"""The lock of a folder or a file: one writer, none that outlives its process, nothing left, no link followed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from octjepa.errors import UsageError
from octjepa.locks import LOCK, file_lock, writer_lock


def test_a_forked_process_does_not_hold_the_lock_of_a_killed_one(tmp_path: Path) -> None:
    """Loader processes live a few seconds longer than a run that is killed, and its launcher starts it at once."""
    says, hears = os.pipe()
    writer = os.fork()
    if writer == 0:
        try:
            with writer_lock(tmp_path):
                child = os.fork()
                os.write(hears, b"%d " % child if child else b"running ")
                time.sleep(60)
        finally:
            os._exit(1)
    os.close(hears)
    message = b""
    while message.count(b" ") < 2:  # both run, so the child has come past what it does at its birth
        heard = os.read(says, 100)
        assert heard, "the writer ended"
        message += heard
    child = int(message.replace(b"running", b""))
    try:
        with pytest.raises(UsageError, match="another process is writing"), writer_lock(tmp_path):
            pass
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        with writer_lock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(says)


def _is_open_on(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:  # the listing's own descriptor is closed by now
        return False


def test_a_lock_that_is_given_back_is_free_though_another_process_has_its_file_open(tmp_path: Path) -> None:
    """As one forked a moment before has, that has not run yet."""
    with writer_lock(tmp_path):
        (lock,) = [fd for fd in map(int, os.listdir("/dev/fd")) if _is_open_on(fd, tmp_path / ".lock")]
        other = subprocess.Popen(["sleep", "60"], pass_fds=[lock])
        with pytest.raises(UsageError, match="another process is writing"), writer_lock(tmp_path):
            pass
    try:
        with writer_lock(tmp_path):
            pass
    finally:
        other.kill()
        other.wait()


def test_a_file_system_without_locks_is_no_other_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(UsageError, match=r"cannot be locked \(No locks available\)"), writer_lock(tmp_path):
        pass


def test_the_message_for_a_second_writer_names_who_holds_the_folder(tmp_path: Path) -> None:
    with writer_lock(tmp_path), pytest.raises(UsageError) as refused, writer_lock(tmp_path):
        pass
    assert f"(process {os.getpid()} on " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_second_writer_of_a_file_is_refused_and_of_its_neighbour_is_not(tmp_path: Path) -> None:
    table = tmp_path / "a.parquet"
    held = pytest.raises(UsageError, match=r"writing to .*a\.parquet")
    with file_lock(table), file_lock(tmp_path / "b.parquet"), held, file_lock(table):
        pass
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_lock_nor_of_a_folder_that_it_made(tmp_path: Path) -> None:
    with writer_lock(tmp_path / "new" / "run"):
        pass
    with writer_lock(tmp_path / "used"):
        (tmp_path / "used" / "result").touch()
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["used", "result"]


def test_what_a_killed_process_left_of_its_lock_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text('{"process": 1, "machine": "gone", "command": "embed", "since": "long ago"}')
    with writer_lock(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_that_leads_to_another_file_is_refused_and_the_file_stays(tmp_path: Path, link: Any) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("mine")
    run.mkdir()
    link(precious, run / LOCK)
    with pytest.raises(UsageError, match="link"), writer_lock(run):
        pass
    assert precious.read_text() == "mine"
