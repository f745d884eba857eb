"""Warnings of ingest about the notes of its volumes: what each means for a run, and what to do."""

from __future__ import annotations

from collections.abc import Mapping

from octjepa.canonical.neighbours import RADIAL_NOTE, UNLIKE_NOTE
from octjepa.canonical.plausibility import DOUBTFUL_NOTE
from octjepa.canonical.vitreous_objects import OBJECT_NOTE
from octjepa.notes import SPARSE_NOTE
from octjepa.read.dicom import PART_NOTE
from octjepa.read.orientation import VERTICAL_NOTE
from octjepa.read.single_bscan import ASSUMED_NOTE

_LEFT_OUT = "Recipes leave them out, unless data.exclude_notes=[] includes them."
_WINDOW = (
    "All volumes of a store and all encoders trained on it share one window, so it is set by the recipe: "
    "`octjepa plan RECIPE --store STORE` names the preprocessing.image_size or target_spacing_mm that would hold them; "
    "ingest into another store with such a recipe."
)
_WARNINGS = {
    "extent_implausible": "smaller or larger than any OCT: the spacing may be wrong and is marked uncertain. "
    "`octjepa inspect FILE` names its source.",
    SPARSE_NOTE: f"a raster of a few lines, or of lines far apart. {_LEFT_OUT}",
    VERTICAL_NOTE: f"vertical B-scans, by the header. {_LEFT_OUT}",
    UNLIKE_NOTE: f"B-scans side by side are no more alike than any two. {_LEFT_OUT}",
    PART_NOTE: f"one scan cut into several files of a series. Export it as one file. {_LEFT_OUT}",
    RADIAL_NOTE: f"B-scans that cross one centre, under a header of parallel ones. {_LEFT_OUT}",
    DOUBTFUL_NOTE: f"no layers of a retina were found where they should be. Look at them. {_LEFT_OUT}",
    OBJECT_NOTE: "something opaque and bright in front of the retina, for example an instrument. Look at them, and "
    f"leave them out by adding {OBJECT_NOTE} to data.exclude_notes.",
    "field_outside": f"wider or longer than the grid, which is laid over the centre. {_WINDOW}",
    ASSUMED_NOTE: "pictures without a spacing, which are assumed to be 2 mm deep and 6 mm wide. If they are not, state "
    "the spacing with --spacing DEPTH,COLUMN in mm and ingest again.",
    "depth_outside": f"tissue above or below the grid is cut. {_WINDOW}",
}


def note_warnings(notes: Mapping[str, int]) -> list[tuple[int, str, str]]:
    """(volumes, "volume", message) for notes that need the user's attention; `notes` counts volumes by note code."""
    return [(notes.get(note, 0), "volume", f"with note {note}: {message}") for note, message in _WARNINGS.items()]
