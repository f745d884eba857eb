"""Compressed frames that are broken, cut, scrambled, split or listed wrongly, and transfer syntaxes that lie."""

from __future__ import annotations

import io
import struct
from typing import Final

import numpy as np
from pydicom.encaps import encapsulate_extended
from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless, JPEGLSLossless

from octjepa.keys import generator
from octjepa.phantom.dicom import encode_frames
from octjepa.phantom.zoo.specimen import Files, Kind, Specimen, accepted, refused

_ITEM = b"\xfe\xff\x00\xe0"
_BROKEN = 5  # the frame that is broken where one is


def _noise(s: Specimen, length: int) -> bytes:
    return generator("phantom zoo", s.seed, s.eye.person.index).bytes(length)


def _frames_broken(s: Specimen, indices: range | tuple[int, ...], codec: str = "jpeg2000") -> None:
    frames = encode_frames(s.eye.pixels, codec)
    for index in indices:
        frames[index] = frames[index][:40] + _noise(s, 400)
    s.compress(codec, frames)


def _one_broken(s: Specimen) -> None:
    _frames_broken(s, (_BROKEN,))


def _neighbours_broken(s: Specimen) -> None:
    _frames_broken(s, (_BROKEN, _BROKEN + 1))


def _many_broken(s: Specimen) -> None:
    _frames_broken(s, range(1, len(s.eye.pixels), 3))


def _all_broken(s: Specimen) -> None:
    frames = len(s.eye.pixels)
    s.compress("jpeg2000", [_noise(s, 500) for _ in range(frames)])


def _one_empty(s: Specimen) -> None:
    frames = encode_frames(s.eye.pixels, "jpeg2000")
    frames[_BROKEN] = b""
    s.compress("jpeg2000")
    items = (_ITEM + len(frame).to_bytes(4, "little") + frame for frame in [b"", *frames])
    s.raw_frames(b"".join(items))


def _one_zeroed(s: Specimen) -> None:
    frames = encode_frames(s.eye.pixels, "rle")
    frames[_BROKEN] = bytes(len(frames[_BROKEN]))
    s.compress("rle", frames)


