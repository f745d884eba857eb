"""Progress bars on stderr: what is done, how far, how fast, and the remaining time.

Nothing is shown with --quiet or where stderr is not a terminal, so logs and JSON stay clean.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich is loaded with the first bar: `octjepa --help` draws none
    from rich.progress import Progress, ProgressColumn

_quiet = False


def set_quiet(quiet: bool) -> None:
    """Of the processes of a launcher only rank 0 shows anything: one bar for all."""
    global _quiet
    _quiet = quiet or os.environ.get("RANK", "0") != "0"


def is_quiet() -> bool:
    """Whether bars are switched off."""
    return _quiet


class Bar:
    """Handle of one running bar; `advance` and `say` cost nothing when quiet."""

    def __init__(self, progress: Progress | None, total: int | None, what: str) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(what, total=total, note="")

    def advance(self, steps: int = 1) -> None:
        """Moves the bar on by `steps`."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, steps)

    def say(self, note: str) -> None:
        """Shows a short note behind the bar, such as the current loss."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, note=note)


@contextmanager
def bar(what: str, total: int | None, unit: str = "it", done: int = 0) -> Iterator[Bar]:
    """A bar for `total` steps of `unit`; `done` were finished before this call."""
    if _quiet:
        yield Bar(None, total, what)
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Bar(None, total, what)
        return
    progress = Progress(*_columns(unit), console=console)
    handle = Bar(progress, total, what)
    progress.start()
    try:
        handle.advance(done)
        yield handle
    finally:
        with suppress(OSError):  # the terminal may be gone, and the work is not
            progress.stop()


def _columns(unit: str) -> list[ProgressColumn]:
    """What a bar shows, from left to right."""
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
