"""The state of a run, saved to and loaded from a checkpoint: weights, Adam moments, the number of updates done.

Nothing else is needed for an exact resume: order, masks and augmentation are functions of the update number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from octjepa.checkpoint.folder import read_manifest, read_tensors, write_folder
from octjepa.checkpoint.location import MANIFEST, Location
from octjepa.config import science, science_hash, stored_recipe
from octjepa.distributed.runtime import full_tensor
from octjepa.errors import CheckpointError, WrongCheckpointError
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimiser.safetensors"


def snapshot(model: VJEPA3D, optimizer: torch.optim.AdamW) -> dict[str, dict[str, Tensor]]:
    """Copies on the host of all that a checkpoint holds, by file: training may go on while they are written.

    Where the model is sharded over ranks, every rank must call it; each gets the full tensors.
    """
    tensors = {MODEL_FILE: model.state_dict(), OPTIMIZER_FILE: _moments(model, optimizer)}
    return {
        file: {name: full_tensor(value).detach().to("cpu", copy=True) for name, value in content.items()}
        for file, content in tensors.items()
    }


def save(
    parent: Location,
    update: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    recipe: Recipe,
    skipped_updates: int,
    trained_on: Sequence[str],
    score: float | None = None,
    encoder: str = "target",
) -> Location:
    """Writes `tensors` of `snapshot` as `parent/step-<update>`; raises CheckpointError when disk or bucket refuses.

    `trained_on` are the ids (content hashes) of the training volumes, and the `uid_key` of those that have a UID: they
    are stored with the weights, so that no encoder is tested on eyes it was trained on. `score` is the online probe's,
    by which the best checkpoint is kept; `encoder` (target or student) the one that the checkpoint is loaded as.
    """
    about = {
        "science_hash": science_hash(recipe),
        "contract_hash": science_hash(recipe.preprocessing),
        "recipe": recipe.model_dump(mode="json"),
        "skipped_updates": skipped_updates,
        "trained_on": sorted(trained_on),
        "score": score,
        "encoder": encoder,
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
        model.load_state_dict(read_tensors(folder, MODEL_FILE))
    except RuntimeError as error:
        raise WrongCheckpointError(
            f"checkpoint {folder} was made by a version whose {recipe.objective.name} is another network: go on with "
            f"that version, or start a new run with another --out ({str(error).splitlines()[-1].strip()})"
        ) from None
    _fill_moments(read_tensors(folder, OPTIMIZER_FILE), model, optimizer)
    return manifest["update"], int(manifest.get("skipped_updates", 0))


def read_recipe(folder: Location) -> Recipe:
    """The recipe that a checkpoint was made with. Raises CheckpointError where its manifest is damaged."""
    stored = read_manifest(folder).get("recipe")
    if not isinstance(stored, dict):
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: it holds no recipe")
    return stored_recipe(stored, f"of checkpoint {folder}")


def differences(saved: Recipe, given: Recipe) -> list[str]:
    """Science fields that differ, as `section.key: checkpoint's, recipe's`."""
    saved_fields, given_fields = _flat(science(saved)), _flat(science(given))
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


def _moments(model: VJEPA3D, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    return {
        f"{kind}/{name}": optimizer.state[parameter][kind]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for kind in ("exp_avg", "exp_avg_sq", "step")
    }


def _fill_moments(stored: dict[str, Tensor], model: VJEPA3D, optimizer: torch.optim.AdamW) -> None:
    parameters = dict(model.named_parameters())
    for key, value in stored.items():
        kind, _, name = key.partition("/")
        parameter = parameters[name]
        optimizer.state[parameter][kind] = value.to(parameter.device)  # fused AdamW wants `step` there too
