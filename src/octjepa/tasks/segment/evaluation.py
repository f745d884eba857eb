"""What a head's labels are worth, scan by scan, and over people with intervals.

dice: voxels of the scan's own grid, weighed by their volume, all scans of a class together; what lies beyond the stored
volume is left out. hd95_mm: 95th percentile of the distance between the surfaces (MONAI), in the stored grid, mean over
the scans where both are there. thickness_error_um: mean over A-scans of the absolute difference; etdrs_error_um: of the
nine sectors' means.

Means run over the classes that the truth of the test set holds, of a resample over those that its truth holds: the same
classes for every row, so that a difference compares like with like. What a head says of a class that no test scan holds
stands in that class's own rows.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, UInt8

from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.intervals import Scale
from octjepa.tasks.segment.counts import counted, dice
from octjepa.tasks.segment.decoder import monai
from octjepa.tasks.segment.label_files import UNSEEN
from octjepa.tasks.segment.labelled_volumes import NativeLabels
from octjepa.tasks.segment.places import scores_to_scan
from octjepa.tasks.segment.thickness import etdrs, thickness_um

METRICS = ("dice", "hd95_mm", "thickness_error_um", "etdrs_error_um")


@dataclass(frozen=True, eq=False)
class Judged:
    """One scan: K classes; `counts` (both, said, true) in mm3; errors NaN where they do not exist; maps in um."""

    counts: Float[np.ndarray, "K 3"]
    errors: Float[np.ndarray, "K 3"]
    said_um: Float[np.ndarray, "K N C"]
    said_etdrs: Float[np.ndarray, "K 9"]
    true_etdrs: Float[np.ndarray, "K 9"]


def judge(scores: Float[np.ndarray, "scores D H W"], stored: UInt8[np.ndarray, "D H W"], truth: NativeLabels) -> Judged:
    """`scores` (background first) and `stored` (the truth) in the stored geometry, `truth` in the scan's."""
    spacing, classes = truth.native.spacing_mm, len(scores) - 1
    native = scores_to_scan(scores, truth.native)
    said = scores.argmax(axis=0).astype(np.uint8)
    both = (native != UNSEEN) & (truth.codes != UNSEEN)
    native, codes = (np.where(both, one, np.uint8(UNSEEN)) for one in (native, truth.codes))
    maps = [thickness_um(one, classes, spacing[1]) for one in (native, codes)]
    sectors = [etdrs(one, (spacing[0], spacing[2]), truth.lie) for one in maps]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # means of nothing are NaN, as they are meant to be
        wrong = [np.nanmean(np.abs(a - b).reshape(classes, -1), axis=1) for a, b in (maps, sectors)]
    errors = np.stack([hd95_mm(said, stored, classes, truth.native.preprocessing.target_spacing_mm), *wrong], axis=1)
    counts = counted(native, codes, classes) * float(np.prod(spacing))
    return Judged(counts, errors, maps[0], sectors[0], sectors[1])


def hd95_mm(
    said: UInt8[np.ndarray, "D H W"],
    true: UInt8[np.ndarray, "D H W"],
    classes: int,
    spacing_mm: tuple[float, float, float],
) -> Float[np.ndarray, " K"]:
    """NaN where a class is on one side alone, or on neither."""
    import torch

    said = np.where(true == UNSEEN, np.uint8(0), said)
    codes = range(1, classes + 1)
    hot = [torch.from_numpy(np.stack([one == code for code in codes])[None]) for one in (said, true)]
    there = np.array([[bool((one == code).any()) for code in codes] for one in (said, true)]).all(axis=0)
    found = np.full(classes, np.nan)
    if there.any():
        kept = torch.from_numpy(np.flatnonzero(there))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*always_return_as_numpy", category=FutureWarning)  # MONAI's own
            distances = monai("metrics").compute_hausdorff_distance(
                hot[0][:, kept], hot[1][:, kept], include_background=True, percentile=95, spacing=list(spacing_mm)
            )
        found[there] = distances[0].numpy()
    return found


class Scores:
    """Rows of one test set: every row on the same draws of people, so that differences are paired."""

    def __init__(
        self, people: Sequence[str], classes: Sequence[str], labels: Sequence[np.ndarray], draws: Draws
    ) -> None:
        self.people, self.classes, self.draws = list(people), tuple(classes), draws
        digest = hashlib.sha256()
        for one in labels:
            digest.update(np.ascontiguousarray(one).data)
        self.label_hash = digest.hexdigest()
        self.estimates: dict[tuple[str, str, str], Estimate] = {}

    def add(self, name: str, judged: Sequence[Judged]) -> None:
        """All metrics of a row, by class, and over the classes that the truth holds ("mean").

        The people of an estimate are those whose truth holds the class, or any.
        """
        counts, errors = np.stack([one.counts for one in judged]), np.stack([one.errors for one in judged])
        true = counts[:, :, 2]
        held = np.flatnonzero(true.any(axis=0))
        for number, metric in enumerate(METRICS):
            for place, label in enumerate([*self.classes, "mean"]):
                which = held if label == "mean" else np.array([place])

                def statistic(weights: np.ndarray, number: int = number, which: np.ndarray = which) -> np.ndarray:
                    if number == 0:
                        figures = dice(counts[:, which], weights)
                    else:
                        figures = _weighed(errors[:, which, number - 1], weights)
                    drawn = true[:, which].T @ weights > 0
                    return _mean(figures, drawn) if np.isin(which, held).all() else figures[0]

                scale: Scale = "share" if metric == "dice" else "error"
                found = self.draws.estimate(statistic, self.people, self.label_hash, scale=scale)
                self.estimates[name, metric, label] = replace(found, n_people=people_with(self.people, true[:, which]))

    def rows(self) -> list[dict[str, Any]]:
        """{name, metric, class, value, low, high, n, n_people, undefined}; None where a figure does not exist."""
        return [
            {
                "name": name, "metric": metric, "class": label, **estimate.as_dict(),
                "undefined": estimate.interval().undefined,
            }
            for (name, metric, label), estimate in self.estimates.items()
        ]  # fmt: skip


def _weighed(
    values: Float[np.ndarray, "volumes K"], weights: Float[np.ndarray, "volumes resamples"]
) -> Float[np.ndarray, "K resamples"]:
    """Weighted mean over the volumes that have a value; NaN where none has."""
    known = np.isfinite(values)
    top, bottom = np.where(known, values, 0).T @ weights, known.T.astype(float) @ weights
    return np.divide(top, bottom, out=np.full(bottom.shape, np.nan), where=bottom > 0)


def _mean(
    parts: Float[np.ndarray, "K resamples"], drawn: Bool[np.ndarray, "K resamples"]
) -> Float[np.ndarray, " resamples"]:
    """Over the classes that a resample's truth holds; NaN where it holds none, or one of them has no figure."""
    total = np.where(drawn, parts, 0).sum(axis=0)
    return np.divide(total, drawn.sum(axis=0), out=np.full(parts.shape[1], np.nan), where=drawn.any(axis=0))


def people_with(people: Sequence[str], true: Float[np.ndarray, "volumes K"]) -> int:
    """How many have a scan whose truth holds any of the classes."""
    return len({person for person, has in zip(people, true.sum(axis=1), strict=True) if has})
