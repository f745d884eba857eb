"""The words of a proprietary file decide its device; the one that a format usually comes from is the last resort."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oct_dicom import retina
from octjepa.errors import VolumeRejected
from octjepa.read.devices import named_model
from octjepa.read.formats.vendor import heyex_e2e, heyex_xml
from octjepa.read.formats.vendor.headerless import read_zeiss
from octjepa.read.reader import assemble
from vendor_files import e2e_bytes, write_heyex_xml, zeiss_bytes

PIXELS = retina(6, 64, 48)
LINEAR = np.maximum((PIXELS.astype(np.float32) / 255) ** 4, 1e-12)


@pytest.mark.parametrize(
    ("texts", "make", "usual", "model"),
    [
        ((), "Heidelberg Engineering", "Spectralis", "Spectralis"),
        (("Heidelberg Retina Angiograph", "HRA"), "Heidelberg Engineering", "Spectralis", "Spectralis"),
        (("", "ANTERION"), "Heidelberg Engineering", "Spectralis", "ANTERION"),
        (("Topcon Triton",), "Heidelberg Engineering", "Spectralis", "Spectralis"),  # not of this maker
        (("P1_PLEX Elite Angio_OD",), "Zeiss", "Cirrus", "PLEX Elite"),
        (("P1_Macular Cube 512x128_OD",), "Zeiss", "Cirrus", "Cirrus"),
    ],
)
def test_the_first_listed_model_of_the_maker_counts(texts: tuple[str, ...], make: str, usual: str, model: str) -> None:
    assert named_model(texts, make, usual) == model


def read_e2e(path: Path, **records: object) -> str:
    path.write_bytes(e2e_bytes([LINEAR], **records))  # type: ignore[arg-type]
    return assemble(heyex_e2e.read_e2e(path), path, spacing_mm=(0.1, 0.003872, 0.02)).device


def test_e2e_states_its_device_and_what_it_examined(tmp_path: Path) -> None:
    pytest.importorskip("eyepy")
    path = tmp_path / "scan.e2e"
    hra = ("Heidelberg Retina Angiograph", "HRA")
    assert read_e2e(path) == read_e2e(path, device=hra, structure="Retina") == "heidelberg_spectralis"
    for records in (
        {"device": ("ANTERION", "")},
        {"device": hra, "setup": "x\0ANTERION\0"},
        {"device": hra, "structure": "Cornea"},
    ):
        with pytest.raises(VolumeRejected) as refused:
            read_e2e(path, **records)
        assert refused.value.reason == "not_retina"


def test_heyex_xml_is_believed_where_it_names_its_device(tmp_path: Path) -> None:
    path = write_heyex_xml(tmp_path / "plain", [PIXELS])
    assert assemble(heyex_xml.read_xml(path), path).device == "heidelberg_spectralis"
    path.write_text(
        path.read_text().replace("<Series>", "<Device><Name>x</Name></Device><Series><DeviceName>ANTERION</DeviceName>")
    )
    with pytest.raises(VolumeRejected) as refused:
        assemble(heyex_xml.read_xml(path), path)
    assert refused.value.reason == "not_retina"


def test_img_of_another_zeiss_device_keeps_its_name_and_no_depth_of_a_cirrus(tmp_path: Path) -> None:
    path = tmp_path / "PX1_PLEX Elite Angio (6mmx6mm)_5-6-2020_10-1-2_OS_sn12_cube_z.img"
    path.write_bytes(zeiss_bytes(retina(16, 1024, 16)))
    scan = read_zeiss(path)
    assert scan.spacing_mm == (6 / 16, None, 6 / 16)
    assert assemble(scan, path, spacing_mm=(0.03, 0.00195, 0.03)).device == "zeiss_plex_elite"
