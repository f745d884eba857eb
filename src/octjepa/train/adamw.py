"""torch's AdamW without the import of torch's compiler.

torch wraps the methods of its optimizers for `torch.compile`, and the first call of one imports `torch._dynamo`, which
is a third of the time to a run's first update (lab/LOG.md, 2026-11-25). No optimizer is compiled here, so its methods
are called as they were written; what they compute is torch's own to the last bit.
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
