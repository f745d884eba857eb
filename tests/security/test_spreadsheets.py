"""No cell of a table that octjepa writes is a formula for a spreadsheet, and octjepa reads its own tables back."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pandas as pd
import pytest

from index_entries import index_entry, store_of
from octjepa.evaluate.labels import read_labels
from octjepa.report.leaderboard import csv_text
from octjepa.tables import format_table, plain_cell, table_cell
from octjepa.tasks.finetune.inference import write_frame
from octjepa.tasks.thickness import write_table

FORMULAS = [
    "=1+1",
    "+1+1",
    "-1+1",
    "@SUM(A1)",
    "=cmd|' /C calc'!A0",
    '=HYPERLINK("http://a","b")',
    "-P7",
    "+A",
    "@eye",
    "\t=1+1",
    " =1+1",
    "\n=1+1",
    "＝1+1",
    "＋1+1",
    "－1+1",
    "＠a",
]
DANGER = re.compile(r"\s*[=+\-@＝＋－＠]")


@pytest.mark.parametrize("text", FORMULAS)
def test_a_cell_that_a_spreadsheet_would_execute_gets_an_apostrophe(text: str) -> None:
    assert table_cell(text) == f"'{text}"
    assert plain_cell(table_cell(text)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-1.5, "-1.5"),
        ("-1.5", "-1.5"),
        ("+3e-4", "+3e-4"),
        (-7, "-7"),
        (None, ""),
        (float("nan"), ""),
        ("", ""),
        ("P-7", "P-7"),
        ("'quoted", "'quoted"),
        ("a=b", "a=b"),
        (True, "True"),
        (0.1, "0.1"),
    ],
)
def test_other_cells_stay_as_they_are(value: object, text: str) -> None:
    assert table_cell(value) == text
    assert plain_cell(text) == text


def test_a_carriage_return_begins_no_new_row() -> None:
    text = format_table(["id", "name"], [("a\r=1+1", "\r\n@b")])
    assert "\r" not in text
    assert [row[0] for row in csv.reader(text.splitlines(keepends=True), delimiter="\t")] == ["id", "a\n=1+1"]


@pytest.mark.parametrize("delimiter", ["\t", ","])
def test_headers_and_cells_are_guarded(delimiter: str) -> None:
    text = format_table(["id", "=name"], [(name, "a\tb,c") for name in FORMULAS], delimiter)
    header, *rows = list(csv.reader(text.splitlines(keepends=True), delimiter=delimiter))
    assert header == ["id", "'=name"]
    assert [plain_cell(row[0]) for row in rows] == FORMULAS
    assert all(row[1] == "a\tb,c" and not DANGER.match(row[0]) for row in rows)


def test_the_tables_of_the_verbs_are_guarded(tmp_path: Path) -> None:
    rows = [{"name": name, "value": -0.5, "note": None} for name in FORMULAS]
    write_frame(tmp_path / "predictions.tsv", pd.DataFrame(rows))
    write_table(tmp_path / "etdrs.tsv", list(rows[0]), [tuple(row.values()) for row in rows])
    (tmp_path / "leaderboard.csv").write_text(csv_text(rows), newline="")
    for path in tmp_path.iterdir():
        with path.open(newline="") as file:
            _, *written = csv.reader(file, delimiter="," if path.suffix == ".csv" else "\t")
        assert [plain_cell(row[0]) for row in written] == FORMULAS
        assert all(not DANGER.match(row[0]) and row[1] == "-0.5" and row[2] == "" for row in written)


def test_ids_of_the_labels_of_a_store_are_found_again(tmp_path: Path) -> None:
    ids = ["=1+1", "-7a", "@P", "1001"]
    entries = [
        index_entry(2 * number, person_id=name, labels='{"=grade": "-mild", "iop": -3.5}')
        for number, name in enumerate(ids)
    ]
    store_of(tmp_path / "store", entries)
    path = tmp_path / "store" / "labels.tsv"
    with path.open(newline="") as file:
        cells = [cell for row in csv.reader(file, delimiter="\t") for cell in row]
    assert not [cell for cell in cells if DANGER.match(cell) and cell != "-3.5"]
    table = read_labels(path, ["=grade", "iop"])
    assert table.values["=grade"] == {(name, "OD"): "-mild" for name in ids}
    assert set(table.values["iop"].values()) == {"-3.5"}


def test_no_other_module_writes_such_tables(root: Path) -> None:
    """One writer guards all tables; hashes of a table in memory are not files."""
    source = root / "src" / "octjepa"
    writers = re.compile(r"csv\.(Dict)?[wW]riter\(|\.to_csv\(")
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if writers.search(line) and "digest.update" not in line
    }
    assert found == {"tables.py"}
