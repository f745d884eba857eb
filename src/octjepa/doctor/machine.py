"""The machine around a run: threads, memory, disk, whether the output folder can be written, the clock."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from octjepa.doctor.check import Check, gigabytes, tried
from octjepa.files import write_atomic, writer_lock
from octjepa.recipe import Recipe
from octjepa.remote import is_remote
from octjepa.train.plan import JOURNAL_BYTES

_LITTLE = 2e9  # bytes of memory or disk that even the smallest run wants
_SHARED = 256e6  # bytes of shared memory that loader processes want; containers often give 64 MB
_OLDEST = datetime(2026, 1, 1, tzinfo=UTC)
_SKEW_SECONDS = 5.0


def checks(out: Path, recipe: Recipe | None, planned: dict[str, Any] | None) -> Iterator[Check]:
    """`planned` is what `octjepa plan` says of `recipe`."""
    yield _threads()
    yield tried("memory", "what the recipe plans", "", lambda: _memory(planned))
    yield tried("disk", "room for the checkpoints", "", lambda: _disk(out, recipe, planned))
    yield tried("shared memory", f"{gigabytes(_SHARED)} for loader processes", "", lambda: _shared(recipe))
    place = nearest(out)
    expected = "a folder that can be written, renamed in and locked"
    to_do = "give --out a folder that you may write to, on a file system with locks"
    yield tried("output folder", expected, to_do, lambda: _writable(place, expected))
    yield tried("clock", "one clock, set", "set the clock", lambda: _clock(place))


def nearest(out: Path) -> Path:
    """`out`, or the first folder above it that is there."""
    out = out.absolute()
    return next(path for path in (out, *out.parents) if path.exists())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads() -> Check:
    threads, cores = torch.get_num_threads(), _cores()
    found, expected = f"{threads} threads on {cores} cores", "no more threads than cores"
    if threads > cores:
        return Check("threads", "warning", found, expected, f"set OMP_NUM_THREADS={cores}")
    return Check("threads", "ok", found, expected)


def free_memory() -> float:
    """Bytes that may still be taken: of the machine, and of the container if that is less."""
    free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = float(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        free = min(free, float(most) - float(used.read_text()))
    return free


def available() -> tuple[float, str]:
    """Bytes free where the model will lie, and where that is."""
    if torch.accelerator.is_available():
        return float(torch.accelerator.get_memory_info()[0]), "the accelerator"
    return free_memory(), "this machine"


def _memory(planned: dict[str, Any] | None) -> Check:
    free, where = available()
    wanted = _LITTLE if planned is None else float(planned["peak_memory_bytes"])
    found, expected = f"{gigabytes(free)} free on {where}", f"{gigabytes(wanted)} at least"
    if free >= wanted:
        return Check("memory", "ok", found, expected)
    to_do = "use a smaller machine.micro_batch, machine.recompute=true, or a machine with more memory"
    return Check("memory", "warning" if planned is None else "failed", found, expected, to_do)


def _disk(out: Path, recipe: Recipe | None, planned: dict[str, Any] | None) -> Check:
    place, wanted, expected = out, _LITTLE, f"{gigabytes(_LITTLE)} at least"
    if recipe is not None and planned is not None:
        where = recipe.checkpoint.dir
        local = where is not None and not is_remote(where)
        wanted = float(planned["disk_bytes"] if local else JOURNAL_BYTES)
        expected = f"{gigabytes(wanted)} for checkpoints and the journal"
        place = out / where if local and where is not None else out
    free = float(shutil.disk_usage(nearest(place)).free)
    found = f"{gigabytes(free)} free"
    if free >= wanted:
        return Check("disk", "ok", found, expected)
    to_do = "free some space, give --out or checkpoint.dir another disk, or lower checkpoint.keep_last"
    return Check("disk", "warning" if planned is None else "failed", found, expected, to_do)


def _shared(recipe: Recipe | None) -> Check:
    folder, expected = Path("/dev/shm"), f"{gigabytes(_SHARED)} for loader processes"
    if not folder.is_dir():
        return Check("shared memory", "ok", "not limited by a folder on this system", expected)
    free = shutil.disk_usage(folder).free
    needed = recipe is not None and recipe.machine.loader_workers > 0
    if free >= _SHARED:
        return Check("shared memory", "ok", f"{gigabytes(free)} free", expected)
    to_do = "start the container with --shm-size=1g, or train with machine.loader_workers=0"
    return Check("shared memory", "failed" if needed else "warning", f"{gigabytes(free)} free", expected, to_do)


def _writable(place: Path, expected: str) -> Check:
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as folder:
        write_atomic(Path(folder) / "written", lambda file: file.write(b"octjepa"))
        with writer_lock(Path(folder)):
            pass
    return Check("output folder", "ok", "written, renamed and locked", expected)


def _clock(place: Path) -> Check:
    now = datetime.now(UTC)
    with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=place) as file:
        before = time.time()
        os.utime(file.fileno())
        skew = os.fstat(file.fileno()).st_mtime - before
    found = f"{now.isoformat(timespec='seconds')}; files are dated {skew:+.1f} s from it"
    expected = f"a date after {_OLDEST.date()}, files dated within {_SKEW_SECONDS:.0f} s of it"
    if now < _OLDEST or abs(skew) > _SKEW_SECONDS:
        return Check("clock", "warning", found, expected, "set the clock (NTP) of this machine and of its file server")
    return Check("clock", "ok", found, expected)
