"""What a NIfTI header says of the spacing: pixdim, affine, units, and where they contradict each other."""

from __future__ import annotations

import struct
from pathlib import Path

import nibabel
import numpy as np
import pytest

from eye_files import phantom, write_voxels
from octjepa.errors import VolumeRejected
from octjepa.read.reader import read_volume

PIXELS, SPACING = phantom()
AXES = ("slice", "depth", "column")


def nifti(path: Path, affine: np.ndarray, pixdim: tuple[float, ...], unit: str = "mm", sform: int = 1) -> Path:
    """`pixdim` (column, depth, slice) next to an affine of another opinion; qform_code 0."""
    image = nibabel.Nifti1Image(PIXELS.T, np.eye(4))
    image.header.set_xyzt_units(unit)
    image.set_qform(None, code=0)
    image.set_sform(affine, code=sform)
    nibabel.save(image, path)
    content = bytearray(path.read_bytes())
    struct.pack_into("<3f", content, 80, *pixdim)
    path.write_bytes(content)
    return path


def scaled(*factors: float) -> np.ndarray:
    return np.diag([*(mm * factor for mm, factor in zip(SPACING[::-1], factors, strict=True)), 1.0])


def test_a_sheared_affine_leaves_the_slice_spacing_uncertain(tmp_path: Path) -> None:
    affine = scaled(1, 1, 1)
    affine[0, 2], affine[1, 2] = 0.08, 0.05
    volume = read_volume(nifti(tmp_path / "scan.nii", affine, SPACING[::-1]))
    assert volume.spacing_mm == pytest.approx(SPACING)
    assert np.array_equal(volume.pixels, PIXELS)
    assert "affine_sheared" in volume.notes
    assert volume.uncertain == ("slice",)


def test_an_affine_that_contradicts_pixdim_makes_the_spacing_uncertain(tmp_path: Path) -> None:
    for factors, axes in (((2, 2, 2), AXES), ((1, 1, 2), ("slice",)), ((1.1, 1, 1), ("column",))):
        volume = read_volume(nifti(tmp_path / "scan.nii", scaled(*factors), SPACING[::-1]))
        assert volume.spacing_mm == pytest.approx(SPACING), factors
        assert set(volume.uncertain) == set(axes), factors
        assert "affine_disagrees_with_spacing" in volume.notes
    for affine, sform in ((np.eye(4), 1), (scaled(2, 2, 2), 0), (scaled(-1, 1, -1), 1), (scaled(1.01, 1, 1), 1)):
        volume = read_volume(nifti(tmp_path / "scan.nii", affine, SPACING[::-1], sform=sform))
        assert volume.uncertain == (), affine
        assert not any("affine" in note for note in volume.notes)


def test_an_affine_counts_where_pixdim_is_a_placeholder(tmp_path: Path) -> None:
    volume = read_volume(nifti(tmp_path / "scan.nii", scaled(1, 1, 1), (1.0, 1.0, 1.0)))
    assert volume.spacing_mm == pytest.approx(SPACING)
    assert set(volume.uncertain) == set(AXES)
    with pytest.raises(VolumeRejected, match="spacing_unknown"):
        read_volume(nifti(tmp_path / "scan.nii", np.eye(4), (1.0, 1.0, 1.0)))


def test_an_option_is_certain_whatever_the_header_says(tmp_path: Path) -> None:
    volume = read_volume(nifti(tmp_path / "scan.nii", scaled(2, 2, 2), SPACING[::-1]), spacing_mm=SPACING)
    assert volume.uncertain == ()


def test_units_negative_lengths_and_no_offset(tmp_path: Path) -> None:
    micrometres = tuple(1000 * mm for mm in SPACING[::-1])
    affine = scaled(1000, 1000, 1000)
    assert read_volume(nifti(tmp_path / "um.nii", affine, micrometres, "micron")).spacing_mm == pytest.approx(SPACING)
    negative = nifti(tmp_path / "negative.nii", scaled(1, 1, 1), tuple(-mm for mm in SPACING[::-1]))
    assert read_volume(negative).spacing_mm == pytest.approx(SPACING)
    content = bytearray(write_voxels(tmp_path / "scan.nii", PIXELS, SPACING).read_bytes())
    struct.pack_into("<f", content, 108, 0.0)
    (tmp_path / "scan.nii").write_bytes(content)
    assert np.array_equal(read_volume(tmp_path / "scan.nii").pixels, PIXELS)


def test_a_rescaling_is_applied(tmp_path: Path) -> None:
    content = bytearray(write_voxels(tmp_path / "scan.nii", PIXELS, SPACING).read_bytes())
    struct.pack_into("<2f", content, 112, 0.5, 0.0)
    (tmp_path / "scan.nii").write_bytes(content)
    plain = read_volume(tmp_path / "scan.nii").pixels
    assert np.abs(plain.astype(int) - PIXELS).max() <= 1  # a positive slope changes the scale alone
    struct.pack_into("<2f", content, 112, -1.0, 255.0)
    (tmp_path / "scan.nii").write_bytes(content)
    assert np.array_equal(read_volume(tmp_path / "scan.nii").pixels, 255 - PIXELS)
