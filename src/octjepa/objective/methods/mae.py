"""Masked autoencoder (He et al. 2022) with V-JEPA's networks: predict the voxels of hidden patches.

It is at its best with `masks.random` alone and a ratio of 0.75 to 0.9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from octjepa.objective.base import Objective, Scalar, Tokens, register_objective


@register_objective("mae")
class MAE(Objective):
    """Squared error of voxels, mean over a patch's voxels.

    Voxels are z-scored over the tissue of their volume, as the encoder sees them: brightness is part of the target.
    """

    predicts_pixels = True
    trivial_loss: ClassVar[float | None] = None  # the mean square of the hidden voxels, background among them

    def targets(
        self, patches: Float[Tensor, "b t voxels"], features: Callable[[], Float[Tensor, "b t f"]]
    ) -> Float[Tensor, "b t voxels"]:
        """The patch's own voxels, as they are."""
        return patches.float()

    def loss(self, predicted: Tokens, target: Tokens) -> Scalar:
        return (predicted.float() - target.float()).square().mean()
