"""The lock of a folder: one writer, and none that outlives the process which holds it."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from octjepa.errors import UsageError
from octjepa.store.disk import only_writer


def test_a_forked_process_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    """Loader processes live a few seconds longer than a run that is killed, and its launcher starts it at once."""
    with only_writer(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        with pytest.raises(UsageError, match="another process is writing"), only_writer(tmp_path):
            pass
    try:
        with only_writer(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_system_without_locks_is_no_other_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(UsageError, match=r"cannot be locked \(No locks available\)"), only_writer(tmp_path):
        pass
