"""Whether an update in bf16 is faster on a device, the precision that `auto` chooses on it, and that of a whole run.

A CPU without AMX-BF16 or AVX512-BF16 emulates bf16 products: an update takes 2.4 times as long as in fp32 there (18
against 43 volumes/s), so `auto` is fp32 on such a machine. The instruction sets that torch reports for a CPU are
confirmed by timing a product in both types, for the casts of an update have to be paid for, too: where AVX512-BF16
multiplied at 0.9 times the rate of fp32, an update in bf16 took 1.5 times as long. CUDA needs compute capability 8.0;
a TPU always computes in bf16.

In a recipe `auto` becomes fp32 or bf16 before anything of it is hashed, compared or built. Rank 0 decides, and a run
that resumes keeps what it began with, so that all updates of a run are computed alike.
"""

from __future__ import annotations

import logging
import platform
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octjepa.recipe import Recipe

if TYPE_CHECKING:
    from octjepa.distributed.runtime import Runtime

AUTO = "auto"
_CPUINFO = Path("/proc/cpuinfo")
_SMALLEST, _LARGEST = 256, 4096  # sides of the square matrices that are multiplied
_LONG_SECONDS = 2e-3  # a product that takes so long is large enough to be timed
_SECONDS = 0.1  # for each of the two types
_LEAST_GAIN = 1.5  # of products in bf16 over fp32 on a CPU, below which an update does not become faster
_log = logging.getLogger(__name__)


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


def cpu_capabilities() -> dict[str, Any]:
    """The architecture and the instruction sets of this CPU by name, as torch reports them or, before it did, Linux."""
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    flags = re.search(r"^flags\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE) if _CPUINFO.is_file() else None
    return {"architecture": platform.machine(), **dict.fromkeys(flags[1].split() if flags else (), True)}


def bf16_is_faster(device: torch.device) -> tuple[bool, str]:
    """Whether an update in bf16 is faster on `device`, and a phrase that says what was found and measured."""
    if device.type == "xla":
        return True, "a TPU computes in bf16"
    if device.type not in ("cuda", "cpu"):
        return False, f"bf16 is untried on {device.type}"
    bf16, fp32 = measured_rates(device)
    rates = f"{bf16:.3g} GFLOP/s in bf16, {fp32:.3g} in fp32"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return major >= 8, f"CUDA compute capability {major}.{minor}: {rates}"
    capabilities = cpu_capabilities()
    sets = [name for name in ("amx_bf16", "avx512_bf16") if capabilities.get(name)]
    if capabilities.get("architecture") == "x86_64" and not sets:
        return False, f"the CPU has neither AMX-BF16 nor AVX512-BF16: {rates}"
    return bf16 >= _LEAST_GAIN * fp32, f"{', '.join(sets) or capabilities.get('architecture', 'CPU')}: {rates}"


def choose_precision(requested: str, device: torch.device) -> tuple[str, str]:
    """(`fp32` or `bf16`, why): `requested` itself or, where that is `auto`, what `device` computes fastest.

    The reason names the measured rates, but for fp32 where a recipe asks for it: nothing is measured then.
    """
    if requested == "fp32":
        return "fp32", "the recipe asks for it"
    faster, found = bf16_is_faster(device)
    if requested == AUTO:
        return ("bf16" if faster else "fp32"), found
    return requested, f"the recipe asks for it; {found}" + ("" if faster else ", so updates are slower than in fp32")


def wait_for(device: torch.device) -> None:
    """Returns when the work given to an accelerator is done; a CPU is never behind."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def agree_on_precision(requested: str, read_recorded: Callable[[], str | None], runtime: Runtime) -> str:
    """`fp32` or `bf16` for a run, the same on every rank, which `runtime` computes in from now on.

    `requested` is the recipe's; `read_recorded` is called on rank 0 and returns what a run that resumes began with,
    else None. Raises on every rank what it raises.
    """
    chosen: list[str] = []
    runtime.run_on_rank_zero(lambda: chosen.append(_choose(requested, read_recorded(), runtime)))
    runtime.precision = str(runtime.broadcast_object(chosen[0] if chosen else None))
    return runtime.precision


def _choose(requested: str, recorded: str | None, runtime: Runtime) -> str:
    """Chooses, and logs one line that says what was chosen and why."""
    if requested != AUTO or recorded is None:
        precision, reason = choose_precision(requested, runtime.device)
        slow = precision == "bf16" and not bf16_is_faster(runtime.device)[0]
        level = logging.WARNING if slow else logging.INFO
        _log.log(level, "precision %s on %s: %s", precision, runtime.device, reason)
        return precision
    if recorded == "bf16":
        faster, found = bf16_is_faster(runtime.device)
        if not faster:
            _log.warning(
                "precision bf16, in which this run began, is kept, though updates on %s take longer than in fp32 (%s). "
                "A new run would be in fp32", runtime.device, found,
            )  # fmt: skip
            return recorded
    _log.info("precision %s on %s, in which this run began", recorded, runtime.device)
    return recorded


def with_precision(recipe: Recipe, precision: str) -> Recipe:
    """The recipe with `train.precision` set."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})
