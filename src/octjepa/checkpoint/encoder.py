"""Pretrained encoders: loaded from a run, a checkpoint folder or a weights file, they compute features of scans.

The recipe is stored with the weights, so every volume gets the preprocessing of training.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from octjepa.checkpoint.folder import check_schema, list_checkpoints, read_manifest, read_tensors
from octjepa.checkpoint.location import MANIFEST, Location, has_file, parse_location
from octjepa.checkpoint.module import VolumeEncoder, collate_images, prepare_volume
from octjepa.checkpoint.pooling import TokenFeatures, check_pools, pool_tokens, tissue_layers
from octjepa.checkpoint.state import MODEL_FILE, read_recipe
from octjepa.cohort.recorded_scans import split_recorded
from octjepa.config import load_run_recipe, stored_recipe
from octjepa.errors import CheckpointError, WrongCheckpointError
from octjepa.model import VJEPA3D, Encoder
from octjepa.outside import named_by
from octjepa.recipe import Recipe
from octjepa.remote import info, local_copy
from octjepa.shipped import shipped, shipped_names
from octjepa.views import geometry, intensity, tokens
from octjepa.views.sample import select_tissue_tokens, token_positions
from octjepa.volume import CanonicalVolume, OCTVolume

EXPORTED = "model.safetensors"  # in a folder that `octjepa export` made
FORWARD_TOKENS = 8192  # of all volumes in a forward pass: memory is bounded whatever the grid
TUNED = "tuned"  # where `octjepa finetune` puts the encoder it tuned, within its folder
Which = Literal["target", "student"]
PREFIXES: dict[Which, str] = {"target": "target_encoder.", "student": "context_encoder."}  # of their weights' names
_NO_ENCODER = "no pretrained encoder: give a pretraining run, its step-* folder or an exported encoder"


class SelectedTokens(NamedTuple):
    """A volume's K selected tokens as the encoder takes them; the other fields as in `TokenFeatures`."""

    patches: Float[np.ndarray, "k voxels"]
    positions: Float[np.ndarray, "k 3"]
    grid_index: Int[np.ndarray, " k"]
    grid: tuple[int, int, int]
    tissue: Float[np.ndarray, " k"]


