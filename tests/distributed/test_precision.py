"""bf16 is chosen where the device has it in hardware, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octjepa.distributed import precision
from octjepa.distributed.precision import gemm_gflops, resolve_precision

CPU = torch.device("cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, bf16_gflops: float, **capabilities: Any) -> None:
    """A CPU with these capabilities, on which fp32 products run at 100 GFLOP/s."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **capabilities})
    rates = {torch.bfloat16: bf16_gflops, torch.float32: 100.0}
    monkeypatch.setattr(precision, "gemm_gflops", lambda device, dtype: rates[dtype])


@pytest.mark.parametrize(
    ("capabilities", "bf16_gflops", "expected"),
    [
        ({}, 400.0, "fp32"),  # no instruction set: the product is not even tried
        ({"avx512_bf16": True}, 400.0, "bf16"),
        ({"amx_bf16": True}, 400.0, "bf16"),
        ({"amx_bf16": True}, 52.0, "fp32"),  # hidden by the hypervisor
        ({"architecture": "aarch64"}, 300.0, "bf16"),
        ({"architecture": "aarch64"}, 50.0, "fp32"),
    ],
)
def test_auto_takes_what_is_fast(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any], bf16_gflops: float, expected: str
) -> None:
    pretend(monkeypatch, bf16_gflops, **capabilities)
    chosen, reason = resolve_precision("auto", CPU)
    assert chosen == expected
    assert reason


def test_an_explicit_precision_stays_and_a_slow_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 400.0)
    assert resolve_precision("fp32", CPU)[0] == "fp32"
    chosen, reason = resolve_precision("bf16", CPU)
    assert chosen == "bf16"
    assert "slow" in reason


def test_cuda_needs_compute_capability_8(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in (((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert resolve_precision("auto", torch.device("cuda"))[0] == expected


def test_the_rate_of_products_is_measured() -> None:
    assert gemm_gflops(CPU, torch.float32, seconds=0.01) > 0.1
