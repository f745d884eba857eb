"""Figures as text: a missing number is a dash, a path is cut to its last part."""

from __future__ import annotations

from pathlib import Path

from octjepa.report.html import duration, file_name, number, without_paths


def test_a_missing_number_is_a_dash() -> None:
    assert number(None) == number(float("nan")) == "–"
    assert number(-0.0421) == "−0.042"


def test_paths_are_cut_to_their_last_part() -> None:
    root = Path("/srv/someone/demo")
    shown = without_paths("/srv/someone/demo/run lacks it; see /data/share/eyes/a.dcm, 1/2 and C:\\data\\b.dcm", root)
    assert shown == "demo/run lacks it; see …/a.dcm, 1/2 and …/b.dcm"
    assert file_name("tree/1001/a.dcm") == "tree/1001/a.dcm"
    assert file_name("/x/y/z/1001/a.dcm") == "…/z/1001/a.dcm"
    assert file_name("/x/y/z/1001/a.dcm", "/x/y") == "z/1001/a.dcm"


def test_durations() -> None:
    assert [duration(s) for s in (None, 3.21, 75, 3725)] == ["–", "3.2 s", "1 min 15 s", "1 h 02 min"]
