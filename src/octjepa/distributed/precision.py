"""Whether an update in bf16 is faster on a device, the precision that `auto` chooses on it, and that of a whole run.

An x86 CPU without AMX-BF16 or AVX512-BF16 emulates bf16 products: an update took 2 to 12 times as long as in fp32 on
such machines (docs/performance), so `auto` is fp32 there. The instruction sets of a CPU are
confirmed by timing a product in both types, because the casts of an update take time as well: where AVX512-BF16
multiplied at 0.9 times the rate of fp32, an update in bf16 took 1.5 times as long. On other CPUs, such as those of ARM,
only the products decide. CUDA needs compute capability 8.0; a TPU always computes in bf16.

In a recipe `auto` becomes fp32 or bf16 before anything of it is hashed, compared or built. Rank 0 decides, and a run
that resumes keeps what it began with, so that all updates of a run are computed alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from octjepa.machine import processor
from octjepa.recipe import Recipe

if TYPE_CHECKING:
    from octjepa.distributed.runtime import Runtime

AUTO = "auto"
_SMALLEST, _LARGEST = 512, 4096  # sides of the square matrices that are multiplied
_LONG_SECONDS = 1e-3  # a product that takes so long can be timed, and is often over before it is interrupted
_SECONDS = 0.1  # for each type
_TRIES = 3  # products of a side before the next
_ENOUGH, _FEWEST = 10, 2  # products of a type, of which the fastest should not be interrupted; and of one that is slow
_PATIENCE = 4  # times `_SECONDS`: no type is measured for longer, except for its fewest products
_LEAST_GAIN = 1.5  # of products in bf16 over fp32 on a CPU, below which an update does not become faster
_log = logging.getLogger(__name__)


def gemm_gflops(device: torch.device, *dtypes: torch.dtype, seconds: float = _SECONDS) -> list[float]:
    """Rates of square matrix products of each of `dtypes` on `device`, in GFLOP/s, measured for about `seconds` each.

    A rate is that of the fastest product, and the types take turns: other work on the machine, which interrupts some
    products, changes neither a rate nor which type is faster. The sides double from 512 until a product takes 1 ms, so
    that a fast device is not idle. Every type has ten products or more; an emulated one, whose products may take long,
    as many as end within four times `seconds`, and two at least.
    """
    turns = zip_longest(*(_rates_of_products(device, dtype, seconds) for dtype in dtypes), fillvalue=0.0)
    return [max(rates) for rates in zip(*turns, strict=True)]


def _rates_of_products(device: torch.device, dtype: torch.dtype, seconds: float) -> Iterator[float]:
    """The rate of one product after the other, until there are enough."""
    side, spent, products, times = _SMALLEST, 0.0, 0, list[float]()
    while products < _FEWEST or (spent < _PATIENCE * seconds and (spent < seconds or products < _ENOUGH)):
        if not times:
            matrix = torch.ones(side, side, dtype=dtype, device=device)
        times.append(_product_seconds(matrix))
        yield 2 * side**3 / times[-1] / 1e9
        spent, products = spent + times[-1], products + 1
        if len(times) == _TRIES and min(times) < _LONG_SECONDS and side < _LARGEST:
            side, times = 2 * side, []


def _product_seconds(matrix: Float[Tensor, "n n"]) -> float:
    """Seconds of the product of a matrix with itself."""
    start = time.perf_counter()
    torch.mm(matrix, matrix)
    wait_for(matrix.device)
    return time.perf_counter() - start


@cache
def measured_rates(device: torch.device) -> tuple[float, float]:
    """Rates of products on `device` in bf16 and in fp32, in GFLOP/s; measured once in a process, in 0.2 to 0.3 s."""
    bf16, fp32 = gemm_gflops(device, torch.bfloat16, torch.float32)
    return bf16, fp32


def bf16_is_faster(device: torch.device) -> tuple[bool, str]:
    """Whether an update in bf16 is faster on `device`, and a phrase that says what was found and measured."""
    if device.type == "xla":
        return True, "a TPU computes in bf16"
    if device.type not in ("cuda", "cpu"):
        return False, f"bf16 is untried on {device.type}"
    bf16, fp32 = measured_rates(device)
    rates = f"{_three_digits(bf16)} GFLOP/s in bf16, {_three_digits(fp32)} in fp32"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return major >= 8, f"CUDA compute capability {major}.{minor}: {rates}"
    cpu = processor()
    if cpu.architecture == "x86_64" and not cpu.bf16_sets:
        return False, f"the CPU has neither AMX-BF16 nor AVX512-BF16: {rates}"
    return bf16 >= _LEAST_GAIN * fp32, f"{', '.join(cpu.bf16_sets) or cpu.architecture or 'CPU'}: {rates}"


@cache
def computes_in_bf16(device: torch.device) -> bool:
    """Whether `device` has instructions for bf16 products.

    Nothing is measured, unlike for `auto`, so that inference gives the same result every time on one machine.
    """
    if device.type == "cpu":
        return bool(processor().bf16_sets)
    return device.type == "xla" or (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8)


def inference_autocast(device: torch.device) -> torch.autocast:
    """The context of a network that only reads: bf16 products where `device` has them, else plain fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=computes_in_bf16(device))


def _three_digits(rate: float) -> str:
    return f"{float(f'{rate:.3g}'):,g}"


def choose_precision(requested: str, device: torch.device) -> tuple[str, str]:
    """(`fp32` or `bf16`, why): `requested` itself or, if that is `auto`, what `device` computes fastest.

    The reason names the measured rates, except for fp32 where a recipe asks for it: nothing is measured then.
    """
    if requested == "fp32":
        return "fp32", "the recipe asks for it"
    faster, reason = bf16_is_faster(device)
    if requested == AUTO:
        return ("bf16" if faster else "fp32"), reason
    return requested, f"the recipe asks for it; {reason}" + ("" if faster else ", so updates are slower than in fp32")


def wait_for(device: torch.device) -> None:
    """Returns when the work given to an accelerator is done; a CPU is never behind."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def agree_on_precision(requested: str, read_recorded: Callable[[], str | None], runtime: Runtime) -> str:
    """`fp32` or `bf16` for a run, the same on every rank, which `runtime` computes in from now on.

    `requested` is the recipe's; `read_recorded` is called on rank 0 and returns what a run that resumes began with,
    else None. Raises on every rank what it raises. `runtime.precision_reason` says why.
    """
    choice = runtime.run_on_rank_zero(lambda: _choose(requested, read_recorded(), runtime))
    runtime.precision, runtime.precision_reason = choice
    return runtime.precision


def _choose(requested: str, recorded: str | None, runtime: Runtime) -> tuple[str, str]:
    """(`fp32` or `bf16`, why). Logs a warning if it is slower than the other would be."""
    if requested != AUTO or recorded is None:
        precision, reason = choose_precision(requested, runtime.device)
        if precision == "bf16" and not bf16_is_faster(runtime.device)[0]:
            _log.warning("precision %s on %s: %s", precision, runtime.device, reason)
        return precision, reason
    if recorded == "bf16":
        faster, measured = bf16_is_faster(runtime.device)
        if not faster:
            _log.warning(
                "the run keeps bf16, the precision that it began with. On %s, updates in bf16 are slower than in fp32 "
                "(%s). A new run would use fp32",
                runtime.device,
                measured,
            )
    return recorded, "in which this run began"


def with_precision(recipe: Recipe, precision: str) -> Recipe:
    """The recipe with `train.precision` set."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})
