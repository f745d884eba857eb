"""Labels inside files reach the index and a table that the probes read."""

from __future__ import annotations

from pathlib import Path

from octjepa.evaluate.labels import read_labels
from octjepa.store.index import decode_labels, encode_labels, format_labels

FIRST, SECOND = {"glaucoma": 1.0, "age": 61.5, "eye": "x"}, {"glaucoma": 0.0, "stage": "mild\tnone"}
ROWS = [
    {"volume_id": "b", "person_id": "P2", "eye": "OS", "labels": encode_labels(SECOND)},
    {"volume_id": "a", "person_id": "P1", "eye": "OD", "labels": encode_labels(FIRST)},
    {"volume_id": "c", "person_id": "P3", "eye": "", "labels": ""},
    {"volume_id": "d", "person_id": "P4", "eye": "OD", "labels": float("nan")},
    {"volume_id": "e", "person_id": "P5", "eye": "OD"},
]


def test_the_table_is_one_that_probes_read(tmp_path: Path) -> None:
    text = format_labels(ROWS)
    assert text.splitlines()[0] == "volume_id\tperson_id\teye\tage\teye_\tglaucoma\tstage"
    assert text.splitlines()[1] == "a\tP1\tOD\t61.5\tx\t1\t"
    path = tmp_path / "labels.tsv"
    path.write_text(text)
    found = read_labels(path, ["glaucoma", "age", "stage"]).values
    assert found["glaucoma"] == {("P1", "OD"): "1", ("P2", "OS"): "0"}
    assert found["age"] == {("P1", "OD"): "61.5"}
    assert found["stage"] == {("P2", "OS"): "mild\tnone"}


def test_without_labels_there_is_no_table() -> None:
    assert format_labels(ROWS[2:]) == ""
    assert [decode_labels(row) for row in ROWS[2:]] == [{}, {}, {}]
