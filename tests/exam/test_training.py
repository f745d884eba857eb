"""What a run of the exam records of its CPU time, over all of its starts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.exam import training
from benchmarks.exam.training import Plan, counted_cpu_minutes, cpu_minutes

PLAN = Plan("mine", "", (), 20, (0,))
SUMMARY = SimpleNamespace(volumes=4, loss=0.5, rankme=2.0)


def trained(work: Path) -> dict[str, Any]:
    return dict(json.loads((training.run_folder(work, PLAN, 0) / "trained.json").read_text(encoding="utf-8")))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float, bool], None]:
    """Trains for so many CPU-seconds, by an invented clock, and ends or is stopped."""
    clock = [0.0]
    monkeypatch.setattr(training.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(training.Store, "open", lambda _: None)

    def run(seconds: float, ends: bool) -> None:
        def pretrain(_recipe: Any, _store: Any, out: Path, resume: bool) -> Any:
            assert resume == (out / "run.json").is_file()
            out.mkdir(parents=True, exist_ok=True)
            (out / "run.json").write_text("{}", encoding="utf-8")
            clock[0] += seconds
            if not ends:
                raise KeyboardInterrupt
            return SUMMARY

        monkeypatch.setattr(training, "pretrain", pretrain)
        training.train(tmp_path, PLAN, 0, tmp_path)

    return run


def test_cpu_minutes_of_every_start_are_added_up(start: Callable[[float, bool], None], tmp_path: Path) -> None:
    for seconds in (60.0, 30.0):
        with pytest.raises(KeyboardInterrupt):
            start(seconds, False)
    start(90.0, True)
    assert trained(tmp_path)["cpu_minutes"] == 3.0
    assert "cpu_minutes_of_known_starts" not in trained(tmp_path)


def test_a_run_that_began_before_starts_were_counted_says_so(
    start: Callable[[float, bool], None], tmp_path: Path
) -> None:
    out = training.run_folder(tmp_path, PLAN, 0) / "run"
    out.mkdir(parents=True)
    (out / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        start(60.0, False)
    start(90.0, True)
    assert trained(tmp_path)["cpu_minutes_of_known_starts"] == 2.5
    assert "cpu_minutes" not in trained(tmp_path)


def test_a_start_that_is_killed_has_written_what_it_took_until_then(tmp_path: Path) -> None:
    path = tmp_path / "cpu_minutes.json"
    with counted_cpu_minutes(path, every_seconds=0.01):
        began = time.monotonic()
        while not cpu_minutes(path)["cpu_minutes"]:  # a hundredth of a minute is 0.6 s
            assert time.monotonic() - began < 60
