"""The folder of a segmentation head: weights, recipe, classes, contract of the encoder; and what `inspect` shows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from octjepa.checkpoint.folder import list_checkpoints, read_manifest, read_tensors, write_folder
from octjepa.checkpoint.location import has_file
from octjepa.checkpoint.tensor_file import check_weights
from octjepa.config import science_hash, stored_recipe
from octjepa.distributed.runtime import Runtime
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.errors import ContractError, OctjepaError, UsageError, WrongCheckpointError
from octjepa.evaluate.results import differences_by_name
from octjepa.files import read_json_object
from octjepa.model import VJEPA3D
from octjepa.outside import named_by
from octjepa.record import plain
from octjepa.remote import is_remote
from octjepa.shipped import shipped, shipped_names
from octjepa.tasks import TASKS
from octjepa.tasks.segment.decoder import DecoderHead
from octjepa.tasks.segment.linear import LinearHead
from octjepa.tasks.segment.network import Decoder
from octjepa.tasks.segment.recipe import RECIPES, SegmentRecipe
from octjepa.tasks.segment.result import SegmentationResult
from octjepa.tasks.segment.windows import PositionPrior, encoder_tokens
from octjepa.train.learner import load_weights

KIND = "segmentation head"
RESULTS = "results.json"
HEAD_FOLDER = "head"  # in the folder of a training, with the weights
HEAD_FILE, ENCODER_FILE = "head.safetensors", "encoder.safetensors"
_PRIOR = "place_prior"  # the name of the position prior in head.safetensors
_ANEW = "remove the folder and train the head again"
Head = LinearHead | DecoderHead


class SavedHead(NamedTuple):
    """A head that was read from its folder, with its classes, recipe and encoder."""

    head: Head
    classes: tuple[str, ...]
    recipe: SegmentRecipe
    encoder: PretrainedEncoder


def contract_of(encoder: PretrainedEncoder) -> dict[str, Any]:
    """The properties that an encoder must share with that of a head: how volumes and tokens are made, and its
    weights.
    """
    recipe = encoder.recipe
    return {
        "preprocessing": recipe.preprocessing.model_dump(mode="json"),
        "tokens": recipe.tokens.model_dump(mode="json"),
        "model": {key: getattr(recipe.model, key) for key in ("size", "positions", "position_unit")},
        "contract_hash": science_hash(recipe.preprocessing),
        "weights": encoder.weights_hash(),
    }


def save_head(
    out: Path,
    head: Head,
    classes: tuple[str, ...],
    recipe: SegmentRecipe,
    encoder: PretrainedEncoder,
    checkpoint: str | Path = "",
) -> Path:
    """Writes `out/head/step-*` whole or not at all. A head with a tuned encoder holds that as well.

    checkpoint: where the frozen encoder was loaded from. The head notes the place, relative to itself on a disk.
    """
    weights = {_PRIOR: torch.from_numpy(np.ascontiguousarray(head.prior.shares, dtype=np.float32))}
    if isinstance(head, DecoderHead):
        weights |= head.decoder.state_dict()
    else:
        weights["weights"] = torch.from_numpy(np.ascontiguousarray(head.weights, dtype=np.float32))
    tensors = {HEAD_FILE: weights}
    if recipe.tuned and isinstance(head, DecoderHead):
        tensors[ENCODER_FILE] = dict(head.network.state_dict())
    about = {
        "kind": KIND,
        "encoder_from": _encoder_path(checkpoint, out),
        "classes": list(classes),
        "settings": recipe.model_dump(mode="json"),
        "contract": contract_of(encoder),
        "encoder_recipe": encoder.recipe.model_dump(mode="json"),
        "trained_on": [],
    }
    return Path(
        write_folder(out / HEAD_FOLDER, 0 if recipe.decoder is None else recipe.decoder.updates, tensors, about)
    )


def _encoder_path(checkpoint: str | Path, out: Path) -> str:
    """The name, address or path of an encoder as the manifest of a head in `out` notes it; "" if it is unknown."""
    if not checkpoint or is_remote(checkpoint) or shipped(checkpoint) is not None:
        return str(checkpoint)
    return os.path.relpath(checkpoint, out)


def _noted_encoder(folder: Path, out: Path, about: Mapping[str, object]) -> str | Path:
    """The place of the frozen encoder that the head in `folder` notes, relative to `out`.

    Raises UsageError: none is noted, or it is not there any more. OutsideError: a place that the user did not allow.
    """
    noted = about.get("encoder_from")
    how = "name it with --from"
    if not isinstance(noted, str) or not noted:
        raise UsageError(f"the head {out} was made on a frozen encoder: {how}")
    if noted in shipped_names():
        return noted
    location = named_by(folder.parent.parent, f"{HEAD_FOLDER}/{folder.name}/manifest.json", noted)
    if isinstance(location, Path) and not location.exists():
        where = os.path.normpath(location)
        raise UsageError(f"the head {out} was made on the frozen encoder {where}, which is not there: {how}")
    return location


def is_head(path: str | Path) -> bool:
    """Whether `path` is or holds the folder of a head. A folder that cannot be read counts as none."""
    try:
        return find_head(Path(path)) is not None
    except PermissionError:
        return False  # the error names a path that the user did not give; the search for scans names the folder


def find_head(path: Path) -> Path | None:
    """The folder of the head that `path` is or holds."""
    steps = reversed([*list_checkpoints(path), *list_checkpoints(path / HEAD_FOLDER)])
    for folder in (path, *(Path(step) for step in steps)):
        if folder.is_dir() and has_file(folder, "manifest.json"):
            return folder if read_manifest(folder).get("kind") == KIND else None
    return None


def load_head(path: str | Path, checkpoint: str | None) -> SavedHead:
    """A head and its encoder.

    checkpoint: the frozen encoder; None: the encoder that the head notes. A head whose encoder was tuned with it holds
    the encoder, and `checkpoint` is not used.

    Raises WrongCheckpointError (no head), CheckpointError (damaged), ContractError (another encoder, with the
    differences), UsageError (the noted encoder is not there), OutsideError (the noted place is not allowed).
    """
    folder = find_head(Path(path))
    if folder is None:
        raise WrongCheckpointError(f"{path} holds no segmentation head: give the folder that octjepa segment wrote")
    about = read_manifest(folder)
    recipe = RECIPES.read(about["settings"], f"of {folder}")
    if recipe.tuned:
        pretraining = stored_recipe(about["encoder_recipe"], f"of {folder}")
        encoder = PretrainedEncoder(VJEPA3D.from_recipe(pretraining).target_encoder, pretraining, pretraining.name)
        load_weights(encoder.encoder, read_tensors(folder, ENCODER_FILE), folder)
    else:
        source = _noted_encoder(folder, Path(path), about) if checkpoint is None else checkpoint
        encoder = load_encoder(source)
        require_same_encoder(about["contract"], contract_of(encoder), str(path), str(source))
    encoder = encoder.to(Runtime("fp32").device)
    return SavedHead(_head(folder, about, recipe, encoder), tuple(about["classes"]), recipe, encoder)


def _head(folder: Path, about: dict[str, Any], recipe: SegmentRecipe, encoder: PretrainedEncoder) -> Head:
    tensors = read_tensors(folder, HEAD_FILE)
    width = encoder.recipe.preprocessing.stored_size[2]
    prior = PositionPrior(tensors.pop(_PRIOR).numpy(), recipe.columns, width)
    if recipe.decoder is None:
        check_weights({"weights": tensors["weights"]}, str(folder))
        return LinearHead(encoder_tokens(encoder), tensors["weights"].numpy().astype(float), prior, encoder.recipe)
    decoder = Decoder(encoder.dim, encoder.recipe.grid, recipe.decoder.width, len(about["classes"]) + 1)
    load_weights(decoder, tensors, folder)
    decoder = decoder.to(next(encoder.encoder.parameters()).device).eval()
    return DecoderHead(encoder.encoder, decoder, prior, encoder.recipe)


def require_same_encoder(head: dict[str, Any], encoder: dict[str, Any], head_name: str, encoder_name: str) -> None:
    """Raises ContractError with every field that differs."""
    differences = []
    for section in ("preprocessing", "tokens", "model"):
        ours, encoder_values = head[section], encoder[section]
        for key in sorted({*ours, *encoder_values}):
            if _plain(ours.get(key)) != _plain(encoder_values.get(key)):
                differences.append(f"  {section}.{key}: head {ours.get(key)}, encoder {encoder_values.get(key)}")
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


def describe(out: Path) -> dict[str, object]:
    """The output of `octjepa inspect`: classes, recipe and encoder of the head in `out`, and its metrics of test
    people.

    Raises WrongCheckpointError (no head), OctjepaError (a damaged file).
    """
    folder = find_head(out)
    assert folder is not None  # the caller's own check
    about = read_manifest(folder)
    recipe = RECIPES.read(about["settings"], f"of {folder}")
    shown = {
        "kind": "segmentation",
        "name": recipe.name,
        "head": recipe.head,
        "classes": about["classes"],
        "encoder": about["encoder_recipe"]["name"],
        "finished": (out / RESULTS).is_file(),
        "checkpoint": str(folder),
        "contract_hash": about["contract"]["contract_hash"],
    }
    if not shown["finished"]:
        return shown | {"notes": [f"its results are missing ({RESULTS}): {_ANEW}"]}
    try:
        results = SegmentationResult.from_json(read_json_object(out / RESULTS, _ANEW))
    except (UsageError, KeyError, TypeError, AttributeError):
        raise OctjepaError(f"{out / RESULTS} is damaged: {_ANEW}") from None
    return shown | {
        "faults": [fault.what for fault in results.faults],
        "metrics": plain(results.metrics),
        "dice_minus": differences_by_name(results.paired, lambda pair: pair.reference),
        "notes": list(results.notes),
    }


class SegmentTask:
    """Folders of segmentation heads."""

    def holds(self, folder: Path) -> bool:
        """By the kind in the head's manifest."""
        return (folder / HEAD_FOLDER).is_dir() and is_head(folder)

    def describe(self, folder: Path) -> dict[str, object]:
        """See `describe`."""
        return describe(folder)


TASKS.register("segment")(SegmentTask())
