"""The pretraining loss of a batch, in micro-batches: the forward pass, the objective, and the metrics of an update.

`octjepa.train.engine` takes the gradients and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from octjepa.distributed.runtime import Runtime
from octjepa.errors import is_out_of_memory
from octjepa.model import VJEPA3D
from octjepa.objectives.base import cosine
from octjepa.objectives.loss import token_grid_positions, training_loss
from octjepa.objectives.regularisers import Total, unchanged
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

    Arguments and metrics as in `batch_losses`; the size of the micro-batches does not change the update
    (`accumulate_gradients`).
    """
    return accumulate_gradients(model, batch_losses(model, batch, recipe, runtime, update, micro_batch))


def batch_losses(
    model: VJEPA3D,
    batch: Batch,
    recipe: Recipe,
    runtime: Runtime,
    update: int = 0,
    micro_batch: int | None = None,
) -> Iterator[MicroLoss]:
    """This rank's share of the global batch's mean loss, in micro-batches. Take the gradient of each before the next.

    `micro_batch` overrides the recipe's. The metrics are scalars on the device, to be summed over the ranks:
    `train/loss`, its terms if there are several, `train/cosine`, and `train/loss_trivial`, the loss of predicting
    zero, where the objective has no constant for it. If a regulariser is a function of sums over a divided batch,
    micro-batches cost a second forward pass.
    """
    size = len(batch.volume_ids)
    micro_size = min(micro_batch or recipe.machine.micro_batch or size, size)
    starts = range(0, size, micro_size)
    shares = [min(micro_size, size - start) / (size * runtime.world_size) for start in starts]

    def losses(sums: BatchSums | None) -> Iterator[MicroLoss]:
        for start, share in zip(starts, shares, strict=True):
            total = unchanged if sums is None else sums.total(share)
            yield _loss(model, batch.micro_batch(start, start + micro_size), share, recipe, runtime, update, total)

    regularised = recipe.objective.regularised_sums
    if regularised == 0 or (runtime.world_size == 1 and len(starts) == 1):
        yield from losses(None)
        return
    sums = BatchSums(runtime, regularised, len(starts))
    with sums.shared_failure():
        if len(starts) > 1:
            with torch.no_grad():
                for _ in losses(sums):
                    pass
            sums.close_first_pass()
        yield from losses(sums)


class _OtherRankOutOfMemory(MemoryError):
    """Another rank ran out of memory, so this one must not wait for its sums."""


class BatchSums:
    """Sums over the global batch, in place of those over a part of it, for a loss that is a function of such sums.

    The value of `total(share)(sums)` is the sum over all micro-batches of all ranks. Its gradient reaches only the
    part. It is divided by `share`, because the part's loss is multiplied by `share`. So the gradients of all parts,
    which the engine adds over micro-batches and ranks, are together the gradient of the loss of the undivided batch.

    A rank with a single micro-batch adds its sums to those of the others within its forward pass. Several micro-batches
    need a first pass that only collects the sums.

    `terms`: calls of a total for each micro-batch. `parts`: micro-batches of this rank.
    """

    def __init__(self, runtime: Runtime, terms: int, parts: int) -> None:
        self._runtime, self._terms, self._collecting = runtime, terms, parts > 1
        self._sums: list[Tensor] = []  # by term
        self._calls = self._exchanges = 0

    def total(self, share: float) -> Total:
        """The function that replaces the sums of a part with `share` of the global batch."""

        def replace(part: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
            term = self._calls % self._terms
            self._calls += 1
            detached = part.detach()
            if self._collecting:
                if term < len(self._sums):
                    self._sums[term] += detached
                else:
                    self._sums.append(detached.clone())
                return part
            if self._exchanges < self._terms:
                self._sums.append(self._exchange(detached.clone()))
            return self._sums[term] + (part - detached) / share

        return replace

    def close_first_pass(self) -> None:
        """Adds the sums of all ranks after the first of two passes. Raises as `_exchange`."""
        self._sums = [self._exchange(sums) for sums in self._sums]
        self._collecting, self._calls = False, 0

    def _exchange(self, sums: Tensor) -> Tensor:
        """The sums over the ranks. Raises MemoryError if another rank ran out of memory before this exchange."""
        self._exchanges += 1
        if self._runtime.world_size == 1:
            return sums
        if self._runtime.sum_numbers([0])[0]:
            raise _OtherRankOutOfMemory
        return self._runtime.sum_over_ranks(sums)

    @contextmanager
    def shared_failure(self) -> Iterator[None]:
        """Tells the other ranks when this one runs out of memory while they wait for its sums."""
        try:
            yield
        except _OtherRankOutOfMemory:
            raise
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error) and self._exchanges < self._terms:
                self._runtime.sum_numbers([1])
            raise


def _loss(
    model: VJEPA3D, micro: Batch, share: float, recipe: Recipe, runtime: Runtime, update: int, total: Total
) -> MicroLoss:
    """The loss and metrics of a micro-batch, weighted by its `share` of the global batch."""
    weight = share * runtime.world_size if runtime.sharded else share  # FSDP2 takes the mean over ranks
    inputs = micro.inputs(runtime.device)
    with runtime.autocast():
        prediction = model.predict(*inputs)
    check_detached(prediction)
    grid_positions = token_grid_positions(micro.grid_index.to(runtime.device), recipe.grid)  # [b, t, 3]
    loss, terms = training_loss(recipe.objective, prediction, grid_positions, *inputs[3:], recipe.grid, update, total)
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
        f"{micro_batch} volumes at once do not fit into {where}, and objective.{regulariser} needs all of them at "
        "once. Use machine.recompute=true or a device with more memory (octjepa plan says how much), or start another "
        f"run with a smaller train.global_batch or with objective.{regulariser}=0 (measured, not trained)"
    )
