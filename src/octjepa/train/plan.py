"""What a recipe will cost, before it runs: tokens, parameters, arithmetic, memory, updates, learning rate.

Counted, not guessed: the very model is built without storage and run on shapes alone, once while torch's own counter
adds up its arithmetic, once while `octjepa.train.peak_memory` adds up what lives in memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from octjepa.model import VJEPA3D
from octjepa.objective.loss import training_loss
from octjepa.recipe import Recipe
from octjepa.train.peak_memory import peak_bytes
from octjepa.train.preflight import batch_shares
from octjepa.train.schedule import lr_curve, total_updates, warmup_updates

_FP32_BYTES = 4
JOURNAL_BYTES = 10**8  # of 100,000 updates, pictures with it


def plan(recipe: Recipe, volumes: int | None = None) -> dict[str, Any]:
    """All figures of a run. `volumes` counts training volumes; without it `data.expected_volumes`, then a batch.

    `peak_memory_bytes` is of one device, weights, gradients, moments, activations and one micro-batch of views together
    (`octjepa.train.peak_memory` says what is not in it; in sharded mode it is not divided). Raises UsageError when the
    batch cannot be dealt over `machine.devices`.
    """
    devices = recipe.machine.devices or 1
    _, micro, accumulation = batch_shares(recipe, devices)
    known = volumes or recipe.data.expected_volumes
    if recipe.data.max_samples is not None:
        known = min(known or recipe.data.max_samples, recipe.data.max_samples)
    counted = known or recipe.train.global_batch
    with torch.device("meta"):
        model = VJEPA3D.from_recipe(recipe)
    flops = _step_flops(model, recipe)
    every = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    updates = total_updates(recipe.train, counted)
    curve = lr_curve(recipe.train, updates)
    context, target = recipe.mask_counts
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
        "peak_memory_bytes": peak_bytes(recipe, micro),
        "disk_bytes": _disk_bytes(recipe, every, trainable, updates),
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


def _disk_bytes(recipe: Recipe, parameters: int, trainable: int, updates: int) -> int:
    """The most that checkpoints and the journal take: the last k, the permanent, the best and the one being written.

    A checkpoint holds the weights and two moments of the trained ones, all fp32.
    """
    if recipe.checkpoint.dir is None:
        return JOURNAL_BYTES
    permanent = updates // recipe.checkpoint.keep_every_updates if recipe.checkpoint.keep_every_updates else 0
    return _FP32_BYTES * (parameters + 2 * trainable) * (recipe.checkpoint.keep_last + 2 + permanent) + JOURNAL_BYTES


def _count(part: torch.nn.Module) -> int:
    return sum(p.numel() for p in part.parameters())


def _half_life(m: float) -> float:
    """Updates until half of the target is new, at momentum m."""
    return math.log(0.5) / math.log(m) if m > 0 else 0.0


def _step_flops(model: VJEPA3D, recipe: Recipe) -> int:
    """Floating-point operations forward and backward of one volume."""
    voxels = math.prod(recipe.tokens.patch_size)
    tokens = recipe.token_count
    context_count, target_count = recipe.mask_counts
    patches = torch.empty(1, tokens, voxels, device="meta")
    positions = torch.empty(1, tokens, 3, device="meta")
    context = torch.empty(1, context_count, dtype=torch.int64, device="meta")
    target = torch.empty(1, target_count, dtype=torch.int64, device="meta")
    counter = FlopCounterMode(display=False)
    with counter:
        outcome = model.predict(patches, patches, positions, context, target)
        training_loss(recipe.objective, outcome, positions, context, target, update=0)[0].backward()
    return int(counter.get_total_flops())
