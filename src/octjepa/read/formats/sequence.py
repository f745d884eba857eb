"""Names of images to sequences of B-scans: which number counts the frames, and in which order (1, 2, 10).

Names of one pattern that differ in one number are a sequence (`P7_OD_1.png`, `P7_OD_2.png`, ...). Where several numbers
differ, the one that runs without a gap over all files counts the frames (times of day beside it do not matter); else
the last one does, and each set of the others is a sequence of its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePath

IMAGE_SUFFIXES = (".png", ".tif", ".tiff", ".jpg", ".jpeg", ".bmp")
MIN_FRAMES = 4
_DIGITS = re.compile(r"(\d+)")

Sequence = list[tuple[int, str]]  # (frame number, name), in the order of the numbers


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts names with their numbers as numbers: 1, 2, 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part.lower()) for part in _DIGITS.split(name)]


def _without_gap(numbers: list[int]) -> bool:
    """Whether the numbers are all different and consecutive."""
    return len(set(numbers)) == len(numbers) == max(numbers) - min(numbers) + 1


def sequences(names: Iterable[str]) -> list[Sequence]:
    """The sequences of four images or more, the longest first; other files and hidden ones are left out."""
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
