"""Lives of a command in forked processes, and what can end them: a kill or an error at a write, a signal, a limit.

A life is `octjepa WORDS` in a copy of this process, in which everything is imported already. "A write" is whatever
changes the disk below a folder: a file opened for writing, a flush to disk, a rename, a removal, a folder made.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}
PATIENCE_SECONDS = 900.0  # a life gets little of a busy machine
HANG = 999  # the code of a life that had to be ended


@dataclass(frozen=True)
class End:
    """How a life ended: its exit code (minus a signal's number), what it said on stderr, its seconds."""

    code: int
    message: str
    seconds: float

    @property
    def clear(self) -> bool:
        """Whether it was refused in one line for the user, and nothing else was said at the end."""
        last = self.message.strip().splitlines()[-1:] or [""]
        return self.code in (1, 2) and last[0].startswith("octjepa: ") and "Traceback" not in self.message


def start_life(words: Sequence[object], before: Callable[[], object], stderr: Path) -> int:
    """The id of a process, leader of its own group, that runs `before` and then the command."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))  # a test's are its own
        sys.modules["__main__"] = ModuleType("__main__")  # as under `octjepa`, worker processes import nothing of it
        from octjepa.cli import app

        before()
        try:
            app([str(word) for word in words], prog_name="octjepa")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def wait_for(process: int) -> int:
    """The exit code; a life that outlives the patience is a hang, and is killed with its group."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return HANG


def live(
    words: Sequence[object],
    stderr: Path,
    before: Callable[[], object] = lambda: None,
    after_seconds: float | None = None,
    number: int = signal.SIGKILL,
) -> End:
    """One life; with `after_seconds` it is sent the signal `number` after so long, if it lives still."""
    started = time.monotonic()
    process = start_life(words, before, stderr)
    if after_seconds is not None:
        time.sleep(after_seconds)
        os.kill(process, number)  # before it is waited for, its id is its own, dead or alive
    code = wait_for(process)
    return End(code, stderr.read_text(encoding="utf-8", errors="replace"), time.monotonic() - started)


def die_at_write(below: Path, number: int) -> Callable[[], None]:
    """For `before`: this process kills itself right before write `number` (from 0)."""
    return lambda: at_writes(below, lambda count, _: os.kill(os.getpid(), signal.SIGKILL) if count == number else None)


def fail_from_write(below: Path, number: int, error: int) -> Callable[[], None]:
    """For `before`: write `number` and all after it but removals fail with this error number, as on a full disk."""

    def fail(count: int, event: str) -> None:
        if count >= number and event not in ("os.remove", "os.rmdir"):
            raise OSError(error, os.strerror(error), str(below))

    return lambda: at_writes(below, fail)


def few_open_files(limit: int) -> Callable[[], None]:
    """For `before`: no more than `limit` files can be open at a time."""
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def close_stdout() -> None:
    """For `before`: whoever read stdout has gone away, as `head` does."""
    ours, theirs = os.pipe()
    os.close(ours)
    os.dup2(theirs, 1)


def at_writes(below: Path, act: Callable[[int, str], object]) -> None:
    """Calls `act(count, event)` before every write of this process; of its children they are their own."""
    owner, top, count = os.getpid(), str(below), 0
    flush = os.fsync

    def write(event: str) -> None:
        nonlocal count
        if os.getpid() == owner:
            count += 1
            act(count - 1, event)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            changes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        else:
            path, changes = arguments[0] if event in _CHANGES else None, event in _CHANGES
        if changes and isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(top):
            write(event)

    def fsync(file: int) -> None:
        write("fsync")
        flush(file)

    os.fsync = fsync
    sys.addaudithook(hook)
