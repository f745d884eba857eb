"""Progress on stderr: what is done, how far, how fast, and the remaining time.

On a terminal it is a bar. Otherwise, as in a log file, it is a line every `SECONDS_PER_LINE` seconds, so that a long
job does not look stuck. `--quiet` switches both off. stdout is never used, so JSON stays clean.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich is loaded with the first bar: `octjepa --help` draws none
    from rich.progress import Progress, ProgressColumn

SECONDS_PER_LINE = 30.0  # without a terminal
_quiet = False


def set_quiet(quiet: bool) -> None:
    """Of the processes of a launcher only rank 0 shows anything: one bar for all."""
    global _quiet
    _quiet = quiet or os.environ.get("RANK", "0") != "0"


def is_quiet() -> bool:
    """Whether bars are switched off."""
    return _quiet


class Lines:
    """Progress without a terminal: a line at most every `SECONDS_PER_LINE` seconds."""

    def __init__(self, what: str, total: int | None, unit: str, done: int) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = self._done_at_start = done
        self._note = ""
        self._started = self._printed = time.monotonic()

    def advance(self, steps: int) -> None:
        """Counts `steps`, and prints a line if the last line is old enough."""
        self._done += steps
        self._print_if_due()

    def say(self, note: str) -> None:
        """Keeps a note for the next line, and prints a line if the last line is old enough.

        So a single long step, which reports only notes, does not look stuck.
        """
        self._note = note
        self._print_if_due()

    def _print_if_due(self) -> None:
        now = time.monotonic()
        if now - self._printed < SECONDS_PER_LINE:
            return
        self._printed = now
        rate = (self._done - self._done_at_start) / (now - self._started)
        of_total = "" if self._total is None else f" of {self._total}"
        speed = f" ({rate:.2g} {self._unit}/s)"
        if rate == 0:  # no step is done, so the speed is unknown
            speed = ""
        elif self._total is not None:
            speed = f" ({rate:.2g} {self._unit}/s, about {max(self._total - self._done, 0) / rate:.0f} s left)"
        note = f", {self._note}" if self._note else ""
        text = f"{self._what}: {self._done}{of_total}{speed}{note}"
        with suppress(OSError):  # the reader of the log may have stopped
            print(text, file=sys.stderr, flush=True)


class Bar:
    """Handle of a running bar or of progress lines; `advance` and `say` do nothing if progress is switched off."""

    def __init__(self, progress: Progress | None, total: int | None, what: str, lines: Lines | None = None) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(what, total=total, note="")
        self._lines = lines

    def advance(self, steps: int = 1) -> None:
        """Moves the bar by `steps`."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, steps)
        if self._lines is not None:
            self._lines.advance(steps)

    def say(self, note: str) -> None:
        """Shows a short note behind the bar, such as the current loss."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, note=note)
        if self._lines is not None:
            self._lines.say(note)


@contextmanager
def bar(what: str, total: int | None, unit: str = "it", done: int = 0) -> Iterator[Bar]:
    """A bar for `total` steps of `unit`; `done` of them were finished before this call."""
    if _quiet:
        yield Bar(None, total, what)
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Bar(None, total, what, Lines(what, total, unit, done))
        return
    progress = Progress(*_columns(unit), console=console)
    handle = Bar(progress, total, what)
    progress.start()
    try:
        handle.advance(done)
        yield handle
    finally:
        with suppress(OSError):  # the terminal may be closed while the work continues
            progress.stop()


def _columns(unit: str) -> list[ProgressColumn]:
    """The columns of a bar, from left to right."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        """Units a second."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.1f} {unit}/s", style="cyan")

    return [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    ]
