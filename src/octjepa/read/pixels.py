"""Pixel data of a DICOM file to 8-bit intensities `[F, H, W]`, for any transfer syntax, bit depth, sign and colour.

Frames are counted from the data, not from NumberOfFrames: pydicom lets a wrong count end a generator silently. Up to a
tenth of the frames, no two neighbours, may be broken: they are filled from their neighbours and noted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32, Shaped, UInt8, UInt16

from octjepa.read.encapsulated import ITEM, decode_frames, read_stream_header, split_frames, usual_sign
from octjepa.read.intensity import range_without_marks, scale_to_bytes
from octjepa.read.memory_budget import check_memory
from octjepa.reasons import rejection

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

_PHOTOMETRIC = {"MONOCHROME1", "MONOCHROME2", "RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT"}
_PADDING = 4096  # zeros after the last frame: some writers fill up their last block
_OVERLAYS = range(
    0x6000, 0x6020, 2
)  # groups of overlay planes; one without data of its own is stored in the pixels' unused bits
MAX_FRAMES = 4096  # of one file; the densest known volume has 1024. Some checks compare every frame with every other
COMPRESSION_RATIO = 2000  # of whole scans, at most: an empty frame of 496 x 512 takes some 100 bytes in JPEG 2000
_SMALL_BYTES = 64 << 20  # of decoded pixels, of which the ratio does not matter
_DECODER_COPIES = 8  # bytes that a decoder allocates for each byte of the frame that it decodes
_SHEARED = 0.75
_SIGN_FRAMES, _SIGN_COLUMNS = 4, 64  # in which the sign is looked for
_MANY_JUMPS = 0.005  # share of the pixels; rows of one B-scan hardly ever differ by half of the range
_TIMES_AS_MANY_JUMPS = 4.0  # as with the other sign: the stated sign is then wrong
_COLOUR_SPREAD = 16  # of 8 bits between a pixel's channels, as for pictures; compression makes smaller differences
_COLOURED = 0.2  # share of coloured pixels above which the scan is not greyscale with marks drawn on it


@dataclass(frozen=True)
class DecodedPixels:
    """8-bit pixels [frame, depth, column] and what was done to get them, as note codes."""

    pixels: UInt8[np.ndarray, "F H W"]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """How a frame is stored, by the header: size, samples a pixel, bits allocated and stored, sign, colour."""

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
        """Size of one uncompressed frame in bytes."""
        return self.rows * self.columns * self.samples * self.allocated // 8


def integer(header: Dataset, keyword: str, default: int = 0) -> int:
    """The element as a number; `default` if it is absent, empty or no number."""
    try:
        value = header.get(keyword)
        return default if value is None or value == "" else int(value)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return default


def read_layout(header: Dataset) -> Layout:
    """The layout that a header states. Raises VolumeRejected: broken_header, unsupported_pixels."""
    allocated = integer(header, "BitsAllocated", 8) or 8
    stored = integer(header, "BitsStored", allocated)
    layout = Layout(
        rows=integer(header, "Rows"),
        columns=integer(header, "Columns"),
        samples=integer(header, "SamplesPerPixel", 1) or 1,
        allocated=allocated,
        stored=stored if 0 < stored <= allocated else allocated,
        signed=bool(integer(header, "PixelRepresentation")),
        photometric=str(header.get("PhotometricInterpretation") or "MONOCHROME2").strip().upper(),
        planar=integer(header, "PlanarConfiguration"),
    )
    if not layout.rows or not layout.columns:
        raise rejection("broken_header", "rows or columns are absent, zero or no number")
    if layout.rows < 8 or layout.columns < 8:
        raise rejection("unsupported_pixels", f"{layout.rows} rows x {layout.columns} columns is not a B-scan")
    if layout.photometric == "PALETTE COLOR":
        raise rejection("unsupported_pixels", "colours of a palette; expected 8 or 16 bit grey, RGB")
    if allocated not in (8, 16) or layout.photometric not in _PHOTOMETRIC or layout.samples not in (1, 3):
        raise rejection(
            "unsupported_pixels",
            f"{layout.samples} x {allocated} bits, or an unknown kind of colour; expected 8 or 16 bit grey, RGB",
        )
    return layout


def check_size(frames: int, layout: Layout, packed_bytes: int | None = None) -> None:
    """Checks what a header declares before any of it is allocated; `packed_bytes` are those of compressed frames.

    Raises VolumeRejected: size_implausible (more frames than any scan has, more bytes than the memory budget),
    truncated (far more bytes than compressed frames of that size hold).
    """
    what = f"its header declares {frames} x {layout.rows} x {layout.columns} values"
    if frames > MAX_FRAMES:
        raise rejection("size_implausible", f"{what}; expected {MAX_FRAMES} B-scans at most")
    size = frames * layout.frame_bytes
    check_memory(max(size, _DECODER_COPIES * layout.frame_bytes), what)
    if packed_bytes is not None and size > _SMALL_BYTES:
        check_memory(size, what, packed_bytes, COMPRESSION_RATIO)


def _check_frame_count(data: Dataset, n_frames: int, notes: list[str]) -> int:
    """The number of frames `found` in the data, with a note where NumberOfFrames differs.

    Raises VolumeRejected frames_missing, header_contradicts_pixels.
    """
    declared = integer(data, "NumberOfFrames")
    if declared > n_frames:
        raise rejection("frames_missing", f"NumberOfFrames says {declared}, the data hold {n_frames}")
    if declared != n_frames:
        if declared > 1 and len(data.get("PerFrameFunctionalGroupsSequence") or []) == declared:
            # Two elements agree on the count: the rows or columns of the header are wrong instead.
            raise rejection(
                "header_contradicts_pixels", f"the header describes {declared} frames, the data hold {n_frames}"
            )
        notes.append(f"frame_count_corrected={n_frames}")
    return n_frames


def _read_native(data: Dataset, layout: Layout, notes: list[str]) -> Shaped[np.ndarray, "F H W *colour"]:
    """Uncompressed values, of colour images with a last axis of 3; padding and a wrong NumberOfFrames are noted.

    Raises VolumeRejected: wrong_transfer_syntax, frames_missing, header_contradicts_pixels, size_implausible.
    """
    element = data["PixelData"]
    if element.is_undefined_length or data.PixelData.startswith(ITEM):
        raise rejection("wrong_transfer_syntax", "the pixel data are compressed, the header names no compression")
    buffer = data.PixelData
    n_frames, rest = divmod(len(buffer), layout.frame_bytes)
    declared = max(integer(data, "NumberOfFrames"), 1)
    if n_frames < declared:
        raise rejection(
            "frames_missing",
            f"{len(buffer)} bytes of pixel data; {declared} frames need {declared * layout.frame_bytes}",
        )
    if rest > 1:
        if rest > _PADDING or any(buffer[-rest:]):
            raise rejection(
                "header_contradicts_pixels",
                f"{len(buffer)} bytes are not a whole number of frames of {layout.rows} x {layout.columns}",
            )
        notes.append("pixel_data_padded")
    frames = _check_frame_count(data, n_frames, notes)
    check_size(frames, layout)
    little = data.original_encoding[1] is not False
    kind = ("i" if layout.signed else "u") + str(layout.allocated // 8)
    count = frames * layout.frame_bytes * 8 // layout.allocated
    if not little and layout.allocated == 8 and element.VR == "OW":
        buffer = np.frombuffer(buffer, "<u2").byteswap().tobytes()  # big-endian words of two pixels each
    values = np.frombuffer(buffer, ("<" if little else ">") + kind, count=count)
    if layout.samples == 1:
        return values.reshape(frames, layout.rows, layout.columns)
    if layout.planar:
        return values.reshape(frames, 3, layout.rows, layout.columns).transpose(0, 2, 3, 1)
    return values.reshape(frames, layout.rows, layout.columns, 3)


def _drop_unused_bits(
    values: Shaped[np.ndarray, "F H W"], data: Dataset, layout: Layout, notes: list[str]
) -> Shaped[np.ndarray, "F H W"]:
    """The values without the bits above BitsStored, which may hold an old overlay, or lack the sign's extension.

    Compressed frames hold such an overlay too, where the encoder was given all bits that are allocated.
    """
    spare = values.dtype.itemsize * 8 - layout.stored
    if spare <= 0 or values.ndim != 3:
        return values
    overlay = any((group, 0x0010) in data and (group, 0x3000) not in data for group in _OVERLAYS)
    shifted = np.left_shift(values, spare) >> spare
    if np.array_equal(shifted, values):
        return values
    if layout.signed or overlay or _is_drawn_above(values, shifted):
        notes.append("unused_bits_dropped")
        return shifted
    notes.append("bits_stored_exceeded")  # the header understates the depth: nothing else is in these bits
    return values


def _is_drawn_above(values: Shaped[np.ndarray, "F H W"], shifted: Shaped[np.ndarray, "F H W"]) -> bool:
    """Whether the bits above BitsStored hold a drawing that no overlay group declares, and not higher intensities.

    A drawing has one of these bits. It differs from intensities where the bit changes from a row to the next: there the
    lower bits of a drawing continue, and those of an intensity that passes their range jump.
    """
    bits = int(np.bitwise_or.reduce(values ^ shifted, axis=None))
    if bits & (bits - 1):
        return False
    upper, lower = values[:, :-1].astype(np.int64), values[:, 1:].astype(np.int64)
    upper_low, lower_low = shifted[:, :-1].astype(np.int64), shifted[:, 1:].astype(np.int64)
    changes = (upper - upper_low) != (lower - lower_low)
    jumps, jumps_low = np.abs(upper - lower)[changes], np.abs(upper_low - lower_low)[changes]
    return bool(changes.any()) and float(np.median(jumps_low)) < float(np.median(jumps))


def _settle_sign(values: Shaped[np.ndarray, "F H W"], layout: Layout, notes: list[str]) -> Shaped[np.ndarray, "F H W"]:
    """The values with the sign that their content shows, where PixelRepresentation contradicts it.

    Read with the wrong sign, intensities wrap around in the middle of their range: neighbouring rows then jump by more
    than half of it. Raises VolumeRejected header_contradicts_pixels if they do so either way.
    """
    if values.ndim != 3 or values.dtype.kind not in "iu":
        return values
    bits = min(layout.stored, values.dtype.itemsize * 8)
    if values.dtype.kind == "u":  # the header may understate the depth
        bits = max(bits, int(values.max()).bit_length())
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    step = max(1, len(values) // _SIGN_FRAMES)
    unsigned = values[::step, :, :: max(1, values.shape[2] // _SIGN_COLUMNS)].astype(np.int32) & mask
    if int(unsigned.max()) < half:
        return values  # the sign bit is nowhere set
    signed = np.where(unsigned >= half, unsigned - (mask + 1), unsigned)
    jumps = {is_signed: _jumps(array, half) for is_signed, array in ((True, signed), (False, unsigned))}
    is_signed = values.dtype.kind == "i"
    stated, other = jumps[is_signed], jumps[not is_signed]
    if stated < _MANY_JUMPS or other > _TIMES_AS_MANY_JUMPS * stated:
        return values
    if stated > _TIMES_AS_MANY_JUMPS * other:
        notes.append("sign_by_content")
        kind = np.dtype(f"{'u' if is_signed else 'i'}{values.dtype.itemsize}").newbyteorder(values.dtype.byteorder)
        if is_signed:
            return (values & values.dtype.type(mask if bits < values.dtype.itemsize * 8 else -1)).view(kind)
        spare = values.dtype.itemsize * 8 - bits
        return np.left_shift(values, spare).view(kind) >> spare
    if is_signed:
        raise rejection(
            "header_contradicts_pixels",
            f"PixelRepresentation says signed: neighbouring rows jump by half of the range in {stated:.1%} of the "
            f"pixels, and in {other:.1%} if they are read as unsigned",
        )
    return values


def _jumps(values: Int32[np.ndarray, "F H W"], half: int) -> float:
    """Share of the pixels that differ by more than `half` from the pixel in the row above.

    The smallest and the largest value do not count: they may mark what was not measured.
    """
    inner = (values > values.min()) & (values < values.max())
    jump = np.abs(np.diff(values, axis=1)) > half
    jump &= inner[:, 1:] & inner[:, :-1]
    return float(jump.mean())


def _check_rows_and_columns(values: Shaped[np.ndarray, "F H W"], layout: Layout) -> None:
    """Swapped rows and columns keep the number of bytes, and shear every B-scan into stripes.

    Raises VolumeRejected header_contradicts_pixels where pixels `rows` apart differ clearly less than pixels `columns`
    apart, which are neighbours along an A-scan.
    """
    if layout.rows == layout.columns:
        return
    pick = values[len(values) // 4 :: max(1, len(values) // 3)][:3].reshape(-1, layout.rows * layout.columns)
    kind = np.int16 if pick.dtype.itemsize == 1 else np.int32  # 16 bit hold the sums of 8-bit values
    smooth: np.ndarray = pick.astype(kind)
    for step in (1, 2, 4):
        smooth = smooth[:, step:] + smooth[:, :-step]
    smooth = smooth[:, 1:]  # sums of eight neighbours, against speckle

    def mean_difference(lag: int) -> float:
        return float(np.abs(smooth[:, lag:] - smooth[:, :-lag]).mean())

    if mean_difference(layout.rows) < _SHEARED * mean_difference(layout.columns):
        raise rejection(
            "header_contradicts_pixels",
            f"neighbouring rows match at {layout.columns} x {layout.rows}, the header says {layout.rows} x "
            f"{layout.columns}",
        )


def _to_greyscale(
    values: Shaped[np.ndarray, "F H W *colour"], layout: Layout, notes: list[str]
) -> Shaped[np.ndarray, "F H W"]:
    """Intensities of greyscale that is stored as colour; frame by frame, for colour takes thrice the memory."""
    if values.ndim == 3:
        return values
    notes.append("rgb_to_grey")
    if layout.photometric.startswith("YBR"):
        return np.ascontiguousarray(values[..., 0])  # luminance
    intensities = np.empty(values.shape[:3], values.dtype)
    coloured, spread_limit = 0, _COLOUR_SPREAD << max(layout.stored - 8, 0)
    for out, frame in zip(intensities, values, strict=True):
        spread = frame.max(axis=-1) - frame.min(axis=-1)
        coloured += int((spread > spread_limit).sum())
        weights = np.array([0.299, 0.587, 0.114], np.float32)
        out[...] = np.round(frame.astype(np.float32) @ weights) if spread.any() else frame[..., 0]
    if coloured > _COLOURED * intensities.size:
        raise rejection("unsupported_pixels", f"{coloured / intensities.size:.0%} of the pixels are coloured")
    if coloured:
        notes.append("colour_dropped")
    return intensities


def _number(item: Dataset, keyword: str) -> float | None:
    try:
        value = item.get(keyword)
        return None if value is None or value == "" else float(value)
    except (TypeError, ValueError):
        return None


def _rescaling(data: Dataset, frames: int) -> list[tuple[float, float]]:
    """(slope, intercept) of every frame, in a list of one if they are the same for all, [] without any."""

    def slope_and_intercept(group: Any) -> tuple[float, float] | None:
        for item in [*(group.get("PixelValueTransformationSequence") or []), group]:
            slope = _number(item, "RescaleSlope")
            if slope:
                return slope, _number(item, "RescaleIntercept") or 0.0
        return None

    groups = list(data.get("PerFrameFunctionalGroupsSequence") or [])[:frames]
    single = [slope_and_intercept(group) for group in groups] if groups and slope_and_intercept(groups[0]) else []
    if len(single) == frames:
        every = [pair for pair in single if pair is not None]
        if len(every) == frames:
            return every if len(set(every)) > 1 else every[:1]
    for group in [*(data.get("SharedFunctionalGroupsSequence") or [])[:1], data]:
        if (pair := slope_and_intercept(group)) is not None:
            return [pair]
    return []


def _to_8bit(
    values: Shaped[np.ndarray, "F H W"], data: Dataset, layout: Layout, notes: list[str]
) -> UInt8[np.ndarray, "F H W"]:
    """Signed, deep, inverted and rescaled intensities to 8 bit; each change is noted.

    Deep data are scaled by the power of two that holds their largest value, so that 12 bits in 16 do not go dark. A
    linear rescaling that all frames share changes nothing after that; where frames have their own, it is applied.
    Raises VolumeRejected broken_header as `_apply_rescaling`.
    """
    rescaling = _rescaling(data, len(values))
    slopes = {slope for slope, _ in rescaling}
    negative = bool(slopes) and max(slopes) < 0
    if len(rescaling) > 1:
        notes.append("rescaled_per_frame")
        negative = False
        values = _apply_rescaling(values, rescaling)
    elif slopes - {1.0}:
        notes.append("rescaled")
    if values.dtype.kind == "i":
        notes.append("signed")
    if values.dtype != np.uint8:
        low, high = (int(end) for end in range_without_marks(values))
        low = low if values.dtype.kind == "i" else 0
        if values.min() < low or values.max() > high:
            notes.append("fill_value")
        bits = max(8, (high - low).bit_length())
        if layout.allocated == 16:
            notes.append(f"scaled_from_{bits}_bit")
        values = scale_to_bytes(values, low, high, 2**bits - 1)
    if (layout.photometric == "MONOCHROME1") != negative:
        notes.append("inverted")
        values = 255 - values
    return np.ascontiguousarray(values)


def _apply_rescaling(
    values: Shaped[np.ndarray, "F H W"], rescaling: list[tuple[float, float]]
) -> UInt16[np.ndarray, "F H W"]:
    """Every frame by its own (slope, intercept), on a common scale of 16 bit.

    Raises VolumeRejected broken_header: a slope or an intercept is not finite.
    """
    ends = [
        sorted((slope * float(frame.min()) + offset, slope * float(frame.max()) + offset))
        for frame, (slope, offset) in zip(values, rescaling, strict=True)
    ]
    low, high = float(np.min(ends)), float(np.max(ends))
    if not np.isfinite(high - low):
        raise rejection("broken_header", "RescaleSlope or RescaleIntercept of a frame is not finite; expected a number")
    factor = 65535.0 / max(high - low, 1e-9)
    out = np.empty(values.shape, np.uint16)
    for target, frame, (slope, offset) in zip(out, values, rescaling, strict=True):
        target[...] = np.round((frame.astype(np.float64) * slope + (offset - low)) * factor)
    return out


def decode_pixels(data: Dataset, fewest: int = 4) -> DecodedPixels:
    """All frames of a dataset read with its pixel data; at least `fewest`.

    Raises VolumeRejected: unsupported_pixels, broken_header, truncated, frames_missing, frames_broken,
    header_contradicts_pixels, scrambled_pixels, wrong_transfer_syntax, no_decoder, size_implausible, too_few_frames.
    """
    layout = read_layout(data)
    notes: list[str] = []
    broken: list[int] = []
    sign: bool | None = None  # by the code streams
    syntax = data.file_meta.TransferSyntaxUID
    if syntax.is_encapsulated:
        encoded = split_frames(data, integer(data, "NumberOfFrames"))
        check_size(_check_frame_count(data, len(encoded), notes), layout, len(data.PixelData))
        values, broken = decode_frames(encoded, syntax, layout)
        sign = usual_sign([read_stream_header(frame) for frame in encoded])
    else:
        values = _read_native(data, layout, notes)
    if len(values) < fewest:
        raise rejection("too_few_frames", f"{len(values)} B-scans; a volume needs {fewest} at least")
    values = _drop_unused_bits(values, data, layout, notes)
    if sign is None:
        values = _settle_sign(values, layout, notes)
    elif sign != layout.signed:
        notes.append("sign_by_code_stream")
    values = _to_greyscale(values, layout, notes)
    _check_rows_and_columns(values, layout)
    pixels = _to_8bit(values, data, layout, notes)
    if broken:
        notes.append(f"gap_frames={len(broken)}")
        fill_gaps(pixels, broken)
    return DecodedPixels(pixels, tuple(notes))


def fill_gaps(pixels: UInt8[np.ndarray, "F H W"], broken: list[int]) -> None:
    """Replaces each broken frame by its neighbours' mean (the nearest one at an end), in place."""
    last = len(pixels) - 1
    for index in broken:
        before, after = pixels[index - 1 if index else 1], pixels[index + 1 if index < last else last - 1]
        pixels[index] = (before.astype(np.uint16) + after) // 2
