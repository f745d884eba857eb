"""Progress without a terminal: lines in a log, not too many, and none with --quiet."""

from __future__ import annotations

import pytest

from octjepa import progress
from octjepa.progress import bar, set_quiet


def test_without_a_terminal_a_line_appears_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([0.0, 10.0, 40.0, 50.0, 80.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with bar("ingest", 8, "file", done=2) as running:
        for note in ("a", "b", "c", "d"):
            running.say(note)
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
