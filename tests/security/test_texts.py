"""Texts of strangers: members of archives become labels only in known words, and no stored text names the person."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from eye_files import phantom, write_sidecar
from octjepa.read.manifest import parse_manifest, parse_participants
from octjepa.read.personal_data import identifies_person
from octjepa.read.reader import read_volume

PIXELS, SPACING = phantom()
SECRETS = {
    "patient": "Jane Doe",
    "fullname": "Jane Doe",
    "operator": "M. Smith",
    "physician": "Dr House",
    "hospital": "St. Mary",
    "email_address": "jane@doe.org",
    "diagnosis": "AMD of Jane Doe",
    "remark": "call her",
    "operator_code": 4711,
    "patient_number": 123456,
    "city_of_birth": "Ulm",
}
CLASSES = {"amd": "early AMD", "dr_class": "moderate NPDR", "group": "healthy", "race": "asian", "grade": "PDR 2.5"}


@pytest.mark.parametrize("suffix", ["npz", "mat"])
def test_free_text_of_members_is_no_label(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"scan.{suffix}"
    members = {**SECRETS, **CLASSES, "stage": 3, "oct_bscans": PIXELS}
    if suffix == "npz":
        np.savez(path, **members)
    else:
        savemat(path, members)
    volume = read_volume(path, spacing_mm=SPACING)
    assert volume.labels == {**CLASSES, "stage": 3}
    assert not any(secret in repr(volume.labels) for secret in ("Doe", "Smith", "House", "Mary", "4711"))


def test_a_label_that_repeats_the_name_or_the_id_is_left_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "scan.npz", oct_bscans=PIXELS, patient_name="Early^May", stage="early", person_id="Kox17")
    write_sidecar(tmp_path / "scan.json", labels={"who": "case kox17", "type": "may be", "kind": "dry"})
    assert read_volume(tmp_path / "scan.npz", spacing_mm=SPACING).labels == {"kind": "dry"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("LiBo-3", "Li^Bo"),
        ("libo_OD", "Li^Bo"),
        ("bo-li", "Li^Bo"),
        ("BoLi2", "Li^Bo"),
        ("Wu_Yi", "Wu^Yi"),
        ("王小明_OD", "王^小明"),
        ("病人王小明", "王小明"),
        ("山田太郎", "山田^太郎"),
        ("김민준-2", "김^민준"),
        ("Иванов1", "Иванов^Пётр"),
        ("πέτρος_3", "Νίκος^Πέτρος"),
        ("MUELLER", "Müller^Ada"),
        (os.fsdecode("王小明_OD".encode("gb18030")), "王^小明"),
    ],
)
def test_short_names_and_names_in_other_scripts_are_seen(text: str, name: str) -> None:
    assert identifies_person(text, name, "")


@pytest.mark.parametrize(
    ("text", "name"), [("library", "Li^Bo"), ("oct_01", "Li^Bo"), ("P017", "Wu^Yi"), ("macula", "Ma^Cu")]
)
def test_words_that_only_contain_a_short_name_stay(text: str, name: str) -> None:
    assert not identifies_person(text, name, "")


@pytest.mark.parametrize("placeholder", ["NA", "n/a", "unknown", "#N/A", "?", "-", "None", "nan"])
def test_people_without_an_id_are_not_one_person(placeholder: str) -> None:
    rows = f"filepath\tperson_id\na.dcm\t{placeholder}\nb.dcm\t{placeholder}\nc.dcm\t0\nd.dcm\t7.0\n"
    manifest = parse_manifest(rows, "/data", "manifest.tsv")
    assert [row.person_id for row in manifest.rows.values()] == ["", "", "0", "7"]
    people = parse_participants(f"person_id\tage\n{placeholder}\t50\n9\t60\n", "participants.tsv")
    assert [row["person_id"] for row in people] == ["9"]
