"""The EMA target: target = m * target + (1 - m) * student, after every optimizer update, on fp32 masters."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from octjepa.distributed.tensors import local_tensor


def momentum(update: int, total: int, base: float, final: float) -> float:
    """m at optimizer update `update` (from 0) of `total`: from `base` to `final` along half a cosine.

    m(t) = final - (final - base) (1 + cos(pi t / T)) / 2, clamped past T.
    """
    share = min(update / max(total, 1), 1.0)
    return final - (final - base) * (1.0 + math.cos(math.pi * share)) / 2.0


@torch.no_grad()
def update_target(target: nn.Module, student: nn.Module, m: float, healthy: Bool[Tensor, ""] | None = None) -> None:
    """In place, every parameter and buffer, in the order both modules share.

    Where `healthy` is false nothing moves; it may lie on a device, and is not waited for.
    """
    theirs = [local_tensor(tensor) for tensor in (*target.parameters(), *target.buffers())]
    ours = [local_tensor(tensor) for tensor in (*student.parameters(), *student.buffers())]
    if len(theirs) != len(ours):
        raise ValueError(f"target has {len(theirs)} tensors, student {len(ours)}: not the same architecture")
    if healthy is None:
        torch._foreach_mul_(theirs, m)
        torch._foreach_add_(theirs, ours, alpha=1.0 - m)
        return
    kept, taken = torch.where(healthy, m, 1.0), torch.where(healthy, 1.0 - m, 0.0)
    for old, new in zip(theirs, ours, strict=True):
        old.mul_(kept).addcmul_(new, taken)
