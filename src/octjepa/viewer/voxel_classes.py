"""Overlays of classes at the voxels of a scan in its own geometry: predictions of a segmentation head, and label files.

Input: a `SavedHead` or a folder of label files. Output: a `ClassMap` per scan, with a caption that states who made the
classes: labels can come from a grader or from a program, and only their files tell which.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from octjepa.layers import CLASSES
from octjepa.read.file_order import FileOrder
from octjepa.record import Record
from octjepa.store.index import IndexEntry
from octjepa.tasks.labels.layer_names import CLASS_COLOURS as NAMED_COLOURS
from octjepa.tasks.segmenter.scan_picture import CLASS_COLOURS
from octjepa.volume import OCTVolume

if TYPE_CHECKING:
    from octjepa.tasks.segment.folder import SavedHead

_OPACITY = 120


@dataclass(frozen=True, eq=False)
class ClassMap:
    """The class of every voxel of a scan: 0 is background, k is `names[k - 1]`, 255 is not labelled.

    `caption` states in one or two sentences who made the classes.
    """

    codes: UInt8[np.ndarray, "N R C"]
    names: tuple[str, ...]
    caption: str
    own_colours: tuple[tuple[int, int, int], ...] = ()

    @property
    def colours(self) -> tuple[tuple[int, int, int], ...]:
        """Red, green and blue of every class."""
        return self.own_colours or tuple(
            NAMED_COLOURS[number % len(NAMED_COLOURS)] for number in range(len(self.names))
        )


def fluid_map(codes: UInt8[np.ndarray, "N R C"], is_adapted: bool = False) -> ClassMap:
    """The overlay of what the packaged or an adapted network found, in the colours of `octjepa segment`."""
    colours = [tuple(int(CLASS_COLOURS[name][at : at + 2], 16) for at in (1, 3, 5)) for name in CLASSES[1:]]
    present = [name.replace("_", " ") for code, name in enumerate(CLASSES) if code and (codes == code).any()]
    network = f"the {'adapted' if is_adapted else 'packaged'} network"
    caption = f"Found by {network}: {', '.join(present)}." if present else f"No fluid was found by {network}."
    return ClassMap(codes, CLASSES[1:], caption, tuple(colours))  # type: ignore[arg-type]


@dataclass(frozen=True)
class ClassColour(Record):
    """An entry of the legend: `colour` is red, green, blue in 0 to 255."""

    name: str
    colour: tuple[int, int, int]


@dataclass(frozen=True)
class Legend(Record):
    """The text under an overlay of classes on the page."""

    caption: str
    classes: list[ClassColour]


class VoxelClasses:
    """Layers "segmentation" (of `head`) and "labels" (of the folder `labels`). May be used by several threads."""

    def __init__(self, head: Callable[[], SavedHead] | None, labels: str | Path | None) -> None:
        """Raises UsageError: `labels` is not a folder, or nothing is in it."""
        from octjepa.tasks.labels.label_files import LabelFolder

        self._head, self._folder = head, None if labels is None else LabelFolder(labels)
        self._lock = threading.Lock()
        self._made = lru_cache(3)(self._make)

    @property
    def layers(self) -> list[str]:
        """The layers that can be drawn."""
        return [*(["segmentation"] if self._head else []), *(["labels"] if self._folder else [])]

    def classes(self, layer: str, entry: IndexEntry, volume: OCTVolume) -> ClassMap:
        """The classes of a scan. Raises KeyError: no such layer. UsageError: no label file of this scan, or one of
        another shape.
        """
        if layer not in self.layers:
            raise KeyError(layer)
        with self._lock:
            return self._made(layer, _Hashed(entry, volume))

    def _make(self, layer: str, of: _Hashed) -> ClassMap:
        if layer == "segmentation":
            assert self._head is not None
            from octjepa.tasks.segment.predict import segment_volume

            saved = self._head()
            codes = segment_volume(saved, of.volume)[0]
            return ClassMap(codes, saved.classes, "Predicted by the segmentation head.")
        return self._labels(of.entry, of.volume)

    def _labels(self, entry: IndexEntry, volume: OCTVolume) -> ClassMap:
        """The labels of the scan. Files of the scan that are not read for them are compared with them."""
        from octjepa.errors import OctjepaError, UsageError

        assert self._folder is not None
        first = self._folder.file_for(entry)
        if first is None:
            raise UsageError("the folder of labels has no file for this scan")
        codes, names, notes = self._read(first, volume)
        parts = self._folder.parts(first)
        sources = list(dict.fromkeys(self._folder.source(part) for part in parts))
        source = "; ".join(text or "source unknown" for text in sources) if any(sources) else ""
        others = []
        for file in self._folder.files_for(entry):
            if file in parts:
                continue
            try:
                same = _same(codes, names, *self._read(file, volume)[:2])
            except OctjepaError:
                same = False
            if not same:
                others.append(file.name)
            source = source or (self._folder.source(file) if same else "")
        return ClassMap(codes, names, _caption(source, others, notes))

    def _read(
        self, file: Path, volume: OCTVolume
    ) -> tuple[UInt8[np.ndarray, "N R C"], tuple[str, ...], tuple[str, ...]]:
        """(codes in the order of `volume`, names, notes). Raises UsageError: the file does not fit the scan."""
        from octjepa.tasks.labels.label_files import default_classes

        assert self._folder is not None
        names = default_classes(self._folder.names(file))
        self._folder.check_frames(file, volume.notes)
        # An entry of a store has no names of images.
        read = self._folder.read(file, names, volume.shape, None if volume.format == "images" else ())
        read.check(volume.shape, volume.spacing_mm, file.name)
        codes = read.as_classes(names)
        return FileOrder.of(volume.notes, volume.shape[0]).voxels(codes), names, read.notes


def _same(first: np.ndarray, first_names: Sequence[str], second: np.ndarray, second_names: Sequence[str]) -> bool:
    """Whether the first labels mark the same voxels as the second, of the classes of the second.

    A DICOM Segmentation cannot tell unlabelled from background.
    """
    if not set(second_names) <= set(first_names):
        return False
    shared, table = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    for code, name in enumerate(second_names, start=1):
        table[code] = shared[table[code]] = first_names.index(name) + 1
    return np.array_equal(shared[first], table[second])


def _caption(source: str, others: Sequence[str], notes: Sequence[str]) -> str:
    text = f"Labels, {source}." if source else "Labels, source unknown."
    if others:
        text += f" Other label files of this scan hold other labels and are not shown: {', '.join(others)}."
    return " ".join([text, *(f"{note}." for note in notes)])


class _Hashed:
    """An entry and its scan, equal where the volume id is: a key of a cache."""

    def __init__(self, entry: IndexEntry, volume: OCTVolume) -> None:
        self.entry, self.volume = entry, volume

    def __hash__(self) -> int:
        return hash(self.entry.volume_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.entry.volume_id == other.entry.volume_id


def head_reader(folder: Path, encoder: str | None) -> Callable[[], SavedHead]:
    """A function that reads the head of `folder`, of `encoder` if it was made on a frozen one, once."""
    from octjepa.tasks.segment.folder import load_head

    return lru_cache(1)(partial(load_head, folder, encoder))


def painted(codes: UInt8[np.ndarray, "R C"], colours: Sequence[tuple[int, int, int]]) -> UInt8[np.ndarray, "R C 4"]:
    """A B-scan's classes in colours; background and unlabelled voxels are clear."""
    table = np.zeros((256, 4), np.uint8)
    for code, colour in enumerate(colours, start=1):
        table[code] = (*colour, _OPACITY)
    return table[codes]
