"""Vendor files through the front door: recognised, ingested scan by scan, silent on stdout, never a crash."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from oct_dicom import make_dataset, retina, save
from octjepa.errors import VolumeRejected, install_command
from octjepa.ingest import discover
from octjepa.read import formats
from octjepa.read.reader import describe_file, read_volume
from vendor_files import (
    bioptigen_bytes,
    e2e_bytes,
    lines,
    topcon_bytes,
    topcon_deep,
    topcon_jpegs,
    vol_bytes,
    write_heyex_xml,
    write_optovue,
    zeiss_bytes,
)

PIXELS = retina(6, 64, 48)
LINEAR = np.maximum((PIXELS.astype(np.float32) / 255) ** 4, 1e-12)
CUBE = "P1_Macular Cube 24x16_5-6-2020_1-2-3_OD_sn1_cube_z.img"
SPACING = (0.1, 0.003, 0.02)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Format -> a file of it."""
    contents = {
        "heidelberg_vol": ("a.vol", vol_bytes(LINEAR, lines(6))),
        "heidelberg_e2e": ("a.e2e", e2e_bytes([LINEAR])),
        "topcon": ("a.fda", topcon_bytes(topcon_jpegs(PIXELS), "@IMG_JPEG")),
        "topcon_fds": ("a.fds", topcon_bytes(topcon_deep(PIXELS.astype(np.uint16) * 9), "@IMG_SCAN_03", "FDS")),
        "zeiss_img": (CUBE, zeiss_bytes(retina(16, 1024, 24))),
        "bioptigen_oct": ("b_OS.OCT", bioptigen_bytes(PIXELS.astype(np.uint16) * 9)),
    }
    made = {}
    for format, (name, content) in contents.items():
        made[format] = tmp_path / name
        made[format].write_bytes(content)
    made["heyex_xml"] = write_heyex_xml(tmp_path / "export", [PIXELS])
    made["optovue_oct"] = write_optovue(tmp_path / "o.oct", [PIXELS / np.float32(300)])
    return made


@pytest.mark.slow
def test_every_format_is_recognised_read_and_silent(files: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    for format, path in files.items():
        assert formats.recognise(path) == format.removesuffix("_fds")
        volume = read_volume(path, spacing_mm=SPACING)
        assert volume.format.startswith(format.split("_")[0])
        assert volume.spacing_mm[1:] == SPACING[1:]
    assert capfd.readouterr().out == ""


def test_other_files_of_the_same_suffix_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.xml", "values.img"):
        path = tmp_path / name
        path.write_bytes(b"<settings/>")
        assert formats.recognise(path) is None


def test_the_pictures_of_a_heyex_export_are_no_scan_of_their_own(tmp_path: Path) -> None:
    path = write_heyex_xml(tmp_path / "export", [PIXELS])
    assert [file.path.name for file in discover([tmp_path]).files] == [path.name]


def test_each_scan_of_a_file_is_a_scan_of_the_data_set(tmp_path: Path) -> None:
    path = tmp_path / "eyes.e2e"
    path.write_bytes(e2e_bytes([LINEAR, LINEAR[::-1]]))
    found = discover([tmp_path]).files
    assert [(file.name, file.member) for file in found] == [("eyes.e2e#1", "1"), ("eyes.e2e#2", "2")]
    assert len({file.key for file in found}) == 2
    eyes = [read_volume(file.path, member=file.member, spacing_mm=SPACING) for file in found]
    assert [eye.laterality for eye in eyes] == ["OD", "OS"]
    assert not {"slice", "column"} & set(eyes[0].uncertain)  # the user's word
    assert len({eye.person_id for eye in eyes}) == 1
    path.write_bytes(path.read_bytes()[:3000])  # cannot be looked into: one entry, for the ledger
    assert [file.name for file in discover([tmp_path]).files] == ["eyes.e2e"]


def test_without_the_extra_the_reason_names_it(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "eyepy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "eyepy", None)
    with pytest.raises(VolumeRejected, match=re.escape(install_command("vendor"))) as caught:
        read_volume(files["heidelberg_e2e"])
    assert caught.value.reason == "no_decoder"
    for format in ("heidelberg_vol", "bioptigen_oct"):  # need none
        assert read_volume(files[format]).format == format


def test_inspect_says_which_formats_no_real_file_has_proved(files: dict[str, Path], tmp_path: Path) -> None:
    for format, path in files.items():
        described = describe_file(path, SPACING)
        assert described["format"].startswith(format.split("_")[0])
        assert described["experimental"] is (format != "heyex_xml")  # of which there are genuine exports
    refused = tmp_path / "cut.vol"
    refused.write_bytes(files["heidelberg_vol"].read_bytes()[:3000])
    described = describe_file(refused)
    assert (described["kind"], described["format"], described["experimental"]) == ("rejected", "heidelberg_vol", True)
    known = describe_file(save(make_dataset(PIXELS), tmp_path / "scan.dcm"))
    assert (known["format"], known["experimental"]) == ("dicom", False)
    page = Path(__file__).parents[3].joinpath("docs", "formats.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    for name in ("Heidelberg raw export", "Topcon", "Zeiss Cirrus research export", "Optovue"):
        assert "experimental" in rows[name]
    assert not any("experimental" in row for name, row in rows.items() if name.startswith("DICOM"))


@pytest.mark.parametrize("kind", ["cut", "flipped", "huge", "random"])
def test_damaged_files_end_in_a_reason(files: dict[str, Path], kind: str) -> None:
    rng = np.random.default_rng(5)
    for path in files.values():
        whole = path.read_bytes()
        for _ in range(12):
            damaged = bytearray(whole)
            at = int(rng.integers(0, min(len(whole), 4000) - 4))
            if kind == "cut":
                damaged = damaged[: int(rng.integers(1, len(whole)))]
            elif kind == "flipped":
                damaged[at] ^= 1 << int(rng.integers(0, 8))
            elif kind == "huge":
                damaged[at : at + 4] = b"\xff\xff\xff\x7f"
            else:
                damaged[8:] = rng.integers(0, 256, 3000, dtype=np.uint8).tobytes()
            path.write_bytes(damaged)
            description = describe_file(path, SPACING)
            assert description["kind"] == "rejected" or description["shape"][1:] in ([64, 48], [1024, 24]), path.name
            for reason in description["reasons"]:
                assert reason["reason"] != "reader_failed", f"{path.name}: {reason['detail']}"
                assert not any(secret in reason["detail"] for secret in ("Ada", "Lovelace", "P-77", "1950"))
        path.write_bytes(whole)
