"""What this process may use of the machine."""

from __future__ import annotations

import os


def cores() -> int:
    """CPU cores that this process may use. A job scheduler or a container can allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
