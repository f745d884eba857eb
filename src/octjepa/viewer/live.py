"""A run while it trains: its curves, alarms of the monitor and newest checkpoint, read anew from its folder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.checkpoint.folder import list_checkpoints
from octjepa.checkpoint.location import location_name
from octjepa.errors import OctjepaError
from octjepa.files import read_json_lines
from octjepa.record import Record
from octjepa.report.figures import curves

_KIND = {"tuning": curves.TUNING_CHARTS}


@dataclass(frozen=True)
class Alarm(Record):
    """An alarm that the monitor `monitor` raised at an update."""

    update: int
    monitor: str
    message: str


@dataclass(frozen=True)
class Points(Record):
    """The values `y` at the updates `x`."""

    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class DrawnChart(Record):
    """The curve of one metric: its mean `y`, lowest and highest value at the updates `x`, and validation values."""

    title: str
    caption: str
    logarithmic: bool
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    validation: Points


@dataclass(frozen=True)
class LiveAnswer(Record):
    """How far a run is. `checkpoint` is the name of its newest checkpoint, "" without one."""

    update: int
    finished: bool
    checkpoint: str
    alarms: list[Alarm]
    charts: list[DrawnChart]


class LiveRun:
    """The run at `path`. `kind` is "run", "demo" or "tuning"."""

    def __init__(self, path: Path, kind: str = "run") -> None:
        self.path, self._charts = path, _KIND.get(kind, curves.CHARTS)
        self._lock = threading.Lock()
        self._read_at: tuple[int, int] | None = None
        self._lines: list[dict[str, Any]] = []

    def newest_checkpoint(self) -> str:
        """The name of the newest complete checkpoint; "" if there is none."""
        try:
            return location_name(list_checkpoints(self.path / "checkpoints")[-1])
        except (IndexError, OctjepaError, OSError):
            return ""

    def answer(self) -> LiveAnswer:
        """How far the run is now, with its last 20 alarms and the charts that have values."""
        lines = self._journal()
        updates = [line["update"] for line in lines if "update" in line]
        alarms = [
            Alarm(line["update"], name, str(message))
            for line in lines
            for name, message in (line.get("alarms") or {}).items()
        ]
        return LiveAnswer(
            update=max(updates, default=0),
            finished=(self.path / "summary.json").is_file(),
            checkpoint=self.newest_checkpoint(),
            alarms=alarms[-20:],
            charts=[drawn for chart in self._charts if (drawn := _chart(chart, lines))],
        )

    def _journal(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, read again where the file has changed; none if there is no such file."""
        journal = self.path / "metrics.jsonl"
        with self._lock:
            try:
                status = journal.stat()
            except OSError:
                return []
            if self._read_at != (status.st_size, status.st_mtime_ns):
                self._lines = read_json_lines(journal)
                self._read_at = status.st_size, status.st_mtime_ns
            return self._lines


def _chart(chart: curves.Chart, lines: Sequence[dict[str, Any]]) -> DrawnChart | None:
    x, y = _series(lines, chart.key)
    if not len(x):
        return None
    middle, mean, low, high = (part.tolist() for part in curves.binned(x, y))
    at, validation = _series(lines, chart.validation) if chart.validation else (np.empty(0), np.empty(0))
    drawn_validation = Points(at.tolist(), validation.tolist())
    return DrawnChart(chart.title, chart.caption, chart.logarithmic, middle, mean, low, high, drawn_validation)


def _series(lines: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(updates, values) of the finite values of `key`."""
    pairs = [(line["update"], line[key]) for line in lines if line.get(key) is not None and "update" in line]
    array = np.array(pairs, float).reshape(-1, 2)
    array = array[np.isfinite(array).all(axis=1)]
    return array[:, 0], array[:, 1]
