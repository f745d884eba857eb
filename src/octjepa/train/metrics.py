"""Metrics of each update, from the device to metrics.jsonl, the spike guard and the loss alarm; and the throughput.

Metrics are read one update late, when the device already has the next update: logging never makes it wait. Where the
loop must know them at once, before a checkpoint or a validation, `MetricsBuffer.flush` reads what is on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from octjepa.distributed.runtime import Runtime
from octjepa.progress import Bar
from octjepa.train.guards import CollapseAlarms, SpikeGuard
from octjepa.train.tracking import RunLogger

IDLE_FROM, IDLE_WINDOW = 20, 100  # updates: not counted at first, and then counted together
# of the time. Making samples in this process takes up to 0.3 of it (docs/training.md, Data loading), which is no idling
# but looks like it where other work takes the cores.
MOST_IDLE = 0.3


def slow_reading_message(idle: float, store: str, workers: int) -> str:
    """The warning of a run whose updates wait for `store`; `workers` loader processes make its samples."""
    if workers:
        what = f"{workers} loader processes do not keep up: {store} is read too slowly, or their cores are busy"
        to_do = "raise machine.loader_workers where cores are free"
    else:
        what, to_do = f"{store} is read too slowly", "read beside the arithmetic (machine.loader_workers=2)"
    return (
        f"{idle:.0%} of the time of the last {IDLE_WINDOW} updates was spent waiting for samples: {what}. The run goes "
        f"on at this speed; to go faster, stop it and continue with --resume after a change: copy the store to a local "
        f"disk, pack many small files into large ones (octjepa pack), or {to_do}"
    )


class _Pending(NamedTuple):
    """Metrics of one update on their way to the host: `values` are valid after `copied`."""

    update: int
    names: list[str]
    values: Tensor
    copied: torch.Event | None
    line: Mapping[str, Any]


class MetricsBuffer:
    """Writes a line for each update; a context manager that flushes at the end.

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
        self._logger, self._guard, self._alarms, self._bar, self._volume_ids = (
            logger, guard, alarms, progress, volume_ids,
        )  # fmt: skip
        self._runtime = runtime
        self.skipped, self.must_go_back = skipped, False
        self._pending: _Pending | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.flush()  # whatever ended the run, the line of its last whole update is kept

    def push(self, update: int, metrics: Mapping[str, Tensor], line: Mapping[str, Any]) -> None:
        """Starts copying the scalars `metrics` of `update` (from 0) to the host and writes the update before."""
        packed = torch.stack([value.float() for value in metrics.values()])
        values, copied = self._runtime.start_copy(packed)
        before, self._pending = self._pending, _Pending(update, list(metrics), values, copied, line)
        self._write(before)

    def flush(self) -> None:
        """Writes the update that is on its way."""
        before, self._pending = self._pending, None
        self._write(before)

    def go_back(self, skipped: int) -> None:
        """Drops what is on its way: the run continues from an earlier checkpoint, with `skipped` updates skipped."""
        self._pending, self.must_go_back, self.skipped = None, False, skipped

    def _write(self, pending: _Pending | None) -> None:
        """Writes the line of an update whose metrics have arrived; the guard and the alarms follow it."""
        if pending is None or self.must_go_back:  # updates after too many skipped ones will be taken back
            return
        if pending.copied is not None:
            pending.copied.synchronize()
        values = dict(zip(pending.names, pending.values.tolist(), strict=True))
        healthy = bool(values.pop("healthy"))
        self.must_go_back = self._guard.follow(pending.update, healthy, values["train/grad_norm"])
        self.skipped += not healthy
        self._alarms.follow_line(values)
        line = {**values, **pending.line}
        if not healthy:
            line["skipped"] = self._volume_ids(pending.update)
        self._logger.write(pending.update + 1, line)
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
        """The idle share of the last `IDLE_WINDOW` updates where it is above `MOST_IDLE`, once; else None.

        To be called after each `lap`. Idle is time of waiting for data in which this thread did not compute: a disk or
        loader processes are too slow. The first updates do not count, for they fill caches and start processes.
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
        """Volumes a second, share of waiting and seconds of all updates so far; zero where there was none."""
        seconds = max(self._lap_started - self._started, 1e-9)
        rate = self._laps * self._volumes / seconds
        return {"volumes_per_second": rate, "data_wait_share": self._waited_in_all / seconds, "seconds": seconds}
