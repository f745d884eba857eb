"""Devices under their own names: listed ones by the words of their headers, all others by make and model."""

from __future__ import annotations

from pathlib import Path

import pytest

from oct_dicom import make_dataset, retina, save
from octjepa.errors import VolumeRejected
from octjepa.read.devices import describe_device, parse_device, pick_device, stated_device
from octjepa.read.reader import describe_file, read_volume

PIXELS = retina(8, 64, 48)
STATED = [
    ("Heidelberg Engineering", "Spectralis", "heidelberg_spectralis"),
    ("Heidelberg Engineering", "ANTERION", "heidelberg_anterion"),
    ("Heidelberg Engineering", "HRA2", "heidelberg_hra2"),
    ("Carl Zeiss Meditec", "CIRRUS HD-OCT 5000", "zeiss_cirrus"),
    ("Carl Zeiss Meditec, Inc.", "HD-OCT 6000", "zeiss_cirrus"),
    ("Carl Zeiss Meditec", "PLEX Elite 9000", "zeiss_plex_elite"),
    ("Carl Zeiss Meditec", "Stratus OCT", "zeiss_stratus"),
    ("Carl Zeiss Meditec", "Visucam", "zeiss_visucam"),
    ("Topcon", "3DOCT-1Maestro2", "topcon_maestro2"),
    ("Topcon", "3DOCT-1Maestro", "topcon_maestro"),
    ("TOPCON", "3DOCT-1000", "topcon_3doct_1000"),
    ("TOPCON", "DRI OCT Triton", "topcon_triton"),
    ("Optovue, Inc.", "Avanti RTVue XR", "optovue_avanti"),
    ("Optovue", "RTVue-100", "optovue_rtvue"),
    ("NIDEK CO., LTD.", "RS-3000 Advance", "nidek_rs_3000"),
    ("NIDEK", "Mirante", "nidek_mirante"),
    ("Canon Inc.", "OCT-HS100", "canon_oct_hs100"),
    ("Huvitz", "HOCT-1F", "huvitz_hoct"),
    ("Bioptigen", "Envisu C2300", "bioptigen_envisu"),
    ("Leica Microsystems", "Envisu R2210", "bioptigen_envisu"),
    ("Acme GmbH", "Acme X-1 (Rev. B)", "acme_x_1_rev_b"),
    ("", "Topcon Maestro2", "topcon_maestro2"),
    ("", "zeiss_plex_elite", "zeiss_plex_elite"),
]


@pytest.mark.parametrize(("make", "model", "name"), STATED, ids=[name for *_, name in STATED])
def test_every_device_is_itself(make: str, model: str, name: str) -> None:
    assert stated_device(make, model) == (name, True)


@pytest.mark.parametrize(
    ("make", "model", "name"),
    [
        ("Zeiss", "", "zeiss"),
        ("Heidelberg Engineering", "", "heidelberg"),
        ("", "Optovue", "optovue"),
        ("Unknown", "OCT", ""),
        ("", "", ""),
    ],
)
def test_a_make_alone_is_no_model(make: str, model: str, name: str) -> None:
    assert stated_device(make, model) == (name, False)


def test_names_of_files_and_folders_name_products_alone() -> None:
    assert parse_device("1001_spectralis_ppol_mac_hr_oct_l_1.3.6") == "heidelberg_spectralis"
    assert parse_device("optovue_avanti") == "optovue_avanti"
    # An Avanti may be a person, and a stratus a project.
    assert parse_device("Avanti_Patel_OD") == parse_device("stratus_study_7") == parse_device("heidelberg") == ""


def test_a_folder_completes_a_make_and_never_replaces_a_stated_device() -> None:
    notes: list[str] = []
    assert pick_device([("zeiss", False)], ["", "zeiss_cirrus"], notes) == "zeiss_cirrus"
    assert not notes
    assert pick_device([("acme_x_1", True)], ["zeiss_cirrus"], notes) == "acme_x_1"
    assert pick_device([("acme", False)], ["zeiss_cirrus"], notes) == "acme"
    assert notes == ["device_disagrees"] * 2
    assert pick_device([("", False)], ["", ""], notes) == "unknown"


def test_an_unlisted_device_keeps_its_name_in_a_tree_of_another(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds.Manufacturer, ds.ManufacturerModelName, ds.ProtocolName = "NIDEK", "Mirante", "macula line"
    volume = read_volume(save(ds, tmp_path / "zeiss_cirrus" / "eye.dcm"))
    assert volume.device == "nidek_mirante"
    assert "device_disagrees" in volume.notes
    assert describe_file(save(ds, tmp_path / "eye.dcm"))["modality"] == ""


@pytest.mark.parametrize("model", ["ANTERION", "Anterion 1.5"])
def test_a_device_of_the_anterior_segment_is_refused_for_that(model: str, tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds.Manufacturer, ds.ManufacturerModelName = "Heidelberg Engineering", model
    with pytest.raises(VolumeRejected, match=r"heidelberg_anterion .* images the anterior segment") as caught:
        read_volume(save(ds, tmp_path / "eye.dcm"))
    assert caught.value.reason == "not_retina"


def test_make_model_and_method_of_a_device(tmp_path: Path) -> None:
    plex = describe_device("zeiss_plex_elite")
    assert (plex.make, plex.model, plex.modality) == ("Zeiss", "PLEX Elite", "SS-OCT")
    other = describe_device("acme_x_1")
    assert (other.make, other.model, other.modality, other.images_retina) == ("acme", "x 1", "", True)
    assert describe_file(save(make_dataset(PIXELS), tmp_path / "eye.dcm"))["modality"] == "SD-OCT"
