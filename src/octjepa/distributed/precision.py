"""Whether a device multiplies bf16 in hardware, and the precision that `auto` chooses on it.

A CPU without AMX-BF16 or AVX512-BF16 emulates bf16 products: an update takes 2.6 times as long as in fp32 there (18
against 43 volumes/s), so `auto` is fp32 on such a machine. For a CPU the instruction sets that torch reports are
confirmed by timing a product in both types; CUDA needs compute capability 8.0; a TPU always has it.
"""

from __future__ import annotations

import time
from functools import cache

import torch

AUTO = "auto"
_SMALLEST, _LARGEST = 256, 4096  # sides of the square matrices that are multiplied
_LONG_SECONDS = 2e-3  # a product that takes so long is large enough to be timed
_SECONDS = 0.1  # for each of the two types


def gemm_gflops(device: torch.device, dtype: torch.dtype, seconds: float = _SECONDS) -> float:
    """Rate of square matrix products of `dtype` on `device`, in GFLOP/s, measured for about `seconds`.

    The sides double from 256 until a product takes 2 ms: an emulated type is not waited for, a fast device not idle.
    """
    side = _SMALLEST
    while _product_seconds(device, dtype, side, 0.0) < _LONG_SECONDS and side < _LARGEST:
        side *= 2
    return 2 * side**3 / _product_seconds(device, dtype, side, seconds) / 1e9


def _product_seconds(device: torch.device, dtype: torch.dtype, side: int, seconds: float) -> float:
    """Mean time of one product, over `seconds` and at least one, after one that is not counted."""
    a = torch.ones(side, side, dtype=dtype, device=device)
    torch.mm(a, a)
    wait_for(device)
    start, products = time.perf_counter(), 0
    while not products or time.perf_counter() - start < seconds:
        torch.mm(a, a)
        wait_for(device)
        products += 1
    return (time.perf_counter() - start) / products


@cache
def measured_rates(device: torch.device) -> tuple[float, float]:
    """Rates of products on `device` in bf16 and in fp32, in GFLOP/s; measured once in a process, in 0.2 s."""
    return gemm_gflops(device, torch.bfloat16), gemm_gflops(device, torch.float32)


def bf16_in_hardware(device: torch.device) -> tuple[bool, str]:
    """Whether `device` computes bf16 products in hardware, and a phrase that says what was found and measured."""
    if device.type == "xla":
        return True, "a TPU computes in bf16"
    if device.type not in ("cuda", "cpu"):
        return False, f"bf16 is untried on {device.type}"
    bf16, fp32 = measured_rates(device)
    rates = f"{bf16:.3g} GFLOP/s in bf16, {fp32:.3g} in fp32"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return major >= 8, f"CUDA compute capability {major}.{minor}: {rates}"
    capabilities = torch.cpu.get_capabilities()
    sets = [name for name in ("amx_bf16", "avx512_bf16") if capabilities.get(name)]
    if capabilities.get("architecture") == "x86_64" and not sets:
        return False, f"the CPU has neither AMX-BF16 nor AVX512-BF16: {rates}"
    return bf16 > fp32, f"{', '.join(sets) or capabilities.get('architecture', 'CPU')}: {rates}"


def choose_precision(requested: str, device: torch.device) -> tuple[str, str]:
    """(`fp32` or `bf16`, why): `requested` itself or, where that is `auto`, what `device` computes fastest.

    The reason names the measured rates, but for fp32 where a recipe asks for it: nothing is measured then.
    """
    if requested == "fp32":
        return "fp32", "the recipe asks for it"
    in_hardware, found = bf16_in_hardware(device)
    if requested == AUTO:
        return ("bf16" if in_hardware else "fp32"), found
    return requested, f"the recipe asks for it; {found}" + ("" if in_hardware else ", so it is emulated and slower")


def wait_for(device: torch.device) -> None:
    """Returns when the work given to an accelerator is done; a CPU is never behind."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
