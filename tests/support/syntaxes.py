"""Frames in every transfer syntax of the standard that holds OCT, by encoders other than the reader's decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import imagecodecs
import numpy as np
from pydicom.uid import (
    HTJ2K,
    JPEG2000,
    UID,
    HTJ2KLossless,
    HTJ2KLosslessRPCL,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLossless,
    JPEGLosslessSV1,
    JPEGLSLossless,
    JPEGLSNearLossless,
)

Encode = Callable[[np.ndarray, int], bytes]


class Coded(NamedTuple):
    """`error` is the largest difference that the coding may make, in 8-bit grey values; 0 is bit-exact."""

    name: str
    syntax: UID
    depths: tuple[int, ...]
    error: int
    encode: Encode


def _jpeg(frame: np.ndarray, bits: int) -> bytes:
    return bytes(imagecodecs.jpeg8_encode(frame, level=96, bitspersample=bits))


def _lossless_jpeg(frame: np.ndarray, bits: int) -> bytes:
    return bytes(imagecodecs.ljpeg_encode(frame, bitspersample=bits))


def _jpeg_ls(frame: np.ndarray, bits: int) -> bytes:
    return bytes(imagecodecs.jpegls_encode(frame))


def _near_lossless(frame: np.ndarray, bits: int) -> bytes:
    return bytes(imagecodecs.jpegls_encode(frame, level=2))


def _jpeg_2000(frame: np.ndarray, bits: int) -> bytes:
    return bytes(imagecodecs.jpeg2k_encode(frame, level=0, codecformat="j2k", reversible=True, bitspersample=bits))


def _lossy_jpeg_2000(frame: np.ndarray, bits: int) -> bytes:
    return bytes(imagecodecs.jpeg2k_encode(frame, level=45, codecformat="j2k", reversible=False))


def _ht_jpeg_2000(frame: np.ndarray, bits: int) -> bytes:
    return bytes(imagecodecs.htj2k_encode(frame))


CODED = (
    Coded("JPEG baseline", JPEGBaseline8Bit, (8,), 10, _jpeg),
    Coded("JPEG extended", JPEGExtended12Bit, (8, 12), 10, _jpeg),
    Coded("JPEG lossless", JPEGLossless, (8, 16), 0, _lossless_jpeg),
    Coded("JPEG lossless SV1", JPEGLosslessSV1, (8, 12, 16), 0, _lossless_jpeg),
    Coded("JPEG-LS lossless", JPEGLSLossless, (8, 12, 16), 0, _jpeg_ls),
    Coded("JPEG-LS near-lossless", JPEGLSNearLossless, (8, 12), 2, _near_lossless),
    Coded("JPEG 2000 lossless", JPEG2000Lossless, (8, 12, 16), 0, _jpeg_2000),
    Coded("JPEG 2000 lossy", JPEG2000, (8, 16), 10, _lossy_jpeg_2000),
    Coded("HTJ2K lossless", HTJ2KLossless, (8, 16), 0, _ht_jpeg_2000),
    Coded("HTJ2K lossless RPCL", HTJ2KLosslessRPCL, (8,), 0, _ht_jpeg_2000),
    Coded("HTJ2K", HTJ2K, (8, 12), 0, _ht_jpeg_2000),
)
