"""Checkpoints beside the training: the state is copied at once, written and uploaded by a thread meanwhile.

One at a time: the next save waits for the one before. What a write ran into is raised at the next call, at the latest
by `wait` at the end of the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from octjepa.checkpoint import folder, state
from octjepa.checkpoint.location import Location, child
from octjepa.recipe import Recipe
from octjepa.train.run_folder import note_saved
from octjepa.train.tracking import Record


class Saver:
    """A context manager; leaving it waits for the write in hand."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], object]) -> None:
        """`write` in the background, after the one before. Raises what that one ran into."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
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
        elif self._thread is not None and not issubclass(kind, KeyboardInterrupt):
            # The run ends for another reason, and what was being written is finished all the same. Ctrl-C ends it at
            # once: a daemon's thread does not keep the process, and half a checkpoint is none.
            self._thread.join()


def write_checkpoint(
    out: Path,
    saves: Location,
    done: int,
    tensors: dict[str, dict[str, Tensor]],
    recipe: Recipe,
    skipped: int,
    ids: list[str],
    score: float | None,
    record: Record,
    prune: bool,
) -> None:
    """What `Saver` runs: a new checkpoint below `saves`, and then, if `prune`, without those that are too old."""
    record.sync()  # a checkpoint is never ahead of the lines that a resume needs
    state.save(saves, done, tensors, recipe, skipped, ids, score)
    place = child(saves, f"step-{done:08d}")
    note_saved(out, done, place)
    record.saved(done, place)
    if prune:
        folder.prune(saves, recipe.checkpoint.keep_last, recipe.checkpoint.keep_every_updates)
