"""Baselines without learning that a predictor must beat, on the same targets of the same people.

`constant` predicts the mean target everywhere, `position_mean` the mean target at that grid position, both computed on
training people. `copy_nearest` predicts the target feature of the nearest visible token of the same volume; since
neighbouring B-scans are nearly copies, a mask that this solves teaches nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from octjepa.objective.base import gather_tokens


class PositionMeans:
    """Mean of targets, overall and at each of `grid_tokens` positions; the overall mean where none was added."""

    def __init__(self, grid_tokens: int, width: int) -> None:
        self.sums = torch.zeros(grid_tokens, width, dtype=torch.float64)
        self.counts = torch.zeros(grid_tokens, dtype=torch.float64)

    def add(self, targets: Float[Tensor, "b t w"], grid_index: Int[Tensor, "b t"]) -> None:
        """Adds the target features of a batch to the sums."""
        flat = targets.detach().flatten(0, 1).cpu().double()
        index = grid_index.flatten().cpu()
        self.sums.index_add_(0, index, flat)
        self.counts.index_add_(0, index, torch.ones(len(index), dtype=torch.float64))

    def constant(self) -> Float[Tensor, " w"]:
        """The mean over all positions."""
        return (self.sums.sum(0) / self.counts.sum().clamp_min(1)).float()

    def at(self, grid_index: Int[Tensor, "b m"]) -> Float[Tensor, "b m w"]:
        """The mean of each position in `grid_index`; of a position never seen, the mean over all."""
        means = (self.sums / self.counts.clamp_min(1).unsqueeze(-1)).float()
        means[self.counts == 0] = self.constant()
        return means[grid_index]


def copy_nearest(
    targets: Float[Tensor, "b t w"],
    positions: Float[Tensor, "b t 3"],
    context: Int[Tensor, "b n"],
    target: Int[Tensor, "b m"],
) -> Float[Tensor, "b m w"]:
    """The target feature of the visible token nearest in `positions`; ties go to the lower token index."""
    distance = torch.cdist(gather_tokens(positions, target).float(), gather_tokens(positions, context).float())
    return gather_tokens(targets, torch.gather(context, 1, distance.argmin(dim=-1)))
