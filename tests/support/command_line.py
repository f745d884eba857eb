"""Calls the command line as a user does: in this process where speed matters, in its own where signals do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "octjepa")


@dataclass(frozen=True)
class Outcome:
    """What a command left behind: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on stdout, which must hold one line and nothing else."""
        lines = self.out.splitlines()
        assert len(lines) == 1, f"stdout holds {len(lines)} lines, expected one JSON object:\n{self.out}\n{self.err}"
        return json.loads(lines[0], parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not a JSON")


def call(*words: object) -> Outcome:
    """The command in this process. What it does not foresee is raised here."""
    from typer.testing import CliRunner

    from octjepa.cli import app

    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def run(*words: object, **environment: str) -> Outcome:
    """The command in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *map(str, words)], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def stop(
    words: list[object],
    number: signal.Signals,
    once: Callable[[], bool],
    whole_group: bool = True,
    limit_seconds: float = 60,
) -> Outcome:
    """Starts the command in a process group of its own and sends `number` as soon as `once()` holds.

    The whole group gets it, as from Ctrl-C in a terminal or from a job scheduler, or the command alone. Returns when
    every process that held its output has ended.
    """
    process = subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + limit_seconds
    while not once() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        (os.killpg if whole_group else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Outcome(process.returncode, out, err)


def lines(path: Path) -> int:
    """Whole lines in a file that may not be there yet."""
    return path.read_bytes().count(b"\n") if path.is_file() else 0
