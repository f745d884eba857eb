"""`mae` with a spectral loss, for one row of `benchmarks.objectives`.

The loss of `mae` weighs every spatial frequency of a patch by its power, and most of the power of an OCT patch is in
the lowest ones. Here the logarithms of the amplitudes count as well, so that weak high frequencies do. The idea of a
spectral loss is that of arXiv 2606.13315 (brain MRI); the formula is our own.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from octjepa.objectives.base import Scalar, Tokens
from octjepa.objectives.mae import MAE

PATCH = (4, 8, 8)  # voxels of a token of the exam's recipe
WEIGHT = 0.25  # both terms are then of about the same size for a prediction of zero


class SpectralMAE(MAE):
    """Squared error of voxels plus the mean absolute difference of the logarithms of their Fourier amplitudes."""

    exported_encoder: ClassVar[str] = "student"

    def loss(self, predicted: Tokens, target: Tokens) -> Scalar:
        difference = log_amplitudes(predicted.float()) - log_amplitudes(target.float())
        return super().loss(predicted, target) + WEIGHT * difference.abs().mean()


def log_amplitudes(voxels: Float[Tensor, "*b voxels"]) -> Float[Tensor, "*b 4 8 5"]:
    """log(1 + amplitude) of each frequency of patches of `PATCH` voxels."""
    patches = voxels.unflatten(-1, PATCH)
    return torch.fft.rfftn(patches, dim=(-3, -2, -1)).abs().log1p()
