"""V-JEPA 2 (Assran et al. 2025): predict the target encoder's features of hidden tokens from the visible ones."""

from __future__ import annotations

from octjepa.objective.base import Objective, Scalar, Tokens, register_objective


@register_objective("vjepa")
class VJEPA(Objective):
    """Mean |p - t| over hidden tokens and features, on layer-normed targets."""

    trivial_loss = 0.798  # E|x| of a standard normal, sqrt(2 / pi): always predicting zero

    def loss(self, predicted: Tokens, target: Tokens) -> Scalar:
        return (predicted.float() - target.float()).abs().mean()
