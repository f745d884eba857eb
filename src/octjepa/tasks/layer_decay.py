"""Rates that fall block by block: the nearer a layer is to the input, the less it learns when an encoder is tuned.

ULMFiT (Howard & Ruder 2018); BEiT's layer-wise decay. Segmentation and fine-tuning share it.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def layer_groups(network: nn.Module, lr: float, decay: float) -> list[dict[str, Any]]:
    """Parameter groups of an encoder: the last block at lr x decay, each one below at a rate `decay` times lower.

    From the input to the output: the patch embedding, a group for each block, the final norm with the last one.
    """
    depth = len(network.blocks)  # type: ignore[arg-type]
    groups: dict[int, list[nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        level = depth if name.startswith("norm") else numbers[0] + 1 if name.startswith("blocks") and numbers else 0
        groups.setdefault(level, []).append(parameter)
    return [{"params": found, "lr": lr * decay ** (depth + 1 - level)} for level, found in sorted(groups.items())]
