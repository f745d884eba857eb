"""Heidelberg files become the scan that was written, distinguished by eye, series and pattern; compared with eyepy."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from eye_files import phantom
from oct_dicom import retina
from octjepa.errors import VolumeRejected
from octjepa.read.formats import recognise
from octjepa.read.formats.vendor import heyex_e2e, heyex_xml
from octjepa.read.formats.vendor.heidelberg_vol import read_vol
from octjepa.read.intensity import FILL, heyex_display
from octjepa.read.reader import assemble, read_volume
from vendor_files import (
    PATTERN_CIRCLE,
    PATTERN_STAR,
    e2e_bytes,
    lines,
    strip_heyex_xml,
    vol_bytes,
    write_heyex_xml,
)

ROOT = Path(__file__).resolve().parents[3]
PIXELS = retina(6, 64, 48)
LINEAR = (PIXELS.astype(np.float32) / 255) ** 4
SECRETS = ("Ada", "ller", "1950", "P-77")


def reason_of(error: VolumeRejected) -> str:
    assert not any(secret in str(error) for secret in SECRETS)
    return error.reason


def test_the_display_is_the_fourth_root_and_what_was_not_measured_is_white() -> None:
    raw = np.array([[0.0, 1e-4, 0.0625, 1.0], [np.finfo(np.float32).max, np.nan, 1.99, -1.0]], np.float32)
    assert heyex_display(raw).tolist() == [[0, 26, 128, 255], [FILL, FILL, FILL, FILL]]


def test_vol_keeps_pixels_spacing_eye_and_order(tmp_path: Path) -> None:
    path = tmp_path / "scan.vol"
    path.write_bytes(vol_bytes(LINEAR, lines(6)))
    scan = read_vol(path)
    np.testing.assert_array_equal(scan.pixels, PIXELS)
    assert scan.spacing_mm == (0.12, 0.003872, 0.0114)
    assert (scan.header.person_id, scan.header.birth_date, scan.header.visit) == ("P-77", "19500203", "20200506")
    assert scan.personal == ("PatientBirthDate", "StudyDate")
    volume = assemble(scan, path)
    assert volume.laterality == "OS"
    assert volume.device == "heidelberg_spectralis"
    assert volume.pattern == "raster"
    assert volume.spacing_mm == pytest.approx((0.12, 0.003872, 0.0114))
    assert volume.provenance["slice"] == "positions"
    np.testing.assert_array_equal(volume.pixels, PIXELS)


def test_vol_agrees_with_eyepy(tmp_path: Path) -> None:
    from eyepy.io.he.vol_reader import HeVolReader

    path = tmp_path / "scan.vol"
    path.write_bytes(vol_bytes(LINEAR, lines(6)))
    theirs = HeVolReader(path)
    np.testing.assert_array_equal(
        read_vol(path).pixels, heyex_display(np.stack([bscan.data for bscan in theirs.parsed_file.bscans]))
    )
    assert read_vol(path).spacing_mm == (theirs.meta["scale_z"], theirs.meta["scale_y"], theirs.meta["scale_x"])
    assert read_vol(path).header.laterality == theirs.meta["laterality"]


def test_vol_frames_are_ordered_by_their_position_and_fill_is_counted(tmp_path: Path) -> None:
    path, turned = tmp_path / "scan.vol", LINEAR[::-1].copy()
    turned[:, :, 0] = np.finfo(np.float32).max
    path.write_bytes(vol_bytes(turned, lines(6)[::-1]))
    volume = assemble(read_vol(path), path)
    np.testing.assert_array_equal(volume.pixels[:, :, 1:], PIXELS[:, :, 1:])
    assert (volume.pixels[:, :, 0] == FILL).all()
    assert {"frames_reversed", "fill_share=0.021"} <= set(volume.notes)


def test_b_scans_with_the_sclera_on_top_keep_the_order_of_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "scan.vol"
    path.write_bytes(vol_bytes(LINEAR[:, ::-1], lines(6)))
    xml = write_heyex_xml(tmp_path / "export", [np.ascontiguousarray(PIXELS[:, ::-1])])
    for scan in (read_vol(path), heyex_xml.read_xml(xml)):
        volume = assemble(scan, path)
        assert "turned_upright" in volume.notes
        assert "frames_reversed" not in volume.notes
        np.testing.assert_array_equal(volume.pixels, PIXELS)


def test_vol_of_a_star_is_radial_and_a_circle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "star.vol"
    turns = np.pi * np.arange(6) / 6
    star = [(5 - np.cos(a) * 3, 5 - np.sin(a) * 3, 5 + np.cos(a) * 3, 5 + np.sin(a) * 3) for a in turns]
    path.write_bytes(vol_bytes(LINEAR, star, scan_pattern=PATTERN_STAR, distance=0.0))
    assert assemble(read_vol(path), path).pattern == "radial"
    path.write_bytes(vol_bytes(LINEAR[:1], lines(1), scan_pattern=PATTERN_CIRCLE))
    with pytest.raises(VolumeRejected, match="circle") as caught:
        read_vol(path)
    assert reason_of(caught.value) == "too_few_frames"


def test_vol_with_a_patient_id_beyond_ascii_is_read(tmp_path: Path) -> None:
    path, written = tmp_path / "scan.vol", bytearray(vol_bytes(LINEAR, lines(6)))
    written[140:164] = "Müller".encode("latin-1").ljust(24, b"\0")
    path.write_bytes(written)
    assert read_vol(path).header.person_id == "Müller"


def test_vol_whose_header_length_stands_in_the_b_scans_alone_is_whole(tmp_path: Path) -> None:
    """eyepy's writer leaves 61440 in the file's header and follows the B-scans' own lengths."""
    from eyepy.io.he.vol_reader import HeVolReader

    path = tmp_path / "scan.vol"
    path.write_bytes(vol_bytes(LINEAR, lines(6), bscan_hdr_size=61440, version="ep-v0.21.0"))
    theirs = np.stack([bscan.data for bscan in HeVolReader(path).parsed_file.bscans])
    np.testing.assert_array_equal(read_vol(path).pixels, heyex_display(theirs))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(VolumeRejected) as caught:
        read_vol(path)
    assert reason_of(caught.value) == "truncated"
    damaged = bytearray(vol_bytes(LINEAR, lines(6)))
    damaged[2048 + 4 * 5 + 12 : 2048 + 4 * 5 + 16] = b"\xff\xff\xff\x7f"
    path.write_bytes(damaged)  # the file's header knows the length that the first B-scan's has lost
    np.testing.assert_array_equal(read_vol(path).pixels, PIXELS)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_xml_without_root_image_types_and_names_is_read(tmp_path: Path, encoding: str) -> None:
    pixels = retina(12, 64, 48)
    path = write_heyex_xml(tmp_path / "export", [pixels], anonymised=True)
    strip_heyex_xml(path)
    text = path.read_text(encoding="utf-8").replace("UTF-8", encoding)
    path.write_bytes(text.encode(encoding))
    assert recognise(path) == "heyex_xml"
    scan = heyex_xml.read_xml(path)
    np.testing.assert_array_equal(scan.pixels, pixels)
    assert "pictures_by_order" in scan.notes
    assert assemble(scan, path).spacing_mm == pytest.approx((0.12, 0.003872, 0.0114))
    (path.parent / "scan0_3.png").rename(path.parent / "scan0_3.old")
    with pytest.raises(VolumeRejected, match=r"names no pictures, and there are 11 .* for 12 B-scans") as caught:
        heyex_xml.read_xml(path)
    assert reason_of(caught.value) == "frames_missing"