def _one_cut(s: Specimen) -> None:
    frames = encode_frames(s.eye.pixels, "jpeg2000")
    frames[_BROKEN] = frames[_BROKEN][: len(frames[_BROKEN]) // 2]
    s.compress("jpeg2000", frames)


def _one_jpeg_cut(s: Specimen) -> None:
    frames = encode_frames(s.eye.pixels, "jpeg")
    frames[_BROKEN] = frames[_BROKEN][: len(frames[_BROKEN]) // 2]
    s.compress("jpeg", frames)


def _one_other_size(s: Specimen) -> None:
    frames = encode_frames(s.eye.pixels, "jpeg2000")
    frames[_BROKEN] = encode_frames(s.eye.pixels[:2, ::2, ::2], "jpeg2000")[0]
    s.compress("jpeg2000", frames)


def _all_other_size(s: Specimen) -> None:
    s.compress("jpeg2000", encode_frames(s.eye.pixels[:, ::2, ::2], "jpeg2000"))


def _scrambled(s: Specimen) -> None:
    """Every seventh byte XORed with 0x5A and the halves swapped, as some Zeiss exports hide their frames."""
    hidden = []
    for frame in encode_frames(s.eye.pixels, "jpeg2000"):
        turned = np.frombuffer(frame[len(frame) * 3 // 5 :] + frame[: len(frame) * 3 // 5], np.uint8).copy()
        turned[::7] ^= 0x5A
        hidden.append(turned.tobytes())
    s.compress("jpeg2000", hidden)


def _in_pieces(s: Specimen) -> None:
    s.compress("jpeg2000", fragments_per_frame=3, has_bot=False)


def _offsets_wrong(s: Specimen) -> None:
    s.compress("jpeg2000", fragments_per_frame=2)
    content = s.data.PixelData
    (length,) = struct.unpack_from("<I", content, 4)
    table = np.frombuffer(content[8 : 8 + length], "<u4") // 2 + 6
    s.raw_frames(content[:8] + table.astype("<u4").tobytes() + content[8 + length :])


def _extended_offsets(s: Specimen) -> None:
    frames = s.compress("jpeg2000")
    content, offsets, lengths = encapsulate_extended(frames)
    s.raw_frames(content)
    s.data.add_new(0x7FE00001, "OV", offsets)
    s.data.add_new(0x7FE00002, "OV", lengths)


def _boxed(s: Specimen) -> None:
    from PIL import Image

    frames = []
    for frame in s.eye.pixels:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG2000", irreversible=False)
        frames.append(buffer.getvalue())
    s.compress("jpeg2000", frames)


def _item_broken(s: Specimen) -> None:
    s.compress("jpeg2000")
    content = bytearray(s.data.PixelData)
    third = [i for i in range(len(content)) if content.startswith(_ITEM, i)][3]
    content[third : third + 4] = b"\xfe\xff\x77\xe0"
    s.raw_frames(bytes(content))


def _says_native(s: Specimen) -> None:
    s.compress("rle")
    s.data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian


def _says_compressed(s: Specimen) -> Files:
    s.store(s.eye.pixels)
    return {s.path: s.content().replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.5\0", 1)}


def _says_other(s: Specimen) -> None:
    s.compress("jpeg2000")
    s.data.file_meta.TransferSyntaxUID = JPEGLSLossless


def _renamed_syntax(s: Specimen, uid: str) -> Files:
    s.compress("jpeg2000")
    old, new = str(JPEG2000Lossless).encode() + b"\0" * (len(JPEG2000Lossless) % 2), uid.encode()
    return {s.path: s.content().replace(old, new.ljust(len(old), b"\0"), 1)}


def _video(s: Specimen) -> Files:
    return _renamed_syntax(s, "1.2.840.10008.1.2.4.102")


def _private(s: Specimen) -> Files:
    return _renamed_syntax(s, "1.2.276.0.9999.1.2.3.4")


def _no_syntax(s: Specimen) -> Files:
    content = s.content()
    return {s.path: content.replace(b"\x02\x00\x10\x00UI", b"\x02\x00\x11\x00UI", 1)}


KINDS: Final[tuple[Kind, ...]] = (
    accepted("frame_broken", "one JPEG 2000 frame is noise", _one_broken, "gap_frames"),
    accepted("frame_empty", "one fragment holds nothing", _one_empty, "gap_frames"),
    accepted("frame_zeroed", "one RLE frame is all zeros", _one_zeroed, "gap_frames"),
    accepted("frame_cut", "one JPEG 2000 frame ends half way", _one_cut, "gap_frames"),
    accepted("frame_jpeg_cut", "one JPEG frame ends half way", _one_jpeg_cut, "gap_frames"),
    accepted("frame_other_size", "one frame has another size", _one_other_size, "gap_frames"),
    refused("frames_neighbours", "two neighbouring frames are noise", _neighbours_broken, "frames_broken"),
    refused("frames_many", "every third frame is noise", _many_broken, "frames_broken"),
    refused("frames_all", "every frame is noise", _all_broken, "wrong_transfer_syntax"),
    refused("frames_other_size", "all frames have another size than the header says", _all_other_size,
            "header_contradicts_pixels"),
    refused("scrambled", "JPEG 2000 hidden the way some Zeiss exports do", _scrambled, "scrambled_pixels"),
    accepted("fragments", "three fragments a frame and no offset table", _in_pieces),
    accepted("offsets_wrong", "an offset table that points nowhere", _offsets_wrong),
    accepted("offsets_extended", "an extended offset table", _extended_offsets),
    accepted("boxed", "JPEG 2000 frames as whole JP2 files", _boxed),
    refused("item_broken", "a mark between two frames is damaged", _item_broken, "truncated", "frames_missing"),
    refused("syntax_says_native", "compressed, but the header says it is not", _says_native, "wrong_transfer_syntax"),
    refused("syntax_says_compressed", "not compressed, but the header says it is", _says_compressed,
            "wrong_transfer_syntax", "truncated"),
    refused("syntax_says_other", "JPEG 2000, but the header says JPEG-LS", _says_other, "wrong_transfer_syntax"),
    refused("syntax_of_video", "the transfer syntax of a video", _video, "no_decoder"),
    refused("syntax_private", "a maker's own transfer syntax", _private, "no_decoder"),
    refused("syntax_missing", "no transfer syntax", _no_syntax, "broken_header"),
)  # fmt: skip
