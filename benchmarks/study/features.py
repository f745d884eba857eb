"""What the rows of the study look at: pooled features of every volume, and the tokens that dense rows need.

One pass over the store gives both. Tokens are those the recipe selects, kept in 16 bit; places without a token are
nobody's, and a dense row loses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int

from octjepa import keys
from octjepa.checkpoint import PretrainedEncoder
from octjepa.config import load_recipe
from octjepa.distributed.runtime import Runtime
from octjepa.embed.shard import intensity_histogram
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe
from octjepa.store import CanonicalVolume, Store
from octjepa.views import geometry, intensity, tokens
from octjepa.views.sample import select_tokens

from .plan import POOLS

_BATCH = 16


@dataclass(frozen=True)
class Tokens:
    """Of one volume: K features and where each lies in the raster order of the grid."""

    features: Float[np.ndarray, "k dim"]
    index: Int[np.ndarray, " k"]


Featurise = Callable[[list[CanonicalVolume]], list[Tokens]]


def untrained(recipe_name: str, overrides: tuple[str, ...], seed: int) -> PretrainedEncoder:
    """The encoder of the recipe as it was before the first update of `seed`."""
    recipe = load_recipe(recipe_name, [*overrides, f"train.seed={seed}"])
    torch.manual_seed(seed)
    return PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, "untrained")


def of_encoder(encoder: PretrainedEncoder) -> Featurise:
    """Frozen tokens of an encoder."""
    encoder.to(Runtime("fp32").device)

    def featurise(volumes: list[CanonicalVolume]) -> list[Tokens]:
        return [Tokens(one.features.astype(np.float16), one.grid_index) for one in encoder.encode_volumes(volumes)]

    return featurise


def of_pixels(recipe: Recipe) -> Featurise:
    """The z-scored voxels of each selected patch: what a linear head can read without any encoder."""

    def featurise(volumes: list[CanonicalVolume]) -> list[Tokens]:
        found = []
        for volume in volumes:
            rng = keys.generator("embed", volume.volume_id)
            view, index, _ = select_tokens(volume, recipe, geometry.center_crop(recipe.preprocessing), rng)
            cut = tokens.extract_patches(view, recipe.tokens.patch_size, index)
            shown = intensity.lookup_table(volume.tissue_mean, volume.tissue_std)[cut]
            found.append(Tokens(shown.astype(np.float16), index))
        return found

    return featurise


def in_batches(store: Store, ids: list[str]) -> Iterator[list[CanonicalVolume]]:
    """The volumes, some at a time."""
    for start in range(0, len(ids), _BATCH):
        yield [store.read(volume_id) for volume_id in ids[start : start + _BATCH]]


def all_tokens(featurise: Featurise, store: Store, ids: list[str]) -> list[Tokens]:
    """Tokens of every volume of `ids`, in their order."""
    return [one for volumes in in_batches(store, ids) for one in featurise(volumes)]


def pooled(found: list[Tokens]) -> dict[str, Float[np.ndarray, "volumes features"]]:
    """Pool -> a vector for each volume; each pool holds the one before it."""
    rows = []
    for one in found:
        wide = one.features.astype(np.float32)
        rows.append(np.concatenate([wide.mean(axis=0), wide.std(axis=0), wide.max(axis=0), wide.min(axis=0)]))
    table = np.stack(rows)
    dim = table.shape[1] // 4
    return {pool: table[:, : dim * parts] for pool, parts in zip(POOLS, (1, 3, 4), strict=True)}


def histograms(store: Store, ids: list[str], encoder: PretrainedEncoder) -> Float[np.ndarray, "volumes levels"]:
    """Grey levels of the tissue of every volume."""
    return np.stack(
        [
            intensity_histogram(volume, encoder.recipe.preprocessing)
            for volumes in in_batches(store, ids)
            for volume in volumes
        ]
    )
