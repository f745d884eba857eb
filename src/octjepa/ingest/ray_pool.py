"""The work of `worker_pool` as tasks of a Ray cluster: many machines, one store that all of them see.

Each Ray worker keeps one separate process next to it (a `WorkerPool` of one), so that a decoder that crashes or hangs
costs one file there as it does here. What Ray adds is other machines; when one is lost, its files are given to others.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from octjepa.errors import OctjepaError, UsageError, install_command
from octjepa.files import write_new_folder
from octjepa.ingest.one_file import Result, refused
from octjepa.ingest.source_file import SourceFile
from octjepa.ingest.worker_pool import AHEAD, Work, WorkerPool
from octjepa.machine import cores

RETRIES = 3  # of a task whose machine or Ray worker was lost; then its file is refused with `worker_died`
_OBJECT_STORE_BYTES = 128 << 20  # of a cluster that is started here: index entries go through it, pixels do not
# No usage report to Ray's makers; and no change of Ray's to the environment of workers without an accelerator.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True)
class _Job:
    """The settings that all tasks of one ingest share. A machine that sees the folder `mark` sees this store."""

    work: Work
    seconds_per_file: float
    mark: Path
    at_once: int  # files that the cluster works on at once


def ray_results(
    files: Sequence[SourceFile], work: Work, workers: int | None, seconds_per_file: float, store: Path
) -> Generator[tuple[SourceFile, Result], None, None]:
    """Results in the order of `files`, from the cluster at RAY_ADDRESS, or from one that is started here for the time.

    `workers` files are worked on at once, as many as the cluster has CPUs if it is None. Raises UsageError (Ray is
    not installed, no such cluster, a machine of it does not see the store or a source) and OctjepaError (the cluster
    was lost, the disk is full).
    """
    store = store.resolve()
    with cluster(workers) as ray:
        at_once = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(work_on_machine)
        job = ray.put(_Job(work, seconds_per_file, write_new_folder(store / "chunks" / "00", {}), at_once))
        todo = iter(files)
        waiting: deque[tuple[SourceFile, Any]] = deque()
        busy: list[Any] = []
        try:
            while True:
                while len(waiting) < AHEAD * at_once and len(busy) < at_once:
                    if (following := next(todo, None)) is None:
                        break
                    waiting.append((following, task.remote(following, job)))
                    busy.append(waiting[-1][1])
                if not waiting:
                    return
                if busy:
                    _, busy = ray.wait(busy, num_returns=1)
                still = set(busy)
                while waiting and waiting[0][1] not in still:
                    file, reference = waiting.popleft()
                    yield file, _result(ray, file, reference, store)
        finally:
            for reference in busy:
                ray.cancel(reference, force=True)


@contextmanager
def cluster(workers: int | None) -> Iterator[Any]:
    """The module `ray`, connected to RAY_ADDRESS or to a cluster that is started here and stopped at the end.

    Raises UsageError: Ray is not installed, or there is no such cluster.
    """
    os.environ.update(_ENVIRONMENT)  # read while Ray is imported
    try:
        import ray
    except ImportError:
        raise UsageError(f"--engine ray needs Ray: {install_command('ray')}") from None
    if ray.is_initialized():  # by the calling program: its connection stays
        yield ray
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    cluster: dict[str, Any] = {
        "num_cpus": workers,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with redirect_stdout(sys.stderr):  # Ray prints about its workers; stdout is for the result
        try:
            _check_reachable(address)
            ray.init(
                address, log_to_driver=False, logging_level=logging.ERROR, **(cluster if address == "local" else {})
            )
        except Exception as error:  # Ray raises whatever its own start met, bare Exception included
            ray.shutdown()
            what = "no local Ray can be started" if address == "local" else f"no Ray cluster at RAY_ADDRESS={address}"
            raise UsageError(
                f"{what} ({type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no message'}); "
                "start one with `ray start --head` and set RAY_ADDRESS=auto, or use --engine local"
            ) from error
        try:
            if threading.current_thread() is threading.main_thread():
                for number, handler in before.items():
                    signal.signal(number, handler)  # Ray replaces them; the command line decides how ingest stops
            yield ray
        finally:
            ray.shutdown()


def worker_error(error: Any) -> Exception:
    """The exception to raise for Ray's RayTaskError: the worker's own if it is meant for the user."""
    cause = error.cause or error
    if isinstance(cause, OctjepaError | OSError):
        return cause
    message = str(cause).strip().splitlines() or ["no message"]
    return OctjepaError(
        f"a Ray worker failed with {type(cause).__name__}: {message[0][:300]}. What was finished is kept. Try --engine "
        f"local; if that works, is octjepa {version('octjepa')} on every machine of the cluster?"
    )


def _check_reachable(address: str) -> None:
    """Raises OSError if nothing listens at "host:port": Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _result(ray: Any, file: SourceFile, reference: Any, store: Path) -> Result:
    """The result of one task. Raises UsageError (its machine sees no store or no sources) and OctjepaError (Ray
    failed).
    """
    lost = (
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.NodeDiedError,
        ray.exceptions.OutOfMemoryError,
        ray.exceptions.ObjectLostError,
    )
    try:
        result: Result | NotVisible = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise worker_error(error) from error
    except lost as error:
        detail = f"its machine or Ray worker was lost {RETRIES + 1} times: {type(error).__name__}"
        return refused(file, "read", "worker_died", detail)
    except ray.exceptions.RayError as error:
        raise OctjepaError(
            f"the Ray cluster failed ({type(error).__name__}); finished files are in the store: run the same "
            "command again to continue"
        ) from error
    if not isinstance(result, NotVisible):
        return result
    if not result.store_is_visible:
        raise UsageError(
            f"the machine {result.machine} of the Ray cluster does not see the store {store}: give --store a folder on "
            "a disk that all machines share under the same path, or, for a store in a bucket, let OCTJEPA_CACHE name "
            "one"
        )
    if file.state() is not None:
        raise UsageError(
            f"the machine {result.machine} of the Ray cluster does not see {file.name}: put the sources on a disk "
            "that all machines share under the same path, or in a bucket"
        )
    return refused(file, "read", "unreadable_file", "the file went away while it was read")


# -- on the machines of the cluster --

_pool: tuple[_Job, WorkerPool] | None = None  # of this Ray worker, reused by its next tasks


@dataclass(frozen=True)
class NotVisible:
    """The name of a machine that does not see the store, or sees the store and not the file."""

    machine: str
    store_is_visible: bool


def work_on_machine(file: SourceFile, job: _Job) -> Result | NotVisible:
    """Works on one file where Ray chose."""
    store_is_visible = job.mark.is_dir()
    if not store_is_visible or file.state() is None:
        return NotVisible(socket.gethostname(), store_is_visible)
    ((_, result),) = _pool_for(job).results([file])
    return result


def _pool_for(job: _Job) -> WorkerPool:
    global _pool
    if _pool is None or _pool[0].mark != job.mark:
        if _pool is not None:
            _pool[1].__exit__(None, None, None)
        _pool = job, WorkerPool(job.work, 1, job.seconds_per_file, beside=min(job.at_once, cores()) - 1)
    return _pool[1]
