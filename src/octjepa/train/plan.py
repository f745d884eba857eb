"""What a recipe will cost, before it runs: tokens, parameters, arithmetic, memory, updates, learning rate.

Counted, not guessed: the very model is built without storage (torch's meta device) and run on one volume's shapes
while torch's own counter adds up its arithmetic and a hook adds up what autograd keeps for the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from octjepa.model import VJEPA3D
from octjepa.objective.total import training_loss
from octjepa.recipe import Recipe
from octjepa.train.preflight import batch_shares
from octjepa.train.schedule import lr_curve, total_updates, warmup_updates

_FP32_BYTES = 4


def plan(recipe: Recipe, volumes: int | None = None) -> dict[str, Any]:
    """All figures of a run. `volumes` counts training volumes; without it `data.expected_volumes`, then a batch.

    `peak_memory_bytes` is of one device: fp32 weights, target, gradients and two moments, the views of one micro-batch
    and what it keeps for its backward pass, all taken as fp32. What an allocator holds beside these is not in it: the
    test beside this file finds it within a third of the measured peak on a CPU. Raises UsageError when the batch
    cannot be dealt over `machine.devices`.
    """
    devices = recipe.machine.devices or 1
    _, micro, accumulation = batch_shares(recipe, devices)
    known = volumes or recipe.data.expected_volumes
    if recipe.data.max_samples is not None:
        known = min(known or recipe.data.max_samples, recipe.data.max_samples)
    counted = known or recipe.train.global_batch
    with torch.device("meta"):
        model = VJEPA3D.from_recipe(recipe)
    flops, kept = _step_cost(model, recipe)
    every = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    updates = total_updates(recipe.train, counted)
    curve = lr_curve(recipe.train, updates)
    context, target = recipe.mask_counts
    views = 2 * _FP32_BYTES * recipe.token_count * math.prod(recipe.tokens.patch_size)
    return {
        "recipe": recipe.name,
        "tokens": recipe.token_count,
        "grid": list(recipe.grid),
        "grid_tokens": recipe.grid_tokens,
        "context_tokens": context,
        "target_tokens": target,
        "parameters": every,
        "trainable": trainable,
        "parameters_by_part": {name: _count(part) for name, part in model.named_children()},
        "flops_per_volume": flops,
        "peak_memory_bytes": _FP32_BYTES * (every + 3 * trainable) + micro * (kept + views),
        "volumes": counted,
        "volumes_known": known is not None,
        "updates": updates,
        "warmup_updates": warmup_updates(recipe.train, updates),
        "effective_batch": recipe.train.global_batch,
        "batch": {"micro": micro, "devices": devices, "accumulation": accumulation},
        "epochs": updates * recipe.train.global_batch / counted,
        "lr": {"first": curve[0], "peak": max(curve), "last": curve[-1]},
        "ema_half_life_samples": _half_life(recipe.objective.ema_base) * recipe.train.global_batch,
    }


def _count(part: torch.nn.Module) -> int:
    return sum(p.numel() for p in part.parameters())


def _half_life(m: float) -> float:
    """Updates until half of the target is new, at momentum m."""
    return math.log(0.5) / math.log(m) if m > 0 else 0.0


def _step_cost(model: VJEPA3D, recipe: Recipe) -> tuple[int, int]:
    """(floating-point operations forward and backward, bytes kept for backward) of one volume."""
    voxels = math.prod(recipe.tokens.patch_size)
    tokens = recipe.token_count
    context_count, target_count = recipe.mask_counts
    patches = torch.empty(1, tokens, voxels, device="meta")
    places = torch.empty(1, tokens, 3, device="meta")
    context = torch.empty(1, context_count, dtype=torch.int64, device="meta")
    target = torch.empty(1, target_count, dtype=torch.int64, device="meta")
    weights = {id(p) for p in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    attended = {context_count, context_count + target_count, tokens}

    def count(tensor: Tensor) -> Tensor:
        base = tensor._base if tensor._base is not None else tensor
        # The meta device takes attention's textbook path and keeps its token-by-token weights; the fused kernels that
        # real devices take keep none.
        square = base.ndim >= 3 and base.shape[-1] == base.shape[-2] and base.shape[-1] in attended
        if id(base) not in weights and id(base) not in kept and not square:
            kept[id(base)] = base.numel() * base.element_size()
            alive.append(base)  # an id is only unique while its tensor lives
        return tensor

    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        outcome = model.predict(patches, patches, places, context, target)
        training_loss(recipe.objective, outcome, places, context, target, update=0)[0].backward()
    return int(counter.get_total_flops()), sum(kept.values())
