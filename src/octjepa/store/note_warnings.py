"""What an ingest warns of for the notes of its volumes: each says what it means for a run and what to do."""

from __future__ import annotations

from collections.abc import Mapping

from octjepa.ingest.scan_direction import VERTICAL_NOTE
from octjepa.store.canonical import SPARSE_NOTE
from octjepa.store.vitreous_objects import OBJECT_NOTE

_LEFT_OUT = "recipes leave them out, unless data.exclude_notes=[] asks for them."
_WINDOW = (
    "One window serves all volumes of a store and every encoder trained on it, so a recipe decides it, not a volume: "
    "`octjepa plan RECIPE --store STORE` names the preprocessing.image_size or target_spacing_mm that would hold them; "
    "ingest into another store with such a recipe."
)
_WARNINGS = {
    "extent_implausible": "are smaller or larger than any OCT: their spacing may be wrong and is marked uncertain. "
    "`octjepa inspect FILE` says where it comes from.",
    SPARSE_NOTE: f"are rasters of a few lines or of lines far apart: {_LEFT_OUT}",
    VERTICAL_NOTE: f"have B-scans that run up or down, by their headers: {_LEFT_OUT}",
    OBJECT_NOTE: "show something opaque and bright in front of the retina, an instrument perhaps: look at them, and "
    f"leave them out by data.exclude_notes=[{SPARSE_NOTE},{VERTICAL_NOTE},{OBJECT_NOTE}].",
    "field_outside": f"are wider or longer than the grid, which reads their centre. {_WINDOW}",
    "depth_outside": f"have tissue above or below the grid, which cuts it. {_WINDOW}",
}


def note_warnings(notes: Mapping[str, int]) -> list[tuple[int, str]]:
    """(volumes, message) for notes that need the user's attention; `notes` counts volumes by note code."""
    return [(notes.get(note, 0), f"volumes (note {note}) {message}") for note, message in _WARNINGS.items()]
