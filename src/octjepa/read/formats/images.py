"""A folder of B-scan images, or a TIFF of many pages, as one scan.

Pillow decodes images. tifffile lists the pages of a TIFF, and plain pages are read here from its checked fields. A TIFF
that ImageJ wrote may have one page only: its other images follow without separate pages.

Rows of a B-scan image run in depth. Neither form knows its spacing: a JSON file next to it or `--spacing` gives it.
Pictures that are not B-scans (a fundus photograph, thumbnails) are recognised by their size and counted.
"""

from __future__ import annotations

import logging
import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from octjepa.errors import VolumeRejected
from octjepa.read.formats.sequence import (
    IMAGE_SUFFIXES,
    MIN_FRAMES,
    PICTURE_FORMATS,
    Sequence,
    hexadecimal_tails,
    sequences,
)
from octjepa.read.intensity import check_size, luminance, to_uint8
from octjepa.read.links import check_inside
from octjepa.read.memory_budget import DEFLATE_RATIO, array_bytes, check_memory, inflate
from octjepa.read.raw_scan import FrameGeometry, RawScan, StoredAxes
from octjepa.reasons import rejection

Size = tuple[int, int]  # columns, rows, as Pillow has it
_MODES = {"L", "I;16", "I;16B", "I;16L", "I", "F", "RGB", "RGBA", "LA", "P"}
_NUMBERS_SHOWN = 5
_PICTURE_RATIO = 1 << 16  # bytes that one byte of a picture can unpack to; JPEG 2000 packs a blank one to almost none
_UNCOMPRESSED, _DEFLATED = 1, (8, 32946)  # TIFF's numbers of compressions
_PHOTOMETRIC, _WHITE_IS_ZERO, _BLACK_IS_ZERO = 262, 0, 1  # a tag of TIFF, and two of its values
_NUMBERS = {("u", 8), ("u", 16), ("u", 32), ("i", 8), ("i", 16), ("i", 32), ("f", 32), ("f", 64)}
_MAX_DESCRIPTION = 1 << 16
_EXIF_ORIENTATION = 0x0112
_MASK_ENDING = re.compile(r"[_\-. ](masks?|labels?|seg|segmentation|gt|annotations?|fluid|layers?)$", re.IGNORECASE)
# Exceptions that Pillow's parsers raise for damaged bytes.
_DAMAGED = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    SyntaxError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)


