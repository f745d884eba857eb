"""B-scans for the report: of the test scans of median and of lowest Dice, the image, the truth and the prediction.

Chosen by rule, not by eye: of each scan the B-scan that holds most labelled voxels, the nearest to its middle among
equals. One small file, so that `octjepa report` needs neither labels nor encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.files import write_atomic
from octjepa.tasks.labels.label_files import UNLABELLED
from octjepa.tasks.segment.dice import mean_dice
from octjepa.tasks.segment.evaluation import ScanFigures
from octjepa.tasks.segment.labelled_volumes import LabelledVolumes
from octjepa.tasks.segment.result import ShownBScan
from octjepa.volume import CanonicalVolume

BSCANS = "bscans.npz"
PARTS = ("pixels", "true", "predicted")


def median_and_lowest(figures: Sequence[float | None]) -> dict[str, int]:
    """Indices of the median value (the higher of two) and of the lowest; None is left out. A single value is "only"."""
    order = [index for _, index in sorted((figure, n) for n, figure in enumerate(figures) if figure is not None)]
    if len(order) < 2:
        return {"only": order[0]} if order else {}
    return {"typical": order[len(order) // 2], "worst": order[0]}


def fullest_bscan(stored: UInt8[np.ndarray, "D H W"]) -> int:
    """The B-scan with most voxels of any class, the nearest to the middle among equals."""
    labelled = ((stored != 0) & (stored != UNLABELLED)).sum(axis=(1, 2))
    off = np.abs(np.arange(len(labelled)) - (len(labelled) - 1) / 2)
    return int(np.lexsort((off, -labelled))[0])


def write_bscans(
    path: Path,
    scores: Callable[[CanonicalVolume], Float[np.ndarray, "classes D H W"]],
    labelled: LabelledVolumes,
    scans: Sequence[ScanFigures],
) -> list[ShownBScan]:
    """Writes `WHICH_PART` arrays [H, W] of the stored geometry to `path`; returns what each shows, for results.json."""
    test, figures = labelled.in_split("test"), [mean_dice(scan.counts) for scan in scans]
    arrays: dict[str, np.ndarray] = {}
    shown = []
    for which, index in median_and_lowest(figures).items():
        entry, dice = test[index], figures[index]
        assert dice is not None  # `median_and_lowest` leaves out volumes without a value
        volume, true = labelled.store.read(entry.volume_id), labelled.stored[entry.volume_id]
        at = fullest_bscan(true)
        planes = np.asarray(volume.pixels[at]), true[at], scores(volume)[:, at].argmax(axis=0).astype(np.uint8)
        arrays |= {f"{which}_{part}": plane for part, plane in zip(PARTS, planes, strict=True)}
        shown.append(
            ShownBScan(
                which=which,
                volume_id=entry.volume_id,
                eye=entry.eye,
                device=entry.device,
                bscan=at + 1,
                of=len(true),
                dice=dice,
                test_scans=sum(figure is not None for figure in figures),
                spacing_mm=labelled.store.preprocessing.target_spacing_mm[1:],
            )
        )
    write_atomic(path, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))
    return shown
