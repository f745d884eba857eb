"""Joint-embedding predictive objectives: predict the target encoder's features of masked tokens.

`vjepa` is V-JEPA 2 (Assran et al. 2025), `vjepa_dense` is V-JEPA 2.1, and `normalized_mse` is the reference design, in
which the encoder sees mask tokens and an MLP predicts their features. Inputs are the predicted and the target features
[b, m, f] of masked tokens; the result is a scalar loss.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from octjepa.objectives.base import Objective, Scalar, Tokens, register_objective


@register_objective("vjepa")
class VJEPA(Objective):
    """Mean |p - t| over masked tokens and features, on layer-normed targets."""

    trivial_loss = 0.798  # E|x| of a standard normal, sqrt(2 / pi): the loss of always predicting zero

    def loss(self, predicted: Tokens, target: Tokens) -> Scalar:
        return (predicted.float() - target.float()).abs().mean()


@register_objective("vjepa_dense")
class DenseVJEPA(VJEPA):
    """V-JEPA's loss at masked tokens plus the same loss at visible tokens, which counts less far from a mask.

    Features of four encoder depths enter the predictor through an MLP. Visible tokens have a separate output head.
    """

    target_depths = 4

    def visible_loss(
        self, predicted: Float[Tensor, "b n f"], target: Float[Tensor, "b n f"], weight: Float[Tensor, "b n"]
    ) -> Scalar:
        return (weight * (predicted - target).abs().mean(dim=-1)).mean()


@register_objective("normalized_mse")
class NormalizedMSE(Objective):
    """Squared distance of unit vectors, *summed* over features: 2 - 2 cosine, in [0, 4].

    The mean over f features would be 2 / f for an orthogonal prediction and look like success; the sum is 2.
    """

    trivial_loss = 2.0  # the loss of orthogonal vectors

    def loss(self, predicted: Tokens, target: Tokens) -> Scalar:
        p, t = F.normalize(predicted.float(), dim=-1), F.normalize(target.float(), dim=-1)  # [b, m, f]
        return (p - t).square().sum(dim=-1).mean()