def _sizes(folder: Path, sequence: Sequence) -> list[Size]:
    """Raises VolumeRejected frames_broken."""
    sizes = []
    for number, name in sequence:
        try:
            with Image.open(folder / name, formats=PICTURE_FORMATS) as image:
                width, height = image.size
                sizes.append((height, width) if _orientation(image) > 4 else (width, height))
        except _DAMAGED:
            raise rejection("frames_broken", f"image number {number} cannot be read") from None
    return sizes


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation of a JPEG picture, 1 (as stored) for others; above 4 rows and columns are exchanged."""
    if image.format not in ("JPEG", "MPO"):
        return 1
    orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1


def _with_exif_orientation(number: int, image: Image.Image) -> Image.Image:
    """A picture turned as its EXIF orientation says. Raises VolumeRejected frames_broken."""
    try:
        return ImageOps.exif_transpose(image)
    except _DAMAGED:
        raise rejection("frames_broken", f"image number {number} cannot be decoded") from None


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
    if len(equal) < MIN_FRAMES and len(sizes) > MIN_FRAMES:
        raise rejection(
            "unsupported_pixels",
            f"{len(sizes)} images of {len(set(sizes))} different sizes: they are not the B-scans of one scan",
        )
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


def _one_scan(folder: Path, found_sequences: list[Sequence]) -> tuple[Sequence, Size]:
    """(the B-scans, their size). Raises VolumeRejected."""
    sized = [(sequence, _sizes(folder, sequence)) for sequence in found_sequences]
    usual = {_most_common(sizes): index for index, (_, sizes) in reversed(list(enumerate(sized)))}
    widest = max(usual, key=lambda size: size[0] * size[1])
    rivals = [size for size in usual if 2 * size[0] > widest[0] or 2 * size[1] > widest[1]]
    same = sum(_most_common(sizes) == widest for _, sizes in sized)
    if len(rivals) > 1 or same > 1:  # thumbnails are half as large at most
        raise rejection(
            "unsupported_pixels",
            f"{len(found_sequences)} sequences of images in one folder; expected one scan a folder",
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
        values = np.asarray(image.convert("RGB") if image.mode in ("P", "LA", "RGBA") else image)
    except _DAMAGED:
        raise rejection("frames_broken", f"image number {number} cannot be decoded") from None
    if _stated_bytes(image.mode) == 1 or getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) != _WHITE_IS_ZERO:
        return values
    if values.dtype.kind != "u":  # Pillow turns 8 bit only
        raise rejection(
            "unsupported_pixels",
            f"image number {number} stores white as 0 in values of type {values.dtype.name}; expected 8 or 16 bit "
            "without a sign",
        )
    return np.asarray(np.iinfo(values.dtype).max - values)


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


def _check_left_out(names: list[str], scan: set[str]) -> None:
    """Raises VolumeRejected frames_missing where images are left out because their numbers are hexadecimal."""
    images = [path for path in map(Path, names) if path.suffix.lower() in IMAGE_SUFFIXES and path.name[0] != "."]
    longest = len(Path(next(iter(scan))).stem)
    alike = [path for path in images if len(path.stem) == longest]
    if len(alike) > len(scan) and hexadecimal_tails([path.stem for path in alike]):
        raise rejection(
            "frames_missing",
            f"{len(alike)} images whose names end in hexadecimal numbers that are not consecutive: their order is "
            "unknown; number them 1, 2, 3",
        )


def _stated_bytes(mode: str) -> int:
    """Bytes of one intensity of a Pillow mode."""
    return {"I;16": 2, "I;16B": 2, "I;16L": 2, "I": 4, "F": 4}.get(mode, 1)


def _check_pictures(count: int, size: Size, mode: str, packed_bytes: int) -> None:
    """Checks the declared size of `count` pictures, and of one in colour. Raises VolumeRejected size_implausible."""
    check_size((count, size[1], size[0]), _stated_bytes(mode))
    check_size((size[1], size[0], 4), 4)
    needed = array_bytes((count, size[1], size[0]), _stated_bytes(mode))
    check_memory(needed, "its pictures", packed_bytes, _PICTURE_RATIO)


def without_masks(names: Iterable[str]) -> list[str]:
    """The names without masks that lie next to their images: `3_mask.png` next to `3.png`."""
    names = list(names)
    stems = {Path(name).stem.casefold() for name in names}
    return [name for name in names if not ((plain := unmasked(Path(name).stem.casefold())) and plain in stems)]


def unmasked(stem: str) -> str:
    """The stem of the image that a mask of the stem `stem` belongs to by its ending; "" without such an ending."""
    plain = _MASK_ENDING.sub("", stem)
    return plain if plain != stem else ""


def frame_names(folder: Path) -> list[str]:
    """Names of the B-scan images of a folder, in their order. Raises VolumeRejected as `read_images` does."""
    found_sequences = sequences(without_masks(child.name for child in folder.iterdir() if child.is_file()))
    return [name for _, name in _one_scan(folder, found_sequences)[0]] if found_sequences else []


def read_images(folder: Path) -> RawScan:
    """A folder of B-scan images.

    Raises VolumeRejected: unknown_format, frames_missing, frames_broken, too_few_frames, unsupported_pixels,
    not_structural_oct, size_implausible, path_escapes.
    """
    names = without_masks(child.name for child in folder.iterdir() if child.is_file())
    found_sequences = sequences(names)
    if not found_sequences:
        raise rejection("unknown_format", "a folder that holds no sequence of B-scan images")
    for name in {name for sequence in found_sequences for _, name in sequence}:
        check_inside(folder / name, folder)
    scan, size = _one_scan(folder, found_sequences)
    _check_left_out(names, {name for _, name in scan})
    with Image.open(folder / scan[0][1], formats=PICTURE_FORMATS) as first:
        mode = first.mode
    _check_pictures(len(scan), size, mode, sum((folder / name).stat().st_size for _, name in scan))
    notes: list[str] = []

    def frames() -> Iterator[tuple[int, np.ndarray]]:
        for number, name in scan:
            with Image.open(folder / name, formats=PICTURE_FORMATS) as image:
                if _orientation(image) == 1:
                    yield number, _frame(number, image)
                else:
                    notes.append("exif_orientation_applied")
                    yield number, _frame(number, _with_exif_orientation(number, image))

    pictures = sum(Path(name).suffix.lower() in IMAGE_SUFFIXES and not name.startswith(".") for name in names)
    others = pictures - len(scan)
    beside = (f"images_beside={others}",) if others > 0 else ()
    result = _stacked_scan("images", frames(), len(scan), beside)
    return replace(result, notes=tuple(dict.fromkeys([*result.notes, *notes])))


def read_image(path: Path) -> tuple[UInt8[np.ndarray, "H W"], tuple[str, ...]]:
    """(pixels, notes) of a picture of one B-scan.

    Raises VolumeRejected: frames_broken, unsupported_pixels (several pages), not_structural_oct, size_implausible.
    """
    try:
        with Image.open(path, formats=PICTURE_FORMATS) as image:
            if (pages := getattr(image, "n_frames", 1)) > 1:
                raise rejection("unsupported_pixels", f"{pages} pages: a stack, not a single B-scan")
            _check_pictures(1, image.size, image.mode, path.stat().st_size)
            turned = _orientation(image) != 1
            frame = _frame(1, _with_exif_orientation(1, image) if turned else image)
    except _DAMAGED:
        raise rejection("frames_broken", "the picture cannot be decoded") from None
    scan = _stacked_scan("images", [(1, frame)], 1, ("exif_orientation_applied",) if turned else ())
    return scan.pixels[0], scan.notes


@dataclass(frozen=True)
class _Page:
    """The checked fields of a page whose strips are uncompressed or deflated intensities of one channel."""

    shape: tuple[int, int]  # rows, columns
    dtype: np.dtype
    rows_per_strip: int
    offsets: tuple[int, ...]
    packed_bytes: tuple[int, ...]
    deflated: bool
    differences: bool  # along the rows (predictor 2)


def _plain_page(page: Any, order: str, size: int) -> _Page | None:
    """The fields of a tifffile page; None for what Pillow has to decode (colour, tiles, LZW, JPEG).

    Raises VolumeRejected: truncated, size_implausible.
    """
    kinds = {1: "u", 2: "i", 3: "f"}
    bits, kind = page.bitspersample, kinds.get(int(page.sampleformat or 1), "")
    plain = (
        page.samplesperpixel == 1
        and int(page.photometric) == _BLACK_IS_ZERO
        and not page.is_tiled
        and int(page.compression) in (_UNCOMPRESSED, *_DEFLATED)
        and (int(page.predictor) == 1 or (int(page.predictor) == 2 and kind != "f"))
        and (kind, bits) in _NUMBERS
        and int(page.fillorder) == 1
        and (274 not in page.tags or int(page.tags[274].value) == 1)
    )
    if not plain:
        return None
    rows, columns = int(page.imagelength), int(page.imagewidth)
    check_size((rows, columns), bits // 8)
    rows_per_strip = min(max(int(page.rowsperstrip), 1), rows)
    offsets, counts = tuple(map(int, page.dataoffsets)), tuple(map(int, page.databytecounts))
    if len(offsets) != len(counts) or len(offsets) != -(-rows // rows_per_strip):
        raise rejection("truncated", "a page has fewer or more strips than its rows need")
    if any(start < 0 or count < 0 or start + count > size for start, count in zip(offsets, counts, strict=True)):
        raise rejection("truncated", "the values of a page end beyond the file")
    dtype = np.dtype(f"{order}{kind}{bits // 8}")
    return _Page(
        (rows, columns),
        dtype,
        rows_per_strip,
        offsets,
        counts,
        int(page.compression) != _UNCOMPRESSED,
        int(page.predictor) == 2,
    )


def _page_values(file: BinaryIO, page: _Page) -> np.ndarray:
    """`[H, W]`. Raises VolumeRejected truncated."""
    rows, columns = page.shape
    values = np.empty(page.shape, page.dtype)
    for strip, (offset, packed) in enumerate(zip(page.offsets, page.packed_bytes, strict=True)):
        first = strip * page.rows_per_strip
        height = min(page.rows_per_strip, rows - first)
        needed = height * columns * page.dtype.itemsize
        file.seek(offset)
        raw = file.read(packed if page.deflated else needed)
        if page.deflated:
            raw = inflate(raw, "a strip of a page", most_bytes=needed)
        if len(raw) < needed or (not page.deflated and packed < needed):
            raise rejection("truncated", "a page ends early")
        values[first : first + height] = np.frombuffer(raw, page.dtype).reshape(height, columns)
    if page.differences:
        values = np.cumsum(values, axis=1, dtype=page.dtype.newbyteorder("="))
    return values if values.dtype.isnative else values.byteswap().view(values.dtype.newbyteorder("="))


def _imagej_stack(path: Path, page: _Page, description: str) -> np.ndarray | None:
    """The images `[D, H, W]` that ImageJ wrote one after another behind the only page; None for no such file.

    Raises VolumeRejected: unsupported_pixels, truncated.
    """
    fields = dict(line.partition("=")[::2] for line in description.splitlines())
    count = int(text) if (text := fields.get("images", "").strip()).isdecimal() and len(text) < 7 else 1
    if not description.startswith("ImageJ=") or count < 2:
        return None
    if fields.get("channels", "1").strip() not in ("", "1", text):  # tifffile calls the slices of a stack channels
        raise rejection("unsupported_pixels", "an ImageJ stack of several channels; expected one intensity")
    if page.deflated or page.differences:
        raise rejection("unsupported_pixels", "an ImageJ stack with one page that is compressed")
    check_size((count, *page.shape), page.dtype.itemsize)
    needed, start = array_bytes((count, *page.shape), page.dtype.itemsize), page.offsets[0]
    if start + needed > path.stat().st_size:
        raise rejection("truncated", f"the description says {count} images, the file ends before that")
    with path.open("rb") as file:
        file.seek(start)
        values = np.fromfile(file, page.dtype, math.prod((count, *page.shape))).reshape(count, *page.shape)
    return values if values.dtype.isnative else values.byteswap().view(values.dtype.newbyteorder("="))


def _plain_pages(path: Path) -> tuple[list[_Page], str]:
    """(the pages, the first one's description); no pages if one of them is for Pillow to decode.

    Raises VolumeRejected: truncated, size_implausible, too_few_frames.
    """
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # its warnings quote what it reads
    size = path.stat().st_size
    pages: list[_Page] = []
    try:
        # Only the pages are read. Other metadata (OME, a multi-file series) would name other files.
        with tifffile.TiffFile(path, is_ome=False, _multifile=False) as tiff:
            order = ">" if tiff.byteorder == ">" else "<"
            description = tiff.pages.first.description[:_MAX_DESCRIPTION]
            for page in tiff.pages:
                plain = _plain_page(page.aspage(), order, size)
                if plain is None:
                    return [], ""
                pages.append(plain)
    except VolumeRejected:
        raise
    except Exception:  # what tifffile makes of damaged bytes; Pillow then decides whether the file can be read
        return [], ""
    return pages, description


def read_tiff(path: Path) -> RawScan:
    """A TIFF of many pages, or an ImageJ stack behind one page.

    tifffile lists the pages; uncompressed and deflated strips of one channel are read here from its checked fields.
    Pillow decodes files with other pages. Raises VolumeRejected: truncated, frames_broken, too_few_frames,
    unsupported_pixels, not_structural_oct, size_implausible.
    """
    pages, description = _plain_pages(path)
    if not pages:
        return _read_with_pillow(path)
    if len(pages) == 1 and (values := _imagej_stack(path, pages[0], description)) is not None:
        return _stacked_scan("tiff", enumerate(values, 1), len(values))
    if len(pages) < MIN_FRAMES:
        raise rejection("too_few_frames", f"{len(pages)} pages; a volume needs {MIN_FRAMES} at least")
    first = pages[0]
    needed = array_bytes((len(pages), *first.shape), first.dtype.itemsize)
    check_memory(needed, "its pages", path.stat().st_size, DEFLATE_RATIO)

    def frames() -> Iterator[tuple[int, np.ndarray]]:
        with path.open("rb") as file:
            for number, page in enumerate(pages, 1):
                if (page.shape, page.dtype) != (first.shape, first.dtype):
                    raise rejection("unsupported_pixels", f"page {number} is of another size or depth than the first")
                yield number, _page_values(file, page)

    return _stacked_scan("tiff", frames(), len(pages))


def _read_with_pillow(path: Path) -> RawScan:
    """A TIFF of any other kind of pages. Raises VolumeRejected as `read_tiff`."""
    try:
        image = Image.open(path, formats=PICTURE_FORMATS)
    except _DAMAGED:
        raise rejection("unsupported_pixels", "a TIFF that Pillow does not read: damaged, or of a rare kind") from None
    with image:
        try:
            count: int = getattr(image, "n_frames", 1)
        except _DAMAGED:
            raise rejection("truncated", "its pages cannot be counted: it ends early or is damaged") from None
        if count < MIN_FRAMES:
            raise rejection("too_few_frames", f"{count} pages; a volume needs {MIN_FRAMES} at least")
        _check_pictures(count, image.size, image.mode, path.stat().st_size)

        def frames() -> Iterator[tuple[int, np.ndarray]]:
            for index in range(count):
                try:
                    image.seek(index)
                except _DAMAGED:
                    raise rejection("frames_broken", f"page number {index + 1} cannot be read") from None
                check_size((image.size[1], image.size[0], 4), 4)
                yield index + 1, _frame(index + 1, image)

        return _stacked_scan("tiff", frames(), count)
