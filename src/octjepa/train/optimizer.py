"""AdamW in two groups: weight matrices decay; biases, norms and learned tokens (1-D) do not."""

from __future__ import annotations

import torch
from torch import nn

from octjepa.distributed import xla
from octjepa.recipe import TrainRecipe


def build_optimizer(model: nn.Module, train: TrainRecipe) -> torch.optim.AdamW:
    """Over every trainable parameter of `model`; the LR is set anew before each update."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    if trainable[0].device.type == "xla":
        return xla.adamw(groups, train.base_lr, train.betas)
    return torch.optim.AdamW(groups, lr=train.base_lr, betas=train.betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
