"""Signals that end a run between two updates, and the flags that all ranks agree on before every update.

Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a run after the current update, with a checkpoint; a second Ctrl-C ends it at
once. Schedulers send SIGUSR1 some time before they take a machine away, and a terminal that is closed sends SIGHUP (not
under nohup): both count as SIGTERM.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from octjepa.distributed.runtime import Runtime
from octjepa.errors import OctjepaError


class Interrupted(OctjepaError):
    """A signal stopped the run between two updates; the exit code is 128 plus the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StopRequest:
    """Holds the signal that asked this process to stop; `signal_number` is 0 until one arrives."""

    signal_number = 0


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """While this is open, the first of these signals is recorded instead of ending the process."""
    request = StopRequest()

    def record(number: int, frame: FrameType | None) -> None:
        request.signal_number = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        if number == signal.SIGINT:  # launchers and schedulers send the other signals more than once
            signal.signal(number, signal.default_int_handler)

    caught = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    caught += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    previous = {number: signal.signal(number, record) for number in caught}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StepFlags(NamedTuple):
    """Reports of the ranks before an optimizer step, each a count over the ranks.

    `out_of_memory`, `interrupted`, `terminated`, `write_failed` and `without_batch` count ranks; `unreadable` counts
    volumes, `retried` reads that were repeated.
    """

    out_of_memory: int
    unreadable: int
    interrupted: int
    terminated: int
    write_failed: int
    retried: int
    without_batch: int

    @property
    def stop_signal(self) -> int:
        """The signal to end with, 0 for none."""
        return signal.SIGINT if self.interrupted else signal.SIGTERM if self.terminated else 0


def sync_flags(
    runtime: Runtime,
    *,
    signal_number: int = 0,
    out_of_memory: bool = False,
    unreadable: int = 0,
    write_failed: bool = False,
    retried: int = 0,
    without_batch: bool = False,
) -> StepFlags:
    """Sums the flags of all ranks, so that every rank takes the same branch. `signal_number` is this rank's signal."""
    counts = (
        out_of_memory,
        unreadable,
        signal_number == signal.SIGINT,
        signal_number == signal.SIGTERM,
        write_failed,
        retried,
        without_batch,
    )
    return StepFlags(*(round(number) for number in runtime.sum_numbers(counts)))
