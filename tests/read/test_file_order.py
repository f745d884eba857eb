"""The order of the file: what the reader reversed is reversed again, and what it moved otherwise is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oct_dicom import make_dataset, retina, save
from octjepa.errors import UsageError
from octjepa.notes import unique_notes
from octjepa.read.file_order import FileOrder, are_renumbered
from octjepa.read.reader import read_volume


def order(*notes: str) -> FileOrder:
    return FileOrder.of(unique_notes(notes), 8)


def test_slices_and_columns_that_the_reader_reversed() -> None:
    assert order() == FileOrder(1, 1)
    assert order("a", "frames_reversed") == FileOrder(-1, 1)
    assert order("frames_unordered", "order_by_correlation") == FileOrder(1, 1)
    assert order("columns_mirrored=8") == FileOrder(1, -1)
    both = order("columns_mirrored=8", "frames_reversed")
    values = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    assert (both.voxels(values) == values[::-1, :, ::-1]).all()
    assert (both.ascans(values) == values[:, ::-1, ::-1]).all()
    assert (both.voxels(both.voxels(values)) == values).all()


@pytest.mark.parametrize(
    "note",
    [
        "frames_unordered",
        "turned_upright",
        "axes_stored=WHD",
        "circle_frames_dropped=2",
        "columns_mirrored=3",
    ],
)
def test_voxels_that_moved_in_another_way_are_refused(note: str) -> None:
    with pytest.raises(UsageError, match=note.partition("=")[0]):
        order("frames_reversed", note)


@pytest.mark.parametrize("cosines", [[-1, 0, 0, 0, 0, -1], [1, 0, 0, 0, 0, -1]])
def test_a_scan_in_the_order_of_its_file_has_the_pixels_of_its_file(tmp_path: Path, cosines: list[float]) -> None:
    pixels = retina(frames=8, rows=96, columns=80)
    pixels[:, :, :6] = 255
    dataset = make_dataset(pixels)
    dataset.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0].ImageOrientationPatient = cosines
    volume = read_volume(save(dataset, tmp_path / "scan.dcm"))
    assert any(note.code == "columns_mirrored" for note in volume.notes) == (cosines[0] < 0)
    in_file_order = FileOrder.of(volume.notes, volume.shape[0]).voxels(volume.pixels)
    assert (in_file_order == pixels).all()


def test_b_scans_behind_a_localizer_have_other_numbers_than_in_the_file(tmp_path: Path) -> None:
    dataset = make_dataset(retina(frames=9))
    dataset.PerFrameFunctionalGroupsSequence[0].FrameType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
    volume = read_volume(save(dataset, tmp_path / "scan.dcm"))
    assert volume.shape[0] == 8
    assert are_renumbered(volume.notes)
    assert FileOrder.of(volume.notes, volume.shape[0]) == FileOrder()
    assert not are_renumbered(read_volume(save(make_dataset(retina(frames=9)), tmp_path / "plain.dcm")).notes)


@pytest.mark.parametrize("step", [1, -1])
def test_b_scans_of_a_file_that_repeats_them_keep_their_numbers(step: int, tmp_path: Path) -> None:
    pixels = retina(frames=8)
    volume = read_volume(save(make_dataset(np.concatenate([pixels, pixels[::step]])), tmp_path / "scan.dcm"))
    assert "frame_copies_dropped=8" in volume.notes
    in_file_order = FileOrder.of(volume.notes, volume.shape[0]).voxels(volume.pixels)
    assert (in_file_order == pixels).all()
