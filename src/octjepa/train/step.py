"""One optimizer update: gradients of the whole batch, then the step, unless the gradient is unfit.

Nothing here waits for the device: whether the step is taken is decided there (by the optimizer's own `found_inf`, made
for loss scaling), and the figures are read one update later (`Late`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octjepa.distributed.runtime import Runtime
from octjepa.distributed.tensors import full_tensor
from octjepa.model import VJEPA3D
from octjepa.objective.base import cosine
from octjepa.objective.ema import update_target
from octjepa.objective.loss import token_steps, training_loss
from octjepa.recipe import Recipe
from octjepa.train.alarms import check_detached
from octjepa.views.loader import Batch

Figures = dict[str, Tensor]


def accumulate(
    model: VJEPA3D, batch: Batch, recipe: Recipe, runtime: Runtime, update: int = 0, micro_batch: int | None = None
) -> Figures:
    """This rank's part of the gradient of the global batch's mean loss, in micro-batches; its part of loss and cosine.

    Each micro-batch counts by its share of the global batch, and gradients are added in pairs, as two ranks add theirs:
    1x32, 2x16 and 4x8 give the same update. `micro_batch` overrides the recipe's.
    """
    size = len(batch.volume_ids)
    step = min(micro_batch or recipe.machine.micro_batch or size, size)
    sums: Figures = {}
    waiting: list[tuple[int, list[Tensor | None]]] = []  # (micro-batches in it, gradients), ever smaller
    for start in range(0, size, step):
        part = batch.micro_batch(start, start + step)
        share = len(part.volume_ids) / (size * runtime.world_size)
        weight = share * runtime.world_size if runtime.sharded else share  # FSDP2 takes the mean over ranks
        inputs = part.inputs(runtime.device)
        with runtime.autocast():
            outcome = model.predict(*inputs)
        check_detached(outcome)
        steps = token_steps(part.grid_index.to(runtime.device), recipe.grid)
        loss, parts = training_loss(recipe.objective, outcome, steps, *inputs[3:], update)
        (loss * weight).backward()
        shown = {"train/loss": loss.detach(), "train/cosine": cosine(outcome.predicted.detach(), outcome.target)}
        if len(parts) > 1:
            shown |= {f"train/loss_{name}": value for name, value in parts.items()}
        for name, value in shown.items():
            sums[name] = sums.get(name, torch.zeros((), device=runtime.device)) + value.float() * share
        if size > step:
            _add_in_pairs(model, waiting, last=start + step >= size)
    return sums


def _add_in_pairs(model: VJEPA3D, waiting: list[tuple[int, list[Tensor | None]]], last: bool) -> None:
    """Takes the gradients in hand out of `model` and adds equals to equals; at the `last` all, and puts them back."""
    parameters = list(model.parameters())
    waiting.append((1, [parameter.grad for parameter in parameters]))
    while len(waiting) > 1 and (last or waiting[-1][0] == waiting[-2][0]):
        count, mine = waiting.pop()
        before, sums = waiting.pop()
        added = [a if b is None else b if a is None else a.add_(b) for a, b in zip(sums, mine, strict=True)]
        waiting.append((count + before, added))
    for parameter, gradient in zip(parameters, waiting[0][1] if last else [None] * len(parameters), strict=True):
        parameter.grad = gradient


def take_step(
    model: VJEPA3D,
    optimizer: torch.optim.AdamW,
    figures: Figures,
    runtime: Runtime,
    momentum: float,
    clip_norm: float | None,
    norm_limit: float,
) -> Figures:
    """Sums gradients and figures over ranks, clips, steps, moves the target; the figures with `train/grad_norm`.

    A loss or norm that is not finite, or a norm above `norm_limit`, leaves weights, moments and target as they are;
    `healthy` is then 0. Every rank decides from the same sums, so all decide alike.
    """
    names = list(figures)
    summed = runtime.sum_over_ranks(torch.stack([figures[name] for name in names]))
    runtime.sum_gradients(model.parameters())
    norm = full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf")))
    limit = min(norm_limit, torch.finfo(norm.dtype).max)  # XLA compiles infinity in, but is handed a number
    healthy = torch.isfinite(norm) & torch.isfinite(summed).all() & (norm <= limit)
    optimizer.found_inf = (~healthy).float()  # type: ignore[attr-defined] # read by step()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    update_target(model.target_encoder, model.context_encoder, momentum, healthy)
    found = dict(zip(names, summed, strict=True))
    return {**found, "train/grad_norm": norm.detach(), "healthy": healthy.float()}
