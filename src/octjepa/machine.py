"""The processor and the memory that this process may use: cores, instruction sets, memory limit, free and used memory.

Every other module asks here and does not read /proc, cgroups or resource limits itself. Accelerators, which only torch
knows, are in `octjepa.distributed.runtime`; this module needs no torch, because ingest uses it as well.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CPUINFO, _MEMINFO, _STATM = Path("/proc/cpuinfo"), Path("/proc/meminfo"), Path("/proc/self/statm")
_DEVICES = Path("/dev")
_CGROUP = Path("/sys/fs/cgroup")
# Files below _CGROUP with limit, use and statistics, and the statistic of file pages that can be given back: of version
# 2 and of version 1.
_CGROUP_MEMORY = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
_BF16_SETS = ("amx_bf16", "avx512_bf16")


@dataclass(frozen=True)
class Processor:
    """A CPU: its architecture ("x86_64", "aarch64") and its instruction sets by the names of Linux, if Linux lists any.

    `bf16_sets` are the sets with products in bf16.
    """

    architecture: str
    instruction_sets: frozenset[str] = frozenset()

    @property
    def bf16_sets(self) -> tuple[str, ...]:
        """The instruction sets that multiply in bf16."""
        return tuple(name for name in _BF16_SETS if name in self.instruction_sets)


def processor() -> Processor:
    """The CPU of this machine."""
    flags = re.search(r"^flags\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE) if _CPUINFO.is_file() else None
    return Processor(platform.machine(), frozenset(flags[1].split() if flags else ()))


def cores() -> int:
    """CPU cores that this process may use. A job scheduler or a container can allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpu_count() -> int:
    """NVIDIA GPUs whose driver is loaded. Counted from /dev, because ingest does not import torch."""
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in _DEVICES.glob("nvidia*"))


@cache
def memory_limit_bytes() -> int:
    """Memory that this process could use at most: the machine's, or the limit of its container or of its shell."""
    limits = [_physical_bytes()]
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        if (soft := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY:
            limits.append(soft)
    for limit_file, *_ in _CGROUP_MEMORY:
        try:
            text = (_CGROUP / limit_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdecimal():  # else "max"
            limits.append(int(text))
    return min(limits)


def excess_of_parameters(count: int) -> str:
    """Why a network of `count` parameters in fp32 is too large for this machine; "" if half of its memory holds it."""
    size, memory = 4 * count, memory_limit_bytes()
    if size <= memory // 2:
        return ""
    return (
        f"{count:,} parameters, {size / 2**30:,.1f} GiB in fp32: more than half of this machine's "
        f"{memory / 2**30:,.1f} GiB of memory"
    )


def free_memory_bytes() -> int:
    """Memory that can still be allocated: on the machine, or in its container if that is less."""
    free = _physical_bytes()
    if _MEMINFO.is_file():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    return min([free, *_free_bytes_of_containers()])


def _free_bytes_of_containers() -> list[int]:
    """Memory that the container may still allocate; [] without a limit.

    Its use counts the pages of every file that was read, which the system gives back when memory is needed. Without
    them a container that has read many scans would look full.
    """
    free = []
    for limit, used, statistics, reclaimable in _CGROUP_MEMORY:
        try:
            most, taken = (_CGROUP / limit).read_text().strip(), int((_CGROUP / used).read_text())
            lines = (_CGROUP / statistics).read_text().splitlines()
        except (OSError, ValueError):
            continue
        if most.isdecimal():  # else "max"
            pages = dict(line.split(maxsplit=1) for line in lines)
            free.append(int(most) - taken + int(pages.get(reclaimable, 0)))
    return free


def process_memory_bytes() -> int:
    """Memory of this process now; on systems without /proc (macOS) the most so far."""
    if _STATM.is_file():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
