"""Frames that Pillow decodes by itself are those of pydicom; what is not exactly such a frame is left to pydicom."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from pydicom.pixels.decoders.rle import _rle_decode_frame
from pydicom.pixels.encoders import RLELosslessEncoder

from octjepa.read.pillow_frames import decode_jpeg, decode_rle

SHAPE = ROWS, COLUMNS = 12, 40


def rle(values: np.ndarray) -> bytes:
    bits = 8 * values.itemsize
    return bytes(
        RLELosslessEncoder.encode(
            values,
            rows=ROWS,
            columns=COLUMNS,
            samples_per_pixel=1,
            bits_allocated=bits,
            bits_stored=bits,
            pixel_representation=0,
            photometric_interpretation="MONOCHROME2",
            number_of_frames=1,
        )
    )


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
@pytest.mark.parametrize("largest", [2, 250])
def test_rle_of_runs_and_of_noise(kind: type, largest: int) -> None:
    values = np.random.default_rng(0).integers(0, largest, SHAPE).astype(kind) * (kind(1) if kind is np.uint8 else 257)
    found = decode_rle(rle(values), ROWS, COLUMNS, values.itemsize * 8)
    assert found is not None
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(
    "packed",
    [
        bytes([129, 7, 129, 8, 129, 9, 161, 10]),  # runs of 128 go over the ends of rows
        bytes([128, 129, 7, 128, 129, 8, 129, 9, 161, 10, 128]),  # 128 says nothing
        bytes([129, 7, 129, 8, 129, 9, 129, 10]) + bytes(6),  # more than enough: padding
    ],
)
@pytest.mark.filterwarnings("ignore:The decoded RLE segment contains")
def test_rle_of_other_writers_is_what_pydicom_makes_of_it(packed: bytes) -> None:
    encoded = bytes([1, 0, 0, 0, 64]).ljust(64, b"\0") + packed
    expected = np.frombuffer(_rle_decode_frame(encoded, ROWS, COLUMNS, 1, 8), np.uint8).reshape(SHAPE)
    found = decode_rle(encoded, ROWS, COLUMNS, 8)
    assert found is not None
    np.testing.assert_array_equal(found, expected)


def test_rle_that_ends_early_or_has_other_segments_is_left_to_pydicom() -> None:
    whole = rle(np.random.default_rng(1).integers(0, 200, SHAPE).astype(np.uint8))
    assert decode_rle(whole[:-40], ROWS, COLUMNS, 8) is None
    assert decode_rle(whole[:30], ROWS, COLUMNS, 8) is None
    assert decode_rle(whole, ROWS, COLUMNS, 16) is None


def test_jpeg_of_another_size_or_colour_or_cut_short_is_left_to_pydicom() -> None:
    def encoded(mode: str) -> bytes:
        file = BytesIO()
        values = np.random.default_rng(2).integers(0, 200, (*SHAPE, 3) if mode == "RGB" else SHAPE).astype(np.uint8)
        Image.fromarray(values).save(file, "JPEG")
        return file.getvalue()

    plain = encoded("L")
    found = decode_jpeg(plain, ROWS, COLUMNS)
    assert found is not None
    np.testing.assert_array_equal(found, np.asarray(Image.open(BytesIO(plain))))
    assert decode_jpeg(plain, COLUMNS, ROWS) is None
    assert decode_jpeg(encoded("RGB"), ROWS, COLUMNS) is None
    assert decode_jpeg(plain[:200], ROWS, COLUMNS) is None
