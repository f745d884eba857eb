"""How fast a run goes, how much of it is waiting for data, and how many cores this process keeps busy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pace:
    """A stopwatch over updates of `volumes` volumes each; `lap` ends one update."""

    def __init__(self, volumes: int) -> None:
        self._volumes = volumes
        self._started = self._lap_started = time.perf_counter()
        self._waited = self._waited_all = 0.0
        self._worked = time.process_time()
        self._laps = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """Rate, waiting share, seconds, and CPU-seconds of this process a second, of the update that ends now."""
        now, worked = time.perf_counter(), time.process_time()
        seconds, waited, busy = now - self._lap_started, self._waited, worked - self._worked
        self._lap_started, self._waited, self._worked = now, 0.0, worked
        self._waited_all += waited
        self._laps += 1
        return {
            "volumes_per_second": self._volumes / seconds,
            "data_wait_share": waited / seconds,
            "cpu_cores_busy": busy / seconds,
            "seconds": seconds,
        }

    def summary(self) -> dict[str, float]:
        """Rate, waiting share and seconds of all updates so far; zero when there was none."""
        seconds = max(self._lap_started - self._started, 1e-9)
        rate = self._laps * self._volumes / seconds
        return {"volumes_per_second": rate, "data_wait_share": self._waited_all / seconds, "seconds": seconds}
