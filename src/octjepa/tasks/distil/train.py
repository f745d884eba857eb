"""Distils a teacher into a 3D encoder: `python -m octjepa.tasks.distil.train --teacher NAME:PATH --store S --out OUT`.

OUT/encoder holds the result for `octjepa.load_encoder`. The same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from octjepa.cohort.recorded_scans import uid_key
from octjepa.config import science_hash
from octjepa.distributed.runtime import Runtime
from octjepa.distributed.signals import Interrupted
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.export import export_encoder
from octjepa.encoders.locate import open_encoder
from octjepa.errors import OctjepaError
from octjepa.store import Store
from octjepa.tasks.distil.training import DistilNetwork, DistilSettings, Pairs, distil


def main() -> int:
    """Reads the command line and trains; the exit code is 0, 1 after an error, or 128 plus the number of a signal."""
    parser = argparse.ArgumentParser(prog="python -m octjepa.tasks.distil.train", description=__doc__)
    parser.add_argument("--teacher", required=True, help="encoder to learn from: NAME:PATH, a folder, a run or a name")
    parser.add_argument("--store", type=Path, required=True, help="volumes, made with the student's preprocessing")
    parser.add_argument("--teacher-store", type=Path, help="the same scans, made with another preprocessing")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints, metrics and the encoder")
    parser.add_argument("--init", default="phantom-tiny", help="student to start from: a name, a run or a folder")
    parser.add_argument("--random", action="store_true", help="start from random weights of the same architecture")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of each volume in a batch")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--precision", default="auto", choices=("fp32", "bf16", "auto"))
    arguments = parser.parse_args()
    try:
        _train(arguments)
    except Interrupted as error:
        print(f"{error}", file=sys.stderr)
        return error.exit_code
    except OctjepaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    student = load_encoder(arguments.init)
    if arguments.random:
        student = student.untrained()
    settings = DistilSettings(
        updates=arguments.updates,
        batch=arguments.batch,
        tokens=arguments.tokens,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )
    runtime = Runtime(arguments.precision)
    store = Store.open(arguments.store)
    teacher_store = None if arguments.teacher_store is None else Store.open(arguments.teacher_store)
    teacher = open_encoder(arguments.teacher, (teacher_store or store).preprocessing).to(runtime.device)
    pairs = Pairs(store, student.recipe, teacher, teacher_store)
    student.network.requires_grad_(True).train()
    network = DistilNetwork(student.network, teacher.dim).to(runtime.device)
    # A run that has not ended may be made longer or shorter when it is resumed.
    settled = [
        {**asdict(settings), "updates": None},
        science_hash(student.recipe),
        str(arguments.init),
        arguments.random,
        teacher.weights_hash(),
    ]
    fingerprint = hashlib.sha256(json.dumps(settled).encode()).hexdigest()[:16]
    _, volume_ids = distil(network, pairs, settings, runtime, arguments.out, fingerprint)
    seen_uids = store.table.loc[store.table["volume_id"].isin(volume_ids), "sop_instance_uid"]
    seen = {*volume_ids, *(uid_key(str(uid)) for uid in seen_uids if uid), *student.recorded_training}
    recipe = student.recipe.model_copy(update={"name": "distil"})
    trained = PretrainedEncoder(
        network.encoder.cpu(), recipe, "distil", seen | teacher.recorded_training, student.which
    )
    export_encoder(trained, "safetensors", arguments.out / "encoder")


if __name__ == "__main__":
    sys.exit(main())
