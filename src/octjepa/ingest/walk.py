"""Walks local trees: every folder once with its regular files, no linked folder followed, nothing special opened.

What is left out is counted in `ignored`; what should have been read and cannot be is handed to `refuse`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

Refuse = Callable[[Path, str, str], None]  # path, reason code, detail
WILDCARDS = "*?["


@dataclass(frozen=True)
class Folder:
    """One folder; `names` its regular files, sorted; `linked` those among them that are links to files.

    `inside` are the folders that the walk enters next; who clears it keeps the walk out of them.
    """

    path: Path
    names: tuple[str, ...]
    linked: frozenset[str]
    inside: list[Path]


def walk(top: Path, ignored: Counter[str], refuse: Refuse) -> Iterator[Folder]:
    """`top` and all folders below it, each before those inside it. One system call a folder, none a regular file."""
    waiting = [top]
    while waiting:
        path = waiting.pop()
        try:
            with os.scandir(path) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            refuse(path, "unreadable_folder", error.strerror or str(error))
            continue
        names, linked, inside = [], set(), []
        for entry in found:
            kind = _kind(entry)
            if kind == "folder" and not entry.name.startswith("."):
                inside.append(path / entry.name)
            elif kind in {"file", "link"}:
                names.append(entry.name)
                if kind == "link":
                    linked.add(entry.name)
            elif kind == "link to nothing":
                refuse(path / entry.name, "unreadable_file", "a link that leads nowhere")
            else:
                ignored["hidden folder" if kind == "folder" else kind] += 1
        yield Folder(path, tuple(names), frozenset(linked), inside)
        waiting.extend(reversed(inside))


def _kind(entry: os.DirEntry[str]) -> str:
    try:
        if entry.is_symlink():
            if entry.is_dir():
                return "linked folder"
            if entry.is_file():
                return "link"
            return "special file" if os.path.exists(entry.path) else "link to nothing"
        if entry.is_dir(follow_symlinks=False):
            return "folder"
        return "file" if entry.is_file(follow_symlinks=False) else "special file"
    except OSError:  # a loop of links
        return "link to nothing"


def matches(pattern: str, ignored: Counter[str], refuse: Refuse) -> tuple[Path, list[Path]]:
    """The folder before the first wildcard, and the files and folders that `pattern` means, sorted, each once.

    "*", "?" and "[...]" stand for parts of one name, "**" for any number of folders. Hidden names need a pattern that
    begins with a dot, and linked folders are not entered, as in `walk`.
    """
    parts = Path(pattern).parts
    fixed = next(number for number, part in enumerate(parts) if set(part) & set(WILDCARDS))
    base = Path(*parts[:fixed])
    found: dict[Path, None] = {}

    def expand(folder: Path, rest: tuple[str, ...]) -> None:
        if not rest or rest == ("**",):
            found.setdefault(folder)
            return
        if rest[0] == "**":
            expand(folder, rest[1:])
        try:
            with os.scandir(folder) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except NotADirectoryError:
            return
        except OSError as error:
            refuse(folder, "unreadable_folder", error.strerror or str(error))
            return
        for entry in entries:
            kind = _kind(entry)
            hidden = entry.name.startswith(".") and not rest[0].startswith(".")
            if rest[0] == "**":
                if kind == "folder" and not hidden:
                    expand(folder / entry.name, rest)
            elif not hidden and fnmatchcase(entry.name, rest[0]):
                if kind == "folder" or (kind in {"file", "link"} and len(rest) == 1):
                    expand(folder / entry.name, rest[1:])
                elif kind not in {"file", "link"}:
                    ignored[kind] += 1

    once = [part for number, part in enumerate(parts) if part != "**" or number == 0 or parts[number - 1] != "**"]
    if base.is_dir():
        expand(base.resolve(), tuple(once[fixed:]))
    return base.resolve(), sorted(found)
