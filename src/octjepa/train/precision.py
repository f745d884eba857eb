"""The precision of a run: `auto` becomes fp32 or bf16 in the recipe before anything of it is hashed, compared or built.

Rank 0 decides, and a run that resumes keeps what it began with, so that all updates of a run are computed alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from octjepa.distributed.precision import AUTO, bf16_in_hardware, choose_precision
from octjepa.distributed.runtime import Runtime
from octjepa.recipe import Recipe

_log = logging.getLogger(__name__)


def agree_on_precision(requested: str, read_recorded: Callable[[], str | None], runtime: Runtime) -> str:
    """`fp32` or `bf16` for a run, the same on every rank, which `runtime` computes in from now on.

    `requested` is the recipe's; `read_recorded` is called on rank 0 and returns what a run that resumes began with,
    else None. Raises on every rank what it raises.
    """
    chosen: list[str] = []
    runtime.run_on_rank_zero(lambda: chosen.append(_choose(requested, read_recorded(), runtime)))
    runtime.precision = str(runtime.broadcast_object(chosen[0] if chosen else None))
    return runtime.precision


def _choose(requested: str, recorded: str | None, runtime: Runtime) -> str:
    """Chooses, and logs one line that says what was chosen and why."""
    if requested != AUTO or recorded is None:
        precision, reason = choose_precision(requested, runtime.device)
        slow = precision == "bf16" and not bf16_in_hardware(runtime.device)[0]
        level = logging.WARNING if slow else logging.INFO
        _log.log(level, "precision %s on %s: %s", precision, runtime.device, reason)
        return precision
    if recorded == "bf16":
        in_hardware, found = bf16_in_hardware(runtime.device)
        if not in_hardware:
            _log.warning(
                "precision bf16, in which this run began, is kept, though %s has it not in hardware (%s): updates take "
                "longer here. A new run would be in fp32", runtime.device, found,
            )  # fmt: skip
            return recorded
    _log.info("precision %s on %s, in which this run began", recorded, runtime.device)
    return recorded


def with_precision(recipe: Recipe, precision: str) -> Recipe:
    """The recipe with `train.precision` set."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})
