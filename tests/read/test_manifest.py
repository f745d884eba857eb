"""Tables of files and people: a cell is never read in another column, and a row never disappears without a word."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

import pytest

from octjepa.errors import UsageError
from octjepa.read.manifest import parse_manifest, parse_participants

PEOPLE = "person_id\tclinical_site\trecommended_split\n"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (f'{PEOPLE}1\tA\ttest\n2\t"B\ttest\n3\tA\ttest\n', r"after line 2: .*Close every quotation mark"),
        (f'{PEOPLE}1\t"A\ttest\n2\tA\ttest\n3\tA"\ttest\n', "line 4, has a cell that holds whole rows"),
        ("person_id,clinical_site,recommended_split\n1,Clinic A, London,test\n", "line 2, has more cells than"),
        ("person_id,recommended_split,Recommended_split\n1,test,train\n", "'recommended_split' twice"),
        ("\ufeff\n", "is empty"),
    ],
)
def test_a_table_that_would_be_read_wrongly_is_refused(table: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_participants(table, "participants.tsv")


def test_an_open_quotation_mark_in_a_manifest_is_refused() -> None:
    with pytest.raises(UsageError, match="Close every quotation mark"):
        parse_manifest('person_id\tnotes\tfilepath\n1\t"left\ta.dcm\n2\t\tb.dcm\n', "/data", "manifest.tsv")


@pytest.mark.parametrize(
    "parse", [lambda text: parse_manifest(text, "/d", "a.tsv"), lambda text: parse_participants(text, "a.tsv")]
)
def test_a_message_about_columns_repeats_no_cell(parse: Callable[[str], object]) -> None:
    with pytest.raises(UsageError, match=r"\(found 3 other columns\)") as caught:
        parse("Doe Jane\t1950-01-01\tb1.dcm\nRoe Rick\t1944-02-03\tb2.dcm\n")
    assert not re.search("doe|1950|b1", str(caught.value).lower())
    with pytest.raises(UsageError, match=r"\(found laterality, age and 1 other column\)"):
        parse("Laterality\tage\tDoe Jane\nL\t61\t\n")


def test_quotation_marks_line_breaks_and_empty_cells_stay_readable() -> None:
    table = (
        ',person_id,clinical_site,notes,recommended_split,\n0,1,"Clinic A, London","5"" mark\nhere, too",test,,\n'
        "1, ,B,,train\n"
    )
    people = parse_participants(table, "participants.csv")
    assert [(person["person_id"], person["clinical_site"], person["recommended_split"]) for person in people] == [
        ("1", "Clinic A, London", "test")
    ]


def test_the_first_filled_column_of_ids_counts() -> None:
    people = parse_participants("person_id\tparticipant_id\trecommended_split\n \t7\ttest\n", "participants.tsv")
    assert [person["person_id"] for person in people] == ["7"]


def test_an_id_with_accents_composed_or_not_is_one_person() -> None:
    composed, apart = (unicodedata.normalize(form, "J\u00fcrg1") for form in ("NFC", "NFD"))
    files = parse_manifest(f"person_id\tfilepath\n{composed}\ta.dcm\n{apart}\tb.dcm\n", "/data", "manifest.tsv")
    people = parse_participants(f"person_id\trecommended_split\n{apart}\ttest\n", "participants.tsv")
    assert {row.person_id for row in files.rows.values()} == {composed} == {person["person_id"] for person in people}
