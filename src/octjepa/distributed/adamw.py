"""AdamW for every device, and how an optimizer skips an update whose gradient is not finite.

On an accelerator the decision to skip an update is a tensor on the device. An optimizer that obeys its attribute
`found_inf` skips the update there, so that the host does not wait for the tensor. torch's fused optimizers and that of
torch_xla do; for all others the host has to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import unwrap
from typing import Any

import torch

from octjepa.distributed import xla


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the import of torch's compiler.

    torch wraps the methods of its optimizers for `torch.compile`, and the first call of one imports `torch._dynamo`: 5
    CPU seconds, as much as importing torch and octjepa (torch 2.13, measured 2026-11-27). octjepa compiles no
    optimizer, so this class calls the unwrapped methods. They compute the same values as torch's own, bit for bit.
    """

    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As `torch.optim.AdamW.step`."""
        return _step(self, closure)


_step = unwrap(torch.optim.AdamW.step)


def fused_adamw(
    groups: Sequence[Any], device: torch.device, rate: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """AdamW that skips updates on the device, whichever device that is."""
    if device.type == "xla":
        return xla.adamw(list(groups), rate, betas)
    return AdamW(groups, lr=rate, betas=betas, fused=True)


def adamw(groups: Iterable[Any], device: torch.device, **settings: Any) -> torch.optim.AdamW:
    """AdamW that skips updates on the device if `device` is an accelerator that the host would wait for.

    On a CPU it is the plain one: the fused one rounds otherwise.
    """
    return AdamW(groups, fused=device.type not in ("cpu", "xla"), **settings)


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer skips an update on the device. Such an optimizer also counts its steps there."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
