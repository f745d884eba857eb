"""The tables that the page saves are those of `octjepa.tables`: no cell becomes a formula in a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from importlib.resources import files

import pytest

from octjepa.tables import format_table

NODE = shutil.which("node")
CELLS: list[object] = [
    *("=1+1", "+1+1", "-1+1", "@SUM(A1)", " =1", "\t=1", "\r=1", "\n-x", "＝1", "-3.5", "+2", "-1e-3", "-"),
    *("1,2", 'a "b"', "line\nend", "plain", "", None, 0, 283.4, -1.5),
]


@pytest.mark.skipif(NODE is None, reason="no node on this machine")
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_the_page_writes_cells_as_octjepa_does(delimiter: str) -> None:
    head = ["id", "=head"]
    rows: list[list[object]] = [[number, cell] for number, cell in enumerate(CELLS)]
    expected = format_table(head, rows, "," if delimiter == "," else "\t")
    assert _table_text([[*head], *rows], delimiter) == expected


@pytest.mark.skipif(NODE is None, reason="no node on this machine")
def test_a_cell_that_begins_with_a_tab_or_a_line_end_is_guarded() -> None:
    text = _table_text([["\tcmd", "\rcmd", "=cmd|' /C calc'!A0"]], ",")
    (row,) = csv.reader(io.StringIO(text, newline=""))
    assert all(cell.startswith("'") for cell in row)


def _table_text(rows: list[list[object]], delimiter: str) -> str:
    module = files("octjepa.viewer").joinpath("static", "csv.js").read_text(encoding="utf-8")
    script = f"{module}\nprocess.stdout.write(tableText({json.dumps(rows)}, {json.dumps(delimiter)}));"
    assert NODE is not None
    run = subprocess.run(
        [NODE, "--input-type=module"],
        input=script,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )
    return run.stdout
