"""Progress without a terminal: lines in a log, not too many, and none with --quiet."""

from __future__ import annotations

import pytest

from octjepa import progress
from octjepa.progress import bar, set_quiet


def test_without_a_terminal_a_line_appears_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with bar("ingest", 8, "file", done=2) as running:
        for note, seconds in (("a", 10.0), ("b", 40.0), ("c", 50.0), ("d", 80.0)):
            running.say(note)
            now = seconds
            running.advance()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "ingest: 4 of 8 (0.05 file/s, about 80 s left), b",
        "ingest: 6 of 8 (0.05 file/s, about 40 s left), d",
    ]


def test_quiet_prints_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.0)
    set_quiet(True)
    with bar("ingest", 2, "file") as running:
        running.advance()
    assert capsys.readouterr().err == ""


def test_a_long_step_that_only_reports_notes_prints_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with bar("adapt", 1, "network") as running:
        for second in range(0, 70, 5):
            now = float(second)
            running.say(f"step {second}")
    assert capsys.readouterr().err.splitlines() == ["adapt: 0 of 1, step 30", "adapt: 0 of 1, step 60"]
