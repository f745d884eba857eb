"""Masked autoencoders: predict the voxels of masked patches with the networks of V-JEPA.

`mae` (He et al. 2022) predicts voxels, `mae_patch_norm` predicts voxels normalised by their patch, and `noise2noise`
(Lehtinen et al. 2018) predicts the other half of the B-scans. Inputs are predicted and target voxels [b, m, voxels] of
masked tokens; the result is a scalar loss. All three work best with random masking only and a ratio of 0.75 to 0.9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from octjepa.objectives.base import Objective, Scalar, Tokens, register_objective

PIXEL_EPS = 1e-6


@register_objective("mae")
class MAE(Objective):
    """Squared error of voxels, mean over a patch's voxels.

    Voxels are z-scored over the tissue of their volume, as the encoder sees them: brightness is part of the target.
    """

    predicts_pixels = True
    trivial_loss: ClassVar[float | None] = None  # the mean square of the masked voxels, which include background

    def targets(
        self, patches: Float[Tensor, "b t voxels"], features: Callable[[], Float[Tensor, "b t f"]]
    ) -> Float[Tensor, "b t voxels"]:
        """The voxels of each patch, unchanged."""
        return patches.float()

    def loss(self, predicted: Tokens, target: Tokens) -> Scalar:
        return (predicted.float() - target.float()).square().mean()


@register_objective("mae_patch_norm")
class PatchNormMAE(MAE):
    """`norm_pix_loss` of He et al. 2022: the encoder need not know how bright a patch is."""

    trivial_loss = 1.0  # the variance of a normalised patch: the loss of always predicting zero

    def targets(
        self, patches: Float[Tensor, "b t voxels"], features: Callable[[], Float[Tensor, "b t f"]]
    ) -> Float[Tensor, "b t voxels"]:
        """The voxels of each patch minus their mean, divided by their standard deviation."""
        pixels = patches.float()
        std = (pixels.var(dim=-1, keepdim=True) + PIXEL_EPS).sqrt()  # [b, t, 1]
        return (pixels - pixels.mean(dim=-1, keepdim=True)) / std


@register_objective("noise2noise")
class Noise2Noise(MAE):
    """Squared error at masked and at visible tokens, each against the other half of the B-scans.

    Both halves show the same anatomy with independent speckle (`octjepa ingest --halves`). The target of a visible
    token is therefore not a copy of its input: what both halves share is the tissue. This includes a lesion inside one
    token, which the tokens around it could not predict.
    """

    needs_halves = True

    def visible_loss(
        self, predicted: Float[Tensor, "b n f"], target: Float[Tensor, "b n f"], weight: Float[Tensor, "b n"]
    ) -> Scalar:
        """Every visible token counts equally: its noise does not depend on the distance to a masked token."""
        return self.loss(predicted, target)
