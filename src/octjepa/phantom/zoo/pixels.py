"""Pixels of unusual depth, sign, polarity and colour, and scans with little or nothing in them."""

from __future__ import annotations

from typing import Final

import numpy as np
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence

from octjepa.phantom.dicom import encode_frames
from octjepa.phantom.zoo.specimen import Kind, Specimen, accepted, refused


def _inverted(s: Specimen) -> None:
    s.store(255 - s.eye.pixels)
    s.data.PhotometricInterpretation = "MONOCHROME1"
    s.data.PresentationLUTShape = "INVERSE"


def _twelve_bits(s: Specimen) -> None:
    s.store(s.eye.pixels.astype(np.uint16) << 4, depth=12)


def _sixteen_bits(s: Specimen) -> None:
    s.store(s.eye.pixels.astype(np.uint16) << 8)


def _signed(s: Specimen) -> None:
    s.store((s.eye.pixels.astype(np.int16) - 128) * 16)


def _overlay(s: Specimen) -> None:
    """Twelve bits of picture, an old overlay in the thirteenth, nothing but a size in its own group."""
    values = s.eye.pixels.astype(np.uint16) << 4
    values[:, 5:20, 5:40] |= 1 << 12
    s.store(values, depth=12)
    s.data.add_new(0x60000010, "US", values.shape[1])
    s.data.add_new(0x60000011, "US", values.shape[2])
    s.data.add_new(0x60000102, "US", 12)


def _depth_understated(s: Specimen) -> None:
    s.store(s.eye.pixels.astype(np.uint16) << 8, depth=12)


def _slope_negative(s: Specimen) -> None:
    s.store(255 - s.eye.pixels)
    s.data.RescaleSlope, s.data.RescaleIntercept = "-1", "255"


def _slope_per_frame(s: Specimen) -> None:
    """Every frame stretched to 16 bits by itself, with the slope that undoes it."""
    top = s.eye.pixels.max(axis=(1, 2)) + 10.0 * (np.arange(len(s.eye.pixels)) % 5)
    stretched = s.eye.pixels * (65535 / top)[:, None, None]
    s.store(np.round(stretched).astype(np.uint16))
    for group, slope in zip(s.frames, top / 65535, strict=True):
        item = Dataset()
        item.RescaleSlope, item.RescaleIntercept, item.RescaleType = f"{slope:.12f}", "0", "US"
        group.PixelValueTransformationSequence = Sequence([item])


def _rgb(s: Specimen) -> None:
    s.store(np.repeat(s.eye.pixels[..., None], 3, axis=-1))
    s.data.PhotometricInterpretation, s.data.PlanarConfiguration = "RGB", 0


def _rgb_by_plane(s: Specimen) -> None:
    frames, rows, columns = s.eye.pixels.shape
    s.store(np.repeat(s.eye.pixels[:, None], 3, axis=1).reshape(frames, rows, columns, 3))
    s.data.PhotometricInterpretation, s.data.PlanarConfiguration = "RGB", 1


def _luminance(s: Specimen) -> None:
    grey = np.full_like(s.eye.pixels, 128)
    s.store(np.stack([s.eye.pixels, grey, grey], axis=-1))
    s.data.PhotometricInterpretation, s.data.PlanarConfiguration = "YBR_FULL", 0


def _marked(s: Specimen) -> None:
    """Grey in RGB, with a green line drawn on it."""
    colour = np.repeat(s.eye.pixels[..., None], 3, axis=-1)
    colour[:, 40:42] = (0, 255, 0)
    s.store(colour)
    s.data.PhotometricInterpretation, s.data.PlanarConfiguration = "RGB", 0


def _false_colour(s: Specimen) -> None:
    grey = s.eye.pixels
    s.store(np.stack([grey, 255 - grey, np.roll(grey, 30, axis=1)], axis=-1))
    s.data.PhotometricInterpretation, s.data.PlanarConfiguration = "RGB", 0


