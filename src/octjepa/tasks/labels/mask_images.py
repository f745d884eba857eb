"""Masks as images: a PNG, TIFF or BMP for each labelled B-scan, or one TIFF with a page for each B-scan.

In: a folder of masks and the shape of its scan. Out: class of every voxel, 255 in B-scans without a mask. Three forms:

- whole numbers (`classes.json`: {"1": "fluid"}; 0 is background unless named),
- colours (`classes.json`: {"#ff0000": "fluid"}; every colour needs a name; "background" and "unlabelled" are names),
- a folder for each class, in whose images everything but 0 is marked (one-hot).

Names decide which B-scan a mask belongs to: that of the B-scan's image, with or without an ending such as `_mask`; for
scans of one file the number in the name. Masks for all B-scans are taken in the order of their numbers. Of fewer masks,
numbers count from 0 if a mask has the number 0, and from 1 otherwise. If the B-scans are images whose names are not
known, fewer masks without a 0 are refused, because numbers of images count from 0 or from 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from octjepa.errors import UsageError
from octjepa.parsing import read_object
from octjepa.read.formats.images import unmasked
from octjepa.read.formats.sequence import PICTURE_FORMATS, natural_key
from octjepa.tasks.labels.layer_labels import UNLABELLED
from octjepa.tasks.labels.layer_names import BACKGROUND, NOT_LABELLED

MASK_SUFFIXES: Final = (".png", ".tif", ".tiff", ".bmp")
_LOSSY: Final = (".jpg", ".jpeg")
_EXAMPLE: Final = 'expected {"1": "fluid"} or {"#ff0000": "fluid"}'
_VALUES_SHOWN: Final = 5
_NUMBER: Final = re.compile(r"\d+")
_COLOUR: Final = re.compile(r"#[0-9a-fA-F]{6}")


@dataclass(frozen=True)
class MaskTable:
    """Names of whole numbers and of colours (red, green, blue)."""

    numbers: Mapping[int, str]
    colours: Mapping[tuple[int, int, int], str]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of classes, in the order of the table."""
        named = [*self.numbers.values(), *self.colours.values()]
        return tuple(dict.fromkeys(name for name in named if not _reserved(name)))


@dataclass(frozen=True, eq=False)
class Masks:
    """Class of every voxel: k is `names[k - 1]`; `notes` says what was assumed."""

    codes: UInt8[np.ndarray, "N R C"]
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def _reserved(name: str) -> bool:
    return name.casefold() in (*BACKGROUND, *NOT_LABELLED)


def read_table(folder: Path) -> MaskTable:
    """`classes.json` of a folder of masks, or of the folder around it. Raises UsageError: none, or no such table."""
    file = next((item for item in (folder / "classes.json", folder.parent / "classes.json") if item.is_file()), None)
    if file is None:
        raise UsageError(f"{folder} holds masks and no classes.json that names their values: {_EXAMPLE}")
    try:
        named: object = read_object(file)
    except (ValueError, OSError):
        named = None
    if not isinstance(named, dict):
        raise UsageError(f"{file} is not a mapping of values to names: {_EXAMPLE}")
    numbers: dict[int, str] = {}
    colours: dict[tuple[int, int, int], str] = {}
    for key, name in named.items():
        if _COLOUR.fullmatch(str(key)):
            red, green, blue = (int(str(key)[k : k + 2], 16) for k in (1, 3, 5))
            colours[red, green, blue] = str(name)
        elif str(key).isdecimal():
            numbers[int(key)] = str(name)
        elif key != "source":
            raise UsageError(f"{file} names the value {str(key)[:20]!r}: {_EXAMPLE}")
    return MaskTable(numbers, colours)


def mask_files(folder: Path) -> list[Path]:
    """The mask images of a folder in the order of their numbers. Raises UsageError: masks as JPEG."""
    files = sorted((file for file in folder.iterdir() if file.is_file()), key=lambda file: natural_key(file.name))
    masks = [file for file in files if file.suffix.lower() in MASK_SUFFIXES and file.name[0] != "."]
    lossy = [file for file in files if file.suffix.lower() in _LOSSY]
    if lossy and not masks:
        raise UsageError(f"{lossy[0]} is a JPEG, which changes values: expected masks as PNG or TIFF")
    marked = [file for file in masks if unmasked(file.stem)]
    return marked or masks  # images may lie next to their masks


def is_mask_folder(folder: Path) -> bool:
    """Whether a folder holds mask images, or folders of mask images (one for each class)."""
    return bool(mask_files(folder)) or bool(_class_folders(folder))


def _class_folders(folder: Path) -> list[Path]:
    return [item for item in sorted(folder.iterdir()) if item.is_dir() and mask_files(item)]


