"""Distils a teacher into a 3D encoder: `python -m octjepa.tasks.distil.train --teacher NAME:PATH --store S --out OUT`.

OUT/encoder holds the result for `octjepa.load_encoder`. The same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from octjepa.distributed.runtime import Runtime
from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.export import export_encoder
from octjepa.encoders.locate import open_encoder
from octjepa.store import Store
from octjepa.tasks.distil.training import DistilNetwork, DistilSettings, Pairs, distil
from octjepa.tasks.encoder_command import (
    add_training_options,
    exit_code_of,
    recorded_volumes,
    run_fingerprint,
    starting_encoder,
)


def main() -> int:
    """Reads the command line and trains; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m octjepa.tasks.distil.train", description=__doc__)
    add_training_options(parser, batch=8)
    parser.add_argument("--teacher", required=True, help="encoder to learn from: NAME:PATH, a folder, a run or a name")
    parser.add_argument("--store", type=Path, required=True, help="volumes, made with the student's preprocessing")
    parser.add_argument("--teacher-store", type=Path, help="the same scans, made with another preprocessing")
    parser.add_argument("--tokens", type=int, default=256, help="of each volume in a batch")
    arguments = parser.parse_args()
    return exit_code_of(partial(_train, arguments), arguments.out)


def _train(arguments: argparse.Namespace) -> None:
    student = starting_encoder(arguments)
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
    others = (student.weights_hash(), runtime.precision, teacher.weights_hash(), pairs.fingerprint)
    fingerprint = run_fingerprint(asdict(settings), student, arguments, *others)
    _, volume_ids = distil(network, pairs, settings, runtime, arguments.out, fingerprint)
    seen = recorded_volumes(store, volume_ids) | student.recorded_training
    recipe = student.recipe.model_copy(update={"name": "distil"})
    trained = PretrainedEncoder(
        network.encoder.cpu(), recipe, "distil", seen | teacher.recorded_training, student.which
    )
    export_encoder(trained, "safetensors", arguments.out / "encoder")


if __name__ == "__main__":
    sys.exit(main())
