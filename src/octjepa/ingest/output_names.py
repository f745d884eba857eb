"""Names of the files that a verb writes for each scan, which hold nothing that identifies the person."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from octjepa.errors import UsageError
from octjepa.ingest.refused_scan import RefusedScan
from octjepa.ingest.source_file import Discovery, SourceFile
from octjepa.read.personal_data import StatedPerson, mask_path

_UNSAFE: Final = re.compile(r"[^\w.*#=+-]+")
_NOT_ALLOWED: Final = str.maketrans({"*": "x", "#": "_"})


def check_apart(files: Sequence[SourceFile], out: Path) -> None:
    """Raises UsageError if results would be written next to scans, where they could replace one."""
    target = out.resolve()
    for file in files:
        if isinstance(file.location, Path) and target in (file.location.resolve(), file.location.resolve().parent):
            raise UsageError(f"{out} holds scans: give --out a separate folder for the results")


class OutputNames:
    """Names of output files: the scan's file name; with names of folders before it if several scans have that name."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._parts: dict[str, int] = {}
        longest = max((file.name.count("/") + 1 for file in files), default=1)
        for parts in range(1, longest + 1):
            counts = Counter(self._last(file.name, parts) for file in files)
            for file in files:
                if counts[self._last(file.name, parts)] == 1:
                    self._parts.setdefault(file.key, parts)
        self._used: set[str] = set()

    @staticmethod
    def _last(name: str, parts: int) -> str:
        *folders, file = name.split("/")[-parts:]
        return "_".join([*folders, _stem(file)]).casefold()

    def of(self, source: SourceFile, people: Sequence[StatedPerson]) -> str:
        """A name that no other scan of this call has."""
        masked = self.shown(source, people).split("/")[-self._parts.get(source.key, 1) :]
        name = "_".join([*masked[:-1], _stem(masked[-1])])
        name = _UNSAFE.sub("_", name).translate(_NOT_ALLOWED).strip("._-")[:120] or "scan"
        unique, number = name, 1
        while unique.casefold() in self._used:
            number += 1
            unique = f"{name}_{number}"
        self._used.add(unique.casefold())
        return unique

    @staticmethod
    def shown(source: SourceFile, people: Sequence[StatedPerson]) -> str:
        """The scan's name in lists, with what identifies the person masked."""
        person = people[-1] if people else source.stated_person()
        return mask_path(source.name, person.name, person.birth_date)


def refused_by_search(discovery: Discovery) -> list[RefusedScan]:
    """The files that a search for scans refused, with what identifies the person masked."""
    return [
        RefusedScan.of(OutputNames.shown(refused.source, []), refused.reason, refused.detail)
        for refused in discovery.refused
    ]


def _stem(file: str) -> str:
    """A file name without its suffixes (".nii.gz" is one); the number of a scan in its file stays."""
    file, _, member = file.partition("#")
    stem = re.sub(r"(\.nii|\.tar|\.ome)?\.[A-Za-z][A-Za-z0-9]{0,5}$", "", file) or file
    return f"{stem}#{member}" if member else stem
