"""The record of a run: every line goes to metrics.jsonl at once, and its figures to the trackers that were asked for.

Only the process of rank 0 writes and tracks, so there is one run whatever the number of processes.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from octjepa.checkpoint.location import Location
from octjepa.config import science, science_hash
from octjepa.extras import to_install
from octjepa.files import Journal
from octjepa.recipe import Recipe
from octjepa.train.tracking.backends import MAKERS, NEEDS, PictureFolder, Run
from octjepa.train.tracking.channel import Channel
from octjepa.train.tracking.picture import draw
from octjepa.views.loader import Batch

_SECONDS_AT_THE_END = 15.0
_log = logging.getLogger(__name__)


class Record:
    """`write` lines and `show` batches; leaving the context closes the trackers."""

    def __init__(self, recipe: Recipe, journal: Journal | None, channels: list[Channel], first: int) -> None:
        self._recipe, self._journal, self._channels, self._first = recipe, journal, channels, first

    def write(self, update: int, values: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl; trackers get its finite numbers, and how many volumes a skipped update had."""
        if self._journal is not None:
            self._journal.append({"update": update, **values})
        figures = figures_of(values)
        for channel in self._channels:
            channel.figures(update, figures)

    def return_to(self, update: int, values: Mapping[str, Any]) -> None:
        """The run goes on from `update`: later lines of metrics.jsonl are dropped, one that says why is added.

        Trackers keep what they were sent.
        """
        if self._journal is not None:
            self._journal.truncate(update, {"update": update, **values})

    def show(self, update: int, batch: Batch) -> None:
        """Draws the batch of `update` if that is the first of this process, or one that the recipe asks for."""
        every = self._recipe.tracking.pictures_every_updates
        if not self._channels or every is None or (update != self._first + 1 and update % every):
            return
        image = draw(batch, self._recipe)
        for channel in self._channels:
            channel.picture(update, image)

    def sync(self) -> None:
        """metrics.jsonl is on the disk as far as it goes. From any thread."""
        if self._journal is not None:
            self._journal.sync()

    def saved(self, update: int, place: Location) -> None:
        """A checkpoint is whole at `place`; trackers hear of it when the recipe asks. From any thread."""
        if self._recipe.tracking.send_addresses:
            address = place if isinstance(place, str) else place.resolve().as_uri()
            for channel in self._channels:
                channel.checkpoint(update, address)

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for channel in self._channels:
            channel.end(finished=kind is None)
        if kind is not None and issubclass(kind, KeyboardInterrupt):  # at once
            return
        until = time.monotonic() + _SECONDS_AT_THE_END
        for channel in self._channels:
            channel.wait(until - time.monotonic())


def open_record(out: Path, recipe: Recipe, rank: int, keep_until: int) -> Record:
    """The record of the run in `out`, which did `keep_until` updates before; silent unless `rank` is 0."""
    if rank:
        return Record(recipe, None, [], keep_until)
    asked = recipe.tracking
    channels = []
    if asked.pictures_every_updates is not None:
        channels.append(Channel("pictures", lambda: PictureFolder(out / "pictures")))
    wanted = [backend for backend in asked.backends if _there(backend)]
    if wanted:
        folder = out / "tracking"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            _log.warning("no tracker: %s cannot be made (%s)", folder, error.strerror)
            wanted = []
        run = Run(folder, asked.project, asked.name or recipe.name, config_of(recipe), keep_until, asked.send_pictures)
        channels += [Channel(backend, partial(MAKERS[backend], run)) for backend in wanted]
    journal = Journal(out / "metrics.jsonl")
    journal.truncate(keep_until)
    return Record(recipe, journal, channels, keep_until)


def figures_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line under their names; lists and texts are told as counts, never by their contents."""
    figures = {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    if "skipped" in values:
        figures["train/skipped_volumes"] = float(len(values["skipped"]))
    figures |= {f"alarm/{name}": 1.0 for name in values.get("alarms", ())}
    return figures


def config_of(recipe: Recipe) -> dict[str, str | int | float | bool]:
    """The science fields as `section.key`, and their hash. Of weights to start from only that there are some."""
    flat: dict[str, str | int | float | bool] = {"science_hash": science_hash(recipe)}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, part in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), part)
        elif prefix == "model.warm_start":
            flat[prefix] = value is not None
        else:
            flat[prefix] = value if isinstance(value, bool | int | float | str) else str(value)

    add("", science(recipe))
    return flat


def _there(backend: str) -> bool:
    """Whether its library is installed; one that is not is told of at once, and the run goes on."""
    module, extra = NEEDS[backend]
    if importlib.util.find_spec(module) is not None:
        return True
    _log.warning("tracker %s is not installed (%s): the run goes on without it", backend, to_install(extra))
    return False
