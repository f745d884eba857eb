"""Pixel data of a DICOM file, frame by frame, to 8-bit grey `[F, H, W]`, whatever the transfer syntax.

Every encapsulated frame is decoded by itself, so one broken frame costs one frame: up to a tenth of the frames, no two
neighbours, are filled from their neighbours and noted; more quarantine the file. Frames are counted from the
data, not from NumberOfFrames: pydicom lets a wrong count end a generator silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from octjepa.ingest.reasons import raised_in, rejected

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

GAP_SHARE = 0.1  # frames that may be filled from their neighbours
MAX_BYTES = 4 << 30  # decoded pixels of one file; the largest known cube is 512 x 992 x 512 = 0.26 GB
_GREY = {"MONOCHROME1", "MONOCHROME2", "RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT"}
_STARTS = (b"\xff\xd8", b"\xff\x4f\xff\x51", b"\x00\x00\x00\x0cjP")  # JPEG family, J2K codestream, JP2


@dataclass(frozen=True)
class Decoded:
    pixels: UInt8[np.ndarray, "F H W"]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Layout:
    rows: int
    columns: int
    samples: int
    allocated: int
    stored: int
    signed: bool
    photometric: str
    planar: int

    @property
    def frame_bytes(self) -> int:
        return self.rows * self.columns * self.samples * self.allocated // 8


def _layout(data: Dataset) -> _Layout:
    try:
        layout = _Layout(
            rows=int(data.Rows),
            columns=int(data.Columns),
            samples=int(data.get("SamplesPerPixel") or 1),
            allocated=int(data.get("BitsAllocated") or 8),
            stored=int(data.get("BitsStored") or data.get("BitsAllocated") or 8),
            signed=bool(int(data.get("PixelRepresentation") or 0)),
            photometric=str(data.get("PhotometricInterpretation", "MONOCHROME2")).strip().upper(),
            planar=int(data.get("PlanarConfiguration") or 0),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise rejected("broken_header", f"rows, columns or bit depth cannot be read: {raised_in(error)}") from None
    if layout.rows < 8 or layout.columns < 8:
        raise rejected("unsupported_pixels", f"{layout.rows} rows x {layout.columns} columns is no B-scan")
    if layout.allocated not in (8, 16) or layout.photometric not in _GREY or layout.samples not in (1, 3):
        raise rejected(
            "unsupported_pixels",
            f"{layout.photometric}, {layout.samples} x {layout.allocated} bits; expected 8 or 16 bit grey, RGB",
        )
    return layout


def _check_size(frames: int, layout: _Layout) -> None:
    size = frames * layout.rows * layout.columns
    if size > MAX_BYTES:
        raise rejected("size_implausible", f"{frames} x {layout.rows} x {layout.columns} is {size / 2**30:.0f} GiB")


def _count(data: Dataset, found: int, notes: list[str]) -> int:
    """Frames in the data against NumberOfFrames. Raises VolumeRejected frames_missing."""
    try:
        declared = int(data.get("NumberOfFrames") or 0)
    except (TypeError, ValueError):
        declared = 0
    if declared > found:
        raise rejected("frames_missing", f"NumberOfFrames says {declared}, the data hold {found}")
    if declared != found:
        notes.append(f"frame_count_corrected={found}")
    return found


def _native(data: Dataset, layout: _Layout, notes: list[str]) -> np.ndarray:
    buffer = data.PixelData
    found, rest = divmod(len(buffer), layout.frame_bytes)
    declared = int(data.get("NumberOfFrames") or 0)
    if found == 0 or declared > found:
        raise rejected(
            "truncated",
            f"{len(buffer)} bytes of pixel data; {max(declared, 1)} frames need "
            f"{max(declared, 1) * layout.frame_bytes}",
        )
    if rest > 1:
        notes.append("pixel_data_has_rest")
    frames = _count(data, found, notes)
    _check_size(frames, layout)
    kind = ("i" if layout.signed else "u") + str(layout.allocated // 8)
    order = "<" if data.is_little_endian is not False else ">"
    values = np.frombuffer(buffer, order + kind, count=frames * layout.frame_bytes * 8 // layout.allocated)
    if layout.samples == 1:
        return values.reshape(frames, layout.rows, layout.columns)
    if layout.planar:
        return values.reshape(frames, 3, layout.rows, layout.columns).transpose(0, 2, 3, 1)
    return values.reshape(frames, layout.rows, layout.columns, 3)


def _fragments(data: Dataset, declared: int) -> list[bytes]:
    """Encoded frames, one bytes object each; empty where a fragment is empty. Raises VolumeRejected truncated."""
    from pydicom.encaps import generate_fragments, generate_frames, parse_basic_offsets

    try:
        offsets = parse_basic_offsets(data.PixelData)
        start = 8 + 4 * len(offsets)
        pieces = list(generate_fragments(data.PixelData[start:]))
        if len(offsets) == len(pieces) or (not offsets and len(pieces) == declared):
            return pieces
        if len(offsets) > 1 and len(offsets) < len(pieces):
            return list(generate_frames(data.PixelData, number_of_frames=len(offsets)))
    except (ValueError, EOFError, StopIteration, RuntimeError, OSError) as error:
        raise rejected(
            "truncated", f"the encapsulated pixel data end early or are malformed: {raised_in(error)}"
        ) from None
    if any(piece.startswith(_STARTS) for piece in pieces):
        frames: list[bytes] = []
        for piece in pieces:
            if not frames or not piece or piece.startswith(_STARTS):
                frames.append(piece)
            else:
                frames[-1] += piece
        return frames
    return pieces


class _FrameDecoder:
    """Decodes one encoded frame at a time with pydicom's decoder for the transfer syntax."""

    def __init__(self, syntax: Any, layout: _Layout) -> None:
        from pydicom.pixels import get_decoder

        self._layout = layout
        try:
            self._decoder = get_decoder(syntax)
        except NotImplementedError:
            raise rejected("no_decoder", f"transfer syntax {syntax.name} has no decoder") from None
        if not self._decoder.is_available:
            raise rejected("no_decoder", f"no installed plugin decodes {syntax.name}")
        # pydicom's own RLE decoder is pure Python, ten times slower than gdcm's; OpenJPEG is a third faster than gdcm.
        wanted = "gdcm" if "RLE" in syntax.name else "pylibjpeg" if "JPEG 2000" in syntax.name else ""
        self._plugin = wanted if wanted in self._decoder.available_plugins else ""

    def __call__(self, encoded: bytes) -> np.ndarray:
        from pydicom.encaps import encapsulate

        layout = self._layout
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
            array = np.repeat(array[..., :1], 3, axis=-1)  # luminance is the grey value
        expected = (layout.rows, layout.columns) + ((3,) if layout.samples == 3 else ())
        if array.shape != expected:
            raise ValueError(f"a frame of shape {array.shape}, expected {expected}")
        return array


