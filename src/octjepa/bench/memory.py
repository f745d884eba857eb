"""What `octjepa plan` says that an update will hold, against what it holds.

Of `tiny_cpu` with 64 volumes at once, so that activations stand out of what the interpreter holds anyway. The peak of a
process is told honestly by Linux alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from octjepa.bench import data
from octjepa.bench.alternating_runs import Contest
from octjepa.errors import OctjepaError, UsageError
from octjepa.train.plan import plan

VOLUMES = 64
_STATUS = Path("/proc/self/status")
# Freed memory goes back to the system at once: else the peak is that of glibc's habits. Threads hold buffers each.
_HONEST = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def held_bytes(recipe: Sequence[str]) -> int:
    """By `bench.held`. Raises UsageError where the system does not tell, OctjepaError where it fails."""
    if not _STATUS.is_file():
        raise UsageError(f"the peak of a process is read from {_STATUS}, which this system has not: measure on Linux")
    command = [sys.executable, "-m", "octjepa.bench.peak_memory", *recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | _HONEST)
    if done.returncode:
        last = (done.stderr.strip() or f"it ended with {done.returncode}").splitlines()[-1]
        raise OctjepaError(f"the process that measures memory failed: {last}")
    return int(done.stdout)


@contextmanager
def against_measured() -> Iterator[Contest]:
    batch = f"train.global_batch={VOLUMES}"
    recipe = data.recipe_of(batch)
    predicted = plan(recipe)["peak_memory_bytes"]
    setup = {
        "recipe": recipe.name,
        "tokens": recipe.token_count,
        "batch": VOLUMES,
        "precision": recipe.train.precision,
        "device": "cpu",
        "threads": 1,
    }
    yield Contest(lambda: predicted, lambda: held_bytes([*data.RECIPE, batch]), setup, warms_up=False)
