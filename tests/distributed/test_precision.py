"""bf16 in hardware is found where it is, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octjepa.distributed import precision
from octjepa.distributed.precision import bf16_in_hardware, gemm_gflops

CPU = torch.device("cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, bf16_gflops: float, **capabilities: Any) -> None:
    """A CPU with these capabilities, on which fp32 products run at 100 GFLOP/s."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **capabilities})
    rates = {torch.bfloat16: bf16_gflops, torch.float32: 100.0}
    monkeypatch.setattr(precision, "gemm_gflops", lambda device, dtype: rates[dtype])


@pytest.mark.parametrize(
    ("capabilities", "bf16_gflops", "expected"),
    [
        ({}, 400.0, False),  # no instruction set: the product is not even tried
        ({"avx512_bf16": True}, 400.0, True),
        ({"amx_bf16": True}, 400.0, True),
        ({"amx_bf16": True}, 52.0, False),  # hidden by the hypervisor
        ({"architecture": "aarch64"}, 300.0, True),
        ({"architecture": "aarch64"}, 50.0, False),
    ],
)
def test_instruction_sets_are_confirmed_by_a_product(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any], bf16_gflops: float, expected: bool
) -> None:
    pretend(monkeypatch, bf16_gflops, **capabilities)
    in_hardware, reason = bf16_in_hardware(CPU)
    assert in_hardware == expected
    assert reason


def test_cuda_needs_compute_capability_8(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert bf16_in_hardware(torch.device("cuda"))[0] == expected


def test_the_rate_of_products_is_measured() -> None:
    assert gemm_gflops(CPU, torch.float32, seconds=0.01) > 0.1
