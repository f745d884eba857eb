import pytest
import torch

from octjepa.model.blocks import Stack
from octjepa.model.positions import rope_tables


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_tokens_that_nobody_asks_for_are_left_out_of_the_last_block(recompute, rotary):
    torch.manual_seed(0)
    stack = Stack(24, 3, 2)
    stack.recompute = recompute
    x = torch.randn(2, 7, 24, requires_grad=True)
    tables = rope_tables(torch.rand(2, 7, 3) * 4, 12) if rotary else None
    counted = []
    stack[-1].mlp.register_forward_hook(lambda *call: counted.append(call[-1].shape[1]))
    some, whole = stack(x, tables, 3), stack(x, tables)[:, 3:]
    assert torch.allclose(some, whole, atol=1e-6)
    assert counted == [4, 7]
    parameters = [x, *stack.parameters()]
    ours, full = (torch.autograd.grad(y.square().sum(), parameters) for y in (some, whole))
    for one, other in zip(ours, full, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
