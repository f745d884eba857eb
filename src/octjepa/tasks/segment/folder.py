"""A head as a folder: its weights, its recipe, its classes, and the contract of the encoder it belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from octjepa.checkpoint import PretrainedEncoder, load_encoder
from octjepa.checkpoint.folder import list_folders, read_manifest, read_tensors, write_folder
from octjepa.checkpoint.location import holds
from octjepa.config import recipe_from, science_hash
from octjepa.distributed.runtime import Runtime
from octjepa.embed.shard import weights_hash
from octjepa.errors import CheckpointError, ContractError, UsageError, WrongCheckpointError
from octjepa.tasks.segment.decoder import Decoder, DecoderHead
from octjepa.tasks.segment.linear import LinearHead
from octjepa.tasks.segment.prior import Prior
from octjepa.tasks.segment.recipe import RECIPES, SegmentRecipe
from octjepa.tasks.segment.windows import of_encoder

KIND = "segmentation head"
PRIOR = "place_prior"
RESULTS = "results.json"
HEAD_FILE, ENCODER_FILE = "head.safetensors", "encoder.safetensors"
Head = LinearHead | DecoderHead


class SavedHead(NamedTuple):
    """A head ready to say, with what it says and how it was made."""

    head: Head
    classes: tuple[str, ...]
    settings: SegmentRecipe
    encoder: PretrainedEncoder


def contract_of(encoder: PretrainedEncoder) -> dict[str, Any]:
    """What an encoder must agree in: how volumes and tokens are made, and its weights."""
    recipe = encoder.recipe
    return {
        "preprocessing": recipe.preprocessing.model_dump(mode="json"),
        "tokens": recipe.tokens.model_dump(mode="json"),
        "model": {key: getattr(recipe.model, key) for key in ("size", "positions", "position_unit")},
        "contract_hash": science_hash(recipe.preprocessing),
        "weights": weights_hash(encoder),
    }


def save_head(
    out: Path, head: Head, classes: tuple[str, ...], settings: SegmentRecipe, encoder: PretrainedEncoder
) -> Path:
    """Writes `out/head/step-*` whole or not at all. A tuned head holds its encoder, too."""
    tensors = {HEAD_FILE: _tensors(head)}
    if settings.tuned and isinstance(head, DecoderHead):
        tensors[ENCODER_FILE] = dict(head.network.state_dict())
    about = {
        "kind": KIND,
        "classes": list(classes),
        "settings": settings.model_dump(mode="json"),
        "contract": contract_of(encoder),
        "encoder_recipe": encoder.recipe.model_dump(mode="json"),
        "trained_on": [],
    }
    return Path(write_folder(out / "head", 0 if settings.decoder is None else settings.decoder.updates, tensors, about))


def _tensors(head: Head) -> dict[str, torch.Tensor]:
    kept = {PRIOR: torch.from_numpy(np.ascontiguousarray(head.prior.shares, dtype=np.float32))}
    if isinstance(head, DecoderHead):
        return {**kept, **head.decoder.state_dict()}
    return {**kept, "weights": torch.from_numpy(np.ascontiguousarray(head.weights, dtype=np.float32))}


def is_head(path: str | Path) -> bool:
    return find_head(Path(path)) is not None


def find_head(path: Path) -> Path | None:
    """The folder of the head that `path` is or holds."""
    for folder in (path, *(Path(found) for found in reversed([*list_folders(path), *list_folders(path / "head")]))):
        if folder.is_dir() and holds(folder, "manifest.json"):
            return folder if read_manifest(folder).get("kind") == KIND else None
    return None


def load_head(path: str | Path, checkpoint: str | None) -> SavedHead:
    """A head and its encoder, the weights of `checkpoint`; of a tuned head its own.

    Raises WrongCheckpointError (no head), CheckpointError (damaged), ContractError (another encoder, with what
    differs), UsageError (no encoder given).
    """
    folder = find_head(Path(path))
    if folder is None:
        raise WrongCheckpointError(f"{path} holds no segmentation head: give the folder that octjepa segment wrote")
    about = read_manifest(folder)
    settings = RECIPES.read(about["settings"], f"of {folder}")
    device = Runtime("fp32").device
    if checkpoint is None and not settings.tuned:
        raise UsageError(f"the head {path} was made on a frozen encoder: name it with --from")
    if settings.tuned:
        from octjepa.model import VJEPA3D

        recipe = recipe_from(about["encoder_recipe"], f"of {folder}")
        encoder = PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, recipe.name)
        _fill(encoder.encoder, read_tensors(folder, ENCODER_FILE), folder)
    else:
        encoder = load_encoder(str(checkpoint))
        refuse_another(about["contract"], contract_of(encoder), str(path), str(checkpoint))
    encoder = encoder.to(device)
    return SavedHead(_head(folder, about, settings, encoder), tuple(about["classes"]), settings, encoder)


def _head(folder: Path, about: dict[str, Any], settings: SegmentRecipe, encoder: PretrainedEncoder) -> Head:
    tensors = read_tensors(folder, HEAD_FILE)
    prior = Prior(tensors.pop(PRIOR).numpy(), settings.columns)
    if settings.decoder is None:
        return LinearHead(of_encoder(encoder), tensors["weights"].numpy().astype(float), prior, encoder.recipe)
    decoder = Decoder(encoder.dim, encoder.recipe.grid, settings.decoder.width, len(about["classes"]) + 1)
    _fill(decoder, tensors, folder)
    decoder = decoder.to(next(encoder.encoder.parameters()).device).eval()
    return DecoderHead(encoder.encoder, decoder, prior, encoder.recipe)


def _fill(module: torch.nn.Module, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {folder} do not fit their recipe: {error}") from None


def refuse_another(head: dict[str, Any], encoder: dict[str, Any], head_name: str, encoder_name: str) -> None:
    """Raises ContractError with every field that differs."""
    differences = []
    for section in ("preprocessing", "tokens", "model"):
        ours, theirs = head[section], encoder[section]
        for key in sorted({*ours, *theirs}):
            if _plain(ours.get(key)) != _plain(theirs.get(key)):
                differences.append(f"  {section}.{key}: head {ours.get(key)}, encoder {theirs.get(key)}")
    if not differences and head["weights"] != encoder["weights"]:
        differences.append(f"  weights: head {head['weights'][:12]}, encoder {encoder['weights'][:12]} (SHA-256)")
    if differences:
        raise ContractError(
            f"the head {head_name} was made on another encoder than {encoder_name}:\n"
            + "\n".join(differences)
            + "\nname the weights it was made on with --from, or make a head for these"
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