def test_xml_whose_pictures_were_renamed_follows_their_order(tmp_path: Path) -> None:
    first, second = retina(12, 64, 48), 250 - retina(12, 64, 48)
    path = write_heyex_xml(tmp_path / "export", [first, second])
    for picture in path.parent.glob("scan*.png"):
        picture.rename(picture.with_name(picture.name.replace("scan", "anonymous_")))
    np.testing.assert_array_equal(heyex_xml.read_xml(path, "1").pixels, first)
    np.testing.assert_array_equal(heyex_xml.read_xml(path, "2").pixels, second)


def exports(tmp_path: Path) -> list[Path]:
    """Copies of the genuine HEYEX exports; the test is skipped where there are none."""
    shared = ROOT.parent / "shared" / "real" / "heyex_exports"
    copies = [shutil.copytree(folder, tmp_path / folder.name) for folder in sorted(shared.glob("*")) if folder.is_dir()]
    if not copies:
        pytest.skip("no HEYEX exports next to the repository")
    return copies


@pytest.mark.data
def test_genuine_exports_state_the_eye_in_every_image(tmp_path: Path) -> None:
    for folder in exports(tmp_path):
        volume = read_volume(next(folder.glob("*.xml")))
        assert volume.laterality == {"AMD_patient1": "OS", "healthy_subject1": "OD"}[folder.name]
        assert volume.laterality_source == "frame"
        assert volume.shape == (49, 496, 512)


