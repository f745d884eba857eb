"""Parts of an embedding as tasks of a Ray cluster: many machines, one folder of parts that all of them see.

Each Ray worker keeps the encoder it loaded for its next part. When a machine is lost, its parts are given to others.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from octjepa.distributed.runtime import Runtime
from octjepa.embed.shard import Embedder, Job
from octjepa.encoders.locate import open_encoder
from octjepa.errors import OctjepaError, UsageError
from octjepa.ingest.ray_pool import RETRIES, cluster, worker_error
from octjepa.outside import allow_outside
from octjepa.store import Store

Part = tuple[int, list[str]]


def embed_on_ray(job: Job, parts: Sequence[Part], workers: int | None) -> Iterator[int]:
    """Numbers of the parts as they are finished, from the cluster at RAY_ADDRESS or one started here for the time.

    Each task takes a CPU, and a GPU where the cluster has any. Raises UsageError (Ray is not installed, no such
    cluster, a machine that does not see the parts) and OctjepaError (the cluster was lost, or what a worker met).
    """
    with cluster(workers) as ray:
        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(embed_on_machine)
        shared = ray.put(job)
        busy = [task.remote(part, shared) for part in parts]
        try:
            while busy:
                (ended,), busy = ray.wait(busy, num_returns=1)
                number, without_folder = task_result(ray, ended)
                if without_folder:
                    raise UsageError(
                        f"the machine {without_folder} of the Ray cluster does not see {job.folder}: put --out (and "
                        "--tokens) on a disk that all machines share under the same path"
                    )
                yield number
        finally:
            for reference in busy:
                ray.cancel(reference, force=True)


def task_result(ray: object, reference: object) -> tuple[int, str]:
    """(volumes, part name) of a finished Ray task. Raises the worker's error, OctjepaError where Ray lost it."""
    try:
        result: tuple[int, str] = ray.get(reference)  # type: ignore[attr-defined]
    except ray.exceptions.RayTaskError as error:  # type: ignore[attr-defined]
        raise worker_error(error) from error
    except ray.exceptions.RayError as error:  # type: ignore[attr-defined]
        raise OctjepaError(
            f"the Ray cluster failed ({type(error).__name__}); finished parts are kept: run the same command again"
        ) from error
    return result


# -- on the machines of the cluster --

_worker_state: tuple[str, Embedder, Store] | None = None  # of this Ray worker, from task to task


def embed_on_machine(part: Part, job: Job) -> tuple[int, str]:
    """Embeds a part where Ray chose: (number, "") once it is written, (number, machine) without the folder of parts."""
    global _worker_state
    number, volume_ids = part
    if not job.folder.is_dir() or (job.options.tokens and not Path(job.options.tokens).is_dir()):
        return number, socket.gethostname()
    if _worker_state is None or _worker_state[0] != job.key:
        with allow_outside():  # whoever sent the job has opened the same checkpoint
            store = Store.open(job.store)
            encoder = open_encoder(job.checkpoint, store.preprocessing)
        if encoder.weights_hash() != job.weights:  # its part would be joined with those of the job's weights
            raise OctjepaError(
                f"the weights at {job.checkpoint} changed after the embedding began: run the same command again"
            )
        _worker_state = job.key, Embedder(encoder, job.options, Runtime("fp32").device), store
    _, worker, store = _worker_state
    worker.write(job, number, store, volume_ids)
    return number, ""
