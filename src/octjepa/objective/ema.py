"""The EMA target: target = m * target + (1 - m) * student, after every optimizer update, on fp32 masters."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from octjepa.distributed.runtime import local_tensor


def momentum(update: int, total: int, base: float, final: float) -> float:
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
