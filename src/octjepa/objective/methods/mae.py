"""Masked autoencoder (He et al. 2022) with V-JEPA's networks: predict the voxels of hidden patches."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from octjepa.objective.base import Objective, Scalar, Tokens, register_objective

PIXEL_EPS = 1e-6


@register_objective("mae")
class MAE(Objective):
    """Squared error of voxels normalised patch by patch, mean over a patch's voxels."""

    predicts_pixels = True
    exports = "student"  # nothing is learned from the moving average
    trivial_loss = 1.0  # the variance of a normalised patch: always predicting zero

    def targets(
        self, patches: Float[Tensor, "b t voxels"], features: Callable[[], Float[Tensor, "b t f"]]
    ) -> Float[Tensor, "b t voxels"]:
        """The patch's own voxels, less their mean, over their standard deviation."""
        pixels = patches.float()
        std = (pixels.var(dim=-1, keepdim=True) + PIXEL_EPS).sqrt()  # [b, t, 1]
        return (pixels - pixels.mean(dim=-1, keepdim=True)) / std

    def loss(self, predicted: Tokens, target: Tokens) -> Scalar:
        return (predicted.float() - target.float()).square().mean()
