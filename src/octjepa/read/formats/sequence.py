"""Names of images to sequences of B-scans: which number counts the frames, and in which order (1, 2, 10).

Names of one pattern that differ in one number are a sequence (`P7_OD_1.png`, `P7_OD_2.png`, ...). Where several numbers
differ, the one that runs without a gap over all files counts the frames (times of day next to it do not matter); else
the last one does, and each set of the others is a separate sequence. Hexadecimal numbers that are consecutive count
the frames as well.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePath

IMAGE_SUFFIXES = (".png", ".tif", ".tiff", ".jpg", ".jpeg", ".bmp")
# Pillow's names of the formats that a picture may have, whatever its suffix. Without such a list Pillow hands
# PostScript to Ghostscript, which executes it.
PICTURE_FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "TIFF", "WEBP")
MIN_FRAMES = 4
_HEXADECIMAL = frozenset("0123456789abcdef")
_LONGEST_NUMBER = 16  # hexadecimal digits
_DIGITS = re.compile(r"(\d+)")

Sequence = list[tuple[int, str]]  # (frame number, name), in the order of the numbers


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts names with their numbers as numbers: 1, 2, 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part.lower()) for part in _DIGITS.split(name)]


def _without_gap(numbers: list[int]) -> bool:
    """Whether the numbers are all different and consecutive."""
    return len(set(numbers)) == len(numbers) == max(numbers) - min(numbers) + 1


def hexadecimal_tails(stems: list[str]) -> list[str]:
    """The hexadecimal numbers in which names of one length end, in lower case; [] if not all do, or all are decimal."""
    stems = [stem.lower() for stem in stems]
    if not stems or len(set(map(len, stems))) != 1:
        return []
    columns = [len(set(letters)) == 1 for letters in zip(*stems, strict=True)]
    shared = columns.index(False) if False in columns else len(columns)
    while shared and stems[0][shared - 1] in _HEXADECIMAL:
        shared -= 1
    tails = [stem[shared:] for stem in stems]
    numbers = all(tail and set(tail) <= _HEXADECIMAL and len(tail) <= _LONGEST_NUMBER for tail in tails)
    mixed = not all(map(str.isdecimal, tails)) and any(char.isdecimal() for tail in tails for char in tail)
    return tails if numbers and mixed else []


def hexadecimal_sequence(names: Iterable[str]) -> Sequence:
    """The images whose names end in consecutive hexadecimal numbers (2F0F8 to 2F10F), with these numbers; [] for none.

    All images have to be of that form. Names that count in decimal numbers are left out.
    """
    images = [PurePath(name) for name in names if not name.startswith(".")]
    images = [path for path in images if path.suffix.lower() in IMAGE_SUFFIXES]
    if len(images) < MIN_FRAMES or len({path.suffix.lower() for path in images}) != 1:
        return []
    numbers = [int(tail, 16) for tail in hexadecimal_tails([path.stem for path in images])]
    if not numbers or not _without_gap(numbers):
        return []
    return sorted(zip(numbers, (path.name for path in images), strict=True))


def sequences(names: Iterable[str]) -> list[Sequence]:
    """The sequences of four images or more, the longest first; other files and hidden ones are left out."""
    names = list(names)
    if hexadecimal := hexadecimal_sequence(names):
        return [hexadecimal]
    patterns: defaultdict[tuple[str, ...], list[tuple[list[int], str]]] = defaultdict(list)
    for name in names:
        path = PurePath(name)
        if path.suffix.lower() in IMAGE_SUFFIXES and not name.startswith("."):
            parts = _DIGITS.split(path.stem.lower())
            patterns[(*parts[::2], path.suffix.lower())].append(([int(digits) for digits in parts[1::2]], name))
    result: list[Sequence] = []
    for members in patterns.values():
        columns = list(zip(*(numbers for numbers, _ in members), strict=True))
        varying = [index for index, column in enumerate(columns) if len(set(column)) > 1]
        consecutive = [index for index in varying if _without_gap(list(columns[index]))]
        if not varying:
            continue
        frame = (consecutive or varying)[-1]
        scans: defaultdict[tuple[int, ...], Sequence] = defaultdict(list)
        for numbers, name in members:
            others = () if consecutive else tuple(numbers[index] for index in varying if index != frame)
            scans[others].append((numbers[frame], name))
        result += [sorted(scan) for scan in scans.values() if len(scan) >= MIN_FRAMES]
    return sorted(result, key=lambda scan: (-len(scan), scan[0][1]))
