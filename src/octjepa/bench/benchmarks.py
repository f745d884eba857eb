"""What can be measured, and against what: subjects, their peers, and what each figure is.

The first peer of a subject is the one that is taken unless another is named. Peers come from libraries that an engineer
of the field would use instead; those that need one name its extra when it is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from octjepa.bench import embed, ingest, loader, memory, scaling, step, vjepa2
from octjepa.bench.alternating_runs import Contest


@dataclass(frozen=True)
class Peer:
    """`says` is what it does, in a line."""

    says: str
    contest: Callable[[], AbstractContextManager[Contest]]


@dataclass(frozen=True)
class Subject:
    """`ours` says what octjepa does, `reads` how to read the ratio; `repeats` take a minute or two on two cores."""

    ours: str
    unit: str
    reads: str
    repeats: int
    peers: Mapping[str, Peer]


_RATE = "volumes a second"
_FASTER = "ours / other: above 1 octjepa is faster, below 1 the other"

SUBJECTS: dict[str, Subject] = {
    "step": Subject(
        "a training update of tiny_cpu as pretrain takes it", _RATE, _FASTER, 7,
        {
            "plain": Peer("the same network and loss in a plain eager torch loop", step.against_plain),
            "transformers": Peer("VJEPA2Model of the same size, both on every patch", vjepa2.step_against_transformers),
            "fp32": Peer("the same update in fp32", partial(step.against_change, "train.precision=fp32")),
            "compiled": Peer("the same update, blocks compiled", partial(step.against_change, "machine.compile=true")),
            "sincos": Peer("the same with sin-cos positions", partial(step.against_change, "model.positions=sincos")),
        },
    ),
    "ingest": Subject(
        "octjepa ingest, one process", _RATE, _FASTER, 5,
        {
            "pydicom": Peer("pydicom, SciPy's zoom, percentiles; one process", ingest.against_pydicom),
            "monai": Peer("pydicom, MONAI's Spacingd, size, percentiles; one process", ingest.against_monai),
        },
    ),
    "loader": Subject(
        "training samples of the whole grid from a store", _RATE, _FASTER, 7,
        {
            "torch": Peer("a torch DataLoader over the same store with plain random transforms", loader.against_torch),
            "monai": Peer("MONAI's CacheDataset in memory and its random transforms", loader.against_monai),
        },
    ),
    "embed": Subject(
        "octjepa embed; against transformers the encoder alone", _RATE, _FASTER, 7,
        {
            "single": Peer("the same table by a script, one volume at a time", embed.against_single),
            "transformers": Peer("VJEPA2Model with the same weights, batches of 16", vjepa2.embed_against_transformers),
        },
    ),
    "memory": Subject(
        "peak memory of an update as octjepa plan predicts it", "bytes",
        "ours / other: 1 is right, below 1 an update holds more than was predicted", 3,
        {"measured": Peer("the peak of a process that takes the update, on the CPU", memory.against_measured)},
    ),
    "scaling": Subject(
        "octjepa pretrain as two processes of one thread, on the CPU", _RATE,
        "ours / other: above 1 two processes are faster than the one", 3,
        {
            "threads": Peer("one process of two threads", partial(scaling.against_one_process, 2)),
            "one_thread": Peer("one process of one thread", partial(scaling.against_one_process, 1)),
        },
    ),
}  # fmt: skip
