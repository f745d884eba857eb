"""Score a segmentation against graders: um per boundary and Dice of fluid, in graded columns only.

In: a `Segmentation` and the graders' layers and fluid in the scan's own voxels. Out: an `EyeScore`, and a `PooledScore`
of several eyes. Scores on real eyes are reported; they never choose weights, thresholds or temperatures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from octjepa.errors import OctjepaError
from octjepa.tasks.segmenter.inference import Segmentation
from octjepa.tasks.segmenter.validation import average_precision, dice_at


@dataclass(frozen=True, eq=False)
class EyeScore:
    """One eye: mean absolute error and mean signed error (prediction minus grader) in um, `[8]`; fluid as marked.

    `probability`, `marked` and `truth` are the voxels of graded columns.
    """

    absolute_um: Float[np.ndarray, " 8"]
    signed_um: Float[np.ndarray, " 8"]
    columns: int
    probability: Float[np.ndarray, " V"]
    marked: Bool[np.ndarray, " V"]
    truth: Bool[np.ndarray, " V"]

    @property
    def dice(self) -> float:
        """Dice of the marked fluid."""
        return dice_at(self.marked.astype(np.float32), self.truth, 0.5)


@dataclass(frozen=True)
class PooledScore:
    """Several eyes: boundary errors averaged over eyes; Dice and average precision pooled over their voxels."""

    absolute_um: tuple[float, ...]
    signed_um: tuple[float, ...]
    mean_um: float
    median_um: float
    dice: float
    average_precision: float
    volume_ratio: float  # marked over graded fluid


def score_eye(
    segmentation: Segmentation, layers_px: Float[np.ndarray, "D 8 W"], fluid: Bool[np.ndarray, "D H W"]
) -> EyeScore:
    """Scores one eye. `layers_px` holds NaN in columns without grades. Raises OctjepaError: shapes that do not fit."""
    slices, rows, columns = segmentation.classes.shape
    if layers_px.shape != (slices, 8, columns) or fluid.shape != (slices, rows, columns):
        raise OctjepaError(
            f"layers {layers_px.shape} and fluid {fluid.shape} do not fit a scan of {slices} x {rows} x {columns}: "
            f"expected {(slices, 8, columns)} and {(slices, rows, columns)}"
        )
    error = (segmentation.boundaries_px.transpose(1, 0, 2) - layers_px) * 1000 * segmentation.spacing_mm[1]
    graded = np.isfinite(layers_px[:, 0])
    if not graded.any():
        raise OctjepaError("no column is graded: every layer is NaN")
    voxels = np.broadcast_to(graded[:, None], fluid.shape)
    marked = (segmentation.classes == 1) | (segmentation.classes == 2)
    return EyeScore(
        absolute_um=np.nanmean(np.abs(error), axis=(0, 2)),
        signed_um=np.nanmean(error, axis=(0, 2)),
        columns=int(graded.sum()),
        probability=segmentation.fluid[voxels].astype(np.float32),
        marked=marked[voxels],
        truth=fluid[voxels],
    )


def pooled_score(eyes: list[EyeScore]) -> PooledScore:
    """The score of several eyes together; every eye counts the same in the boundary errors."""
    absolute = np.stack([eye.absolute_um for eye in eyes])
    truth = np.concatenate([eye.truth for eye in eyes])
    marked = np.concatenate([eye.marked for eye in eyes])
    return PooledScore(
        absolute_um=tuple(float(v) for v in absolute.mean(0).round(2)),
        signed_um=tuple(float(v) for v in np.mean([eye.signed_um for eye in eyes], axis=0).round(2)),
        mean_um=round(float(absolute.mean()), 3),
        median_um=round(float(np.median(absolute)), 3),
        dice=round(dice_at(marked.astype(np.float32), truth, 0.5), 4),
        average_precision=round(average_precision(np.concatenate([eye.probability for eye in eyes]), truth), 4),
        volume_ratio=round(float(marked.sum() / max(truth.sum(), 1)), 3),
    )