def _constant(s: Specimen) -> None:
    """Every B-scan of one grey, each its own: two such files would be duplicates."""
    grey = 40 + s.eye.person.index % 100
    s.store(np.full_like(s.eye.pixels, grey))


def _all_black(s: Specimen) -> None:
    pixels = np.zeros_like(s.eye.pixels)
    s.compress("rle", encode_frames(pixels, "rle"))


def _mostly_black(s: Specimen) -> None:
    pixels = s.eye.pixels.copy()
    pixels[: len(pixels) * 2 // 3] = 0
    s.compress("rle", encode_frames(pixels, "rle"))


def _blink(s: Specimen) -> None:
    pixels = s.eye.pixels.copy()
    pixels[9:12] = 0
    s.compress("rle", encode_frames(pixels, "rle"))


def _white_fill(s: Specimen) -> None:
    """The white triangle that registration leaves at the border."""
    pixels = s.eye.pixels.copy()
    _, rows, columns = pixels.shape
    corner = np.arange(rows)[:, None] + np.arange(columns) < min(rows, columns) // 3
    pixels[:, corner] = 255
    s.store(pixels)


def _too_few(s: Specimen) -> None:
    s.store(s.eye.pixels[:3])
    del s.frames[3:]


def _too_small(s: Specimen) -> None:
    s.store(np.ascontiguousarray(s.eye.pixels[:, :6]))


def _odd_length(s: Specimen) -> None:
    """Rows and columns left out until the pixels are an odd number of bytes, so that a padding byte follows."""
    frames = len(s.eye.pixels) - 1 + len(s.eye.pixels) % 2
    rows, columns = ((count - 1) // 2 * 2 - 1 for count in s.eye.pixels.shape[1:])
    s.store(np.ascontiguousarray(s.eye.pixels[:frames, :rows, :columns]))
    del s.frames[frames:]


KINDS: Final[tuple[Kind, ...]] = (
    accepted("inverted", "MONOCHROME1: tissue dark", _inverted, "inverted"),
    accepted("twelve_bits", "12 bits in 16", _twelve_bits, "scaled_from_12_bit"),
    accepted("sixteen_bits", "16 bits", _sixteen_bits, "scaled_from_16_bit"),
    accepted("signed", "signed 16 bits", _signed, "signed"),
    accepted("overlay_bits", "an old overlay above the 12 bits in use", _overlay, "unused_bits_dropped"),
    accepted("depth_understated", "16 bits called 12", _depth_understated, "bits_stored_exceeded"),
    accepted("slope_negative", "a rescale slope of -1", _slope_negative, "inverted"),
    accepted("slope_per_frame", "a rescale slope in every frame", _slope_per_frame, "rescaled_per_frame"),
    accepted("rgb", "grey as RGB", _rgb, "rgb_to_grey"),
    accepted("rgb_by_plane", "grey as RGB, plane after plane", _rgb_by_plane, "rgb_to_grey"),
    accepted("luminance", "grey as YBR", _luminance, "rgb_to_grey"),
    accepted("marked", "a coloured line drawn on grey", _marked, "colour_dropped", same_pixels=False),
    refused("false_colour", "false colours", _false_colour, "unsupported_pixels"),
    refused("constant", "every B-scan of one grey", _constant, "blank"),
    refused("all_black", "every compressed B-scan black", _all_black, "blank"),
    refused("mostly_black", "two thirds of the B-scans black", _mostly_black, "blank"),
    accepted("blink", "three neighbouring B-scans black", _blink, "blank_frames"),
    accepted("white_fill", "a white corner from registration", _white_fill, "fill_masked", same_pixels=False),
    refused("too_few", "three B-scans", _too_few, "too_few_frames"),
    refused("too_small", "six rows", _too_small, "unsupported_pixels"),
    accepted("odd_length", "an odd number of bytes, padded", _odd_length, same_pixels=False, fewer_frames=1),
)  # fmt: skip
