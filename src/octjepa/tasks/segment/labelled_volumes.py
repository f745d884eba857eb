"""The labelled volumes of a store: which label file is whose, by split, and each volume with its labels."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from octjepa.embed.table import SPLITS
from octjepa.errors import UsageError
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.store.native_mapping import NativeMap
from octjepa.tasks.segment.label_files import LabelFolder, default_classes
from octjepa.tasks.segment.linear import Labelled
from octjepa.tasks.segment.places import labels_to_stored, reversed_frames
from octjepa.tasks.segment.thickness import Lie, scan_centre

log = logging.getLogger(__name__)
_BY_POSITION = ("positions", "frame_location")  # sources of the slice spacing that tell which B-scan is the lowest


@dataclass(frozen=True, eq=False)
class NativeLabels:
    """Of one scan, B-scans in spatial order. `centre_from` is "labels" or "scan"; spacing (slice, depth, column)."""

    codes: UInt8[np.ndarray, "N R C"]
    native: NativeMap
    lie: Lie
    centre_from: str
    vertical_from: str


class LabelledVolumes:
    """The volumes of `store` that have labels, one row each; `notes` says what was left out.

    Raises UsageError: no label meets a scan, an unknown class, nobody in train or test, a class that no training label
    holds, only one class (background) in all of them.
    """

    def __init__(self, store: Store, labels: Path, recipe: Recipe, classes: Sequence[str] = ()) -> None:
        self.store, self.folder = store, LabelFolder(labels)
        self.notes: list[str] = []
        table = store.table[store.table["pattern"].isin(recipe.data.patterns)].sort_values("volume_id")
        rows = [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]
        found = [(row, file) for row in rows if (file := self.folder.of(row)) is not None]
        if not found:
            raise UsageError(
                f"none of the {len(self.folder.files)} label files of {labels} belongs to one of the {len(rows)} scans "
                f"of {store.location}: name them by SOP instance UID, file name or volume id (docs/segment.md)"
            )
        self._tell("label files without a scan", len(self.folder.files) - len({file for _, file in found}))
        self._tell("scans without labels", len(rows) - len(found))
        self.classes = self._classes([name for _, file in found for name in self.folder.names(file)], classes)
        self.rows = self._usable(found)
        self.files = {row["volume_id"]: self.folder.of(row) for row in self.rows}
        self._check_people()
        self.stored = {row["volume_id"]: self._to_stored(row) for row in self.rows}
        self._check_classes()

    def of(self, split: str) -> list[dict[str, Any]]:
        """The index rows of a split, by volume id."""
        return [row for row in self.rows if row["split"] == split]

    def counts(self) -> dict[str, Any]:
        """Of each split: labelled {volumes, people}, and of each class the volumes that hold it."""
        found: dict[str, Any] = {}
        for split in SPLITS:
            rows = self.of(split)
            held = [set(np.unique(self.stored[row["volume_id"]]).tolist()) for row in rows]
            holding = {name: sum(code in one for one in held) for code, name in enumerate(self.classes, start=1)}
            found[split] = {"volumes": len(rows), "people": len({row["person_id"] for row in rows}), "holding": holding}
        return found

    def test_set(self) -> str:
        """What the ledger knows the test volumes and their labels by."""
        digest = hashlib.sha256("\x1f".join(self.classes).encode())
        for row in self.of("test"):
            digest.update(str(row["volume_id"]).encode() + np.ascontiguousarray(self.stored[row["volume_id"]]).data)
        return digest.hexdigest()

    def readers(self, split: str) -> list[Callable[[], Labelled]]:
        """For each volume of a split, what reads it and its labels in the stored geometry."""
        return [partial(self._read, row["volume_id"]) for row in self.of(split)]

    def native(self, row: dict[str, Any], centre: str, first_bscan: Literal["inferior", "superior"]) -> NativeLabels:
        """Labels of a row in the geometry of its scan. Raises UsageError: another shape or spacing."""
        file = self.files[row["volume_id"]]
        assert file is not None
        native = NativeMap.from_store(self.store, row["volume_id"])
        made = self.folder.read(file, self.classes, native.shape[0])
        made.check(native.shape, native.spacing_mm, str(file))
        turned = reversed_frames(str(row["notes"]))
        codes, fovea = made.as_classes(self.classes), made.fovea_mm
        if turned:
            codes = codes[::-1]
            fovea = None if fovea is None else ((native.shape[0] - 1) * native.spacing_mm[0] - fovea[0], fovea[1])
        told = fovea is not None and centre == "labels"
        known = str(row["provenance_slice"]) in _BY_POSITION
        where = fovea if told and fovea is not None else scan_centre(native.shape, native.spacing_mm)
        lie = Lie(str(row["eye"]), where, "inferior" if known else first_bscan)
        return NativeLabels(
            codes, native, lie, "labels" if told else "scan", "positions" if known else f"assumed {first_bscan} first"
        )

    def _read(self, volume_id: str) -> Labelled:
        return self.store.read(volume_id), self.stored[volume_id]

    def _to_stored(self, row: dict[str, Any]) -> UInt8[np.ndarray, "D H W"]:
        one = self.native(row, "scan", "inferior")
        return labels_to_stored(one.codes, one.native)

    def _tell(self, what: str, count: int) -> None:
        if count:
            self.notes.append(f"{what}: {count}")
            log.warning("%s: %d", what, count)

    def _classes(self, names: Sequence[str], asked: Sequence[str]) -> tuple[str, ...]:
        unknown = [name for name in asked if name not in names]
        if unknown:
            known = ", ".join(dict.fromkeys(names))
            raise UsageError(f"no label file names the class {', '.join(map(repr, unknown))}: named are {known}")
        return tuple(dict.fromkeys(asked)) or default_classes(names)

    def _usable(self, found: Sequence[tuple[dict[str, Any], Path]]) -> list[dict[str, Any]]:
        kept, moved = [], 0
        for row, _ in found:
            try:
                reversed_frames(str(row["notes"]))
            except UsageError:
                moved += 1
            else:
                kept.append(row)
        self._tell("labelled scans left out, because ingest turned or sorted their voxels", moved)
        return kept

    def _check_people(self) -> None:
        people = {split: {row["person_id"] for row in self.of(split)} for split in SPLITS}
        both = (people["train"] & people["val"]) | (people["test"] & (people["train"] | people["val"]))
        if both:
            raise UsageError(f"{len(both)} people are in two splits: split the store anew (octjepa split)")
        empty = [split for split in ("train", "test") if not people[split]]
        if empty:
            counts = ", ".join(f"{split} {len(found)}" for split, found in people.items())
            raise UsageError(
                f"no labelled scan of a person of {' or '.join(empty)}: label some, or split the store (octjepa split) "
                f"so that labelled people are in train and test; now {counts}"
            )
        if not people["val"]:
            self.notes.append("nobody with labels in val: nothing is chosen, the recipe's middle or last setting stays")

    def _check_classes(self) -> None:
        held = np.zeros(256, bool)
        for row in self.of("train"):
            held[np.unique(self.stored[row["volume_id"]])] = True
        if not held[: len(self.classes) + 1].sum() > 1:
            raise UsageError("the training labels hold one class only: nothing can be told apart")
        if self.of("val") and not any(self.counts()["val"]["holding"].values()):
            self.notes.append("no class is in the labels of val: nothing is chosen, as with nobody in val")
        absent = [name for code, name in enumerate(self.classes, start=1) if not held[code]]
        if absent:
            raise UsageError(
                f"no voxel of {', '.join(absent)} in the labels of the {len(self.of('train'))} training scans: name "
                "the others with --classes"
            )
