"""A refusal names the true cause and the way out: movies, missing preambles, decimal commas, repeated frames."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from pydicom.filewriter import dcmwrite

from oct_dicom import make_dataset, put_frames, retina, save
from octjepa.errors import VolumeRejected
from octjepa.ingest import discover
from octjepa.read.reader import read_volume

PIXELS = retina()


@pytest.mark.parametrize(("syntax", "kind"), [("1.2.840.10008.1.2.4.100", "MPEG"), ("1.2.840.10008.1.2.4.107", "HEVC")])
def test_a_movie_is_called_one(syntax: str, kind: str, tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    put_frames(ds, [b"\x00\x00\x01\xb3" + bytes(2000)])
    ds.file_meta.TransferSyntaxUID = syntax
    with pytest.raises(VolumeRejected, match=rf"no_decoder: a movie \({kind}\).*JPEG 2000"):
        read_volume(save(ds, tmp_path / "movie.dcm"))


@pytest.mark.parametrize("name", ["scan.dcm", "scan"])
def test_a_missing_preamble_is_named(name: str, tmp_path: Path) -> None:
    whole = save(make_dataset(PIXELS), tmp_path / "whole.dcm").read_bytes()
    path = tmp_path / "set" / name
    path.parent.mkdir()
    path.write_bytes(whole[132:])
    assert len(discover([path.parent]).files) == 1  # not left out as a file of another kind
    with pytest.raises(VolumeRejected, match=r"not_dicom: DICOM elements without the preamble .* write it again"):
        read_volume(path)


def test_a_dataset_without_file_meta_information_is_named(tmp_path: Path) -> None:
    ds, content = make_dataset(PIXELS), BytesIO()
    del ds.file_meta
    dcmwrite(content, ds, implicit_vr=True, little_endian=True, enforce_file_format=False)
    (tmp_path / "scan.dcm").write_bytes(content.getvalue())
    with pytest.raises(VolumeRejected, match="not_dicom: DICOM elements without the preamble"):
        read_volume(tmp_path / "scan.dcm")


def test_equal_frames_are_counted(tmp_path: Path) -> None:
    equal = np.repeat(PIXELS[:1], 10, axis=0)
    with pytest.raises(VolumeRejected, match="too_few_frames: 10 B-scans of which 1 differ, the others repeat"):
        read_volume(save(make_dataset(equal), tmp_path / "equal.dcm"))
    some = PIXELS.copy()
    some[4] = some[3]
    assert "repeated_frames=1" in read_volume(save(make_dataset(some), tmp_path / "some.dcm")).notes
    assert not any("repeated" in note for note in read_volume(save(make_dataset(PIXELS), tmp_path / "none.dcm")).notes)
