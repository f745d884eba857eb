"""A header from a stranger is parsed once: what it names, and where the voxels are, is decided by checked fields."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import nibabel
import numpy as np
import pytest

from eye_files import phantom, write_voxels
from octjepa.errors import VolumeRejected
from octjepa.read.reader import read_volume

PIXELS, SPACING = phantom()
OTHER = np.ascontiguousarray(PIXELS[:, :, ::-1])


def refused(path: Path) -> VolumeRejected:
    with pytest.raises(VolumeRejected) as caught:
        read_volume(path, spacing_mm=SPACING)
    assert str(path.parent) not in str(caught.value)
    return caught.value


@pytest.fixture
def mhd(tmp_path: Path) -> Path:
    """A MetaImage in a folder, and the voxels of another eye outside it."""
    (tmp_path / "scan").mkdir()
    (tmp_path / "other.raw").write_bytes(OTHER.tobytes())
    return write_voxels(tmp_path / "scan" / "own.mhd", PIXELS, SPACING)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("ElementDataFile : x=y/../../other.raw\n", "form Name = value"),  # MetaIO accepts a colon
        ("ElementDataFile : ../other.raw\n", "form Name = value"),
        ("Comment = a\rElementDataFile = ../other.raw\n", "form Name = value"),  # a line ends at CR for MetaIO
        ("ElementDataFile = ../other.raw\n", "outside its folder"),
        ("ElementDataFile = scan/../../other.raw\n", "outside its folder"),
        ("DimSize = 1 1 1\n", "a field twice"),
        ("dimsize = 1 1 1\n", "a field twice"),
        ("HeaderSize = 7\nHeaderSize = 9\n", "a field twice"),
        ("Comment\n", "form Name = value"),
    ],
)
def test_a_metaimage_header_that_two_parsers_read_differently_is_refused(mhd: Path, line: str, word: str) -> None:
    mhd.write_bytes(mhd.read_bytes().replace(b"ElementDataFile", line.encode() + b"ElementDataFile", 1))
    error = refused(mhd)
    assert (error.reason, word in error.detail) == ("broken_header", True), error.detail


@pytest.mark.parametrize("link", [os.symlink, None])
def test_voxels_behind_a_link_that_leads_out_are_not_read(mhd: Path, link: object) -> None:
    raw = mhd.with_suffix(".raw")
    raw.unlink()
    raw.symlink_to("../other.raw" if link else "inside.raw")
    (mhd.parent / "inside.raw").write_bytes(PIXELS.tobytes())
    if link:
        assert refused(mhd).reason == "path_escapes"
    else:
        assert np.array_equal(read_volume(mhd).pixels, PIXELS)  # within the folder a link is followed


def test_metaimages_of_every_form_are_read(tmp_path: Path) -> None:
    for compressed in (False, True):
        for suffix in (".mha", ".mhd"):
            path = write_voxels(tmp_path / f"{compressed}{suffix}", PIXELS, SPACING, compressed)
            assert np.array_equal(read_volume(path).pixels, PIXELS), path.name
    text = write_voxels(tmp_path / "crlf.mhd", PIXELS, SPACING).read_bytes()
    (tmp_path / "crlf.mhd").write_bytes(text.replace(b"\n", b"\r\n"))
    assert read_volume(tmp_path / "crlf.mhd").spacing_mm == pytest.approx(SPACING)
    deep = PIXELS.astype(">u2") * 257
    path = write_voxels(tmp_path / "big.mhd", PIXELS, SPACING)
    path.with_suffix(".raw").write_bytes(b"a header of its own" + deep.tobytes())
    fields = path.read_bytes().replace(b"MSB = False", b"MSB = True").replace(b"MET_UCHAR", b"MET_USHORT")
    for skip in (b"HeaderSize = 19\n", b"HeaderSize = -1\n"):
        path.write_bytes(fields.replace(b"ElementDataFile", skip + b"ElementDataFile"))
        assert np.array_equal(read_volume(path).pixels, PIXELS)
    size = write_voxels(tmp_path / "size.mhd", PIXELS, SPACING)
    size.write_bytes(size.read_bytes().replace(b"ElementSpacing", b"ElementSize"))
    assert read_volume(size).spacing_mm == pytest.approx(SPACING)


def test_a_nifti_extension_is_not_parsed(tmp_path: Path) -> None:
    """An extension of the DICOM code would be a second file format inside the header."""
    plain = write_voxels(tmp_path / "plain.nii", PIXELS, SPACING).read_bytes()
    head, voxels = bytearray(plain[:348]), plain[352:]
    extension = struct.pack("<2i", 64, 2) + b"\xff" * 56
    struct.pack_into("<f", head, 108, 352 + 64)
    for name, packed in (("scan.nii", False), ("scan.nii.gz", True)):
        content = bytes(head) + b"\1\0\0\0" + extension + voxels
        (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
        assert np.array_equal(read_volume(tmp_path / name).pixels, PIXELS)


@pytest.mark.slow
def test_nifti_of_both_versions_byte_orders_and_number_types(tmp_path: Path) -> None:
    affine = np.diag([*SPACING[::-1], 1.0])
    for name, kind in (("one", nibabel.Nifti1Image), ("two", nibabel.Nifti2Image)):
        for dtype in (np.uint8, np.int16, np.uint16, np.float32, np.float64):
            for order in "<>":
                header = kind.header_class(endianness=order)
                image = kind(PIXELS.astype(dtype).T, affine, header)
                for suffix in (".nii", ".nii.gz"):
                    path = tmp_path / f"{name}{np.dtype(dtype).name}{order == '<'}{suffix}"
                    nibabel.save(image, path)
                    volume = read_volume(path)
                    assert np.array_equal(volume.pixels, PIXELS), path.name
                    assert volume.spacing_mm == pytest.approx(SPACING)


def test_a_gzip_stream_with_a_wrong_checksum_is_damaged(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(write_voxels(tmp_path / "plain.nii", PIXELS, SPACING).read_bytes()))
    packed[-6] ^= 1
    (tmp_path / "scan.nii.gz").write_bytes(packed)
    assert refused(tmp_path / "scan.nii.gz").reason == "truncated"
    (tmp_path / "scan.nii.gz").write_bytes(packed[:-9])
    assert refused(tmp_path / "scan.nii.gz").reason == "truncated"


@pytest.mark.parametrize(
    ("at", "kind", "value", "reason"),
    [
        (70, "h", 128, "unsupported_pixels"),  # colour
        (70, "h", 1792, "unsupported_pixels"),  # complex numbers
        (70, "h", 9999, "unsupported_pixels"),
        (72, "h", 32, "broken_header"),  # 32 bits, and the data type says 8
        (108, "f", 20.0, "broken_header"),  # voxels within the header
        (108, "f", float("nan"), "broken_header"),
        (108, "f", -352.0, "broken_header"),
        (108, "f", 1e30, "broken_header"),
        (108, "f", 1e6, "truncated"),
        (40, "h", 1, "unsupported_pixels"),
        (40, "h", 900, "unsupported_pixels"),
        (42, "h", -5, "unsupported_pixels"),
        (42, "h", 0, "unsupported_pixels"),
    ],
)
def test_a_nifti_field_that_cannot_be_is_named(tmp_path: Path, at: int, kind: str, value: float, reason: str) -> None:
    content = bytearray(write_voxels(tmp_path / "scan.nii", PIXELS, SPACING).read_bytes())
    struct.pack_into(f"<{kind}", content, at, value)
    (tmp_path / "scan.nii").write_bytes(content)
    assert refused(tmp_path / "scan.nii").reason == reason
