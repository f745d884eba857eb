"""Checkpoints beside the training: the state is copied at once, written and uploaded by a thread meanwhile.

One at a time: the next save waits for the one before. What a write ran into is raised at the next call, at the latest
by `wait` at the end of the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Saver:
    """A context manager; leaving it waits for the write in hand."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], object]) -> None:
        """`write` in the background, after the one before. Raises what that one ran into."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether a write ran into something that was not raised yet."""
        return self._error is not None

    def wait(self) -> None:
        """Until nothing is being written. Raises OctjepaError (disk full, bucket gone) as the write did."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # whatever it is, it must end the run, and not die with a thread
            self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()  # the run ends for another reason; what was being written is finished all the same
