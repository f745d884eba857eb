"""Personal data are named and counted, never quoted; paths that tell who somebody is are masked."""

from __future__ import annotations

from pathlib import Path

import pytest

from oct_dicom import make_dataset, retina, save
from octjepa.read.personal_data import (
    BURNED_IN,
    PRIVATE,
    count_fields,
    mask_path,
    personal_fields,
    read_stated_person,
)
from octjepa.read.reader import read_volume

PIXELS = retina(frames=4, rows=32, columns=32)


def test_filled_fields_are_named_and_placeholders_are_not() -> None:
    ds = make_dataset(PIXELS)
    ds.PatientName, ds.PatientBirthDate, ds.OperatorsName = "Doe^Jane", "19500101", "ANONYMOUS"
    ds.InstitutionName, ds.DeviceSerialNumber, ds.PatientComments = "Eye Hospital", "0", "   "
    assert personal_fields(ds) == ("PatientName", "PatientBirthDate", "InstitutionName")
    ds.add_new(0x00091010, "LO", "anything")
    ds.BurnedInAnnotation = "YES"
    assert personal_fields(ds)[-2:] == (PRIVATE, BURNED_IN)


def test_a_private_creator_alone_is_no_personal_data() -> None:
    ds = make_dataset(PIXELS)
    ds.PatientName = ds.PatientBirthDate = ""
    ds.add_new(0x00090010, "LO", "VENDOR 1.0")
    assert personal_fields(ds) == ()


def test_a_value_that_cannot_be_parsed_still_counts(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds["PatientBirthDate"]._value = "29 Quixano 1947"
    assert "PatientBirthDate" in personal_fields(ds)


def test_a_volume_names_the_fields_of_its_file(tmp_path: Path) -> None:
    volume = read_volume(save(make_dataset(PIXELS), tmp_path / "scan.dcm"))
    assert "PatientName" in volume.personal
    assert "Doe" not in repr(volume.personal) + volume.source


def test_counts_distinguish_direct_from_indirect() -> None:
    counts = count_fields([("PatientName", "StudyDate"), ("StudyDate",), ()])
    assert counts == {
        "PatientName": {"files": 1, "kind": "name", "direct": True},
        "StudyDate": {"files": 2, "kind": "date", "direct": False},
    }


@pytest.mark.parametrize(
    ("path", "masked"),
    [
        ("Doe_Jane/OD/scan.dcm", "***/OD/scan.dcm"),
        ("P7/doe-19500101-macula.dcm", "P7/***.dcm"),
        ("1950-01-01/scan.dcm", "***/scan.dcm"),
        ("010150/b1.png", "***/b1.png"),
        ("P7/1.2.276.0.195001011.dcm", None),
        ("heidelberg_spectralis/1001/1001_spectralis_oct_l_1.2.840.500101.7.dcm", None),
        ("JaneDoeLeft.nii.gz", "***.gz"),
        ("scan.dcm", None),
    ],
)
def test_paths_with_personal_data_are_masked_part_by_part(path: str, masked: str | None) -> None:
    assert mask_path(path, "Doe^Jane", "19500101") == (masked or path)
    assert mask_path(path, "", "") == path


def test_a_refused_files_name_is_masked_by_its_own_header(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    del ds.PixelData
    path = save(ds, tmp_path / "doe.dcm")
    assert mask_path("jane/doe.dcm", *read_stated_person(path)[:2]) == "***/***.dcm"
    text = tmp_path / "note.txt"
    text.write_text("no DICOM")
    assert mask_path("jane/note.txt", *read_stated_person(text)[:2]) == "jane/note.txt"
