"""The state that a training resumes from: weights, Adam moments, and the number of updates done.

`snapshot` and `fill` copy the state of any network and its optimizer; pretraining and the supervised trainings
(`octjepa.train.learner`) both use them. `save` and `load` add what a checkpoint of a pretraining records. Nothing else
is needed for an exact resume: order, masks and augmentation are functions of the update number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octjepa.checkpoint.folder import read_manifest, read_tensors, write_folder
from octjepa.checkpoint.location import MANIFEST, Location
from octjepa.checkpoint.tensor_file import check_weights
from octjepa.config import science, science_hash, stored_recipe
from octjepa.distributed.adamw import skips_on_device
from octjepa.distributed.runtime import full_tensor
from octjepa.errors import CheckpointError, WrongCheckpointError
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimiser.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def snapshot(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Copies on the host of weights and moments, by file: training may continue while they are written.

    Where the network is sharded over ranks, every rank must call it; each gets the full tensors.
    """
    weights = network.state_dict()  # first: it puts shards in place of what FSDP2 gathered for the last forward pass
    moments = {
        f"{kind}/{name}": value
        for name, parameter in network.named_parameters()
        if parameter in optimizer.state
        for kind, value in optimizer.state[parameter].items()
        if kind in MOMENTS
    }
    return {
        file: {name: full_tensor(value).detach().to("cpu", copy=True) for name, value in content.items()}
        for file, content in {MODEL_FILE: weights, OPTIMIZER_FILE: moments}.items()
    }


def fill(folder: Location, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fills network and optimizer in place from the files of `snapshot` in `folder`.

    Raises CheckpointError when a file is damaged or holds NaN, and RuntimeError, as torch does, when the weights are
    those of another network.
    """
    weights, moments = (read_tensors(folder, name) for name in (MODEL_FILE, OPTIMIZER_FILE))
    parameters = dict(network.named_parameters())
    # Only what is trained: a buffer may hold NaN until it is measured.
    check_weights({name: value for name, value in weights.items() if name in parameters} | moments, str(folder))
    network.load_state_dict(weights)
    for key, value in moments.items():
        kind, _, name = key.partition("/")
        parameter = parameters[name]
        on_host = kind == "step" and not skips_on_device(optimizer)
        optimizer.state[parameter][kind] = value if on_host else value.to(parameter.device)


@dataclass(frozen=True)
class Record:
    """Metadata that a checkpoint of a pretraining records with its weights.

    recipe: that of the run. skipped_updates: how many were not taken. trained_on: ids (content hashes) of the training
    volumes, and the `uid_key` of those that have a UID; they are stored with the weights, so that no encoder is tested
    on eyes it was trained on. score: the online probe's, which chooses the best checkpoint. encoder: the encoder that
    is loaded, target or student.
    """

    recipe: Recipe
    skipped_updates: int
    trained_on: Sequence[str]
    score: float | None = None
    encoder: str = "target"


def save(parent: Location, update: int, tensors: Mapping[str, Mapping[str, Tensor]], record: Record) -> Location:
    """Writes `tensors` of `snapshot` as `parent/step-<update>`; raises CheckpointError when disk or bucket refuses."""
    recipe = record.recipe
    about = {
        "science_hash": science_hash(recipe),
        "contract_hash": science_hash(recipe.preprocessing),
        "recipe": recipe.model_dump(mode="json"),
        "skipped_updates": record.skipped_updates,
        "trained_on": sorted(record.trained_on),
        "score": record.score,
        "encoder": record.encoder,
    }
    return write_folder(parent, update, tensors, about)


def load(folder: Location, model: VJEPA3D, optimizer: torch.optim.AdamW, recipe: Recipe) -> tuple[int, int]:
    """Fills model and optimizer in place; returns (updates done, updates skipped).

    Raises WrongCheckpointError naming every recipe field that differs, when the checkpoint is of another run, and
    CheckpointError when it is damaged.
    """
    manifest = read_manifest(folder)
    if changed := differences(read_recipe(folder), recipe):  # not the hash: a newer version may know more keys
        changes = "\n  ".join(changed)
        raise WrongCheckpointError(
            f"checkpoint {folder} is of another run and cannot be resumed by recipe {recipe.name}:\n  {changes}\n"
            "Give the recipe it was made with, or start a new run with another --out."
        )
    try:
        fill(folder, model, optimizer)
    except RuntimeError as error:
        raise WrongCheckpointError(
            f"checkpoint {folder} was made by a version whose {recipe.objective.name} is another network: continue "
            "with "
            f"that version, or start a new run with another --out ({str(error).splitlines()[-1].strip()})"
        ) from None
    return manifest["update"], int(manifest["skipped_updates"])


def read_recipe(folder: Location) -> Recipe:
    """The recipe that a checkpoint was made with. Raises CheckpointError where its manifest is damaged."""
    stored = read_manifest(folder).get("recipe")
    if not isinstance(stored, dict):
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: it holds no recipe")
    return stored_recipe(stored, f"of checkpoint {folder}")


def differences(saved: Recipe, requested: Recipe) -> list[str]:
    """Science fields that differ, as `section.key: checkpoint's, recipe's`."""
    saved_fields, given_fields = _flat(science(saved)), _flat(science(requested))
    return [
        f"{key}: checkpoint {saved_fields.get(key)!r}, recipe {given_fields.get(key)!r}"
        for key in sorted(saved_fields.keys() | given_fields.keys())
        if saved_fields.get(key) != given_fields.get(key)
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
