"""B-scans to look at: of the test scans of median and of lowest Dice, the picture, what is true and what the head says.

Chosen by rule, not by looks: of each scan the B-scan that holds most labelled voxels, the nearest to its middle among
equals. One small file, so that `octjepa report` needs neither labels nor encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.files import write_atomic
from octjepa.store import CanonicalVolume
from octjepa.tasks.segment.counts import mean_of_classes
from octjepa.tasks.segment.evaluation import Judged
from octjepa.tasks.segment.label_files import UNSEEN
from octjepa.tasks.segment.labelled_volumes import LabelledVolumes

BSCANS = "bscans.npz"
PARTS = ("pixels", "true", "said")


def typical_and_worst(figures: Sequence[float | None]) -> dict[str, int]:
    """Places of the median figure (the higher of two) and the lowest; of one figure alone its own; None is left out."""
    order = [place for _, place in sorted((figure, n) for n, figure in enumerate(figures) if figure is not None)]
    if len(order) < 2:
        return {"only": order[0]} if order else {}
    return {"typical": order[len(order) // 2], "worst": order[0]}


def fullest(stored: UInt8[np.ndarray, "D H W"]) -> int:
    """The B-scan with most voxels of any class, the nearest to the middle among equals."""
    held = ((stored != 0) & (stored != UNSEEN)).sum(axis=(1, 2))
    off = np.abs(np.arange(len(held)) - (len(held) - 1) / 2)
    return int(np.lexsort((off, -held))[0])


def write_bscans(
    path: Path,
    say: Callable[[CanonicalVolume], Float[np.ndarray, "classes D H W"]],
    cohort: LabelledVolumes,
    judged: Sequence[Judged],
) -> list[dict[str, Any]]:
    """Writes `WHICH_PART` arrays [H, W] of the stored geometry to `path`; returns what each shows, for results.json."""
    test, figures = cohort.of("test"), [mean_of_classes(one.counts) for one in judged]
    arrays: dict[str, np.ndarray] = {}
    shown = []
    for which, place in typical_and_worst(figures).items():
        row = test[place]
        volume, true = cohort.store.read(row["volume_id"]), cohort.stored[row["volume_id"]]
        at = fullest(true)
        said = say(volume)[:, at].argmax(axis=0).astype(np.uint8)
        planes = np.asarray(volume.pixels[at]), true[at], said
        arrays |= {f"{which}_{part}": plane for part, plane in zip(PARTS, planes, strict=True)}
        shown.append(
            {
                "which": which, "volume_id": row["volume_id"], "eye": row["eye"], "device": row["device"],
                "bscan": at + 1, "of": len(true), "dice": figures[place], "test_scans": len(test),
                "spacing_mm": list(cohort.store.preprocessing.target_spacing_mm[1:]),
            }
        )  # fmt: skip
    write_atomic(path, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))
    return shown
