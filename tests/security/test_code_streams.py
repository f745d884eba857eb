"""A code stream reaches its decoder only if it declares the size that the DICOM header states.

A decoder allocates what the stream declares. CharLS ended the process where it could not.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import Dataset
from pydicom.uid import JPEG2000Lossless, JPEGBaseline8Bit, JPEGLSLossless, RLELossless

from oct_dicom import encode, make_dataset, put_frames, retina, save, use_syntax
from octjepa.errors import VolumeRejected
from octjepa.read.encapsulated import read_stream_header, split_frames
from octjepa.read.one_frame import read_one_frame
from octjepa.read.reader import read_volume

PIXELS = retina(10, 96, 80)
BIG = 60000


def resized(frame: bytes, rows: int = BIG, columns: int = BIG) -> bytes:
    """A JPEG or JPEG-LS stream whose start of frame declares another size."""
    at = next(frame.index(mark) for mark in (b"\xff\xf7", b"\xff\xc0") if mark in frame)
    return frame[: at + 5] + struct.pack(">HH", rows, columns) + frame[at + 9 :]


def twice(frame: bytes) -> bytes:
    """The start of frame twice, the second one with another size: which of both counts is up to the decoder."""
    at = next(frame.index(mark) for mark in (b"\xff\xf7", b"\xff\xc0") if mark in frame)
    (length,) = struct.unpack_from(">H", frame, at + 2)
    return frame[: at + 2 + length] + resized(frame)[at:]


def oversize(frame: bytes) -> bytes:
    """JPEG-LS: no size in the start of frame, the true one in a preset segment (T.87, C.2.4.1.4)."""
    emptied = resized(frame, 0, 0)
    return emptied[:2] + b"\xff\xf8" + struct.pack(">HBBHH", 8, 4, 2, BIG, BIG) + emptied[2:]


def odd_length(frame: bytes) -> bytes:
    return b"\xff\xd8\xff\xe0\x00\x01" + resized(frame)[2:]


def big_j2k(frame: bytes) -> bytes:
    return frame[:8] + struct.pack(">II", BIG, BIG) + frame[16:]


def hidden_j2k(frame: bytes) -> bytes:
    """A JP2 file in which a box of anything holds the true header, and the code stream declares another size."""
    decoy = struct.pack(">I4s", 8 + 60, b"uuid") + frame[:60]
    stream = big_j2k(frame)
    return struct.pack(">I4sI", 12, b"jP  ", 0x0D0A870A) + decoy + struct.pack(">I4s", 0, b"jp2c") + stream


CASES = {
    "jpeg_ls, another size": (JPEGLSLossless, resized),
    "jpeg_ls, two sizes": (JPEGLSLossless, twice),
    "jpeg_ls, oversize preset": (JPEGLSLossless, oversize),
    "jpeg_ls, odd segment": (JPEGLSLossless, odd_length),
    "jpeg, another size": (JPEGBaseline8Bit, resized),
    "jpeg, two sizes": (JPEGBaseline8Bit, twice),
    "jpeg_2000, another size": (JPEG2000Lossless, big_j2k),
    "jpeg_2000, hidden in a box": (JPEG2000Lossless, hidden_j2k),
}


def compressed(case: str) -> Dataset:
    syntax, change = CASES[case]
    ds = make_dataset(PIXELS)
    ds.file_meta.TransferSyntaxUID = syntax
    put_frames(ds, [change(frame) for frame in encode(PIXELS, syntax)])
    return ds


@pytest.mark.parametrize("case", CASES)
def test_a_stream_of_another_size_reaches_no_decoder(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octjepa.read import encapsulated

    def decoded(*_: object) -> np.ndarray:
        raise AssertionError("a stream of another size was given to a decoder")

    monkeypatch.setattr(encapsulated.FrameDecoder, "__call__", decoded)
    path = save(compressed(case), tmp_path / "scan.dcm")
    with pytest.raises(VolumeRejected, match=r"header_contradicts_pixels|wrong_transfer_syntax"):
        read_volume(path)
    assert read_one_frame(path, 3, PIXELS.shape, []) is None


def test_one_such_stream_among_others_costs_its_own_frame(tmp_path: Path) -> None:
    frames = encode(PIXELS, JPEGLSLossless)
    for change in (resized, twice, oversize):
        ds = make_dataset(PIXELS)
        ds.file_meta.TransferSyntaxUID = JPEGLSLossless
        put_frames(ds, [*frames[:4], change(frames[4]), *frames[5:]])
        assert "gap_frames=1" in read_volume(save(ds, tmp_path / "scan.dcm")).notes


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("depths", [(8, 12), (12, 8)])
def test_a_stream_of_another_depth_costs_its_own_frame(depths: tuple[int, int], at: int, tmp_path: Path) -> None:
    deep = PIXELS.astype(np.uint16) * 16 + 15
    coded = {8: encode(PIXELS, JPEGLSLossless), 12: encode(deep, JPEGLSLossless)}
    assert [read_stream_header(coded[depth][0]).bits for depth in (8, 12)] == [8, 12]  # type: ignore[union-attr]
    odd, usual = depths
    ds = make_dataset(deep)
    ds.BitsStored, ds.HighBit = 12, 11
    ds.file_meta.TransferSyntaxUID = JPEGLSLossless
    put_frames(ds, [*coded[usual][:at], coded[odd][at], *coded[usual][at + 1 :]])
    volume = read_volume(save(ds, tmp_path / "scan.dcm"))
    assert "gap_frames=1" in volume.notes
    intact = np.arange(len(PIXELS)) != at
    np.testing.assert_allclose(volume.pixels[intact], PIXELS[intact], atol=1)
    put_frames(ds, [*coded[8][:5], *coded[12][5:]])
    with pytest.raises(VolumeRejected, match=r"frames_broken: .* its code stream has another depth"):
        read_volume(save(ds, tmp_path / "scan.dcm"))


@pytest.mark.parametrize("syntax", [JPEGLSLossless, JPEGBaseline8Bit, JPEG2000Lossless])
def test_the_header_of_a_plain_stream_is_read(syntax: str) -> None:
    header = read_stream_header(encode(PIXELS, syntax)[0])
    assert header is not None
    assert (header.rows, header.columns, header.samples, header.bits) == (96, 80, 1, 8)


def test_a_small_file_that_declares_gigabytes_is_refused(tmp_path: Path) -> None:
    """12 frames of 2048 x 16384 in JPEG 2000 are 384 MiB; the code streams have some thousand bytes."""
    ds = make_dataset(PIXELS)
    ds.file_meta.TransferSyntaxUID = JPEG2000Lossless
    frame = encode(PIXELS[:1], JPEG2000Lossless)[0]
    size = struct.pack(">II", 16384, 2048)
    large = frame[:8] + size + frame[16:24] + size + frame[32:]
    put_frames(ds, [large] * 12)
    ds.Rows, ds.Columns, ds.NumberOfFrames = 2048, 16384, 12
    del ds.PerFrameFunctionalGroupsSequence
    with pytest.raises(VolumeRejected, match="cannot hold that"):
        read_volume(save(ds, tmp_path / "scan.dcm"))


def empty_fragments(count: int, last: bytes) -> bytes:
    return b"\xfe\xff\x00\xe0\0\0\0\0" * (count + 1) + b"\xfe\xff\x00\xe0" + struct.pack("<I", len(last)) + last


@pytest.mark.parametrize("declared", [10, 1, 100_000])
def test_empty_fragments_take_linear_time(declared: int) -> None:
    """Twice as many take about twice as long; they took four times as long, hours for a million."""
    ds = Dataset()

    def seconds(count: int) -> float:
        ds.PixelData = empty_fragments(count, encode(PIXELS[:1], JPEGLSLossless)[0])
        start = time.process_time()
        split_frames(ds, declared)
        return time.process_time() - start

    seconds(1000)
    few, many = seconds(20_000), seconds(80_000)
    assert many < 10 * few + 0.2
    assert many < 10


def test_a_million_frames_are_no_scan(tmp_path: Path) -> None:
    ds = make_dataset(PIXELS)
    ds.file_meta.TransferSyntaxUID = RLELossless
    put_frames(ds, [bytes(8)])
    del ds.PerFrameFunctionalGroupsSequence
    ds.PixelData = empty_fragments(100_000, b"\0" * 8) + b"\xfe\xff\xdd\xe0\0\0\0\0"
    with pytest.raises(VolumeRejected, match=r"size_implausible.*4096"):
        read_volume(save(ds, tmp_path / "scan.dcm"))


def test_frames_of_any_syntax_are_still_read(tmp_path: Path) -> None:
    for syntax in (JPEGLSLossless, JPEG2000Lossless, RLELossless):
        ds = make_dataset(PIXELS)
        use_syntax(ds, PIXELS, syntax)
        assert np.array_equal(read_volume(save(ds, tmp_path / "scan.dcm")).pixels, PIXELS)
