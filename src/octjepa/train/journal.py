"""metrics.jsonl: a line per update and per validation, in order, never twice.

A resumed run first cuts the lines past its checkpoint, so a killed and resumed run leaves the same journal as one
that was never killed (times aside).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from octjepa.errors import OctjepaError
from octjepa.files import write_atomic


class Journal:
    """Appends JSON lines to `path`, keeping those of updates up to `keep_until` that are there."""

    def __init__(self, path: Path, keep_until: int) -> None:
        self._path = path
        self._file = self._cut(keep_until)

    def _cut(self, keep_until: int, *more: Mapping[str, Any]) -> TextIO:
        known = read_lines(self._path) if self._path.exists() else []
        kept = [*(line for line in known if line["update"] <= keep_until), *more]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomic(self._path, lambda file: file.write(text.encode()))
        return self._path.open("a", encoding="utf-8")

    def return_to(self, update: int, values: Mapping[str, Any]) -> None:
        """Drops the lines after `update` and adds one that says why, at once or not at all."""
        self._file.close()
        self._file = self._cut(update, {"update": update, **values})

    def write(self, update: int, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"update": update, **values}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Every line so far is on the disk. From any thread."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line; a last line that a kill cut short is left out. Raises OctjepaError on a damaged one."""
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        return [json.loads(line) for line in lines[:-1] if line]
    except json.JSONDecodeError as error:
        raise OctjepaError(f"{path} is damaged ({error}): start the run anew with another --out") from None
