"""Paired differences of the exam that were computed once, so that the pages can be redrawn without bootstrap samples.

The bootstrap samples are large and stay outside the repository. `compare` (results.py) computes a difference from them
and remembers it here; without samples it reads the difference back. A stored difference is only used while its two
values in results.json are the values that it was computed from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octjepa.files import write_json

ROUNDING = 0.0011  # of a stored difference: three digits after the point
ROUNDING_UM = 0.11  # of an error in um: one digit


@dataclass
class StoredDifferences:
    """The file `path`: a list of {ours, theirs, key, their_key, difference, low, high}, by rows and metric."""

    path: Path
    records: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> StoredDifferences:
        """The stored differences of `path`, none if the file is missing."""
        entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        return cls(path, {_name(e["ours"], e["theirs"], e["key"], e["their_key"]): e for e in entries})

    def find(
        self, rows: tuple[Sequence[str], Sequence[str]], keys: tuple[str, str], difference: float
    ) -> dict[str, Any] | None:
        """The record of two lists of rows whose values differ by `difference`; None if no record has it."""
        record = self.records.get(_name(*rows, *keys))
        rounding = ROUNDING_UM if "error_um" in keys[0] else ROUNDING
        return record if record is not None and abs(record["difference"] - difference) < rounding else None

    def remember(self, rows: tuple[Sequence[str], Sequence[str]], keys: tuple[str, str], **values: Any) -> None:
        """Adds or replaces a record; `save` writes it."""
        record = {"ours": list(rows[0]), "theirs": list(rows[1]), "key": keys[0], "their_key": keys[1], **values}
        self.records[_name(*rows, *keys)] = record

    def save(self) -> None:
        """Writes the file, sorted, if there is anything to write."""
        if self.records:
            write_json(self.path, [self.records[name] for name in sorted(self.records)])


def _name(ours: Sequence[str], theirs: Sequence[str], key: str, their_key: str) -> str:
    return " ".join([",".join(ours), ",".join(theirs), key, their_key])
