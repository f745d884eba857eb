"""The order of the B-scans and columns of a scan in its file, from the notes of the reader.

The reader orders B-scans in space, and columns from the patient's right to the left. Labels, segmentations and maps
belong to the file, so they are in its order. Every program that reads or writes such files uses this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Shaped

from octjepa.errors import UsageError
from octjepa.notes import Note

MIRRORED = "columns_mirrored"  # with the number of B-scans
# Of dropped copies it is the first that stays, so B-scans keep their numbers.
_MOVED = ("axes_transposed", "turned_upright", "depth_flipped", "axes_stored=", "circle_frames_dropped=")
_RENUMBERED = "localizers_dropped="  # most are the first frame


def are_renumbered(notes: Sequence[Note]) -> bool:
    """Whether B-scans have other numbers than their frames in the file, because the reader dropped a localizer."""
    return any(note.startswith(_RENUMBERED) for note in notes)


@dataclass(frozen=True)
class FileOrder:
    """Steps through the slices and columns of a volume that give the order of its file: -1 for a reversed axis."""

    slice_step: Literal[1, -1] = 1
    column_step: Literal[1, -1] = 1

    @classmethod
    def of(cls, notes: Sequence[Note], b_scans: int) -> FileOrder:
        """From the notes of a scan of so many B-scans.

        Localizers among the frames of the file do not count (`are_renumbered`).
        Raises UsageError: the reader moved voxels in another way, or mirrored only some of the B-scans.
        """
        moved = [str(note) for note in notes if note.startswith(_MOVED)]
        if "frames_unordered" in notes and "order_by_correlation" not in notes:
            moved.append("frames_unordered")
        mirrored = [note for note in notes if note.code == MIRRORED]
        moved += [str(note) for note in mirrored if note.detail != str(b_scans)]
        if moved:
            raise UsageError(
                f"ingest turned, sorted or dropped frames of this scan ({', '.join(moved)}), so labels, segmentations "
                "and maps cannot be placed on the B-scans of the file"
            )
        return cls(-1 if "frames_reversed" in notes else 1, -1 if mirrored else 1)

    def voxels(self, values: Shaped[np.ndarray, "... D H W"]) -> Shaped[np.ndarray, "... D H W"]:
        """Values of voxels from the order of the volume to that of the file, or back."""
        return values[..., :: self.slice_step, :, :: self.column_step]

    def ascans(self, values: Shaped[np.ndarray, "... D W"]) -> Shaped[np.ndarray, "... D W"]:
        """Values of A-scans from the order of the volume to that of the file, or back."""
        return values[..., :: self.slice_step, :: self.column_step]
