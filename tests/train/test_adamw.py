"""octjepa's AdamW is torch's, without torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from octjepa.distributed.adamw import AdamW

_STEPS = """
import sys, torch
from octjepa.distributed.adamw import AdamW
weight = torch.nn.Parameter(torch.ones(3))
optimizer = AdamW([weight], fused=True)
for _ in range(2):
    optimizer.zero_grad(set_to_none=True)
    weight.square().sum().backward()
    optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
print(*(name for name in ("torch._dynamo", "sympy") if name in sys.modules))
"""


def trained(optimizer_class: type[torch.optim.AdamW], **settings: Any) -> tuple[Tensor, dict[str, Any]]:
    """Weights and state after five updates, one of which is skipped where the optimizer can skip."""
    torch.manual_seed(7)
    weight = torch.nn.Parameter(torch.randn(5, 4))
    optimizer = optimizer_class([{"params": [weight], "weight_decay": 0.1}], lr=0.03, betas=(0.9, 0.95), **settings)
    for update in range(5):
        optimizer.zero_grad(set_to_none=True)
        (weight.cos().sum() * (update + 1)).backward()
        if settings.get("fused"):
            optimizer.found_inf = torch.tensor(float(update == 2))
        optimizer.step()
        again = optimizer_class([{"params": [weight]}], **settings)
        again.load_state_dict(optimizer.state_dict())
        optimizer = again
    return weight.detach(), optimizer.state_dict()


@pytest.mark.parametrize("fused", [True, False])
def test_it_computes_what_torchs_own_does_to_the_bit(fused: bool) -> None:
    (ours, state), (theirs, expected) = (trained(one, fused=fused) for one in (AdamW, torch.optim.AdamW))
    assert torch.equal(ours, theirs)
    assert state["param_groups"] == expected["param_groups"]
    for name, value in expected["state"][0].items():
        assert torch.equal(state["state"][0][name], value)


def test_a_step_needs_no_gradient_of_itself() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([weight])
    weight.sum().backward()
    with torch.enable_grad():
        optimizer.step()
    assert weight.is_leaf
    assert weight.grad_fn is None


@pytest.mark.slow
def test_it_loads_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", _STEPS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
