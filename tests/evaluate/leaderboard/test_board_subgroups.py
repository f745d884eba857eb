"""Subgroups of a label column on the board and on its page."""

from __future__ import annotations

import pandas as pd
import pytest

from command_line import call
from invented_cohort import board_with
from octjepa.evaluate.subgroups import parse_subgroups
from octjepa.report.leaderboard import write_leaderboard


@pytest.mark.slow
def test_subgroups_of_a_label_column_are_measured_and_on_the_page(made, tmp_path):
    table, labels, frame = made
    known = pd.read_csv(labels, sep="\t", dtype=str)
    known.assign(sex=["f"] * (len(frame) - 2) + ["x"] * 2).to_csv(labels, sep="\t", index=False)
    board = board_with(
        [str(table("good", 2.5))],
        labels,
        ["lesion0"],
        None,
        tmp_path / "kept",
        bootstrap=100,
        subgroups=parse_subgroups("sex"),
    )
    (by_sex,) = [one for one in board.details[0]["subgroups"] if one["metric"] == "auroc"]
    assert by_sex["groups"].keys() == {"f"}
    assert by_sex["groups"]["f"]["low"] > 0.7
    assert by_sex["left_out"] == {"x": "1 test people, at least 6 are needed"}
    (tmp_path / "board").mkdir()
    write_leaderboard(board.result, tmp_path / "board")
    page = (tmp_path / "board" / "leaderboard.html").read_text(encoding="utf-8")
    assert "auroc by sex" in page
    assert "1 test people, at least 6 are needed" in page


@pytest.mark.slow
def test_subgroups_are_printed_with_the_reasons_of_those_that_are_left_out(made, tmp_path):
    table, labels, frame = made
    known = pd.read_csv(labels, sep="\t", dtype=str)
    known.assign(sex=["f"] * (len(frame) - 2) + ["x"] * 2).to_csv(labels, sep="\t", index=False)
    words = ("leaderboard", table("good", 2.5), "--labels", labels, "--target", "lesion0", "--subgroups", "sex")
    printed = call(*words, "--out", tmp_path / "board", "--quiet")
    assert printed.code == 0, printed.err
    assert "sex x     auroc   1 test people, at least 6 are needed" in printed.out
    assert "sex f     auroc" in printed.out