def mask_names(folder: Path) -> tuple[str, ...]:
    """Names of the classes of a folder of masks, in the order of their codes. Raises UsageError as `read_table`."""
    return read_table(folder).names if mask_files(folder) else tuple(item.name for item in _class_folders(folder))


def read_masks(folder: Path, shape: tuple[int, int, int], bscans: Sequence[str] | None = ()) -> Masks:
    """The masks of a scan of `shape` whose B-scan images are called `bscans`.

    bscans: () for a scan of one file, None for images of unknown names.

    Raises UsageError that names the file: another size, no B-scan of that name or number, two masks of one B-scan, a
    value without a name, damaged.
    """
    if files := mask_files(folder):
        table = read_table(folder)
        codes, notes = _stack(files, shape, bscans, lambda values, file: _codes(values, table, file))
        return Masks(codes, table.names, notes)
    folders = _class_folders(folder)
    if not folders:
        raise UsageError(f"{folder} holds no masks: expected {', '.join(MASK_SUFFIXES)} files")
    codes = np.full(shape, UNLABELLED, np.uint8)
    notes = ()
    for code, item in enumerate(folders, 1):
        marked, notes = _stack(mask_files(item), shape, bscans, lambda values, file: _is_marked(values))
        if twice := np.argwhere((marked == 1) & (codes != 0) & (codes != UNLABELLED)).tolist():
            raise UsageError(f"{item} marks voxels of B-scan {twice[0][0] + 1} that another class of {folder} marks")
        codes = np.where(marked == 1, code, np.where(codes == UNLABELLED, marked, codes)).astype(np.uint8)
    return Masks(codes, tuple(item.name for item in folders), notes)


def read_mask_file(file: Path, shape: tuple[int, int, int], table: MaskTable) -> Masks:
    """An image of a scan of one B-scan, or a TIFF with a page for each B-scan. Raises UsageError as `read_masks`."""
    pages = _pages(file, shape)
    if len(pages) != shape[0]:
        raise UsageError(f"{file} has {len(pages)} pages, its scan {shape[0]} B-scans: expected a page for each")
    return Masks(np.stack([_codes(page, table, file) for page in pages]), table.names)


def _stack(
    files: Sequence[Path],
    shape: tuple[int, int, int],
    bscans: Sequence[str] | None,
    convert: Callable[[np.ndarray, Path], np.ndarray],
) -> tuple[UInt8[np.ndarray, "N R C"], tuple[str, ...]]:
    """(codes of all B-scans, what was assumed); `convert` turns the values of a mask into codes."""
    if len(files) == 1 and shape[0] > 1 and len(pages := _pages(files[0], shape)) > 1:
        _check_pages(files[0], len(pages), shape[0])
        return np.stack([convert(page, files[0]) for page in pages]), ()
    positions, notes = _bscan_of_each(files, shape[0], bscans)
    codes = np.full(shape, UNLABELLED, np.uint8)
    for file, position in zip(files, positions, strict=True):
        pages = _pages(file, shape)
        _check_pages(file, len(pages), 1)
        codes[position] = convert(pages[0], file)
    return codes, notes


def _check_pages(file: Path, count: int, expected: int) -> None:
    if count != expected:
        raise UsageError(
            f"{file} has {count} pages: expected a single file with a page for each B-scan, or masks of one page each"
        )


def _bscan_of_each(
    files: Sequence[Path], count: int, bscans: Sequence[str] | None
) -> tuple[list[int], tuple[str, ...]]:
    """(the B-scan of each mask, what was assumed)."""
    if bscans:
        stems = {Path(name).stem.casefold(): index for index, name in enumerate(bscans)}
        named = [stems.get(file.stem.casefold(), stems.get(unmasked(file.stem.casefold()))) for file in files]
        if any(position is not None for position in named):
            lost = [file for file, position in zip(files, named, strict=True) if position is None]
            if lost:
                raise UsageError(f"{lost[0]} belongs to no B-scan: expected names such as {Path(bscans[0]).stem}.png")
            return _once([position for position in named if position is not None], files), ()
    if len(files) == count:
        return list(range(count)), ()
    if len(files) > count:
        raise UsageError(f"{files[count]} is mask {count + 1} of a scan of {count} B-scans: remove other files")
    numbers = []
    for file in files:
        present = _NUMBER.findall(file.stem)
        if not present:
            raise UsageError(f"{file} has no number in its name: expected that of its B-scan, 1 to {count}")
        numbers.append(int(present[-1]))
    if bscans is None and 0 not in numbers:
        raise UsageError(
            f"{files[0].parent} holds {len(files)} masks for {count} B-scans that are images, whose numbers may count "
            'from 0 or from 1: expected a mask for every B-scan (one that is all "unlabelled" if nothing is graded)'
        )
    first = 0 if 0 in numbers else 1
    for file, number in zip(files, numbers, strict=True):
        if not 0 <= number - first < count:
            raise UsageError(
                f"{file} has the number {number}, its scan {count} B-scans: expected {first} to {first + count - 1}"
            )
    note = f"{len(files)} masks for {count} B-scans: their numbers count from {first}"
    return _once([number - first for number in numbers], files), (note,)


