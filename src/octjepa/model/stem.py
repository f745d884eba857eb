"""The non-linear patch embedding: an MLP over the sub-patches of each patch, so that nothing crosses a patch's border.

A lesion may be a fiftieth of a patch; one linear layer over all its voxels cannot tell where in the patch it is. A
convolution with overlap could, but would carry voxels of a hidden patch into its visible neighbour.
"""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor, nn

from octjepa.recipe import SUB_PATCH

HIDDEN = 48  # features of a sub-patch


class PatchMLP(nn.Module):
    """Voxels of a patch -> its sub-patches -> linear, GELU -> all of them together -> linear to `width`."""

    def __init__(self, patch_size: tuple[int, int, int], width: int) -> None:
        super().__init__()
        counts = tuple(size // part for size, part in zip(patch_size, SUB_PATCH, strict=True))
        if any(size % part for size, part in zip(patch_size, SUB_PATCH, strict=True)):
            raise ValueError(f"patches of {patch_size} cannot be divided into sub-patches of {SUB_PATCH}")
        self.grid = tuple(size for pair in zip(counts, SUB_PATCH, strict=True) for size in pair)  # [n, 2, n, 4, n, 4]
        self.inner = nn.Linear(math.prod(SUB_PATCH), HIDDEN)
        self.activation = nn.GELU()
        self.outer = nn.Linear(HIDDEN * math.prod(counts), width)

    def initialise(self) -> None:
        """Unit variance before the GELU for voxels of unit variance: at 0.02 it would be all but linear."""
        nn.init.trunc_normal_(self.inner.weight, std=self.inner.in_features**-0.5)

    def forward(self, patches: Float[Tensor, "b t voxels"]) -> Float[Tensor, "b t w"]:
        parts = patches.unflatten(-1, self.grid).permute(0, 1, 2, 4, 6, 3, 5, 7)  # [b, t, n, n, n, 2, 4, 4]
        hidden = self.activation(self.inner(parts.flatten(5).flatten(2, 4)))  # [b, t, sub-patches, hidden]
        embedded: Tensor = self.outer(hidden.flatten(2))
        return embedded
