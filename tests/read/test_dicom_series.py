"""A DICOM file per B-scan: assembled to the scan that was cut up, or refused with what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import Dataset
from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian, JPEG2000Lossless, generate_uid

from bucket_servers import Bucket
from oct_dicom import make_dataset, retina, save, use_syntax
from octjepa.errors import VolumeRejected
from octjepa.ingest import build_store, discover
from octjepa.read.personal_data import StatedPerson
from octjepa.read.reader import describe_file, read_volume
from octjepa.recipe import Preprocessing
from octjepa.remote import join, put_bytes
from octjepa.store import Store

PIXELS = retina(8)
SECONDARY = "1.2.840.10008.5.1.4.1.1.7"


def one_b_scan(index: int, pixels: np.ndarray = PIXELS, series: str = "1.2.3") -> Dataset:
    """B-scan `index` as an enhanced file of one frame, its position in the functional groups."""
    ds = make_dataset(pixels[index : index + 1])
    group = ds.PerFrameFunctionalGroupsSequence[0]
    group.PlanePositionSequence[0].ImagePositionPatient = [0.0, round(0.05 * index, 3), 0.0]
    ds.SeriesInstanceUID, ds.FrameOfReferenceUID, ds.InstanceNumber = series, "1.2.9", index + 1
    return ds


def plain(index: int) -> Dataset:
    """B-scan `index` as a secondary capture: everything at the top of the header."""
    ds = one_b_scan(index)
    ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = SECONDARY
    del ds.SharedFunctionalGroupsSequence, ds.PerFrameFunctionalGroupsSequence, ds.NumberOfFrames
    ds.PixelSpacing, ds.SliceThickness = [0.0026, 0.0117], 0.05
    ds.ImagePositionPatient, ds.ImageOrientationPatient = [0.0, round(0.05 * index, 3), 0.0], [1.0, 0, 0, 0, 0, -1.0]
    return ds


def shared(index: int) -> Dataset:
    """B-scan `index` with its position in the shared groups, and no groups of its frame."""
    ds = one_b_scan(index)
    position = ds.PerFrameFunctionalGroupsSequence[0].PlanePositionSequence
    ds.SharedFunctionalGroupsSequence[0].PlanePositionSequence = position
    del ds.PerFrameFunctionalGroupsSequence
    return ds


def compressed(index: int) -> Dataset:
    ds = one_b_scan(index)
    use_syntax(ds, PIXELS[index : index + 1], JPEG2000Lossless)
    return ds


def write(folder: Path, make: Callable[[int], Dataset], indices: list[int]) -> Path:
    """Files whose names follow no order."""
    for index in indices:
        save(make(index), folder / f"IM{(index * 5) % 8}")
    return folder


@pytest.mark.parametrize("make", [one_b_scan, plain, shared, compressed])
def test_a_folder_with_a_file_per_b_scan_is_the_scan(make: Callable[[int], Dataset], tmp_path: Path) -> None:
    folder = write(tmp_path / "set" / "P7", make, list(range(8)))
    volume = read_volume(folder)
    np.testing.assert_array_equal(volume.pixels, PIXELS)
    assert volume.spacing_mm == pytest.approx((0.05, 0.0026, 0.0117))
    assert volume.provenance["slice"] == "positions"
    assert (volume.laterality, volume.format) == ("OD", "dicom")
    assert "assembled_from_files=8" in volume.notes
    assert describe_file(folder)["kind"] == "volume"
    (found,) = discover([tmp_path / "set"]).files
    assert found.name == "P7"


def test_two_eyes_in_a_folder_are_two_scans_and_their_localizer_is_apart(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", one_b_scan, list(range(8)))
    for index in range(6):
        ds = one_b_scan(index, retina(8, seed=9), "1.2.4")
        ds.ImageLaterality = "L"
        ds.SharedFunctionalGroupsSequence[0].FrameAnatomySequence[0].FrameLaterality = "L"
        save(ds, folder / f"left{index}.dcm")
    localizer = one_b_scan(0)
    localizer.SOPClassUID = localizer.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.77.1.5.1"
    save(localizer, folder / "localizer.dcm")
    report = build_store([folder], tmp_path / "store", Preprocessing(image_size=(16, 32, 32)), max_lost=1)
    made = {entry.eye: entry for entry in Store.open(tmp_path / "store").entries()}
    assert {eye: entry.native_d for eye, entry in made.items()} == {"OD": 8, "OS": 6}
    assert {entry.file for entry in made.values()} == {"set#1", "set#2"}
    assert report.by_reason == {"not_structural_oct": 1}
    again = build_store([folder], tmp_path / "store", Preprocessing(image_size=(16, 32, 32)), max_lost=1)
    assert (again.accepted, again.skipped) == (0, 2)


def without(ds: Dataset, *names: str) -> Dataset:
    for name in names:
        delattr(ds, name)
    return ds


def unordered(index: int) -> Dataset:
    ds = without(plain(index), "ImagePositionPatient", "InstanceNumber")
    return ds


def numbered(index: int) -> Dataset:
    return without(plain(index), "ImagePositionPatient")


def repeated(index: int) -> Dataset:
    ds = plain(index)
    ds.ImagePositionPatient = [0.0, 0.05 * (index // 2), 0.0]
    return ds


def frames_of_reference(index: int) -> Dataset:
    ds = plain(index)
    ds.FrameOfReferenceUID = generate_uid()
    return ds


def announced(index: int) -> Dataset:
    ds = plain(index)
    ds.ImagesInAcquisition = 12
    return ds


def cut(index: int) -> Dataset:
    ds = plain(index)
    if index == 3:
        ds.PixelData = ds.PixelData[:100]
    return ds


def coded_apart(index: int) -> Dataset:
    ds = numbered(index)
    if index in (3, 4):
        ds.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
    return ds


def of_two_eyes(index: int) -> Dataset:
    ds = without(one_b_scan(index), "ImageLaterality")
    ds.SharedFunctionalGroupsSequence[0].FrameAnatomySequence[0].FrameLaterality = "R" if index < 4 else "L"
    return ds


@pytest.mark.parametrize(
    ("make", "indices", "expected"),
    [
        (plain, [0, 1, 2, 4, 5, 7], "frames_missing: 6 files of one series, numbers 4, 7 between them are missing"),
        (numbered, [0, 1, 2, 4, 5], "frames_missing: 5 files of one series, numbers 4 between"),
        (unordered, list(range(8)), "single_frame_series: 8 files .* neither ImagePositionPatient nor InstanceNumber"),
        (repeated, list(range(8)), "single_frame_series: .* have the position of another"),
        (frames_of_reference, list(range(8)), "single_frame_series: 8 files .* differ in FrameOfReferenceUID"),
        (coded_apart, list(range(8)), "single_frame_series: 8 files .* differ in TransferSyntaxUID"),
        (of_two_eyes, list(range(8)), "frames_unrelated: .*right eye for frames 1 to 4 and left eye for frames 5 to 8"),
        (announced, list(range(8)), "frames_missing: 12 images in the acquisition by the header, 8 are here"),
        (cut, list(range(8)), "truncated"),
        (plain, [0, 1, 2], "unknown_format"),
    ],
)
def test_what_is_missing_is_named(
    make: Callable[[int], Dataset], indices: list[int], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(VolumeRejected, match=expected):
        read_volume(write(tmp_path / "P7", make, indices))


def test_numbers_order_files_without_positions_and_true_gaps_stay(tmp_path: Path) -> None:
    volume = read_volume(write(tmp_path / "numbered", numbered, list(range(8))))
    np.testing.assert_array_equal(volume.pixels, PIXELS)
    positions_mm = [0.0, 0.05, 0.1, 0.9, 0.95, 1.0]

    def uneven(index: int) -> Dataset:
        ds = plain(index)
        ds.ImagePositionPatient = [0.0, positions_mm[index], 0.0]
        return ds

    volume = read_volume(write(tmp_path / "uneven", uneven, list(range(6))))
    np.testing.assert_allclose(volume.slice_positions_mm, positions_mm, atol=1e-6)


def test_a_file_alone_says_where_the_others_belong_and_a_concatenation_is_in_parts(tmp_path: Path) -> None:
    folder = write(tmp_path / "P7", plain, list(range(8)))
    with pytest.raises(VolumeRejected, match=r"single_frame_series: .* name the folder that holds all of them"):
        read_volume(folder / "IM3")
    part = make_dataset(PIXELS)
    part.ConcatenationUID, part.InConcatenationNumber, part.InConcatenationTotalNumber = "1.2.5", 1, 3
    part.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    with pytest.raises(VolumeRejected, match="frames_missing: part 1 of 3 of a concatenation"):
        read_volume(save(part, tmp_path / "part.dcm"))


def test_a_placeholder_series_joins_no_files(tmp_path: Path) -> None:
    """An anonymiser may write the same text into the files of all eyes."""
    folder = write(tmp_path / "set", lambda index: one_b_scan(index, series="0"), list(range(8)))
    assert len(discover([folder]).files) == 8
    with pytest.raises(VolumeRejected, match="too_few_frames"):
        read_volume(folder / "IM3")


def test_a_placeholder_instance_hides_no_b_scan(tmp_path: Path) -> None:
    def anonymised(index: int) -> Dataset:
        ds = plain(index)
        ds.SOPInstanceUID = "0"
        return ds

    np.testing.assert_array_equal(read_volume(write(tmp_path / "P7", anonymised, list(range(8)))).pixels, PIXELS)


def test_a_placeholder_name_in_the_first_file_does_not_hide_the_name_of_the_others(tmp_path: Path) -> None:
    def named(index: int) -> Dataset:
        ds = plain(index)
        if index == 0:
            ds.PatientName, ds.PatientBirthDate = "ANONYMOUS", ""
        return ds

    people: list[StatedPerson] = []
    volume = read_volume(write(tmp_path / "Doe_Jane", named, list(range(8))), people=people)
    assert (people[-1].name, people[-1].birth_date) == ("Doe^Jane", "19500101")
    assert volume.source.endswith("/***")


def test_folders_of_whole_scans_are_no_series(tmp_path: Path) -> None:
    for number in range(5):
        save(make_dataset(retina(6, seed=number)), tmp_path / "set" / f"{number}.dcm")
    assert len(discover([tmp_path / "set"]).files) == 5


@pytest.mark.slow
def test_a_series_in_a_bucket_is_read_as_from_a_folder(bucket: Bucket, tmp_path: Path) -> None:
    folder = write(tmp_path / "P7", plain, list(range(8)))
    whole = save(make_dataset(PIXELS), tmp_path / "P8.dcm")
    for path in folder.iterdir():
        put_bytes(path.read_bytes(), join(bucket.url, "set", "P7", path.name))
    for number in range(5):
        put_bytes(whole.read_bytes(), join(bucket.url, "set", "P8", f"{number}.dcm"))
    found = discover([join(bucket.url, "set")]).files
    assert [file.name for file in found] == ["P7", *(f"P8/{number}.dcm" for number in range(5))]
    with found[0].local() as path:
        volume = read_volume(path, dataset_path=found[0].dataset_path, member=found[0].member)
    np.testing.assert_array_equal(volume.pixels, PIXELS)
    assert "assembled_from_files=8" in volume.notes
    before = found[0].state()
    bucket.proxy.requests.clear()
    again = discover([join(bucket.url, "set")]).files
    assert (again[0].key, again[0].state()) == (found[0].key, before)
    assert len(bucket.proxy.requests) <= 8  # the headers are not fetched again
    put_bytes((folder / "IM0").read_bytes() + b"\0\0", join(bucket.url, "set", "P7", "IM0"))
    assert discover([join(bucket.url, "set")]).files[0].state() != before
