"""Recommendations are kept where there are any; people whom no file names are told of."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from oct_dicom import make_dataset, retina, save
from octjepa.read.manifest import parse_participants
from octjepa.recipe import Preprocessing

PREPROCESSING = Preprocessing(
    image_size=(8, 64, 64), margin=(0, 8, 8), target_spacing_mm=(0.7, 0.0156, 0.094), axial_anchor=0.65
)


def recommend(root: Path, words: dict[str, str]) -> None:
    lines = [f"{person}\t{word}" for person, word in words.items()]
    (root / "participants.tsv").write_text("\n".join(["person_id\trecommended_split", *lines]) + "\n")


def test_one_person_without_a_recommendation_does_not_undo_the_others(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    root = tmp_path / "set"
    shutil.copytree(tiny, root)
    recommend(root, {"1001": "test", "1002": "test", "1003": "Validation", "1004": "holdout"})
    summary = build_store([root], tmp_path / "store", PREPROCESSING)
    assert summary.split_by == {"recommended": 3, "stratified": 2}
    assert summary.recommended_split_unknown == 1
    splits = Store.open(tmp_path / "store").table.groupby("person_id")["split"].first().to_dict()
    assert splits == {"1001": "test", "1002": "test", "1003": "val", "1004": "train", "1005": "train"}
    again = build_store([root], tmp_path / "store", PREPROCESSING)
    assert again.split_by == {"kept": 5}
    assert "recommends" not in caplog.text
    recommend(root, {"1001": "test", "1002": "test", "1003": "train", "1004": "test"})  # a later version of the table
    later = build_store([root], tmp_path / "store", PREPROCESSING)
    assert later.split_by == {"kept": 5}
    assert f"2 people of {tmp_path / 'store'} keep another split than participants.tsv recommends" in caplog.text
    assert Store.open(tmp_path / "store").table.groupby("person_id")["split"].first().to_dict() == splits


def test_an_age_below_zero_is_unknown() -> None:
    people = parse_participants("person_id\tage\n1\t-9\n2\t-9999.0\n3\t\n4\t0\n5\t61.5\n", "participants.tsv")
    ages = [person["age"] for person in people]
    assert np.array_equal(ages, [np.nan, np.nan, np.nan, 0.0, 61.5], equal_nan=True)


def test_several_rows_of_a_person_are_merged_and_contradictions_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    from octjepa.read.manifest import parse_participants

    columns = "person_id\trecommended_split\tage\tclinical_site\tstudy_group\n"
    rows = ["7001\ttest\t61\tUW\t", "7001\t\t\t\tcontrol"]
    for ordered in (rows, rows[::-1]):
        (person,) = parse_participants(columns + "\n".join(ordered), "participants.tsv")
        assert person == {
            "person_id": "7001",
            "clinical_site": "UW",
            "study_group": "control",
            "age": 61.0,
            "recommended_split": "test",
            "split_unknown": False,
        }
    assert not caplog.records
    rows += ["7001\ttrain\t62\t\t", "7002\tholdout\t50\t\t", "7002\tValid\t51\t\t", "7003\tval\t40\t\t"]
    people = parse_participants(columns + "\n".join(rows), "participants.tsv")
    assert [(person["recommended_split"], person["age"], person["split_unknown"]) for person in people] == [
        ("test", 61.0, False),
        ("val", 50.0, True),
        ("val", 40.0, False),
    ]
    (record,) = caplog.records
    assert "differ for 2 people (recommended_split 1, age 2)" in record.getMessage()
    assert "700" not in record.getMessage()


def test_no_message_of_the_split_holds_a_person_id(tiny: Path, tmp_path: Path) -> None:
    from octjepa.cohort.split import split_recommended
    from octjepa.errors import UsageError
    from octjepa.ingest import build_store
    from octjepa.store import Store

    build_store([tiny], tmp_path / "store", PREPROCESSING)
    with pytest.raises(UsageError, match="5 of 5 people") as caught:
        split_recommended(Store.open(tmp_path / "store"))
    assert "1001" not in str(caught.value)


def test_files_that_name_nobody_are_counted_noted_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    for number in range(3):
        ds = make_dataset(retina(seed=number))
        ds.PatientID = "" if number else "7"
        save(ds, tmp_path / "2023" / f"{number}.dcm" if not number else tmp_path / "set" / f"{number}.dcm")
    with caplog.at_level(logging.WARNING):
        summary = build_store([tmp_path / "2023", tmp_path / "set"], tmp_path / "store", PREPROCESSING)
    assert summary.people_unknown == 2
    assert summary.notes["person_unknown"] == 2
    assert "person_disagrees" not in summary.notes  # 2023 is a year
    store = Store.open(tmp_path / "store")
    assert store.describe().people_unknown == 2
    unknown = store.table["person_id"].str.startswith("unknown-")
    assert (store.table["notes"].str.contains("person_unknown") == unknown).all()
    (record,) = [record for record in caplog.records if "without a person id" in record.getMessage()]
    assert "2 volumes of" in record.getMessage()
    assert "manifest.tsv" in record.getMessage()


def test_named_people_give_no_warning(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from octjepa.ingest import build_store

    summary = build_store([tiny], tmp_path / "store", PREPROCESSING)
    assert (summary.people_unknown, summary.notes) == (0, {"laterality_disagrees": 5})
    assert "without a person id" not in caplog.text


def test_one_eye_under_two_names_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from octjepa.ingest import build_store

    pixels = retina(frames=12)
    for person, brighter in (("7", 0), ("8", 9)):
        ds = make_dataset(np.clip(pixels.astype(np.int16) + brighter, 0, 255).astype(np.uint8))
        ds.PatientID = person
        save(ds, tmp_path / "set" / f"{person}.dcm")
    with caplog.at_level(logging.WARNING):
        summary = build_store([tmp_path / "set"], tmp_path / "store", PREPROCESSING)
    assert summary.near_duplicates_across_people == 1
    assert "1 pair of volumes with the same eye under two person ids" in caplog.text


def test_one_id_at_two_hospitals_is_warned_of_and_neither_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    for number, hospital in enumerate(("Eye Hospital A", "eye hospital  a", "Clinic B")):
        ds = make_dataset(retina(seed=number))
        ds.PatientID, ds.InstitutionName = "1", hospital
        save(ds, tmp_path / "set" / f"{number}.dcm")
    with caplog.at_level(logging.WARNING):
        summary = build_store([tmp_path / "set"], tmp_path / "store", PREPROCESSING)
    assert summary.people_at_several_sites == 1
    assert "1 person id of" in caplog.text
    assert summary.eyes_with_several_scans == 1
    assert "1 eye of" in caplog.text
    sites = set(Store.open(tmp_path / "store").table["site"])
    assert len(sites) == 2
    assert all(site.startswith("site-") for site in sites)


def test_a_recommendation_for_an_id_that_becomes_a_pseudonym_counts(tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    root = tmp_path / "set"
    for number in range(4):
        ds = make_dataset(retina(seed=number))
        ds.PatientID, ds.PatientName = f"mueller{number}", "Mueller^Anna"
        save(ds, root / f"{number}.dcm")
    recommend(root, {f"mueller{number}": "test" for number in range(4)})
    summary = build_store([root], tmp_path / "store", PREPROCESSING)
    assert summary.split_by == {"recommended": 4}
    table = Store.open(tmp_path / "store").table
    assert set(table["split"]) == {"test"}
    assert table["person_id"].str.startswith("p-").all()


def test_a_corrected_site_reaches_volumes_that_are_not_read_again(tmp_path: Path) -> None:
    from octjepa.cohort.flow import cohort_table
    from octjepa.ingest import build_store
    from octjepa.store import Store

    save(make_dataset(retina()), tmp_path / "set" / "a.dcm")
    for site in ("North", "South"):
        (tmp_path / "set" / "participants.tsv").write_text(f"person_id\tclinical_site\n1234\t{site}\n")
        build_store([tmp_path / "set"], tmp_path / "store", PREPROCESSING)
        store = Store.open(tmp_path / "store")
        assert list(store.table["site"]) == list(cohort_table(store)["site"]) == [site]
