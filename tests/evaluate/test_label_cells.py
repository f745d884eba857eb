"""Cells of label tables without a value, errors of spreadsheets, and ids that a spreadsheet turned into decimals."""

from __future__ import annotations

from pathlib import Path

import pytest

from octjepa.errors import UsageError
from octjepa.evaluate.labels import LabelTable, read_labels


def table(path: Path, cells: list[str], head: str = "person_id\ttarget\n") -> LabelTable:
    path.write_text(head + "".join(f"{row}\t{cell}\n" for row, cell in enumerate(cells, 1)), encoding="utf-8")
    return read_labels(path, ["target"])


def values(labels: LabelTable) -> list[str]:
    return [text for (_, eye), text in labels.values["target"].items() if eye == "OD"]


@pytest.mark.parametrize("cell", [".", "?", "-", "unknown", "Unknown", "missing"])
@pytest.mark.parametrize("others", [["0", "1", "1"], ["dry", "wet", "dry"], ["0.1", "0.5", "0.7"]])
def test_cells_that_stand_for_no_value_are_listed_and_left_out(tmp_path: Path, cell: str, others: list[str]) -> None:
    labels = table(tmp_path / "t.tsv", [*others, cell])
    assert values(labels) == others
    assert any(repr(cell) in note and "no value" in note for note in labels.notes)


def test_codes_and_none_count_among_numbers_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    assert values(table(path, ["1", "2", "-999", "None"])) == ["1", "2"]
    assert values(table(path, ["none", "mild", "severe"])) == ["none", "mild", "severe"]
    assert values(table(path, ["-999", "-5", "3.5"])) == ["-999", "-5", "3.5"]  # a refraction is negative as well


@pytest.mark.parametrize("code", ["-9.0", "-99.0", "-999.0", "-9999.0", "-9.00", "-9E0"])
def test_codes_are_recognised_by_their_value(tmp_path: Path, code: str) -> None:
    path = tmp_path / "t.tsv"
    labels = table(path, ["0.0", "1.0", code, "0.0"])
    assert values(labels) == ["0.0", "1.0", "0.0"]
    assert f"target: {code!r} (1 cells) counts as no value" in labels.notes[0]
    assert values(table(path, ["0.0", "1.0", code, "-99"])) == ["0.0", "1.0"]
    assert values(table(path, ["0.0", "1.0", code], f"#classes: {float(code):.0f}\nperson_id\ttarget\n"))[-1] == code


def test_a_text_among_the_numbers_of_a_quantity_is_named(tmp_path: Path) -> None:
    numbers = ["0.1", "0.2", "0.3", "0.45", "0.5", "0.6", "0.75", "0.8"]
    with pytest.raises(UsageError, match=r"1 cell without a number .*'#REF!' in row 10"):
        table(tmp_path / "t.tsv", [*numbers, "#REF!"])
    with pytest.raises(UsageError, match=r"'CF' in row 10.*by a first line, `#classes: CF`"):
        table(tmp_path / "t.tsv", [*numbers, "CF"])
    with pytest.raises(UsageError, match=r"'#DIV/0!' in row 4"):
        table(tmp_path / "t.tsv", ["0", "1", "#DIV/0!"])
    assert values(table(tmp_path / "t.tsv", ["0", "1", "2", "ungradable"])) == ["0", "1", "2", "ungradable"]


def test_the_line_sep_of_spreadsheets_names_the_separator(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for separator in ";,":
        path.write_text(
            f"sep={separator}\nperson_id{separator}target\n1{separator}3\n2{separator}4\n", encoding="utf-8"
        )
        assert values(read_labels(path, ["target"])) == ["3", "4"]


def test_ids_are_read_without_the_decimals_of_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text("person_id\ttarget\n1.0\t3\n20.0\t4\nP3.0\t5\n", encoding="utf-8")
    assert {person for person, _ in read_labels(path, ["target"]).values["target"]} == {"1", "20", "P3.0"}
    path.write_text("person_id\ttarget\nNA\t3\n2\t4\n", encoding="utf-8")
    with pytest.raises(UsageError, match="1 of 2 rows have no person_id"):
        read_labels(path, ["target"])


def message(path: Path, text: str) -> str:
    """The message that refuses a label table with this text."""
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        read_labels(path, ["target"])
    return str(refused.value)


def test_labels_that_disagree_are_counted_by_rows_and_the_first_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    two = message(path, "person_id,target\n1,a\n\n2,b\n1,c\n")  # line 3 is empty
    assert "different values for 1 of 2 people, first in row 5; keep" in two
    eyes = message(path, "person_id,eye,target\n1,OD,a\n1,OS,a\n1,OS,b\n")
    assert "different values for 1 of 2 eyes, first in row 4; keep" in eyes
    one = message(path, "#classes: na\nperson_id,target\n1,a\n1,c\n")
    assert "different values for 1 of 1 person, first in row 4; keep" in one


def test_rows_in_messages_are_lines_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    eye = message(path, 'person_id,eye,note,target\n1,OD,"two\nlines",a\n1,X,,a\n')
    assert "eye holds 'X' in row 4: expected OD" in eye
    eyes = message(path, "sep=;\nperson_id;eye;target\n1;OD;a\n\n2;X;a\n3;Y;a\n")
    assert "eye holds 'X', 'Y' in 2 rows, first in row 5: expected OD" in eyes
    assert "'#REF!' in row 4" in message(path, "person_id,target\n1,1\n\n2,#REF!\n")
