"""The reference design: the encoder sees mask tokens in place of hidden patches, and an MLP predicts their features."""

from __future__ import annotations

import torch.nn.functional as F

from octjepa.objective.base import Objective, Scalar, Tokens, register_objective


@register_objective("normalized_mse")
class NormalizedMSE(Objective):
    """Squared distance of unit vectors, *summed* over features: 2 - 2 cosine, in [0, 4].

    Averaged over D features an orthogonal prediction would read 2 / D and look like success; summed, it reads 2.
    """

    trivial_loss = 2.0  # orthogonal vectors

    def loss(self, predicted: Tokens, target: Tokens) -> Scalar:
        p, t = F.normalize(predicted.float(), dim=-1), F.normalize(target.float(), dim=-1)  # [b, m, f]
        return (p - t).square().sum(dim=-1).mean()
