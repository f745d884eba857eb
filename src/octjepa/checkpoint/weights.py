"""Reads the weights of one encoder from a run, a checkpoint folder, an exported folder or a weights file.

The weights come with the recipe that they were trained by, and with a record of the volumes that they learned from.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from octjepa.checkpoint.folder import check_schema, list_checkpoints, read_manifest, read_tensors
from octjepa.checkpoint.location import MANIFEST, Location, has_file, parse_location
from octjepa.checkpoint.state import MODEL_FILE, read_recipe
from octjepa.checkpoint.tensor_file import check_weights, misfit, read_safetensors
from octjepa.config import load_run_recipe, stored_recipe
from octjepa.errors import CheckpointError, WrongCheckpointError
from octjepa.machine import excess_of_parameters
from octjepa.model import VJEPA3D, Encoder
from octjepa.model.vjepa3d import usual_predictor_size
from octjepa.objectives.base import get_objective
from octjepa.outside import named_by
from octjepa.parsing import parse_json_object
from octjepa.recipe import Recipe
from octjepa.remote import info, local_copy
from octjepa.shipped import packaged_encoders, shipped

EXPORTED = "model.safetensors"  # in a folder that `octjepa export` made
TUNED = "tuned"  # where `octjepa finetune` puts the encoder it tuned, within its folder
Which = Literal["target", "student"]
PREFIXES: dict[Which, str] = {"target": "target_encoder.", "student": "context_encoder."}  # of their weights' names
_MOST_BLOCKS = 256  # of a predictor
_NO_ENCODER = "no pretrained encoder: give a pretraining run, its step-* folder or an exported encoder"


@dataclass(frozen=True, eq=False)
class EncoderWeights:
    """One encoder as it was stored.

    network: the encoder with these weights. recipe: of the run that trained it. name: in results. recorded_training:
    content ids of its training volumes, and the `uid_key` of those that have a UID. which: "target" for the EMA target
    or "student" for the encoder that was trained.
    """

    network: Encoder
    recipe: Recipe
    name: str
    recorded_training: frozenset[str]
    which: Which


def read_weights(path: str | Path, which: Which | None = None) -> EncoderWeights:
    """Reads the encoder at `path`; path, which and errors are those of `octjepa.load_encoder`."""
    named = shipped(path)
    path = named or parse_location(path)
    if isinstance(path, Path) and (path / EXPORTED).is_file() and not (path / MANIFEST).is_file():
        path = path / EXPORTED
    is_file = _is_file(path)
    folder = None if is_file or not (isinstance(path, str) or path.is_dir()) else newest_checkpoint(path)
    if folder is not None:
        kind = read_manifest(folder).get("kind")
        if kind is not None:
            raise WrongCheckpointError(f"{folder} is a {kind}, {_NO_ENCODER}")
        recipe, weights = read_recipe(folder), read_tensors(folder, MODEL_FILE)
        named_encoder, trained_on = read_manifest(folder).get("encoder"), read_manifest(folder).get("trained_on", ())
    elif is_file:
        recipe, weights, about = _read_file(path)
        named_encoder, trained_on = about.get("encoder"), about.get("trained_on", [])
    else:
        raise WrongCheckpointError(
            f"no checkpoint at {path}: give a run folder, a step-* folder, a .safetensors file, or the name of weights "
            f"in the package ({', '.join(packaged_encoders())})"
        )
    which = which or _named_encoder(named_encoder, recipe, weights)
    prefix = PREFIXES[which]
    tensors = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    if not tensors and any(key.startswith(tuple(PREFIXES.values())) for key in weights):
        raise WrongCheckpointError(f"{path} holds only one encoder, and not the {which}")
    encoder = _build_encoder(recipe, tensors, path)
    return EncoderWeights(encoder, recipe, recipe.name if named is None else named.name, frozenset(trained_on), which)


def newest_checkpoint(path: Location) -> Location:
    """The checkpoint folder that `path` is, or the newest of the run or checkpoints folder it is.

    Raises WrongCheckpointError (none), OutsideError (the run's recipe names checkpoints elsewhere).
    """
    if has_file(path, MANIFEST):
        return path
    checkpoints = path
    if isinstance(path, Path) and (path / TUNED).is_dir():
        checkpoints = path / TUNED
    elif isinstance(path, Path) and (path / "recipe.yaml").is_file():
        saves = load_run_recipe(path / "recipe.yaml").checkpoint.dir
        checkpoints = named_by(path, "recipe.yaml", saves or "")
    folders = list_checkpoints(checkpoints)
    if not folders:
        raise WrongCheckpointError(f"{path} holds no checkpoint: expected step-*/ folders in {checkpoints}")
    return folders[-1]


def _named_encoder(name: Any, recipe: Recipe, weights: Mapping[str, torch.Tensor]) -> Which:
    """The encoder that the checkpoint names; of an exported or a tuned one, the only one there is."""
    present = [which for which, prefix in PREFIXES.items() if any(key.startswith(prefix) for key in weights)]
    if len(present) == 1:
        return present[0]
    return "student" if (name or recipe.exported_encoder) == "student" else "target"


def _is_file(path: Location) -> bool:
    """Whether `path` is a weights file, on a disk or in a bucket."""
    if isinstance(path, str):
        return path.endswith(".safetensors") and info(path) is not None
    return path.is_file()


def _read_file(path: Location) -> tuple[Recipe, dict[str, torch.Tensor], dict[str, Any]]:
    try:
        with local_copy(path) if isinstance(path, str) else nullcontext(path) as local:
            try:
                weights, stored = read_safetensors(local, str(path))
            except CheckpointError as error:
                raise ValueError(str(error)) from None
        metadata = parse_json_object(stored["octjepa"])
        check_schema(int(metadata["schema"]), str(path))
        return stored_recipe(metadata["recipe"], f"of {path}"), weights, metadata
    except (KeyError, ValueError, TypeError, OSError, OverflowError):
        raise CheckpointError(f"{path} is not a weights file of octjepa, or it is damaged") from None


def _build_encoder(recipe: Recipe, weights: Mapping[str, torch.Tensor], path: Location) -> Encoder:
    """The encoder of `recipe` with `weights`.

    Raises WrongCheckpointError: no weights; CheckpointError: those of another encoder, or NaN.
    """
    if not weights:
        raise WrongCheckpointError(f"{path} holds other weights, {_NO_ENCODER}")
    check_weights(weights, str(path))
    _check_size(recipe, weights, path)
    encoder = VJEPA3D.from_recipe(recipe).target_encoder
    encoder.load_state_dict(weights)
    return encoder


def _check_size(recipe: Recipe, weights: Mapping[str, torch.Tensor], path: Location) -> None:
    """Raises CheckpointError if `weights` are not those of the encoder of `recipe`, before the encoder is built.

    A small file from a stranger may describe a network that fills the memory. So the number of blocks is compared
    first, because each block takes time. Then the shapes are compared on the device "meta", where a tensor takes no
    memory.
    """
    size = recipe.model.encoder_size
    depth = sum(name.endswith(".norm1.weight") for name in weights)
    predictor = usual_predictor_size(get_objective(recipe.objective.name), size, None, recipe.model.predictor_depth)
    if size.depth != depth or predictor.depth > _MOST_BLOCKS:
        raise CheckpointError(
            f"the weights of {path} do not fit the encoder of their recipe: they have {depth} blocks, the recipe has "
            f"{size.depth:,}, and {predictor.depth:,} in the predictor"
        )
    with torch.device("meta"):
        model = VJEPA3D.from_recipe(recipe)
    if difference := misfit(weights, model.target_encoder):
        raise CheckpointError(f"the weights of {path} do not fit the encoder of their recipe: {difference}")
    if excess := excess_of_parameters(sum(parameter.numel() for parameter in model.parameters())):
        raise CheckpointError(f"the recipe of {path} describes networks of {excess}")
