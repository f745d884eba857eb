"""The EMA target: target = m * target + (1 - m) * student, after every optimizer update, on fp32 masters.

Over how many updates the target averages is stated as a share of the run (`objective.ema_horizon`), so that a run of
any length forgets its random start. `ema_base` and `ema_final` give the schedules of BYOL, I-JEPA and V-JEPA instead.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from octjepa.distributed.runtime import local_tensor
from octjepa.recipe import ObjectiveRecipe


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
    """The weight that the random start still has in the target after `total` updates: the product of every m."""
    return math.prod(momentum(update, total, recipe) for update in range(total))


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
