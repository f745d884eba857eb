"""The device of torch_xla, and what it counts. Skipped where `make test-xla` has not prepared the environment."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch

Counts = dict[str, float]


@pytest.fixture(scope="session")
def xla_device() -> torch.device:
    """XLA's CPU device, asked for before any backward pass of this process: torch counts its devices at the first."""
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed: it has an environment of its own, run make test-xla")
    if os.environ.get("PJRT_DEVICE") != "CPU":
        pytest.skip("PJRT_DEVICE is not CPU: run make test-xla")
    from octjepa.distributed import xla

    return xla.device()


@pytest.fixture(scope="session")
def counted(xla_device: torch.device) -> Callable[[], Counts]:
    """So far: graphs compiled and run, values and bytes read back to the host, operators that XLA lacks."""
    import torch_xla.debug.metrics as metrics

    def count() -> Counts:
        def of(name: str, column: int) -> float:
            found = metrics.metric_data(name)
            return 0 if found is None else found[column]

        return {
            "compiled": of("CompileTime", 0),
            "run": of("ExecuteTime", 0),
            "read": of("TransferFromDeviceTime", 0),
            "bytes_read": of("InboundData", 1),
            "fallbacks": len([name for name in metrics.counter_names() if name.startswith("aten::")]),
        }

    return count
