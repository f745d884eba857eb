"""A run whose store is read too slowly says so once; one that makes its own samples does not."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from octjepa.train import metrics
from octjepa.train.loop import pretrain
from octjepa.train.metrics import ThroughputMeter, slow_reading_message
from octjepa.volume import CanonicalVolume
from synthetic import MemoryStore, small_recipe


class Watch:
    """Clocks of the wall and of this thread; `train` takes updates, and returns the shares that were reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.computed = 0.0
        monkeypatch.setattr(metrics.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(metrics.time, "thread_time", lambda: self.computed)
        self.meter = ThroughputMeter(4)

    def train(self, updates: int, read: float, make: float, step: float) -> list[float]:
        """Each update reads, makes its samples in this thread, and takes a step, in seconds."""
        reported = []
        for _ in range(updates):
            with self.meter.waiting():
                self.now += read + make
                self.computed += make
            self.now += step
            self.meter.lap()
            if (share := self.meter.slow_reading()) is not None:
                reported.append(share)
        return reported


@pytest.mark.parametrize(
    ("read", "make", "step", "reported"),
    [
        (0.4, 0.0, 0.6, [0.4]),
        (0.32, 0.3, 0.38, [0.32]),
        (0.2, 0.3, 0.5, []),  # most of the waiting is arithmetic
        (0.0, 0.9, 0.1, []),
    ],
)
def test_waiting_that_is_no_arithmetic_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, read: float, make: float, step: float, reported: list[float]
) -> None:
    watch = Watch(monkeypatch)
    assert watch.train(119, read, make, step) == []
    assert watch.train(1, read, make, step) == pytest.approx(reported)
    assert watch.train(400, read, make, step) == []


def test_the_first_updates_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    assert watch.train(20, 100.0, 0.0, 1.0) == []
    assert watch.train(100, 0.1, 0.0, 1.0) == []
    assert watch.train(100, 1.0, 0.0, 1.0) == pytest.approx([0.5]), "a disk that becomes slow later"


class SlowStore(MemoryStore):
    """Every volume takes a while to read."""

    def read(self, volume_id: str, halves: bool = False) -> CanonicalVolume:
        time.sleep(0.1)
        return super().read(volume_id, halves)


@pytest.mark.slow
@pytest.mark.parametrize(("store", "warnings"), [(SlowStore, 1), (MemoryStore, 0)])
def test_a_store_on_a_slow_disk_is_a_warning_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, store: type, warnings: int
) -> None:
    monkeypatch.setattr(metrics, "IDLE_FROM", 2)
    monkeypatch.setattr(metrics, "IDLE_WINDOW", 4)
    recipe = small_recipe(
        train={"max_updates": 12},
        monitor={"every_updates": None},
        checkpoint={"dir": None},
        validation={"max_samples": 1},
    )
    pretrain(recipe, store(recipe.preprocessing, 4, 2), tmp_path / "run")
    found = [record for record in caplog.records if "waiting for samples" in record.getMessage()]
    assert len(found) == warnings
    assert all(record.levelno == logging.WARNING for record in found)


def test_the_warning_says_what_can_be_done() -> None:
    alone, beside = (slow_reading_message(0.4, "the store", workers) for workers in (0, 3))
    assert alone.startswith("40% of the time of the last 100 updates was spent waiting for samples: the store is read")
    assert "machine.loader_workers=2" in alone
    assert "3 loader processes do not keep up" in beside
    for message in (alone, beside):
        assert "octjepa pack" in message
        assert "local disk" in message
        assert "--resume" in message
