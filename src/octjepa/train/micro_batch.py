"""A micro-batch that fits: when one rank runs out of memory, all halve it and take the same batch again.

The global batch stays as it is, so the run is the same but for rounding. With a regulariser it would not be: there the
run ends.
"""

from __future__ import annotations

import gc
import logging

import torch

from octjepa.distributed.runtime import Runtime
from octjepa.errors import OctjepaError
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe
from octjepa.train.step import Figures, accumulate
from octjepa.views.loader import Batch

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "alloc_cpu")
_log = logging.getLogger(__name__)


class Fitting:
    """`micro` volumes at once, fewer after each `halve`."""

    def __init__(self, recipe: Recipe, runtime: Runtime, micro: int) -> None:
        self._recipe, self._runtime, self.micro = recipe, runtime, micro

    def try_batch(self, model: VJEPA3D, batch: Batch, update: int) -> Figures | None:
        """Gradients of this rank's share and its figures; None where memory ran out, with nothing left behind."""
        try:
            return accumulate(model, batch, self._recipe, self._runtime, update, self.micro)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self._runtime.sharded:  # the others already wait inside this rank's backward pass
                raise OctjepaError(
                    f"rank {self._runtime.rank} ran out of memory at update {update + 1}: lower machine.micro_batch "
                    f"(now {self.micro}) and go on with --resume"
                ) from None
        model.zero_grad(set_to_none=True)
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        return None

    def halve(self, model: VJEPA3D, update: int) -> None:
        """After any rank ran out of memory. Raises OctjepaError when one volume is already too much, or the batch must
        not be parted."""
        model.zero_grad(set_to_none=True)
        if self.micro == 1:
            raise OctjepaError(
                f"update {update + 1}: a single volume does not fit into memory. Use machine.recompute=true, fewer "
                "tokens (tokens.budget), a smaller model.size, or a device with more memory; octjepa plan says how much"
            )
        if self._recipe.objective.regulariser is not None:
            raise OctjepaError(f"update {update + 1}: {too_much(self._recipe, self.micro, 'memory')}")
        self.micro //= 2
        _log.warning(
            "out of memory at update %d: every rank now takes %d volumes at once, and more often; the global batch "
            "stays %d. Put machine.micro_batch=%d into the recipe to start with that",
            update + 1, self.micro, self._recipe.train.global_batch, self.micro,
        )  # fmt: skip


def too_much(recipe: Recipe, micro: int, where: str) -> str:
    """What is told of `micro` volumes that do not fit into `where`: what to do."""
    added = recipe.objective.regulariser
    if added is None:
        return f"{micro} volumes at once do not fit into {where}: lower machine.micro_batch"
    return (
        f"{micro} volumes at once do not fit into {where}, and objective.{added} looks at the spread within what it is "
        "given, so fewer at once would be another objective. Use machine.recompute=true or a device with more memory "
        f"(octjepa plan says how much), or another run: a smaller train.global_batch, or objective.{added}=0 (a meter)"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """torch names it by a class on accelerators, and by its message on a CPU."""
    named = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return named or any(sign in str(error).lower() for sign in _SIGNS)
