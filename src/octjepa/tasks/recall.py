"""A linear head that predicts the standardised tokens of a teacher, and the optimizer of an encoder with such heads.

`octjepa.tasks.truth` keeps with it what the encoder knew before, and `octjepa.tasks.distil` learns with it from an
encoder of another project. The head is linear, so what it reads can be read from the frozen tokens too. It is dropped
at export.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from octjepa.distributed.adamw import adamw


class Recall(nn.Linear):
    """From tokens of `width` features to standardised tokens of a teacher with `taught` features.

    It starts as the identity if both have the same width.
    """

    def __init__(self, width: int, taught: int) -> None:
        super().__init__(width, taught)
        if width == taught:
            nn.init.eye_(self.weight)
        else:
            nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, tokens: Float[Tensor, "b k width"]) -> Float[Tensor, "b k taught"]:
        return super().forward(standardised(tokens)).float()


def standardised(tokens: Float[Tensor, "*k width"]) -> Float[Tensor, "*k width"]:
    """Tokens with mean 0 and variance 1 over their features."""
    return functional.layer_norm(tokens, tokens.shape[-1:])


def token_optimizer(
    network: nn.Module, device: torch.device, learning_rate: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW for what is trained of an encoder with heads; weights with fewer than two dimensions do not decay."""
    trained = [p for p in network.parameters() if p.requires_grad]
    decay = [p for p in trained if p.ndim >= 2]
    plain = [p for p in trained if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return adamw(groups, device, lr=learning_rate, betas=(0.9, 0.98))
