"""The data card: every count is the store's, nothing on it names a person, and no text of others becomes markup."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from index_entries import index_entry, store_of
from octjepa.cohort.flow import Counts, Stage
from octjepa.errors import UsageError
from octjepa.report import write_report
from octjepa.report.data_card import data_card

WHEN = "2026-01-01T00:00:00+00:00"


def rows_of(card: str, first: str) -> list[list[str]]:
    """The cells of every table row whose first cell is `first`."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in card.splitlines() if line[:1] == "|"]
    return [row[1:] for row in cells if row[0].strip() == first]


def test_every_count_is_the_stores(tmp_path: Path) -> None:
    rows = [index_entry(number, split="train" if number < 8 else "test") for number in range(10)]
    rows[9] |= {"pattern": "radial", "uncertain": "slice;depth", "notes": "blank_frames=2;rescaled"}
    rows[8] |= {"notes": "blank_frames=1", "eye": "unknown", "labels": json.dumps({"drusen": 1.0})}
    store = store_of(tmp_path / "store", rows)
    for number, reason in enumerate(["truncated", "truncated", "duplicate_content"]):
        store.refuse(
            {
                "file": f"topcon_triton/{number}.dcm",
                "hash": "",
                "stage": "read",
                "reason": reason,
                "detail": "told",
                "when": WHEN,
                "file_key": f"q{number}",
            }
        )
    card = data_card(store, "eyes")
    table = store.table
    for split in ("train", "test"):
        part = table[table["split"] == split]
        counted = [part["person_id"].nunique(), len(part[["person_id", "eye"]].drop_duplicates()), len(part)]
        assert rows_of(card, split) == [list(map(str, counted))]
    for device, part in table.groupby("device"):
        (found,) = rows_of(card, str(device))
        assert found[2] == str(len(part))
        assert found[4].split(", ")[0] == f"{part['spacing_z_mm'].median():.4g}"
    assert rows_of(card, "pattern: radial") == [["1"]]
    assert [rows_of(card, f"spacing uncertain: {axis}") for axis in ("slice", "depth", "column")] == [
        [["1"]],
        [["1"]],
        [["0"]],
    ]
    assert rows_of(card, "side of the eye unknown") == [["1"]]
    assert rows_of(card, "note: blank frames") == [["2"]]
    assert rows_of(card, "truncated")[0][:2] == ["2", "lost"]
    assert rows_of(card, "duplicate_content")[0][:2] == ["1", "rightly"]
    assert "13 files were read or listed as scans, 10 of them are in it." in card
    assert rows_of(card, "drusen") == [["1"]]
    assert store.contract_hash in card
    assert "Fewer than 6 people" in card


def test_a_person_in_two_splits_stands_on_it(tmp_path: Path) -> None:
    rows = [index_entry(number, split="train") for number in range(4)]
    assert "or SOP instance UID is in two splits" in data_card(store_of(tmp_path / "sound", rows), "sound")
    rows[1] |= {"split": "test", "person_id": rows[0]["person_id"]}
    assert "**In two splits:** person id 1" in data_card(store_of(tmp_path / "leaking", rows), "leaking")


def test_an_unsearched_store_is_not_reported_as_clean(tmp_path: Path) -> None:
    rows = [index_entry(number, split="train") for number in range(4)]
    assert "Near-duplicates were not searched for" in data_card(store_of(tmp_path / "one", rows), "one")
    rows = [index_entry(number, enface_hash="00ff" * 8) for number in range(4)]
    assert "No person has a split yet." in data_card(store_of(tmp_path / "two", rows), "two")


def test_what_was_done_to_the_volumes_is_reported(tmp_path: Path) -> None:
    card = data_card(store_of(tmp_path / "store", [index_entry(0)]), "one")
    assert "curvature of Bruch's membrane are taken out" in card
    assert "from percentile 1 to 99.8, to 8 bit" in card


def test_nobody_is_named_and_words_of_others_stay_words(tmp_path: Path) -> None:
    rows = [index_entry(number, site="a|b <script> ![x](y)") for number in range(14)]
    for row in rows:
        row["person_id"] = f"SECRET{row['person_id']}"
    store = store_of(tmp_path / "store", rows)
    people = [
        {
            "person_id": row["person_id"],
            "clinical_site": "a|b <script> ![x](y)",
            "study_group": "g",
            "age": "61",
            "recommended_split": "train",
        }
        for row in rows
    ]
    store.add_participants(people)
    card = data_card(store, "my|eyes")
    assert "SECRET" not in card
    assert all(row["volume_id"] not in card for row in rows)
    assert str(tmp_path) not in card
    assert "<script>" not in card
    assert "a\\|b &lt;script> \\!\\[x\\](y)" in card
    assert "median 61 years" in card
    few = store_of(tmp_path / "few", rows[:6])
    few.add_participants(people)
    assert "61" not in data_card(few, "few").partition("## People")[2].partition("##")[0]


def test_no_age_group_or_site_of_fewer_than_six_people_is_on_it(tmp_path: Path) -> None:
    rows = [index_entry(2 * number, site="UAB" if number < 2 else "UW") for number in range(10)]
    people = [
        {
            "person_id": row["person_id"],
            "clinical_site": row["site"],
            "study_group": "rare" if number == 0 else "healthy",
            "age": "93" if number == 0 else "",
            "recommended_split": "",
        }
        for number, row in enumerate(rows)
    ]
    card = data_card(store_of(tmp_path / "store", rows, people), "eyes")
    assert "93" not in card
    assert rows_of(card, "Age") == []
    assert rows_of(card, "Site") == [["UW 8, 1 more of fewer than 6 people"]]
    assert rows_of(card, "Study group") == [["healthy 9, 1 more of fewer than 6 people"]]
    assert rows_of(card, "UW")[0][0] == "8"
    assert rows_of(card, "UAB") == []


@pytest.mark.slow
def test_it_is_written_beside_the_page_or_nothing_is(demo: Path, tmp_path: Path) -> None:
    write_report(demo, tmp_path / "page.html", tmp_path / "card.md")
    assert (tmp_path / "card.md").read_text(encoding="utf-8").startswith("# Data card: ")
    assert "| the run's" not in (tmp_path / "card.md").read_text(encoding="utf-8")  # this run.json has no flow
    with pytest.raises(UsageError, match="give each a separate file"):
        write_report(demo, tmp_path / "page.html", tmp_path / "page.html")
    with pytest.raises(UsageError, match="is a folder: give --card"):
        write_report(demo, tmp_path / "other.html", tmp_path)
    assert not (tmp_path / "other.html").exists()


def test_of_a_run_it_says_what_the_run_chose(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", [index_entry(number, split="train") for number in range(4)])
    lost, left = Counts(1, 1, 1, 1), Counts(1, 2, 2, 2)
    stages = [Stage("store", "", Counts(2, 3, 3, 3), lost, {}, {}), Stage("split", "", left, lost, {}, {})]
    flow: dict[str, list[Stage]] = {"train": stages, "val": []}
    assert rows_of(data_card(store, "eyes", flow), "the run's train") == [["1", "2", "2"]]