class PretrainedEncoder:
    """A frozen encoder with its recipe, as `octjepa.load_encoder` returns it.

    Attributes: `dim`, the width of a token's features; `recipe`, its settings; `trained_on`, the content ids of its
    training volumes, and `trained_on_uids`, the `uid_key` of those that have a UID, in newer weights; `which`,
    "target" for the EMA target or "student" for the encoder that was trained.
    """

    def __init__(
        self, encoder: Encoder, recipe: Recipe, name: str, trained_on: Collection[str] = (), which: Which = "target"
    ) -> None:
        self.encoder, self.which = encoder.eval().requires_grad_(False), which
        self.recipe, self.name, self.dim = recipe, name, encoder.width
        self.trained_on, self.trained_on_uids = split_recorded(trained_on)

    @property
    def recorded_training(self) -> frozenset[str]:
        """All that is recorded of its training volumes, for what is trained or written from it."""
        return self.trained_on | self.trained_on_uids

    @property
    def parameters(self) -> int:
        """Number of the encoder's parameters."""
        return sum(parameter.numel() for parameter in self.encoder.parameters())

    def to(self, device: torch.device) -> PretrainedEncoder:
        """Moves the encoder to `device`."""
        self.encoder.to(device)
        return self

    def untrained(self) -> PretrainedEncoder:
        """The same architecture with its initial weights, which is the baseline of every probe."""
        with torch.random.fork_rng():
            torch.manual_seed(self.recipe.train.seed)
            return PretrainedEncoder(VJEPA3D.from_recipe(self.recipe).target_encoder, self.recipe, "untrained")

    def module(self, trainable: bool = True) -> VolumeEncoder:
        """The encoder as an `nn.Module` on images `[B, 1, D, H, W]`. It shares the weights of this encoder.

        trainable: whether its parameters require gradients.
        """
        made = VolumeEncoder(self.encoder, self.recipe).requires_grad_(trainable)
        return made.train(trainable)

    def collate(self, volumes: Sequence[CanonicalVolume]) -> Float[Tensor, "b 1 d h w"]:
        """Batches volumes of a store as images `[B, 1, D, H, W]`: the `collate_fn` of a DataLoader over a `Store`."""
        return collate_images(volumes, self.recipe.preprocessing)

    def prepare(self, volume: str | Path | OCTVolume | CanonicalVolume) -> CanonicalVolume:
        """Returns `volume` with the encoder's preprocessing: spacing, size, orientation and flattening.

        volume: a path, an OCTVolume, or a CanonicalVolume, which is returned unchanged. Raises VolumeRejected for a
        file that cannot be read.
        """
        return prepare_volume(volume, self.recipe.preprocessing)

    def tokens(self, volume: str | Path | OCTVolume | CanonicalVolume) -> TokenFeatures:
        """Returns the features of all tokens of `volume` that contain tissue, `[K, dim]` in fp32, with their positions.

        Raises VolumeRejected for a file that cannot be read.
        """
        return self.encode_volumes([self.prepare(volume)])[0]

    def embed(self, volume: str | Path | OCTVolume | CanonicalVolume, pool: str = "mean") -> Float[np.ndarray, " n"]:
        """Returns the embedding of `volume`: its tokens, pooled to one float32 vector.

        pool: a name of `octjepa.checkpoint.pooling.POOL_WIDTHS`; the vector has `POOL_WIDTHS[pool] * dim` values.
        Raises UsageError for another name, VolumeRejected for a file that cannot be read.
        """
        check_pools([pool])
        prepared = self.prepare(volume)
        features = self.encode_volumes([prepared])[0]
        return pool_tokens(features, tissue_layers(prepared, self.recipe)[features.grid_index], [pool])

    def select_tokens(self, volume: CanonicalVolume) -> SelectedTokens:
        """The encoder's input for a prepared volume: centre crop, no augmentation, every token that contains tissue.

        Their number K does not depend on `tokens.budget` of the recipe, which applies to training only: see
        `views.tokens.select_tissue`.
        """
        recipe, crop = self.recipe, geometry.center_crop(self.recipe.preprocessing)
        view, index, share = select_tissue_tokens(volume, recipe, crop)
        values = tokens.extract_patches(view, recipe.tokens.patch_size, index)
        patches = intensity.lookup_table(volume.tissue_mean, volume.tissue_std)[values]
        return SelectedTokens(patches, token_positions(index, recipe), index, recipe.grid, share[index])

    def encode_volumes(self, volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        """Returns what `tokens` does, for several prepared volumes."""
        return self.encode_tokens([self.select_tokens(volume) for volume in volumes])

    @torch.no_grad()  # XLA does not know inference_mode's tensors
    def encode_tokens(self, selected: Sequence[SelectedTokens]) -> list[TokenFeatures]:
        """Returns the features of several volumes, whose numbers of tokens may differ.

        Volumes with equally many tokens share a forward pass of at most `FORWARD_TOKENS` tokens. Nothing is padded, so
        the features of a volume do not depend on the others.
        """
        device = next(self.encoder.parameters()).device
        found: dict[int, TokenFeatures] = {}
        for numbers in equal_counts([len(volume.grid_index) for volume in selected]):
            batch = [selected[number] for number in numbers]
            patches, positions = (
                torch.from_numpy(np.stack(part)).to(device) for part in list(zip(*batch, strict=True))[:2]
            )
            features = self.encoder(patches, positions).float().cpu().numpy()  # [volumes, k, dim]
            for number, volume, of_volume in zip(numbers, batch, features, strict=True):
                found[number] = TokenFeatures(of_volume, volume.grid_index, volume.grid, volume.tissue)
        return [found[number] for number in range(len(selected))]


def equal_counts(counts: Sequence[int]) -> Iterator[list[int]]:
    """The positions of equal counts, at most `FORWARD_TOKENS` tokens together, and one volume at least."""
    for count in dict.fromkeys(counts):
        positions = [position for position, other in enumerate(counts) if other == count]
        size = max(1, FORWARD_TOKENS // count)
        yield from (positions[start : start + size] for start in range(0, len(positions), size))


def load_encoder(path: str | Path, which: Which | None = None) -> PretrainedEncoder:
    """Loads a pretrained encoder.

    path: a run (its newest checkpoint is loaded), a fine-tuning (the tuned encoder), a checkpoint folder, an exported
        folder, or a weights file, on a disk or in a bucket; or the name of weights in the package, such as
        "phantom-tiny", unless a path of that name exists.
    which: "target" (EMA) or "student"; None: the one that the checkpoint names (`checkpoint.export`).

    Returns a PretrainedEncoder. Raises WrongCheckpointError if there is no encoder, CheckpointError if it is damaged.

        encoder = octjepa.load_encoder("phantom-tiny")
        vector = encoder.embed("scan.dcm", pool="mean_std_max")
    """
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
            f"in the package ({', '.join(shipped_names()) or 'none'})"
        )
    which = which or _named_encoder(named_encoder, recipe, weights)
    prefix = PREFIXES[which]
    own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    if not own and any(key.startswith(tuple(PREFIXES.values())) for key in weights):
        raise WrongCheckpointError(f"{path} holds one encoder alone, and not the {which}")
    encoder = VJEPA3D.from_recipe(recipe).target_encoder
    _load_weights(encoder, own, path)
    return PretrainedEncoder(encoder, recipe, recipe.name if named is None else named.name, trained_on, which)


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


def _read_file(path: Location) -> tuple[Recipe, dict[str, torch.Tensor], dict[str, Any]]:
    try:
        with local_copy(path) if isinstance(path, str) else nullcontext(path) as local, safe_open(local, "pt") as file:
            metadata = json.loads((file.metadata() or {})["octjepa"])
            check_schema(int(metadata.get("schema", 1)), str(path))  # the first exports did not record it
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 -- no mapping
        return stored_recipe(metadata["recipe"], f"of {path}"), weights, metadata
    except (SafetensorError, KeyError, ValueError, TypeError, OSError):
        raise CheckpointError(f"{path} is not a weights file of octjepa, or it is damaged") from None


def _load_weights(encoder: nn.Module, weights: dict[str, torch.Tensor], path: Location) -> None:
    if not weights:
        raise WrongCheckpointError(f"{path} holds other weights, {_NO_ENCODER}")
    try:
        encoder.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {path} do not fit the encoder of their recipe: {error}") from None
