"""Ctrl-C, SIGTERM and SIGUSR1 end a run after the update in hand, with a checkpoint; a second Ctrl-C ends it at once.

SIGUSR1 is what schedulers send some time before they take a machine away; it counts as SIGTERM.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from octjepa.errors import OctjepaError


class Interrupted(OctjepaError):
    """The run was told to stop, and stopped between two updates."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StopRequest:
    """`signal_number` is 0 until a signal came."""

    signal_number = 0


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """While this is open, the first of these signals is noted instead of ending the process."""
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        request.signal_number = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        if number == signal.SIGINT:  # launchers and schedulers say the others more than once
            signal.signal(number, signal.default_int_handler)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
