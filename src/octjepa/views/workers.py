"""Loader processes: how they begin, and what is said when one of them ends before its time.

torch tells of a dead one by a signal, so its error may come in the midst of anything that the main process does;
`translate_worker_errors` stands around all of it.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import NoReturn

from octjepa.errors import MachineRefuses, OctjepaError

_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (is killed by signal: [^.]+|exited unexpectedly.*?)\."
)
_CAUGHT = re.compile(r"Caught (\w+) in DataLoader worker process")
_NO_FILES = os.strerror(errno.EMFILE)
_SECONDS = 1.0  # until the end of a process is known
_MORE_FILES = "Raise the limit of open files (ulimit -n), or lower machine.loader_workers"
_LESS = (
    "lower machine.loader_workers (of a fine-tuning: loader_workers), or give the machine more memory, then go on with "
    "--resume"
)


def init_worker(worker: int) -> None:
    """In a new loader process. Ctrl-C reaches all processes of a terminal, but the run needs this one for its update.

    A batch that cannot be handed over, for want of an open file, ends the process: multiprocessing would drop it, and
    the run would wait for it for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Queue._on_queue_feeder_error = staticmethod(_end)  # type: ignore[attr-defined] # its hook for this


def _end(error: Exception, batch: object) -> NoReturn:
    out_of_files = _NO_FILES in str(error)
    if not out_of_files:
        traceback.print_exception(error)
    os._exit(errno.EMFILE if out_of_files else 1)


@contextmanager
def translate_worker_errors() -> Iterator[None]:
    """Raises OctjepaError with the cause where a loader process was killed, ended or ran out of memory.

    An OctjepaError of a loader process comes as it was raised there. Any other error keeps its traceback.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OctjepaError) as error:
        text = str(error)
        if _DEATH.search(text + "."):
            raise OctjepaError(f"a loader process {_cause(_most_precise(error))}") from None
        caught = _CAUGHT.search(text)
        if caught and caught.group(1).endswith("MemoryError"):  # NumPy's own comes as a RuntimeError
            raise OctjepaError(f"a loader process ran out of memory: {_LESS}") from None
        if caught and isinstance(error, OctjepaError):  # its text is a traceback, which ends with the message
            raise type(error)(text.strip().splitlines()[-1].partition(": ")[2]) from None
        raise


@contextmanager
def translate_transfer_errors(crew: Iterable[BaseProcess]) -> Iterator[None]:
    """Around the taking of batches: a process that dies while it hands one over leaves an error of the connection.

    Raises OctjepaError with what that process of `crew` ended with, MachineRefuses where no open file is left here.
    """
    try:
        yield
    except (ConnectionError, EOFError, FileNotFoundError) as error:
        if _CAUGHT.search(str(error)):  # raised in the process, which lives
            raise
        for process in crew:
            process.join(_SECONDS)
        codes = [process.exitcode for process in crew if process.exitcode]
        said = f"exited unexpectedly with exit code {codes[0]}" if codes else "broke off while it handed over a batch"
        if codes and codes[0] < 0:
            said = f"is killed by signal: {signal.strsignal(-codes[0])}"
        raise OctjepaError(f"a loader process {_cause(said)}") from None
    except (OSError, RuntimeError) as error:  # torch makes the one of the other
        if _NO_FILES not in str(error) or _CAUGHT.search(str(error)):
            raise
        raise MachineRefuses(f"no batch can be taken from a loader process: {_NO_FILES}. {_MORE_FILES}") from None


def _most_precise(error: BaseException) -> str:
    """torch says that a process ended, and keeps the signal or exit code in the error that it was told first."""
    said: list[str] = []
    link: BaseException | None = error
    while link is not None:
        said += _DEATH.findall(str(link) + ".")
        link = link.__cause__ or link.__context__
    return next((one for one in said if "signal" in one or "code" in one), said[0])


def _cause(said: str) -> str:
    """What torch said, and what to do."""
    if said.endswith(f"exit code {errno.EMFILE}"):
        return f"could not hand over a batch: {_NO_FILES}. {_MORE_FILES}"
    name = said.partition("signal: ")[2]
    if name == "Killed":
        return f"was killed (SIGKILL), most often by the system because memory is full: {_LESS}"
    if name == "Bus error":
        return f"died of a bus error, most often because /dev/shm is full: make that larger, or {_LESS}"
    what = f"died of a signal ({name})" if name else said.replace("exited", "ended")
    return f"{what}. loader_workers=0 shows the error where it happens; go on with --resume"
