"""Encapsulated pixel data: split into frames and decoded frame by frame, so that a broken one costs only itself.

Frames are counted from the code streams; the offset table and NumberOfFrames are used only if they fit them. A
code stream's own header (size, depth) is read before it is decoded, so that a damaged one allocates nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Shaped, UInt16

from octjepa.read.pillow_frames import decode_jpeg, decode_rle
from octjepa.reasons import error_origin, rejection

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

    from octjepa.read.pixels import Layout

GAP_SHARE = 0.1  # frames that may be filled from their neighbours
ITEM = b"\xfe\xff\x00\xe0"
_JPEG, _J2K, _JP2 = b"\xff\xd8", b"\xff\x4f\xff\x51", b"\x00\x00\x00\x0cjP"
_STARTS = (_JPEG, _J2K, _JP2)
_END_OF_IMAGE = b"\xff\xd9"
_START_OF_SCAN, _JPEG_LS_PRESET, _OVERSIZE = 0xDA, 0xF8, 4  # markers, and the kind of preset that states a size
_START_OF_FRAME = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}  # JPEG's and JPEG-LS's

# The way out where a library of the core installation is gone; `octjepa doctor codecs` tries every transfer syntax.
INSTALL_DECODERS = "pip install pylibjpeg-openjpeg python-gdcm pyjpegls pillow"


@dataclass(frozen=True)
class StreamHeader:
    """Size, samples a pixel, bit depth and sign in the header of a code stream; `signed` is None for JPEG.

    A bit depth of 0 stands for a header that does not state one size for the whole image: no decoder may see it.
    """

    rows: int
    columns: int
    samples: int
    bits: int
    signed: bool | None = None


_UNREADABLE = StreamHeader(0, 0, 0, 0)


def read_stream_header(frame: bytes) -> StreamHeader | None:
    """The header of a JPEG, JPEG-LS or JPEG 2000 stream (ITU-T T.81 B.2.2, T.87 C.2, T.800 A.5.1); None for others.

    A stream that begins like one of these and whose header cannot be followed has a bit depth of 0. A decoder
    allocates what the stream declares, and it may find another header than the first: one that is repeated, or that
    an extension marker enlarges, counts as such a stream.
    """
    if not frame.startswith(_STARTS):
        return None
    try:
        return _jpeg_header(frame) if frame.startswith(_JPEG) else _jpeg_2000_header(frame)
    except (ValueError, IndexError, struct.error):
        return _UNREADABLE


def _jpeg_header(frame: bytes) -> StreamHeader:
    """The single start-of-frame segment before the first scan. Raises ValueError, IndexError, struct.error."""
    header: StreamHeader | None = None
    at = 2
    while frame[at] == 0xFF:
        marker = frame[at + 1]
        if marker == 0xFF:  # fill
            at += 1
            continue
        (length,) = struct.unpack_from(">H", frame, at + 2)
        if length < 2 or marker < 0xC0 or 0xD0 <= marker <= 0xD9:
            break
        if marker in _START_OF_FRAME:
            if header is not None:
                break
            bits, rows, columns, samples = struct.unpack_from(">BHHB", frame, at + 4)
            header = StreamHeader(rows, columns, samples, bits)
        elif marker == _JPEG_LS_PRESET and frame[at + 4] == _OVERSIZE:
            break
        elif marker == _START_OF_SCAN:
            return header or _UNREADABLE
        at += 2 + length
    return _UNREADABLE


def _jpeg_2000_header(frame: bytes) -> StreamHeader:
    """The size segment of the code stream, in a JP2 file that of its first one. Raises ValueError, struct.error."""
    at = 0
    while not frame.startswith(_J2K, at):  # the boxes of a JP2 file
        length, kind = struct.unpack_from(">I4s", frame, at)
        start = at + 8
        if length == 1:
            (length,) = struct.unpack_from(">Q", frame, start)
            start += 8
        if kind == b"jp2c":
            at = start
            if not frame.startswith(_J2K, at):
                raise ValueError
            break
        if length < start - at:
            raise ValueError
        at += length
    right, bottom, left, top = struct.unpack_from(">4I", frame, at + 8)
    tile_columns, tile_rows, tile_left, tile_top = struct.unpack_from(">4I", frame, at + 24)
    samples, bits = struct.unpack_from(">HB", frame, at + 40)
    steps = set(struct.unpack_from(">" + "xBB" * samples, frame, at + 42)) if samples <= 4 else set()
    if steps != {1} or not tile_columns or not tile_rows or tile_left > left or tile_top > top:
        return _UNREADABLE
    return StreamHeader(bottom - top, right - left, samples, (bits & 0x7F) + 1, bool(bits & 0x80))


def _join_fragments(fragments: list[bytes], first: list[int]) -> list[bytes]:
    """Fragments joined to frames; `first` the indices of the fragments that begin one."""
    return [b"".join(fragments[start:end]) for start, end in zip(first, [*first[1:], len(fragments)], strict=True)]


def split_frames(data: Dataset, declared: int) -> list[bytes]:
    """Encoded frames, one bytes object each; empty where a fragment is empty.

    Raises VolumeRejected: wrong_transfer_syntax (not encapsulated), truncated.
    """
    from pydicom.encaps import generate_fragments, parse_basic_offsets

    if not data.PixelData.startswith(ITEM):
        raise rejection(
            "wrong_transfer_syntax", "the header names a compressed syntax, the pixel data are not compressed"
        )
    try:
        buffer = BytesIO(data.PixelData)
        offsets = parse_basic_offsets(buffer)
        fragments = list(generate_fragments(buffer))
    except (ValueError, EOFError, StopIteration, RuntimeError, OSError, struct.error) as error:
        raise rejection(
            "truncated", f"the compressed frames end early or are malformed: {error_origin(error)}"
        ) from None
    if len(fragments) == declared or len(fragments) == len(offsets):
        return fragments
    fragment_at, position = {0: 0}, 0
    for index, fragment in enumerate(fragments[:-1], 1):
        position += 8 + len(fragment)
        fragment_at[position] = index
    if len(offsets) > 1 and offsets == sorted(set(offsets)) and all(offset in fragment_at for offset in offsets):
        return _join_fragments(fragments, [fragment_at[offset] for offset in offsets])
    if any(fragment.startswith(_STARTS) for fragment in fragments):
        return _join_fragments(
            fragments,
            [i for i, fragment in enumerate(fragments) if not (i and fragment) or fragment.startswith(_STARTS)],
        )
    return fragments


def _is_scrambled(frame: bytes) -> bool:
    """Zeiss exports may hide JPEG 2000 streams: every seventh byte is XORed with 0x5A and parts are swapped."""
    if frame.startswith(_STARTS):
        return False
    plain = np.frombuffer(frame, np.uint8).copy()
    plain[::7] ^= 0x5A
    return _JP2 in plain.tobytes() or _J2K in plain.tobytes()


class FrameDecoder:
    """One encoded frame to an array, by the decoder of the transfer syntax. Raises VolumeRejected no_decoder."""

    def __init__(self, syntax: Any, layout: Layout) -> None:
        from pydicom.pixels import get_decoder

        self._layout = layout
        self._syntax = syntax
        try:
            self._decoder = get_decoder(syntax)
        except NotImplementedError:
            raise rejection("no_decoder", f"transfer syntax {syntax.name} has no decoder") from None
        if not self._decoder.is_available:
            raise rejection("no_decoder", f"no installed library decodes {syntax.name}: {INSTALL_DECODERS}")
        # The fastest of several: OpenJPEG is a third faster than gdcm, Pillow's JPEG three times as fast.
        wanted = {"JPEG 2000": "pylibjpeg", "JPEG Baseline": "pillow"}
        plugin = next((plugin for part, plugin in wanted.items() if part in syntax.name), "")
        self._plugin = plugin if plugin in self._decoder.available_plugins else ""

    def __call__(self, encoded: bytes, stream: StreamHeader | None) -> Shaped[np.ndarray, "H W *colour"]:
        """One frame. Raises whatever the C library makes of the bytes."""
        if (frame := self._by_pillow(encoded, stream)) is not None:
            return frame
        from pydicom.encaps import encapsulate

        layout = self._layout
        if stream is not None:
            # Depth as the stream has it: headers round 12 up to 16, and hold 8 bits in 16.
            layout = replace(layout, stored=stream.bits, allocated=8 if stream.bits <= 8 else 16, planar=0)
            if stream.signed is not None:
                layout = replace(layout, signed=stream.signed)
            if stream.bits == 12 and self._syntax.name.startswith("JPEG Extended"):
                return _jpeg_12_bit(encoded, layout)
        array, meta = self._decoder.as_array(
            encapsulate([encoded], has_bot=False),
            index=0,
            raw=True,
            decoding_plugin=self._plugin,
            rows=layout.rows,
            columns=layout.columns,
            samples_per_pixel=layout.samples,
            photometric_interpretation=layout.photometric,
            pixel_representation=int(layout.signed),
            bits_allocated=layout.allocated,
            bits_stored=layout.stored,
            number_of_frames=1,
            planar_configuration=layout.planar,
            pixel_keyword="PixelData",
        )
        if layout.samples == 3 and str(meta["photometric_interpretation"]).startswith("YBR"):
            array = np.repeat(array[..., :1], 3, axis=-1)  # luminance is the intensity
        expected = (layout.rows, layout.columns) + ((3,) if layout.samples == 3 else ())
        if array.shape != expected:
            raise ValueError(f"a frame of shape {array.shape}, expected {expected}")
        return array

    def _by_pillow(self, encoded: bytes, stream: StreamHeader | None) -> Shaped[np.ndarray, "H W"] | None:
        """A plain greyscale frame of the two syntaxes that need nothing of pydicom; None for others."""
        layout, name = self._layout, self._syntax.name
        if layout.samples != 1 or layout.signed or not layout.photometric.startswith("MONOCHROME"):
            return None
        if name.startswith("RLE") and stream is None:
            return decode_rle(encoded, layout.rows, layout.columns, layout.allocated)
        if name.startswith("JPEG Baseline") and stream is not None and (stream.samples, stream.bits) == (1, 8):
            return decode_jpeg(encoded, layout.rows, layout.columns)
        return None


def _jpeg_12_bit(encoded: bytes, layout: Layout) -> UInt16[np.ndarray, "H W"]:
    """Extended JPEG of 12 bits, which no plugin of pydicom's takes; gdcm's own codec does."""
    import gdcm

    fragment = gdcm.Fragment()
    fragment.SetByteStringValue(encoded)
    fragments = gdcm.SequenceOfFragments.New()
    fragments.AddFragment(fragment)
    element = gdcm.DataElement(gdcm.Tag(0x7FE0, 0x0010))
    element.SetValue(fragments.__ref__())
    image = gdcm.Image()
    image.SetNumberOfDimensions(2)
    image.SetDimensions((layout.columns, layout.rows, 1))
    image.SetDataElement(element)
    monochrome = gdcm.PhotometricInterpretation.MONOCHROME2
    image.SetPhotometricInterpretation(gdcm.PhotometricInterpretation(monochrome))
    image.SetTransferSyntax(gdcm.TransferSyntax(gdcm.TransferSyntax.JPEGExtendedProcess2_4))
    image.SetPixelFormat(gdcm.PixelFormat(1, 16, 12, 11, 0))
    values = np.frombuffer(image.GetBuffer().encode("utf-8", "surrogateescape"), "<u2")
    return values.reshape(layout.rows, layout.columns)


def _check_streams(streams: list[StreamHeader | None], layout: Layout) -> None:
    """Raises VolumeRejected header_contradicts_pixels where all streams name another size or depth."""
    stated = {stream for stream in streams if stream is not None}
    if len(stated) != 1:
        return
    (stream,) = stated
    if stream.bits and not _fits(stream, layout):
        size_text = f"{stream.rows} x {stream.columns}, {stream.samples} x {stream.bits} bits"
        expected = f"{layout.rows} x {layout.columns}, {layout.samples} x {layout.allocated} bits"
        raise rejection(
            "header_contradicts_pixels", f"the compressed frames are {size_text}; the header says {expected}"
        )


def _fits(stream: StreamHeader, layout: Layout) -> bool:
    same = (stream.rows, stream.columns, stream.samples) == (layout.rows, layout.columns, layout.samples)
    return same and 0 < stream.bits <= layout.allocated


def decoding_fault(fragment: bytes, stream: StreamHeader | None, layout: Layout, syntax: str) -> str:
    """Why an encoded frame must not be decoded, in words; "" if it may be.

    A decoder allocates what a code stream declares, and may end the process when it cannot: only a stream whose
    declared size is the size in the DICOM header reaches it.
    """
    if not fragment[:1].strip(b"\0") and not fragment.strip(b"\0"):
        return "an empty fragment"
    if stream is not None and not stream.bits:
        return "the header of its code stream cannot be followed"
    if stream is not None and not _fits(stream, layout):
        return "its code stream has another size"
    if stream is None and "JPEG" in syntax:
        return "no code stream of a JPEG kind"
    if "JPEG-LS" in syntax and not fragment.rstrip(b"\0").endswith(_END_OF_IMAGE):
        return "its end is missing"  # CharLS would look for it for seconds
    return ""


def usual_sign(streams: Iterable[StreamHeader | None]) -> bool | None:
    """Whether most code streams are of signed values; None if none states it."""
    signs = [stream.signed for stream in streams if stream is not None and stream.signed is not None]
    return 2 * sum(signs) > len(signs) if signs else None


def _are_usually_deep(streams: Iterable[StreamHeader | None]) -> bool:
    """Whether most code streams have more than 8 bits."""
    deep = [stream.bits > 8 for stream in streams if stream is not None and stream.bits]
    return 2 * sum(deep) > len(deep)


def decode_frames(
    encoded: list[bytes], syntax: Any, layout: Layout
) -> tuple[Shaped[np.ndarray, "F H W *colour"], list[int]]:
    """(values, of colour images with a last axis of 3; indices of the frames that did not decode and hold zeros).

    Raises VolumeRejected: no_decoder, header_contradicts_pixels, scrambled_pixels, wrong_transfer_syntax,
    frames_broken.
    """
    decode = FrameDecoder(syntax, layout)
    streams = [read_stream_header(fragment) for fragment in encoded]
    _check_streams(streams, layout)
    signed, are_deep = usual_sign(streams), _are_usually_deep(streams)
    values: np.ndarray | None = None
    broken: list[int] = []
    first_fault = ""
    limit = int(GAP_SHARE * len(encoded))
    for index, (fragment, stream) in enumerate(zip(encoded, streams, strict=True)):
        fault = decoding_fault(fragment, stream, layout, syntax.name)
        if stream is not None and stream.signed not in (None, signed):
            fault = fault or "its code stream has another sign"
        if stream is not None and (stream.bits > 8) != are_deep:  # in the array of the others its values would wrap
            fault = fault or "its code stream has another depth"
        if not fault:
            try:
                frame = decode(fragment, stream)
            except MemoryError:
                raise
            except Exception as error:
                fault = error_origin(error)
            else:
                if values is None:
                    values = np.zeros((len(encoded), *frame.shape), frame.dtype)
                values[index] = frame
        if fault:
            broken.append(index)
            first_fault = first_fault or f"frame {index}: {fault}"
            if len(broken) > limit:
                break
    if values is None:
        if any(map(_is_scrambled, encoded[:4])):
            raise rejection("scrambled_pixels", "the frames are JPEG 2000 in the maker's own scrambled form")
        raise rejection("wrong_transfer_syntax", f"no frame decodes as {syntax.name}; {first_fault}")
    if len(broken) > limit or bool(np.any(np.diff(broken) == 1)):
        raise rejection(
            "frames_broken",
            f"{len(broken)} or more of {len(encoded)} frames do not decode (limit {limit}, no neighbours); "
            f"{first_fault}",
        )
    return values, broken
