"""Notes about a volume, and the stored form of lists of short codes.

A note is a code, such as `columns_mirrored`, that some codes follow with a detail (`gap_frames=3`). Decoders emit notes
as plain text; `octjepa.read.reader` and `octjepa.canonical.pipeline` turn them into `Note`s. A table or manifest keeps
a list of notes, of uncertain axes or of fields of personal data in one cell, joined with ";". This module contains the
only writer and the only reader of that form, so that no other module splits or joins such a cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Self

HALVES_NOTE = "halves"  # the volume is stored with `half_difference`
SPARSE_NOTE = "sparse_slices"  # with the number of stored slices that have a B-scan near
_SEPARATOR = ";"


class Note(str):
    """A note as its text, `code` or `code=detail`; it equals and hashes as that text.

    Raises ValueError: the text has no code, or contains ";", which separates notes in a table.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        if _SEPARATOR in text or not text.partition("=")[0]:
            raise ValueError(f"the note {text[:60]!r} has no code or contains {_SEPARATOR!r}")
        return super().__new__(cls, text)

    @property
    def code(self) -> str:
        """The part before "="."""
        return self.partition("=")[0]

    @property
    def detail(self) -> str:
        """The part after "=", "" where the note has none."""
        return self.partition("=")[2]


def unique_notes(texts: Iterable[str]) -> tuple[Note, ...]:
    """`texts` as notes in their order, each once. Raises ValueError as `Note` does."""
    return tuple(map(Note, dict.fromkeys(texts)))


def count_codes(lists: Iterable[Iterable[Note]]) -> Counter[str]:
    """How often each code occurs in all `lists`."""
    return Counter(note.code for notes in lists for note in notes)


def write_codes(codes: Iterable[str]) -> str:
    """The cell that holds `codes`, "" for none. Raises ValueError: a code is empty or contains ";"."""
    codes = tuple(codes)
    if any(not code or _SEPARATOR in code for code in codes):
        raise ValueError(f"a code is empty or contains {_SEPARATOR!r}: {str(codes)[:120]}")
    return _SEPARATOR.join(codes)


def read_codes(cell: object) -> tuple[str, ...]:
    """The codes of a cell; () for an empty or missing value."""
    return tuple(code for code in cell.split(_SEPARATOR) if code) if isinstance(cell, str) else ()


def write_notes(notes: Iterable[str]) -> str:
    """The cell that holds `notes`, each once. Raises ValueError as `Note` does."""
    return write_codes(unique_notes(notes))


def read_notes(cell: object) -> tuple[Note, ...]:
    """The notes of a cell; () for an empty or missing value. A text without a code is not a note and is left out."""
    return tuple(Note(text) for text in read_codes(cell) if text.partition("=")[0])
