"""The loop that every supervised network of the exam's ceiling is trained by."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from octjepa.progress import bar

WEIGHT_DECAY = 0.05


def train_on_batches(
    net: nn.Module,
    loss: Callable[[list[int]], Tensor],
    samples: int,
    batch: int,
    updates: int,
    rate: float,
    rng: np.random.Generator,
    what: str,
    warmup_part: int = 20,
) -> None:
    """Takes `updates` of AdamW on `loss(numbers of a batch)`, every sample once before any comes again.

    The rate rises over one in `warmup_part` of the updates, and falls to 0 along half a cosine over all. Leaves the
    network in evaluation mode.
    """
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
    order: list[int] = []
    net.train()
    with bar(what, updates, "updates") as progress:
        for update in range(updates):
            if len(order) < batch:
                order += rng.permutation(samples).tolist()
            which, order = order[:batch], order[batch:]
            warm = min(1.0, warmup_part * (update + 1) / updates)
            for group in optimizer.param_groups:
                group["lr"] = rate * warm * (1 + math.cos(math.pi * update / updates)) / 2
            loss(which).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.advance()
    net.eval()
