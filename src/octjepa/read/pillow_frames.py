"""Greyscale frames in JPEG Baseline or RLE Lossless, by Pillow's codecs without pydicom's work around them.

For these two syntaxes pydicom's checks and copies around a frame cost much next to its decoding, and its own RLE
decoder is a loop in Python, slow where runs are short. Everything else, and every frame that is not exactly what its
header says, is None: pydicom decodes it then, or says what is wrong with it.
"""

from __future__ import annotations

import struct
from io import BytesIO

import numpy as np
from jaxtyping import Shaped, UInt8

_RLE_HEADER = 64  # bytes: the number of segments and their offsets (DICOM Part 5, G.5)


def decode_jpeg(encoded: bytes, rows: int, columns: int) -> UInt8[np.ndarray, "H W"] | None:
    """A greyscale JPEG of 8 bits."""
    try:
        from PIL import Image

        with Image.open(BytesIO(encoded), formats=("JPEG",)) as image:
            return np.asarray(image) if image.mode == "L" and image.size == (columns, rows) else None
    except Exception:  # pydicom's error names what is wrong
        return None


def decode_rle(encoded: bytes, rows: int, columns: int, allocated: int) -> Shaped[np.ndarray, "H W"] | None:
    """Unsigned values of 8 or 16 bits `allocated`, stored as one segment of packed bytes each, the highest first."""
    count = allocated // 8
    if len(encoded) < _RLE_HEADER or struct.unpack_from("<L", encoded)[0] != count:
        return None
    starts = struct.unpack_from(f"<{count}L", encoded, 4)
    segments = []
    for start, end in zip(starts, (*starts[1:], len(encoded)), strict=True):
        segment = _unpack_bits(encoded[start:end], rows * columns)
        if segment is None:
            return None
        segments.append(segment)
    if count == 1:
        return segments[0].reshape(rows, columns)
    return np.stack(segments[::-1], axis=-1).view("<u2").reshape(rows, columns)


def _unpack_bits(packed: bytes, size: int) -> UInt8[np.ndarray, " n"] | None:
    """`size` bytes unpacked; what follows them is padding. As one line: some writers' runs go over the end of a row."""
    try:
        from PIL import Image

        return np.asarray(Image.frombytes("L", (size, 1), packed, "packbits", "L"))[0]
    except Exception:  # it ends early
        return None
