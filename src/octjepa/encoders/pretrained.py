"""Pretrained encoders: loaded from a run, a checkpoint folder or a weights file, they compute features of scans.

The recipe is stored with the weights, so every volume gets the preprocessing of training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from octjepa.checkpoint.location import parse_location
from octjepa.checkpoint.weights import Which, read_weights
from octjepa.cohort.recorded_scans import split_recorded
from octjepa.encoders.base import GridEncoder
from octjepa.encoders.module import VolumeEncoder, collate_images
from octjepa.encoders.pooling import TokenFeatures
from octjepa.errors import WrongCheckpointError
from octjepa.model import VJEPA3D, Encoder
from octjepa.recipe import Recipe
from octjepa.shipped import is_segmenter
from octjepa.views import geometry, intensity, tokens
from octjepa.views.sample import select_tissue_tokens, token_positions
from octjepa.volume import CanonicalVolume

FORWARD_TOKENS = 8192  # of all volumes in a forward pass: memory is bounded whatever the grid


class SelectedTokens(NamedTuple):
    """A volume's K selected tokens as the encoder takes them; the other fields as in `TokenFeatures`."""

    patches: Float[np.ndarray, "k voxels"]
    positions: Float[np.ndarray, "k 3"]
    grid_index: Int[np.ndarray, " k"]
    grid: tuple[int, int, int]
    tissue: Float[np.ndarray, " k"]


class PretrainedEncoder(GridEncoder[SelectedTokens]):
    """A frozen encoder with its recipe, as `octjepa.load_encoder` returns it. Its protocol is `base.FrozenEncoder`.

    Attributes: `dim`, the width of a token's features. `recipe`, its settings. `trained_on`, the content ids of its
    training volumes, and `trained_on_uids`, the `uid_key` of those that have a UID, in newer weights. `which`,
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
    def network(self) -> Encoder:
        """The network with its weights."""
        return self.encoder

    @property
    def patterns(self) -> Sequence[str]:
        """The scan patterns that it was trained on."""
        return self.recipe.data.patterns

    def untrained(self) -> Self:
        """The same architecture with its initial weights, which is the baseline of every probe."""
        with torch.random.fork_rng():
            torch.manual_seed(self.recipe.train.seed)
            return type(self)(VJEPA3D.from_recipe(self.recipe).target_encoder, self.recipe, "untrained")

    def module(self, trainable: bool = True) -> VolumeEncoder:
        """The encoder as an `nn.Module` on images `[B, 1, D, H, W]`. It shares the weights of this encoder.

        trainable: whether its parameters require gradients.
        """
        module = VolumeEncoder(self.encoder, self.recipe).requires_grad_(trainable)
        return module.train(trainable)

    def collate(self, volumes: Sequence[CanonicalVolume]) -> Float[Tensor, "b 1 d h w"]:
        """Batches volumes of a store as images `[B, 1, D, H, W]`: the `collate_fn` of a DataLoader over a `Store`."""
        return collate_images(volumes, self.recipe.preprocessing)

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

    @torch.no_grad()  # XLA does not know inference_mode's tensors
    def encode_tokens(self, selected: Sequence[SelectedTokens]) -> list[TokenFeatures]:
        """Returns the features of several volumes, whose numbers of tokens may differ.

        Volumes with equally many tokens share a forward pass of at most `FORWARD_TOKENS` tokens. Nothing is padded, so
        the features of a volume do not depend on the others.
        """
        features_by_index: dict[int, TokenFeatures] = {}
        for numbers in equal_counts([len(volume.grid_index) for volume in selected]):
            batch = [selected[number] for number in numbers]
            patches, positions = (
                torch.from_numpy(np.stack(part)).to(self.device) for part in list(zip(*batch, strict=True))[:2]
            )
            features = self.encoder(patches, positions).float().cpu().numpy()  # [volumes, k, dim]
            for number, volume, of_volume in zip(numbers, batch, features, strict=True):
                features_by_index[number] = TokenFeatures(of_volume, volume.grid_index, volume.grid, volume.tissue)
        return [features_by_index[number] for number in range(len(selected))]


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

        encoder = octjepa.load_encoder("phantom-truth")
        vector = encoder.embed("scan.dcm", pool="mean_std_max")
    """
    if is_segmenter(path):
        raise WrongCheckpointError(
            f"{path} is the segmentation network, whose tokens are frozen: `octjepa embed`, `probe` and `leaderboard` "
            "read it, and octjepa.open_encoder in Python. Fine-tune phantom-truth, or the network itself by "
            "`octjepa segment adapt`"
        )
    weights = read_weights(path, which)
    encoder = PretrainedEncoder(weights.network, weights.recipe, weights.name, weights.recorded_training, weights.which)
    encoder.location = parse_location(path)
    return encoder
