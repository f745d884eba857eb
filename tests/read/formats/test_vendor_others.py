"""Topcon, Zeiss, Bioptigen and Optovue files become the scan that was written."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from oct_dicom import retina
from octjepa.errors import VolumeRejected
from octjepa.read.formats import companion_names, recognise
from octjepa.read.formats.vendor.bioptigen import members as bioptigen_members
from octjepa.read.formats.vendor.bioptigen import read_bioptigen
from octjepa.read.formats.vendor.headerless import members as optovue_members
from octjepa.read.formats.vendor.headerless import read_optovue, read_zeiss
from octjepa.read.formats.vendor.topcon import read_topcon
from octjepa.read.reader import assemble
from vendor_files import (
    bioptigen_bytes,
    topcon_bytes,
    topcon_deep,
    topcon_jpegs,
    write_optovue,
    zeiss_bytes,
)

PIXELS = retina(6, 64, 48)
DEEP = PIXELS.astype(np.uint16) * 16
SECRETS = ("Ada", "Lovelace", "1950", "P-77")


def reason_of(error: VolumeRejected) -> str:
    assert not any(secret in str(error) for secret in SECRETS)
    return error.reason


# Topcon


def test_fda_keeps_pixels_spacing_and_identity(tmp_path: Path) -> None:
    pixels = retina(11, 64, 512)
    path = tmp_path / "scan.fda"
    path.write_bytes(topcon_bytes(topcon_jpegs(pixels), "@IMG_JPEG"))
    volume = assemble(read_topcon(path), path)
    np.testing.assert_array_equal(volume.pixels, pixels)
    assert volume.spacing_mm == pytest.approx((0.1, 0.0026, 6 / 512))  # 1 mm over 10 gaps, 6 mm over 512 columns
    assert set(volume.provenance.values()) == {"header"}
    assert volume.laterality == "OS"
    assert volume.device == "topcon_maestro2"
    assert volume.person_id == "P-77"
    assert volume.personal == (
        "PatientName",
        "PatientBirthDate",
        "PatientSex",
        "StudyDate",
        "DeviceSerialNumber",
    )
    assert read_topcon(path).header.person_name == "Lovelace Ada"


@pytest.mark.parametrize(("chunk", "kind"), [("@IMG_SCAN_03", "FDS"), ("@IMG_MOT_COMP_03", "FDA")])
def test_deep_topcon_frames_keep_their_axes(tmp_path: Path, chunk: str, kind: str) -> None:
    path = tmp_path / "scan.fds"
    path.write_bytes(topcon_bytes(topcon_deep(DEEP, mode=3), chunk, kind))
    scan = read_topcon(path)
    np.testing.assert_allclose(scan.pixels, DEEP / 4095 * 255, atol=0.51)
    assert scan.pattern == "radial"
    assert "scaled_from_12_bit" in scan.notes
    assert scan.format == ("topcon_fds" if kind == "FDS" else "topcon_fda")


def test_topcon_lines_that_cross_are_not_a_raster(tmp_path: Path) -> None:
    path = tmp_path / "scan.fda"
    for mode, pattern in ((2, "raster"), (3, "radial"), (11, "radial")):
        path.write_bytes(topcon_bytes(topcon_jpegs(retina(10, 64, 512), mode), "@IMG_JPEG"))
        volume = assemble(read_topcon(path), path)
        assert volume.pattern == pattern
        assert volume.provenance["slice"] == ("header" if pattern == "raster" else "scan_pattern")


def test_one_broken_topcon_frame_is_filled_and_more_are_refused(tmp_path: Path) -> None:
    pixels = retina(12, 64, 48)
    jpegs, path = bytearray(topcon_jpegs(pixels)), tmp_path / "scan.fda"
    start = 25
    for index in range(12):
        (length,) = struct.unpack_from("<I", jpegs, start)
        if index == 5:
            jpegs[start + 4 : start + 4 + length] = bytes(length)
        start += 4 + length
    path.write_bytes(topcon_bytes(bytes(jpegs), "@IMG_JPEG"))
    scan = read_topcon(path)
    assert "gap_frames=1" in scan.notes
    np.testing.assert_array_equal(np.delete(scan.pixels, 5, 0), np.delete(pixels, 5, 0))
    path.write_bytes(topcon_bytes(bytes(jpegs[:25]) + bytes(4) * 12, "@IMG_JPEG"))
    with pytest.raises(VolumeRejected) as caught:
        read_topcon(path)
    assert reason_of(caught.value) == "frames_broken"


def test_topcon_faults_have_their_reasons(tmp_path: Path) -> None:
    path, images = tmp_path / "scan.fda", topcon_jpegs(PIXELS)
    whole = topcon_bytes(images, "@IMG_JPEG")
    huge = bytearray(images)
    struct.pack_into("<I", huge, 17, 4_000_000_000)
    faults = [
        ("truncated", whole[:-200]),
        ("truncated", whole[:-1]),
        ("broken_header", b"TOCF" + whole[4:]),
        ("broken_header", topcon_bytes(bytes(huge), "@IMG_JPEG")),
        ("no_pixel_data", topcon_bytes(b"", "@IMG_FUNDUS")),
        ("frames_missing", topcon_bytes(images[: len(images) // 2], "@IMG_JPEG")),
        ("truncated", topcon_bytes(topcon_deep(DEEP)[:-10], "@IMG_SCAN_03", "FDS")),
    ]
    for reason, content in faults:
        path.write_bytes(content)
        with pytest.raises(VolumeRejected) as caught:
            read_topcon(path)
        assert reason_of(caught.value) == reason


def test_an_encrypted_topcon_patient_is_reported_and_nobody_invented(tmp_path: Path) -> None:
    path = tmp_path / "scan.fda"
    whole = topcon_bytes(topcon_jpegs(PIXELS), "@IMG_JPEG", PATIENT_INFO_03=bytes(600))
    path.write_bytes(whole.replace(b"@PATIENT_INFO_02", b"@PATIENT_INFO_XX"))
    scan = read_topcon(path)
    assert scan.header.person_id == ""
    assert "OtherPatientIDs" in scan.personal


# Zeiss


@pytest.mark.parametrize(
    ("name", "shape", "spacing"),
    [
        ("PX1_Macular Cube 64x16_5-6-2020_10-1-2_OS_sn12_cube_z.img", (16, 1024, 64), (None, None, None)),
        ("PX1_RODRIGUEZ_Optic Disc Cube 32x10_5-6-2020_10-1-2_OS_sn12_cube_z.img", (10, 1024, 32), (None, None, None)),
        ("PX1_Angio (6mmx6mm)_5-6-2020_10-1-2_OS_sn12_cube_z.img", (16, 1024, 16), (6 / 16, 2 / 1024, 6 / 16)),
        ("PX1_Angiography 3x3 mm_5-6-2020_10-1-2_OS_sn12_cube_z.img", (16, 1024, 16), (3 / 16, 2 / 1024, 3 / 16)),
    ],
)
def test_img_is_turned_and_its_name_is_read(
    tmp_path: Path, name: str, shape: tuple[int, int, int], spacing: tuple[float | None, ...]
) -> None:
    pixels, path = retina(*shape), tmp_path / name
    path.write_bytes(zeiss_bytes(pixels))
    scan = read_zeiss(path)
    np.testing.assert_array_equal(scan.pixels, pixels)
    assert (scan.spacing_mm, scan.header.laterality, scan.header.visit) == (spacing, "OS", "20200506")
    assert scan.header.person_id == ("PX1_RODRIGUEZ" if "ROD" in name else "PX1")


@pytest.mark.slow
def test_img_gets_the_fixed_field_of_the_cirrus_cube(tmp_path: Path) -> None:
    path = tmp_path / "PX1_Optic Disc Cube 200x200_5-6-2020_10-1-2_OD_sn12_cube_z.img"
    path.write_bytes(zeiss_bytes(retina(200, 1024, 200)))
    volume = assemble(read_zeiss(path), path)
    assert volume.spacing_mm == pytest.approx((0.03, 2 / 1024, 0.03))
    assert set(volume.provenance.values()) == {"protocol"}
    assert volume.device == "zeiss_cirrus"
    assert volume.region == "Optic Disc"
    assert volume.laterality == "OD"


@pytest.mark.parametrize(
    ("name", "length", "reason"),
    [
        ("P1_Macular Cube 512x128_1-2-2020_1-2-3_OD_sn1_cube_z.img", 1000, "truncated"),
        ("P1_Macular Cube 12x12_1-2-2020_1-2-3_OD_sn1_cube_z.img", 12 * 12 * 1024 + 1, "unsupported_pixels"),
        ("anything.img", 4711, "unsupported_pixels"),
        ("P1_Angio (6mmx6mm)_1-2-2020_1-2-3_OD_sn1_FlowCube_z.img", 16 * 16 * 1024, "not_structural_oct"),
        ("P1_Macular Cube 512x128_1-2-2020_1-2-3_OD_sn1_lslo.img", 1000, "not_structural_oct"),
        ("P1_HD 5 Line_1-2-2020_1-2-3_OD_sn1_cube_z.img", 0, "empty_file"),
    ],
)
def test_img_faults_have_their_reasons(tmp_path: Path, name: str, length: int, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(bytes(length))
    with pytest.raises(VolumeRejected) as caught:
        read_zeiss(path)
    assert reason_of(caught.value) == reason


# Bioptigen


def test_bioptigen_keeps_axes_spacing_and_every_volume(tmp_path: Path) -> None:
    path = tmp_path / "study_OD_v_1.OCT"
    path.write_bytes(bioptigen_bytes(np.concatenate([DEEP, DEEP[:, ::-1]]), volumes=2))
    assert bioptigen_members(path) == ("1", "2")
    first, second = read_bioptigen(path), read_bioptigen(path, "2")
    np.testing.assert_allclose(first.pixels, DEEP / 4095 * 255, atol=0.51)
    np.testing.assert_array_equal(second.pixels, first.pixels[:, ::-1])
    assert first.spacing_mm == pytest.approx((0.1, 0.003, 0.01))
    assert first.header.laterality == "OD"
    assert first.pattern == "raster"
    assert first.header.visit == "20200506"
    assert "more_scans_in_file=1" in first.notes
    assert "more_scans_in_file=1" not in second.notes


def test_bioptigen_faults_have_their_reasons(tmp_path: Path) -> None:
    path, whole = tmp_path / "scan.OCT", bioptigen_bytes(DEEP)
    counted = whole.index(b"FRAMECOUNT") + len("FRAMECOUNT") + 4
    huge = whole[:counted] + struct.pack("<I", 4_000_000_000) + whole[counted + 4 :]
    faults = [
        ("truncated", whole[: len(whole) // 2]),
        ("broken_header", whole[:60]),
        ("broken_header", huge),
        ("too_few_frames", bioptigen_bytes(DEEP, scan_type=0)),
    ]
    for reason, content in faults:
        path.write_bytes(content)
        with pytest.raises(VolumeRejected) as caught:
            read_bioptigen(path)
        assert reason_of(caught.value) == reason


# Optovue


def test_optovue_keeps_axes_and_asks_for_the_spacing(tmp_path: Path) -> None:
    path = write_optovue(tmp_path / "scan.OCT", [PIXELS.astype(np.float32), PIXELS[:4, :, :10] / np.float32(500)])
    assert optovue_members(path) == ("1", "2")
    first, second = read_optovue(path), read_optovue(path, "2")
    np.testing.assert_array_equal(first.pixels, PIXELS)
    assert second.pixels.shape == (4, 64, 10)
    assert "more_scans_in_file=1" in first.notes
    low, high = PIXELS[:4, :, :10].min(), PIXELS[:4, :, :10].max()
    np.testing.assert_allclose(second.pixels, (PIXELS[:4, :, :10] - low) / (high - low) * 255, atol=0.51)
    with pytest.raises(VolumeRejected, match="--spacing") as caught:
        assemble(first, path)
    assert caught.value.reason == "spacing_unknown"
    volume = assemble(first, path, spacing_mm=(0.1, 0.003, 0.02))
    assert volume.spacing_mm == (0.1, 0.003, 0.02)
    assert volume.laterality == "OS"


def test_optovue_text_may_have_its_suffix_in_capitals(tmp_path: Path) -> None:
    path = write_optovue(tmp_path / "scan.OCT", [PIXELS.astype(np.float32)])
    path.with_suffix(".txt").rename(path.with_suffix(".TXT"))
    assert recognise(path) == "optovue_oct"
    np.testing.assert_array_equal(read_optovue(path).pixels, PIXELS)
    assert "scan.TXT" in companion_names(path.name)


def test_optovue_faults_have_their_reasons(tmp_path: Path) -> None:
    path = write_optovue(tmp_path / "scan.OCT", [PIXELS.astype(np.float32)])
    path.write_bytes(path.read_bytes()[:-4])
    for reason in ("truncated", "broken_header"):
        with pytest.raises(VolumeRejected) as caught:
            read_optovue(path)
        assert reason_of(caught.value) == reason
        path.with_suffix(".txt").unlink(missing_ok=True)
