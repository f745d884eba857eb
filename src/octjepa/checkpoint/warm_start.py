"""Initialises both encoders from existing weights: V-JEPA 2's in Hugging Face form, or a checkpoint of octjepa.

Only safetensors are read. Student and target start with the same weights; the predictor is initialised randomly.
"""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from octjepa.checkpoint.tensor_file import check_weights, read_safetensors
from octjepa.checkpoint.weights import read_weights
from octjepa.errors import CheckpointError, UsageError
from octjepa.model import VJEPA3D
from octjepa.model.positions import Rope
from octjepa.model.vjepa2 import from_vjepa2
from octjepa.parsing import parse_json_object, read_object
from octjepa.recipe import ROPE_BASE, Recipe
from octjepa.store.contract import contract_differences

_log = logging.getLogger(__name__)
_INDEX = "model.safetensors.index.json"


def start_weights(model: VJEPA3D, recipe: Recipe) -> frozenset[str]:
    """Fills the encoders of `model` from `recipe.model.warm_start`, and the target from `recipe.objective.teacher`.

    Returns what they record of the volumes that they were trained on: the run's encoder has also learned from them.
    Raises as `warm_start` and `load_teacher`.
    """
    return warm_start(model, recipe) | load_teacher(model, recipe)


def load_teacher(model: VJEPA3D, recipe: Recipe) -> frozenset[str]:
    """Fills the target encoder of `model` from `recipe.objective.teacher`; returns its record of its training volumes.

    Raises UsageError: an objective of voxels, which needs no target encoder, or a teacher of another size, patch,
    positions or preprocessing; and as `read_weights`.
    """
    if recipe.objective.teacher is None:
        return frozenset()
    if model.objective.predicts_pixels:
        raise UsageError(f"objective.teacher is unused by {recipe.objective.name}, which predicts voxels: drop it")
    path = recipe.objective.teacher
    source = read_weights(path)
    differing = contract_differences(source.recipe.preprocessing, recipe.preprocessing, "teacher")
    if differing:
        raise UsageError(f"objective.teacher {path} reads other volumes:\n  " + "\n  ".join(differing))
    _check(model, dict(source.network.state_dict()), source.network.heads, "objective.teacher", path, recipe.model.size)
    # Student and teacher read the same patches and positions. Origin and spacing are those of the preprocessing.
    for section, name in (("tokens", "patch_size"), ("model", "positions"), ("model", "position_unit")):
        of_teacher = getattr(getattr(source.recipe, section), name)
        of_recipe = getattr(getattr(recipe, section), name)
        if of_teacher != of_recipe:
            raise UsageError(
                f"objective.teacher {path} was trained with {section}.{name}={of_teacher}, the recipe says "
                f"{of_recipe}: set both alike"
            )
    if source.network.rope != model.target_encoder.rope:
        raise UsageError(f"objective.teacher {path} has other positions than the recipe: set model.rope_base alike")
    model.target_encoder.load_state_dict(source.network.state_dict())
    return source.recorded_training


def warm_start(model: VJEPA3D, recipe: Recipe) -> frozenset[str]:
    """Fills both encoders of `model` from `recipe.model.warm_start`, in place; does nothing if that is null.

    Returns what the weights record of the volumes that they were trained on. Raises UsageError (nothing
    there, another width, depth or number of heads, patches that cannot be carried over) and CheckpointError (damaged).
    """
    if recipe.model.warm_start is None:
        return frozenset()
    trained_on: frozenset[str] = frozenset()
    path = Path(recipe.model.warm_start)
    if (path / "config.json").is_file():
        tensors, trained_on = _read_folder(path)
        try:
            weights = from_vjepa2(tensors, recipe.tokens.patch_size)
        except (ValueError, KeyError) as error:
            raise UsageError(f"model.warm_start {path}: {error}") from None
        heads, source_recipe = _heads(path), {"positions": "rope_tiled", "position_unit": "index"}
        rope: Rope = ROPE_BASE
    else:
        source = read_weights(path)
        trained_on = source.recorded_training
        if source.recipe.tokens.patch_size != recipe.tokens.patch_size:  # shapes agree if the voxel counts do
            raise UsageError(
                f"model.warm_start {path} was trained with tokens.patch_size={source.recipe.tokens.patch_size}, the "
                f"recipe says {recipe.tokens.patch_size}: set both alike"
            )
        weights, heads, rope = dict(source.network.state_dict()), source.network.heads, source.network.rope
        source_recipe = {name: getattr(source.recipe.model, name) for name in ("positions", "position_unit")}
    _check(model, weights, heads, "model.warm_start", path, recipe.model.size)
    for encoder in (model.context_encoder, model.target_encoder):
        encoder.load_state_dict(weights)
    for name, source_value in source_recipe.items():
        ours = getattr(recipe.model, name)
        if ours != source_value:
            _log.warning(
                "the weights of %s were trained with model.%s=%s, the recipe says %s: expect slower convergence",
                path,
                name,
                source_value,
                ours,
            )
    if model.context_encoder.rope != rope and recipe.model.positions != "sincos":
        remedy = f"set model.rope_base={rope:g}" if isinstance(rope, float) else "theirs are of another grid"
        _log.warning(
            "the weights of %s were trained with other rotary frequencies than the recipe has (%s): expect slower "
            "convergence",
            path,
            remedy,
        )
    return trained_on


