"""Two real processes that train together, started without a launcher, each with the environment of one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_ranks(code: str, *arguments: object, world: int = 2) -> list[subprocess.Popen[str]]:
    """Processes that run `code` with `arguments` in sys.argv, as ranks 0 .. world - 1 of one job."""
    port = str(free_port())
    started = []
    for rank in range(world):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT),
        }  # fmt: skip
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *map(str, arguments)], env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    return started


def finish(processes: list[subprocess.Popen[str]], seconds: float = 300) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each."""
    try:
        told = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, told, strict=True)]
