"""The picture tells how the retina lies: every turn of it is recognised, and no upright one is turned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydicom.pixels import iter_pixels

from oct_dicom import make_dataset, retina, save
from octjepa.errors import VolumeRejected
from octjepa.phantom import DEVICES, make_eye
from octjepa.read.orientation import is_transposed, is_upside_down, wrapped_column
from octjepa.read.reader import read_volume


def check(pixels: np.ndarray) -> None:
    assert not is_transposed(pixels)
    assert not is_upside_down(pixels)
    assert not wrapped_column(pixels)
    assert is_upside_down(pixels[:, ::-1])
    assert is_transposed(pixels.swapaxes(1, 2))
    with pytest.raises(VolumeRejected, match="not_b_scans"):
        is_transposed(pixels.swapaxes(0, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_phantom_eyes_with_and_without_lesions(device: str) -> None:
    for person in range(5):
        check(make_eye(9, person, "OS", device).pixels)


def test_a_picture_of_nothing_is_left_as_it_is() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (12, 64, 48), np.uint8)
    for pixels in (noise, np.zeros((12, 64, 48), np.uint8), noise[:4, :8, :8], np.full((4, 8, 9), 255, np.uint8)):
        assert not is_transposed(pixels)
        assert not is_upside_down(pixels)


@pytest.mark.data
def test_real_eyes(real_scans: Path) -> None:
    for path in sorted(real_scans.glob("*.dcm")):
        check(np.stack(list(iter_pixels(path, indices=range(0, 10, 2)))))


def test_rows_that_begin_in_the_middle_of_a_b_scan_are_refused_for_that(tmp_path: Path) -> None:
    """Sixteen bytes too many before the pixels, as of a header that is longer than it says."""
    dataset = make_dataset(retina(8, 64, 48))
    dataset.PixelData = bytes(16) + dataset.PixelData[:-16]
    with pytest.raises(VolumeRejected, match="header_contradicts_pixels: every B-scan begins at its column 16"):
        read_volume(save(dataset, tmp_path / "scan.dcm"))
