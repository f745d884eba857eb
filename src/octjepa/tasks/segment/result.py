"""Typed results of a segmentation: what `results.json` holds, and what the report reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from octjepa.evaluate.results import HeadPaired, HeadRow
from octjepa.metrics.bootstrap import MeasuredValue
from octjepa.metrics.findings import Fault, TestSetUse
from octjepa.record import Record


@dataclass(frozen=True)
class ChosenHead(Record):
    """The selection of validation for a head: the penalty of a linear one, or the update of a decoder; the Dice
    there.
    """

    head: str
    val_dice: float | None
    penalty: float | None = None
    update: int | None = None
    KEYS: ClassVar[tuple[str, ...]] = ("head", "penalty", "update", "val_dice")
    OMITTED: ClassVar[tuple[str, ...]] = ("penalty", "update")


@dataclass(frozen=True)
class SplitCounts(Record):
    """Labelled volumes and people of a split; holding: by class, the volumes that hold it."""

    volumes: int
    people: int
    holding: Mapping[str, int]


@dataclass(frozen=True)
class ShownBScan(Record):
    """A B-scan in bscans.npz. which: typical, worst or only; bscan: its number from 1, `of` how many.

    dice: of its volume, among `test_scans` volumes. spacing_mm: depth, column.
    """

    which: str
    volume_id: str
    eye: str
    device: str
    bscan: int
    of: int
    dice: float
    test_scans: int
    spacing_mm: tuple[float, float]


@dataclass(frozen=True)
class SegmentationResult(Record):
    """Test results of a segmentation head next to the references.

    metrics: of the head, by metric and class. labelled: by split. chosen: by head. store: relative to the folder,
    unless it is in a bucket. etdrs, figure: files.
    """

    metrics: Mapping[str, MeasuredValue]
    checkpoint: str
    classes: tuple[str, ...]
    encoder: str
    labelled: Mapping[str, SplitCounts]
    store: str
    chosen: Mapping[str, ChosenHead]
    paired: tuple[HeadPaired, ...]
    rows: tuple[HeadRow, ...]
    etdrs: str
    figure: str
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    uses: tuple[TestSetUse, ...] = ()
    bscans: tuple[ShownBScan, ...] = ()