def _check(model: VJEPA3D, weights: dict[str, Tensor], heads: int, key: str, path: str | Path, size: str) -> None:
    """Raises UsageError where stem, shapes or number of heads of the weights differ from those of the model."""
    tensors = model.context_encoder.state_dict()
    if ("embed.weight" in tensors) != ("embed.weight" in weights):
        stem, other = ("linear", "patch_mlp") if "embed.weight" in tensors else ("patch_mlp", "linear")
        raise UsageError(
            f"{key} {path} embeds patches by a {other} stem, the recipe by model.stem={stem}, and one "
            f"cannot be carried over to the other: set model.stem={other}"
        )
    odd = [name for name, value in tensors.items() if name not in weights or weights[name].shape != value.shape]
    extra = weights.keys() - tensors.keys()
    if odd or extra:
        named = (odd or sorted(extra))[0]
        shape = tuple(weights[named].shape) if named in weights else "absent"
        ours = tuple(tensors[named].shape) if named in tensors else "absent"
        raise UsageError(
            f"{key} {path} is of another size: {named} is {shape} there and {ours} with model.size={size} "
            f"and patches {model.patch_size}. Choose model.size (or width, depth and heads) and tokens.patch_size "
            "to fit."
        )
    if heads != model.context_encoder.heads:  # no shape differs, but the same features would be split otherwise
        raise UsageError(
            f"{key} {path} has {heads} attention heads, model.size {size} has "
            f"{model.context_encoder.heads}: choose a model.size, model.heads or weights to fit"
        )


def _heads(folder: Path) -> int:
    """The number of attention heads in a Hugging Face folder's config.json."""
    try:
        heads = read_object(folder / "config.json")["num_attention_heads"]
    except (OSError, ValueError, KeyError, TypeError):
        heads = None
    if not isinstance(heads, int):
        raise CheckpointError(f"{folder}/config.json has no num_attention_heads: fetch the folder again")
    return heads


def _read_folder(folder: Path) -> tuple[dict[str, Tensor], frozenset[str]]:
    """All tensors of a Hugging Face folder, in one file or in shards, and what it records of its training volumes.

    Only `octjepa export --format hf` writes such a record, into the metadata of the weights.
    """
    try:
        if (folder / _INDEX).is_file():
            index = read_object(folder / _INDEX)["weight_map"]
            names = sorted({Path(name).name for name in index.values()})  # a name, never a path out of the folder
        else:
            names = ["model.safetensors"]
        weights: dict[str, Tensor] = {}
        trained_on: set[str] = set()
        for name in names:
            tensors, metadata = read_safetensors(folder / name)
            weights |= tensors
            if "octjepa" in metadata:
                trained_on.update(parse_json_object(metadata["octjepa"])["trained_on"])
        check_weights(weights, str(folder))
    except FileNotFoundError:
        raise UsageError(f"{folder} holds a config.json, but no model.safetensors: fetch the weights as well") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read as weights in Hugging Face form: {error}") from None
    return weights, frozenset(trained_on)
