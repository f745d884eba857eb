"""The parts of torch_xla that octjepa uses: a TPU's device, when its graph is run, sums over replicas, peak memory.

torch_xla records what is computed and runs it when `sync` is called or a value is read. A graph is compiled once for
its shapes. So an update has fixed shapes and ends in `sync`, and nothing is read in between: a value that is read early
runs the graph that leads to it, and `sync` runs that part again. Numbers such as the learning rate are
inputs of the graph.

torch_xla is used where PJRT_DEVICE, its own variable, says TPU or CPU; it needs torch 2.9.0, hence a separate
environment (docs/launch.md). `device` comes before the first backward pass, even one on the CPU: torch counts devices
then.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from octjepa.errors import UsageError

_PLATFORMS = ("TPU", "CPU")


def is_requested() -> bool:
    """Whether PJRT_DEVICE asks for torch_xla. Raises UsageError if it names neither a TPU nor the CPU."""
    platform = os.environ.get("PJRT_DEVICE", "")
    if platform and platform not in _PLATFORMS:
        raise UsageError(
            f"PJRT_DEVICE={platform}: octjepa uses torch_xla only for {' or '.join(_PLATFORMS)}. Unset it elsewhere"
        )
    return bool(platform)


def initialize(local_rank: int, local_processes: int) -> None:
    """Takes one device of this host for this process, of `local_processes` that torchrun started. Before `device`.

    On a TPU the processes of all hosts find each other by the machine's metadata.
    """
    _library("torch_xla._internal.pjrt").initialize_multiprocess(local_rank, local_processes)


def device() -> torch.device:
    """This replica's device. Raises UsageError where torch_xla is not installed."""
    result: torch.device = _library("torch_xla").device()
    return result


def world_size() -> int:
    """Replicas that `sum_over_ranks` sums over, on all hosts: has to be the launcher's number of processes."""
    return int(_library("torch_xla.runtime").world_size())


def sync() -> None:
    """Sends all that was recorded to the device and returns; the recording starts again."""
    _library("torch_xla").sync()


def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Replaces each tensor by its sum over all replicas, which all call this; recorded like any other operation."""
    if world_size() > 1:
        _library("torch_xla.core.xla_model").all_reduce("sum", list(tensors))


def checkpoint(block: Callable[..., Tensor], *arguments: object) -> Tensor:
    """`block(*arguments)`, whose activations are recomputed in the backward pass.

    torch's own checkpointing does not support XLA, which would merge the second computation with the first.
    """
    result: Tensor = _library("torch_xla.utils.checkpoint").checkpoint(block, *arguments, preserve_rng_state=False)
    return result


def adamw(groups: list[dict[str, Any]], rate: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW that obeys its attribute `found_inf`, as torch's fused one does: if that is 1, nothing moves.

    Its moments exist from the start, so that the first update has the graph of all others.
    """

    class AdamW(_library("torch_xla.amp.syncfree").AdamW):  # type: ignore[misc]
        _step_supports_amp_scaling = True  # torch's mark of an optimizer that obeys `found_inf`

        def step(self, closure: None = None) -> None:
            _complete(self)
            found_inf = getattr(self, "found_inf", None)
            super().step(found_inf=torch.zeros((), device=device()) if found_inf is None else found_inf)

    optimizer: torch.optim.AdamW = AdamW(groups, lr=rate, betas=betas)
    _complete(optimizer)
    sync()
    return optimizer


def _complete(optimizer: torch.optim.AdamW) -> None:
    """Adds what is missing of moments: all of them at first, after a checkpoint those that none holds."""
    for parameter in (weight for group in optimizer.param_groups for weight in group["params"]):
        state = optimizer.state[parameter]
        if "max_exp_avg_sq" not in state:  # of AMSGrad; it has to be there
            state["max_exp_avg_sq"] = torch.empty(0, device=parameter.device)
            state.setdefault("step", torch.zeros((), device=parameter.device))
            state.setdefault("exp_avg", torch.zeros_like(parameter))
            state.setdefault("exp_avg_sq", torch.zeros_like(parameter))


def memory() -> dict[str, int]:
    """The most bytes that the device used, if it counts them: XLA's CPU device does not."""
    with suppress(RuntimeError):  # UNIMPLEMENTED
        info = _library("torch_xla.core.xla_model").get_memory_info(device())
        return {"memory/device_bytes": int(info["peak_bytes_used"])}
    return {}


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise UsageError(
            f"PJRT_DEVICE={os.environ.get('PJRT_DEVICE', '')} asks for torch_xla, which is not installed here: it has "
            "a separate environment (docs/launch.md). To train without it, unset PJRT_DEVICE"
        ) from None
