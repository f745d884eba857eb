"""Files worked on by processes of this machine, each by itself: one that crashes or hangs costs one file.

A C decoder can end its process (segmentation fault, out of memory) or never return. Every worker therefore has one
file at a time and a pipe of its own, so that whose file it was is known when it dies, and only it is killed when time
is up. `concurrent.futures` knows neither: there one death breaks the whole pool.
"""

from __future__ import annotations

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
from typing import Any

from octjepa.errors import OctjepaError
from octjepa.ingest import SourceFile
from octjepa.store.one_file import Result, refused

Work = Callable[[SourceFile], Result]
AHEAD = 4  # results that may wait for an earlier file, per worker: enough to keep all busy, few enough to stay small


class WorkerPool:
    """`size` processes that do `work`, which is pickled; OctjepaError and OSError come home from it.

    A file whose process dies is tried once more, with the machine to itself (another's memory may have been the
    cause), and then refused with `worker_died`; one that takes longer than `seconds_per_file` with `timed_out`.
    Leaving the context kills what still works: what it was writing lies in hidden folders that the parent clears away.
    """

    def __init__(self, work: Work, size: int, seconds_per_file: float) -> None:
        self._work, self._size, self._seconds = work, size, seconds_per_file
        self._workers: list[_Worker] = []
        self._suspects: set[int] = set()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def results(self, files: Sequence[SourceFile]) -> Generator[tuple[SourceFile, Result], None, None]:
        """Results in the order of `files`. Raises what `work` raises; OctjepaError: no process can be started."""
        todo = deque(range(len(files)))
        done: dict[int, Result] = {}
        for turn, file in enumerate(files):
            while turn not in done:
                self._hand_out(todo, files, turn + AHEAD * self._size)
                self._collect(todo, files, done)
            yield file, done.pop(turn)

    def _hand_out(self, todo: deque[int], files: Sequence[SourceFile], limit: int) -> None:
        """Gives each idle worker a file below `limit`, but a suspect only where no other file is worked on."""
        busy = [worker for worker in self._workers if worker.number is not None]
        while len(self._workers) < min(self._size, len(todo) + len(busy)):
            self._workers.append(_Worker(self._work))
        for worker in self._workers:
            if not todo or todo[0] >= limit:
                return
            if busy and (todo[0] in self._suspects or busy[0].number in self._suspects):
                return
            if worker.ready and worker.number is None:
                worker.give(todo.popleft(), files, self._seconds)
                busy.append(worker)

    def _collect(self, todo: deque[int], files: Sequence[SourceFile], done: dict[int, Result]) -> None:
        """Waits for news of any worker: a result, a death, the end of a file's time."""
        until = min(worker.until for worker in self._workers)
        wait(
            [worker.pipe for worker in self._workers], None if until == math.inf else max(0.0, until - time.monotonic())
        )
        for worker in list(self._workers):
            number = worker.number
            try:
                if worker.pipe.poll():
                    result = worker.receive()
                    if number is not None:
                        self._suspects.discard(number)
                        done[number] = result
                    continue
            except EOFError:
                self._workers.remove(worker)
                cause = worker.cause_of_death()
                if number is None:
                    if not worker.ready:
                        raise OctjepaError(
                            f"a worker process ended before it began to work ({cause}); try again with --workers 1"
                        ) from None
                elif number in self._suspects:
                    self._suspects.discard(number)
                    done[number] = refused(files[number], "read", "worker_died", f"{cause}, twice")
                else:
                    self._suspects.add(number)
                    todo.appendleft(number)
                continue
            if number is not None and time.monotonic() >= worker.until:
                self._workers.remove(worker)
                self._suspects.discard(number)
                worker.kill()
                done[number] = refused(files[number], "read", "timed_out", f"not done after {self._seconds:g} s")


class _Worker:
    """One process and the pipe to it. `number` is its file's place in the list, None while it has none."""

    def __init__(self, work: Work) -> None:
        # Spawned, not forked: the parent may hold threads (BLAS, progress bar) that a fork would freeze.
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work_on, args=(theirs, work), daemon=True)
        resource_tracker.ensure_running()  # which would let Ctrl-C through again
        # Ctrl-C is held back, which the process inherits: it is not stopped while it starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        except OSError as error:
            raise OctjepaError(f"no worker process can be started: {error.strerror or error}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()  # only the process holds its end: its death ends the pipe
        self.ready = False
        self.number: int | None = None
        self.until = math.inf

    def give(self, number: int, files: Sequence[SourceFile], seconds: float) -> None:
        self.number, self.until = number, time.monotonic() + seconds
        try:
            self.pipe.send(files[number])
        except OSError:
            return  # it died while idle: the pipe tells so when it is read

    def receive(self) -> Result:
        """Raises what the work raised; EOFError where the process is gone."""
        try:
            said, value = self.pipe.recv()
        except OSError as error:
            raise EOFError from error
        self.number, self.until, self.ready = None, math.inf, True
        if said is not None:
            raise said
        return value

    def cause_of_death(self) -> str:
        """ "the process ended with SIGSEGV"."""
        self._process.join(5)
        code = self._process.exitcode
        self.kill()
        if code is None or code >= 0:
            return f"the process ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"the process ended with {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()


def _work_on(pipe: Connection[Any, Any], work: Work) -> None:
    """The life of a worker: says that it is ready, then answers each file with (error or None, result or None)."""
    from threadpoolctl import threadpool_limits

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threadpool_limits(1)
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
    """A worker whose parent was killed must not go on writing into a store that the next ingest holds."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
