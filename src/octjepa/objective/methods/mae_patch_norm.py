"""The masked autoencoder of earlier versions: each hidden patch is predicted without its own mean and spread."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from octjepa.objective.base import register_objective
from octjepa.objective.methods.mae import MAE

PIXEL_EPS = 1e-6


@register_objective("mae_patch_norm")
class PatchNormMAE(MAE):
    """`norm_pix_loss` of He et al. 2022: how bright a patch is need not be known."""

    trivial_loss = 1.0  # the variance of a normalised patch: always predicting zero

    def targets(
        self, patches: Float[Tensor, "b t voxels"], features: Callable[[], Float[Tensor, "b t f"]]
    ) -> Float[Tensor, "b t voxels"]:
        """The patch's own voxels, less their mean, over their standard deviation."""
        pixels = patches.float()
        std = (pixels.var(dim=-1, keepdim=True) + PIXEL_EPS).sqrt()  # [b, t, 1]
        return (pixels - pixels.mean(dim=-1, keepdim=True)) / std