@pytest.mark.data
def test_pictures_whose_names_differ_in_case_alone_are_those_of_the_xml(tmp_path: Path) -> None:
    for folder in exports(tmp_path):
        xml = next(folder.glob("*.xml"))
        right = read_volume(xml).pixels
        for picture in sorted(folder.glob("*.tif")):
            picture.rename(picture.with_name(picture.name.lower() if picture.name[0] > "4" else picture.name.upper()))
        assert np.array_equal(read_volume(xml).pixels, right)


@pytest.mark.data
def test_pictures_by_order_are_refused_where_their_content_contradicts_it(tmp_path: Path) -> None:
    for folder in exports(tmp_path):
        for picture in sorted(folder.glob("*.tif")):
            picture.rename(picture.with_name(f"x{picture.name}"))
        with pytest.raises(VolumeRejected, match=r"frames_unrelated: .* look most like one that is further away"):
            read_volume(next(folder.glob("*.xml")))


def test_pictures_under_other_hexadecimal_names_are_in_no_order(tmp_path: Path) -> None:
    path = write_heyex_xml(tmp_path / "export", [retina(12, 64, 48)])
    for number, picture in enumerate(sorted(path.parent.glob("scan*.png"))):
        picture.rename(picture.with_name(f"{0x12A0 + 7 * number:X}.png"))
    with pytest.raises(VolumeRejected, match="in no order"):
        heyex_xml.read_xml(path)


def test_images_of_both_eyes_in_one_series_are_noted(tmp_path: Path) -> None:
    path = write_heyex_xml(tmp_path / "export", [PIXELS], anonymised=True)
    text = path.read_text(encoding="utf-8")
    every = text.replace("<Image>", "<Image><Laterality>L</Laterality>")
    path.write_text(every, encoding="utf-8")
    assert assemble(heyex_xml.read_xml(path), path).laterality == "OS"
    path.write_text(every.replace("<Laterality>L<", "<Laterality>R<", 4), encoding="utf-8")
    volume = assemble(heyex_xml.read_xml(path), path)
    assert (volume.laterality, "laterality_disagrees" in volume.notes) == (None, True)


@pytest.mark.parametrize("declared", ["", '<?xml version="1.0"?>', '<?xml version="1.0" encoding="UTF-8"?>'])
def test_an_xml_in_the_code_page_of_windows_is_read(tmp_path: Path, declared: str) -> None:
    path = write_heyex_xml(tmp_path / "export", [PIXELS])
    text = path.read_text(encoding="utf-8").partition("?>")[2].replace("&#252;", "\u00fc\u2019")
    path.write_bytes((declared + text).encode("cp1252"))
    scan = heyex_xml.read_xml(path)
    assert scan.header.person_name == "M\u00fc\u2019ller Ada"
    np.testing.assert_array_equal(scan.pixels, PIXELS)


@pytest.mark.parametrize("anonymised", [False, True])
def test_xml_lists_its_images_in_order_with_or_without_a_patient(tmp_path: Path, anonymised: bool) -> None:
    pixels = retina(12, 64, 48)
    path = write_heyex_xml(tmp_path / "export", [pixels], anonymised)
    scan = heyex_xml.read_xml(path)
    np.testing.assert_array_equal(scan.pixels, pixels)  # scan0_10.png sorts before scan0_2.png as text
    volume = assemble(scan, path)
    assert volume.spacing_mm == pytest.approx((0.12, 0.003872, 0.0114))
    assert volume.provenance["slice"] == "positions"
    if anonymised:
        assert scan.personal == ()
        assert scan.header.person_id == ""
        assert volume.laterality is None
    else:
        assert scan.personal == ("PatientName", "PatientBirthDate", "StudyDate", "PatientSex")
        assert (scan.header.person_name, scan.header.birth_date) == ("Müller Ada", "19500203")
        assert volume.laterality == "OD"
        assert volume.person_id == "P-77"


def test_xml_agrees_with_eyepy_which_fails_on_the_anonymised_one(tmp_path: Path) -> None:
    from eyepy.io.he.xml_reader import HeXmlReader

    path = write_heyex_xml(tmp_path / "named", [PIXELS])
    theirs = HeXmlReader(path)
    np.testing.assert_array_equal(heyex_xml.read_xml(path).pixels, theirs.volume.data)
    assert assemble(heyex_xml.read_xml(path), path).spacing_mm[0] == pytest.approx(theirs.meta["scale_z"])
    with pytest.raises((AttributeError, TypeError, IndexError, ValueError)):  # once it no longer does, drop our own
        HeXmlReader(write_heyex_xml(tmp_path / "anonymised", [PIXELS], anonymised=True))