def _once(positions: list[int], files: Sequence[Path]) -> list[int]:
    for index, position in enumerate(positions):
        if position in positions[:index]:
            raise UsageError(
                f"{files[index]} and {files[positions.index(position)].name} are masks of one B-scan: keep one"
            )
    return positions


def _pages(file: Path, shape: tuple[int, int, int]) -> list[np.ndarray]:
    """The images of a file, of numbers `[R, C]` or colours `[R, C, 3]`. Raises UsageError: another size, damaged."""
    try:
        with Image.open(file, formats=PICTURE_FORMATS) as image:
            pages = []
            for index in range(getattr(image, "n_frames", 1)):
                image.seek(index)
                if image.size != (shape[2], shape[1]):  # before anything is decoded
                    raise UsageError(
                        f"{file} has {image.size[1]} x {image.size[0]} pixels, its scan {shape[1]} x {shape[2]} "
                        "(depth, columns): masks must have the size of the B-scans"
                    )
                if index >= shape[0]:
                    raise UsageError(f"{file} has more pages than its scan has B-scans ({shape[0]})")
                pages.append(_values(image))
            return pages
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise UsageError(f"{file} cannot be read as a mask ({type(error).__name__})") from None


def _values(image: Image.Image) -> np.ndarray:
    """Whole numbers, or colours if the three channels differ; of a picture with a palette both, `[R, C, 4]`."""
    if image.mode == "P":
        return np.dstack([np.asarray(image.convert("RGB")), np.asarray(image)])
    if image.mode in ("RGB", "RGBA", "CMYK"):
        return np.asarray(image.convert("RGB"))
    return np.asarray(image.convert("L") if image.mode in ("LA", "PA") else image)


def _is_marked(values: np.ndarray) -> UInt8[np.ndarray, "R C"]:
    """1 where a mask of one class is not 0."""
    marked = np.asarray(values[..., :3].any(-1) if values.ndim == 3 else values != 0)
    return marked.astype(np.uint8)


def _codes(values: np.ndarray, table: MaskTable, file: Path) -> UInt8[np.ndarray, "R C"]:
    """Codes by the table. Raises UsageError: a value without a name."""
    codes = {name: code for code, name in enumerate(table.names, 1)}

    def code(name: str) -> int:
        return UNLABELLED if name.casefold() in NOT_LABELLED else codes.get(name, 0)

    if values.ndim == 3 and not table.colours and values.shape[2] == 3 and (values == values[..., :1]).all():
        values = values[..., 0]  # grey, written in colour
    if values.ndim == 3 and (table.colours or values.shape[2] == 3):
        packed = (values[..., :3].astype(np.int64) << np.array([16, 8, 0])).sum(-1)
        codes_by_value = {(r << 16) + (g << 8) + b: code(name) for (r, g, b), name in table.colours.items()}
        return _looked_up(packed, codes_by_value, file, lambda value: f"#{value:06x}")
    if values.ndim == 3:
        values = values[..., 3]
    if values.dtype.kind == "f" and (values != np.rint(values)).any():
        raise UsageError(f"{file} holds values that are not whole numbers: a mask numbers its classes")
    codes_by_value = {0: 0, UNLABELLED: UNLABELLED} | {number: code(name) for number, name in table.numbers.items()}
    return _looked_up(values.astype(np.int64), codes_by_value, file, str)


def _looked_up(
    values: np.ndarray, codes_by_value: Mapping[int, int], file: Path, show: Callable[[int], str]
) -> UInt8[np.ndarray, "R C"]:
    """The codes of values. Raises UsageError: a value that is not known."""
    present, inverse = np.unique(values, return_inverse=True)
    strange = [int(value) for value in present if int(value) not in codes_by_value]
    if strange:
        shown = ", ".join(map(show, strange[:_VALUES_SHOWN])) + (", ..." if len(strange) > _VALUES_SHOWN else "")
        named = ", ".join(map(show, sorted(codes_by_value)))
        raise UsageError(f"{file} holds {shown}, which classes.json does not name (it names {named})")
    return np.array([codes_by_value[int(value)] for value in present], np.uint8)[inverse].reshape(values.shape)
