"""torch's AdamW without the import of torch's compiler.

torch wraps the methods of its optimizers for `torch.compile`, and the first call of one imports `torch._dynamo`: 5 CPU
seconds, as much as importing torch and octjepa (torch 2.13, measured 2026-11-27). octjepa compiles no optimizer, so
this class calls the unwrapped methods. They compute the same values as torch's own, bit for bit.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch


class AdamW(torch.optim.AdamW):
    """As `torch.optim.AdamW`."""

    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As `torch.optim.AdamW.step`."""
        return _step(self, closure)


_step = unwrap(torch.optim.AdamW.step)
