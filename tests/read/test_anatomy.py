"""Another part of the eye, an animal, blood flow and a localizer are told by the header, with the true reason."""

from __future__ import annotations

from pathlib import Path, PurePath

import numpy as np
import pytest
from pydicom.dataset import Dataset

from drawn_eyes import fundus_picture
from oct_dicom import make_dataset, retina, save
from octjepa.errors import VolumeRejected
from octjepa.phantom import DEVICES
from octjepa.read.raw_scan import FrameGeometry, RawScan
from octjepa.read.reader import assemble, describe_file, read_volume
from octjepa.volume import OCTVolume
from shaped_eye import shaped_eye

SOURCE = PurePath("set/scan")
PIXELS = retina()


def code(value: str, scheme: str, meaning: str) -> Dataset:
    item = Dataset()
    item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = value, scheme, meaning
    return item


RETINA, CORNEA = code("5665001", "SCT", "Retina"), code("28726007", "SCT", "Cornea")


def region(*codes: Dataset) -> Dataset:
    ds = make_dataset(PIXELS)
    ds.AnatomicRegionSequence = list(codes)
    return ds


def in_shared_groups(*codes: Dataset) -> Dataset:
    ds = make_dataset(PIXELS)
    ds.SharedFunctionalGroupsSequence[0].FrameAnatomySequence[0].AnatomicRegionSequence = list(codes)
    return ds


def with_elements(**elements: object) -> Dataset:
    ds = make_dataset(PIXELS)
    for name, value in elements.items():
        setattr(ds, name, value)
    return ds


