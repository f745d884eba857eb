"""The place prior: how common each class is at each place of the stored volume. What needs no picture at all.

Columns are coarse, a few together; slices and rows are whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8


@dataclass(frozen=True, eq=False)
class Prior:
    """Shares of the classes [classes, D, H, columns] at each place of the stored volume, over the training volumes."""

    shares: Float[np.ndarray, "classes D H C"]
    columns: int

    @classmethod
    def of(cls, labels: Iterable[UInt8[np.ndarray, "D H W"]], classes: int, columns: int) -> Prior:
        """`classes` counts the background. A place that was never seen is background."""
        votes: np.ndarray | None = None
        for one in labels:
            coarse = coarsened(one, columns)
            here = np.stack([(coarse == code) for code in range(classes)]).astype(np.float32)
            votes = here if votes is None else votes + here
        assert votes is not None
        total = votes.sum(axis=0)
        votes[0] += total == 0
        return cls(votes / np.maximum(total, 1), columns)

    def scores(self, shape: Sequence[int]) -> Float[np.ndarray, "classes D H W"]:
        """For a volume of `shape`, rows as stored; beyond the stored size its edge goes on."""
        _, depth, _, columns = self.shares.shape
        slices = np.clip(np.arange(shape[0]) - (shape[0] - depth) // 2, 0, depth - 1)
        wide = shape[2] // self.columns
        across = np.clip(np.arange(wide) - (wide - columns) // 2, 0, columns - 1)
        return refined(self.shares[:, slices][..., across], self.columns, shape[2])


def coarsened(labels: UInt8[np.ndarray, "D H W"], columns: int) -> UInt8[np.ndarray, "D H C"]:
    """Every `columns`-th column, in the middle; columns that fill no whole place are left out on the right."""
    return labels[..., : labels.shape[2] // columns * columns][..., columns // 2 :: columns]


def refined(scores: Float[np.ndarray, "classes D H C"], columns: int, width: int) -> Float[np.ndarray, "classes D H W"]:
    """Coarse columns back to `width` by linear interpolation; the outermost go on."""
    place = (np.arange(width) - columns // 2) / columns
    last = scores.shape[-1] - 1
    left = np.clip(np.floor(place).astype(np.int64), 0, last)
    right = np.minimum(left + 1, last)
    share = np.clip(place - left, 0, 1).astype(np.float32)
    return scores[..., left] * (1 - share) + scores[..., right] * share
