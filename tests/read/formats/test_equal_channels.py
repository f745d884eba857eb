"""Arrays of three equal channels, as programs store B-scans for networks of colour images, are one intensity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eye_files import phantom
from octjepa.errors import VolumeRejected
from octjepa.read.reader import read_volume

PIXELS, SPACING = phantom()


@pytest.mark.parametrize("axis", [1, 3])
@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_three_equal_channels_are_one_intensity(tmp_path: Path, axis: int, suffix: str) -> None:
    path = tmp_path / f"scan{suffix}"
    copies = np.stack([PIXELS] * 3, axis)
    if suffix == ".npz":
        np.savez(path, bscans=copies, grade=np.array(2))
    else:
        np.save(path, copies)
    volume = read_volume(path, spacing_mm=SPACING)
    assert np.array_equal(volume.pixels, PIXELS)
    assert "rgb_to_grey" in volume.notes


def test_channels_that_differ_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", np.stack([PIXELS, PIXELS, 255 - PIXELS], 1))
    with pytest.raises(VolumeRejected, match="unsupported_pixels: three different channels"):
        read_volume(tmp_path / "scan.npy", spacing_mm=SPACING)
