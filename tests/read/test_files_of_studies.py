"""Defects of files that people have in real studies, each with the right outcome: `docs/formats.md` lists them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydicom.dataelem import DataElement
from pydicom.dataset import Dataset
from pydicom.uid import (
    UID,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLSLossless,
    RLELossless,
    generate_uid,
)

from oct_dicom import _group as item
from oct_dicom import make_dataset, retina, save, use_syntax
from octjepa.errors import VolumeRejected
from octjepa.read.reader import read_volume

PIXELS = retina(24, 184, 160)
SPACING_MM = (0.26, 0.0078, 0.04)


def scan(pixels: np.ndarray = PIXELS, pitch_mm: float | None = SPACING_MM[0]) -> Dataset:
    """The base eye of no known maker, so that no protocol states a spacing."""
    ds = make_dataset(pixels, pitch_mm)
    ds.Manufacturer, ds.ManufacturerModelName, ds.ProtocolName = "Maker", "OCT", "macula"
    measures(ds).PixelSpacing = list(SPACING_MM[1:])
    return ds


def measures(ds: Dataset) -> Dataset:
    return ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]


def assert_base_eye(path: Path, *notes: str) -> None:
    volume = read_volume(path)
    assert np.array_equal(volume.pixels, PIXELS)
    assert volume.spacing_mm == pytest.approx(SPACING_MM)
    assert volume.uncertain == ()
    assert volume.notes == notes


def test_the_base_eye_is_read_without_a_note(tmp_path: Path) -> None:
    assert_base_eye(save(scan(), tmp_path / "scan.dcm"))


# Sign


@pytest.mark.parametrize(
    ("syntax", "note"),
    [
        (ExplicitVRLittleEndian, "sign_by_content"),
        (RLELossless, "sign_by_content"),
        (JPEGLSLossless, "sign_by_content"),
        (JPEG2000Lossless, "sign_by_code_stream"),
    ],
)
def test_unsigned_pixels_under_a_header_that_says_signed(syntax: UID, note: str, tmp_path: Path) -> None:
    ds = scan()
    use_syntax(ds, PIXELS, syntax)
    ds.PixelRepresentation = 1
    assert_base_eye(save(ds, tmp_path / "scan.dcm"), note)


def test_other_wrong_signs(tmp_path: Path) -> None:
    ds = scan()
    use_syntax(ds, PIXELS, JPEGBaseline8Bit)
    ds.PixelRepresentation = 1
    volume = read_volume(save(ds, tmp_path / "lossy.dcm"))
    assert np.corrcoef(volume.pixels.ravel(), PIXELS.ravel())[0, 1] > 0.99

    ds = scan((PIXELS.astype(np.int16) - 128).astype(np.int8))
    ds.PixelRepresentation = 0
    volume = read_volume(save(ds, tmp_path / "signed.dcm"))
    assert np.corrcoef(volume.pixels.ravel(), PIXELS.ravel())[0, 1] == pytest.approx(1, abs=1e-3)
    assert "sign_by_content" in volume.notes

    ds = scan(PIXELS.astype(np.uint16) * 16)
    ds.BitsStored, ds.HighBit, ds.PixelRepresentation = 12, 11, 1
    volume = read_volume(save(ds, tmp_path / "deep.dcm"))
    assert np.abs(volume.pixels.astype(int) - PIXELS).max() <= 1
    assert "sign_by_content" in volume.notes


def test_truly_signed_pixels_keep_their_sign(tmp_path: Path) -> None:
    for syntax in (ExplicitVRLittleEndian, RLELossless):
        signed = (PIXELS.astype(np.int16) - 128).astype(np.int8)
        ds = scan(signed)
        use_syntax(ds, signed, syntax)
        volume = read_volume(save(ds, tmp_path / "scan.dcm"))
        assert np.corrcoef(volume.pixels.ravel(), PIXELS.ravel())[0, 1] == pytest.approx(1, abs=1e-3)
        assert volume.notes == ("signed",)


def test_a_sign_that_nothing_tells_is_refused(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, PIXELS.shape).astype(np.uint8)
    ds = scan(noise)
    ds.PixelRepresentation = 1
    with pytest.raises(VolumeRejected, match=r"header_contradicts_pixels: PixelRepresentation says signed"):
        read_volume(save(ds, tmp_path / "scan.dcm"))


# Overlays in unused bits


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, RLELossless, JPEGLSLossless, JPEG2000Lossless])
def test_an_overlay_in_the_bit_above_the_pixels_is_masked(syntax: UID, tmp_path: Path) -> None:
    deep = PIXELS.astype(np.uint16) * 16
    drawn = deep.copy()
    drawn[:, 60:120, 40:120] |= 1 << 12
    ds = scan(drawn)
    use_syntax(ds, drawn, syntax)
    ds.BitsStored, ds.HighBit = 12, 11
    for tag, vr, value in (
        (0x60000010, "US", PIXELS.shape[1]),
        (0x60000011, "US", PIXELS.shape[2]),
        (0x60000040, "CS", "G"),
        (0x60000050, "SS", [1, 1]),
        (0x60000100, "US", 16),
        (0x60000102, "US", 12),
    ):
        ds.add_new(tag, vr, value)
    volume = read_volume(save(ds, tmp_path / "scan.dcm"))
    assert np.abs(volume.pixels.astype(int) - PIXELS).max() <= 1
    assert volume.notes == ("unused_bits_dropped", "scaled_from_12_bit")


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, JPEG2000Lossless])
def test_bits_above_the_pixels_without_an_overlay_group_are_recognised_by_content(syntax: UID, tmp_path: Path) -> None:
    """A drawing leaves the lower bits as they are; intensities of 13 bit under a header of 12 bit do not."""
    drawn = PIXELS.astype(np.uint16) * 16
    drawn[:, 60:120, 40:120] |= 1 << 12
    deeper = PIXELS.astype(np.uint16) * 32
    for values, notes in (
        (drawn, ("unused_bits_dropped", "scaled_from_12_bit")),
        (deeper, ("bits_stored_exceeded", "scaled_from_13_bit")),
    ):
        ds = scan(values)
        use_syntax(ds, values, syntax)
        ds.BitsStored, ds.HighBit = 12, 11
        volume = read_volume(save(ds, tmp_path / "scan.dcm"))
        assert np.abs(volume.pixels.astype(int) - PIXELS).max() <= 1
        assert volume.notes == notes


# Copies


@pytest.mark.parametrize("groups", [24, 48])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_file_that_holds_its_frames_twice_is_one_scan(groups: int, backwards: bool, tmp_path: Path) -> None:
    ds = scan(np.concatenate([PIXELS, PIXELS[::-1] if backwards else PIXELS]))
    ds.PerFrameFunctionalGroupsSequence = ds.PerFrameFunctionalGroupsSequence[:groups]
    assert_base_eye(save(ds, tmp_path / "scan.dcm"), "frame_copies_dropped=24")


def test_frames_three_times_and_in_another_format(tmp_path: Path) -> None:
    assert_base_eye(save(scan(np.concatenate([PIXELS] * 3)), tmp_path / "scan.dcm"), "frame_copies_dropped=48")
    path = tmp_path / "scan.npy"
    np.save(path, np.concatenate([PIXELS, PIXELS]))
    volume = read_volume(path, spacing_mm=SPACING_MM)
    assert volume.shape == PIXELS.shape
    assert "frame_copies_dropped=24" in volume.notes


def single_files(folder: Path, copied: int | None = None, same_number: bool = True) -> Path:
    series = generate_uid()
    order = list(range(24)) + ([] if copied is None else [copied])
    for rank, index in enumerate(order):
        ds = make_dataset(PIXELS[index : index + 1])
        del ds.SharedFunctionalGroupsSequence, ds.PerFrameFunctionalGroupsSequence
        ds.NumberOfFrames, ds.SeriesInstanceUID = 1, series
        ds.PixelSpacing, ds.ImageOrientationPatient = list(SPACING_MM[1:]), [1.0, 0, 0, 0, 0, -1.0]
        ds.ImagePositionPatient = [0.0, round(index * SPACING_MM[0], 6), 0.0]
        ds.InstanceNumber = (index if same_number else rank) + 1
        save(ds, folder / f"{rank:03d}.dcm")
    return folder


@pytest.mark.parametrize("same_number", [True, False])
def test_a_series_with_one_file_twice_is_the_scan_without_it(same_number: bool, tmp_path: Path) -> None:
    found = read_volume(single_files(tmp_path, copied=7, same_number=same_number))
    assert np.array_equal(found.pixels, PIXELS)
    assert "repeated_files_dropped=1" in found.notes
    assert "assembled_from_files=25" in found.notes


# Several scans in a file, one scan in several files


def test_one_file_with_both_eyes_is_refused(tmp_path: Path) -> None:
    ds = scan(np.concatenate([PIXELS, PIXELS[:, :, ::-1]]))
    for index, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
        group.FrameAnatomySequence = [item(FrameLaterality="R" if index < 24 else "L")]
    with pytest.raises(VolumeRejected, match=r"frames_unrelated: .*right eye for frames 1 to 24.*left.*25 to 48"):
        read_volume(save(ds, tmp_path / "scan.dcm"))
    for group in ds.PerFrameFunctionalGroupsSequence:
        group.FrameAnatomySequence = [item(FrameLaterality="R")]
    assert read_volume(save(ds, tmp_path / "scan.dcm")).laterality == "OD"


def part(first: int, last: int, series: str, positions: bool = True) -> Dataset:
    ds = scan(PIXELS[first:last])
    ds.SeriesInstanceUID = series
    for index, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
        group.FrameContentSequence[0].InStackPositionNumber = first + index + 1
        if positions:
            group.PlanePositionSequence[0].ImagePositionPatient = [0.0, round((first + index) * SPACING_MM[0], 6), 0.0]
        else:
            del group.PlanePositionSequence
    return ds


@pytest.mark.parametrize("positions", [True, False])
def test_a_scan_cut_into_two_files_of_a_series_is_noted(positions: bool, tmp_path: Path) -> None:
    series = generate_uid()
    paths = [save(part(first, first + 12, series, positions), tmp_path / f"{first:02d}.dcm") for first in (0, 12)]
    for path in paths:
        assert "part_of_scan" in read_volume(path).notes


def test_two_scans_of_a_series_are_no_parts(tmp_path: Path) -> None:
    series = generate_uid()
    for number in range(2):
        save(part(0, 12, series), tmp_path / f"{number}.dcm")
    save(part(12, 24, generate_uid()), tmp_path / "2.dcm")
    for number in range(3):
        assert "part_of_scan" not in read_volume(tmp_path / f"{number}.dcm").notes


# Orientation


def test_rows_from_below_under_a_truthful_header_are_the_same_scan(tmp_path: Path) -> None:
    for vectors in ([1.0, 0, 0, 0, 0, 1.0], [1.0, 0, 0, 0, -1.0, 0]):
        ds = scan(np.ascontiguousarray(PIXELS[:, ::-1]))
        ds.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0].ImageOrientationPatient = vectors
        if vectors[4]:  # patient coordinates: the B-scans follow one another from the feet to the head
            for index, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
                position = [0.0, 0.0, round(index * SPACING_MM[0], 6)]
                group.PlanePositionSequence[0].ImagePositionPatient = position
        assert_base_eye(save(ds, tmp_path / "scan.dcm"), "turned_upright")


def test_rows_from_below_under_a_header_of_other_rows_stay_in_order(tmp_path: Path) -> None:
    assert_base_eye(save(scan(np.ascontiguousarray(PIXELS[:, ::-1])), tmp_path / "scan.dcm"), "turned_upright")


# Numbers written as texts


def test_a_spacing_with_a_decimal_comma_is_read_and_noted(tmp_path: Path) -> None:
    path = save(scan(), tmp_path / "scan.dcm")
    content = path.read_bytes()
    assert content.count(b"0.0078\\0.04") == 1
    path.write_bytes(content.replace(b"0.0078\\0.04", b"0,0078\\0,04"))
    assert_base_eye(path, "decimal_comma")


@pytest.mark.parametrize("vr", ["UT", "LO", "UN", "ST"])
def test_a_spacing_of_another_value_representation_is_read(vr: str, tmp_path: Path) -> None:
    ds = scan()
    text = "0.0078\\0.04"
    group = measures(ds)
    del group[0x00280030]
    group[0x00280030] = DataElement(0x00280030, vr, text.encode() + b" " if vr == "UN" else text)
    assert_base_eye(save(ds, tmp_path / "scan.dcm"))
