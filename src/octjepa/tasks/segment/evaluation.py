"""Metrics of a head scan by scan, and over people with intervals.

dice: voxels of the scan's own grid, weighted by the volume that each stands for, all scans of a class together; what is
beyond the stored volume is left out. hd95_mm: 95th percentile of the distance between the surfaces (MONAI), in the
stored grid, mean over the scans if both are there. thickness_error_um: mean over A-scans of the absolute difference;
etdrs_error_um: of the nine sectors' means.

Means run over the classes that the truth of the test set holds, of a resample over those that its truth holds: the same
classes for every head, so that a difference compares like with like. What a head predicts of a class that no test scan
holds is in that class's own results.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, UInt8

from octjepa.evaluate.results import HeadRow
from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.findings import Findings
from octjepa.metrics.intervals import MIN_PEOPLE, Scale
from octjepa.tasks.labels.label_files import UNLABELLED
from octjepa.tasks.segment.dice import dice, voxel_counts
from octjepa.tasks.segment.labelled_volumes import NativeLabels, scores_to_scan
from octjepa.tasks.thickness import sector_means, slice_widths_mm, thickness_um

METRICS = ("dice", "hd95_mm", "thickness_error_um", "etdrs_error_um")


@dataclass(frozen=True, eq=False)
class ScanFigures:
    """A scan of K classes. `counts` (both, predicted, true) are in mm3, maps in um. Errors are NaN if they do not
    exist."""

    counts: Float[np.ndarray, "K 3"]
    errors: Float[np.ndarray, "K 3"]
    predicted_um: Float[np.ndarray, "K N C"]
    predicted_etdrs: Float[np.ndarray, "K 9"]
    true_etdrs: Float[np.ndarray, "K 9"]


def evaluate_scan(
    scores: Float[np.ndarray, "scores D H W"], stored: UInt8[np.ndarray, "D H W"], truth: NativeLabels
) -> ScanFigures:
    """`scores` (background first) and `stored` (the truth) in the stored geometry, `truth` in the scan's.

    A thickness has a value in A-scans that are wholly labelled, and where `truth` knows the layer.
    """
    geometry, classes = truth.native, len(scores) - 1
    spacing, slice_mm = geometry.spacing_mm, geometry.slice_mm
    native = scores_to_scan(scores, truth.native)
    stored_part = native != UNLABELLED
    ungraded = stored_part & (truth.codes == UNLABELLED)
    # A layer that was not graded is not 0 um thick.
    measured = ~ungraded.any(axis=1) | (False if truth.known_layers is None else truth.known_layers)
    maps = [
        np.where(measured, thickness_um(np.where(stored_part, of, np.uint8(UNLABELLED)), classes, spacing[1]), np.nan)
        for of in (native, truth.codes)
    ]
    both = stored_part & ~ungraded
    native, codes = (np.where(both, segmentation, np.uint8(UNLABELLED)) for segmentation in (native, truth.codes))
    sectors = [sector_means(thickness, slice_mm, geometry.column_mm, truth.scan)[0] for thickness in maps]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # means of nothing are NaN, as they are meant to be
        errors = [np.nanmean(np.abs(a - b).reshape(classes, -1), axis=1) for a, b in (maps, sectors)]
    predicted = scores.argmax(axis=0).astype(np.uint8)
    distances = hd95_mm(predicted, stored, classes, truth.native.preprocessing.target_spacing_mm)
    width = slice_widths_mm(slice_mm, spacing[0])
    of_bscans = [voxel_counts(*pair, classes) for pair in zip(native[:, None], codes[:, None], strict=True)]
    counts = np.tensordot(width, of_bscans, 1) * (spacing[1] * spacing[2])
    return ScanFigures(counts, np.stack([distances, *errors], axis=1), maps[0], sectors[0], sectors[1])


def hd95_mm(
    predicted: UInt8[np.ndarray, "D H W"],
    true: UInt8[np.ndarray, "D H W"],
    classes: int,
    spacing_mm: tuple[float, float, float],
) -> Float[np.ndarray, " K"]:
    """95th percentile of the surface distance. NaN if the class is missing in the prediction, the truth, or both."""
    predicted = np.where(true == UNLABELLED, np.uint8(0), predicted)
    result = np.full(classes, np.nan)
    for code in range(1, classes + 1):
        marks = predicted == code, true == code
        if marks[0].any() and marks[1].any():
            distances = [_surface_distances(*pair, spacing_mm) for pair in (marks, marks[::-1])]
            result[code - 1] = max(np.percentile(of_voxels, 95) for of_voxels in distances)
    return result


def _surface_distances(
    segmentation: Bool[np.ndarray, "D H W"], other: Bool[np.ndarray, "D H W"], spacing_mm: tuple[float, float, float]
) -> Float[np.ndarray, " surface"]:
    """The distance in mm from each surface voxel of `segmentation` to the nearest surface voxel of `other`."""
    from scipy.ndimage import binary_erosion, distance_transform_edt

    surface, target = (of ^ binary_erosion(of) for of in (segmentation, other))
    return np.asarray(distance_transform_edt(~target, sampling=spacing_mm)[surface])


class HeadEstimates:
    """Metrics of heads on one test set, all on the same draws of people, so that differences are paired."""

    def __init__(
        self, people: Sequence[str], classes: Sequence[str], labels: Sequence[np.ndarray], draws: Draws
    ) -> None:
        self.people, self.classes, self.draws = list(people), tuple(classes), draws
        digest = hashlib.sha256()
        for segmentation in labels:
            digest.update(np.ascontiguousarray(segmentation).data)
        self.label_hash = digest.hexdigest()
        self.estimates: dict[tuple[str, str, str], Estimate] = {}

    def add(self, name: str, scans: Sequence[ScanFigures]) -> None:
        """All metrics of a head, by class, and over the classes that the truth holds ("mean").

        The people of an estimate are those whose truth holds the class, or any.
        """
        counts, errors = np.stack([scan.counts for scan in scans]), np.stack([scan.errors for scan in scans])
        true = counts[:, :, 2]
        present = np.flatnonzero(true.any(axis=0))
        for number, metric in enumerate(METRICS):
            for index, label in enumerate([*self.classes, "mean"]):
                which = present if label == "mean" else np.array([index])

                def statistic(weights: np.ndarray, number: int = number, which: np.ndarray = which) -> np.ndarray:
                    if number == 0:
                        figures = dice(counts[:, which], weights)
                    else:
                        figures = _weighted_mean(errors[:, which, number - 1], weights)
                    drawn = true[:, which].T @ weights > 0
                    return _mean_over_classes(figures, drawn) if np.isin(which, present).all() else figures[0]

                scale: Scale = "share" if metric == "dice" else "error"
                estimate = self.draws.estimate(statistic, self.people, self.label_hash, scale=scale)
                people = people_with(self.people, true[:, which])
                self.estimates[name, metric, label] = replace(estimate, n_people=people)

    def results(self) -> list[HeadRow]:
        """A row for each head, metric and class; values None if they do not exist."""
        return [
            HeadRow(
                name=name,
                target=label,
                metric=metric,
                **vars(estimate.measured()),
                undefined=estimate.interval().undefined,
            )
            for (name, metric, label), estimate in self.estimates.items()
        ]


def _weighted_mean(
    values: Float[np.ndarray, "volumes K"], weights: Float[np.ndarray, "volumes resamples"]
) -> Float[np.ndarray, "K resamples"]:
    """Over the volumes that have a value; NaN if none has."""
    is_finite = np.isfinite(values)
    top, bottom = np.where(is_finite, values, 0).T @ weights, is_finite.T.astype(float) @ weights
    return np.divide(top, bottom, out=np.full(bottom.shape, np.nan), where=bottom > 0)


def _mean_over_classes(
    parts: Float[np.ndarray, "K resamples"], drawn: Bool[np.ndarray, "K resamples"]
) -> Float[np.ndarray, " resamples"]:
    """Over the classes that a resample's truth holds; NaN if it holds none, or one of them has no value."""
    total = np.where(drawn, parts, 0).sum(axis=0)
    return np.divide(total, drawn.sum(axis=0), out=np.full(parts.shape[1], np.nan), where=drawn.any(axis=0))


