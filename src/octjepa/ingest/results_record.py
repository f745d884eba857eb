"""Record which files of an output folder octjepa wrote, and of which scan, so that no other file is replaced.

In: the folder, and for every scan its name, the hash of its pixels and the files to write. Out: a file of JSON lines in
that folder. A file that is already there may be written again only if the record names it as a result of the same
pixels: a repeated command works, and neither a user's file nor the results of another scan are replaced. A scan is
recorded before its files are written, so that a killed command can be repeated. The record holds no path and no UID.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from octjepa.errors import UsageError
from octjepa.files import Journal, write_atomic
from octjepa.ingest.refused_scan import RefusedScan, WithoutResult
from octjepa.read.formats.sequence import natural_key

OUTPUT_EXISTS = "output_exists"  # the reason of a scan whose results would replace a file
SHARED = ""  # the name, and the hash, under which files of the whole folder are recorded
T = TypeVar("T")


class OutputExists(WithoutResult, UsageError):
    """A file of the output folder would be replaced that is not a result of the same scan."""

    def __init__(self, folder: Path, detail: str) -> None:
        super().__init__(f"{folder} {detail}: choose another --out")
        self.detail = f"the output folder {detail}"

    def refusal(self, scan: str) -> RefusedScan:
        return RefusedScan(scan, OUTPUT_EXISTS, self.detail, "choose another folder with --out")


class ResultsRecord:
    """The record `file` of `folder`. Only the process that holds the folder's writer lock may claim and add."""

    def __init__(self, folder: Path, file: str) -> None:
        self._folder = folder
        self._journal = Journal(folder / file)
        self._entries: dict[tuple[str, str], dict[str, Any]] = {}  # the last entry of a name and its first file
        self._hash_of: dict[str, str] = {}  # file -> hash of the scan's pixels
        self._lines = 0
        for entry in self._journal.read():
            if isinstance(entry.get("name"), str) and isinstance(entry.get("pixels_sha256"), str):
                self._add(entry)
            self._lines += 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recorded."""
        return not self._entries

    def lists(self, path: Path) -> bool:
        """Whether `path` is a recorded file of this folder."""
        return path.name in self._hash_of and path.parent.resolve() == self._folder.resolve()

    def names_of(self, pixels_sha256: str) -> list[str]:
        """The names under which results of a scan are recorded, each once."""
        names = {name for (name, _), entry in self._entries.items() if entry["pixels_sha256"] == pixels_sha256}
        return sorted(names, key=natural_key)

    def is_of_another_scan(self, name: str, pixels_sha256: str) -> bool:
        """Whether results of another scan are recorded under `name`, in any case of its letters."""
        return any(
            of_name.casefold() == name.casefold() and entry["pixels_sha256"] != pixels_sha256
            for (of_name, _), entry in self._entries.items()
        )

    def check(self, name: str, pixels_sha256: str, files: Sequence[str]) -> None:
        """Raises OutputExists if one of `files` is there and not recorded as a result of the same pixels."""
        for file in files:
            if not os.path.lexists(self._folder / file):
                continue
            if file not in self._hash_of:
                raise OutputExists(self._folder, f"holds {file}, and octjepa has no record of writing it")
            if self._hash_of[file] != pixels_sha256:
                raise OutputExists(self._folder, f"holds results of another scan called {name}")

    def claim(self, name: str, pixels_sha256: str, files: Sequence[str]) -> None:
        """Records that `files` are about to be written for the scan called `name`. Raises OutputExists as `check`."""
        self.check(name, pixels_sha256, files)
        self._append({"name": name, "pixels_sha256": pixels_sha256, "files": list(files)})

    def add(self, name: str, kind: str, result: Mapping[str, Any]) -> None:
        """Adds the `result`, plain data, to the latest claim of `name`. `kind` tells results of scans from others."""
        claimed = next(entry for (of_name, _), entry in reversed(self._entries.items()) if of_name == name)
        self._append({**claimed, "kind": kind, "result": dict(result)})

    def merged(self, kind: str, current: Mapping[str, T], parse: Callable[[Mapping[str, Any]], T]) -> list[T]:
        """`current`, by name, and after it the results of `kind` of earlier calls whose files are still there."""
        earlier: dict[str, T] = {}
        for (name, file), entry in self._entries.items():
            is_earlier = entry.get("kind") == kind and name not in current
            if is_earlier and isinstance(entry.get("result"), dict) and (self._folder / file).is_file():
                with suppress(UsageError, AttributeError, IndexError, KeyError, TypeError, ValueError):  # damaged
                    earlier[name] = parse(entry["result"])
        return [*current.values(), *(earlier[name] for name in sorted(earlier, key=natural_key))]

    def _add(self, entry: dict[str, Any]) -> None:
        files = [file for file in entry.get("files") or () if isinstance(file, str)]
        key = (entry["name"], files[0] if files else "")
        self._entries.pop(key, None)  # so that the latest entry is the last one
        self._entries[key] = entry
        self._hash_of.update(dict.fromkeys(files, entry["pixels_sha256"]))

    def _append(self, entry: dict[str, Any]) -> None:
        if self._lines > len(self._entries):  # drop the lines that later lines replace
            text = "".join(json.dumps(each) + "\n" for each in self._entries.values())
            write_atomic(self._journal.path, lambda file: file.write(text.encode()))
            self._lines = len(self._entries)
        self._add(entry)
        self._journal.append(entry)
