"""AdamW in two groups, its learning rate (linear warm-up, then half a cosine to a minimum, or constant), the EMA
target.

Weight matrices decay; biases, norms and learned tokens (1-D) do not. With w = warm-up share of T updates and
min = min_lr_ratio * base, lr(s) = base (s + 1) / w for s < w; then
lr(s) = min + (base - min)(1 + cos(pi (s - w) / (T - w))) / 2, clamped past T.

After every update target = m * target + (1 - m) * student, on fp32 masters. Over how many updates the target averages
is stated as a share of the run (`objective.ema_horizon`), so that a run of any length forgets its random start.
`ema_base` and `ema_final` give the schedules of BYOL, I-JEPA and V-JEPA instead.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from octjepa.distributed.adamw import fused_adamw
from octjepa.distributed.runtime import local_tensor
from octjepa.recipe import ObjectiveRecipe, TrainRecipe

_MOST_POINTS = 100_000  # updates of a schedule that a plan evaluates; 100 million would take a minute


def build_optimizer(model: nn.Module, train: TrainRecipe) -> torch.optim.AdamW:
    """AdamW over every trainable parameter of `model`; the learning rate is set again before each update."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return fused_adamw(groups, trainable[0].device, train.base_lr, train.betas)


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


def scheduled_updates(total: int, most: int = _MOST_POINTS) -> list[int]:
    """The updates to evaluate of a schedule of `total` updates: all, or at most about `most`, evenly spaced.

    The first and the last update are always among them.
    """
    return sorted({*range(0, total, max(1, math.ceil(total / most))), total - 1})


def lr_curve(train: TrainRecipe, total: int) -> list[float]:
    """Learning rate of the `scheduled_updates`. Raises ValueError if it is not positive or rises after warm-up."""
    warmup = warmup_updates(train, total)
    updates = sorted({*scheduled_updates(total), max(0, warmup - 1)})  # the peak is at the end of the warm-up
    curve = [learning_rate(update, total, train) for update in updates]
    after = [rate for update, rate in zip(updates, curve, strict=True) if update >= warmup]
    if min(curve) <= 0 or any(later > earlier for earlier, later in pairwise(after)):
        raise ValueError("the learning rate is not positive, or rises after warm-up")
    return curve


def momentum(update: int, total: int, recipe: ObjectiveRecipe) -> float:
    """m at optimizer update `update` (from 0) of `total`, by the schedule that the recipe names."""
    if recipe.averaging_share is None:
        return cosine_momentum(update, total, *recipe.momentum_range)
    return horizon_momentum(update, total, recipe.averaging_share)


def horizon_momentum(update: int, total: int, horizon: float) -> float:
    """m = 1 - 1 / (horizon * total): the target averages over about that share of the run's updates.

    At the start m is at most (1 + t) / (10 + t), so that the random weights of the first updates are soon forgotten
    (as in TensorFlow's ExponentialMovingAverage).
    """
    return min(1.0 - 1.0 / max(1.0, horizon * total), (1.0 + update) / (10.0 + update))


def random_start_share(total: int, recipe: ObjectiveRecipe) -> float:
    """The weight that the random start still has in the target after `total` updates: the product of every m.

    In runs with more than `_MOST_POINTS` updates, m is constant between the updates that are evaluated.
    """
    updates = scheduled_updates(total)
    share = 1.0
    for update, following in zip(updates, [*updates[1:], total], strict=True):
        share *= momentum(update, total, recipe) ** (following - update)
        if share == 0.0:
            break
    return share


def cosine_momentum(update: int, total: int, base: float, final: float) -> float:
    """m at optimizer update `update` (from 0) of `total`: from `base` to `final` along half a cosine.

    m(t) = final - (final - base) (1 + cos(pi t / T)) / 2, clamped past T.
    """
    share = min(update / max(total, 1), 1.0)
    return final - (final - base) * (1.0 + math.cos(math.pi * share)) / 2.0


@torch.no_grad()
def update_target(target: nn.Module, student: nn.Module, m: float, healthy: Bool[Tensor, ""] | None = None) -> None:
    """target = m target + (1 - m) student in place, for every parameter and buffer in their common order.

    Where `healthy` is false nothing changes; it may be on a device, and is not synchronised. Raises ValueError when the
    two modules have different numbers of tensors.
    """
    targets = [local_tensor(tensor) for tensor in (*target.parameters(), *target.buffers())]
    students = [local_tensor(tensor) for tensor in (*student.parameters(), *student.buffers())]
    if len(targets) != len(students):
        raise ValueError(f"target has {len(targets)} tensors, student {len(students)}: not the same architecture")
    if healthy is None:
        torch._foreach_mul_(targets, m)
        torch._foreach_add_(targets, students, alpha=1.0 - m)
        return
    keep, take = torch.where(healthy, m, 1.0), torch.where(healthy, 1.0 - m, 0.0)
    for old, new in zip(targets, students, strict=True):
        old.mul_(keep).addcmul_(new, take)
