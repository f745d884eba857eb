"""Labels meet scans by person and eye; what is lost is counted, what contradicts is refused, and no id is printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from octjepa.embed.table import SPLITS
from octjepa.errors import UsageError
from octjepa.evaluate.labels import LabelTable, read_labels, split_multilabel
from octjepa.evaluate.targets import check_people, join_labels

Cohort = Callable[..., tuple[pd.DataFrame, pd.DataFrame]]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., LabelTable]:
    def reader(frame: pd.DataFrame, *targets: str, sep: str = "\t") -> LabelTable:
        frame.to_csv(tmp_path / "labels.txt", sep=sep, index=False)
        return read_labels(tmp_path / "labels.txt", list(targets) or ["lesion0"])

    return reader


def test_tsv_and_csv_with_every_way_to_name_an_eye(cohort: Cohort, read: Callable[..., LabelTable]) -> None:
    frame, labels = cohort(people=40)
    straight = join_labels(read(labels), frame, "lesion0")
    assert straight.task == "binary"
    assert straight.classes == ("0", "1")
    assert not straight.notes
    expected = labels["lesion0"].to_numpy()
    for split in ("train", "val", "test"):
        assert (straight.values[split] == expected[straight.indices[split]]).all()
        assert (frame["split"].to_numpy()[straight.indices[split]] == split).all()
    for right, left in (("R", "L"), ("right", "left"), ("od", "os")):
        other = labels.rename(columns={"person_id": "participant_id", "eye": "laterality"}).sample(
            frac=1, random_state=0
        )
        other["laterality"] = other["laterality"].map({"OD": right, "OS": left})
        same = join_labels(read(other, sep=","), frame, "lesion0")
        assert (same.values["train"] == straight.values["train"]).all()
        assert same.label_hash == straight.label_hash


def test_labels_of_a_person_reach_both_eyes_and_unknown_eyes(cohort: Cohort, read: Callable[..., LabelTable]) -> None:
    frame, _ = cohort(people=40)
    frame.loc[0, "eye"] = ""
    people = frame[["person_id"]].drop_duplicates()
    people["grade"] = np.arange(len(people)) % 3
    target = join_labels(read(people, "grade"), frame, "grade")
    assert target.task == "multiclass"
    assert sum(len(rows) for rows in target.indices.values()) == len(frame)
    assert target.values["train"][:2].tolist() == [0, 0]


def test_everything_lost_is_counted(cohort: Cohort, read: Callable[..., LabelTable]) -> None:
    frame, labels = cohort(people=40)
    labels["lesion0"] = labels["lesion0"].astype(object)
    labels.loc[[3, 5], "lesion0"] = ["", "NaN"]
    labels = labels.drop(index=[8, 9])  # a person without labels
    unknown_people = pd.DataFrame({"person_id": ["9001", "9001"], "eye": ["OD", "OS"], "lesion0": [0, 1]})
    frame.loc[frame.index[-1], "eye"] = ""  # its eye is unknown, so an eye's label cannot be given to it
    frame.loc[20:21, "split"] = ""
    table = read(pd.concat([labels, unknown_people, labels.iloc[:1]]))
    assert any("2 of 81 label rows are empty or NaN" in text for text in table.notes)
    assert any("1 label is given more than once with equal values" in text for text in table.notes)
    target = join_labels(table, frame, "lesion0")
    # two of the strangers, and the second eye of the last person, whose scan no longer says which eye it is
    assert any("3 person-eye labels have no embedded scan" in text for text in target.notes)
    assert any("5 of 80 volumes (4 people) have no label" in text for text in target.notes)
    assert any("2 labelled volumes are in no split" in text for text in target.notes)
    assert sum(len(rows) for rows in target.indices.values()) == 80 - 5 - 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.iloc[:0], "has a header and no rows"),
        (lambda f: f.drop(columns="person_id"), "neither person_id nor participant_id"),
        (lambda f: f.rename(columns={"lesion0": "other"}), "no column lesion0; its columns are person_id, eye, other"),
        (lambda f: f.assign(eye="OX"), "'OX' in 80 rows"),
        (lambda f: f.assign(person_id=["", *f["person_id"][1:]]), "1 of 80 rows have no person_id"),
        (
            lambda f: pd.concat([f, f.iloc[:3].assign(lesion0=1 - f["lesion0"].iloc[:3])]),
            "different values for 3 of 80",
        ),
        (lambda f: f.assign(lesion0=1), "all 80 labelled volumes have the same value"),
        (lambda f: f.assign(person_id="COHORTB-" + f["person_id"]), "look like 'AAAAAAA-9999' there and '9999' here"),
        (
            lambda f: f.assign(lesion0=range(80)).assign(lesion0=lambda g: "id" + g["lesion0"].astype(str)),
            "is it an id",
        ),
    ],
)
def test_wrong_labels_are_refused(
    cohort: Cohort, read: Callable[..., LabelTable], change: Callable[[pd.DataFrame], pd.DataFrame], message: str
) -> None:
    frame, labels = cohort(people=40)
    with pytest.raises(UsageError, match=message) as caught:
        join_labels(read(change(labels)), frame, "lesion0")
    assert not any(person in str(caught.value) for person in frame["person_id"])


def test_a_person_row_that_contradicts_an_eye_row(cohort: Cohort, read: Callable[..., LabelTable]) -> None:
    _, labels = cohort(people=4)
    contrary = pd.DataFrame({"person_id": ["1000"], "eye": ["OU"], "lesion0": [2]})
    with pytest.raises(UsageError, match="different values for 1 of 9 eyes, first in row 10"):
        read(pd.concat([labels, contrary]))


def test_no_file_and_no_table(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no label file at"):
        read_labels(tmp_path / "none.tsv", ["a"])
    (tmp_path / "empty.tsv").write_text("")
    with pytest.raises(UsageError, match="not a readable TSV or CSV"):
        read_labels(tmp_path / "empty.tsv", ["a"])
    (tmp_path / "labels.xlsx").write_bytes(b"PK\x03\x04\xff")
    with pytest.raises(UsageError, match=r"labels\.xlsx is an Excel file .*: save the table as CSV"):
        read_labels(tmp_path / "labels.xlsx", ["a"])
    (tmp_path / "some.tsv").write_text("person_id\ta\n1\t2\n")
    with pytest.raises(UsageError, match="no target"):
        read_labels(tmp_path / "some.tsv", [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("person_id;eye;a\n007;OD;0,5\n", {("007", "OD"): "0.5"}),  # a spreadsheet's where decimals have a comma
        ("\ufeffPerson_ID,Eye,a\r\n007,rechts,1\r\n,,\r\n", {("007", "OD"): "1"}),
        ("person_id\teye\ta\t\n007\tOD\t1\t\n008\tOS\n", {("007", "OD"): "1"}),  # a tab more, two cells fewer
        ('person_id,eye,note,a\n007,OD,"5"" wide,\nseen twice",1\n', {("007", "OD"): "1"}),
    ],
)
def test_tables_as_spreadsheets_write_them(tmp_path: Path, text: str, expected: dict[tuple[str, str], str]) -> None:
    (tmp_path / "labels.csv").write_text(text, encoding="utf-8")
    assert read_labels(tmp_path / "labels.csv", ["a"]).values["a"] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # by position, the cells of the last two columns would be person and label
        ("person_id\ta\n1001\t3\t1\n1002\t4\t0\n", "2 of 2 rows have more cells than the 2 columns"),
        ('person_id\tsize\ta\n1\t"5 mm\t1\n2\t"7 mm\t0\n', "not a readable TSV or CSV"),  # row 2 in a cell of row 1
        ("person_id,a, a\n1,0,1\n", "has the column a more than once"),
        ("eye,person_id,a,eye\nOD,1,0,OS\n", "has the column eye more than once"),
    ],
)
def test_a_table_whose_cells_could_be_taken_for_others_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "labels.tsv").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_labels(tmp_path / "labels.tsv", ["a"])


def test_one_class_in_two_spellings_and_decimal_commas_are_refused(
    cohort: Cohort, read: Callable[..., LabelTable]
) -> None:
    frame, labels = cohort(people=40)
    answers = labels.assign(lesion0=labels["lesion0"].map({0: "no", 1: "yes"}))
    answers.loc[3, "lesion0"] = answers.loc[3, "lesion0"].upper()
    with pytest.raises(UsageError, match="which would be different classes"):
        join_labels(read(answers), frame, "lesion0")
    several = labels.assign(lesion0=np.resize(["drusen;fluid", "Drusen", "none"], len(labels)))
    with pytest.raises(UsageError, match="'Drusen' and 'drusen'"):
        split_multilabel(read(several), ["lesion0"])
    acuity = labels.assign(lesion0=np.resize(["0,5", "0,8", "1"], len(labels)))
    with pytest.raises(UsageError, match="decimal commas"):
        join_labels(read(acuity), frame, "lesion0")


def test_ids_that_lost_their_zeros_are_pointed_out(cohort: Cohort, read: Callable[..., LabelTable]) -> None:
    frame, labels = cohort(people=40)
    names = sorted(set(frame["person_id"]))
    frame["person_id"] = frame["person_id"].map({name: f"{number:03d}" for number, name in enumerate(names)})
    labels["person_id"] = labels["person_id"].map({name: str(number) for number, name in enumerate(names)})
    with pytest.raises(UsageError, match="the ids of 40 people in the labels lack only zeros at the start"):
        join_labels(read(labels), frame, "lesion0")
    labels["person_id"] = labels["person_id"].map(lambda name: name.zfill(3) if int(name) > 9 else name)
    (note,) = [note for note in join_labels(read(labels), frame, "lesion0").notes if "no embedded scan" in note]
    assert "the ids of 10 people in the labels lack only zeros" in note


def test_a_class_missing_from_a_split(cohort: Cohort, read: Callable[..., LabelTable]) -> None:
    frame, labels = cohort(people=40)
    train, test = frame["split"] == "train", frame["split"] == "test"
    with pytest.raises(UsageError, match="split train has no volume of class 1"):
        join_labels(read(labels.assign(lesion0=(~train).astype(int))), frame, "lesion0")
    with pytest.raises(UsageError, match="split test has no volume of class 1"):
        join_labels(read(labels.assign(lesion0=np.where(test, 0, np.arange(80) % 2))), frame, "lesion0")
    fewer = join_labels(
        read(labels.assign(lesion0=np.where(test, np.arange(80) % 2, np.arange(80) % 3))), frame, "lesion0"
    )
    assert any("split test has no volume of class 2" in text for text in fewer.notes)


def test_a_class_of_too_few_people_is_not_sent_to_another_split(
    cohort: Cohort, read: Callable[..., LabelTable]
) -> None:
    """Three people with three ages: no split can hold each age on every side, so none is advised."""
    frame, labels = cohort(people=40)
    people = sorted(set(frame["person_id"]))[:3]
    frame = frame[frame["person_id"].isin(people)].assign(
        split=lambda f: f["person_id"].map(dict(zip(people, SPLITS, strict=True)))
    )
    ages = labels.assign(lesion0=labels["person_id"].map(dict(zip(people, (55, 56, 67), strict=True))))
    with pytest.raises(UsageError, match=r"A class needs at least 3 people, .* has 1 person here") as refused:
        join_labels(read(ages.dropna(subset=["lesion0"])), frame, "lesion0")
    assert "octjepa split" not in str(refused.value)
    assert "--task regression" in str(refused.value)
    assert "20 test people" in str(refused.value)


def test_the_task_is_read_from_the_values(cohort: Cohort, read: Callable[..., LabelTable]) -> None:
    frame, labels = cohort(people=40)
    rng = np.random.default_rng(0)
    table = read(
        labels.assign(
            flag=np.where(labels["lesion0"] == 1, "TRUE", "FALSE"),
            group=rng.choice(["healthy", "oral", "insulin"], 80),
            grade=rng.choice([0, 2, 10], 80),
            score=rng.normal(size=80),
            state=np.where(labels["lesion0"] == 1, "sick", "healthy"),
        ),
        *("flag", "group", "grade", "score", "state"),
    )
    assert join_labels(table, frame, "flag").classes == ("FALSE", "TRUE")
    assert join_labels(table, frame, "group").classes == ("healthy", "insulin", "oral")
    assert join_labels(table, frame, "grade").classes == ("0", "2", "10")
    assert join_labels(table, frame, "grade", "regression").task == "regression"
    assert join_labels(table, frame, "score").task == "regression"
    note = "state: the positive class is 'sick' (against 'healthy'): for the other one, write 1 in place of 'healthy'"
    assert any(text.startswith(note) for text in join_labels(table, frame, "state").notes)
    for name, task, message in (
        ("group", "binary", "needs 2"),
        ("group", "regression", "needs numbers"),
        ("flag", "x", "no task"),
    ):
        with pytest.raises(UsageError, match=message):
            join_labels(table, frame, name, task)


def test_texts_beside_numbers_become_classes_and_that_is_reported(
    cohort: Cohort, read: Callable[..., LabelTable]
) -> None:
    frame, labels = cohort(people=60)
    labels["lesion0"] = labels["lesion0"].astype(str)
    labels.loc[labels.index[::5], "lesion0"] = "ungraded"
    target = join_labels(read(labels), frame, "lesion0")
    assert (target.task, target.classes) == ("multiclass", ("0", "1", "ungraded"))
    assert "lesion0: 'ungraded' next to numbers count as classes; leave such cells empty" in "\n".join(target.notes)
    labels["lesion0"] = labels["lesion0"].map(
        {"0": "no", "1": "yes", "ungraded": "?"}
    )  # names alone: no number to stand next to
    assert not [note for note in join_labels(read(labels), frame, "lesion0").notes if "next to numbers" in note]


def test_label_hash_changes_with_one_label_of_the_test_split(cohort: Cohort, read: Callable[..., LabelTable]) -> None:
    frame, labels = cohort(people=40)
    before = join_labels(read(labels), frame, "lesion0").label_hash
    tested = frame.index[frame["split"] == "test"][0]
    labels.loc[tested, "lesion0"] = 1 - labels.loc[tested, "lesion0"]
    assert join_labels(read(labels), frame, "lesion0").label_hash != before


def test_people_in_two_splits_and_empty_splits(cohort: Cohort) -> None:
    frame, _ = cohort(people=40)
    check_people(frame)
    leaked = frame.copy()
    leaked.loc[[0, 4], "split"] = "test"
    with pytest.raises(UsageError, match="leak: 2 of 40 people in more than one split"):
        check_people(leaked)
    for split in ("train", "test"):
        with pytest.raises(UsageError, match=f"no volume is in split '{split}'"):
            check_people(frame[frame["split"] != split])


def test_embeddings_of_one_person_name_how_many_people_a_probe_needs(cohort: Cohort) -> None:
    frame, _ = cohort(people=40)
    alone = frame[frame["person_id"] == frame["person_id"].iloc[0]].assign(split="train")
    with pytest.raises(UsageError, match=r"of 1 person: a probe needs at least 3 people.* 20 test people"):
        check_people(alone)


def test_a_similar_column_is_suggested(tmp_path: Path) -> None:
    path = tmp_path / "labels.tsv"
    path.write_text("person_id\tDME\n1\t0\n", encoding="utf-8")
    with pytest.raises(UsageError, match="did you mean 'DME'"):
        read_labels(path, ["dme"])
    path.write_text("PatientID\tdme\n1\t0\n", encoding="utf-8")
    with pytest.raises(UsageError, match="rename 'PatientID' to person_id"):
        read_labels(path, ["dme"])


@pytest.mark.parametrize(
    "line",
    ["#classes: unknown, NA", "# Classes: na; Unknown", '"#classes: unknown, na"\t\t', "#classes: unknown,na\t\t"],
)
def test_words_for_a_missing_value_can_be_declared_to_be_classes(tmp_path: Path, line: str) -> None:
    rows = "person_id\teye\tgrade\n1\tOD\tunknown\n2\tOD\tna\n3\tOD\tmild\n4\tOD\t?\n5\tOD\t\n"
    path = tmp_path / "labels.tsv"
    path.write_text(rows, encoding="utf-8")
    plain = read_labels(path, ["grade"])
    assert plain.values["grade"] == {("3", "OD"): "mild"}
    assert any("begin the file with the line `#classes: ?`" in note for note in plain.notes)
    path.write_text(f"{line}\n{rows}", encoding="utf-8")
    declared = read_labels(path, ["grade"]).values["grade"]
    assert declared == {("1", "OD"): "unknown", ("2", "OD"): "na", ("3", "OD"): "mild"}


@pytest.mark.parametrize("rows", ["1\tOD\tA\t0\n1\tOS\t\t1\n", "1\tOS\t\t1\n1\tOD\tA\t0\n"])
def test_the_site_of_a_person_does_not_depend_on_the_order_of_rows(tmp_path: Path, rows: str) -> None:
    (tmp_path / "labels.tsv").write_text(f"person_id\teye\tclinical_site\tlesion\n{rows}")
    assert read_labels(tmp_path / "labels.tsv", ["lesion"]).sites == {"1": "A"}
