"""Whose eye it is: folders that only look like ids, and ids that hold a name or a birth date."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydicom.dataset import Dataset

from oct_dicom import make_dataset, retina, save
from octjepa.read.reader import read_volume
from octjepa.read.single_bscan import read_bscan_volume
from octjepa.volume import OCTVolume

PIXELS = retina(frames=4)


def read(path: Path, person: str, name: str = "", born: str = "") -> OCTVolume:
    ds = make_dataset(PIXELS)
    ds.PatientID, ds.PatientName, ds.PatientBirthDate = person, name, born
    return read_volume(save(ds, path))


def test_a_year_as_folder_or_prefix_is_nobodys_id(tmp_path: Path) -> None:
    for number, location in enumerate(("2023/a.dcm", "2023/b.dcm", "2023/2023_macula_cube_l_1.2.3.dcm")):
        volume = read(tmp_path / "export" / location, f"P{number}")
        assert volume.person_id == f"P{number}"
        assert "person_disagrees" not in volume.notes


def test_the_folder_speaks_where_the_header_is_silent_or_the_tree_is_known(tmp_path: Path) -> None:
    silent = read(tmp_path / "1234" / "a.dcm", "")
    assert silent.person_id == "1234"
    assert "person_from_folder" in silent.notes
    for location in ("topcon_maestro2/1234/a.dcm", "x/1234_maestro2_3d_macula_oct_l_1.2.3.dcm"):
        known = read(tmp_path / location, "other")
        assert known.person_id == "1234"
        assert "person_disagrees" in known.notes
    assert read(tmp_path / "x" / "a.dcm", "").notes[0] == "person_unknown"


@pytest.mark.parametrize(
    ("person", "name", "born"),
    [
        ("DOE JOHN 19600101", "DOE^JOHN", ""),
        ("doejohn", "DOE^JOHN", ""),
        ("John.Doe", "DOE^JOHN", ""),
        ("DOE19600101", "Doe^Anna", ""),
        ("müller_7", "MULLER^EVA", ""),
        ("MUELLER1956", "Müller^Eva", ""),
        ("OSTBERG.A", "Östberg^Anna", ""),
        ("LI-0007", "Li^Wei", ""),
        ("P-1960-01-01", "", "19600101"),
        ("010160-1234", "", "19600101"),
        ("A01.01.1960", "", "19600101"),
    ],
)
def test_an_id_that_holds_a_name_or_a_birth_date_becomes_a_pseudonym(
    person: str, name: str, born: str, tmp_path: Path
) -> None:
    volume = read(tmp_path / "a.dcm", person, name, born)
    assert volume.person_id.startswith("p-")
    assert len(volume.person_id) == 14
    assert "person_id_pseudonymised" in volume.notes
    assert read(tmp_path / "b.dcm", person, name, born).person_id == volume.person_id
    for secret in (person, *name.split("^")):
        assert not secret or secret.lower() not in repr(volume.person_id).lower()


@pytest.mark.parametrize(
    ("person", "name", "born"),
    [("1001", "", ""), ("AIREADI-1001", "1001", "19600101"), ("STUDY-0042", "Doe^John", "19600101")],
)
def test_a_plain_study_id_stays(person: str, name: str, born: str, tmp_path: Path) -> None:
    volume = read(tmp_path / "a.dcm", person, name, born)
    assert volume.person_id == person.removeprefix("AIREADI-")
    assert "person_id_pseudonymised" not in volume.notes


@pytest.mark.parametrize(
    ("location", "eye"),
    [
        ("P7/OS/scan.dcm", "OS"),
        ("P7_od.dcm", "OD"),
        ("study/left-eye.dcm", "OS"),
        ("OD/scan_OS.dcm", None),
        ("P7/OS/2021-03-04/scan.dcm", "OS"),
        ("P7/L/2024-01-02/raster/scan.dcm", "OS"),
        ("P7_macula_R.dcm", "OD"),
        ("Links_Auge.dcm", "OS"),
        ("le_matin/scan.dcm", None),
        ("period/mosaic.dcm", None),
        ("P7_R_001.dcm", "OD"),
        ("P7/scan_r1.dcm", None),
        ("ni\u00f1os/scan.dcm", None),
        ("nin\u0303os/scan.dcm", None),
        ("datos_5_a\u00f1os/scan.dcm", None),
        ("f\u00fcr/P7/scan.dcm", None),
        ("AK\u0130L/scan.dcm", None),
        ("ni\u00f1os/P7_OS.dcm", "OS"),
        ("M\u00fcller_R/scan.dcm", "OD"),
    ],
)
def test_the_path_is_the_last_source_of_the_eye(location: str, eye: str | None, tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    del ds.ImageLaterality
    for group in (ds.get("SharedFunctionalGroupsSequence") or [])[:1]:
        group.pop("FrameAnatomySequence", None)
    volume = read_volume(save(ds, tmp_path / location))
    assert volume.laterality == eye
    assert volume.laterality_source == ("path" if eye else "unknown")


def test_eyes_that_disagree_are_noted_and_the_header_wins(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds.ImageLaterality = "R"
    volume = read_volume(save(ds, tmp_path / "P7_OS.dcm"))
    assert (volume.laterality, volume.laterality_source) == ("OD", "header")
    assert "laterality_disagrees" in volume.notes


@pytest.mark.parametrize(
    ("location", "person", "expected", "site"),
    [
        ("zeiss_cirrus/1007/a.dcm", "", "1007", "UW"),
        ("zeiss_cirrus/4007/a.dcm", "AI-READI_4007", "4007", "UCSD"),
        ("x/a.dcm", "aireadi7007", "7007", "UAB"),
        ("zeiss_cirrus/2007/a.dcm", "", "2007", ""),
        ("x/a.dcm", "1007", "1007", ""),
    ],
)
def test_the_site_is_that_of_an_ai_readi_id_where_the_tree_or_prefix_shows_one(
    location: str, person: str, expected: str, site: str, tmp_path: Path
) -> None:
    volume = read(tmp_path / location, person)
    assert (volume.person_id, volume.site) == (expected, site)


def test_a_visit_is_the_same_within_a_session_and_tells_no_date(tmp_path: Path) -> None:
    visits = []
    for number, (person, study) in enumerate((("A", "1.2.3"), ("A", "1.2.3"), ("A", "1.2.4"), ("B", "1.2.3"))):
        ds = make_dataset(PIXELS)
        ds.PatientID, ds.StudyInstanceUID, ds.StudyDate = person, study, "20240229"
        visits.append(read_volume(save(ds, tmp_path / f"{number}.dcm")).visit)
    assert visits[0] == visits[1]
    assert len(set(visits)) == 3
    assert not any("2024" in visit and "0229" in visit for visit in visits)


@pytest.mark.filterwarnings("ignore:Invalid value for VR UI")
@pytest.mark.parametrize("placeholder", ["0", "ANONYMIZED"])
def test_placeholder_uids_join_neither_people_nor_visits(placeholder: str, tmp_path: Path) -> None:
    volumes = []
    for number in range(2):
        ds = make_dataset(retina(frames=4, seed=number))
        ds.PatientID, ds.StudyDate = "", f"2024022{number}"
        ds.SOPInstanceUID = ds.StudyInstanceUID = placeholder
        volumes.append(read_volume(save(ds, tmp_path / f"{number}.dcm")))
    assert volumes[0].person_id != volumes[1].person_id
    assert volumes[0].visit != volumes[1].visit
    assert [volume.sop_instance_uid for volume in volumes] == ["", ""]  # else ingest refuses one of them as a duplicate


@pytest.mark.parametrize("person", ["ANONYMOUS", "anonymized", " Unknown ", "0", "REMOVED"])
def test_a_placeholder_is_nobodys_id(person: str, tmp_path: Path) -> None:
    volumes = [read(tmp_path / name, person) for name in ("a.dcm", "b.dcm")]
    assert volumes[0].person_id != volumes[1].person_id
    assert {"person_id_placeholder", "person_unknown"} <= set(volumes[0].notes)


def test_0_in_a_manifest_is_an_id_and_a_placeholder_there_is_none(tmp_path: Path) -> None:
    """People who are counted from 0 meet the rows of participants.tsv, where 0 is an id as well."""
    for stated, expected in (("0", "0"), ("NA", "H17")):
        folder = tmp_path / stated
        folder.mkdir()
        (folder / "manifest.tsv").write_text(f"filepath\tperson_id\n/a.dcm\t{stated}\n")
        assert read(folder / "a.dcm", "H17").person_id == expected


@pytest.mark.parametrize("placeholder", ["NA", "nan", "Not reported", "-"])
def test_placeholders_in_a_manifest_do_not_hide_what_the_file_states(placeholder: str, tmp_path: Path) -> None:
    columns = ("manufacturers_model_name", "anatomic_region", "laterality", "sop_instance_uid")
    (tmp_path / "manifest.tsv").write_text(
        "\t".join(("filepath", "manufacturer", *columns)) + "\n" + "\t".join(("/a.dcm", "Topcon", *[placeholder] * 4))
    )
    volume = read(tmp_path / "a.dcm", "7")
    assert (volume.device, volume.region, volume.laterality) == ("topcon_maestro2", "Macula", "OD")
    assert not [note for note in volume.notes if "disagree" in note]


def test_a_placeholder_in_a_header_is_no_device_and_no_protocol(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds.Manufacturer, ds.ManufacturerModelName, ds.ProtocolName = "Topcon", "REMOVED", "ANONYMIZED"
    volume = read_volume(save(ds, tmp_path / "a.dcm"))
    assert (volume.device, volume.protocol) == ("topcon", "")


def test_a_year_is_nobody_even_where_the_header_is_silent(tmp_path: Path) -> None:
    assert "person_unknown" in read(tmp_path / "2019" / "a.dcm", "").notes
    assert read(tmp_path / "topcon_triton" / "1950" / "a.dcm", "").person_id == "1950"


def test_several_ids_in_one_field_are_written_as_dicom_does(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds.PatientID = ["12", "34"]
    assert read_volume(save(ds, tmp_path / "a.dcm")).person_id == "12\\34"


def test_most_sources_decide_the_eye(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds.ImageLaterality = "L"
    anatomy = Dataset()
    anatomy.FrameLaterality = "R"
    ds.SharedFunctionalGroupsSequence[0].FrameAnatomySequence = [anatomy]
    volume = read_volume(save(ds, tmp_path / "1234_maestro2_3d_macula_oct_r_1.2.3.dcm"))
    assert (volume.laterality, volume.laterality_source) == ("OD", "frame")
    assert "laterality_disagrees" in volume.notes


@pytest.mark.parametrize("no_eye", ["U", "B", "UNKNOWN"])
def test_a_laterality_that_names_no_eye_does_not_hide_another(no_eye: str, tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    shared, first = Dataset(), Dataset()
    shared.FrameLaterality, first.FrameLaterality = no_eye, "L"
    ds.SharedFunctionalGroupsSequence[0].FrameAnatomySequence = [shared]
    ds.ImageLaterality, ds.Laterality = no_eye, "L"
    volume = read_volume(save(ds, tmp_path / "a.dcm"))
    assert (volume.laterality, volume.laterality_source) == ("OS", "header")
    del ds.Laterality
    ds.PerFrameFunctionalGroupsSequence[0].FrameAnatomySequence = [first]
    volume = read_volume(save(ds, tmp_path / "b.dcm"))
    assert (volume.laterality, volume.laterality_source) == ("OS", "frame")


def test_a_file_name_is_one_source_of_the_eye(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds.ImageLaterality = "R"
    ds.SharedFunctionalGroupsSequence[0].FrameAnatomySequence = []
    name = "1001_maestro2_3d_macula_oct_l_1.2.3.dcm"
    volume = read_volume(save(ds, tmp_path / name))
    assert (volume.laterality, volume.laterality_source) == ("OD", "header")
    assert "laterality_disagrees" in volume.notes
    volume = read_volume(save(ds, tmp_path / "OS" / name))  # the folder is a source of its own
    assert (volume.laterality, volume.laterality_source) == ("OS", "name")


def test_a_row_of_another_scan_is_noticed(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    path = save(ds, tmp_path / "a.dcm")
    (tmp_path / "manifest.tsv").write_text(
        "person_id\tfilepath\tsop_instance_uid\tnumber_of_frames\tpixel_spacing\n9\ta.dcm\t1.2.3\t7\t[0.0019, 0.05]\n"
    )
    notes = read_volume(path).notes
    assert {"manifest_uid_disagrees", "manifest_frames_disagree", "manifest_spacing_disagrees"} <= set(notes)


@pytest.mark.parametrize("suffix", ["npy", "png"])
def test_the_id_of_an_unknown_person_depends_on_the_pixels_and_not_on_the_path(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = []
    for folder, seed in ((b"anna", 1), (b"M\xfcnchen", 1), (b"ben", 2)):  # the second is no UTF-8
        home = tmp_path / os.fsdecode(folder)
        home.mkdir()
        monkeypatch.chdir(home)
        pixels = retina(seed=seed)
        if suffix == "npy":
            np.save("scan.npy", pixels)
            volume = read_volume("scan.npy", spacing_mm=(0.05, 0.0026, 0.0117))
        else:
            Image.fromarray(pixels[0]).save("scan.png")
            volume = read_bscan_volume(Path("scan.png"))
            assert volume.visit
        assert "person_unknown" in volume.notes
        ids.append((volume.person_id, volume.visit))
    assert ids[0] == ids[1]
    assert ids[0][0] != ids[2][0]
    assert ids[0][0].startswith("unknown-")
