"""One update: gradients of the whole batch in micro-batches that fit into memory, then the optimizer step.

Nothing here waits for the device. Whether the step is taken is decided on the device (by the optimizer's own
`found_inf`, made for loss scaling), and the metrics are read one update later (`octjepa.train.metrics`).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from octjepa.distributed.runtime import Runtime, full_tensor
from octjepa.errors import OctjepaError
from octjepa.model import VJEPA3D
from octjepa.objective.base import cosine
from octjepa.objective.loss import token_grid_positions, training_loss
from octjepa.recipe import Recipe
from octjepa.train.guards import check_detached
from octjepa.views.loader import Batch

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_cpu")
_log = logging.getLogger(__name__)
T = TypeVar("T")


def accumulate(
    model: VJEPA3D,
    batch: Batch,
    recipe: Recipe,
    runtime: Runtime,
    update: int = 0,
    micro_batch: int | None = None,
) -> dict[str, Tensor]:
    """Adds this rank's share of the gradient of the global batch's mean loss, in micro-batches; returns its metrics.

    Each micro-batch counts by its share of the global batch, and gradients are added in pairs, as two ranks add theirs:
    1x32, 2x16 and 4x8 give the same update. `micro_batch` overrides the recipe's.
    The metrics are scalars on the device, to be summed over the ranks: `train/loss`, its terms where there are several,
    `train/cosine`, and `train/loss_trivial`, the loss of predicting zero, where the objective has no constant for it.
    """
    size = len(batch.volume_ids)
    micro_size = min(micro_batch or recipe.machine.micro_batch or size, size)
    metrics: dict[str, Tensor] = {}
    pending: list[tuple[int, list[Tensor | None]]] = []  # (number of micro-batches, sum of their gradients)
    for start in range(0, size, micro_size):
        micro = batch.micro_batch(start, start + micro_size)
        share = len(micro.volume_ids) / (size * runtime.world_size)
        weight = share * runtime.world_size if runtime.sharded else share  # FSDP2 takes the mean over ranks
        inputs = micro.inputs(runtime.device)
        with runtime.autocast():
            prediction = model.predict(*inputs)
        check_detached(prediction)
        last = start + micro_size >= size
        # The ranks sum their gradients during the last backward pass, which adds those of the passes before in pairs.
        summed = last and runtime.open_gradients(_by_parameter(model, pending))
        grid_positions = token_grid_positions(micro.grid_index.to(runtime.device), recipe.grid)  # [b, t, 3]
        loss, terms = training_loss(recipe.objective, prediction, grid_positions, *inputs[3:], recipe.grid, update)
        (loss * weight).backward()
        values = {"train/loss": loss.detach(), "train/cosine": cosine(prediction.predicted.detach(), prediction.target)}
        if model.objective.trivial_loss is None:
            zero = torch.zeros_like(prediction.target)
            values["train/loss_trivial"] = model.objective.loss(zero, prediction.target)
        if len(terms) > 1:
            values |= {f"train/loss_{name}": value for name, value in terms.items()}
        for name, value in values.items():
            metrics[name] = metrics.get(name, torch.zeros((), device=runtime.device)) + value.float() * share
        if size > micro_size and not summed:
            _add_in_pairs(model, pending, last)
    return metrics


def _add_in_pairs(model: VJEPA3D, pending: list[tuple[int, list[Tensor | None]]], last: bool) -> None:
    """Moves the gradients of `model` to `pending` and adds sums of equal size; after the `last`, all, and puts them
    back. Pairwise sums make the result independent of the micro-batch."""
    parameters = list(model.parameters())
    pending.append((1, [parameter.grad for parameter in parameters]))
    while len(pending) > 1 and (last or pending[-1][0] == pending[-2][0]):
        count, gradients = pending.pop()
        count_before, sums = pending.pop()
        added = [a if b is None else b if a is None else a.add_(b) for a, b in zip(sums, gradients, strict=True)]
        pending.append((count + count_before, added))
    for parameter, gradient in zip(parameters, pending[0][1] if last else [None] * len(parameters), strict=True):
        parameter.grad = gradient


def _by_parameter(model: VJEPA3D, pending: list[tuple[int, list[Tensor | None]]]) -> list[dict[nn.Parameter, Tensor]]:
    """The sums of `pending`, each by the parameter whose gradient it is."""
    parameters = list(model.parameters())
    return [
        {parameter: total for parameter, total in zip(parameters, sums, strict=True) if total is not None}
        for _, sums in pending
    ]


def take_step(
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    metrics: dict[str, Tensor],
    runtime: Runtime,
    clip_norm: float | None,
    norm_limit: float,
) -> dict[str, Tensor]:
    """Sums gradients and metrics over ranks, clips, steps; returns the sums, `train/grad_norm` and `healthy`.

    A loss or norm that is not finite, or a norm above `norm_limit`, leaves weights and moments unchanged; `healthy`
    is then false, and the EMA target must not move either. Every rank decides from the same sums, so all decide alike.
    """
    names = list(metrics)
    summed = runtime.sum_over_ranks(torch.stack([metrics[name] for name in names]))
    runtime.sum_gradients(model.parameters())
    norm = full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf")))
    limit = min(norm_limit, torch.finfo(norm.dtype).max)  # XLA compiles infinity in, but is handed a number
    healthy = torch.isfinite(norm) & torch.isfinite(summed).all() & (norm <= limit)
    optimizer.found_inf = (~healthy).float()  # type: ignore[attr-defined] # read by step()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {**dict(zip(names, summed, strict=True)), "train/grad_norm": norm.detach(), "healthy": healthy}


class MicroBatcher:
    """Runs steps in micro-batches of `micro_batch` volumes, fewer after each `reduce_micro_batch`.

    The global batch stays as it is, so the run is the same but for rounding. With a regulariser it would be another
    objective: there `reduce_micro_batch` ends the run.
    """

    def __init__(self, recipe: Recipe, runtime: Runtime, micro_batch: int) -> None:
        self._recipe, self._runtime, self.micro_batch = recipe, runtime, micro_batch

    def try_step(self, model: nn.Module, step: Callable[[int], T], update: int) -> T | None:
        """What `step(micro_batch)` returns; None, and no gradients, where this rank ran out of memory.

        Raises OctjepaError where that happens to a sharded model.
        """
        try:
            return step(self.micro_batch)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self._runtime.sharded:  # the others already wait inside this rank's backward pass
                raise OctjepaError(
                    f"rank {self._runtime.rank} ran out of memory at update {update + 1}: lower machine.micro_batch "
                    f"(now {self.micro_batch}) and go on with --resume"
                ) from None
        model.zero_grad(set_to_none=True)
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        self._runtime.send_zero_gradients()  # the others wait in their backward pass; zeros need memory, too
        return None

    def reduce_micro_batch(self, model: nn.Module, update: int) -> None:
        """Halves the micro-batch on every rank after any of them ran out of memory.

        Raises OctjepaError where a single volume does not fit, or a regulariser forbids smaller micro-batches.
        """
        self._runtime.discard_gradients()
        model.zero_grad(set_to_none=True)
        if self.micro_batch == 1:
            raise OctjepaError(
                f"update {update + 1}: a single volume does not fit into memory. Use machine.recompute=true, fewer "
                "tokens (tokens.budget), a smaller model.size, or a device with more memory; octjepa plan says how much"
            )
        if self._recipe.objective.regulariser is not None:
            raise OctjepaError(
                f"update {update + 1}: {micro_batch_too_large(self._recipe, self.micro_batch, 'memory')}"
            )
        self.micro_batch //= 2
        _log.warning(
            "out of memory at update %d: every rank now takes %d volumes at once, and more often; the global batch "
            "stays %d. Put machine.micro_batch=%d into the recipe to start with that",
            update + 1, self.micro_batch, self._recipe.train.global_batch, self.micro_batch,
        )  # fmt: skip


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out: a class of its own on accelerators, a message on a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(sign in str(error).lower() for sign in _OUT_OF_MEMORY)
