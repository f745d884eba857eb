"""Labels inside files reach the index and a table that the probes read."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from octjepa.config import load_recipe
from octjepa.errors import OctjepaError, UsageError
from octjepa.evaluate.labels import read_labels
from octjepa.files import Journal
from octjepa.read.personal_data import pseudonym
from octjepa.store import Store
from octjepa.store.index import (
    COLUMNS,
    PAST_SPLITS_FILE,
    IndexChange,
    IndexEntry,
    decode_labels,
    encode_labels,
    entries_of,
    format_labels,
    merge_participants,
    read_change,
    read_people,
    read_volumes,
    text_cells,
)

FIRST, SECOND = {"glaucoma": 1.0, "age": 61.5, "eye": "x"}, {"glaucoma": 0.0, "stage": "mild\tnone"}


def entry(volume_id: str, person_id: str, eye: str, labels: str = "") -> IndexEntry:
    return IndexEntry(
        volume_id=volume_id,
        content_hash="",
        person_id=person_id,
        eye=eye,
        personal="",
        labels=labels,
        notes="",
        split="",
        file="x",
    )


ENTRIES = [
    entry("b", "P2", "OS", encode_labels(SECOND)),
    entry("a", "P1", "OD", encode_labels(FIRST)),
    entry("c", "P3", ""),
]


def test_the_table_is_one_that_probes_read(tmp_path: Path) -> None:
    text = format_labels(ENTRIES)
    assert text.splitlines()[0] == "volume_id\tperson_id\teye\tage\teye_\tglaucoma\tstage"
    assert text.splitlines()[1] == "a\tP1\tOD\t61.5\tx\t1\t"
    path = tmp_path / "labels.tsv"
    path.write_text(text)
    found = read_labels(path, ["glaucoma", "age", "stage"]).values
    assert found["glaucoma"] == {("P1", "OD"): "1", ("P2", "OS"): "0"}
    assert found["age"] == {("P1", "OD"): "61.5"}
    assert found["stage"] == {("P2", "OS"): "mild\tnone"}


def test_without_labels_there_is_no_table() -> None:
    assert format_labels(ENTRIES[2:]) == ""
    assert decode_labels(ENTRIES[2].labels) == {}


def test_columns_that_a_table_lacks_are_empty_and_missing_cells_too() -> None:
    table = pd.DataFrame([{"volume_id": "a", "file": "x", "labels": np.nan, "site": None, "native_d": 5, "more": 1}])
    (read,) = entries_of(table)
    assert (read.volume_id, read.shape, read.labels, read.site, read.mirrored) == ("a", (5, 0, 0), "", "", False)
    assert math.isnan(read.quality)
    assert (read.key, read.stated_spacing_mm) == ("x", None)


def test_an_entry_comes_back_from_a_table_and_from_a_journal() -> None:
    written = replace(entry("a", "P1", "OD"), mirrored=True, quality=0.5, user_spacing_mm="0.1,0.004,0.01", native_w=7)
    (read,) = entries_of(pd.DataFrame([asdict(written)]))
    assert read.to_json() == pytest.approx(written.to_json(), nan_ok=True)
    assert read.stated_spacing_mm == (0.1, 0.004, 0.01)
    change = read_change(json.loads(json.dumps(IndexChange(volume=written).to_json())), "journal.jsonl")
    assert change.refused is None
    assert change.volume is not None
    assert change.volume.to_json() == pytest.approx(written.to_json(), nan_ok=True)


def test_a_journal_entry_without_its_texts_is_damaged() -> None:
    with pytest.raises(OctjepaError, match="is damaged"):
        read_change({"volume": {"volume_id": "a", "file": "x"}}, "journal.jsonl")


def test_tables_of_empty_stores_do_not_share_their_columns(tmp_path: Path) -> None:
    """They are copies of one table that is made once."""
    first, second = (read_volumes(tmp_path, "store") for _ in range(2))
    first["split"] = pd.Series(dtype=object)
    first.loc[0, "split"] = "train"
    assert len(first) == 1
    assert len(second) == 0
    assert tuple(second) == COLUMNS
    assert len(read_volumes(tmp_path, "store")) == 0
    assert entries_of(second) == []


def test_text_cells_of_missing_values() -> None:
    for values in (["a", None, "b"], ["a", float("nan"), "b"], pd.array(["a", pd.NA, "b"], dtype="string")):
        assert text_cells(pd.Series(values)) == ["a", "", "b"]


def test_a_kill_before_the_journal_is_removed_loses_no_split_and_no_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: Journal) -> None:
        raise KeyboardInterrupt

    store = Store.create(tmp_path / "store", load_recipe("tiny_cpu").preprocessing)
    monkeypatch.setattr(Journal, "remove", killed)
    with store.writing():
        store.add(replace(entry("v", "P1", "OD"), file="Muster_Erika.dcm", file_key="k"))
        store.change(replace(store.entry("v"), file="***.dcm"))
        store.set_split({"P1": "train"})
        with pytest.raises(KeyboardInterrupt):
            store.consolidate()
    left = Store.open(tmp_path / "store").entry("v")
    assert (left.file, left.split) == ("***.dcm", "train")


def test_a_file_whose_volume_is_valid_leaves_the_quarantine(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", load_recipe("tiny_cpu").preprocessing)
    with store.writing():
        store.add(replace(entry("v", "P1", "OD"), file_key="k"))
        store.refuse({"file": "x", "file_key": "k", "reason": "manifest_row_without_file", "detail": ""})
        store.consolidate()
        assert len(Store.open(tmp_path / "store").quarantine) == 1
        store.clear_refusals(["k"])
        store.consolidate()
    assert Store.open(tmp_path / "store").quarantine == []


def test_a_blank_of_a_later_table_leaves_what_is_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def person(name: str, *values: object) -> dict[str, object]:
        columns = ("clinical_site", "study_group", "age", "recommended_split")
        return {"person_id": name, "split_unknown": False, **dict(zip(columns, values, strict=True))}

    stored = merge_participants(
        read_people(tmp_path, "store"),
        [person("p2", "UW", "", math.nan, "test"), person("p1", "", "control", 61.0, "")],
    )
    blank = person("p2", "", "", math.nan, "")
    merged = merge_participants(stored, [blank, person("p1", "UAB", "", math.nan, "val"), blank])
    expected = {"p1": ("UAB", "control", 61.0, "val"), "p2": ("UW", "", None, "test")}
    assert {
        row[0]: tuple(None if value != value else value for value in row[1:]) for row in rows_of(merged)
    } == expected
    assert not caplog.records, "nothing is contradicted"
    later = merge_participants(merged, [person("p2", "UAB", "", 50.0, "test"), person("p1", "", "case", 61.0, "")])
    assert [row[1:] for row in rows_of(later)] == [("UAB", "case", 61.0, "val"), ("UAB", "", 50.0, "test")]
    (record,) = caplog.records
    assert "differs from before for 2 people" in record.getMessage()
    blanks = merge_participants(read_people(tmp_path, "store"), [person("p3", "", "", math.nan, "")])
    assert rows_of(blanks)[0][1] == ""


def rows_of(people: pd.DataFrame) -> list[tuple[object, ...]]:
    return list(people.itertuples(index=False, name=None))


def test_a_split_outlives_the_last_volume_of_its_person(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = Store.create(path, load_recipe("tiny_cpu").preprocessing)
    with store.writing():
        for name, person in (("a", "Muster_Erika"), ("b", "P2"), ("c", "P2")):
            store.add(replace(entry(name, person, "OD"), file_key=name, split="test"))
        store.consolidate()
    assert not (path / PAST_SPLITS_FILE).exists()
    with store.writing():
        for key in "ab":
            store.refuse({"file": "x", "file_key": key, "reason": "truncated", "detail": ""})
        killed = Store.open(path)  # before the index is written, from the journal
        assert killed.index.past_split("Muster_Erika") == "test"
        store.consolidate()
    later = Store.open(path)
    assert [later.index.past_split(p) for p in ("Muster_Erika", pseudonym("Muster_Erika"), "P3")] == [
        "test",
        "test",
        "",
    ]
    assert json.loads((path / PAST_SPLITS_FILE).read_text()) == {pseudonym("Muster_Erika"): "test"}  # P2 has a volume
    with later.writing():
        later.add(replace(entry("a", "Muster_Erika", "OD"), file_key="a", split="val"))
        later.set_split({"P2": "train"})
        later.consolidate()
    assert json.loads((path / PAST_SPLITS_FILE).read_text()) == {}
    (path / PAST_SPLITS_FILE).write_text("{")
    with pytest.raises(UsageError, match=r"past_splits.json of the store .* is damaged"):
        Store.open(path)
