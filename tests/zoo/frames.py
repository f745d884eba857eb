"""Compressed frames that are broken, cut, scrambled, split or listed wrongly, transfer syntaxes that contradict the
data, and pixels of unusual depth, sign, polarity and colour, or with little or nothing in them."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
from jaxtyping import UInt8
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate_extended
from pydicom.sequence import Sequence
from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless, JPEGLSLossless

from octjepa.keys import generator
from octjepa.phantom.broken import Apply, Defect, Files, ScanFile, accepted, refused
from octjepa.phantom.dicom import encode_frames

_ITEM = b"\xfe\xff\x00\xe0"
_BROKEN = 5  # the frame that is broken where one is


def _noise(scan: ScanFile, length: int) -> bytes:
    return generator("phantom zoo", scan.seed, scan.eye.person.index).bytes(length)


def _only_one(_: int) -> Iterable[int]:
    return (_BROKEN,)


def _changed(
    codec: str,
    change: Callable[[ScanFile, int, bytes], bytes],
    indices: Callable[[int], Iterable[int]] = _only_one,
) -> Apply:
    """The code streams of `indices`, a function of the number of frames, become change(scan, index, stream)."""

    def apply(scan: ScanFile) -> None:
        streams = encode_frames(scan.pixels, codec)
        for index in indices(len(streams)):
            streams[index] = change(scan, index, streams[index])
        scan.compress(codec, streams)

    return apply


def _noisy_end(scan: ScanFile, _: int, stream: bytes) -> bytes:
    return stream[:40] + _noise(scan, 400)


def _half(_: ScanFile, __: int, stream: bytes) -> bytes:
    return stream[: len(stream) // 2]


def _smaller(scan: ScanFile, _: int, __: bytes) -> bytes:
    return encode_frames(scan.pixels[:2, ::2, ::2], "jpeg2000")[0]


def _scramble(_: ScanFile, __: int, stream: bytes) -> bytes:
    """Every seventh byte XORed with 0x5A and the halves swapped, as some Zeiss exports hide their frames."""
    swapped = np.frombuffer(stream[len(stream) * 3 // 5 :] + stream[: len(stream) * 3 // 5], np.uint8).copy()
    swapped[::7] ^= 0x5A
    return swapped.tobytes()


def _boxed(scan: ScanFile, index: int, _: bytes) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(scan.pixels[index]).save(buffer, "JPEG2000", irreversible=False)
    return buffer.getvalue()


def _one_empty(scan: ScanFile) -> None:
    streams = scan.compress("jpeg2000")
    streams[_BROKEN] = b""
    scan.set_encapsulated(b"".join(_ITEM + len(item).to_bytes(4, "little") + item for item in [b"", *streams]))


def _all_other_size(scan: ScanFile) -> None:
    scan.compress("jpeg2000", encode_frames(scan.pixels[:, ::2, ::2], "jpeg2000"))


def _in_fragments(scan: ScanFile) -> None:
    scan.compress("jpeg2000", fragments_per_frame=3, has_bot=False)


def _offsets_wrong(scan: ScanFile) -> None:
    scan.compress("jpeg2000", fragments_per_frame=2)
    content = scan.data.PixelData
    (length,) = struct.unpack_from("<I", content, 4)
    offsets = np.frombuffer(content[8 : 8 + length], "<u4") // 2 + 6
    scan.set_encapsulated(content[:8] + offsets.astype("<u4").tobytes() + content[8 + length :])


def _extended_offsets(scan: ScanFile) -> None:
    content, offsets, lengths = encapsulate_extended(scan.compress("jpeg2000"))
    scan.set_encapsulated(content)
    scan.data.add_new(0x7FE00001, "OV", offsets)
    scan.data.add_new(0x7FE00002, "OV", lengths)


def _item_broken(scan: ScanFile) -> None:
    scan.compress("jpeg2000")
    content = bytearray(scan.data.PixelData)
    third = [i for i in range(len(content)) if content.startswith(_ITEM, i)][3]
    content[third : third + 4] = b"\xfe\xff\x77\xe0"
    scan.set_encapsulated(bytes(content))


def _other_syntax(codec: str, syntax: str) -> Apply:
    """Frames in `codec` below a header that names another transfer syntax."""

    def apply(scan: ScanFile) -> None:
        scan.compress(codec)
        scan.data.file_meta.TransferSyntaxUID = syntax

    return apply


def _renamed_syntax(uid: str) -> Apply:
    """JPEG 2000 whose transfer syntax is replaced in the bytes of the file."""

    def apply(scan: ScanFile) -> Files:
        scan.compress("jpeg2000")
        old = str(JPEG2000Lossless).encode() + b"\0" * (len(JPEG2000Lossless) % 2)
        return scan.replaced(old, uid.encode().ljust(len(old), b"\0"))

    return apply


def _says_compressed(scan: ScanFile) -> Files:
    scan.store()
    return scan.replaced(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.5\0")


DEFECTS: Final[tuple[Defect, ...]] = (
    accepted("frame_broken", "one JPEG 2000 frame is noise", _changed("jpeg2000", _noisy_end), "gap_frames"),
    accepted("frame_empty", "one fragment is empty", _one_empty, "gap_frames"),
    accepted(
        "frame_zeroed",
        "one RLE frame is all zeros",
        _changed("rle", lambda _, __, stream: bytes(len(stream))),
        "gap_frames",
    ),
    accepted("frame_cut", "one JPEG 2000 frame is truncated", _changed("jpeg2000", _half), "gap_frames"),
    accepted("frame_jpeg_cut", "one JPEG frame is truncated", _changed("jpeg", _half), "gap_frames"),
    accepted("frame_other_size", "one frame has another size", _changed("jpeg2000", _smaller), "gap_frames"),
    refused(
        "frames_neighbours",
        "two adjacent frames are noise",
        _changed("jpeg2000", _noisy_end, lambda _: (_BROKEN, _BROKEN + 1)),
        "frames_broken",
    ),
    refused(
        "frames_many",
        "every third frame is noise",
        _changed("jpeg2000", _noisy_end, lambda count: range(1, count, 3)),
        "frames_broken",
    ),
    refused(
        "frames_all",
        "every frame is noise",
        _changed("jpeg2000", lambda scan, _, __: _noise(scan, 500), range),
        "wrong_transfer_syntax",
    ),
    refused(
        "frames_other_size", "all frames differ in size from the header", _all_other_size, "header_contradicts_pixels"
    ),
    refused(
        "scrambled",
        "JPEG 2000 scrambled as in some Zeiss exports",
        _changed("jpeg2000", _scramble, range),
        "scrambled_pixels",
    ),
    accepted("fragments", "three fragments per frame and no offset table", _in_fragments),
    accepted("offsets_wrong", "an offset table with wrong offsets", _offsets_wrong),
    accepted("offsets_extended", "an extended offset table", _extended_offsets),
    accepted("boxed", "JPEG 2000 frames wrapped as JP2 files", _changed("jpeg2000", _boxed, range)),
    refused("item_broken", "an item tag between two frames is damaged", _item_broken, "truncated", "frames_missing"),
    refused(
        "syntax_says_native",
        "compressed frames, uncompressed transfer syntax",
        _other_syntax("rle", ExplicitVRLittleEndian),
        "wrong_transfer_syntax",
    ),
    refused(
        "syntax_says_compressed",
        "uncompressed frames, compressed transfer syntax",
        _says_compressed,
        "wrong_transfer_syntax",
        "truncated",
    ),
    refused(
        "syntax_says_other",
        "JPEG 2000 frames, transfer syntax JPEG-LS",
        _other_syntax("jpeg2000", JPEGLSLossless),
        "wrong_transfer_syntax",
    ),
    refused(
        "syntax_of_video", "the transfer syntax of a video", _renamed_syntax("1.2.840.10008.1.2.4.102"), "no_decoder"
    ),
    refused("syntax_private", "a private transfer syntax", _renamed_syntax("1.2.276.0.9999.1.2.3.4"), "no_decoder"),
    refused(
        "syntax_missing",
        "no transfer syntax",
        lambda scan: scan.replaced(b"\x02\x00\x10\x00UI", b"\x02\x00\x11\x00UI"),
        "broken_header",
    ),
)


def _rgb(*channels: np.ndarray) -> UInt8[np.ndarray, "D H W 3"]:
    return np.stack(channels, axis=-1)


def _store_colour(scan: ScanFile, colour: np.ndarray, interpretation: str = "RGB", planar: int = 0) -> None:
    scan.store(colour, PhotometricInterpretation=interpretation, PlanarConfiguration=planar)


def _by_plane(scan: ScanFile) -> None:
    planes = np.repeat(scan.pixels[:, None], 3, axis=1)  # [D, 3, H, W]
    _store_colour(scan, planes.reshape(*scan.pixels.shape, 3), planar=1)


def _luminance(scan: ScanFile) -> None:
    neutral = np.full_like(scan.pixels, 128)
    _store_colour(scan, _rgb(scan.pixels, neutral, neutral), "YBR_FULL")


def _marked(scan: ScanFile) -> None:
    colour = _rgb(*[scan.pixels] * 3)
    colour[:, 40:42] = (0, 255, 0)
    _store_colour(scan, colour)


def _overlay(scan: ScanFile) -> None:
    """Twelve bits of picture, an old overlay in the thirteenth, nothing but a size in its own group."""
    values = scan.pixels.astype(np.uint16) << 4
    values[:, 5:20, 5:40] |= 1 << 12
    scan.store(values, bits_stored=12)
    for tag, value in ((0x60000010, values.shape[1]), (0x60000011, values.shape[2]), (0x60000102, 12)):
        scan.data.add_new(tag, "US", value)


def _slope_per_frame(scan: ScanFile) -> None:
    """Every frame stretched to 16 bits by itself, with the slope that reverses it."""
    top = scan.pixels.max(axis=(1, 2)) + 10.0 * (np.arange(len(scan.pixels)) % 5)
    scan.store(np.round(scan.pixels * (65535 / top)[:, None, None]).astype(np.uint16))
    for group, slope in zip(scan.frame_groups, top / 65535, strict=True):
        item = Dataset()
        item.RescaleSlope, item.RescaleIntercept, item.RescaleType = f"{slope:.12f}", "0", "US"
        group.PixelValueTransformationSequence = Sequence([item])


def _black(indices: Callable[[int], slice]) -> Apply:
    """RLE whose frames of `indices`, a function of the number of frames, are black."""

    def apply(scan: ScanFile) -> None:
        pixels = scan.pixels.copy()
        pixels[indices(len(pixels))] = 0
        scan.compress("rle", encode_frames(pixels, "rle"))

    return apply


def _white_fill(scan: ScanFile) -> None:
    """The white triangle that registration leaves at the border."""
    pixels = scan.pixels.copy()
    _, depth, columns = pixels.shape
    pixels[:, np.arange(depth)[:, None] + np.arange(columns) < min(depth, columns) // 3] = 255
    scan.store(pixels)


def _too_few(scan: ScanFile) -> None:
    scan.store(scan.pixels[:3])
    del scan.frame_groups[3:]


def _odd_length(scan: ScanFile) -> None:
    """A part of the scan whose pixels are an odd number of bytes, so that a padding byte follows."""
    frames = len(scan.pixels) - 1 + len(scan.pixels) % 2
    depth, columns = ((count - 1) // 2 * 2 - 1 for count in scan.pixels.shape[1:])
    scan.store(np.ascontiguousarray(scan.pixels[:frames, :depth, :columns]))
    del scan.frame_groups[frames:]


PIXEL_DEFECTS: Final[tuple[Defect, ...]] = (
    accepted(
        "inverted",
        "MONOCHROME1: tissue dark",
        lambda scan: scan.store(
            255 - scan.pixels, PhotometricInterpretation="MONOCHROME1", PresentationLUTShape="INVERSE"
        ),
        "inverted",
    ),
    accepted(
        "twelve_bits",
        "12 bits stored in 16",
        lambda scan: scan.store(scan.pixels.astype(np.uint16) << 4, 12),
        "scaled_from_12_bit",
    ),
    accepted(
        "sixteen_bits", "16 bits", lambda scan: scan.store(scan.pixels.astype(np.uint16) << 8), "scaled_from_16_bit"
    ),
    accepted("signed", "signed 16 bits", lambda scan: scan.store((scan.pixels.astype(np.int16) - 128) * 16), "signed"),
    accepted("overlay_bits", "an old overlay above the 12 bits in use", _overlay, "unused_bits_dropped"),
    accepted(
        "depth_understated",
        "16 bits, BitsStored 12",
        lambda scan: scan.store(scan.pixels.astype(np.uint16) << 8, 12),
        "bits_stored_exceeded",
    ),
    accepted(
        "slope_negative",
        "a rescale slope of -1",
        lambda scan: scan.store(255 - scan.pixels, RescaleSlope="-1", RescaleIntercept="255"),
        "inverted",
    ),
    accepted("slope_per_frame", "a rescale slope per frame", _slope_per_frame, "rescaled_per_frame"),
    accepted("rgb", "intensities as RGB", lambda scan: _store_colour(scan, _rgb(*[scan.pixels] * 3)), "rgb_to_grey"),
    accepted("rgb_by_plane", "intensities as RGB, planar", _by_plane, "rgb_to_grey"),
    accepted("luminance", "intensities as YBR_FULL", _luminance, "rgb_to_grey"),
    accepted("marked", "a coloured line burned into the scan", _marked, "colour_dropped", same_pixels=False),
    refused(
        "false_colour",
        "false colours",
        lambda scan: _store_colour(scan, _rgb(scan.pixels, 255 - scan.pixels, np.roll(scan.pixels, 30, axis=1))),
        "unsupported_pixels",
    ),
    # Each file has its own intensity: two equal ones would be duplicates.
    refused(
        "constant",
        "every B-scan has constant intensity",
        lambda scan: scan.store(np.full_like(scan.pixels, 40 + scan.eye.person.index % 100)),
        "blank",
    ),
    refused("all_black", "every B-scan black, compressed", _black(lambda count: slice(count)), "blank"),
    refused("mostly_black", "two thirds of the B-scans black", _black(lambda count: slice(count * 2 // 3)), "blank"),
    accepted("blink", "three adjacent B-scans black", _black(lambda _: slice(9, 12)), "blank_frames"),
    accepted("white_fill", "a white corner filled by registration", _white_fill, "fill_masked", same_pixels=False),
    refused("too_few", "three B-scans", _too_few, "too_few_frames"),
    refused(
        "too_small", "six rows", lambda scan: scan.store(np.ascontiguousarray(scan.pixels[:, :6])), "unsupported_pixels"
    ),
    accepted("odd_length", "an odd number of bytes, with padding", _odd_length, same_pixels=False, fewer_frames=1),
)
