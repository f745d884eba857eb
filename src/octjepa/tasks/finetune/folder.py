"""The folder of a fine-tuning: recipe and origin, the tuned encoder with its heads, and what `octjepa inspect` shows.

A tuned checkpoint is an encoder's checkpoint with a second file for the heads: `octjepa embed` and all others read it
as any encoder. `trained_on` holds what pretraining and tuning saw, so that these people are not tested.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.checkpoint.folder import list_checkpoints, update_number, write_folder
from octjepa.checkpoint.location import check_writable
from octjepa.checkpoint.state import MODEL_FILE
from octjepa.checkpoint.weights import PREFIXES, TUNED
from octjepa.config import science_hash, to_yaml
from octjepa.distributed.runtime import Runtime
from octjepa.encoders.external.saved import WEIGHTS, describe_encoder
from octjepa.errors import OctjepaError, UsageError, WrongCheckpointError
from octjepa.evaluate.calibration import calibration_shares
from octjepa.evaluate.results import differences_by_name
from octjepa.files import read_json_object, write_atomic, write_json
from octjepa.locks import LOCK
from octjepa.metrics.scores import Task
from octjepa.record import plain
from octjepa.remote import is_remote
from octjepa.store import Store
from octjepa.tasks import TASKS
from octjepa.tasks.encoder_command import recorded_volumes
from octjepa.tasks.finetune.external import TunableExternal
from octjepa.tasks.finetune.network import TunableEncoder, TunedNetwork
from octjepa.tasks.finetune.recipe import FinetuneRecipe, load_recipe
from octjepa.tasks.finetune.result import FinetuneResult
from octjepa.tasks.finetune.tuning_data import TuningData
from octjepa.train.learner import STATES, host_weights
from octjepa.train.run_folder import chunks_hash, code_and_versions, data_hash, reached_update

RESULTS = "results.json"
HEAD_FILE = "head.safetensors"
KIND = "fine-tuning"
_ABOUT = "run.json"
# The settings that a resumed run must share with the run that began, and what to say if it does not.
_UNCHANGED = {
    "science_hash": "the recipe",
    "weights": "the encoder (--from)",
    "data_hash": "the labelled volumes of the store",
    "chunks_hash": "what the store makes of these volumes (their spacing, for one)",
    "labels_hash": "the labels",
}


@dataclass(frozen=True)
class HeadSpec:
    """How the outputs of a head are read. classes: none for a quantity, whose `scale` is (mean, standard deviation).

    shift: of the class logits, chosen on validation people; shares: of the classes in calibrated probabilities
    (`calibration_shares`).
    """

    target: str
    task: Task
    classes: tuple[str, ...]
    scale: tuple[float, float]
    shift: tuple[float, ...]
    shares: tuple[float, ...]

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> HeadSpec:
        """JSON knows no tuples. Raises TypeError: other keys."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        return cls(**values)


def check_folder(out: Path, resume: bool) -> None:
    """Raises UsageError where a fine-tuning cannot begin in `out`, or resume there."""
    exists = (out / _ABOUT).is_file()
    if exists and read_about(out).get("kind") != KIND:
        raise UsageError(f"{out} holds a run of another kind: give --out a new folder")
    if exists and not resume:
        raise UsageError(f"{out} already holds a fine-tuning: add --resume to continue with it, or give another --out")
    if resume and not exists:
        raise UsageError(f"{out} holds no fine-tuning to resume: leave --resume out to start one there")
    left = {LOCK, "recipe.yaml", ".recipe.yaml.tmp", f".{_ABOUT}.tmp"}  # by one that was killed before its run.json
    if not exists and out.is_dir() and any(path.name not in left for path in out.iterdir()):
        raise UsageError(f"{out} is not empty: give --out a new folder, so that nothing is mixed")


def is_begun(out: Path) -> bool:
    """Whether a fine-tuning was begun in `out`."""
    return (out / _ABOUT).is_file() and read_about(out).get("kind") == KIND


def read_about(out: Path) -> dict[str, Any]:
    """run.json. Raises OctjepaError: damaged."""
    return _read(out / _ABOUT)


def read_results(out: Path) -> FinetuneResult | None:
    """The results of a finished fine-tuning; None while it is not finished. Raises OctjepaError: damaged."""
    return FinetuneResult.from_json(_read(out / RESULTS)) if (out / RESULTS).is_file() else None


def recorded_precision(out: Path) -> str | None:
    """The precision in which the fine-tuning in `out` began; None if none did. Raises RecipeError: damaged."""
    return load_recipe(out / "recipe.yaml").precision if (out / _ABOUT).is_file() else None


