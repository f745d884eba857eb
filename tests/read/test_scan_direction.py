"""B-scans that run from right to left are mirrored, up or down noted, by orientation vectors or the fundus image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import Dataset

from oct_dicom import make_dataset, retina, save
from octjepa.canonical.pipeline import canonicalise
from octjepa.notes import unique_notes
from octjepa.read.reader import read_volume
from octjepa.volume import OCTVolume

PIXELS = retina(frames=8)
HORIZONTAL, BACKWARDS = [1.0, 0, 0, 0, 0, -1.0], [-1.0, 0, 0, 0, 0, -1.0]
PATIENT = [-1.0, 0, 0, 0, 1.0, 0]  # from right to left, depth towards the back of the head


def item(**elements: object) -> Dataset:
    made = Dataset()
    for name, value in elements.items():
        setattr(made, name, value)
    return made


def oriented(
    folder: Path, vectors: list[float] | None, line: list[float] | None = None, pixels: np.ndarray = PIXELS
) -> OCTVolume:
    """A file whose B-scans have one orientation, and a line (row, column, row, column) on the fundus image."""
    ds = make_dataset(pixels)
    shared = ds.SharedFunctionalGroupsSequence[0]
    if vectors is None:
        del shared.PlaneOrientationSequence
    else:
        shared.PlaneOrientationSequence[0].ImageOrientationPatient = vectors
    for index, group in enumerate(ds.PerFrameFunctionalGroupsSequence):
        if line is not None:
            location = item(ReferenceCoordinates=[value + (index * 2 if value < 90 else 0) for value in line])
            group.OphthalmicFrameLocationSequence = [location]
    return read_volume(save(ds, folder / "scan.dcm"))


def test_b_scans_from_right_to_left_are_mirrored(tmp_path: Path) -> None:
    for vectors in (BACKWARDS, PATIENT):
        volume = oriented(tmp_path, vectors)
        assert "columns_mirrored=8" in volume.notes
        # The plane's normal turns with its rows: from the back, the first B-scan is the last.
        expected = PIXELS[:, :, ::-1]
        assert np.array_equal(volume.pixels, expected) or np.array_equal(volume.pixels, expected[::-1])
    volume = oriented(tmp_path, None, [20.0, 700.0, 20.0, 100.0])
    assert "columns_mirrored=8" in volume.notes
    for vectors in (HORIZONTAL, [0.95, 0.3, 0, 0, 0, -1.0], [0.0] * 6, None):
        volume = oriented(tmp_path, vectors)
        assert not [note for note in volume.notes if "mirror" in note or "vertical" in note]
        assert np.array_equal(volume.pixels, PIXELS)


def test_an_eye_scanned_either_way_becomes_the_same_volume(tmp_path: Path) -> None:
    forwards = oriented(tmp_path, HORIZONTAL)
    ds = make_dataset(np.ascontiguousarray(PIXELS[:, :, ::-1]))
    ds.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0].ImageOrientationPatient = BACKWARDS
    backwards = read_volume(save(ds, tmp_path / "other.dcm"))
    np.testing.assert_array_equal(forwards.pixels, backwards.pixels)
    np.testing.assert_allclose(forwards.slice_positions_mm, backwards.slice_positions_mm)


@pytest.mark.parametrize(
    ("vectors", "pixels"),
    [
        ([0, 0, -1.0, 1.0, 0, 0], PIXELS),  # rows into the eye, columns to the patient's left
        ([0, 0, -1.0, -1.0, 0, 0], PIXELS[:, :, ::-1]),
        ([0, 0, 1.0, 1.0, 0, 0], PIXELS[:, ::-1]),
        (HORIZONTAL, PIXELS),  # not those of the stored rows
    ],
)
def test_a_scans_stored_as_rows_keep_the_direction_of_their_vectors(
    vectors: list[float], pixels: np.ndarray, tmp_path: Path
) -> None:
    volume = oriented(tmp_path, vectors, pixels=np.ascontiguousarray(pixels.swapaxes(1, 2)))
    assert "axes_transposed" in volume.notes
    assert np.array_equal(volume.pixels, PIXELS)


def test_lines_that_turn_back_and_forth_are_mirrored_each_by_itself(tmp_path: Path) -> None:
    pixels = PIXELS.copy()
    pixels[1::2] = pixels[1::2, :, ::-1]
    ds = make_dataset(pixels)
    for group in ds.PerFrameFunctionalGroupsSequence[1::2]:
        group.PlaneOrientationSequence = [item(ImageOrientationPatient=BACKWARDS)]
    volume = read_volume(save(ds, tmp_path / "scan.dcm"))
    assert "columns_mirrored=4" in volume.notes
    assert np.array_equal(volume.pixels, PIXELS)


@pytest.mark.parametrize("vectors", [[0, 1.0, 0, 0, 0, -1.0], [0, 0, -1.0, 0, 1.0, 0], None])
def test_vertical_lines_are_noted_and_a_left_eye_of_them_is_not_mirrored(
    vectors: list[float] | None, tmp_path: Path
) -> None:
    from layered_eye import PREPROCESSING, eye

    volume = oriented(tmp_path, vectors, None if vectors else [100.0, 20.0, 700.0, 20.0])
    assert "vertical_lines" in volume.notes
    assert np.array_equal(volume.pixels, PIXELS)
    left = eye("OS")
    assert canonicalise(left, PREPROCESSING).mirrored
    assert not canonicalise(replace(left, notes=unique_notes(["vertical_lines"])), PREPROCESSING).mirrored


def test_vectors_and_fundus_lines_that_contradict_each_other_change_nothing(tmp_path: Path) -> None:
    for vectors, line in ((BACKWARDS, [20.0, 100.0, 20.0, 700.0]), (HORIZONTAL, [100.0, 20.0, 700.0, 20.0])):
        volume = oriented(tmp_path, vectors, line)
        assert "line_direction_disagrees" in volume.notes
        assert not [note for note in volume.notes if "mirrored" in note or "vertical" in note]
