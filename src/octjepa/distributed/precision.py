"""Whether a device multiplies bf16 in hardware.

A CPU without AMX-BF16 or AVX512-BF16 emulates bf16 products: an update takes 2.6 times as long as in fp32 there (18
against 43 volumes/s), so such a machine trains with `train.precision=fp32`. For a CPU the instruction sets that torch
reports are confirmed by timing a product in both types; CUDA needs compute capability 8.0; a TPU always has it.
"""

from __future__ import annotations

import time

import torch

_SIDE = 1024  # of the square matrices whose product is timed
_SECONDS = 0.1  # for each of the two types


def gemm_gflops(device: torch.device, dtype: torch.dtype, seconds: float = _SECONDS) -> float:
    """Rate of square matrix products of `dtype` on `device`, in GFLOP/s, measured for about `seconds`."""
    a = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
    torch.mm(a, a)
    wait_for(device)
    start, products = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        torch.mm(a, a)
        wait_for(device)
        products += 1
    return products * 2 * _SIDE**3 / (time.perf_counter() - start) / 1e9


def bf16_in_hardware(device: torch.device) -> tuple[bool, str]:
    """Whether `device` computes bf16 products in hardware, and a phrase that says what was found."""
    if device.type == "xla":
        return True, "a TPU computes in bf16"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return major >= 8, f"CUDA compute capability {major}.{minor}"
    if device.type != "cpu":
        return False, f"bf16 is untried on {device.type}"
    capabilities = torch.cpu.get_capabilities()
    sets = [name for name in ("amx_bf16", "avx512_bf16") if capabilities.get(name)]
    if capabilities.get("architecture") == "x86_64" and not sets:
        return False, "the CPU has neither AMX-BF16 nor AVX512-BF16"
    bf16, fp32 = (gemm_gflops(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    found = (
        f"{', '.join(sets) or capabilities.get('architecture', 'CPU')}: {bf16:.0f} GFLOP/s in bf16, {fp32:.0f} in fp32"
    )
    return bf16 > fp32, found


def wait_for(device: torch.device) -> None:
    """Returns when the work given to an accelerator is done; a CPU is never behind."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
