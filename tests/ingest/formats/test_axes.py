"""Whatever the order and direction of the axes, the same scan comes out; where nothing tells, it is refused."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from eye_files import phantom, write_itk
from octjepa.errors import VolumeRejected
from octjepa.ingest import read_volume
from octjepa.ingest.formats.axes import oriented, upside_down
from octjepa.phantom import DEVICES, make_eye

PIXELS, SPACING = phantom()
ORDERS = list(permutations(range(3)))
NONE = (None, None, None)


def turned(pixels: np.ndarray, order: tuple[int, ...], flipped: bool = False) -> np.ndarray:
    return np.ascontiguousarray((pixels[:, ::-1] if flipped else pixels).transpose(order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("suffix", [".nii.gz", ".mha"])
def test_files_of_any_axis_order_are_one_scan(order: tuple[int, ...], suffix: str, tmp_path: Path) -> None:
    flipped = order[0] == 1
    spacing = tuple(SPACING[axis] for axis in order)
    volume = read_volume(write_itk(tmp_path / f"scan{suffix}", turned(PIXELS, order, flipped), spacing))
    assert np.array_equal(volume.pixels, PIXELS)
    assert volume.spacing_mm == pytest.approx(SPACING)
    word = "".join("DHW"[axis] for axis in order)
    assert (f"axes_stored={word}" in volume.notes) == (word != "DHW")
    assert ("depth_flipped" in volume.notes) == flipped


@pytest.mark.parametrize("device", DEVICES)
def test_content_alone_tells_the_axes_on_every_device(device: str) -> None:
    pixels = make_eye(11, 1, "OS", device).pixels
    assert upside_down(pixels) is False
    for order in ORDERS:
        for flipped in (False, True):
            found, spacing = oriented(turned(pixels, order, flipped), NONE, [])
            assert np.array_equal(found, pixels), (order, flipped)
            assert spacing == NONE


@pytest.mark.data
def test_content_alone_tells_the_axes_of_real_eyes(real_scans: Path) -> None:
    for path in sorted(real_scans.glob("*.dcm")):
        pixels = read_volume(path).pixels[:12]
        for order in ORDERS[1::2]:
            assert np.array_equal(oriented(turned(pixels, order, True), NONE, [])[0], pixels), (path.name, order)


def test_a_spacing_of_one_is_none(tmp_path: Path) -> None:
    path = write_itk(tmp_path / "scan.nii", PIXELS)
    with pytest.raises(VolumeRejected, match="spacing_unknown"):
        read_volume(path)
    volume = read_volume(path, spacing_mm=SPACING)
    assert volume.spacing_mm == SPACING
    assert "depth_by_content" in volume.notes


def test_an_implausible_spacing_is_not_believed(tmp_path: Path) -> None:
    path = write_itk(tmp_path / "scan.mha", PIXELS, (47.0, 2.6, 11.7))  # in um
    with pytest.raises(VolumeRejected, match="spacing_unknown"):
        read_volume(path)
    assert "depth_by_content" in read_volume(path, spacing_mm=SPACING).notes


def test_what_nothing_tells_is_refused() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (40, 60, 50), dtype=np.uint8)
    with pytest.raises(VolumeRejected, match="axes_ambiguous: no axis is layered"):
        oriented(noise, NONE, [])
    flat = np.where(np.arange(96) > 40, 120, 20)[None, :, None]  # alike along both other axes, and as long
    cube = (flat + np.random.default_rng(0).integers(0, 30, (80, 96, 80))).astype(np.uint8)
    with pytest.raises(VolumeRejected, match="axes_ambiguous: neither spacing"):
        oriented(cube, NONE, [])
    notes: list[str] = []
    assert np.array_equal(oriented(cube, NONE, notes, "DHW")[0], cube)
    assert "slow_axis_by_convention" in notes


def test_witnesses_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(VolumeRejected, match="axes_ambiguous: axis 2 looks like depth, but not by its spacing"):
        oriented(PIXELS, (0.004, 0.047, 0.012), [])
    dz, dy, dx = SPACING
    with pytest.raises(VolumeRejected, match="axes_ambiguous: spacing and speckle"):
        oriented(PIXELS, (dx, dy, dz), [])
    with pytest.raises(VolumeRejected, match="axes_ambiguous: axis 1 looks like depth, expected axis 2"):
        oriented(turned(PIXELS, (1, 0, 2)), NONE, [], "DHW", known=True)


def test_spacing_tells_depth_where_content_is_silent() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (20, 60, 50), dtype=np.uint8)
    notes: list[str] = []
    pixels, spacing = oriented(noise.transpose(2, 0, 1), (0.012, 0.12, 0.004), notes)
    assert spacing == (0.12, 0.004, 0.012)
    assert "depth_by_spacing" in notes
    assert np.array_equal(pixels, noise)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blank", [slice(0, 8), slice(1, None, 3), slice(12, 23)])
def test_blank_frames_do_not_hide_which_axis_is_depth(device: str, blank: slice) -> None:
    pixels = make_eye(11, 1, "OS", device).pixels[:24].copy()
    pixels[blank] = 0
    for order in ORDERS:
        found, _ = oriented(turned(pixels, order, True), NONE, [])
        assert np.array_equal(found, pixels), order
