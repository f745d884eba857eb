"""Labelled volumes of a store by split, and the mapping of labels and scores between a scan's file and the store."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, UInt8

from octjepa.canonical.native_mapping import NativeMap
from octjepa.embed.table import SPLITS
from octjepa.errors import UsageError
from octjepa.notes import read_notes
from octjepa.read.file_order import FileOrder
from octjepa.read.orientation import is_direction_known
from octjepa.recipe import Preprocessing, Recipe
from octjepa.store import Store
from octjepa.store.index import IndexEntry, entries_of
from octjepa.tasks.labels.label_files import UNLABELLED, LabelFolder, default_classes
from octjepa.tasks.segment.result import SplitCounts
from octjepa.tasks.segment.windows import LabelledVolume
from octjepa.tasks.thickness import ScanOrientation, lines_of, scan_centre, slice_positions_mm
from octjepa.volume import OCTVolume

log = logging.getLogger(__name__)
_NAMED = 5  # label files that a note names


@dataclass(frozen=True, eq=False)
class NativeLabels:
    """Labels of one scan, B-scans in spatial order. `centre_from` is "labels" or "scan".

    known_layers: the A-scans in which the labels hold all of a layer, though not the whole A-scan; None for nowhere.
    """

    codes: UInt8[np.ndarray, "N R C"]
    native: NativeMap
    scan: ScanOrientation
    centre_from: str
    vertical_from: str
    known_layers: Bool[np.ndarray, "K N C"] | None = None


class LabelledVolumes:
    """The volumes of `store` that have labels; `notes` names what was left out.

    Raises UsageError: no label meets a scan, a label file meets several, an unknown class, no people in train or test,
    a class that no training label holds, only one class (background) in all of them.
    """

    def __init__(self, store: Store, labels: Path, recipe: Recipe, classes: Sequence[str] = ()) -> None:
        self.store, self.folder = store, LabelFolder(labels, of_bscans=store.bscan_slices > 0)
        self.notes: list[str] = []
        everything = entries_of(store.table.sort_values("volume_id"))
        self._check_files(everything)
        patterns = ("line",) if store.bscan_slices else recipe.data.patterns  # single B-scans are read as lines
        volumes = [volume for volume in everything if volume.pattern in patterns]
        matched = [(volume, file) for volume in volumes if (file := self.folder.file_for(volume)) is not None]
        if not matched:
            raise UsageError(
                f"none of the {self.folder.label_count} label files of {labels} belongs to one of the {len(volumes)} "
                f"scans of {store.location}: name them by SOP instance UID, file name or volume id (docs/segment.md)"
            )
        self._note("label files without a scan", self.folder.unused({file for _, file in matched}))
        twice = sorted(file.name for file in self.folder.passed_over)
        reason = "another file of their scan holds the same classes"
        self._note(f"label files that are not read, because {reason} ({_listed(twice)})", len(twice))
        self._note("scans without labels", len(volumes) - len(matched))
        self.classes = self._choose_classes([name for _, file in matched for name in self.folder.names(file)], classes)
        self.volumes = self._usable([volume for volume, _ in matched])
        self.files = {volume.volume_id: self.folder.file_for(volume) for volume in self.volumes}
        self._check_people()
        self._empty: set[str] = set()  # names of label files without a mark
        self._assumed: dict[str, tuple[str, ...]] = {}  # by name of a label file, what was assumed when it was read
        self.stored = {volume.volume_id: self._to_stored(volume) for volume in self.volumes}
        self._note_empty_files()
        self._note_assumptions()
        self._check_classes()

    def _check_files(self, volumes: Sequence[IndexEntry]) -> None:
        """Scans of several people are often called alike, `oct.dcm`; labels of one are not labels of the others."""
        files = [file for volume in volumes if (file := self.folder.file_for(volume)) is not None]
        matched = Counter(part for file in files for part in self.folder.parts(file))
        shared = [(file, count) for file, count in matched.items() if count > 1]
        if shared:
            file, count = shared[0]
            raise UsageError(
                f"{len(shared)} label files belong to several scans, {file.name} to {count} of that file name: name "
                "label files by SOP instance UID or volume id (docs/segment.md)"
            )

    def in_split(self, split: str) -> list[IndexEntry]:
        """The index entries of a split's labelled volumes, by volume id."""
        return [volume for volume in self.volumes if volume.split == split]

    def counts(self) -> dict[str, SplitCounts]:
        """Of each split: labelled {volumes, people}, and of each class the volumes that hold it."""
        counts: dict[str, SplitCounts] = {}
        for split in SPLITS:
            volumes = self.in_split(split)
            codes = [set(np.unique(self.stored[volume.volume_id]).tolist()) for volume in volumes]
            holding = {
                name: sum(code in volume_codes for volume_codes in codes)
                for code, name in enumerate(self.classes, start=1)
            }
            people = len({volume.person_id for volume in volumes})
            counts[split] = SplitCounts(len(volumes), people, holding)
        return counts

    def test_set(self) -> str:
        """Hash of the test volumes and their labels, which identifies the test set in the ledger."""
        digest = hashlib.sha256("\x1f".join(self.classes).encode())
        for volume in self.in_split("test"):
            name = volume.volume_id
            digest.update(name.encode() + np.ascontiguousarray(self.stored[name]).data)
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Hash of the labels of train and val, which decide what a head learns."""
        digest = hashlib.sha256("\x1f".join(self.classes).encode())
        for volume in [*self.in_split("train"), *self.in_split("val")]:
            entry = f"{volume.volume_id} {volume.split} {volume.chunk_hash}"
            digest.update(entry.encode() + np.ascontiguousarray(self.stored[volume.volume_id]).data)
        return digest.hexdigest()

    def readers(self, split: str) -> list[Callable[[], LabelledVolume]]:
        """For each volume of a split, the function that reads it and its labels in the stored geometry."""
        return [partial(self._read, volume.volume_id) for volume in self.in_split(split)]

    def native(self, volume: IndexEntry, centre: str, first_bscan: Literal["inferior", "superior"]) -> NativeLabels:
        """Labels of a volume in the geometry of its scan. Raises UsageError: another shape or spacing."""
        file = self.files[volume.volume_id]
        assert file is not None
        native = self.store.native_map(volume.volume_id)
        # A store knows no names of images.
        read = self.folder.read(file, self.classes, native.shape, None if volume.format == "images" else ())
        read.check(native.shape, native.spacing_mm, str(file))
        if read.is_empty:
            self._empty.add(file.name)
        self._assumed[file.name] = read.notes
        codes, fovea = read.as_classes(self.classes), read.fovea_mm
        notes = read_notes(volume.notes)
        order = FileOrder.of(notes, native.shape[0])
        codes, known_layers = order.voxels(codes), order.ascans(read.known_layers(self.classes))
        slice_mm, column_mm = native.slice_mm, native.column_mm
        if fovea is not None:
            ends = float(slice_mm[-1]), float(column_mm[-1])
            steps = order.slice_step, order.column_step
            fovea = tuple(  # type: ignore[assignment]
                end - at if step < 0 else at for at, end, step in zip(fovea, ends, steps, strict=True)
            )
        if centre != "labels":
            fovea = None
        is_known = is_direction_known(volume.provenance_slice, notes)
        scan = ScanOrientation(
            volume.eye,
            fovea or scan_centre(slice_mm, column_mm),
            "inferior" if is_known else first_bscan,
            lines_of(volume.pattern, notes),
        )
        vertical = "positions" if is_known else f"assumed {first_bscan} first"
        return NativeLabels(codes, native, scan, "scan" if fovea is None else "labels", vertical, known_layers)

    def _read(self, volume_id: str) -> LabelledVolume:
        return self.store.read(volume_id), self.stored[volume_id]

    def _to_stored(self, volume: IndexEntry) -> UInt8[np.ndarray, "D H W"]:
        labels = self.native(volume, "scan", "inferior")
        return labels_to_stored(labels.codes, labels.native)

    def _note(self, what: str, count: int) -> None:
        if count:
            self.notes.append(f"{what}: {count}")
            log.warning("%s: %d", what, count)

    def _note_empty_files(self) -> None:
        """Names the label files without a mark: their voxels are learned as background."""
        names = sorted(self._empty)
        advice = "learned as background: remove those that nobody labelled"
        self._note(f"label files without any marked voxel ({_listed(names)}), {advice}", len(names))

    def _note_assumptions(self) -> None:
        """Names the label files that needed an assumption, such as the number of the first mask."""
        for note in dict.fromkeys(note for notes in self._assumed.values() for note in notes):
            names = sorted(name for name, notes in self._assumed.items() if note in notes)
            self._note(f"{note} ({_listed(names)}); label files read so", len(names))

    def _choose_classes(self, names: Sequence[str], classes: Sequence[str]) -> tuple[str, ...]:
        unknown = [name for name in classes if name not in names]
        if unknown:
            names_text = ", ".join(dict.fromkeys(names))
            raise UsageError(f"no label file names the class {', '.join(map(repr, unknown))}: named are {names_text}")
        return tuple(dict.fromkeys(classes)) or default_classes(names)

    def _usable(self, volumes: Sequence[IndexEntry]) -> list[IndexEntry]:
        usable = []
        for volume in volumes:
            try:
                FileOrder.of(read_notes(volume.notes), volume.shape[0])
                if (file := self.folder.file_for(volume)) is not None:
                    self.folder.check_frames(file, read_notes(volume.notes))
            except UsageError:
                continue
            usable.append(volume)
        left_out = len(volumes) - len(usable)
        self._note("labelled scans left out, because ingest turned, sorted or dropped their frames", left_out)
        return usable

    def _check_people(self) -> None:
        people = {split: {volume.person_id for volume in self.in_split(split)} for split in SPLITS}
        both = (people["train"] & people["val"]) | (people["test"] & (people["train"] | people["val"]))
        if both:
            raise UsageError(f"{len(both)} people are in two splits: split the store again (octjepa split)")
        empty = [split for split in ("train", "test") if not people[split]]
        if empty:
            counts = ", ".join(f"{split} {len(members)}" for split, members in people.items())
            raise UsageError(
                f"no labelled scan of a person of {' or '.join(empty)}: label some, or split the store (octjepa split) "
                f"so that labelled people are in train and test; now {counts}"
            )
        if not people["val"]:
            self.notes.append("no labelled person in val: nothing is chosen, the recipe's middle or last setting stays")

    def _check_classes(self) -> None:
        present = np.zeros(256, bool)
        for volume in self.in_split("train"):
            present[np.unique(self.stored[volume.volume_id])] = True
        if not present[: len(self.classes) + 1].sum() > 1:
            raise UsageError("the training labels hold fewer than two classes, background included: label more classes")
        if self.in_split("val") and not any(self.counts()["val"].holding.values()):
            self.notes.append("no class is in the labels of val: nothing is chosen, as without people in val")
        absent = [name for code, name in enumerate(self.classes, start=1) if not present[code]]
        if absent:
            raise UsageError(
                f"no voxel of {', '.join(absent)} in the labels of the {len(self.in_split('train'))} training scans: "
                "name the others with --classes"
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def labels_to_stored(codes: UInt8[np.ndarray, "N R C"], native: NativeMap) -> UInt8[np.ndarray, "D H W"]:
    """The nearest native voxel of each stored one, 255 outside the scan. B-scans of `codes` in spatial order."""
    slices, depth, columns = native.preprocessing.stored_size
    plane = np.stack(np.meshgrid(np.arange(depth), np.arange(columns), indexing="ij"), axis=-1).reshape(-1, 2)
    stored = np.full((slices, depth, columns), UNLABELLED, np.uint8)
    size = np.array(codes.shape)
    for index in range(slices):
        position = np.rint(native.to_native(np.insert(plane.astype(float), 0, index, axis=1))).astype(np.int64)
        inside = ((position >= 0) & (position < size)).all(axis=1)
        stored[index].reshape(-1)[inside] = codes[tuple(position[inside].T)]
    return stored


def scores_to_scan(scores: Float[np.ndarray, "classes D H W"], native: NativeMap) -> UInt8[np.ndarray, "N R C"]:
    """The class of highest score at every native voxel, 255 beyond the stored volume; B-scans in spatial order.

    Between stored slices, which are far apart, scores are interpolated; depth and columns are the nearest.
    """
    _, slices, depth, columns = scores.shape
    frames, *plane_shape = native.shape
    grid = np.stack(np.meshgrid(*map(np.arange, plane_shape), indexing="ij"), axis=-1).reshape(-1, 2)
    codes = np.full(native.shape, UNLABELLED, np.uint8)
    for frame in range(frames):
        position = native.to_canonical(np.insert(grid.astype(float), 0, frame, axis=1))
        at = float(position[0, 0])  # the same for a whole B-scan
        if not -0.5 <= at <= slices - 0.5:
            continue
        low = int(np.clip(np.floor(at), 0, max(slices - 2, 0)))
        share = np.float32(np.clip(at - low, 0, 1))
        plane = ((1 - share) * scores[:, low] + share * scores[:, min(low + 1, slices - 1)]).argmax(axis=0)
        near = np.rint(position[:, 1:]).astype(np.int64)
        inside = ((near >= 0) & (near < (depth, columns))).all(axis=1)
        codes[frame].reshape(-1)[inside] = plane[near[inside, 0], near[inside, 1]]
    return codes


def whole_scan_preprocessing(preprocessing: Preprocessing, volume: OCTVolume) -> Preprocessing:
    """The contract with an image that holds the centre of every slice and column of `volume`; the depth stays."""
    tz, _, tx = preprocessing.target_spacing_mm
    stored, (slices, depth, columns) = preprocessing.stored_size, preprocessing.image_size
    between_mm = float(np.ptp(slice_positions_mm(volume))), (volume.shape[2] - 1) * volume.spacing_mm[2]
    needed = between_mm[0] / tz, between_mm[1] / tx
    more = [2 * max(0, math.ceil((size - held) / 2 - 1e-9)) for size, held in zip(needed, stored[::2], strict=True)]
    return preprocessing.model_copy(update={"image_size": (slices + more[0], depth, columns + more[1])})
