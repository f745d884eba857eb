"""What `make bench` measures, and against which peers; one comparison from its name to its figures.

The first peer of a benchmark is the default. Peers are what an engineer of the field would use instead; one that needs
a library names the extra when it is absent.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from benchmarks.peers import (
    embed,
    ingest,
    loader,
    memory,
    scaling,
    segment,
    sparse_vjepa,
    step,
    transformers_videomae,
    transformers_vjepa2,
)
from benchmarks.peers.alternating_runs import Comparison, run_alternately, summary
from benchmarks.peers.data import WHOLE_GRID

from octjepa.errors import UsageError

_log = logging.getLogger(__name__)
_BUSY_SHARE = 0.5  # load per core above which a warning is logged


@dataclass(frozen=True)
class Peer:
    """A reference implementation: a description of one line, and the comparison with octjepa."""

    description: str
    comparison: Callable[[], AbstractContextManager[Comparison]]


@dataclass(frozen=True)
class Benchmark:
    """What octjepa does (`ours`), the unit, how to read the ratio, and the runs that take a minute or two."""

    ours: str
    unit: str
    interpretation: str
    repeats: int
    peers: Mapping[str, Peer]


def run_benchmark(subject: str, against: str | None = None, repeats: int | None = None) -> dict[str, Any]:
    """Runs a benchmark against one of its peers and returns the verb's JSON.

    {"subject", "against", "ours_is", "other_is", "unit", "reads", "ours", "other", "ratio", "spread", "runs", "setup",
    "machine"}: medians over the runs in `unit`; `ratio` is the median of the runs' ours / other, `spread` its smallest
    and largest; `machine` includes the load before the work began.

    Raises UsageError: no such benchmark or peer (with those there are), fewer than one run, a library that is absent.
    """
    if subject not in BENCHMARKS:
        raise UsageError(f"no benchmark is called {subject!r}: there are {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[subject]
    name = next(iter(benchmark.peers)) if against is None else against
    if name not in benchmark.peers:
        raise UsageError(f"bench {subject} knows no {name!r}: it can be measured against {', '.join(benchmark.peers)}")
    count = benchmark.repeats if repeats is None else repeats
    if count < 1:
        raise UsageError(f"--repeats must be 1 at least, got {count}")
    load, cores = round(os.getloadavg()[0], 2), os.cpu_count() or 1
    machine = {"processor": platform.machine(), "cores": cores, "load": load, "torch": version("torch")}
    if load > _BUSY_SHARE * cores:
        _log.warning(
            "this machine is busy (load %.1f on %d cores): take the ratio with its spread, and the figures as low. "
            "Threads that wait for each other suffer most; OMP_WAIT_POLICY=passive helps them",
            load,
            cores,
        )
    peer = benchmark.peers[name]
    with peer.comparison() as comparison:
        figures = summary(run_alternately(comparison, count, f"bench {subject}"))
    about = {"subject": subject, "against": name, "ours_is": benchmark.ours, "other_is": peer.description}
    about |= {"unit": benchmark.unit, "reads": benchmark.interpretation}
    return {**about, **figures, "setup": dict(comparison.setup), "machine": machine}


_RATE = "volumes per second"
WIDER = ("model.width=384", "model.depth=12", "model.heads=12")
_FASTER = "Above 1 octjepa is faster, below 1 the reference"

BENCHMARKS: dict[str, Benchmark] = {
    "step": Benchmark(
        "one training update of the recipe tiny_cpu_vjepa, as in octjepa pretrain",
        _RATE,
        _FASTER,
        7,
        {
            "plain": Peer("the same network and loss in a plain eager torch loop", step.compare_with_plain),
            "transformers": Peer(
                "VJEPA2Model of the same size; both encode every patch", transformers_vjepa2.step_against_transformers
            ),
            "shipped": Peer(
                "VJEPA2Model.forward of the same size, whose student encodes every patch",
                transformers_vjepa2.step_against_shipped,
            ),
            "shipped_default": Peer(
                "the same; ours is the default recipe, tiny_cpu, a masked autoencoder",
                partial(transformers_vjepa2.step_against_shipped, transformers_videomae.RECIPE),
            ),
            "sparse": Peer(
                "V-JEPA in plain PyTorch after its papers, on every patch; two masks per volume on both sides",
                sparse_vjepa.compare_with_sparse,
            ),
            "sparse_alike": Peer(
                "the same; octjepa encodes every patch, too", partial(sparse_vjepa.compare_with_sparse, *WHOLE_GRID)
            ),
            "videomae": Peer(
                "VideoMAEForPreTraining of the same size on every patch; ours is the default recipe, tiny_cpu",
                transformers_videomae.step_against_videomae,
            ),
            "videomae_alike": Peer(
                "the same; octjepa encodes every patch and predicts every hidden one, too",
                partial(transformers_videomae.step_against_videomae, *transformers_videomae.ALIKE),
            ),
            "matmul": Peer(
                "a plain matrix product with as many operations; the ratio is the share of its rate",
                step.compare_with_matmul,
            ),
            "matmul_384": Peer("the same at width 384, depth 12", partial(step.compare_with_matmul, *WIDER)),
            "fp32": Peer("the same update in fp32", partial(step.compare_with_change, "train.precision=fp32")),
            "bf16": Peer("the same update in bf16", partial(step.compare_with_change, "train.precision=bf16")),
            "compiled": Peer(
                "the same update with compiled blocks", partial(step.compare_with_change, "machine.compile=true")
            ),
            "sincos": Peer(
                "the same update with sin-cos positions", partial(step.compare_with_change, "model.positions=sincos")
            ),
        },
    ),
    "ingest": Benchmark(
        "octjepa ingest, one process",
        _RATE,
        _FASTER,
        5,
        {
            "pydicom": Peer(
                "pydicom, SciPy's zoom, percentiles; one process", partial(ingest.compare_with, ingest.by_scipy)
            ),
            "monai": Peer(
                "pydicom, MONAI's Spacingd, size, percentiles; one process",
                partial(ingest.compare_with, ingest.by_monai),
            ),
        },
    ),
    "loader": Benchmark(
        "training samples of the whole grid, read from a store",
        _RATE,
        _FASTER,
        7,
        {
            "torch": Peer(
                "a torch DataLoader on the same store with plain random transforms",
                partial(loader.compare_with, loader.PlainViews),
            ),
            "monai": Peer(
                "MONAI's CacheDataset in memory with its random transforms",
                partial(loader.compare_with, loader.monai_views),
            ),
            "monai_persistent": Peer(
                "MONAI's PersistentDataset on disk with its random transforms",
                partial(loader.compare_with, loader.monai_persistent_views),
            ),
            "decoding": Peer(
                "every sample from its DICOM file, decoded by pydicom and resampled by SciPy",
                partial(loader.compare_with, loader.DecodedViews),
            ),
        },
    ),
    "embed": Benchmark(
        "octjepa embed (against transformers only the encoder)",
        _RATE,
        _FASTER,
        7,
        {
            "single": Peer("a script that writes the same table, one volume at a time", embed.compare_with_single),
            "transformers": Peer(
                "VJEPA2Model with the same weights, batches of 16", transformers_vjepa2.embed_against_transformers
            ),
            "vit_large": Peer(
                "a ViT-L/16 of 224 x 224 pixels on every B-scan, as RETFound's, random weights",
                embed.compare_with_vit_large,
            ),
        },
    ),
    "segment": Benchmark(
        "octjepa segment on 49 B-scans of 496 x 768 in memory, without reading and writing",
        _RATE,
        _FASTER,
        5,
        {
            "monai": Peer("MONAI's U-Net with as many weights, on each B-scan once", segment.compare_with_monai),
            "surface_finder": Peer(
                "only the ILM and Bruch's membrane, by the surface finder", segment.compare_with_surface_finder
            ),
        },
    ),
    "memory": Benchmark(
        "peak memory of an update, as predicted by octjepa plan",
        "bytes",
        "1 is exact; below 1 an update needs more memory than predicted",
        3,
        {
            "measured": Peer(
                "the measured peak of a process that makes the update, on the CPU", memory.compare_with_measured
            )
        },
    ),
    "peak": Benchmark(
        "measured peak memory of an update on the CPU, 64 volumes at once",
        "bytes",
        "Below 1 octjepa needs less memory",
        3,
        {
            "shipped": Peer(
                "VJEPA2Model.forward of the same size, whose student encodes every patch",
                partial(memory.compare_with_vjepa2, "shipped"),
            ),
            "transformers": Peer(
                "VJEPA2Model of the same size; both encode every patch",
                partial(memory.compare_with_vjepa2, "transformers", *WHOLE_GRID, "model.positions=rope_tiled"),
            ),
        },
    ),
    "scaling": Benchmark(
        "octjepa pretrain as two processes of one thread each, on the CPU",
        _RATE,
        "Above 1 two processes are faster than one",
        3,
        {
            "threads": Peer("one process of two threads", partial(scaling.compare_with_one_process, 2)),
            "one_thread": Peer("one process of one thread", partial(scaling.compare_with_one_process, 1)),
        },
    ),
}
