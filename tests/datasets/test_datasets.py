"""`octjepa datasets`: a folder built to the layout of each data set passes, and each missing part is named."""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from command_line import call
from oct_dicom import retina
from octjepa.datasets.catalogue import DataSet, ExpectedFiles, catalogue, find_data_set
from octjepa.datasets.check import check_folder
from octjepa.ingest.sources import discover
from octjepa.locks import writer_lock
from octjepa.store import Store

NAMES = [entry.name for entry in catalogue()]
ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, expected: ExpectedFiles, name: str = "") -> Path:
    """A small file of one kind, with the arrays and columns that the kind has."""
    path = folder / (name or expected.example)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {member: np.zeros((2, 2, 2), np.uint8) for member in expected.members}
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".mat":
        savemat(path, arrays)
    elif expected.columns:
        path.write_text(("\t" if path.suffix == ".tsv" else ",").join(expected.columns) + "\n")
    else:
        path.write_bytes(b"")
    return path


def build(folder: Path, data_set: DataSet) -> None:
    for expected in data_set.files:
        write(folder, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_with_the_documented_layout_passes_and_each_missing_part_is_named(name: str, tmp_path: Path) -> None:
    data_set = find_data_set(name)
    build(tmp_path, data_set)
    checked = check_folder(data_set, tmp_path)
    assert checked.ok, checked
    assert [kind.files for kind in checked.kinds] == [1] * len(data_set.files)
    for number, expected in enumerate(data_set.files):
        (tmp_path / expected.example).rename(tmp_path / "other.bin")
        again = check_folder(data_set, tmp_path)
        assert again.ok is not expected.needed
        if expected.needed:
            assert expected.example in again.kinds[number].problem
        (tmp_path / "other.bin").rename(tmp_path / expected.example)


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_says_what_is_not_confirmed_and_where_its_guide_is(name: str) -> None:
    data_set = find_data_set(name)
    assert data_set.terms
    assert data_set.not_confirmed
    assert data_set.page.startswith("https://")
    if data_set.guide:
        page, _, heading = data_set.guide.partition("#")
        headings = re.findall(r"^## (.+)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert not heading or heading in {
            re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings
        }, data_set.guide


def test_wrong_arrays_columns_and_folders_are_named(tmp_path: Path) -> None:
    fairvision = find_data_set("fairvision")
    build(tmp_path, fairvision)
    np.savez(tmp_path / "Glaucoma/Training/data_00001.npz", images=np.zeros(3))
    found = call("datasets", "check", "fairvision", tmp_path)
    assert found.code == 1
    assert "data_00001.npz has no oct_bscans among its arrays (images)" in found.err
    (tmp_path / "Glaucoma/Training/data_00001.npz").write_bytes(b"PK")
    assert "cannot be read" in call("datasets", "check", "fairvision", tmp_path).err
    dme = tmp_path / "dme"
    path = write(dme, find_data_set("duke_dme").files[0])
    savemat(path, {"images": np.arange(500.0)}, do_compression=True)
    path.write_bytes(path.read_bytes()[:140] + bytes(64))  # the rest of a compressed array is damaged
    assert f"{path.name} cannot be read" in call("datasets", "check", "duke_dme", dme).err
    octdl = tmp_path / "octdl"
    build(octdl, find_data_set("octdl"))
    (octdl / "OCTDL_labels.csv").write_text("file_name,disease\n")
    assert "has no patient_id among its columns (file_name, disease)" in call("datasets", "check", "octdl", octdl).err
    (tmp_path / "elsewhere" / "Pictures").mkdir(parents=True)
    (tmp_path / "elsewhere" / "Pictures" / "a.txt").write_text("")
    wrong = call("datasets", "check", "retouch", tmp_path / "elsewhere")
    assert "expected names such as RETOUCH-TrainingSet-Cirrus/TRAIN001/oct.mhd; the folder holds Pictures" in wrong.err
    assert call("datasets", "check", "fairvison", tmp_path).code == 2
    assert "no folder at" in call("datasets", "check", "octdl", tmp_path / "nowhere").err


def test_counts_by_split_class_and_person(tmp_path: Path) -> None:
    kermany = find_data_set("kermany")
    for name in ("train/CNV/CNV-1-1.jpeg", "train/CNV/CNV-1-2.jpeg", "train/DME/DME-7-1.jpeg", "test/CNV/CNV-9-1.jpeg"):
        write(tmp_path, kermany.files[0], name)
    checked = call("datasets", "check", "kermany", tmp_path, "--json").json
    found = checked["kinds"][0]
    assert checked["found"] == sum(kind["files"] for kind in checked["kinds"]) >= 4
    assert found["groups"] == {"split": {"test": 1, "train": 3}, "label": {"cnv": 3, "dme": 1}}
    assert (found["files"], found["people"]) == (4, 3)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as table:
        return list(csv.DictReader(table, delimiter="\t"))


def test_tables_give_each_scan_its_person_split_and_label(tmp_path: Path) -> None:
    amd = find_data_set("duke_amd")
    for name in ("AMD", "Control"):
        write(tmp_path, amd.files[0], f"{name}/Farsiu_Ophthalmology_2013_{name}_Subject_1001.mat")
    assert call("datasets", "tables", "duke_amd", tmp_path, "--json").json["people"] == 2
    assert [row["label"] for row in rows(tmp_path / "labels.tsv")] == ["amd", "control"]
    again = call("datasets", "tables", "duke_amd", tmp_path)
    assert again.code == 2
    assert "manifest.tsv already" in again.err
    assert call("datasets", "tables", "goals", tmp_path).code == 2
    fairvision = find_data_set("fairvision")
    for name in ("Glaucoma/Training/data_00001.npz", "Glaucoma/Test/data_00002.npz", "DR/Training/data_00001.npz"):
        write(tmp_path / "fair", fairvision.files[0], name)
    assert call("datasets", "tables", "fairvision", tmp_path / "fair", "--json").json["scans"] == 3
    people = {row["filepath"]: row["person_id"] for row in rows(tmp_path / "fair" / "manifest.tsv")}
    assert people == {
        "DR/Training/data_00001.npz": "fairvision-dr-00001",
        "Glaucoma/Training/data_00001.npz": "fairvision-glaucoma-00001",
        "Glaucoma/Test/data_00002.npz": "fairvision-glaucoma-00002",
    }
    splits = {row["person_id"]: row["recommended_split"] for row in rows(tmp_path / "fair" / "participants.tsv")}
    assert splits["fairvision-glaucoma-00002"] == "test"


@pytest.mark.parametrize("sign", "@-+=")
def test_folders_that_look_like_formulas_are_found_by_ingest(sign: str, tmp_path: Path) -> None:
    write(tmp_path, find_data_set("kermany").files[0], f"{sign}OCT/train/CNV/CNV-5-1.jpeg")
    assert call("datasets", "tables", "kermany", tmp_path).code == 0
    assert f"/{sign}OCT/train/CNV/CNV-5-1.jpeg" in (tmp_path / "manifest.tsv").read_text()
    found = discover([tmp_path], single_bscans=True)
    assert [file.row.person_id if file.row else "" for file in found.files] == ["kermany-5"]
    assert found.refused == []


def test_tables_that_a_killed_call_left_are_completed(tmp_path: Path) -> None:
    amd = find_data_set("duke_amd")
    write(tmp_path, amd.files[0], "AMD/Farsiu_Ophthalmology_2013_AMD_Subject_1001.mat")
    assert call("datasets", "tables", "duke_amd", tmp_path).code == 0
    labels, manifest = tmp_path / "labels.tsv", tmp_path / "manifest.tsv"
    whole = labels.read_bytes()
    labels.unlink()
    completed = call("datasets", "tables", "duke_amd", tmp_path, "--json")
    assert completed.json["files"] == [str(manifest), str(labels)]
    assert labels.read_bytes() == whole
    labels.unlink()
    manifest.write_text("person_id\tfilepath\nmine\tAMD/a.mat\n")  # not what the command writes
    assert "manifest.tsv already" in call("datasets", "tables", "duke_amd", tmp_path).err
    assert "mine" in manifest.read_text()
    assert not labels.exists()


def test_a_name_that_no_table_can_hold_is_refused(tmp_path: Path) -> None:
    """A ZIP archive from another system may unpack to names that are not in UTF-8."""
    write(tmp_path, find_data_set("kermany").files[0], os.fsdecode(b"Daten \xfc/train/CNV/CNV-1-1.jpeg"))
    refused = call("datasets", "tables", "kermany", tmp_path)
    assert refused.code == 2
    assert "the name Daten \\udcfc/train/CNV/CNV-1-1.jpeg" in refused.err
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_one_process_at_a_time_writes_tables(tmp_path: Path) -> None:
    write(tmp_path, find_data_set("duke_dme").files[0])
    with writer_lock(tmp_path):
        second = call("datasets", "tables", "duke_dme", tmp_path)
    assert (second.code, "another process is writing to" in second.err) == (2, True)
    assert not (tmp_path / "manifest.tsv").exists()


def test_the_commands_of_the_fairvision_guide_end_in_the_documented_split(tmp_path: Path) -> None:
    folder, store = tmp_path / "Glaucoma", tmp_path / "store"
    for number, split in enumerate(("Training", "Training", "Validation", "Test")):
        path = folder / split / f"data_{number:05d}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, oct_bscans=retina(24, 96, 80, seed=number), glaucoma=number % 2, race=1)
    assert call("datasets", "tables", "fairvision", folder).code == 0
    made = call("ingest", folder, "--store", store, "--spacing", "0.25,0.01,0.06", "--workers", 1, "--json", "--quiet")
    assert made.code == 0, made.err
    assert call("split", store).code == 0
    table = Store.open(store).table
    assert sorted(zip(table["person_id"], table["split"], strict=True)) == [
        ("fairvision-00000", "train"),
        ("fairvision-00001", "train"),
        ("fairvision-00002", "val"),
        ("fairvision-00003", "test"),
    ]
    labels = {row["person_id"]: row["glaucoma"] for row in rows(store / "labels.tsv")}
    assert [float(labels[f"fairvision-{number:05d}"]) for number in range(4)] == [0, 1, 0, 1]


def test_people_who_are_numbered_within_a_class_are_counted_once_each(tmp_path: Path) -> None:
    for name in ("CNV/1/a_cnv", "CNV/1/b_normal", "CNV/2/a_cnv", "DRUSEN/1/a_drusen", "NORMAL/2/a_normal"):
        write(tmp_path, find_data_set("neh").files[0], f"{name}.jpg")
    assert check_folder(find_data_set("neh"), tmp_path).kinds[0].people == 4


def test_tables_of_single_bscans_name_each_image(tmp_path: Path) -> None:
    octdl, kermany = tmp_path / "OCTDL", tmp_path / "OCT2017"
    expected = find_data_set("octdl").files[0]
    for name in ("OCTDL/AMD/amd_1047099_1.jpg", "OCTDL/AMD/amd_1047099_2.jpg", "OCTDL/NO/no_9_1.jpg"):
        write(octdl, expected, name)
    lacking = call("datasets", "tables", "octdl", octdl)
    assert lacking.code == 2
    assert "lacks OCTDL_labels.csv" in lacking.err
    table = octdl / "OCTDL_labels.csv"
    table.write_text("file_name,disease,patient_id\namd_1047099_1,AMD,17\namd_1047099_2,AMD,17\n")
    assert "does not list 1 of 3 scans, such as OCTDL/NO/no_9_1.jpg" in call("datasets", "tables", "octdl", octdl).err
    table.write_text(table.read_text() + "no_9_1.jpg,NO,18\n")
    assert call("datasets", "tables", "octdl", octdl, "--json").json["people"] == 2
    assert {(row["person_id"], row["image"], row["label"]) for row in rows(octdl / "labels.tsv")} == {
        ("octdl-17", "amd_1047099_1.jpg", "amd"),
        ("octdl-17", "amd_1047099_2.jpg", "amd"),
        ("octdl-18", "no_9_1.jpg", "no"),
    }
    expected = find_data_set("kermany").files[0]
    for name in (
        "train/CNV/CNV-1-1.jpeg",
        "train/DME/DME-2-1.jpeg",
        "test/CNV/CNV-1-2.jpeg",
        "test/NORMAL/NORMAL-3-1.jpeg",
    ):
        write(kermany, expected, name)
    made = call("datasets", "tables", "kermany", kermany, "--json").json
    assert (made["people"], made["people_in_two_splits"]) == (3, 1)
    splits = {row["person_id"]: row["recommended_split"] for row in rows(kermany / "participants.tsv")}
    assert splits == {"kermany-1": "train", "kermany-2": "train", "kermany-3": "test"}


@pytest.mark.parametrize("verb", ["check", "tables"])
def test_a_folder_that_may_not_be_listed_is_refused(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, find_data_set("fairvision"))
    (tmp_path / "Glaucoma" / "locked").mkdir()
    really = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root, who runs many tests, may list everything
    checked = call("datasets", verb, "fairvision", tmp_path)
    assert checked.code == 2
    assert "locked cannot be listed (Permission denied)" in checked.err
    assert not (tmp_path / "manifest.tsv").exists()
