"""Names learned from one file of a folder mask the paths of its siblings, whose own headers may hold no name.

Kept in memory while an ingest runs, and nowhere else. A name holds for all files in the folder of the file that states
it and below; where a folder's name tells it, for that folder and for those next to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from octjepa.read.personal_data import (
    StatedPerson,
    identifies_person,
    identifies_person_in_path,
    is_placeholder,
    mask_part,
)

Person = tuple[str, str]  # name, birth date YYYYMMDD; "" where not stated
_MAX_PEOPLE = 200  # of a folder; with more, a person's own folder or file name is all that is masked


class SiblingNames:
    """The people whom the files of an ingest name, by folder. Paths are relative, with "/" between parts."""

    def __init__(self) -> None:
        self._below: defaultdict[tuple[str, ...], set[Person]] = defaultdict(set)  # all parts below a folder
        self._children: defaultdict[tuple[str, ...], set[Person]] = defaultdict(set)  # the parts in it alone

    def learn(self, path: str, person: StatedPerson) -> None:
        """`person` is what the file at `path` states."""
        name, birth_date = ("" if is_placeholder(text) else text for text in (person.name, person.birth_date))
        if not name and not birth_date:
            return
        *folders, _file = parts = tuple(path.split("/"))
        self._below[tuple(folders)].add((name, birth_date))
        found = next(
            (level for level, part in enumerate(folders) if identifies_person_in_path(part, name, birth_date)), None
        )
        if found is not None:
            self._children[parts[:found]].add((name, birth_date))
            self._below[parts[: found + 1]].add((name, birth_date))

    def masked(self, path: str, shown: str) -> str:
        """`shown`, what an index shows of `path` (equally many parts), with the parts masked that siblings tell of."""
        parts, out = tuple(path.split("/")), shown.split("/")
        if len(parts) != len(out):
            return shown
        for level, part in enumerate(parts):
            if out[level] == part and any(
                identifies_person_in_path(part, *person) for person in self._people(parts, level)
            ):
                out[level] = mask_part(part, self._people(parts, level))
        return "/".join(out)

    def identifies(self, path: str, text: str) -> bool:
        """Whether `text`, an id of the file at `path`, holds the name or birth date that a sibling states."""
        parts = tuple(path.split("/"))
        return any(identifies_person(text, *person) for person in self._people(parts, len(parts) - 1))

    def _people(self, parts: tuple[str, ...], level: int) -> Iterator[Person]:
        """The people whose names may be in the part at `level`."""
        for people in (self._children.get(parts[:level]), *(self._below.get(parts[:up]) for up in range(level + 1))):
            if people and len(people) <= _MAX_PEOPLE:
                yield from people
