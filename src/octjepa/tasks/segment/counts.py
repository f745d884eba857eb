"""Dice from counts of voxels, so that whole people can be drawn again without looking at a voxel twice."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.tasks.segment.label_files import UNSEEN


def counted(
    said: UInt8[np.ndarray, "D H W"], true: UInt8[np.ndarray, "D H W"], classes: int
) -> Float[np.ndarray, "classes 3"]:
    """(both, said, true) voxels of each class 1, 2, ...; voxels that either does not know are left out."""
    known = (said != UNSEEN) & (true != UNSEEN)
    pairs = np.bincount(
        said[known].astype(np.int64) * (classes + 1) + true[known], minlength=(classes + 1) ** 2
    ).reshape(classes + 1, classes + 1)
    return np.stack([np.diag(pairs), pairs.sum(axis=1), pairs.sum(axis=0)], axis=1)[1:].astype(float)


def dice(
    counts: Float[np.ndarray, "volumes classes 3"], weights: Float[np.ndarray, "volumes resamples"] | None = None
) -> Float[np.ndarray, "classes resamples"]:
    """Dice of each class over all volumes together; NaN where nothing is there or said."""
    weights = np.ones((len(counts), 1)) if weights is None else weights
    both, said, true = (np.einsum("vk,vr->kr", counts[:, :, part], weights) for part in range(3))
    bottom = said + true
    return np.divide(2 * both, bottom, out=np.full(bottom.shape, np.nan), where=bottom > 0)


def mean_of_classes(counts: Float[np.ndarray, "classes 3"]) -> float | None:
    """Mean Dice of the classes that the truth holds; None where it holds none: nothing can be told apart."""
    held = counts[:, 2] > 0
    return float(dice(counts[None, held])[:, 0].mean()) if held.any() else None
