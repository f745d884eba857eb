"""The pretraining loss of a batch, in micro-batches: the forward pass, the objective, and the metrics of an update.

`octjepa.train.engine` takes the gradients and the optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octjepa.distributed.runtime import Runtime
from octjepa.model import VJEPA3D
from octjepa.objectives.base import cosine
from octjepa.objectives.loss import token_grid_positions, training_loss
from octjepa.recipe import Recipe
from octjepa.train.engine import MicroLoss, accumulate_gradients
from octjepa.train.guards import check_detached
from octjepa.views.loader import Batch


def accumulate(
    model: VJEPA3D,
    batch: Batch,
    recipe: Recipe,
    runtime: Runtime,
    update: int = 0,
    micro_batch: int | None = None,
) -> dict[str, Tensor]:
    """Adds this rank's share of the gradient of the global batch's mean loss, in micro-batches; returns its metrics.

    `micro_batch` overrides the recipe's; it does not change the update (`accumulate_gradients`).
    The metrics are scalars on the device, to be summed over the ranks: `train/loss`, its terms if there are several,
    `train/cosine`, and `train/loss_trivial`, the loss of predicting zero, where the objective has no constant for it.
    """
    size = len(batch.volume_ids)
    micro_size = min(micro_batch or recipe.machine.micro_batch or size, size)
    micro_batches = (batch.micro_batch(start, start + micro_size) for start in range(0, size, micro_size))
    whole = size * runtime.world_size
    return accumulate_gradients(
        model, (_loss(model, micro, len(micro.volume_ids) / whole, recipe, runtime, update) for micro in micro_batches)
    )


def _loss(model: VJEPA3D, micro: Batch, share: float, recipe: Recipe, runtime: Runtime, update: int) -> MicroLoss:
    """The loss and metrics of a micro-batch, weighted by its `share` of the global batch."""
    weight = share * runtime.world_size if runtime.sharded else share  # FSDP2 takes the mean over ranks
    inputs = micro.inputs(runtime.device)
    with runtime.autocast():
        prediction = model.predict(*inputs)
    check_detached(prediction)
    grid_positions = token_grid_positions(micro.grid_index.to(runtime.device), recipe.grid)  # [b, t, 3]
    loss, terms = training_loss(recipe.objective, prediction, grid_positions, *inputs[3:], recipe.grid, update)
    values = {"train/loss": loss.detach(), "train/cosine": cosine(prediction.predicted.detach(), prediction.target)}
    if model.objective.trivial_loss is None:
        zero = torch.zeros_like(prediction.target)
        values["train/loss_trivial"] = model.objective.loss(zero, prediction.target)
    if len(terms) > 1:
        values |= {f"train/loss_{name}": value for name, value in terms.items()}
    return MicroLoss(loss * weight, {name: value.float() * share for name, value in values.items()})


@dataclass(frozen=True)
class PretrainingMemory:
    """The message of a pretraining when memory runs out (`octjepa.train.engine.MemoryAdvice`)."""

    recipe: Recipe

    def out_of_memory(self, micro_batch: int) -> str | None:
        """A single volume cannot be divided, and a regulariser needs the whole batch at once."""
        if micro_batch == 1:
            return (
                "a single volume does not fit into memory. Use machine.recompute=true, fewer tokens (tokens.budget), a "
                "smaller model.size, or a device with more memory; octjepa plan says how much"
            )
        regulated = self.recipe.objective.regulariser is not None
        return micro_batch_too_large(self.recipe, micro_batch, "memory") if regulated else None

    def halved(self, micro_batch: int) -> str:
        """The value for the recipe."""
        return (
            f"every rank now takes {micro_batch} volumes at once, and more often; the global batch "
            f"stays {self.recipe.train.global_batch}. Put machine.micro_batch={micro_batch} into the recipe to start "
            "with that"
        )


def micro_batch_too_large(recipe: Recipe, micro_batch: int, where: str) -> str:
    """The message for `micro_batch` volumes that do not fit into `where`: what to change."""
    regulariser = recipe.objective.regulariser
    if regulariser is None:
        return f"{micro_batch} volumes at once do not fit into {where}: lower machine.micro_batch"
    return (
        f"{micro_batch} volumes at once do not fit into {where}, and objective.{regulariser} looks at the spread "
        "within what it is given, so fewer at once would be another objective. Use machine.recompute=true or a device "
        f"with more memory (octjepa plan says how much), or another run: a smaller train.global_batch, or "
        f"objective.{regulariser}=0 (a meter)"
    )
