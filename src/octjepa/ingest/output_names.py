"""Names of the files that a verb writes for each scan, which hold nothing that identifies the person."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from octjepa.errors import UsageError
from octjepa.ingest.refused_scan import RefusedScan
from octjepa.ingest.results_record import ResultsRecord
from octjepa.ingest.source_file import Discovery, SourceFile
from octjepa.read.personal_data import StatedPerson, mask_path

_UNSAFE: Final = re.compile(r"[^\w.*#=+-]+")
_MAX_CHARACTERS: Final = 120
_MAX_BYTES: Final = 200  # of the 255 that file systems allow: numbers, suffixes and temporary names come on top
_NOT_ALLOWED: Final = str.maketrans({"*": "x", "#": "_"})


def check_apart(files: Sequence[SourceFile], out: Path) -> None:
    """Raises UsageError if results would be written next to scans, where they could replace one."""
    target = out.resolve()
    for file in files:
        if isinstance(file.location, Path) and target in (file.location.resolve(), file.location.resolve().parent):
            raise UsageError(f"{out} holds scans: give --out a separate folder for the results")


class OutputNames:
    """Names of output files: the scan's file name; with names of folders before it if several scans have that name.

    A scan whose results the `record` of the output folder names keeps its name, so that a repeated command writes the
    same files even if scans were added to the search in the meantime.
    """

    def __init__(self, files: Sequence[SourceFile], record: ResultsRecord) -> None:
        self._record = record
        self._parts: dict[str, int] = {}
        longest = max((file.name.count("/") + 1 for file in files), default=1)
        for parts in range(1, longest + 1):
            counts = Counter(self._last(file.name, parts) for file in files)
            for file in files:
                if counts[self._last(file.name, parts)] == 1:
                    self._parts.setdefault(file.key, parts)
        self._names_of_files = Counter(self._name(file, file.name).casefold() for file in files)
        self._used: set[str] = set()

    @staticmethod
    def _last(name: str, parts: int) -> str:
        *folders, file = name.split("/")[-parts:]
        return "_".join([*folders, _stem(file)]).casefold()

    def _name(self, source: SourceFile, path: str) -> str:
        *folders, file = path.split("/")[-self._parts.get(source.key, 1) :]
        name = "_".join([*folders, _stem(file)])
        plain = _UNSAFE.sub("_", name).translate(_NOT_ALLOWED).strip("._-")[:_MAX_CHARACTERS]
        return plain.encode()[:_MAX_BYTES].decode(errors="ignore") or "scan"

    def of(self, source: SourceFile, people: Sequence[StatedPerson], pixels_sha256: str) -> str:
        """A name that no other scan of this call has: that of earlier results of the same pixels, or a new one.

        A name that is masked says nothing about the scan, so results of another scan with that name do not count as
        an earlier version: the name gets the next number. Any other name stays, and `ResultsRecord.check` refuses it.
        """
        unmasked = self._name(source, source.name)
        name = self._name(source, self.shown(source, people))
        unique = self._recorded_name(name, pixels_sha256) or name
        number = 1
        while unique.casefold() in self._used or (
            (name != unmasked or number > 1) and self._record.is_of_another_scan(unique, pixels_sha256)
        ):
            number += 1
            unique = f"{name}_{number}"
        self._used.add(unique.casefold())
        return unique

    def _recorded_name(self, name: str, pixels_sha256: str) -> str | None:
        """The name of earlier results of the same pixels: `name` if they have several, and no other file's name."""
        recorded = self._record.names_of(pixels_sha256)
        free = [each for each in recorded if each.casefold() not in self._used]
        if name in free:
            return name
        return next((each for each in free if each.casefold() not in self._names_of_files), None)

    @staticmethod
    def shown(source: SourceFile, people: Sequence[StatedPerson]) -> str:
        """The scan's name in lists, with what identifies the person masked."""
        person = people[-1] if people else source.stated_person()
        return mask_path(source.name, person.name, person.birth_date)


class ShownNames:
    """Names of scans in lists, refusals and pages, with what identifies the person masked.

    A masked name has the position of the file in the search, sorted by path: "***.dcm (file 3 of 4)". It says nothing
    about the person, and the owner of the files can tell which file it is.
    """

    def __init__(self, sources: Iterable[SourceFile]) -> None:
        name_of = {str(source.location): source.name for source in sources}  # several scans may be in one file
        ordered = sorted(name_of, key=lambda location: (name_of[location], location))
        self._position_of = {location: f"file {number} of {len(ordered)}" for number, location in enumerate(ordered, 1)}

    def of(self, source: SourceFile, people: Sequence[StatedPerson]) -> str:
        """The scan's name, masked if it identifies the person."""
        return with_position(OutputNames.shown(source, people), self.position(source, people))

    def position(self, source: SourceFile, people: Sequence[StatedPerson]) -> str:
        """Such as "file 3 of 4"; "" if the name is not masked, or the only one."""
        is_masked = OutputNames.shown(source, people) != source.name
        return self._position_of[str(source.location)] if is_masked and len(self._position_of) > 1 else ""


def with_position(name: str, position: str) -> str:
    """A name and, if it is masked, the position of its file."""
    return f"{name} ({position})" if position else name


def refused_by_search(discovery: Discovery, shown: ShownNames) -> list[RefusedScan]:
    """The files that a search for scans refused, with what identifies the person masked."""
    return [
        RefusedScan.of(shown.of(refused.source, []), refused.reason, refused.detail) for refused in discovery.refused
    ]


def _stem(file: str) -> str:
    """A file name without its suffixes (".nii.gz" is one); the number of a scan in its file stays."""
    file, _, member = file.partition("#")
    stem = re.sub(r"(\.nii|\.tar|\.ome)?\.[A-Za-z][A-Za-z0-9]{0,5}$", "", file) or file
    return f"{stem}#{member}" if member else stem
