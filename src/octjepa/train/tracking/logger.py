"""The log of a run: every line goes to metrics.jsonl at once, and its numbers to the trackers of the recipe.

Only the process of rank 0 writes and tracks, so there is one run whatever the number of processes.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from octjepa.checkpoint.location import Location
from octjepa.config import science, science_hash
from octjepa.errors import install_command
from octjepa.files import Journal
from octjepa.recipe import TRACKERS, Recipe
from octjepa.train.tracking.base import NEEDS, TrackedRun, Tracker, in_one_line
from octjepa.views.loader import Batch

SECONDS_AT_THE_END = 15.0
MOST_MESSAGES = 2000  # metrics and pictures in a queue; a tracker further behind is dropped
_log = logging.getLogger(__name__)


class TrackerThread:
    """Passes metrics and pictures to the tracker that `make` returns, in order, from a separate thread.

    Whatever its library does, the training loop never waits for it; a failure is logged once and ends it. The thread
    starts with the first message, after the loader's processes have been forked: a fork next to a thread that holds a
    lock would leave a child that waits for ever.
    """

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name = name
        self._make = make
        self._messages: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MOST_MESSAGES)
        self._thread: threading.Thread | None = None
        self._failed = threading.Event()

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        self._send(lambda tracker: tracker.metrics(update, values))

    def picture(self, update: int, image: UInt8[np.ndarray, "H W 3"]) -> None:
        """Shows the views and masks of `update`."""
        self._send(lambda tracker: tracker.picture(update, image))

    def checkpoint(self, update: int, address: str) -> None:
        self._send(lambda tracker: tracker.checkpoint(update, address))

    def end(self, finished: bool) -> None:
        """Lets the thread send what is queued and close the tracker; `wait` waits for it."""
        if self._thread is not None:
            self._send(lambda tracker: tracker.close(finished))
            self._send(None)

    def wait(self, seconds: float) -> None:
        """Waits so long at most for the thread, which dies with the process."""
        if self._thread is None:
            return
        self._thread.join(max(seconds, 0.0))
        if self._thread.is_alive() and not self._failed.is_set():
            self._warn("did not take everything in time; the rest is left out")

    def _send(self, job: Callable[[Tracker], None] | None) -> None:
        """Queues a job for the thread, which the first one starts; where the queue is full, it warns instead."""
        if self._failed.is_set():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"tracker-{self.name}", daemon=True)
            self._thread.start()
        try:
            self._messages.put_nowait(job)
        except queue.Full:
            self._warn(f"is {MOST_MESSAGES} messages behind")

    def _work(self) -> None:
        try:
            tracker = self._make()
            while (job := self._messages.get()) is not None and not self._failed.is_set():
                job(tracker)
        except Exception as error:  # a library may raise anything
            self._warn(f"failed ({in_one_line(error)})")

    def _warn(self, problem: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            _log.warning(
                "tracker %s %s: the run continues without it, metrics.jsonl has every metric", self.name, problem
            )


class RunLogger:
    """Writes metrics.jsonl and pictures and feeds the trackers; leaving the context closes these."""

    def __init__(self, recipe: Recipe, journal: Journal | None, trackers: list[TrackerThread], first: int) -> None:
        self._recipe, self._journal, self._trackers, self._first = recipe, journal, trackers, first

    def write(self, update: int, values: Mapping[str, Any]) -> None:
        """Writes a line of metrics.jsonl; trackers get its finite numbers and the count of skipped volumes."""
        if self._journal is not None:
            self._journal.append({"update": update, **values})
        numbers = numbers_of(values)
        for tracker in self._trackers:
            tracker.metrics(update, numbers)

    def go_back(self, update: int, values: Mapping[str, Any]) -> None:
        """The run continues from `update`: later lines of metrics.jsonl are dropped, one that says why is added.

        Trackers keep what they have.
        """
        if self._journal is not None:
            self._journal.truncate(update, {"update": update, **values})

    def show(self, update: int, batch: Batch) -> None:
        """Draws the batch of `update` if that is the first of this process, or due by the recipe."""
        every = self._recipe.tracking.pictures_every_updates
        if not self._trackers or every is None or (update != self._first + 1 and update % every):
            return
        from octjepa.train.tracking.picture import draw

        image = draw(batch, self._recipe)
        for tracker in self._trackers:
            tracker.picture(update, image)

    def sync(self) -> None:
        """Returns when metrics.jsonl is on the disk. From any thread."""
        if self._journal is not None:
            self._journal.sync()

    def checkpoint(self, update: int, location: Location) -> None:
        """Sends the address of a new checkpoint to trackers where the recipe allows it. From any thread."""
        if self._recipe.tracking.send_addresses:
            address = location if isinstance(location, str) else location.resolve().as_uri()
            for tracker in self._trackers:
                tracker.checkpoint(update, address)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for tracker in self._trackers:
            tracker.end(finished=kind is None)
        if kind is not None and issubclass(kind, KeyboardInterrupt):  # at once
            return
        until = time.monotonic() + SECONDS_AT_THE_END
        for tracker in self._trackers:
            tracker.wait(until - time.monotonic())


def open_logger(out: Path, recipe: Recipe, rank: int, keep_until: int) -> RunLogger:
    """The logger of the run in `out`, which did `keep_until` updates before; it writes only on rank 0."""
    if rank:
        return RunLogger(recipe, None, [], keep_until)
    settings = recipe.tracking
    trackers = []
    if settings.pictures_every_updates is not None:
        from octjepa.train.tracking.picture import PictureFolder  # runs without pictures need nothing of it

        trackers.append(TrackerThread("pictures", lambda: PictureFolder(out / "pictures")))
    backends = [backend for backend in settings.backends if _is_installed(backend)]
    if backends:
        folder = out / "tracking"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            _log.warning("no tracker: %s cannot be made (%s)", folder, error.strerror)
            backends = []
        run = TrackedRun(
            folder,
            settings.project,
            settings.name or recipe.name,
            config_of(recipe),
            keep_until,
            settings.send_pictures,
        )
        trackers += [TrackerThread(backend, partial(_make, backend, run)) for backend in backends]
    journal = Journal(out / "metrics.jsonl")
    journal.truncate(keep_until)
    return RunLogger(recipe, journal, trackers, keep_until)


def _make(backend: str, run: TrackedRun) -> Tracker:
    return TRACKERS.get(backend)(run)


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by name; of lists and texts only counts, never their contents."""
    numbers = {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    if "skipped" in values:
        numbers["train/skipped_volumes"] = float(len(values["skipped"]))
    numbers |= {f"alarm/{name}": 1.0 for name in values.get("alarms", ())}
    return numbers


def config_of(recipe: Recipe) -> dict[str, str | int | float | bool]:
    """The science fields as `section.key`, and their hash. Of paths to weights only whether they are set."""
    flat: dict[str, str | int | float | bool] = {"science_hash": science_hash(recipe)}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, part in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), part)
        elif prefix in ("model.warm_start", "objective.teacher"):
            flat[prefix] = value is not None
        else:
            flat[prefix] = value if isinstance(value, bool | int | float | str) else str(value)

    add("", science(recipe))
    return flat


def _is_installed(backend: str) -> bool:
    """Whether its library is installed; a missing one is logged at once, and the run continues."""
    module, extra = NEEDS.get(backend, (None, ""))  # a tracker of another package brings what it needs
    if module is None or importlib.util.find_spec(module) is not None:
        return True
    _log.warning("tracker %s is not installed (%s): the run continues without it", backend, install_command(extra))
    return False
