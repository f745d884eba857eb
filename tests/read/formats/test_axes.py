"""Whatever the order and direction of the axes, the same scan comes out; where nothing tells, it is refused."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from eye_files import phantom, write_voxels
from octjepa.errors import VolumeRejected
from octjepa.phantom import DEVICES, make_eye
from octjepa.read.formats.axes import oriented, upside_down
from octjepa.read.raw_scan import StoredAxes
from octjepa.read.reader import read_volume

PIXELS, SPACING = phantom()
ORDERS = list(permutations(range(3)))


def turned(pixels: np.ndarray, order: tuple[int, ...], flipped: bool = False) -> np.ndarray:
    return np.ascontiguousarray((pixels[:, ::-1] if flipped else pixels).transpose(order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("suffix", [".nii.gz", ".mha"])
def test_files_of_any_axis_order_are_one_scan(order: tuple[int, ...], suffix: str, tmp_path: Path) -> None:
    flipped = order[0] == 1
    spacing = tuple(SPACING[axis] for axis in order)
    volume = read_volume(write_voxels(tmp_path / f"scan{suffix}", turned(PIXELS, order, flipped), spacing))
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
            found, spacing, _ = oriented(turned(pixels, order, flipped), StoredAxes(), [])
            assert np.array_equal(found, pixels), (order, flipped)
            assert spacing == (None, None, None)


@pytest.mark.data
@pytest.mark.slow
def test_content_alone_tells_the_axes_of_real_eyes(real_scans: Path) -> None:
    for path in sorted(real_scans.glob("*.dcm")):
        pixels = read_volume(path).pixels[:12]
        for order in ORDERS[1::2]:
            assert np.array_equal(oriented(turned(pixels, order, True), StoredAxes(), [])[0], pixels), (
                path.name,
                order,
            )


def test_a_spacing_of_one_is_none(tmp_path: Path) -> None:
    path = write_voxels(tmp_path / "scan.nii", PIXELS)
    with pytest.raises(VolumeRejected, match="spacing_unknown"):
        read_volume(path)
    volume = read_volume(path, spacing_mm=SPACING)
    assert volume.spacing_mm == SPACING
    assert "depth_by_content" in volume.notes


def test_an_implausible_spacing_is_not_believed(tmp_path: Path) -> None:
    path = write_voxels(tmp_path / "scan.mha", PIXELS, (47.0, 2.6, 11.7))  # in um
    with pytest.raises(VolumeRejected, match="spacing_unknown"):
        read_volume(path)
    assert "depth_by_content" in read_volume(path, spacing_mm=SPACING).notes


def test_what_nothing_tells_is_refused() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (40, 60, 50), dtype=np.uint8)
    with pytest.raises(VolumeRejected, match="axes_ambiguous: no axis is layered"):
        oriented(noise, StoredAxes(), [])
    flat = np.where(np.arange(96) > 40, 120, 20)[None, :, None]  # alike along both other axes, and as long
    cube = (flat + np.random.default_rng(0).integers(0, 30, (80, 96, 80))).astype(np.uint8)
    with pytest.raises(VolumeRejected, match="axes_ambiguous: neither spacing"):
        oriented(cube, StoredAxes(), [])
    notes: list[str] = []
    assert np.array_equal(oriented(cube, StoredAxes("DHW"), notes)[0], cube)
    assert "slow_axis_by_convention" in notes


def test_witnesses_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(VolumeRejected, match="axes_ambiguous: axis 2 looks like depth, but not by its spacing"):
        oriented(PIXELS, StoredAxes(spacing_mm=(0.004, 0.047, 0.012)), [])
    dz, dy, dx = SPACING
    with pytest.raises(VolumeRejected, match="axes_ambiguous: spacing and speckle"):
        oriented(PIXELS, StoredAxes(spacing_mm=(dx, dy, dz)), [])
    with pytest.raises(VolumeRejected, match="axes_ambiguous: axis 1 looks like depth, expected axis 2"):
        oriented(turned(PIXELS, (1, 0, 2)), StoredAxes("DHW", known=True), [])


def doubtful(pixels_shape: tuple[int, int, int]) -> np.ndarray:
    """A scan whose B-scans differ in brightness more than its layers do: content takes slice for depth."""
    brightness = np.linspace(20, 200, pixels_shape[0])[:, None, None]
    return (brightness + np.random.default_rng(0).integers(0, 40, pixels_shape)).astype(np.uint8)


SPECTRALIS = (0.12, 0.003872, 0.01172)


@pytest.mark.parametrize("kind", ["mha", "npz", "json", "option"])
def test_a_complete_scan_whose_spacing_settles_its_axes_is_believed(kind: str, tmp_path: Path) -> None:
    pixels = doubtful((61, 496, 768))
    path = tmp_path / f"scan.{kind if kind in ('mha', 'npz') else 'npy'}"
    if kind == "mha":
        write_voxels(path, pixels, SPECTRALIS)
    elif kind == "npz":
        np.savez(path, volume=pixels, spacing_mm=SPECTRALIS)
    else:
        np.save(path, pixels)
    if kind == "json":
        path.with_suffix(".json").write_text(json.dumps({"spacing_mm": SPECTRALIS}))
    volume = read_volume(path, spacing_mm=SPECTRALIS if kind == "option" else None)
    assert volume.shape == pixels.shape
    assert volume.spacing_mm == pytest.approx(SPECTRALIS)
    assert "axes_unlike_content" in volume.notes


@pytest.mark.parametrize("beside", [True, False])
def test_a_file_that_states_its_axes_is_believed(beside: bool, tmp_path: Path) -> None:
    pixels, path = doubtful((12, 40, 50)), tmp_path / "scan.npz"
    stored, spacing = pixels.transpose(1, 0, 2), (0.3, 0.004, 0.05)  # depth, slice, column
    if beside:
        np.savez(path, volume=stored)
        sidecar = {"axes": "depth, slice, column", "spacing_mm": spacing}
        path.with_suffix(".json").write_text(json.dumps(sidecar))
    else:
        np.savez(path, volume=stored, axes=np.array(["depth", "slice", "column"]), spacing_mm=spacing)
    volume = read_volume(path)
    assert volume.shape == pixels.shape
    assert {"axes_stated", "axes_stored=HDW", "axes_unlike_content"} <= set(volume.notes)
    np.savez(path, volume=stored, axes="row, column", spacing_mm=spacing)
    path.with_suffix(".json").unlink(missing_ok=True)
    with pytest.raises(VolumeRejected, match="broken_header: its axes are not slice, depth and column"):
        read_volume(path)


def test_a_refusal_for_its_axes_names_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "scan.npy"
    np.save(path, np.random.default_rng(0).integers(0, 255, (40, 60, 50), dtype=np.uint8))
    with pytest.raises(VolumeRejected, match=r'40 x 60 x 50 samples.*"axes": "slice,depth,column"'):
        read_volume(path)
    path.with_suffix(".json").write_text('{"axes": "slice,depth,column"}')  # the way out, followed
    assert read_volume(path, spacing_mm=(0.1, 0.004, 0.05)).shape == (40, 60, 50)


@pytest.mark.parametrize("suffix", ["npy", "npz", "mat", "mha", "nii"])
def test_one_b_scan_is_called_one(suffix: str, tmp_path: Path) -> None:
    from scipy.io import savemat

    for shape in ((96, 80), (1, 96, 80)):
        pixels, path = PIXELS[0, :96, :80].reshape(shape), tmp_path / f"scan{len(shape)}.{suffix}"
        if suffix == "npy":
            np.save(path, pixels)
        elif suffix == "npz":
            np.savez(path, volume=pixels)
        elif suffix == "mat":
            savemat(path, {"images": pixels})
        else:
            write_voxels(path, pixels, SPECTRALIS[-len(shape) :])
        with pytest.raises(VolumeRejected, match=r"too_few_frames: .*(96 x 80|80 x 96)"):
            read_volume(path)


def test_spacing_tells_depth_where_content_is_silent() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (20, 60, 50), dtype=np.uint8)
    notes: list[str] = []
    pixels, spacing, _ = oriented(noise.transpose(2, 0, 1), StoredAxes(spacing_mm=(0.012, 0.12, 0.004)), notes)
    assert spacing == (0.12, 0.004, 0.012)
    assert "depth_by_spacing" in notes
    assert np.array_equal(pixels, noise)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blank", [slice(0, 8), slice(1, None, 3), slice(12, 23)])
def test_blank_frames_do_not_hide_which_axis_is_depth(device: str, blank: slice) -> None:
    pixels = make_eye(11, 1, "OS", device).pixels[:24].copy()
    pixels[blank] = 0
    for order in ORDERS:
        found, *_ = oriented(turned(pixels, order, True), StoredAxes(), [])
        assert np.array_equal(found, pixels), order
