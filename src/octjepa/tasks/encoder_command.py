"""The parts that the commands of encoder trainings share: options, the start, the fingerprint, exit codes.

`python -m octjepa.tasks.truth.train` and `python -m octjepa.tasks.distil.train` differ in their data and losses only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from octjepa.checkpoint.location import check_writable
from octjepa.cohort.recorded_scans import uid_key
from octjepa.config import science_hash
from octjepa.distributed.signals import Interrupted
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.errors import OctjepaError, UsageError
from octjepa.locks import writer_lock
from octjepa.store import Store
from octjepa.store.index import text_column
from octjepa.train.learner import STATES


def add_training_options(parser: argparse.ArgumentParser, batch: int) -> None:
    """Adds the options of every encoder training; `batch` is a default."""
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints, metrics and the encoder")
    parser.add_argument("--init", default="phantom-tiny", help="encoder to start from: a name, a run or a folder")
    parser.add_argument("--random", action="store_true", help="start from random weights of the same architecture")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--precision", default="auto", choices=("fp32", "bf16", "auto"))


def check_learning_rate(rate: float) -> None:
    """Raises UsageError: not a learning rate that a schedule takes."""
    if not 0 < rate <= 1:
        raise UsageError(f"a learning rate of {rate}: expected a number above 0, 1 at most")


def starting_encoder(arguments: argparse.Namespace) -> PretrainedEncoder:
    """The encoder that the training starts from; seeds torch. Raises as `load_encoder`."""
    torch.manual_seed(arguments.seed)
    encoder = load_encoder(arguments.init)
    if not arguments.random:
        return encoder
    train = encoder.recipe.train.model_copy(update={"seed": arguments.seed})
    encoder.recipe = encoder.recipe.model_copy(update={"train": train})
    return encoder.untrained()


def run_fingerprint(
    settings: Mapping[str, Any], encoder: PretrainedEncoder, arguments: argparse.Namespace, *others: str
) -> str:
    """Names everything that decides the result but the number of updates, which states hold (`train.learner`)."""
    settled = [
        {**settings, "updates": None},
        science_hash(encoder.recipe),
        str(arguments.init),
        arguments.random,
        *others,
    ]
    return hashlib.sha256(json.dumps(settled).encode()).hexdigest()[:16]


def recorded_volumes(store: Store, volume_ids: Collection[str]) -> frozenset[str]:
    """What weights record of the volumes that they learned from, so that no test uses the same scans."""
    uids = text_column(store.table.loc[store.table["volume_id"].isin(volume_ids), "sop_instance_uid"])
    return frozenset({*volume_ids, *(uid_key(uid) for uid in uids if uid)})


def exit_code_of(train: Callable[[], None], out: Path) -> int:
    """Runs `train`, while no other process writes to `out`: 0, 1 after an error of octjepa, or 128 plus the number of
    a signal."""
    try:
        with writer_lock(out):
            check_writable(out / STATES, out)
            train()
    except Interrupted as error:
        print(f"{error}", file=sys.stderr)
        return error.exit_code
    except OctjepaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
