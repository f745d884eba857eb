"""The GPU of a machine: whether its driver works, whether it is new, large and free enough."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from octjepa.doctor.checks import Check, Setup, gigabytes, register

DEVICE_FILE = Path("/dev/nvidia0")  # there where the kernel has an NVIDIA driver
MINIMUM_BYTES = 6e9  # of device memory: a 384-wide encoder of 12 blocks with a few volumes at once
OLDEST = (7, 0)  # compute capability that torch's builds of today have kernels for
BF16_FROM = (8, 0)
TAKEN_SHARE = 0.1  # of the memory: what another process may hold without being reported

_EXPECTED = "none, or a GPU with a working driver that is new, large and free enough"
_TO_DRIVER = "run nvidia-smi: if it fails too, install or restart the driver, then start octjepa again"


@register("accelerator", _EXPECTED, _TO_DRIVER)
def accelerator_check(setup: Setup) -> Iterator[Check]:
    """One line for every NVIDIA GPU, or for what keeps torch from using one."""
    needed = None if setup.planned is None else float(setup.planned.peak_memory_bytes)
    yield from accelerator_checks(needed)


def accelerator_checks(needed_bytes: float | None = None) -> list[Check]:
    """A check for each NVIDIA GPU; `needed_bytes` is what a run plans to hold on it."""
    if not torch.cuda.is_available():
        return [_without_gpu()]
    return [_gpu(index, needed_bytes) for index in range(torch.cuda.device_count())]


def _without_gpu() -> Check:
    """Why torch finds none: there is none, torch was built for the CPU, or its driver does not work."""
    if not DEVICE_FILE.exists():
        return Check("accelerator", "ok", "no NVIDIA GPU: torch computes on the CPU", _EXPECTED)
    if torch.version.cuda is None:
        finding = f"{DEVICE_FILE} is there, but torch {torch.__version__} is a build for the CPU"
        return Check(
            "accelerator", "warning", finding, _EXPECTED, "install a CUDA build of torch (pytorch.org says which)"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
        reason = "torch gives no reason"
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    finding = f"{DEVICE_FILE} is there, but torch (CUDA {torch.version.cuda}) cannot use it: {reason}"
    return Check("accelerator", "failed", finding, _EXPECTED, _TO_DRIVER)


def _gpu(index: int, needed_bytes: float | None) -> Check:
    """The first of these that is so: too old, taken, too small, without bf16; or fit."""
    try:
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # exclusive mode, and another process has it
        finding = f"GPU {index} cannot be opened: {' '.join(str(error).split())[:200]}"
        return _outcome("failed", finding, "another process holds it: nvidia-smi names it; wait for it, or end it")
    label = f"GPU {index}, {name}, compute capability {capability[0]}.{capability[1]}, "
    label += f"{gigabytes(free)} of {gigabytes(total)} free"
    if capability < OLDEST:
        finding = f"{label}: too old for this torch, which needs {OLDEST[0]}.{OLDEST[1]}"
        return _outcome("failed", finding, "hide it (CUDA_VISIBLE_DEVICES=) and train on the CPU, or use a newer GPU")
    needed = MINIMUM_BYTES if needed_bytes is None else needed_bytes
    state = "warning" if needed_bytes is None else "failed"
    if total < needed:
        to_do = "lower machine.micro_batch, set machine.recompute=true, or take a smaller model.size or tokens.budget"
        return _outcome(state, f"{label}: too small for {gigabytes(needed)}", to_do)
    if total - free > TAKEN_SHARE * total:
        finding = f"{label}: {gigabytes(total - free)} are taken by other processes"
        state = "failed" if needed_bytes is not None and free < needed else "warning"
        return _outcome(state, finding, "nvidia-smi names them: wait for them, or lower machine.micro_batch")
    if capability < BF16_FROM:
        finding = f"{label}: no bf16 before 8.0, so train.precision=auto is fp32"
        return _outcome("warning", finding, "nothing, unless a recipe asks for bf16: set train.precision=fp32 there")
    return _outcome("ok", label, "")


def _outcome(state: str, finding: str, to_do: str) -> Check:
    return Check("accelerator", state, finding, _EXPECTED, to_do)  # type: ignore[arg-type] # a State
