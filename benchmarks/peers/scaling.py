"""What a second process is worth: `octjepa pretrain` as two processes of one thread under torchrun, against one.

Runs of `tiny_cpu_vjepa` on a small phantom store, on the CPU. The figure comes from a run's journal without its first
updates, so starting, judging and saving are not in it.

Threads that wait for each other spin, and spin for long where other work takes their core: set OMP_WAIT_POLICY=passive
on a machine that is not free.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from benchmarks.peers import data
from benchmarks.peers.alternating_runs import Comparison
from benchmarks.peers.data import bench_recipe, phantom_store

from octjepa.errors import OctjepaError
from octjepa.files import read_json_lines
from octjepa.store import Store

WARM_UP_UPDATES, UPDATES = 4, 12  # not counted; counted
NOTHING_BESIDE_UPDATES = (
    "monitor.every_updates=null",
    "validation.max_samples=2",
    "checkpoint.dir=null",
    "tracking.pictures_every_updates=null",
)  # what a run does beside its updates, left out as far as it can be
_PATIENCE_SECONDS = 30.0


def train(processes: int, threads: int, updates: int, store: str, out: Path, recipe: Sequence[str]) -> list[float]:
    """Seconds of each update of a run in `out`, which is removed again.

    Raises OctjepaError with the last line of its log where the run fails.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), "-m", "octjepa", "pretrain", *recipe]
    command += [f"train.max_updates={updates}", "--store", store, "--out", str(out), "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    _run(command, environment)
    seconds = [float(line["seconds"]) for line in read_json_lines(out / "metrics.jsonl") if "train/loss" in line]
    shutil.rmtree(out)
    return seconds


def _run(command: list[str], environment: dict[str, str]) -> None:
    """In a session of its own, all of which ends with this call: a torchrun that is killed leaves orphans."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, stderr = process.communicate()
    except BaseException:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(_PATIENCE_SECONDS)
        raise
    if process.returncode:
        messages = [line for line in stderr.splitlines() if line.startswith("octjepa: ")] or stderr.splitlines()[-1:]
        raise OctjepaError(f"a run that was to be measured failed: {(messages or ['no message'])[0]}")


def _rate(processes: int, threads: int, store: Store, out: Path) -> float:
    """Volumes a second."""
    recipe = [*data.RECIPE, *NOTHING_BESIDE_UPDATES]
    seconds = train(processes, threads, WARM_UP_UPDATES + UPDATES, store.location, out, recipe)
    return UPDATES * bench_recipe().train.global_batch / sum(seconds[WARM_UP_UPDATES:])


@contextmanager
def compare_with_one_process(threads: int) -> Iterator[Comparison]:
    """Two processes of one thread as ours, one process of `threads` as the other."""
    recipe = bench_recipe()
    with phantom_store(recipe.preprocessing) as (work, store):
        setup = {
            "recipe": recipe.name,
            "volumes": len(store.table),
            "batch": recipe.train.global_batch,
            "updates_a_turn": UPDATES,
            "device": "cpu",
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
        }
        ours, other = (partial(_rate, *form, store, work / "run") for form in ((2, 1), (1, threads)))
        yield Comparison(ours, other, setup, warms_up=False)
