"""Gradients are summed in buckets while the backward pass goes on, in one order on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from octjepa.config import load_recipe
from octjepa.distributed.overlap import GradientBuckets, split_into_buckets
from octjepa.model import VJEPA3D


class Doubled:
    """A collective as if another rank had the same tensor; `tensors` in the order in which they were sent."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor, async_op: bool) -> Doubled:
        assert async_op
        self.tensors.append(tensor.clone())
        tensor.mul_(2)
        return self

    def wait(self) -> bool:
        return True


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Doubled:
    doubled = Doubled()
    monkeypatch.setattr(dist, "all_reduce", doubled)
    return doubled


def network() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])


def test_each_bucket_is_sent_as_soon_as_it_is_whole(sent: Doubled) -> None:
    model, counts = network(), []
    buckets = GradientBuckets(model.parameters(), lambda call: call(), bucket_bytes=1)  # one for each parameter
    model[0].weight.register_hook(lambda _: counts.append(len(sent.tensors)))
    buckets.open()
    model(torch.ones(2, 4)).sum().backward()
    assert counts[0] >= 4  # the layers above were on their way before the first layer had its gradient
    before = [parameter.grad.clone() for parameter in model.parameters()]
    buckets.finish()
    assert len(sent.tensors) == 6
    for one, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(parameter.grad, 2 * one)


def test_a_pass_that_ended_early_sends_zeros_for_the_rest_in_the_same_order(sent: Doubled) -> None:
    model = network()
    buckets = GradientBuckets(model.parameters(), lambda call: call(), bucket_bytes=1)

    def out_of_memory(_: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    model[1].weight.register_hook(out_of_memory)
    buckets.open()
    with pytest.raises(RuntimeError, match="out of memory"):
        model(torch.ones(2, 4)).sum().backward()
    done = len(sent.tensors)
    assert 0 < done < 6
    buckets.discard()
    assert [tensor.numel() for tensor in sent.tensors] == [4, 16] * 3
    assert not any(tensor.any() for tensor in sent.tensors[done:])
    assert not buckets.is_open


def test_a_parameter_without_a_gradient_keeps_none_and_holds_nobody_up(sent: Doubled) -> None:
    model = network()
    buckets = GradientBuckets(model.parameters(), lambda call: call(), bucket_bytes=100)
    buckets.open()
    model[2](torch.ones(2, 4)).sum().backward()
    buckets.finish()
    assert sum(tensor.numel() for tensor in sent.tensors) == 60
    assert model[0].weight.grad is None
    assert torch.equal(model[2].bias.grad, torch.full((4,), 4.0))


def test_sums_of_earlier_micro_batches_are_added_before_a_bucket_is_sent(sent: Doubled) -> None:
    model = network()
    buckets = GradientBuckets(model.parameters(), lambda call: call(), bucket_bytes=1)
    first, second = (
        {parameter: torch.full_like(parameter, value) for parameter in model.parameters()} for value in (1e8, 1.0)
    )
    absent = model[0].bias
    buckets.open([first, second])
    model[2](torch.ones(2, 4)).sum().backward()  # the layers below have earlier gradients alone
    assert torch.equal(sent.tensors[0], torch.full((4,), 1e8 + (1.0 + 2.0)))  # from the last to the first
    buckets.finish()
    assert torch.equal(absent.grad, torch.full((4,), 2 * (1e8 + 1.0)))
    assert first[absent].data_ptr() == absent.grad.data_ptr()  # in place of the first sum


def test_a_rank_that_never_began_its_last_pass_sends_zeros_for_all(sent: Doubled) -> None:
    buckets = GradientBuckets(network().parameters(), lambda call: call(), bucket_bytes=1)
    buckets.send_zeros()
    assert [tensor.numel() for tensor in sent.tensors] == [4, 16] * 3
    assert not any(tensor.any() for tensor in sent.tensors)
    buckets.discard()  # of a pass that has ended
    assert len(sent.tensors) == 6


@pytest.mark.parametrize(("recipe", "count"), [("tiny_cpu", 7), ("tiny_cpu_vjepa", 7), ("one_gpu", 7)])
def test_an_eighth_of_the_gradients_at_least_makes_eight_buckets_at_most(recipe: str, count: int) -> None:
    with torch.device("meta"):
        model = VJEPA3D.from_recipe(load_recipe(recipe))
    assert len(split_into_buckets(model.parameters())) == count


def test_outside_an_update_nothing_is_sent(sent: Doubled) -> None:
    model = network()
    buckets = GradientBuckets(model.parameters(), lambda call: call())
    model(torch.ones(2, 4)).sum().backward()
    buckets.discard()
    assert sent.tensors == []