def test_xml_of_two_eyes_holds_two_scans(tmp_path: Path) -> None:
    path = write_heyex_xml(tmp_path / "export", [PIXELS, 250 - PIXELS])
    assert heyex_xml.members(path) == ("1", "2")
    second = heyex_xml.read_xml(path, "2")
    np.testing.assert_array_equal(second.pixels, 250 - PIXELS)
    assert second.header.laterality == "L"
    assert "more_scans_in_file=1" in heyex_xml.read_xml(path).notes
    assert "more_scans_in_file=1" not in second.notes


def test_a_series_of_an_xml_has_the_visit_and_the_patient_that_it_stands_in(tmp_path: Path) -> None:
    path = write_heyex_xml(tmp_path / "export", [PIXELS, 250 - PIXELS])
    text = path.read_text(encoding="utf-8")
    date = "<StudyDate><Date><Year>2023</Year><Month>1</Month><Day>9</Day></Date></StudyDate>"
    between = {
        "visits": (f"</Study><Study>{date}", ("20200506", "20230109"), ("P-77", "P-77")),
        "no_date": ("</Study><Study>", ("20200506", ""), ("P-77", "P-77")),
        "patients": (
            f"</Study></Patient><Patient><PatientID>P-78</PatientID><Study>{date}",
            ("20200506", "20230109"),
            ("P-77", "P-78"),
        ),
    }
    for name, (elements, visits, people) in between.items():
        path.write_text(text.replace("</Series><Series>", f"</Series>{elements}<Series>"), encoding="utf-8")
        headers = [heyex_xml.read_xml(path, member).header for member in ("1", "2")]
        assert tuple(header.visit for header in headers) == visits, name
        assert tuple(header.person_id for header in headers) == people, name
    ends = "</Study></Patient>"  # as some anonymisers leave it: the Series stand beside their patient
    path.write_text(text.replace(ends, "").replace("<Series>", f"{ends}<Series>", 1), encoding="utf-8")
    header = heyex_xml.read_xml(path, "2").header
    assert (header.person_id, header.visit) == ("P-77", "20200506")


