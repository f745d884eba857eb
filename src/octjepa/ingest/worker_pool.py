"""A pool of processes on this machine in which a file that crashes or hangs costs that file alone.

A C decoder can end its process (segmentation fault, out of memory) or never return. Every worker therefore has one
file at a time and a separate pipe, so that the file is known when the worker dies, and only that worker is killed
when time is up. `concurrent.futures` offers neither: there one death breaks the whole pool.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

from octjepa.errors import OctjepaError
from octjepa.ingest.one_file import Result, refused
from octjepa.ingest.source_file import SourceFile
from octjepa.machine import cores
from octjepa.read.memory_budget import share_memory

# Generic for a type checker alone, and jaxtyping 0.2.34, the lowest, evaluates every annotation of a function.
if TYPE_CHECKING:
    Pipe = Connection[Any, Any]
else:
    Pipe = Connection

Work = Callable[[SourceFile], Result]
_log = logging.getLogger(__name__)
AHEAD = 4  # results that may wait for an earlier file, per worker: enough to keep all busy, few enough to stay small


def worker_count(requested: int | None) -> int:
    """`requested` processes, with a warning if they are more than the cores; one a core if that is None."""
    available = cores()
    if requested is None:
        return available
    if requested > available:
        _log.warning(
            "%d worker processes on %d cores: all are started, and share the cores; that takes more memory and is not "
            "faster than --workers %d",
            requested,
            available,
            available,
        )
    return requested


class WorkerPool:
    """`size` processes that call `work` (which must pickle) on files; its OctjepaError and OSError are raised here.

    A file whose process dies is tried once more while no other file is worked on (another's memory may have been the
    cause), and then refused with `worker_died`; one that takes longer than `seconds_per_file` with `timed_out`.
    `beside` more workers of other pools share this machine's memory.
    Leaving the context kills the workers; what they were writing is in hidden folders that the parent removes.
    """

    def __init__(self, work: Work, size: int, seconds_per_file: float, beside: int = 0) -> None:
        self._work, self._size, self._seconds = work, size, seconds_per_file
        self._shares = size + beside
        self.workers: list[Worker] = []
        self.suspects: set[int] = set()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers.clear()

    def results(self, files: Sequence[SourceFile]) -> Generator[tuple[SourceFile, Result], None, None]:
        """Results in the order of `files`. Raises what `work` raises; OctjepaError: no process can be started."""
        todo = deque(range(len(files)))
        done: dict[int, Result] = {}
        for index, file in enumerate(files):
            while index not in done:
                self._assign(todo, files, index + AHEAD * self._size)
                self._collect(todo, files, done)
            yield file, done.pop(index)

    def _assign(self, todo: deque[int], files: Sequence[SourceFile], limit: int) -> None:
        """Gives each idle worker a file below `limit`; a suspect waits until no other file is worked on."""
        busy = [worker for worker in self.workers if worker.number is not None]
        while len(self.workers) < min(self._size, len(todo) + len(busy)):
            self.workers.append(Worker(self._work, self._shares))
        for worker in self.workers:
            if not todo or todo[0] >= limit:
                return
            if busy and (todo[0] in self.suspects or busy[0].number in self.suspects):
                return
            if worker.ready and worker.number is None:
                worker.assign(todo.popleft(), files, self._seconds)
                busy.append(worker)

    def _collect(self, todo: deque[int], files: Sequence[SourceFile], done: dict[int, Result]) -> None:
        """Waits until any worker has a result, has died, or has used up the time of its file."""
        until = min(worker.until for worker in self.workers)
        wait(
            [worker.pipe for worker in self.workers], None if until == math.inf else max(0.0, until - time.monotonic())
        )
        for worker in list(self.workers):
            number = worker.number
            try:
                if worker.pipe.poll():
                    result = worker.receive()
                    if number is not None:
                        self.suspects.discard(number)
                        done[number] = result
                    continue
            except EOFError:
                self.workers.remove(worker)
                cause = worker.cause_of_death()
                if number is None:
                    if not worker.ready:
                        raise OctjepaError(
                            f"a worker process ended before it began to work ({cause}); try again with --workers 1"
                        ) from None
                elif number in self.suspects:
                    self.suspects.discard(number)
                    done[number] = refused(files[number], "read", "worker_died", f"{cause}, twice")
                else:
                    self.suspects.add(number)
                    todo.appendleft(number)
                continue
            if number is not None and time.monotonic() >= worker.until:
                self.workers.remove(worker)
                self.suspects.discard(number)
                worker.kill()
                done[number] = refused(files[number], "read", "timed_out", f"not done after {self._seconds:g} s")


class Worker:
    """One process and the pipe to it. `number` is the index of its file, None while it is idle."""

    def __init__(self, work: Work, shares: int = 1) -> None:
        # Spawned, not forked: the parent may hold threads (BLAS, progress bar) that a fork would freeze.
        context = get_context("spawn")
        self.pipe, worker_pipe = context.Pipe()
        self._process = context.Process(target=_work_on, args=(worker_pipe, work, shares), daemon=True)
        resource_tracker.ensure_running()  # which would let Ctrl-C through again
        # Ctrl-C is held back, which the process inherits: it is not stopped while it starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        except OSError as error:
            raise OctjepaError(f"no worker process can be started: {error.strerror or error}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            worker_pipe.close()  # only the process holds its end: its death ends the pipe
        self.ready = False
        self.number: int | None = None
        self.until = math.inf

    def assign(self, number: int, files: Sequence[SourceFile], seconds: float) -> None:
        """Sends one file, to be answered within `seconds`."""
        self.number, self.until = number, time.monotonic() + seconds
        try:
            self.pipe.send(files[number])
        except OSError:
            return  # it died while idle: reading the pipe raises EOFError

    def receive(self) -> Result:
        """The result of the assigned file. Raises what the work raised; EOFError where the process has ended."""
        try:
            failure, value = self.pipe.recv()
        except OSError as error:
            raise EOFError from error
        self.number, self.until, self.ready = None, math.inf, True
        if failure is not None:
            raise failure
        return value

    def cause_of_death(self) -> str:
        """A sentence such as "the process ended with SIGSEGV"."""
        self._process.join(5)
        code = self._process.exitcode
        self.kill()
        if code is None or code >= 0:
            return f"the process ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"the process ended with {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def kill(self) -> None:
        """Kills the process and closes the pipe."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()


def _work_on(pipe: Pipe, work: Work, shares: int) -> None:
    """The main function of a worker: reports ready, then answers each file with (error or None, result or None).

    The machine's memory is divided among `shares` workers.
    """
    from threadpoolctl import threadpool_limits

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threadpool_limits(1)
    share_memory(shares)
    pipe.send((None, {}))  # ready
    while True:
        try:
            file = pipe.recv()
        except EOFError:
            return
        answer: tuple[Exception | None, Result | None]
        try:
            answer = (None, work(file))
        except (OctjepaError, OSError) as error:
            answer = (error, None)
        pipe.send(answer)


def _end_with_parent() -> None:
    """A worker whose parent was killed must not continue writing into a store that the next ingest holds."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
