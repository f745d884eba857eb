"""A run while it trains: its curves, alarms of the monitor and newest checkpoint, read anew from its folder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.checkpoint.folder import list_checkpoints
from octjepa.checkpoint.location import location_name
from octjepa.errors import OctjepaError
from octjepa.files import read_json_lines
from octjepa.report.figures import curves

_KIND = {"tuning": curves.TUNING_CHARTS}


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

    def answer(self) -> dict[str, Any]:
        """{update, finished, checkpoint, charts, alarms}. `charts`: title, caption, x, y, low, high, validation."""
        lines = self._journal()
        updates = [line["update"] for line in lines if "update" in line]
        alarms = [
            {"update": line["update"], "monitor": name, "message": str(message)}
            for line in lines
            for name, message in (line.get("alarms") or {}).items()
        ]
        return {
            "update": max(updates, default=0),
            "finished": (self.path / "summary.json").is_file(),
            "checkpoint": self.newest_checkpoint(),
            "alarms": alarms[-20:],
            "charts": [drawn for chart in self._charts if (drawn := _chart(chart, lines))],
        }

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


def _chart(chart: curves.Chart, lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    x, y = _series(lines, chart.key)
    if not len(x):
        return None
    middle, mean, low, high = (part.tolist() for part in curves.binned(x, y))
    at, validation = _series(lines, chart.validation) if chart.validation else (np.empty(0), np.empty(0))
    return {
        "title": chart.title,
        "caption": chart.caption,
        "logarithmic": chart.logarithmic,
        "x": middle,
        "y": mean,
        "low": low,
        "high": high,
        "validation": {"x": at.tolist(), "y": validation.tolist()},
    }


def _series(lines: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(updates, values) of the finite values of `key`."""
    pairs = [(line["update"], line[key]) for line in lines if line.get(key) is not None and "update" in line]
    array = np.array(pairs, float).reshape(-1, 2)
    array = array[np.isfinite(array).all(axis=1)]
    return array[:, 0], array[:, 1]
