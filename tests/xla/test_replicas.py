"""Two replicas sum what each of them holds: two virtual devices of XLA's CPU, two threads of one process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# On the CPU two replicas may not compile one graph at the same time, or each gives the sum another number and waits for
# ever. The second starts when the first has compiled. (A TPU's replicas are processes, with a number each of its own.)
_REPLICA = """
import time
import torch, torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.runtime
from octjepa.distributed import xla

def work(number):
    device, rank = xla.device(), torch_xla.runtime.global_ordinal()
    mine = [torch.full((2, 3), 1.0 + rank).to(device), torch.tensor([10.0 * rank]).to(device)]
    xla.sum_over_ranks(mine)
    while rank and metrics.metric_data("CompileTime") is None:
        time.sleep(0.1)
    xla.sync()
    print(xla.world_size(), [one.cpu().flatten().tolist() for one in mine], flush=True)

if __name__ == "__main__":
    torch_xla.launch(work)
"""


def test_a_sum_over_ranks(xla_device: torch.device, tmp_path) -> None:
    script = tmp_path / "replica.py"
    script.write_text(_REPLICA)
    output = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "CPU_NUM_DEVICES": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert output.returncode == 0, output.stderr[-2000:]
    assert output.stdout.count("2 [[3.0, 3.0, 3.0, 3.0, 3.0, 3.0], [10.0]]") == 2, output.stdout
