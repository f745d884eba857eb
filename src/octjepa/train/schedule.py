"""Learning rate by optimizer update: linear warm-up, then half a cosine to a floor, or constant. It never rises again.

lr(s) = base (s + 1) / w for s < w; then min + (base - min)(1 + cos(pi (s - w) / (T - w))) / 2, clamped past T, with
w = warm-up share of T and min = min_lr_ratio * base.
"""

from __future__ import annotations

import math
from itertools import pairwise

from octjepa.recipe import TrainRecipe


def warmup_updates(train: TrainRecipe, total: int) -> int:
    return max(1, round(train.warmup_share * total)) if train.warmup_share > 0 else 0


def learning_rate(update: int, total: int, train: TrainRecipe) -> float:
    """LR of optimizer update `update` (from 0) of `total`; positive from the first on."""
    warmup = warmup_updates(train, total)
    if update < warmup:
        return train.base_lr * (update + 1) / warmup
    if train.schedule == "constant":
        return train.base_lr
    share = min((update - warmup) / max(total - warmup, 1), 1.0)
    floor = train.min_lr_ratio * train.base_lr
    return floor + (train.base_lr - floor) * (1.0 + math.cos(math.pi * share)) / 2.0


def total_updates(train: TrainRecipe, volumes: int) -> int:
    """Optimizer updates of a run: max_updates, or epochs times `volumes` over the batch, rounded up."""
    if train.max_updates is not None:
        return train.max_updates
    assert train.epochs is not None  # the recipe holds exactly one
    return max(1, math.ceil(train.epochs * volumes / train.global_batch))


def lr_curve(train: TrainRecipe, total: int) -> list[float]:
    """LR of every update. Raises ValueError if it is not positive or rises after warm-up."""
    curve = [learning_rate(update, total, train) for update in range(total)]
    after = curve[warmup_updates(train, total) :]
    if min(curve) <= 0 or any(later > earlier for earlier, later in pairwise(after)):
        raise ValueError("the learning rate is not positive, or rises after warm-up")
    return curve