def _encapsulated(data: Dataset, layout: _Layout, notes: list[str]) -> tuple[np.ndarray, list[int]]:
    declared = int(data.get("NumberOfFrames") or 0)
    encoded = _fragments(data, declared)
    frames = _count(data, len(encoded), notes)
    _check_size(frames, layout)
    decode = _FrameDecoder(data.file_meta.TransferSyntaxUID, layout)
    values: np.ndarray | None = None
    broken: list[int] = []
    first_fault = ""
    limit = int(GAP_SHARE * frames)
    for index, piece in enumerate(encoded):
        fault = "an empty fragment" if not piece.strip(b"\0") else ""
        if not fault:
            try:
                frame = decode(piece)
            except MemoryError:
                raise
            except Exception as error:  # decoders raise whatever their C library made of the bytes
                fault = raised_in(error)
            else:
                if frame.any():
                    if values is None:
                        values = np.zeros((frames, *frame.shape), frame.dtype)
                    values[index] = frame
                else:
                    fault = "every pixel is zero"
        if fault:
            broken.append(index)
            first_fault = first_fault or f"frame {index}: {fault}"
            if len(broken) > max(limit, 0):
                break
    if values is None:
        raise rejected(
            "wrong_transfer_syntax", f"no frame decodes as {data.file_meta.TransferSyntaxUID.name}; {first_fault}"
        )
    if len(broken) > limit or bool(np.any(np.diff(broken) == 1)):
        raise rejected(
            "frames_broken",
            f"{len(broken)} or more of {frames} frames do not decode (limit {limit}, no neighbours); {first_fault}",
        )
    return values, broken


