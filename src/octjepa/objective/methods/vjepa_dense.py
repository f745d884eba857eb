"""V-JEPA 2.1: V-JEPA 2 supervised at four depths of the encoder, and at visible tokens too."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from octjepa.objective.base import Scalar, register_objective
from octjepa.objective.methods.vjepa import VJEPA


@register_objective("vjepa_dense")
class DenseVJEPA(VJEPA):
    """V-JEPA's loss at hidden tokens, plus the same at visible ones, which counts less far from a mask.

    The four depths enter the predictor through an MLP, and visible tokens leave it by a head of their own.
    """

    target_depths = 4

    def visible_loss(
        self, predicted: Float[Tensor, "b n f"], target: Float[Tensor, "b n f"], weight: Float[Tensor, "b n"]
    ) -> Scalar:
        return (weight * (predicted - target).abs().mean(dim=-1)).mean()
