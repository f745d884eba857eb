"""Looks at a test set are counted across runs and users, and nothing personal is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octjepa.errors import UsageError
from octjepa.metrics.findings import Findings
from octjepa.metrics.test_set_ledger import default_folder, record_use, record_uses

HASH = "ab" * 32


def test_uses_add_up_and_are_reported(tmp_path: Path) -> None:
    first = record_use(tmp_path / "uses", HASH, "drusen", "leaderboard", ["a linear mean", "b linear mean"])
    assert (first.looks, first.measured) == (1, 2)
    second = record_use(tmp_path / "uses", HASH, "drusen", "leaderboard", ["b linear mean", "c knn mean"])
    assert (second.looks, second.measured) == (2, 3)
    other = record_use(tmp_path / "uses", "cd" * 32, "drusen", "leaderboard", ["a linear mean"])
    assert other.looks == 1  # other labels, another test set
    for number in range(3, 13):
        last = record_use(tmp_path / "uses", HASH, "drusen", "leaderboard", [f"a{number}"])
        assert last.looks == number


def test_the_same_command_on_the_same_things_is_the_same_use(tmp_path: Path) -> None:
    first = record_use(tmp_path, HASH, "drusen", "leaderboard", ["a", "b"])
    again = record_use(tmp_path, HASH, "drusen", "leaderboard", ["b", "a"])
    assert (first.looks, again.looks, again.measured) == (1, 1, 2)  # killed and repeated
    assert len(again.file.read_text().splitlines()) == 1  # a use leaves one line
    assert record_use(tmp_path, HASH, "drusen", "probe", ["a", "b"]).looks == 2


def test_a_use_is_counted_for_every_target_and_reported_in_one_sentence(tmp_path: Path) -> None:
    sets = {"drusen": HASH, "fluid": "cd" * 32}
    for number in range(1, 13):
        rows = {"drusen": ["a", f"b{number}"], "fluid": [f"a{number}"]}
        findings_ = Findings()
        record_uses(tmp_path, "probe", sets, rows, findings_)
        assert [(one.target, one.looks) for one in findings_.uses] == [("drusen", number), ("fluid", number)]
        assert len(findings_.faults) == (number > 1)
    (fault,) = findings_.faults
    assert fault.kind == "test_used_before"
    assert "drusen for the 12th time (13 different rows measured on it so far), fluid for the 12th time" in fault.what
    assert "chosen on test labels" in fault.what
    record_uses(tmp_path, "probe", {"new": "ef" * 32, "fluid": "cd" * 32}, {"new": ["a"], "fluid": ["a"]}, findings_)
    assert "new" not in findings_.faults[-1].what  # used for the first time
    assert "fluid for the 13th time" in findings_.faults[-1].what


def test_a_line_holds_no_name_of_what_was_measured(tmp_path: Path) -> None:
    uses = record_use(tmp_path, HASH, "drusen", "leaderboard", ["run of Jane Doe"])
    text = uses.file.read_text()
    assert "Jane" not in text
    assert set(json.loads(text)) == {"when", "command", "target", "rows", "measured"}
    assert default_folder(tmp_path / "labels.tsv") == tmp_path / "octjepa_test_uses"


def test_a_ledger_that_cannot_count_stops_the_look(tmp_path: Path) -> None:
    record_use(tmp_path, HASH, "drusen", "leaderboard", ["a"]).file.write_text("{not json\n")
    with pytest.raises(UsageError, match="is damaged"):
        record_use(tmp_path, HASH, "drusen", "leaderboard", ["a"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--ledger"):
        record_use(tmp_path / "file", HASH, "drusen", "leaderboard", ["a"])
