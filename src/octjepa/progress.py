"""Progress bars on stderr: what is done, how far, how fast, and the remaining time.

Nothing is shown with --quiet or where stderr is not a terminal, so logs and JSON stay clean.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_quiet = False


def set_quiet(quiet: bool) -> None:
    """Of the processes of a launcher only rank 0 shows anything: one bar for all."""
    global _quiet
    _quiet = quiet or os.environ.get("RANK", "0") != "0"


def is_quiet() -> bool:
    """Whether bars are switched off."""
    return _quiet


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f} {self.unit}/s", style="cyan")


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
    console = Console(stderr=True)
    if _quiet or not console.is_terminal:
        yield Bar(None, total, what)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        handle = Bar(progress, total, what)
        handle.advance(done)
        yield handle
