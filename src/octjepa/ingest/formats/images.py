"""A folder of B-scan images, or a TIFF of many pages, as one scan, by Pillow.

Rows of a B-scan image run in depth. Neither form knows its spacing: a JSON file beside it or `--spacing` has to say.
Pictures that are no B-scans (a fundus photograph, thumbnails) are told by their size and counted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from octjepa.ingest.formats.axes import oriented
from octjepa.ingest.formats.intensity import check_size, luminance, to_grey
from octjepa.ingest.formats.sequence import IMAGE_SUFFIXES, LEAST_FRAMES, Sequence, sequences
from octjepa.ingest.raw_scan import FrameGeometry, RawScan
from octjepa.ingest.reasons import rejection

Size = tuple[int, int]  # columns, rows, as Pillow says it
_MODES = {"L", "I;16", "I;16B", "I;16L", "I", "F", "RGB", "RGBA", "LA", "P"}
_GAPS_SHOWN = 5
# What Pillow's parsers make of damaged bytes.
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


def _without_fundus(sequence: Sequence, sizes: list[Size]) -> tuple[Sequence, int]:
    """The sequence without pictures of another size at its ends, and how many they are.

    Exports number the fundus image like a B-scan, first or last. Raises VolumeRejected unsupported_pixels.
    """
    usual = max(set(sizes), key=sizes.count)
    alike = [index for index, size in enumerate(sizes) if size == usual]
    kept = sequence[alike[0] : alike[-1] + 1]
    odd = [number for (number, _), size in zip(sequence, sizes, strict=True) if size != usual]
    if len(kept) != len(alike) or len(odd) > 2:
        shown = ", ".join(map(str, odd[:_GAPS_SHOWN]))
        raise rejection(
            "unsupported_pixels",
            f"images of different sizes: {len(alike)} of {usual[0]} x {usual[1]}, others at number {shown}",
        )
    return kept, len(odd)


def _check_numbers(sequence: Sequence) -> None:
    """Raises VolumeRejected frames_missing for gaps and for a number that two images bear."""
    numbers = [number for number, _ in sequence]
    if len(set(numbers)) != len(numbers):
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        raise rejection("frames_missing", f"two images bear the number {twice[0]}")
    missing = sorted(set(range(numbers[0], numbers[-1] + 1)) - set(numbers))
    if missing:
        shown = ", ".join(map(str, missing[:_GAPS_SHOWN])) + (", ..." if len(missing) > _GAPS_SHOWN else "")
        raise rejection("frames_missing", f"{len(numbers)} images, {len(missing)} numbers between them absent: {shown}")


def _one_scan(folder: Path, found: list[Sequence]) -> tuple[Sequence, int, Size]:
    """(the B-scans, how many pictures are none, their size). Raises VolumeRejected."""
    sized = [(sequence, _sizes(folder, sequence)) for sequence in found]
    usual = {max(set(sizes), key=sizes.count): index for index, (_, sizes) in reversed(list(enumerate(sized)))}
    widest = max(usual, key=lambda size: size[0] * size[1])
    rivals = [size for size in usual if 2 * size[0] > widest[0] or 2 * size[1] > widest[1]]
    same = sum(max(set(sizes), key=sizes.count) == widest for _, sizes in sized)
    if len(rivals) > 1 or same > 1:  # thumbnails are half as large at most
        raise rejection(
            "unsupported_pixels", f"{len(found)} sequences of images in one folder; expected one scan a folder"
        )
    sequence, sizes = sized[usual[widest]]
    kept, beside = _without_fundus(sequence, sizes)
    if len(kept) < LEAST_FRAMES:
        raise rejection("too_few_frames", f"{len(kept)} B-scans; a volume needs {LEAST_FRAMES} at least")
    _check_numbers(kept)
    return kept, beside, widest


def _frame(number: int, image: Image.Image) -> np.ndarray:
    """`[H, W]` or `[H, W, 3]`. Raises VolumeRejected: unsupported_pixels, frames_broken."""
    if image.mode not in _MODES:
        raise rejection(
            "unsupported_pixels", f"an image of mode {image.mode}; expected greyscale (8, 16, 32 bit) or RGB"
        )
    try:
        return np.asarray(image.convert("RGB") if image.mode in ("P", "LA", "RGBA") else image)
    except _DAMAGED:
        raise rejection("frames_broken", f"image number {number} cannot be decoded") from None


def _stack(frames: Iterable[tuple[int, np.ndarray]], count: int, notes: list[str]) -> np.ndarray:
    """`[F, H, W]` of numbered frames, one at a time. Raises VolumeRejected: unsupported_pixels, size_implausible."""
    stack: np.ndarray | None = None
    coloured: list[str] = []
    for index, (number, frame) in enumerate(frames):
        if frame.ndim == 3:
            frame = luminance(frame, coloured)
        if stack is None:
            check_size((count, *frame.shape), frame.itemsize)
            stack = np.empty((count, *frame.shape), frame.dtype)
        if frame.dtype != stack.dtype or frame.shape != stack.shape[1:]:
            raise rejection("unsupported_pixels", f"image number {number} is of another depth or size than the first")
        stack[index] = frame
    notes.extend(dict.fromkeys(coloured))
    assert stack is not None, "the caller counts four images at least"
    return stack


def _scan(format: str, values: np.ndarray, notes: list[str]) -> RawScan:
    spacing = (None, None, None)
    pixels, _ = oriented(to_grey(values, notes), spacing, notes, "DHW", known=True)
    return RawScan(format, pixels, FrameGeometry.unknown(len(pixels)), notes=tuple(notes))


def read_images(folder: Path) -> RawScan:
    """A folder of B-scan images. Raises VolumeRejected: unknown_format, frames_missing, frames_broken, too_few_frames,
    unsupported_pixels, not_structural_oct, size_implausible, axes_ambiguous."""
    names = [child.name for child in folder.iterdir() if child.is_file()]
    found = sequences(names)
    if not found:
        raise rejection("unknown_format", "a folder that holds no sequence of B-scan images")
    scan, _, size = _one_scan(folder, found)
    check_size((len(scan), size[1], size[0]), 1)

    def frames() -> Iterator[tuple[int, np.ndarray]]:
        for number, name in scan:
            with Image.open(folder / name) as image:
                yield number, _frame(number, image)

    notes: list[str] = []
    values = _stack(frames(), len(scan), notes)
    pictures = sum(Path(name).suffix.lower() in IMAGE_SUFFIXES and not name.startswith(".") for name in names)
    if pictures > len(scan):
        notes.append(f"images_beside={pictures - len(scan)}")
    return _scan("images", values, notes)


def read_tiff(path: Path) -> RawScan:
    """A TIFF of many pages. Raises VolumeRejected: truncated, frames_broken, too_few_frames, unsupported_pixels,
    not_structural_oct, size_implausible, axes_ambiguous."""
    notes: list[str] = []
    try:
        image = Image.open(path)
    except _DAMAGED:
        raise rejection("unsupported_pixels", "a TIFF that Pillow does not read: damaged, or of a rare kind") from None
    with image:
        try:
            count: int = getattr(image, "n_frames", 1)
        except _DAMAGED:
            raise rejection("truncated", "its pages cannot be counted: it ends early or is damaged") from None
        if count < LEAST_FRAMES:
            raise rejection("too_few_frames", f"{count} pages; a volume needs {LEAST_FRAMES} at least")
        check_size((count, image.size[1], image.size[0]), 1)

        def frames() -> Iterator[tuple[int, np.ndarray]]:
            for index in range(count):
                try:
                    image.seek(index)
                except _DAMAGED:
                    raise rejection("frames_broken", f"page number {index + 1} cannot be read") from None
                yield index + 1, _frame(index + 1, image)

        return _scan("tiff", _stack(frames(), count, notes), notes)
