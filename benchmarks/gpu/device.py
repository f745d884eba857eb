"""What is measured on a device: peak memory, waits of the host, the rates of its products and copies.

Every function also works on a CPU, so that a rehearsal runs the lines that a GPU runs.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octjepa.distributed.precision import wait_for
from octjepa.errors import is_out_of_memory
from octjepa.views.loader import Batch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SYNCHRONISING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}


@dataclass
class Peak:
    """Bytes that were held at most within `peak_memory`, beyond those held before."""

    bytes: int = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measures the tensors of an accelerator; on a CPU what the process holds."""
    found = Peak()
    if device.type == "cpu":
        if _CLEAR.exists():
            _CLEAR.write_text("5")  # the peak starts anew
        before = _status_bytes("VmRSS")
        yield found
        found.bytes = _status_bytes("VmHWM") - before
        return
    wait_for(device)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    yield found
    wait_for(device)
    found.bytes = torch.accelerator.max_memory_allocated() - before


def _status_bytes(name: str) -> int:
    lines = [line for line in _STATUS.read_text().splitlines() if line.startswith(name)]
    return int(lines[0].split()[1]) * 1024


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on the device; on a CPU 4 GB, so that a rehearsal is the same everywhere."""
    return 4 * 10**9 if device.type == "cpu" else int(torch.accelerator.get_memory_info(device)[0])


def forget(device: torch.device) -> None:
    """Gives cached memory back, after an update that did not fit."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


class WaitCounter(TorchDispatchMode):
    """Counts operations for which the host waits until the device has come so far; `names` says which."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        copies = name in ("_to_copy", "copy_") and isinstance(result, Tensor) and result.device.type == "cpu"
        source = next((arg for arg in reversed(args) if isinstance(arg, Tensor)), None)
        if name in _SYNCHRONISING or (copies and source is not None and source.device.type != "cpu"):
            self.names.append(name)
        return result


@contextmanager
def driver_waits(device: torch.device) -> Iterator[list[str]]:
    """The waits that CUDA itself reports meanwhile; none on a CPU."""
    reported: list[str] = []
    if device.type != "cuda":
        yield reported
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield reported
        finally:
            torch.cuda.set_sync_debug_mode("default")
    reported += [str(one.message).splitlines()[0] for one in caught if "synchroniz" in str(one.message).lower()]


def gemm_tflops(device: torch.device, dtype: torch.dtype, side: int, repeats: int) -> float:
    """Median rate of square products of random numbers, 10 between two waits, in TFLOP/s."""
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    out = torch.empty_like(a)
    seconds = timed(lambda: torch.mm(a, b, out=out), device, repeats, 10)
    return 2 * side**3 / seconds / 1e12


def copy_gigabytes(device: torch.device, size: int, repeats: int) -> float:
    """Median rate of a copy of `size` bytes within the device, bytes read and written, in GB/s."""
    a = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * size / timed(lambda: b.copy_(a), device, repeats, 10) / 1e9


def timed(work: Callable[[], object], device: torch.device, repeats: int, calls: int = 1) -> float:
    """Median seconds of a call over `repeats` turns of `calls`, after one turn that is not counted."""
    laps = []
    for _ in range(repeats + 1):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        wait_for(device)
        laps.append((time.perf_counter() - start) / calls)
    return statistics.median(laps[1:])


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with all its tensors on the device."""
    return Batch(*(part.to(device, non_blocking=True) if isinstance(part, Tensor) else part for part in batch))


def pinned(batch: Batch, device: torch.device) -> Batch:
    """The batch in memory from which a GPU copies without a wait; as it is where there is none."""
    if device.type != "cuda":
        return batch
    return Batch(*(part.contiguous().pin_memory() if isinstance(part, Tensor) else part for part in batch))


def largest_that_fits(sizes: Sequence[int], run: Callable[[int], object], device: torch.device) -> int:
    """The first of `sizes` for which `run` does not run out of memory; 0 where none fits."""
    for size in sizes:
        try:
            run(size)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            return size
        gc.collect()  # the error held what was allocated
        forget(device)
    return 0
