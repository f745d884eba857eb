"""Notes and the cells that hold lists of codes."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import octjepa
from octjepa.notes import Note, count_codes, read_codes, read_notes, unique_notes, write_codes, write_notes


def test_a_note_is_its_text_with_a_code_and_a_detail() -> None:
    note = Note("gap_frames=3")
    assert (note, note.code, note.detail) == ("gap_frames=3", "gap_frames", "3")
    assert (Note("inverted").code, Note("inverted").detail) == ("inverted", "")
    assert pickle.loads(pickle.dumps(note)).detail == "3"  # a worker process sends it to the parent


@pytest.mark.parametrize("text", ["", "=3", "a;b"])
def test_a_text_that_a_table_cannot_hold_is_not_a_note(text: str) -> None:
    with pytest.raises(ValueError, match="note"):
        Note(text)
    with pytest.raises(ValueError, match="note"):
        write_notes(["halves", text])


def test_notes_survive_their_cell_in_order_and_once() -> None:
    notes = unique_notes(["b=2", "a", "b=2", "b=3"])
    assert notes == ("b=2", "a", "b=3")
    assert write_notes(notes) == "b=2;a;b=3"
    assert read_notes(write_notes(notes)) == notes
    assert count_codes([notes, read_notes("a")]) == {"b": 2, "a": 2}


@pytest.mark.parametrize("cell", ["", None, float("nan"), ";"])
def test_an_empty_cell_holds_nothing(cell: object) -> None:
    assert read_notes(cell) == read_codes(cell) == ()


def test_codes_that_would_be_read_as_others_are_refused() -> None:
    assert read_codes(write_codes(["slice", "depth"])) == ("slice", "depth")
    assert write_codes([]) == ""
    for codes in (["a;b"], ["a", ""]):
        with pytest.raises(ValueError, match="code"):
            write_codes(codes)


def test_no_other_module_splits_or_joins_such_a_cell() -> None:
    package = Path(octjepa.__file__).parent
    own_form = re.compile(r"""(["']);\1\.join\(|\.split\((["']);\2\)""")
    sources = [path for path in package.rglob("*.py") if own_form.search(path.read_text(encoding="utf-8"))]
    assert not sources, f"use octjepa.notes: {sources}"
