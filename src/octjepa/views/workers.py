"""Loader processes: how they start, and clear errors when one of them dies.

torch reports a dead worker by a signal, so its error may be raised anywhere in the main process;
`translate_worker_errors` therefore wraps the whole run.
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

from octjepa.errors import OctjepaError, ResourceError

_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (is killed by signal: [^.]+|exited unexpectedly.*?)\."
)
_CAUGHT = re.compile(r"Caught (\w+) in DataLoader worker process")
_NO_FILES = os.strerror(errno.EMFILE)
_JOIN_SECONDS = 1.0  # until the exit code of a dead process is known
_RAISE_LIMIT = "Raise the limit of open files (ulimit -n), or lower machine.loader_workers"
_USE_LESS_MEMORY = (
    "lower machine.loader_workers (of a fine-tuning: loader_workers), or give the machine more memory, then continue "
    "with "
    "--resume"
)


def init_worker(worker: int) -> None:
    """Runs first in a new loader process: ignores Ctrl-C, because the run still needs this process for its update.

    A batch that cannot be sent for lack of an open file ends the process: multiprocessing would drop the batch, and
    the run would wait for it forever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Queue._on_queue_feeder_error = staticmethod(_exit_on_send_error)  # type: ignore[attr-defined] # its hook for this


def _exit_on_send_error(error: Exception, batch: object) -> NoReturn:
    out_of_files = _NO_FILES in str(error)
    if not out_of_files:
        traceback.print_exception(error)
    os._exit(errno.EMFILE if out_of_files else 1)


@contextmanager
def translate_worker_errors() -> Iterator[None]:
    """Raises OctjepaError with the cause where a loader process was killed, exited or ran out of memory.

    An OctjepaError of a loader process is raised again as it was there. Any other error keeps its traceback.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OctjepaError) as error:
        text = str(error)
        if _DEATH.search(text + "."):
            raise OctjepaError(f"a loader process {_explain(_most_precise_death(error))}") from None
        caught = _CAUGHT.search(text)
        if caught and caught.group(1).endswith("MemoryError"):  # NumPy's own comes as a RuntimeError
            raise OctjepaError(f"a loader process ran out of memory: {_USE_LESS_MEMORY}") from None
        if caught and isinstance(error, OctjepaError):  # its text is a traceback that ends with the message
            raise type(error)(text.strip().splitlines()[-1].partition(": ")[2]) from None
        raise


@contextmanager
def translate_transfer_errors(workers: Iterable[BaseProcess]) -> Iterator[None]:
    """Wraps the receiving of batches: a worker that dies while it sends one leaves a connection error.

    torch's own error has no cause where its signal handler's was lost, in a callback for one. Raises OctjepaError with
    the exit code or signal of the worker, ResourceError if no open file is left here.
    """
    try:
        yield
    except (ConnectionError, EOFError, FileNotFoundError) as error:
        if _CAUGHT.search(str(error)):  # raised in the process, which lives
            raise
        death = _death_of(workers) or "broke off while it sent a batch"
        raise OctjepaError(f"a loader process {_explain(death)}") from None
    except (OSError, RuntimeError) as error:  # torch turns one into the other
        if _DEATH.search(str(error) + ".") and not _is_precise(_most_precise_death(error)):
            cause = _death_of(workers)
            if cause is not None:
                raise OctjepaError(f"a loader process {_explain(cause)}") from None
        if _NO_FILES not in str(error) or _CAUGHT.search(str(error)):
            raise
        raise ResourceError(f"no batch can be taken from a loader process: {_NO_FILES}. {_RAISE_LIMIT}") from None


def _death_of(workers: Iterable[BaseProcess]) -> str | None:
    """In torch's words, of the first worker that has ended badly; None where all live or ended well."""
    processes = list(workers)
    for process in processes:
        process.join(_JOIN_SECONDS)
    codes = [process.exitcode for process in processes if process.exitcode]
    if not codes:
        return None
    if codes[0] < 0:
        return f"is killed by signal: {signal.strsignal(-codes[0])}"
    return f"exited unexpectedly with exit code {codes[0]}"


def _is_precise(death: str) -> bool:
    return "signal" in death or "code" in death


def _most_precise_death(error: BaseException) -> str:
    """torch's words for the death in a chain of errors: the one with the signal or exit code, usually the first."""
    deaths: list[str] = []
    link: BaseException | None = error
    while link is not None:
        deaths += _DEATH.findall(str(link) + ".")
        link = link.__cause__ or link.__context__
    return next((death for death in deaths if _is_precise(death)), deaths[0])


def _explain(death: str) -> str:
    """torch's words for a death -> what happened and what to do."""
    if death.endswith(f"exit code {errno.EMFILE}"):
        return f"could not send a batch: {_NO_FILES}. {_RAISE_LIMIT}"
    name = death.partition("signal: ")[2]
    if name == "Killed":
        return f"was killed (SIGKILL), most often by the system because memory is full: {_USE_LESS_MEMORY}"
    if name == "Bus error":
        return f"died of a bus error, most often because /dev/shm is full: make that larger, or {_USE_LESS_MEMORY}"
    what = f"died of a signal ({name})" if name else death.replace("exited", "ended")
    return f"{what}. loader_workers=0 shows the error where it happens; continue with --resume"
