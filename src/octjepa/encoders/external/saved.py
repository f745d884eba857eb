"""Encoders of other projects that were tuned here: what a checkpoint says of them, and how they are read from it.

A checkpoint of `octjepa finetune` holds their weights in `WEIGHTS`, and in its manifest under `ABOUT` how the network
is built without the file that they came from: a published one by its shape, one of transformers or MONAI by its JSON
files, one of a package by its name. No code and no pickle is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octjepa.checkpoint.folder import read_manifest, read_tensors
from octjepa.checkpoint.location import MANIFEST
from octjepa.checkpoint.tensor_file import check_weights
from octjepa.checkpoint.weights import TUNED, newest_checkpoint
from octjepa.encoders.external.base import ExternalEncoder, TunedOn, load_external
from octjepa.errors import CheckpointError, OctjepaError
from octjepa.recipe import Preprocessing

WEIGHTS = "external.safetensors"
ABOUT = "external"
KIND = "tuned encoder of another project"


def describe_encoder(encoder: ExternalEncoder, preprocessing: Preprocessing) -> dict[str, Any]:
    """The manifest's entries, as JSON; `preprocessing` is that of the volumes that it was tuned on."""
    about = {"kind": encoder.kind, "name": encoder.name, "origin": encoder.origin, "network": encoder.architecture()}
    return {"kind": KIND, ABOUT: {**about, "preprocessing": preprocessing.model_dump(mode="json")}}


def find_tuned(location: Path) -> Path | None:
    """The checkpoint in `location`, or the newest of the fine-tuning there, if it is of another project."""
    if not (location / MANIFEST).is_file() and not (location / TUNED).is_dir():
        return None
    try:
        folder = newest_checkpoint(location)
        return folder if isinstance(folder, Path) and ABOUT in read_manifest(folder) else None
    except OctjepaError:  # whoever reads it next reports what is wrong
        return None


def load_saved(folder: Path) -> ExternalEncoder:
    """The tuned encoder of a checkpoint that `find_tuned` found.

    Raises CheckpointError (damaged, or weights of another network) and UsageError (what builds the network is absent).
    """
    manifest = read_manifest(folder)
    try:
        about = manifest[ABOUT]
        kind, name, origin, network = (about[key] for key in ("kind", "name", "origin", "network"))
        preprocessing, trained_on = Preprocessing.model_validate(about["preprocessing"]), manifest["trained_on"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{folder} is damaged: its manifest does not describe the encoder") from None
    encoder = _build(kind, network, folder)
    weights = read_tensors(folder, WEIGHTS)
    check_weights(weights, str(folder))
    try:
        encoder.network.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {folder} do not fit {name}: {str(error).splitlines()[0]}") from None
    encoder.name, encoder.about = str(name), {**encoder.about, **origin}
    encoder.kind, encoder.tuned_on = str(kind), TunedOn(frozenset(trained_on), preprocessing, folder)
    return encoder


def _build(kind: str, network: dict[str, Any], folder: Path) -> ExternalEncoder:
    """The network with initial weights."""
    from octjepa.encoders.external import folders, published

    try:
        if "shape" in network:
            return published.from_architecture(network, folder)
        if "files" in network:
            return folders.from_architecture(kind, network)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{folder} is damaged: its manifest does not describe the network") from None
    return load_external(f"{kind}:")