def test_xml_faults_have_their_reasons(tmp_path: Path) -> None:
    path = write_heyex_xml(tmp_path / "export", [PIXELS])
    whole = path.read_text(encoding="utf-8")
    outside = tmp_path / "outside.png"
    (path.parent / "scan0_3.png").rename(outside)
    faults = {
        "frames_missing": whole.replace("\\\\disk\\export\\scan0_3.png", "..\\outside.png"),
        "truncated": whole[: len(whole) // 2],
        "broken_header": "<HEDX><BODY/></HEDX>",
        "not_structural_oct": whole.replace("<Type>OCT</Type>", "<Type>FA</Type>"),
    }
    for reason, content in faults.items():
        path.write_text(content, encoding="utf-8")
        with pytest.raises(VolumeRejected) as caught:
            heyex_xml.read_xml(path)
        assert reason_of(caught.value) == reason
    (path.parent / "scan0_3.png").write_bytes(b"no picture")
    path.write_text(whole, encoding="utf-8")
    with pytest.raises(VolumeRejected) as caught:
        heyex_xml.read_xml(path)
    assert reason_of(caught.value) == "frames_broken"


def test_e2e_series_are_read_one_by_one_with_what_they_say(tmp_path: Path) -> None:
    path = tmp_path / "both.e2e"
    path.write_bytes(e2e_bytes([np.maximum(LINEAR, 1e-12), np.maximum(LINEAR[::-1], 1e-12)]))
    assert heyex_e2e.members(path) == ("1", "2")
    first, second = heyex_e2e.read_e2e(path), heyex_e2e.read_e2e(path, "2")
    np.testing.assert_array_equal(first.pixels, PIXELS)
    np.testing.assert_array_equal(second.pixels, PIXELS[::-1])
    assert (first.header.laterality, second.header.laterality) == ("R", "L")
    assert "more_scans_in_file=1" in first.notes
    assert "more_scans_in_file=1" not in second.notes
    assert (first.header.person_id, first.header.person_name) == ("P-77", "Müller Ada")
    assert first.header.birth_date == "19500203"
    assert first.header.protocol == "oct art volume"
    assert first.personal == ("PatientName", "PatientBirthDate", "PatientSex", "StudyDate")
    # 20 degrees over 48 columns, 0.5 degrees between lines, of a standard eye
    assert first.spacing_mm[1:] == pytest.approx((0.003872, 20 * 0.2896 / 48))
    assert np.diff(first.frame_geometry.positions_mm[:, 1]) == pytest.approx(-0.5 * 0.2896)
    assert first.uncertain == ("slice", "column")


def test_e2e_agrees_with_eyepy_but_for_the_bits_it_turns_round(tmp_path: Path) -> None:
    from eyepy.io.he.e2e_reader import HeE2eReader

    path = tmp_path / "one.e2e"
    powers = np.broadcast_to(2.0 ** -np.arange(1, 49), PIXELS.shape)  # no mantissa
    path.write_bytes(e2e_bytes([powers], layers=True))
    with HeE2eReader(path) as reader:
        theirs = np.stack([piece.get_bscan() for piece in reader.series[0].slices.values()])
    np.testing.assert_array_equal(heyex_e2e.read_e2e(path).pixels, heyex_display(theirs))


def test_e2e_images_that_state_their_size_the_wrong_way_round_are_read_by_their_pixels(tmp_path: Path) -> None:
    eye = np.maximum((phantom()[0][:6, :, :96].astype(np.float32) / 255) ** 4, 1e-12)
    path = tmp_path / "one.e2e"
    path.write_bytes(e2e_bytes([eye]))
    right = heyex_e2e.read_e2e(path)
    assert "size_by_metadata" not in right.notes
    content = path.read_bytes()
    rows, columns = eye.shape[1:]
    stated = struct.pack("<3I", rows * columns, rows, columns)
    assert content.count(stated) == len(eye)
    path.write_bytes(content.replace(stated, struct.pack("<3I", rows * columns, columns, rows)))
    scan = heyex_e2e.read_e2e(path)
    np.testing.assert_array_equal(scan.pixels, right.pixels)
    assert "size_by_metadata" in scan.notes
    noise = np.random.default_rng(0).uniform(0.1, 0.9, eye.shape).astype(np.float32)
    path.write_bytes(e2e_bytes([noise]).replace(stated, struct.pack("<3I", rows * columns, columns, rows)))
    with pytest.raises(VolumeRejected, match="header_contradicts_pixels"):
        heyex_e2e.read_e2e(path)


def test_e2e_faults_have_their_reasons(tmp_path: Path) -> None:
    path = tmp_path / "one.e2e"
    sound = np.maximum(LINEAR, 1e-12)
    whole = e2e_bytes([sound])
    loop = bytearray(whole)
    entries = int.from_bytes(whole[88 + 36 : 88 + 40], "little")
    at = 88 + 52 + (entries - 1) * 44
    loop[at + 4 : at + 8] = (88 - 60).to_bytes(4, "little")  # the last entry leads to the directory itself
    faults = {
        "circle": ("too_few_frames", e2e_bytes([sound[:1]], PATTERN_CIRCLE)),
        "form a loop": ("broken_header", bytes(loop)),
        "CMDb": ("broken_header", b"X" + whole[1:]),
        "holds": ("truncated", whole[: len(whole) - 100]),
        "ends within a directory": ("truncated", whole[:600]),
    }
    for message, (reason, content) in faults.items():
        path.write_bytes(content)
        with pytest.raises(VolumeRejected, match=message) as caught:
            heyex_e2e.read_e2e(path)
        assert reason_of(caught.value) == reason
    path.write_bytes(e2e_bytes([sound], PATTERN_STAR))
    assert heyex_e2e.read_e2e(path).pattern == "radial"


def test_the_fundus_picture_of_a_vol_is_there_for_people_to_look_at(tmp_path: Path) -> None:
    picture = np.arange(20, dtype=np.uint8).reshape(4, 5)
    path = tmp_path / "eye.vol"
    path.write_bytes(vol_bytes(LINEAR, lines(6), localizer=picture))
    volume = read_vol(path)
    assert volume.localizer is not None
    np.testing.assert_array_equal(volume.localizer, picture)
    path.write_bytes(vol_bytes(LINEAR, lines(6), localizer=np.zeros((0, 0), np.uint8), size_x_slo=0, size_y_slo=0))
    assert read_vol(path).localizer is None
