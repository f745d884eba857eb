"""No stored text repeats who the person is: names in any script, birth dates, ids, in every element that is stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from oct_dicom import make_dataset, retina, save
from octjepa.ingest.audit import audit
from octjepa.read.personal_data import identifies_person, mask_path
from octjepa.read.reader import read_volume

PIXELS = retina()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("LiBo-3", "Li^Bo"),
        ("boli_od", "Li^Bo"),
        ("李波", "Li^Bo=李^波"),
        ("scans_波李_1", "李^波"),
        ("山田太郎", "Yamada^Tarou=山田^太郎=やまだ^たろう"),
        ("김민수", "Kim^Minsu=김^민수"),
        ("jdoe3", "Doe^Jane"),
        ("李波", "李^波".encode("gb18030").decode("latin-1")),
        ("müller_os", "Mueller^Anna"),
    ],
)
def test_names_of_any_script_and_length_are_found(text: str, name: str) -> None:
    assert identifies_person(text, name, "")
    assert mask_path(f"study/{text}/scan.dcm", name, "") == "study/***/scan.dcm"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("oct_1", "Li^Bo"),
        ("library", "Li^Bo"),
        ("p7", "Li^Bo"),
        ("maestro2 3d macula oct", "Doe^Jane"),
        ("李", "李^波"),
    ],
)
def test_short_parts_are_not_found_by_chance(text: str, name: str) -> None:
    assert not identifies_person(text, name, "")


def test_elements_that_repeat_the_person_are_not_stored(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds.ProtocolName = "macula Doe 1950"
    ds.Manufacturer, ds.ManufacturerModelName = "Maker", "OCT of Jane Doe"
    ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = "1.2.3.19500101.7"
    path = save(ds, tmp_path / "scan.dcm")
    volume = read_volume(path)
    assert "personal_text_dropped=3" in volume.notes
    stored = repr([volume.protocol, volume.device, volume.region, volume.sop_instance_uid, volume.notes]).lower()
    assert "doe" not in stored
    assert "1950" not in stored
    assert volume.sop_instance_uid == read_volume(path).sop_instance_uid != ""
    assert "doe" not in repr(audit([path])).lower()


def test_ids_and_names_of_others_are_not_stored_either(tmp_path: Path) -> None:
    for field, text in (("AccessionNumber", "ACC77123"), ("OperatorsName", "Smith^Eve"), ("PatientID", "KL-4711-x")):
        ds = make_dataset(PIXELS)
        setattr(ds, field, text)
        ds.ProtocolName = f"macula {text.replace('^', ' ')}"
        volume = read_volume(save(ds, tmp_path / "scan.dcm"))
        assert volume.protocol == ""
    ordinary = read_volume(save(make_dataset(PIXELS), tmp_path / "scan.dcm"))
    assert ordinary.protocol == "maestro2 3d macula oct"
    assert ordinary.device == "topcon_maestro2"
    assert not [note for note in ordinary.notes if "personal" in note]


def test_a_modality_or_class_of_free_text_is_not_repeated(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds.Modality, ds.SOPClassUID = "DOE", "1.2.840.10008.5.1.4.1.1.7.2"
    path = save(ds, tmp_path / "scan.dcm")
    with pytest.raises(Exception, match=r"not_structural_oct: SOP class [\d.]+, modality unknown"):
        read_volume(path)
    assert audit([path]).by_kind == {"dicom of unknown modality": 1}
