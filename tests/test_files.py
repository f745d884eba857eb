"""The lock of a folder: one writer, and none that outlives the process which holds it."""

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
from octjepa.files import writer_lock


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
