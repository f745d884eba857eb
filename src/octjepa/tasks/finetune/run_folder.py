"""The folder of a fine-tuning: what was asked, of whom, with which encoder; and whether it may be gone on with."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from octjepa.checkpoint import PretrainedEncoder
from octjepa.config import science_hash, to_yaml
from octjepa.distributed.runtime import Runtime
from octjepa.errors import UsageError, WrongCheckpointError
from octjepa.files import read_json_object, write_atomic, write_json
from octjepa.remote import is_remote
from octjepa.store import Store
from octjepa.tasks.finetune.recipe import FinetuneRecipe
from octjepa.tasks.finetune.tuning_data import Cohort
from octjepa.train.run_folder import chunks_hash, code_hash, data_hash

RESULTS = "results.json"
_ABOUT = "run.json"
KIND = "fine-tuning"
# What a run that goes on must share with the one that began, and what to say where it does not.
_SAME = {
    "science_hash": "the recipe",
    "weights": "the encoder (--from)",
    "data_hash": "the labelled volumes of the store",
    "chunks_hash": "what the store makes of these volumes (their spacing, for one)",
    "labels_hash": "the labels",
}


def refuse_folder(out: Path, resume: bool) -> None:
    """Raises UsageError where `out` cannot be begun, or gone on with."""
    there = (out / _ABOUT).is_file()
    if there and _read(out / _ABOUT).get("kind") != KIND:
        raise UsageError(f"{out} holds a run of another kind: give --out a new folder")
    if there and not resume:
        raise UsageError(f"{out} already holds a fine-tuning: add --resume to go on with it, or give another --out")
    if resume and not there:
        raise UsageError(f"{out} holds no fine-tuning to resume: leave --resume out to start one there")
    if not there and out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: give --out a new folder, so that nothing is mixed")


def read_about(out: Path) -> dict[str, Any]:
    """run.json. Raises OctjepaError: damaged."""
    return _read(out / _ABOUT)


def read_results(out: Path) -> dict[str, Any] | None:
    """What a finished fine-tuning said; None while it is not finished."""
    return _read(out / RESULTS) if (out / RESULTS).is_file() else None


def open_folder(
    out: Path,
    settings: FinetuneRecipe,
    encoder: PretrainedEncoder,
    weights: str,
    store: Store,
    cohort: Cohort,
    runtime: Runtime,
) -> None:
    """Writes recipe.yaml and run.json, or checks those that are there. `weights`: hash of the encoder's as it came.

    Raises WrongCheckpointError naming everything that is another than when the run began.
    """
    ids = [name for split in ("train", "val", "test") for name in cohort.volume_ids(split)]
    same = {
        "science_hash": science_hash(settings),
        "weights": weights,
        "data_hash": data_hash(store, ids),
        "chunks_hash": chunks_hash(store, ids, settings.sampling(encoder.recipe)),
        "labels_hash": _labels_hash(cohort),
    }
    if (out / _ABOUT).is_file():
        begun = _read(out / _ABOUT)
        changed = [what for name, what in _SAME.items() if begun.get(name) != same[name]]
        if changed:
            raise WrongCheckpointError(
                f"{out} cannot be resumed: since it was begun, {', '.join(changed)} changed. Give what it was begun "
                "with (recipe.yaml, run.json), or start anew with another --out"
            )
        return
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "recipe.yaml", lambda file: file.write(to_yaml(settings).encode()))
    about: Mapping[str, Any] = {
        "kind": KIND,
        "name": settings.name,
        "encoder": encoder.name,
        "targets": [
            {"target": one.test_target.name, "task": one.test_target.task, "classes": list(one.test_target.classes)}
            for one in cohort.asked
        ],
        "level": settings.level,
        **same,
        "contract_hash": science_hash(encoder.recipe.preprocessing),
        "code_hash": code_hash(),
        "volumes": {split: len(cohort.rows(split)) for split in ("train", "val", "test")},
        "versions": {name: version(name) for name in ("octjepa", "torch", "numpy", "safetensors", "scikit-learn")}
        | {"python": platform.python_version()},
        "devices": runtime.describe(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "store": store.location if is_remote(store.location) else os.path.relpath(store.path, out),
    }
    write_json(out / _ABOUT, about)


def _labels_hash(cohort: Cohort) -> str:
    """Of the targets, their classes and every label that was joined."""
    digest = hashlib.sha256()
    for one, tuning in zip(cohort.asked, cohort.tunings, strict=True):
        digest.update("\x1f".join([one.test_target.name, one.test_target.label_hash, *tuning.classes]).encode())
        digest.update(tuning.truth.tobytes())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path, "start anew with another --out")