@pytest.mark.parametrize(
    ("ds", "reason", "detail"),
    [
        (region(CORNEA), "not_retina", "AnatomicRegionSequence says cornea; expected the retina"),
        (region(code("T-AA050", "SRT", "")), "not_retina", "anterior chamber"),
        (region(code("X1", "99MAKER", "Anterior Segment")), "not_retina", "anterior segment"),
        (region(code("81745001", "SCT", "Eye"), CORNEA), "not_retina", "cornea"),
        (in_shared_groups(code("41296002", "SCT", "Iris")), "not_retina", "iris"),
        (with_elements(ProtocolName="Cornea 3D"), "not_retina", "cornea"),
        (with_elements(ProtocolName="", SeriesDescription="ANTERIOR_SEGMENT cube"), "not_retina", "anterior segment"),
        (with_elements(PatientSpeciesDescription="Mus musculus"), "not_retina", "an animal"),
        (with_elements(ImageType=["DERIVED", "PRIMARY", "", "ANGIO"]), "not_structural_oct", "OCT angiography"),
        (with_elements(ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"]), "not_structural_oct", "a localizer"),
    ],
)
def test_what_a_header_says_is_no_retina_is_refused_for_that(
    ds: Dataset, reason: str, detail: str, tmp_path: Path
) -> None:
    with pytest.raises(VolumeRejected, match=detail) as caught:
        read_volume(save(ds, tmp_path / "scan.dcm"))
    assert caught.value.reason == reason
    assert "Mus" not in str(caught.value)


@pytest.mark.parametrize(
    "ds",
    [
        region(RETINA),
        region(code("81745001", "SCT", "Eye")),
        region(RETINA, CORNEA),  # a scan of the whole eye
        region(code("T-AA610", "SRT", "Retina")),
        with_elements(ProtocolName="macula 6x6 octa", ImageType=["ORIGINAL", "PRIMARY", "VOLUME"]),
        with_elements(PatientSpeciesDescription="Homo sapiens"),
        with_elements(SeriesDescription="posterior and anterior segment"),
    ],
)
def test_what_may_be_a_retina_is_read(ds: Dataset, tmp_path: Path) -> None:
    assert read_volume(save(ds, tmp_path / "scan.dcm")).shape == PIXELS.shape


def test_a_region_given_beside_other_formats_counts_too(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", PIXELS)
    (tmp_path / "scan.json").write_text('{"spacing_mm": [0.05, 0.0026, 0.0117], "region": "Anterior chamber"}')
    assert describe_file(tmp_path / "scan.npy")["reasons"][0]["reason"] == "not_retina"


def mark_frame(ds: Dataset, index: int, how: str) -> None:
    """Makes one frame a localizer by the header."""
    group = ds.PerFrameFunctionalGroupsSequence[index]
    item = Dataset()
    if how == "type":
        group.FrameType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
    elif how == "transverse":
        item.ReferenceCoordinates, item.OphthalmicImageOrientation = [0.0, 0.0, 10.0, 10.0], "TRANSVERSE"
        group.OphthalmicFrameLocationSequence = [item]
    else:
        item.ImageOrientationPatient = [1.0, 0, 0, 0, 1.0, 0]
        group.PlaneOrientationSequence = [item]


@pytest.mark.parametrize("how", ["type", "transverse", "plane"])
def test_a_localizer_as_first_frame_is_dropped_and_many_are_refused(how: str, tmp_path: Path) -> None:
    pixels = PIXELS.copy()
    pixels[0] = np.random.default_rng(0).integers(60, 200, pixels[0].shape)
    ds = make_dataset(pixels)
    mark_frame(ds, 0, how)
    volume = read_volume(save(ds, tmp_path / "scan.dcm"))
    np.testing.assert_array_equal(volume.pixels, pixels[1:])
    assert volume.localizer is not None
    np.testing.assert_array_equal(volume.localizer, pixels[0])
    assert "localizers_dropped=1" in volume.notes
    assert volume.slice_positions_mm is not None
    assert len(volume.slice_positions_mm) == len(pixels) - 1
    if how != "plane":  # of planes, the most count as those of B-scans
        for index in range(1, 4):
            mark_frame(ds, index, how)
        with pytest.raises(VolumeRejected, match="not_structural_oct: 4 of 10 frames are en face"):
            read_volume(save(ds, tmp_path / "scan.dcm"))


def stored_first(device: str, first: np.ndarray | None) -> OCTVolume:
    """A phantom eye, with `first` as its first frame where there is one, and no word of it in the header."""
    pixels = shaped_eye(device, seed=3).volume.pixels[:12]
    pixels = pixels if first is None else np.concatenate([first[None], pixels])
    return assemble(RawScan("built", pixels, FrameGeometry.unknown(len(pixels)), spacing_mm=(0.2, 0.004, 0.03)), SOURCE)


@pytest.mark.parametrize("device", DEVICES)
def test_a_picture_as_first_frame_is_dropped_by_its_content_alone(device: str) -> None:
    clean = stored_first(device, None)
    assert not [note for note in clean.notes if "localizer" in note]
    _, height, width = clean.shape
    volume = stored_first(device, fundus_picture(height, width))
    assert {"localizer_by_content", "localizers_dropped=1"} <= set(volume.notes)
    np.testing.assert_array_equal(volume.pixels, clean.pixels)
    vitreous = np.resize(clean.pixels[0, :10], (height, width))  # a blink
    jumped = np.roll(clean.pixels[0], height // 3, axis=0)  # a B-scan far off in depth
    for first in (vitreous, jumped, clean.pixels[-1], np.zeros_like(vitreous)):
        assert not [note for note in stored_first(device, first).notes if "localizer" in note]


def garbled(frame: np.ndarray, how: str) -> np.ndarray:
    """A B-scan after damage: random bytes from its tenth row on, or blocks of 8 x 8 with wrong cosine terms."""
    rng = np.random.default_rng(0)
    damaged = frame.copy()
    if how == "bytes":
        damaged[10:] = rng.integers(0, 256, damaged[10:].shape)
        return damaged
    wave = np.cos((np.arange(8) + 0.5) * np.arange(8)[:, None] * np.pi / 8)
    for y in range(0, frame.shape[0] - 7, 8):
        for x in range(0, frame.shape[1] - 7, 8):
            down, across = rng.integers(0, 6, 2)
            damaged[y : y + 8, x : x + 8] = np.clip(128 + 250 * np.outer(wave[down], wave[across]), 0, 255)
    return damaged


@pytest.mark.parametrize("how", ["bytes", "blocks"])
def test_a_garbled_first_frame_is_no_picture(how: str) -> None:
    frame = shaped_eye("heidelberg_spectralis", seed=3).volume.pixels[0]
    volume = stored_first("heidelberg_spectralis", garbled(frame, how))
    assert not [note for note in volume.notes if "localizer" in note]
    assert len(volume.pixels) == 13


@pytest.mark.slow
@pytest.mark.data
def test_no_real_scan_loses_a_frame_by_content(real_scans: Path) -> None:
    for path in sorted(real_scans.glob("*.dcm")):
        assert not [note for note in read_volume(path).notes if "localizer" in note], path.name
