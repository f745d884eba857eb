"""AdamW in two groups, and its learning rate: linear warm-up, then half a cosine to a floor, or constant.

Weight matrices decay; biases, norms and learned tokens (1-D) do not. With w = warm-up share of T updates and
min = min_lr_ratio * base, lr(s) = base (s + 1) / w for s < w; then
lr(s) = min + (base - min)(1 + cos(pi (s - w) / (T - w))) / 2, clamped past T.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn

from octjepa.distributed import xla
from octjepa.recipe import TrainRecipe


def build_optimizer(model: nn.Module, train: TrainRecipe) -> torch.optim.AdamW:
    """AdamW over every trainable parameter of `model`; the learning rate is set anew before each update."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    if trainable[0].device.type == "xla":
        return xla.adamw(groups, train.base_lr, train.betas)
    return torch.optim.AdamW(groups, lr=train.base_lr, betas=train.betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def total_updates(train: TrainRecipe, volumes: int) -> int:
    """Optimizer updates of a run: max_updates, or epochs times `volumes` over the batch, rounded up."""
    if train.max_updates is not None:
        return train.max_updates
    assert train.epochs is not None  # the recipe holds exactly one
    return max(1, math.ceil(train.epochs * volumes / train.global_batch))


def warmup_updates(train: TrainRecipe, total: int) -> int:
    """Updates of the linear warm-up in a run of `total`."""
    return max(1, round(train.warmup_share * total)) if train.warmup_share > 0 else 0


def learning_rate(update: int, total: int, train: TrainRecipe) -> float:
    """Learning rate of optimizer update `update` (from 0) of `total`; positive from the first on."""
    warmup = warmup_updates(train, total)
    if update < warmup:
        return train.base_lr * (update + 1) / warmup
    if train.schedule == "constant":
        return train.base_lr
    share = min((update - warmup) / max(total - warmup, 1), 1.0)
    floor = train.min_lr_ratio * train.base_lr
    return floor + (train.base_lr - floor) * (1.0 + math.cos(math.pi * share)) / 2.0


def lr_curve(train: TrainRecipe, total: int) -> list[float]:
    """Learning rate of every update. Raises ValueError if it is not positive or rises after warm-up."""
    curve = [learning_rate(update, total, train) for update in range(total)]
    after = curve[warmup_updates(train, total) :]
    if min(curve) <= 0 or any(later > earlier for earlier, later in pairwise(after)):
        raise ValueError("the learning rate is not positive, or rises after warm-up")
    return curve
