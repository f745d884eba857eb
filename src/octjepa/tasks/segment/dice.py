"""Dice from counts of voxels, so that whole people can be resampled without reading a voxel twice."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.tasks.labels.label_files import UNLABELLED


def voxel_counts(
    predicted: UInt8[np.ndarray, "D H W"], true: UInt8[np.ndarray, "D H W"], classes: int
) -> Float[np.ndarray, "classes 3"]:
    """(both, predicted, true) voxels of each class 1, 2, ...; voxels that are unlabelled in either are left out."""
    is_labelled = (predicted != UNLABELLED) & (true != UNLABELLED)
    pairs = np.bincount(
        predicted[is_labelled].astype(np.int64) * (classes + 1) + true[is_labelled], minlength=(classes + 1) ** 2
    ).reshape(classes + 1, classes + 1)
    return np.stack([np.diag(pairs), pairs.sum(axis=1), pairs.sum(axis=0)], axis=1)[1:].astype(float)


def dice(
    counts: Float[np.ndarray, "volumes classes 3"], weights: Float[np.ndarray, "volumes resamples"] | None = None
) -> Float[np.ndarray, "classes resamples"]:
    """Dice of each class over all volumes together; NaN where a class is neither there nor predicted."""
    weights = np.ones((len(counts), 1)) if weights is None else weights
    both, predicted, true = (np.einsum("vk,vr->kr", counts[:, :, part], weights) for part in range(3))
    total = predicted + true
    return np.divide(2 * both, total, out=np.full(total.shape, np.nan), where=total > 0)


def mean_dice(counts: Float[np.ndarray, "classes 3"]) -> float | None:
    """Mean Dice of the classes that the truth holds; None if it holds none."""
    present = counts[:, 2] > 0
    return float(dice(counts[None, present])[:, 0].mean()) if present.any() else None