def people_with(people: Sequence[str], true: Float[np.ndarray, "volumes K"]) -> int:
    """How many have a scan whose truth holds any of the classes."""
    return len({person for person, has in zip(people, true.sum(axis=1), strict=True) if has})


def report_classes(
    name: str, scans: Sequence[ScanFigures], classes: Sequence[str], people: Sequence[str], findings: Findings
) -> None:
    """Reports classes that the test scans hold and the head never predicts, that few people have, that none holds."""
    counts = np.stack([scan.counts for scan in scans])
    present, everybody = counts[:, :, 2].sum(axis=0) > 0, len(set(people))
    for index, label in enumerate(classes):
        predicted_mm3, few = float(counts[:, index, 1].sum()), people_with(people, counts[:, [index], 2])
        if not present[index]:
            findings.add_note(
                f"{label}: no test scan holds it, so the means leave it out; {name} predicts {predicted_mm3:.3g} mm3 "
                "of it"
            )
            continue
        if not predicted_mm3:
            findings.add_fault(
                "class_never_said", f"{name} predicts {label} for no voxel of the test scans, which hold it"
            )
        if few < MIN_PEOPLE <= everybody:
            text = (
                f"{label}: {few} of {everybody} test people have it, fewer than the {MIN_PEOPLE} that an interval "
                "needs: its results have none"
            )
            if present.sum() == 1:
                findings.add_note(text)
            else:
                findings.add_fault(
                    "rare_class", f"{text}, and that of the means hangs on whether these people are drawn"
                )
