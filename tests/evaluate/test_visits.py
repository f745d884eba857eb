"""Labels by visit, pairs of visits and their changes; a split and an interval stay by person."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from command_line import call
from oct_dicom import retina
from octjepa.embed.table import Embeddings, read_embeddings, write_table
from octjepa.errors import UsageError
from octjepa.evaluate import targets
from octjepa.evaluate.cases import group_cases, read_visit_order
from octjepa.evaluate.labels import read_labels, split_multilabel, visit_pseudonyms
from octjepa.evaluate.survival import join_events
from octjepa.evaluate.visits import change_labels, pair_visits
from octjepa.metrics.findings import BASELINES
from octjepa.read.identity import visit_pseudonym
from octjepa.read.reader import read_volume

SPLITS = ("train", "train", "train", "val", "test", "test")


def cohort(people: int = 60, visits: int = 2, seed: int = 0) -> tuple[Embeddings, np.ndarray]:
    """(table, hidden state of each volume): the right eye of each person at some visits; feature 0 is the state."""
    rng = np.random.default_rng(seed)
    state = rng.normal(0, 1, (people, visits)).cumsum(axis=1)
    entries = [
        {
            "person_id": f"p{person}",
            "eye": "OD",
            "volume_id": f"{person}-{visit}",
            "content_hash": f"h{person}-{visit}",
            "device": "x",
            "split": SPLITS[person % len(SPLITS)],
            "age": 60.0,
            "clinical_site": "UW",
            "visit": visit_pseudonym(f"p{person}", f"2024-0{visit + 1}-05"),
            "quality": 1.0,
        }
        for person in range(people)
        for visit in range(visits)
    ]
    block = rng.normal(0, 0.1, (people * visits, 3)).astype(np.float32)
    noise = rng.normal(0, 1, (people * visits, 3)).astype(np.float32)
    block[:, 0] += state.reshape(-1)
    return Embeddings(pd.DataFrame(entries), block, noise, noise[:, :2], 3, "e", "c", 0, ("mean",)), state.reshape(-1)


def write_tsv(path: Path, columns: list[str], rows: list[list[object]]) -> Path:
    path.write_text("\n".join("\t".join(map(str, row)) for row in [columns, *rows]) + "\n")
    return path


def visit_rows(table: Embeddings, values: np.ndarray, visits: int = 2) -> list[list[object]]:
    """A row per volume: person, eye, the date that its file states, and a value."""
    people = table.frame["person_id"]
    return [
        [person, "OD", f"2024-0{number % visits + 1}-05", f"{value:.6f}"]
        for number, (person, value) in enumerate(zip(people, values, strict=True))
    ]


def test_a_row_that_names_a_visit_labels_the_volumes_of_that_visit(tmp_path: Path) -> None:
    table, state = cohort(6)
    frame = table.frame
    rows = visit_rows(table, state)
    rows[1][2] = frame["visit"][1]  # the pseudonym of the store works as well
    rows[3][2] = ""  # holds for every visit of p1 without a row of its own
    rows.append(["p5", "OD", "1999-01-01", 7])
    labels = read_labels(write_tsv(tmp_path / "labels.tsv", ["person_id", "eye", "visit", "va"], rows), ["va"])
    texts = labels.texts("va", frame)
    assert [float(text or "nan") for text in texts] == pytest.approx(state, abs=1e-5)
    target = targets.join_labels(labels, frame, "va", "regression")
    assert any("1 of 12 visits with a label have no embedded scan" in note for note in target.notes)
    assert target.values["train"] == pytest.approx(state[target.indices["train"]], abs=1e-5)
    plain = read_labels(write_tsv(tmp_path / "plain.tsv", ["person_id", "va"], [["p0", 1], ["p4", 2]]), ["va"])
    assert not plain.by_visit
    assert plain.texts("va", frame)[:3] == ["1", "1", None]


def test_wrong_visits_are_named_and_two_labels_of_one_visit_refused(tmp_path: Path) -> None:
    table, state = cohort(6)
    columns = ["person_id", "eye", "visit", "va"]
    rows = [[person, eye, "baseline", value] for person, eye, _, value in visit_rows(table, state)[::2]]
    labels = read_labels(write_tsv(tmp_path / "labels.tsv", columns, rows), ["va"])
    with pytest.raises(UsageError, match="its people are in the table, but none of its 6 visits is"):
        targets.join_labels(labels, table.frame, "va", "regression")
    rows = [["p0", "OD", "2024-01-05", 1], ["p0", "OD", "2024-01-05", 2]]
    with pytest.raises(UsageError, match="given twice with different values"):
        read_labels(write_tsv(tmp_path / "labels.tsv", columns, rows), ["va"])
    rows = [["p0", "OD", "", 1], ["p0", "OD", "", 2]]
    with pytest.raises(UsageError, match="or name the visit of each row"):
        read_labels(write_tsv(tmp_path / "labels.tsv", columns, rows), ["va"])


@pytest.mark.parametrize("spellings", [("2024-03-05", "20240305"), ("20240305", "2024-03-05")])
def test_two_spellings_of_a_visit_are_the_same_visit(tmp_path: Path, spellings: tuple[str, str]) -> None:
    columns = ["person_id", "eye", "visit", "va"]
    rows = [["p0", "OD", spelling, value] for spelling, value in zip(spellings, (1, 0), strict=True)]
    with pytest.raises(UsageError, match="given twice with different values for 1 of 2 visits, first in row 3"):
        read_labels(write_tsv(tmp_path / "labels.tsv", columns, rows), ["va"])
    rows = [["p0", "OD", spellings[0], 1], ["p0", "OS", spellings[1], 0], ["p0", "OD", spellings[1], 1]]
    labels = read_labels(write_tsv(tmp_path / "labels.tsv", columns, rows), ["va"])
    assert labels.notes == ("va: 1 label is given more than once with equal values; each is used once",)
    assert labels.visits["va"]["p0", "OD", visit_pseudonym("p0", "20240305")] == "1"


def test_each_visit_is_a_case_and_people_are_no_cases_of_labels_by_visit(tmp_path: Path) -> None:
    table, state = cohort(6)
    path = write_tsv(tmp_path / "labels.tsv", ["person_id", "eye", "visit", "va"], visit_rows(table, state))
    labels = read_labels(path, ["va"])
    eyes = group_cases(table.frame, "eye", "features", by_visit=labels.by_visit)
    assert eyes.about.cases == 12
    assert eyes.notes() == []
    joined = group_cases(table.frame, "eye", "features")
    assert joined.about.cases == 6
    assert "6 of 6 cases join several visits" in joined.notes()[0]
    with pytest.raises(UsageError, match="use --level volume or eye"):
        group_cases(table.frame, "person", "features", by_visit=True)
    with pytest.raises(UsageError, match="a time to an event needs one row"):
        join_events(labels, ["va"], "va")
    frame = eyes.frame(table.frame)
    before = targets.test_set_hash(labels, table.frame, "va")
    target = targets.join_labels(labels, frame, "va", "regression")
    assert sum(map(len, target.indices.values())) == 12
    rows = visit_rows(table, state)
    rows[-1][3] = 99
    other = read_labels(write_tsv(tmp_path / "other.tsv", ["person_id", "eye", "visit", "va"], rows), ["va"])
    assert targets.test_set_hash(other, table.frame, "va") != before, "another label of one visit is another test set"


def test_several_labels_in_a_cell_may_differ_between_visits(tmp_path: Path) -> None:
    table, _ = cohort(2)
    rows = [["p0", "OD", "2024-01-05", "drusen"], ["p0", "OD", "2024-02-05", "drusen;fluid"]]
    labels = read_labels(write_tsv(tmp_path / "l.tsv", ["person_id", "eye", "visit", "signs"], rows), ["signs"])
    made, names = split_multilabel(labels, ["signs"])
    assert names == ["signs=drusen", "signs=fluid"]
    assert made.texts("signs=fluid", table.frame) == ["0", "1", None, None]


def test_the_rules_for_several_volumes_say_what_they_leave_out() -> None:
    table, _ = cohort(6, visits=3)
    order = {visit: float(number % 3) for number, visit in enumerate(table.frame["visit"])}
    first = group_cases(table.frame, "eye", "first_visit", order)
    assert first.notes() == ["first_visit leaves out 12 of 18 volumes of 12 later visits (6 people)"]
    best = group_cases(table.frame, "person", "best_quality")
    assert best.notes()[0] == "best_quality leaves out 12 of 18 volumes that are not the best of their case (6 people)"
    assert group_cases(table.frame, "volume", "features").notes() == []


def test_an_order_of_visits_takes_dates_and_the_names_that_files_state(tmp_path: Path) -> None:
    path = write_tsv(
        tmp_path / "order.tsv",
        ["person_id", "visit", "order"],
        [["p0", "2024-03-05", "2024-03-05"], ["p1", "b", "2024-02-29"]],
    )
    order = read_visit_order(path)
    assert order[visit_pseudonym("p0", "20240305")] == order[visit_pseudonym("p0", "2024-03-05")]
    assert order[visit_pseudonym("p0", "2024-03-05")] - order[visit_pseudonym("p1", "b")] == 5
    write_tsv(path, ["visit", "order"], [["a", "2024-03-05"], ["b", "spring"]])
    with pytest.raises(UsageError, match="an order that is neither number nor date"):
        read_visit_order(path)


@pytest.mark.parametrize(
    ("orders", "interval"),
    [
        (("20231231", "20240101"), 1),
        (("20231231", "2024-01-01"), 1),
        (("20231231", "20240199"), 8968),  # 20240199 is not a date, so both are numbers
        (("20231231", "30240101"), 10008870),
        (("0", "20240101"), 20240101),
    ],
)
def test_a_column_of_dicom_dates_is_an_order_in_days(tmp_path: Path, orders: tuple[str, str], interval: float) -> None:
    path = write_tsv(tmp_path / "order.tsv", ["visit", "order"], [["a", orders[0]], ["b", orders[1]]])
    order = read_visit_order(path)
    assert order["b"] - order["a"] == interval


def test_the_name_of_a_visit_in_a_file_is_found_by_a_label(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", retina(16, 96, 80))
    facts = {"spacing_mm": [0.2, 0.01, 0.03], "person_id": "p7", "visit": "2024-03-05"}
    (tmp_path / "scan.json").write_text(json.dumps(facts))
    assert read_volume(tmp_path / "scan.npy").visit in visit_pseudonyms("p7", "2024-03-05")


def test_changes_are_those_of_features_and_labels(tmp_path: Path) -> None:
    table, state = cohort(6, visits=3)
    order = {visit: 30.0 * (number % 3) for number, visit in enumerate(table.frame["visit"])}
    path = write_tsv(tmp_path / "l.tsv", ["person_id", "eye", "visit", "va"], visit_rows(table, state, 3))
    labels = read_labels(path, ["va"])
    for pairing, count, intervals in (("consecutive", 12, {30.0}), ("first", 12, {30.0, 60.0})):
        made = pair_visits(table, order, pairing)  # type: ignore[arg-type]
        assert len(made.pairs) == count
        assert {pair.interval for pair in made.pairs} == intervals
        columns, rows = change_labels(made.pairs, labels, ["va"])
        assert columns == ["person_id", "eye", "visit", "interval", "va_before", "va_after", "va_change"]
        changes = np.array([row[6] for row in rows], dtype=float)
        later = state.reshape(6, 3)[:, 1:]
        earlier = state.reshape(6, 3)[:, :2] if pairing == "consecutive" else state.reshape(6, 3)[:, :1]
        assert changes == pytest.approx((later - earlier).reshape(-1), abs=1e-5)
        assert made.table.vector[:, 0] == pytest.approx(changes, abs=0.6)
        assert made.table.frame["volume_id"].is_unique
    with pytest.raises(UsageError, match="the same order"):
        pair_visits(table, dict.fromkeys(order, 1.0))
    with pytest.raises(UsageError, match="18 of 18 visits of eyes with several have no order"):
        pair_visits(table, {})
    with pytest.raises(UsageError, match="no eye of 6 with a known visit has two visits"):
        pair_visits(table.take(range(0, 18, 3)), order)
    assert "eye or visit is not known: 1 volume" in pair_visits(without_an_eye(table), order).notes[1]


def without_an_eye(table: Embeddings) -> Embeddings:
    changed = table.take(range(len(table)))
    changed.frame.loc[0, "eye"] = ""
    return changed


def test_the_change_between_visits_is_probed_by_person(tmp_path: Path) -> None:
    table, state = cohort()
    write_table(tmp_path / "eyes.parquet", table)
    assert np.array_equal(read_embeddings(tmp_path / "eyes.parquet").vector, table.vector)
    columns = ["person_id", "eye", "visit", "va"]
    labels = write_tsv(tmp_path / "labels.tsv", columns, visit_rows(table, state))
    order = write_tsv(
        tmp_path / "order.tsv",
        ["person_id", "visit", "order"],
        [[person, visit, visit] for person, _, visit, _ in visit_rows(table, state)],
    )
    changes = tmp_path / "changes.parquet"
    made = call(
        "visits",
        tmp_path / "eyes.parquet",
        "--visit-order",
        order,
        "--out",
        changes,
        "--labels",
        labels,
        "--target",
        "va",
        "--json",
    )
    assert made.code == 0, made.err
    assert made.json["pairs"] == 60
    with Path(made.json["labels"]).open(newline="") as file:
        assert {row["interval"] for row in csv.DictReader(file, delimiter="\t")} == {"31.0"}
    probed = call(
        "probe",
        changes,
        "--labels",
        made.json["labels"],
        "--target",
        "va_change",
        "--probe",
        "linear",
        "--ledger",
        tmp_path / "ledger",
        "--json",
        "--quiet",
    )
    assert probed.code == 0, probed.err
    scores = {row["name"]: row for row in probed.json["rows"] if row["metric"] == "r2"}
    encoder = scores.pop(max(scores, key=lambda name: scores[name]["value"]))
    assert encoder["value"] > 0.8
    assert encoder["name"].partition(":")[0] not in BASELINES
    assert encoder["n_people"] == 20
    assert (
        call("visits", tmp_path / "eyes.parquet", "--visit-order", order, "--out", changes, "--target", "va").code == 2
    )


@pytest.mark.parametrize("out", ["eyes.parquet", "va.parquet"])
def test_changes_never_replace_a_table_that_they_are_made_from(out: str, tmp_path: Path) -> None:
    table, state = cohort(6)
    write_table(tmp_path / "eyes.parquet", table)
    labels = write_tsv(tmp_path / "va.labels.tsv", ["person_id", "eye", "visit", "va"], visit_rows(table, state))
    order = write_tsv(tmp_path / "order.tsv", ["visit", "order"], [["a", 1]])
    before = labels.read_bytes(), (tmp_path / "eyes.parquet").read_bytes()
    made = call(
        *("visits", tmp_path / "eyes.parquet", "--visit-order", order, "--out", tmp_path / out),
        *("--labels", labels, "--target", "va"),
    )
    assert made.code == 2
    assert "is read by this command, and its result would replace it" in made.err
    assert (labels.read_bytes(), (tmp_path / "eyes.parquet").read_bytes()) == before


def test_a_row_without_a_visit_is_the_label_of_the_other_visits(tmp_path: Path) -> None:
    table, _ = cohort(2)
    order = {visit: float(number % 2) for number, visit in enumerate(table.frame["visit"])}
    rows = [["p0", "OD", "2024-01-05", 70], ["p0", "OD", "", 60]]
    labels = read_labels(write_tsv(tmp_path / "l.tsv", ["person_id", "eye", "visit", "va"], rows), ["va"])
    _, (first, second) = change_labels(pair_visits(table, order).pairs, labels, ["va"])
    assert first[4:] == ["70", "60", -10.0]
    assert second[4:] == [None, None, None]
