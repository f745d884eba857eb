"""The EMA target: target = m * target + (1 - m) * student, after every optimiser update, on fp32 masters."""

from __future__ import annotations

import math

import torch
from torch import nn


def momentum(update: int, total: int, base: float, final: float) -> float:
    """m at optimiser update `update` (from 0) of `total`: from `base` to `final` along half a cosine.

    m(t) = final - (final - base) (1 + cos(pi t / T)) / 2, clamped past T.
    """
    share = min(update / max(total, 1), 1.0)
    return final - (final - base) * (1.0 + math.cos(math.pi * share)) / 2.0


@torch.no_grad()
def update_target(target: nn.Module, student: nn.Module, m: float) -> None:
    """In place, every parameter and buffer, in the order both modules share."""
    theirs = [*target.parameters(), *target.buffers()]
    ours = [*student.parameters(), *student.buffers()]
    if len(theirs) != len(ours):
        raise ValueError(f"target has {len(theirs)} tensors, student {len(ours)}: not the same architecture")
    torch._foreach_mul_(theirs, m)
    torch._foreach_add_(theirs, ours, alpha=1.0 - m)
