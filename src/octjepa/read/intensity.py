"""Values of any number type to 8-bit intensities, with a note of what was changed; what is not a scan is refused.

Marks of what was not measured (-32768, 65535, the largest float32) are not intensities. Such a mark lies further from
the other values than they lie from each other. Scaled together with it, 12 bits of scan would be sixteen intensities;
it becomes the nearest end of the scan's own range instead, white or black, and `octjepa.canonical.fill` masks it
if it reaches the border. A single bright pixel far above all others counts as one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Num, UInt8

from octjepa.read.memory_budget import array_bytes, check_memory
from octjepa.reasons import rejection

FEW_VALUES = 16  # a scan has speckle; a segmentation of all layers and lesions has fewer classes than this
_FLAT_FRAMES = 8  # that are looked at
_FLAT_SHARE, _FLAT_NEIGHBOURS = 0.8, 0.8  # of the voxels: within the few values, equal to their neighbour
FILL = 255  # HEYEX paints white where the registration left no measurement; `octjepa.canonical.fill` masks it
_COLOUR_SPREAD = 16  # a single-channel image stored as RGB differs between its channels by compression alone


def check_size(shape: Sequence[int], itemsize: int) -> None:
    """Checks an array before it is allocated. Raises VolumeRejected: size_implausible, unsupported_pixels."""
    text = " x ".join(map(str, shape)) if len(shape) <= 8 else f"of {len(shape)} axes"
    if any(length < 1 for length in shape):
        raise rejection("unsupported_pixels", f"its shape is {text}: it holds no values")
    check_memory(array_bytes(shape, itemsize), f"{text} values of {itemsize} bytes")


def luminance(values: np.ndarray, notes: list[str]) -> np.ndarray:
    """`[..., H, W, 3 or 4]` of unsigned integers to `[..., H, W]`. Raises VolumeRejected not_structural_oct."""
    red, green, blue = (values[..., channel] for channel in range(3))
    notes.append("rgb_to_grey")
    spread = max(int(np.abs(a.astype(np.int32) - b).max()) for a, b in ((red, green), (green, blue)))
    if spread == 0:
        return np.ascontiguousarray(red)
    scale = 1 << (8 * (values.itemsize - 1))
    typical = float(np.mean(np.abs(red.astype(np.int32) - blue))) / scale
    if typical > _COLOUR_SPREAD:
        raise rejection("not_structural_oct", "a colour picture: red and blue differ by far more than in a stored scan")
    if spread / scale > _COLOUR_SPREAD:
        notes.append("colour_dropped")
    weights = np.array([0.299, 0.587, 0.114], np.float32)
    return np.round(values[..., :3].astype(np.float32) @ weights).astype(values.dtype)


def _count_values(values: np.ndarray) -> int:
    """How many different values there are, `FEW_VALUES` + 1 for more; frame by frame, because sorting copies."""
    values_seen: set[Any] = set()
    for frame in values:
        values_seen.update(np.unique(frame).tolist() if frame.dtype.kind != "f" else _finite_values(frame))
        if len(values_seen) > FEW_VALUES:
            break
    return len(values_seen)


def _finite_values(frame: np.ndarray) -> list[float]:
    """The different finite values; a NaN differs from every other NaN, so that a set would count each."""
    values: list[float] = np.unique(frame[np.isfinite(frame)]).tolist()
    return values


def _is_flat(values: np.ndarray) -> bool:
    """Whether a few values fill the frames in areas in which neighbours are equal: classes, with blurred edges.

    The speckle of a scan makes neighbours differ, except if it is black or white; a drawing has equal neighbours
    inside its areas too.
    """
    frames = values[:: max(1, len(values) // _FLAT_FRAMES)]
    different, counts = np.unique(frames, return_counts=True)
    order = np.argsort(counts)[::-1]
    if counts[order[:FEW_VALUES]].sum() < _FLAT_SHARE * frames.size:
        return False
    ends = frames == different[order[0]]
    inner = ~(ends[..., 1:] | ends[..., :-1])
    if inner.sum() < frames.size / 1000:
        return False
    return bool((frames[..., 1:] == frames[..., :-1])[inner].mean() > _FLAT_NEIGHBOURS)


def _refuse_labels(values: np.ndarray) -> None:
    """Raises VolumeRejected: not_structural_oct for masks and segmentations, unsupported_pixels for one value."""
    if values.dtype.kind == "b":
        raise rejection("not_structural_oct", "truth values: it is a mask")
    step = max(1, values.size // 2_000_000)
    if len(np.unique(values.reshape(-1)[::step])) > FEW_VALUES:
        if _is_flat(values):
            raise rejection(
                "not_structural_oct",
                f"{FEW_VALUES} values fill nearly all of it in areas without speckle: it looks like a drawn or resized "
                "segmentation",
            )
        return
    different = _count_values(values)
    if different <= 1:
        raise rejection("unsupported_pixels", "every voxel has the same value")
    if different <= FEW_VALUES:
        raise rejection("not_structural_oct", f"only {different} different values: it looks like a segmentation")


def _from_floats(values: np.ndarray, notes: list[str]) -> UInt8[np.ndarray, "..."]:
    """Floats to 8 bit: whole numbers in 0..255 as they are, others scaled; NaN becomes the minimum.

    Raises VolumeRejected unsupported_pixels: one value only, or none that is finite.
    """
    finite = np.isfinite(values)
    missing = int(values.size - np.count_nonzero(finite))
    if missing == values.size:
        raise rejection("unsupported_pixels", "no value is a finite number")
    present = values[finite] if missing else values
    low, high = float(present.min()), float(present.max())
    if missing:
        notes.append(f"not_finite_values={missing}")
    parts = np.array_split(present, min(len(present), 64))
    whole = low >= 0 and high <= 255 and all(bool((np.trunc(part) == part).all()) for part in parts)
    if whole and high > 1:
        notes.append("float_of_whole_numbers")
        low, high = 0.0, 255.0
    else:
        notes.append("scaled_from_float")
    if high == low:
        raise rejection("unsupported_pixels", "every voxel has the same value")
    if missing:
        values = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
    if not whole:
        low, high = _without_marks(present, notes)
    return scale_to_bytes(values, low, high, high - low)


def to_uint8(values: Num[np.ndarray, "A B C"], notes: list[str]) -> UInt8[np.ndarray, "A B C"]:
    """8-bit values stay as they are; deeper integers lose low bits, so that 12 in 16 bits do not go dark.

    Floats that hold whole numbers within 0 and 255 are those; others are scaled from their least to their largest
    finite value. Raises VolumeRejected: not_structural_oct (truth values, few values), unsupported_pixels (complex
    numbers, texts, one value).
    """
    if values.dtype.kind not in "buif":
        raise rejection(
            "unsupported_pixels", f"values of type {values.dtype.name}; expected numbers that are intensities"
        )
    _refuse_labels(values)
    if values.dtype.kind == "f":
        return _from_floats(values, notes)
    if values.dtype == np.uint8:
        return np.asarray(values)
    if values.min() < 0:
        notes.append("signed")
    low, high = (int(end) for end in _without_marks(values, notes))
    low = min(low, 0)
    bits = max(8, (high - low).bit_length())
    if bits > 8:
        notes.append(f"scaled_from_{bits}_bit")
    return scale_to_bytes(values, low, high, 2**bits - 1)


def _without_marks(values: np.ndarray, notes: list[str]) -> tuple[float, float]:
    """The range of the values, with the note `fill_value` where marks of what was not measured are outside it."""
    low, high = range_without_marks(values)
    if values.min() < min(low, 0) or values.max() > high:
        notes.append("fill_value")
    return low, high


def heyex_display(linear: Float[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    """255 times the fourth root of a linear Spectralis intensity in [0, 1]; what is above 1 or no number is fill.

    Heidelberg's raw export marks invalid pixels with the largest float32, .e2e with its own largest values, near 2.
    Source: Heidelberg Engineering, Spectralis "Special Function: Exporting Raw Data": the display takes the fourth
    root of the linear intensity. (eyepy fits a logarithm to HEYEX' contrast setting instead and turns fill black.)
    """
    valid = (linear >= 0) & (linear <= 1)
    shown = np.sqrt(np.sqrt(np.where(valid, linear, 0).astype(np.float32)))
    return np.where(valid, np.round(255 * shown), FILL).astype(np.uint8)


def range_without_marks(values: np.ndarray) -> tuple[float, float]:
    """(least, largest) value of an array of finite numbers without marks; of both ends the further mark goes first."""
    low, high = float(values.min()), float(values.max())
    for _ in range(2):
        below = float(values.max(where=values < high, initial=low, axis=None)) if high > low else low
        above = float(values.min(where=values > low, initial=high, axis=None)) if high > low else high
        if high - below > below - low and high - below >= above - low:
            high = below
        elif above - low > high - above:
            low = above
        else:
            break
    return low, high


def scale_to_bytes(values: np.ndarray, low: float, high: float, span: float) -> UInt8[np.ndarray, "..."]:
    """`values` with `low` at 0 and `low + span` at 255; what is above `high` is white, what is below `low` black.

    One frame at a time: the copy in floats stays small.
    """
    intensities = np.empty(values.shape, np.uint8)
    for out, frame in zip(intensities, values, strict=True):
        out[...] = np.round((np.clip(frame.astype(np.float64), low, high) - low) * (255.0 / span))
        out[frame > high] = 255
    return intensities
