"""LeVJEPA (arXiv 2608.27395): one encoder, one projector, and no target encoder, predictor or stop-gradient.

Views of a volume are random shares of its tokens: the visible and the hidden tokens of each mask, the hidden tokens
from the second view of the volume (other intensity changes, or the other half of the B-scans). An MLP projects the mean
token of each view. The projections of one volume should be equal (invariance), and those of different volumes should
follow a standard normal distribution (SIGReg, which `octjepa.objectives.loss` adds). Without SIGReg a constant encoder
would be the best one.
"""

from __future__ import annotations

from typing import ClassVar

from octjepa.objectives.base import Objective, Scalar, Tokens, register_objective


@register_objective("levjepa")
class LeVJEPA(Objective):
    """Squared distance of each view's projection from the mean projection of its volume, mean over features.

    The mean is detached, which leaves the gradient unchanged: the distances from a mean sum to zero.
    """

    trivial_loss: ClassVar[float | None] = None  # the mean square of the volumes' mean projections

    def loss(self, predicted: Tokens, target: Tokens) -> Scalar:
        return (predicted.float() - target.float()).square().mean()
