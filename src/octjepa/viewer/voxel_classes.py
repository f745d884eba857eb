"""Classes at the voxels of a native scan, as overlays: what a segmentation head predicts, and what graders marked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from octjepa.volume import OCTVolume

if TYPE_CHECKING:
    from octjepa.tasks.segment.folder import SavedHead

# One colour a class, in turn; distinct also for the colour-blind (Okabe and Ito 2008).
COLOURS = ((86, 180, 233), (230, 159, 0), (0, 158, 115), (204, 121, 167), (240, 228, 66), (213, 94, 0), (0, 114, 178))
_OPACITY = 120
Classes = tuple[UInt8[np.ndarray, "N R C"], tuple[str, ...]]


class VoxelClasses:
    """Layers "segmentation" (of `head`) and "labels" (of the folder `labels`). May be used by several threads."""

    def __init__(self, head: Callable[[], SavedHead] | None, labels: str | Path | None) -> None:
        """Raises UsageError: `labels` is no folder, or nothing is in it."""
        from octjepa.tasks.segment.label_files import LabelFolder

        self._head, self._folder = head, None if labels is None else LabelFolder(labels)
        self._lock = threading.Lock()
        self._made = lru_cache(3)(self._make)

    @property
    def layers(self) -> list[str]:
        """The layers that can be drawn."""
        return [*(["segmentation"] if self._head else []), *(["labels"] if self._folder else [])]

    def classes(self, layer: str, entry: dict[str, Any], volume: OCTVolume) -> Classes:
        """(code of every voxel, names of 1, 2, ...). 0 is background, 255 not labelled.

        Raises KeyError: no such layer. UsageError: no label file of this scan, or one of another shape.
        """
        if layer not in self.layers:
            raise KeyError(layer)
        with self._lock:
            return self._made(layer, _Hashed(entry, volume))

    def _make(self, layer: str, of: _Hashed) -> Classes:
        if layer == "segmentation":
            assert self._head is not None
            from octjepa.tasks.segment.predict import segment_volume

            saved = self._head()
            return segment_volume(saved, of.volume)[0], saved.classes
        return self._labels(of.entry, of.volume)

    def _labels(self, entry: dict[str, Any], volume: OCTVolume) -> Classes:
        from octjepa.errors import UsageError
        from octjepa.tasks.segment.label_files import default_classes
        from octjepa.tasks.segment.labelled_volumes import frames_reversed

        assert self._folder is not None
        file = self._folder.file_for(entry)
        if file is None:
            raise UsageError("the folder of labels has no file for this scan")
        names = default_classes(self._folder.names(file))
        read = self._folder.read(file, names, volume.shape[0])
        read.check(volume.shape, volume.spacing_mm, file.name)
        codes = read.as_classes(names)
        return (codes[::-1] if frames_reversed(";".join(volume.notes)) else codes), names


class _Hashed:
    """An entry and its scan, equal where the volume id is: a key of a cache."""

    def __init__(self, entry: dict[str, Any], volume: OCTVolume) -> None:
        self.entry, self.volume = entry, volume

    def __hash__(self) -> int:
        return hash(self.entry["volume_id"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and bool(self.entry["volume_id"] == other.entry["volume_id"])


def head_reader(folder: Path, encoder: str | None) -> Callable[[], SavedHead]:
    """A function that reads the head of `folder`, of `encoder` where it was made on a frozen one, once."""
    from octjepa.tasks.segment.folder import load_head

    return lru_cache(1)(partial(load_head, folder, encoder))


def painted(codes: UInt8[np.ndarray, "R C"], classes: int) -> UInt8[np.ndarray, "R C 4"]:
    """A B-scan's classes in colours; background and unlabelled voxels are clear."""
    table = np.zeros((256, 4), np.uint8)
    for code in range(1, classes + 1):
        table[code] = (*COLOURS[(code - 1) % len(COLOURS)], _OPACITY)
    return table[codes]
