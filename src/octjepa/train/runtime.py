"""The only file that knows devices and ranks: where to compute, in which precision, and how ranks agree."""

from __future__ import annotations

import os
import resource
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from octjepa.errors import UsageError


class Runtime:
    """This process's device and its place among the processes (one, unless a process group is up)."""

    def __init__(self, precision: str) -> None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.device = accelerator or torch.device("cpu")
        self.precision = precision

    def check_alone(self) -> None:
        """Raises UsageError under a launcher of several processes: each would train the same run into one folder."""
        asked = int(os.environ.get("WORLD_SIZE", "1"))
        if asked > 1 and not dist.is_initialized():
            raise UsageError(
                f"started as one of {asked} processes (WORLD_SIZE), but this version trains in one process: start "
                "octjepa pretrain without torchrun"
            )

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def compute(self) -> AbstractContextManager[object]:
        """bf16 products over fp32 masters, or plain fp32."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def mean_over_ranks(self, total: Tensor, count: Tensor) -> Tensor:
        """The mean of a sum over every rank's items, not the mean of the ranks' means."""
        pair = torch.stack([total.double(), count.double()])
        if dist.is_initialized():
            dist.all_reduce(pair)
        return pair[0] / pair[1]

    def memory(self) -> dict[str, int]:
        """Bytes that this process holds now, and the most that its tensors held on the accelerator; never waits."""
        statm = Path("/proc/self/statm")
        if statm.is_file():
            held = int(statm.read_text().split()[1]) * resource.getpagesize()
        else:  # macOS: the most so far, in bytes
            held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = {"memory/process_bytes": held}
        if torch.accelerator.is_available():
            with suppress(RuntimeError):  # not every accelerator's allocator counts
                found["memory/device_bytes"] = torch.accelerator.max_memory_allocated()
        return found

    def describe(self) -> dict[str, str | int]:
        return {
            "device": str(self.device),
            "processes": self.world,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "cores": os.cpu_count() or 0,
        }