def open_folder(
    out: Path,
    recipe: FinetuneRecipe,
    encoder: TunableEncoder,
    weights: str,
    store: Store,
    data: TuningData,
    runtime: Runtime,
) -> None:
    """Writes recipe.yaml and run.json, or checks those that are there. `weights`: hash of the encoder's at the start.

    Raises WrongCheckpointError naming everything that changed since the run began, UsageError where weights cannot be
    written.
    """
    for folder in (out, out / "scratch"):
        check_writable(folder / TUNED, out)
        check_writable(folder / STATES, out)
    ids = [name for split in ("train", "val", "test") for name in data.volume_ids(split)]
    unchanged = {
        "science_hash": science_hash(recipe),
        "weights": weights,
        "data_hash": data_hash(store, ids),
        "chunks_hash": chunks_hash(store, ids, recipe.sampling(encoder.recipe)),
        "labels_hash": _labels_hash(data),
    }
    if (out / _ABOUT).is_file():
        begun = read_about(out)
        changed = [what for name, what in _UNCHANGED.items() if begun.get(name) != unchanged[name]]
        if changed:
            raise WrongCheckpointError(
                f"{out} cannot be resumed: since it was begun, {', '.join(changed)} changed. Give what it was begun "
                "with (recipe.yaml, run.json), or start a new run with another --out"
            )
        return
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "recipe.yaml", lambda file: file.write(to_yaml(recipe).encode()))
    targets = [target.test_target for target in data.targets]
    about = {
        "kind": KIND,
        "name": recipe.name,
        "encoder": encoder.name,
        "targets": [
            {"target": target.name, "task": target.task, "classes": list(target.classes)} for target in targets
        ],
        "level": recipe.level,
        **unchanged,
        "contract_hash": science_hash(encoder.recipe.preprocessing),
        "volumes": {split: len(data.labelled(split)) for split in ("train", "val", "test")},
        **code_and_versions(),
        "devices": runtime.describe(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "store": store.location if is_remote(store.location) else os.path.relpath(store.path, out),
    }
    write_json(out / _ABOUT, about)


def save_tuned(
    folder: Path,
    network: TunedNetwork,
    recipe: FinetuneRecipe,
    data: TuningData,
    store: Store,
    shifts: Sequence[np.ndarray],
    update: int,
) -> Path:
    """Writes `folder/step-<update>`, `update` being that of the weights; `data` is of `store`.

    Raises CheckpointError.
    """
    pretrained, heads = network.pretrained, dict[str, Any]()
    encoder: dict[str, Any] = {}
    for name, value in host_weights(network).items():
        if name.startswith("encoder."):
            encoder[name.removeprefix("encoder.")] = value
        else:
            heads[name] = value
    specs = [
        HeadSpec(
            target.fit_target.name,
            labels.task,
            labels.classes,
            labels.scale,
            tuple(shift.tolist()),
            tuple(calibration_shares(target.fit_target).tolist()) if labels.classes else (),
        )
        for target, labels, shift in zip(data.targets, data.labels, shifts, strict=True)
    ]
    about = {
        "recipe": pretrained.recipe.model_dump(mode="json"),
        "contract_hash": science_hash(pretrained.recipe.preprocessing),
        "trained_on": sorted(pretrained.recorded_training | recorded_volumes(store, data.volume_ids("train"))),
        TUNED: {
            "settings": recipe.model_dump(mode="json"),
            "heads": [asdict(spec) for spec in specs],
            "devices": sorted(set(data.frame["device"].iloc[data.labelled("train")]) - {""}),
            "by_visit": data.evaluation.cases.by_visit,
        },
    }
    if isinstance(pretrained, TunableExternal):
        about |= describe_encoder(pretrained.external, pretrained.preprocessing)
        files = {WEIGHTS: encoder, HEAD_FILE: heads}
    else:
        files = {
            MODEL_FILE: {f"{PREFIXES['target']}{name}": value for name, value in encoder.items()},
            HEAD_FILE: heads,
        }
    return Path(write_folder(folder, update, files, about))


def describe(out: Path) -> dict[str, object]:
    """The output of `octjepa inspect`: `finished`, and then metrics of the test people, else where the run stopped.

    Raises OctjepaError: a file of the folder is damaged, or its recipe.
    """
    about, results = read_about(out), read_results(out)
    shown: dict[str, object] = {
        **{key: about[key] for key in ("kind", "name", "encoder")},
        "targets": [{key: target[key] for key in ("target", "task", "classes")} for target in about.get("targets", ())],
        "level": about.get("level"),
        "volumes": {split: about["volumes"][split] for split in ("train", "val", "test")},
    }
    if results is None:
        shown |= {"finished": False, **_progress(out, load_recipe(out / "recipe.yaml"))}
    else:
        choice, paired = results.tuned_choice(), results.paired
        if choice is None:
            raise OctjepaError(f"{out / RESULTS} is damaged: it names no selected update. Start a new run")
        several = len({pair.target for pair in paired}) > 1
        shown |= {
            "finished": True,
            "faults": [fault.what for fault in results.faults],
            "metrics": plain(results.metrics),
            "tuned_minus": differences_by_name(
                paired, lambda pair: f"{pair.target} {pair.against}" if several else pair.against
            ),
            "weights_of_update": choice.update,
            "chosen_by": choice.by,
            "updates": choice.of,
            "checkpoint": results.checkpoint,
        }
    return shown | {key: value for key, value in about.items() if key not in shown}


def _progress(out: Path, recipe: FinetuneRecipe) -> dict[str, object]:
    """The current part of the run, its last update, and the update after which --resume would continue."""
    part, folder = "tuned", out
    if recipe.scratch and list_checkpoints(out / TUNED):
        part, folder = "tuned from first weights", out / "scratch"
    if list_checkpoints(folder / TUNED):
        return {"stopped_in": "the test"}
    states = list_checkpoints(folder / STATES)
    return {
        "stopped_in": part,
        "last_update": reached_update(folder),
        "resumes_after_update": update_number(states[-1]) if states else 0,
        "updates": recipe.stages.updates,
    }


def _labels_hash(data: TuningData) -> str:
    """Of the targets, their classes and every label that was joined."""
    digest = hashlib.sha256()
    for target, labels in zip(data.targets, data.labels, strict=True):
        digest.update("\x1f".join([target.test_target.name, target.test_target.label_hash, *labels.classes]).encode())
        digest.update(labels.truth.tobytes())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path, "start a new run with another --out")


class FinetuneTask:
    """Folders of fine-tunings."""

    def holds(self, folder: Path) -> bool:
        """By the kind in run.json."""
        return (folder / _ABOUT).is_file() and read_about(folder).get("kind") == KIND

    def describe(self, folder: Path) -> dict[str, object]:
        """See `describe`."""
        return describe(folder)


TASKS.register("finetune")(FinetuneTask())
