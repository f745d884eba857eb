"""Rows of a store in memory: of the index by volume, of the ledger by file, kept true entry by entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# The file could not be looked at: what the store holds of it is as good as before.
_NOT_JUDGED = {"unreadable_file", "manifest_row_without_file"}


def file_key(row: Mapping[str, Any]) -> str:
    """What names the file of an index or ledger row; the relative path where no key came with it."""
    return str(row.get("file_key") or row["file"])


class Rows:
    """Index and ledger in memory: rows by volume id, quarantine rows by file; a file stands in one of the two."""

    def __init__(self, rows: Iterable[dict[str, Any]], quarantine: Iterable[dict[str, str]]) -> None:
        self.rows = {str(row["volume_id"]): row for row in rows}
        self.quarantine = {file_key(row): row for row in quarantine}
        self._volume_of = {file_key(row): name for name, row in self.rows.items()}

    def apply(self, entry: Mapping[str, Any]) -> str:
        """The id of a volume that this entry takes out of the index, or ""."""
        row = dict(entry.get("volume") or entry.get("refused") or {})
        if not row:
            return ""
        file = file_key(row)
        before = self._volume_of.get(file, "")
        if "refused" in entry:
            self.quarantine[file] = row
            gone = "" if row["reason"] in _NOT_JUDGED else before
        else:
            gone = before if before != row["volume_id"] else ""
        if gone:
            del self.rows[gone], self._volume_of[file]
        if "volume" in entry:
            self.quarantine.pop(file, None)
            if replaced := self.rows.get(row["volume_id"]):
                self._volume_of.pop(file_key(replaced), None)
            self.rows[row["volume_id"]] = row
            self._volume_of[file] = row["volume_id"]
        return gone