def _to_grey(values: np.ndarray, notes: list[str]) -> np.ndarray:
    if values.ndim == 3:
        return values
    spread = int(np.abs(values[..., 0].astype(np.int32) - values[..., 2]).max())
    notes.append("rgb_to_grey")
    if spread > 16:
        notes.append("colour_dropped")
    if spread == 0:
        return np.ascontiguousarray(values[..., 0])
    return np.round(values.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)).astype(values.dtype)


def _to_8bit(values: np.ndarray, data: Dataset, layout: _Layout, notes: list[str]) -> UInt8[np.ndarray, "F H W"]:
    """Signed, deep, inverted and rescaled greys to 8 bit; each change is noted.

    Deep data are scaled by the power of two that holds their largest value, so that 12 bits in 16 do not go dark.
    """
    from pydicom.multival import MultiValue

    slope = data.get("RescaleSlope")
    shared = (data.get("SharedFunctionalGroupsSequence") or [None])[0]
    if slope is None and shared is not None:
        slope = next((item.get("RescaleSlope") for item in shared.get("PixelValueTransformationSequence") or []), None)
    negative = slope is not None and not isinstance(slope, MultiValue) and float(slope) < 0
    if slope is not None and not isinstance(slope, MultiValue) and float(slope) not in (0.0, 1.0):
        notes.append("rescaled")
    if values.dtype.kind == "i":
        notes.append("signed")
        values = values.astype(np.int32) - int(values.min())
    if values.dtype != np.uint8:
        peak = int(values.max())
        bits = max(8, peak.bit_length())
        if layout.allocated == 16:
            notes.append(f"scaled_from_{bits}_bit")
        factor = np.float32(255.0 / (2**bits - 1))
        scaled = np.empty(values.shape, np.uint8)
        for index in range(len(values)):
            scaled[index] = np.round(values[index].astype(np.float32) * factor)
        values = scaled
    if (layout.photometric == "MONOCHROME1") != negative:
        notes.append("inverted")
        values = 255 - values
    return np.ascontiguousarray(values)


def decode_pixels(data: Dataset) -> Decoded:
    """All frames of a dataset read with its pixel data.

    Raises VolumeRejected: unsupported_pixels, broken_header, truncated, frames_missing, frames_broken,
    wrong_transfer_syntax, no_decoder, size_implausible.
    """
    layout = _layout(data)
    notes: list[str] = []
    broken: list[int] = []
    if data.file_meta.TransferSyntaxUID.is_encapsulated:
        values, broken = _encapsulated(data, layout, notes)
    else:
        values = _native(data, layout, notes)
    if len(values) < 4:
        raise rejected("too_few_frames", f"{len(values)} B-scans; a volume needs 4 at least")
    pixels = _to_8bit(_to_grey(values, notes), data, layout, notes)
    if broken:
        notes.append(f"gap_frames={len(broken)}")
        fill_gaps(pixels, broken)
    return Decoded(pixels, tuple(notes))


def fill_gaps(pixels: UInt8[np.ndarray, "F H W"], broken: list[int]) -> None:
    """Replaces each broken frame by its neighbours' mean (the nearest one at an end), in place."""
    last = len(pixels) - 1
    for index in broken:
        before, after = pixels[index - 1 if index else 1], pixels[index + 1 if index < last else last - 1]
        pixels[index] = (before.astype(np.uint16) + after) // 2
