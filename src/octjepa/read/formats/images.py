"""A folder of B-scan images, or a TIFF of many pages, as one scan, by Pillow.

Rows of a B-scan image run in depth. Neither form knows its spacing: a JSON file beside it or `--spacing` gives it.
Pictures that are no B-scans (a fundus photograph, thumbnails) are recognised by their size and counted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from octjepa.read.formats.sequence import IMAGE_SUFFIXES, MIN_FRAMES, Sequence, sequences
from octjepa.read.intensity import check_size, luminance, to_uint8
from octjepa.read.raw_scan import FrameGeometry, RawScan, StoredAxes
from octjepa.reasons import rejection

Size = tuple[int, int]  # columns, rows, as Pillow has it
_MODES = {"L", "I;16", "I;16B", "I;16L", "I", "F", "RGB", "RGBA", "LA", "P"}
_NUMBERS_SHOWN = 5
# What Pillow's parsers raise for damaged bytes.
_DAMAGED = (
    OSError, ValueError, TypeError, KeyError, IndexError, SyntaxError, EOFError, struct.error,
    Image.DecompressionBombError,
)  # fmt: skip


def _sizes(folder: Path, sequence: Sequence) -> list[Size]:
    """Raises VolumeRejected frames_broken."""
    sizes = []
    for number, name in sequence:
        try:
            with Image.open(folder / name) as image:
                sizes.append(image.size)
        except _DAMAGED:
            raise rejection("frames_broken", f"image number {number} cannot be read") from None
    return sizes


def _most_common(sizes: list[Size]) -> Size:
    return max(set(sizes), key=sizes.count)


def _without_fundus(sequence: Sequence, sizes: list[Size]) -> Sequence:
    """The sequence without pictures of another size at its ends.

    Exports number the fundus image like a B-scan, first or last. Raises VolumeRejected unsupported_pixels.
    """
    usual = _most_common(sizes)
    equal = [index for index, size in enumerate(sizes) if size == usual]
    scans = sequence[equal[0] : equal[-1] + 1]
    other = [number for (number, _), size in zip(sequence, sizes, strict=True) if size != usual]
    if len(scans) != len(equal) or len(other) > 2:
        shown = ", ".join(map(str, other[:_NUMBERS_SHOWN]))
        raise rejection(
            "unsupported_pixels",
            f"images of different sizes: {len(equal)} of {usual[0]} x {usual[1]}, others at number {shown}",
        )
    return scans


def _check_numbers(sequence: Sequence) -> None:
    """Raises VolumeRejected frames_missing for gaps and for a number that two images bear."""
    numbers = [number for number, _ in sequence]
    if len(set(numbers)) != len(numbers):
        twice = min(number for number in numbers if numbers.count(number) > 1)
        raise rejection("frames_missing", f"two images bear the number {twice}")
    missing = sorted(set(range(numbers[0], numbers[-1] + 1)) - set(numbers))
    if missing:
        shown = ", ".join(map(str, missing[:_NUMBERS_SHOWN])) + (", ..." if len(missing) > _NUMBERS_SHOWN else "")
        raise rejection("frames_missing", f"{len(numbers)} images, {len(missing)} numbers between them absent: {shown}")


def _one_scan(folder: Path, found: list[Sequence]) -> tuple[Sequence, Size]:
    """(the B-scans, their size). Raises VolumeRejected."""
    sized = [(sequence, _sizes(folder, sequence)) for sequence in found]
    usual = {_most_common(sizes): index for index, (_, sizes) in reversed(list(enumerate(sized)))}
    widest = max(usual, key=lambda size: size[0] * size[1])
    rivals = [size for size in usual if 2 * size[0] > widest[0] or 2 * size[1] > widest[1]]
    same = sum(_most_common(sizes) == widest for _, sizes in sized)
    if len(rivals) > 1 or same > 1:  # thumbnails are half as large at most
        raise rejection(
            "unsupported_pixels", f"{len(found)} sequences of images in one folder; expected one scan a folder"
        )
    scans = _without_fundus(*sized[usual[widest]])
    if len(scans) < MIN_FRAMES:
        raise rejection("too_few_frames", f"{len(scans)} B-scans; a volume needs {MIN_FRAMES} at least")
    _check_numbers(scans)
    return scans, widest


def _frame(number: int, image: Image.Image) -> np.ndarray:
    """`[H, W]` or `[H, W, 3]`. Raises VolumeRejected: unsupported_pixels, frames_broken."""
    if image.mode not in _MODES:
        raise rejection(
            "unsupported_pixels", f"an image of mode {image.mode}; expected one channel of 8, 16 or 32 bit, or RGB"
        )
    try:
        return np.asarray(image.convert("RGB") if image.mode in ("P", "LA", "RGBA") else image)
    except _DAMAGED:
        raise rejection("frames_broken", f"image number {number} cannot be decoded") from None


def _stacked_scan(
    format: str, frames: Iterable[tuple[int, np.ndarray]], count: int, notes: tuple[str, ...] = ()
) -> RawScan:
    """The scan of `count` numbered frames, read one at a time.

    Raises VolumeRejected: unsupported_pixels, not_structural_oct, size_implausible.
    """
    stack: np.ndarray | None = None  # [D, H, W]
    colour_notes: list[str] = []
    for index, (number, frame) in enumerate(frames):
        if frame.ndim == 3:
            frame = luminance(frame, colour_notes)
        if stack is None:
            check_size((count, *frame.shape), frame.itemsize)
            stack = np.empty((count, *frame.shape), frame.dtype)
        if frame.dtype != stack.dtype or frame.shape != stack.shape[1:]:
            raise rejection("unsupported_pixels", f"image number {number} is of another depth or size than the first")
        stack[index] = frame
    assert stack is not None, "the caller counts four images at least"
    all_notes = [*dict.fromkeys(colour_notes), *notes]
    pixels = to_uint8(stack, all_notes)
    axes = StoredAxes(convention="DHW", known=True)
    return RawScan(format, pixels, FrameGeometry.unknown(len(pixels)), notes=tuple(all_notes), axes=axes)


def read_images(folder: Path) -> RawScan:
    """A folder of B-scan images.

    Raises VolumeRejected: unknown_format, frames_missing, frames_broken, too_few_frames, unsupported_pixels,
    not_structural_oct, size_implausible.
    """
    names = [child.name for child in folder.iterdir() if child.is_file()]
    found = sequences(names)
    if not found:
        raise rejection("unknown_format", "a folder that holds no sequence of B-scan images")
    scan, size = _one_scan(folder, found)
    check_size((len(scan), size[1], size[0]), 1)

    def frames() -> Iterator[tuple[int, np.ndarray]]:
        for number, name in scan:
            with Image.open(folder / name) as image:
                yield number, _frame(number, image)

    pictures = sum(Path(name).suffix.lower() in IMAGE_SUFFIXES and not name.startswith(".") for name in names)
    others = pictures - len(scan)
    return _stacked_scan("images", frames(), len(scan), (f"images_beside={others}",) if others > 0 else ())


def read_tiff(path: Path) -> RawScan:
    """A TIFF of many pages.

    Raises VolumeRejected: truncated, frames_broken, too_few_frames, unsupported_pixels, not_structural_oct,
    size_implausible.
    """
    try:
        image = Image.open(path)
    except _DAMAGED:
        raise rejection("unsupported_pixels", "a TIFF that Pillow does not read: damaged, or of a rare kind") from None
    with image:
        try:
            count: int = getattr(image, "n_frames", 1)
        except _DAMAGED:
            raise rejection("truncated", "its pages cannot be counted: it ends early or is damaged") from None
        if count < MIN_FRAMES:
            raise rejection("too_few_frames", f"{count} pages; a volume needs {MIN_FRAMES} at least")
        check_size((count, image.size[1], image.size[0]), 1)

        def frames() -> Iterator[tuple[int, np.ndarray]]:
            for index in range(count):
                try:
                    image.seek(index)
                except _DAMAGED:
                    raise rejection("frames_broken", f"page number {index + 1} cannot be read") from None
                yield index + 1, _frame(index + 1, image)

        return _stacked_scan("tiff", frames(), count)
