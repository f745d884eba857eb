"""What ranks tell each other before every update, so that all of them do the same: one small sum over the ranks."""

from __future__ import annotations

import signal
from typing import NamedTuple

from octjepa.distributed.runtime import Runtime


class StepFlags(NamedTuple):
    """Ranks that ran out of memory, volumes that could not be read, ranks told to stop, writes that failed, reads that
    were tried again, ranks without a batch."""

    memory: int
    unread: int
    interrupted: int
    terminated: int
    unsaved: int
    retried: int
    without: int

    @property
    def stop(self) -> int:
        """The signal to end with, 0 for none."""
        return signal.SIGINT if self.interrupted else signal.SIGTERM if self.terminated else 0


def sync_flags(
    runtime: Runtime, memory: bool, unread: int, told: int, unsaved: bool, retried: int = 0, without: bool = False
) -> StepFlags:
    """The same on every rank. `told` is the signal that came to this one."""
    mine = (memory, unread, told == signal.SIGINT, told == signal.SIGTERM, unsaved, retried, without)
    return StepFlags(*(round(number) for number in runtime.sum_numbers(mine)))
