"""Noise2Noise (Lehtinen et al. 2018) as a masked autoencoder: what every other B-scan shows, from those between them.

Both halves show the same anatomy under independent speckle (`octjepa ingest --halves`). So the target of a visible
token is more than a copy of it: what is common to both is the tissue, also of a lesion inside one token, which nothing
outside that token could predict.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from octjepa.objective.base import Scalar, register_objective
from octjepa.objective.methods.mae import MAE


@register_objective("noise2noise")
class Noise2Noise(MAE):
    """The masked autoencoder's squared error at hidden and at visible tokens, each against the other half."""

    needs_halves = True

    def visible_loss(
        self, predicted: Float[Tensor, "b n f"], target: Float[Tensor, "b n f"], weight: Float[Tensor, "b n"]
    ) -> Scalar:
        """Every visible token counts alike: how far the nearest hidden one is says nothing about its own noise."""
        return self.loss(predicted, target)
