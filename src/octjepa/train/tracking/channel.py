"""A tracker behind a thread of its own: whatever its library does, the training loop never waits for it.

The thread starts with the first thing sent, after the loader's processes have been forked: a fork beside a thread
that holds a lock would leave a child that waits for ever.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from jaxtyping import UInt8

_WAITING = 2000  # figures and pictures not yet taken; past it they are dropped
_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """What a tracker can do. Any of it may raise or block: `Channel` deals with that."""

    def figures(self, update: int, values: Mapping[str, float]) -> None: ...

    def picture(self, update: int, image: UInt8[np.ndarray, "H W 3"]) -> None: ...

    def checkpoint(self, update: int, address: str) -> None: ...

    def close(self, finished: bool) -> None: ...


class Channel:
    """Sends to the tracker that `make` returns, in order, from one thread; a failure is logged once and ends it."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name = name
        self._make = make
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._failed = threading.Event()

    def figures(self, update: int, values: Mapping[str, float]) -> None:
        self._send(lambda tracker: tracker.figures(update, values))

    def picture(self, update: int, image: UInt8[np.ndarray, "H W 3"]) -> None:
        self._send(lambda tracker: tracker.picture(update, image))

    def checkpoint(self, update: int, address: str) -> None:
        self._send(lambda tracker: tracker.checkpoint(update, address))

    def end(self, finished: bool) -> None:
        """Lets the thread write what it holds and close the tracker; `wait` waits for it."""
        if self._thread is not None:
            self._send(lambda tracker: tracker.close(finished))
            self._send(None)

    def wait(self, seconds: float) -> None:
        """Gives the thread that long; then leaves it, as it dies with the process."""
        if self._thread is None:
            return
        self._thread.join(max(seconds, 0.0))
        if self._thread.is_alive() and not self._failed.is_set():
            self._tell("did not take everything in time; the rest is left out")

    def _send(self, job: Callable[[Tracker], None] | None) -> None:
        if self._failed.is_set():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"tracker-{self.name}", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            self._tell(f"is {_WAITING} messages behind")

    def _work(self) -> None:
        try:
            tracker = self._make()
            while (job := self._waiting.get()) is not None and not self._failed.is_set():
                job(tracker)
        except Exception as error:  # a library may raise anything
            self._tell(f"failed ({in_one_line(error)})")

    def _tell(self, what: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            _log.warning("tracker %s %s: the run goes on without it, metrics.jsonl has every figure", self.name, what)


def in_one_line(error: BaseException) -> str:
    """What a library said, cut short, without the credentials that an address may hold."""
    said = re.sub(r"//[^/@\s]+@", "//", " ".join(str(error).split()))
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__
