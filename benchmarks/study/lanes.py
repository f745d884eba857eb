"""Several runs at once, each a process of its own; a signal to the study is passed on, every orderly end awaited."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

_POLL_SECONDS = 0.2


class Lanes:
    """At most `number` processes at a time, by name. A context manager: leaving it stops what still runs."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.told = 0  # the signal that came, 0 for none
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for child in self.running.values():
            child.send_signal(signal.SIGTERM)
        for child in self.running.values():
            child.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.told = number
        for child in self.running.values():
            child.send_signal(signal.SIGTERM)

    @property
    def free(self) -> bool:
        """Whether another process may start."""
        return len(self.running) < self.number and not self.told

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """In a session of its own: Ctrl-C reaches it through the study alone, once."""
        self.running[name] = subprocess.Popen(
            command, cwd=self.folder, env={**os.environ, **environment}, start_new_session=True
        )

    def wait(self) -> tuple[str, int]:
        """(name, exit code) of the next process that ends: 128 + the signal after one."""
        while True:
            for name, child in self.running.items():
                code = child.poll()
                if code is not None:
                    del self.running[name]
                    return name, code if code >= 0 else 128 - code
            time.sleep(_POLL_SECONDS)
