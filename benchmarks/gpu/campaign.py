"""The campaign's state: what is done, in one JSON that is written after every step; stores; how much time is left."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from octjepa.config import load_recipe
from octjepa.distributed.runtime import Runtime
from octjepa.errors import OctjepaError
from octjepa.files import write_json
from octjepa.ingest import build_store
from octjepa.phantom import write_cohort
from octjepa.recipe import Recipe
from octjepa.store import Store

from .settings import Settings

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "results.json"
PIECE_BYTES = 15 << 20  # the most that one file of --out holds
SEED = 41
Figures = dict[str, Any]


class Unfinished(Exception):
    """A step stopped at the deadline; it goes on in the next call."""


@dataclass(frozen=True)
class Step:
    """One measurement: its part, its name, the seconds that it takes on a GPU, and what it does."""

    part: str
    name: str
    seconds: float
    run: Callable[[Campaign], Figures]


class Campaign:
    """A folder to work in and one for what is brought back."""

    def __init__(self, settings: Settings, work: Path, out: Path, seconds: float) -> None:
        self.settings, self.work, self.out = settings, work, out
        self.deadline = time.monotonic() + seconds
        self.device = Runtime("fp32").device
        work.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        self.results: Figures = {"settings": settings.name, "steps": {}}
        if (work / RESULTS).is_file():
            self.results = json.loads((work / RESULTS).read_text(encoding="utf-8"))
        self.background: subprocess.Popen[bytes] | None = None

    @property
    def steps(self) -> Figures:
        """Name of a step -> {state, seconds, at, and its figures or its error}."""
        steps: Figures = self.results["steps"]
        return steps

    def seconds_left(self) -> float:
        """Until this call has to end."""
        return self.deadline - time.monotonic()

    def is_done(self, name: str) -> bool:
        """Whether a step has ended well."""
        return self.steps.get(name, {}).get("state") == "done"

    def figures(self, name: str) -> Figures:
        """What a step found; empty where it is not done."""
        return self.steps.get(name, {}).get("figures", {}) if self.is_done(name) else {}

    def take(self, step: Step) -> None:
        """Runs a step and writes what it found, or how it failed."""
        started = time.monotonic()
        before = float(self.steps.get(step.name, {}).get("seconds", 0.0))
        try:
            entry: Figures = {"state": "done", "figures": step.run(self)}
        except Unfinished as error:
            entry = {"state": "unfinished", "error": str(error)}
        except (Exception, SystemExit) as error:  # one step must not cost the others
            entry = {"state": "failed", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
            entry["where"] = "".join(traceback.format_tb(error.__traceback__)[-3:])
        entry |= {"seconds": round(before + time.monotonic() - started, 1), "part": step.part}
        entry["at"] = datetime.now(UTC).isoformat(timespec="seconds")
        self.steps[step.name] = entry
        self.write()

    def write(self) -> None:
        """The results, in both folders."""
        write_json(self.work / RESULTS, self.results)
        shutil.copyfile(self.work / RESULTS, self.out / RESULTS)

    def recipe(self, named: Sequence[str], *more: str) -> Recipe:
        """A recipe of the settings with further overrides."""
        name, *overrides = named
        return load_recipe(name, [*overrides, *more])

    def store(self, name: str, recipe: Recipe, people: int) -> Path:
        """The store of so many phantom people, made where it is not there."""
        folder = self.work / name
        if not (folder / "made").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            write_cohort(
                folder / "phantom", people, SEED, split_shares=(0.75, 0.25, 0.0), workers=self.settings.workers
            )
            build_store([folder / "phantom"], folder / "store", recipe.preprocessing, workers=self.settings.workers)
            (folder / "made").touch()
        return folder / "store"

    def small_store(self) -> Store:
        """The store of parts 1 and 2."""
        return Store.open(self.store("small", self.recipe(self.settings.small), self.settings.people))

    def begin_cohorts(self) -> None:
        """Starts making the exam's phantoms beside the first part, which leaves most cores idle."""
        if self.background is None and not self.is_done("cohorts"):
            self.background = self.child("cohorts", wait=False)

    def wait_for_cohorts(self) -> None:
        """Until the phantoms are made: timings want a quiet machine. Raises Unfinished at the deadline."""
        if self.background is not None:
            try:
                code = self.background.wait(max(1.0, self.seconds_left()))
            except subprocess.TimeoutExpired:
                raise Unfinished("the exam's phantoms are still being made") from None
            self.background = None
            if code:
                raise OctjepaError(f"making the exam's phantoms failed, see {self.work / 'cohorts.log'}")

    def close(self) -> None:
        """Ends what runs in the background; it goes on in the next call."""
        if self.background is not None:
            kill(self.background, signal.SIGTERM)
            self.background = None

    def command(self, job: str, *arguments: str) -> list[str]:
        """How a job of `benchmarks.gpu.child` is started."""
        return [sys.executable, "-m", "benchmarks.gpu.child", self.settings.name, str(self.work), job, *arguments]

    def child(
        self, job: str, *arguments: str, wait: bool = True, seconds: float | None = None, **environment: str
    ) -> subprocess.Popen[bytes] | None:
        """A process of its own for a job, its log beside the results; where `wait`, ended with exit code 0.

        With the setting `in_process`, a job that is waited for runs in this process, without `environment`: None.

        Raises Unfinished at the deadline (the job is sent SIGTERM first), OctjepaError with its last line.
        """
        if wait and self.settings.in_process:
            jobs = importlib.import_module("benchmarks.gpu.child").JOBS  # that module imports this one
            jobs[job](self.settings, self.work, *arguments)
            return None
        log = self.work / f"{job}.log"
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        threads = os.environ.get("OMP_NUM_THREADS", "4")  # several processes share the cores
        with log.open("ab") as file:
            process = subprocess.Popen(
                self.command(job, *arguments),
                stdout=file,
                stderr=file,
                cwd=ROOT,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": threads} | environment,
            )
        if not wait:
            return process
        try:
            code = process.wait(max(1.0, self.seconds_left() if seconds is None else seconds))
        except subprocess.TimeoutExpired:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            kill(process, signal.SIGKILL)
            raise Unfinished(f"{job} goes on in the next call") from None
        except BaseException:
            kill(process, signal.SIGKILL)
            raise
        if code:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
            raise OctjepaError(f"{job} {' '.join(arguments)} ended with code {code}: {lines[-1][:300]}")
        return process

    def bring_back(self, path: Path, name: str) -> list[str]:
        """Copies a file to `out`, in pieces that `cat` joins where it is large; the names of the pieces."""
        content = path.read_bytes()
        pieces = [content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES)]
        names = [name] if len(pieces) == 1 else [f"{name}.part{number}" for number in range(len(pieces))]
        for piece_name, piece in zip(names, pieces, strict=True):
            (self.out / piece_name).write_bytes(piece)
        return names


def kill(process: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to a process that `Campaign.child` started, and to all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)


def tensors_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[bool, float]:
    """(whether all are the same to the bit, the largest difference)."""
    worst = max((float((one[name].double() - other[name].double()).abs().max()) for name in one), default=0.0)
    return one.keys() == other.keys() and worst == 0.0, worst
