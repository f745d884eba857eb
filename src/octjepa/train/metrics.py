"""Metrics of each update, from the device to metrics.jsonl, the spike guard and the loss alarm; and the throughput.

Metrics are read one update late (`octjepa.train.engine.LateMetrics`), so that logging never makes the device wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from octjepa.distributed.runtime import Runtime
from octjepa.progress import Bar
from octjepa.train.engine import LateMetrics
from octjepa.train.guards import CollapseAlarms, SpikeGuard
from octjepa.train.tracking import RunLogger

IDLE_FROM, IDLE_WINDOW = 20, 100  # updates: not counted at first, and then counted together
# of the time. Making samples in this process takes up to 0.3 of it (docs/training.md, Data loading), which is not
# idling but looks like it where other work takes the cores.
MOST_IDLE = 0.3


def slow_reading_message(idle: float, store: str, workers: int) -> str:
    """The warning of a run whose updates wait for `store`; `workers` loader processes make its samples."""
    if workers:
        what = f"{workers} loader processes do not keep up: {store} is read too slowly, or their cores are busy"
        to_do = "raise machine.loader_workers where cores are free"
    else:
        what, to_do = f"{store} is read too slowly", "read next to the arithmetic (machine.loader_workers=2)"
    return (
        f"{idle:.0%} of the time of the last {IDLE_WINDOW} updates was spent waiting for samples: {what}. The run "
        f"continues at this speed; to go faster, stop it and continue with --resume after a change: copy the store to "
        f"a local disk, pack many small files into large files (octjepa pack), or {to_do}"
    )


class MetricsBuffer(LateMetrics):
    """Writes the line of each pretraining update to metrics.jsonl; the spike guard and the loss alarm follow it.

    `skipped` counts the updates that were not taken; `must_go_back` is set by too many of them in a row. `volume_ids`
    gives the volumes of an update (from 0).
    """

    def __init__(
        self,
        logger: RunLogger,
        guard: SpikeGuard,
        alarms: CollapseAlarms,
        progress: Bar,
        volume_ids: Callable[[int], list[str]],
        skipped: int,
        runtime: Runtime,
    ) -> None:
        super().__init__(runtime)
        self._logger, self._guard, self._alarms = logger, guard, alarms
        self._bar, self._volume_ids = progress, volume_ids
        self.skipped, self.must_go_back = skipped, False

    def go_back(self, skipped: int) -> None:
        """Drops what is on its way: the run continues from an earlier checkpoint, with `skipped` updates skipped."""
        self.discard()
        self.must_go_back, self.skipped = False, skipped

    def write(self, update: int, steps: list[dict[str, float]], about: Mapping[str, Any]) -> None:
        """Writes the line of an update (from 0); `about` holds what the host knows of it."""
        if self.must_go_back:  # too many updates were skipped, and the run returns to a checkpoint
            return
        values = steps[0]
        healthy = bool(values.pop("healthy"))
        values["train/grad_norm"] = values.pop("grad_norm")
        self.must_go_back = self._guard.follow(update, healthy, values["train/grad_norm"])
        self.skipped += not healthy
        self._alarms.follow_line(values)
        line = {**values, **about}
        if not healthy:
            line["skipped"] = self._volume_ids(update)
        self._logger.write(update + 1, line)
        self._bar.advance()
        self._bar.say(f"loss {values['train/loss']:.3f} cosine {values['train/cosine']:.3f}")


class ThroughputMeter:
    """Times updates of `volumes` volumes each; `lap` ends one update."""

    def __init__(self, volumes: int) -> None:
        self._volumes = volumes
        self._started = self._lap_started = time.perf_counter()
        self._waited = self._waited_in_all = 0.0
        self._cpu_seconds = time.process_time()
        self._laps = 0
        self._idle, self._window_started, self._reported = 0.0, self._started, False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as waiting for data; what this thread computes in it, making samples, is not idle."""
        start, computed = time.perf_counter(), time.thread_time()
        yield
        waited = time.perf_counter() - start
        self._waited += waited
        self._idle += max(waited - (time.thread_time() - computed), 0.0)

    def lap(self) -> dict[str, float]:
        """Volumes a second, share of waiting, seconds, and busy CPU cores of this process in the update that ends."""
        now, cpu_seconds = time.perf_counter(), time.process_time()
        seconds, waited, busy = now - self._lap_started, self._waited, cpu_seconds - self._cpu_seconds
        self._lap_started, self._waited, self._cpu_seconds = now, 0.0, cpu_seconds
        self._waited_in_all += waited
        self._laps += 1
        return {
            "volumes_per_second": self._volumes / seconds,
            "data_wait_share": waited / seconds,
            "cpu_cores_busy": busy / seconds,
            "seconds": seconds,
        }

    def slow_reading(self) -> float | None:
        """The idle share of the last `IDLE_WINDOW` updates if it is above `MOST_IDLE`, once; else None.

        To be called after each `lap`. Idle is time of waiting for data in which this thread did not compute: a disk or
        loader processes are too slow. The first updates do not count, because they fill caches and start processes.
        """
        window, rest = divmod(self._laps - IDLE_FROM, IDLE_WINDOW)
        if window < 0 or rest:
            return None
        share = self._idle / max(self._lap_started - self._window_started, 1e-9)
        self._idle, self._window_started = 0.0, self._lap_started
        if window == 0 or self._reported or share <= MOST_IDLE:
            return None
        self._reported = True
        return share

    def summary(self) -> dict[str, float]:
        """Volumes a second, share of waiting and seconds of all updates so far; zero if there was none."""
        seconds = max(self._lap_started - self._started, 1e-9)
        rate = self._laps * self._volumes / seconds
        return {"volumes_per_second": rate, "data_wait_share": self._waited_in_all / seconds, "seconds": seconds}
