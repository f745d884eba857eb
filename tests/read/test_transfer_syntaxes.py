"""Every transfer syntax, depth, sign and sample layout gives the same picture, bit-exact where it is lossless."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    RLELossless,
)

from oct_dicom import make_dataset, put_frames, retina, save
from octjepa.read.dicom import read_dicom
from octjepa.read.pixels import decode_pixels
from octjepa.read.raw_scan import RawScan
from syntaxes import CODED, Coded

PIXELS = retina(frames=5)


def deep(bits: int, signed: bool = False) -> np.ndarray:
    """The retina with `bits` bits, the low ones in use too."""
    if bits == 8:
        return PIXELS
    low = np.arange(PIXELS.size, dtype=np.uint16).reshape(PIXELS.shape) * 7 % 2 ** (bits - 8)
    values = (PIXELS.astype(np.uint16) << (bits - 8)) | low
    return (values.astype(np.int32) - 2 ** (bits - 1)).astype(np.int16) if signed else values


def dataset(values: np.ndarray, bits: int) -> Dataset:
    ds = make_dataset(values)
    ds.BitsStored, ds.HighBit = bits, bits - 1
    return ds


def read(ds: Dataset, tmp_path: Path) -> RawScan:
    return read_dicom(save(ds, tmp_path / "scan.dcm"))


def intensities(values: np.ndarray) -> np.ndarray:
    """What 8-bit grey of `values` is, by the rule of the reader's documentation."""
    shifted = values.astype(np.int64) - min(0, int(values.min()))
    return np.round(shifted * 255.0 / (2 ** max(8, int(shifted.max()).bit_length()) - 1))


@pytest.mark.parametrize(
    ("coded", "bits"), [(c, b) for c in CODED for b in c.depths], ids=lambda v: getattr(v, "name", v)
)
def test_compressed(coded: Coded, bits: int, tmp_path: Path) -> None:
    values = deep(bits)
    ds = dataset(values, bits)
    ds.file_meta.TransferSyntaxUID = coded.syntax
    put_frames(ds, [coded.encode(frame, bits) for frame in values])
    scan = read(ds, tmp_path)
    assert np.abs(scan.pixels - intensities(values)).max() <= coded.error
    assert (f"scaled_from_{bits}_bit" in scan.notes) == (bits > 8)


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    "syntax",
    [ImplicitVRLittleEndian, ExplicitVRLittleEndian, ExplicitVRBigEndian, DeflatedExplicitVRLittleEndian, RLELossless],
)
def test_native_and_rle(syntax: UID, signed: bool, bits: int, tmp_path: Path) -> None:
    if bits == 8 and signed:
        pytest.skip("no device writes signed bytes")
    values = deep(bits, signed)
    ds = dataset(values, bits)
    if syntax == RLELossless:
        ds.compress(RLELossless, values, generate_instance_uid=False)
    else:
        ds.file_meta.TransferSyntaxUID = syntax
        if syntax == ExplicitVRBigEndian:
            ds.PixelData = values.astype(values.dtype.newbyteorder(">")).tobytes()
    scan = read(ds, tmp_path)
    assert np.array_equal(scan.pixels, intensities(values))
    assert ("signed" in scan.notes) == signed
    if bits == 8:
        assert np.array_equal(scan.pixels, dcmread(tmp_path / "scan.dcm").pixel_array)


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, RLELossless, JPEG2000Lossless])
@pytest.mark.parametrize("planar", [0, 1])
def test_greyscale_stored_as_colour(syntax: UID, planar: int, tmp_path: Path) -> None:
    colour = np.repeat(PIXELS[..., None], 3, axis=-1)
    ds = make_dataset(colour)
    if syntax == RLELossless:
        ds.compress(RLELossless, colour, generate_instance_uid=False)
    elif syntax == JPEG2000Lossless:
        import imagecodecs

        ds.file_meta.TransferSyntaxUID = syntax
        put_frames(ds, [bytes(imagecodecs.jpeg2k_encode(f, level=0, codecformat="j2k", mct=False)) for f in colour])
    elif planar:
        ds.PixelData = np.ascontiguousarray(colour.transpose(0, 3, 1, 2)).tobytes()
    ds.PlanarConfiguration = planar
    scan = read(ds, tmp_path)
    assert np.array_equal(scan.pixels, PIXELS)
    assert scan.notes == ("rgb_to_grey",)


def test_bytes_in_big_endian_words(tmp_path: Path) -> None:
    """Two 8-bit pixels in a word change places when the words do (DICOM PS3.5, 8.1.1)."""
    ds = make_dataset(PIXELS)
    ds.file_meta.TransferSyntaxUID = ExplicitVRBigEndian
    ds.PixelData = np.frombuffer(PIXELS.tobytes(), "<u2").byteswap().tobytes()
    ds["PixelData"].VR = "OW"
    assert np.array_equal(read(ds, tmp_path).pixels, PIXELS)


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("has_bot", [True, False])
@pytest.mark.parametrize("declared", [5, 0])
def test_fragments_and_offset_tables(pieces: int, has_bot: bool, declared: int, tmp_path: Path) -> None:
    from oct_dicom import encode

    ds = make_dataset(PIXELS)
    ds.file_meta.TransferSyntaxUID = JPEG2000Lossless
    put_frames(ds, [])
    ds.PixelData = encapsulate(encode(PIXELS, JPEG2000Lossless), fragments_per_frame=pieces, has_bot=has_bot)
    ds.NumberOfFrames = declared
    assert np.array_equal(read(ds, tmp_path).pixels, PIXELS)


def test_every_frame_is_decoded_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than one decoded frame next to the volume: decoding all at once is what takes a file's memory twice."""
    from oct_dicom import encode
    from octjepa.read import encapsulated

    calls: list[int] = []
    real = encapsulated.FrameDecoder.__call__

    def counting(self: object, piece: bytes, stream: object) -> np.ndarray:
        calls.append(len(piece))
        return real(self, piece, stream)  # type: ignore[arg-type]

    monkeypatch.setattr(encapsulated.FrameDecoder, "__call__", counting)
    ds = make_dataset(PIXELS)
    ds.file_meta.TransferSyntaxUID = JPEG2000Lossless
    frames = encode(PIXELS, JPEG2000Lossless)
    put_frames(ds, frames)
    decode_pixels(ds)
    assert len(calls) == len(frames)
