"""Rows of the exam: what turns a volume into tokens, and the tables of all tokens of a cohort.

A row is a network or a floor without one. All rows of an encoder cut the same patches of the same volumes, so that they
differ in what they say of a patch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.ndimage import gaussian_filter

from octjepa.embed.shard import patch_intensity
from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.base import FrozenEncoder
from octjepa.encoders.pooling import TokenFeatures, pool_tokens
from octjepa.progress import bar
from octjepa.views import geometry, intensity
from octjepa.volume import CanonicalVolume

from .cohorts import Cohort

_BATCH = 8
_CONTEXT_CELL = (2, 2, 4)  # voxels
_RAW_SAMPLE = 200  # training eyes whose patches give the principal components of raw voxels
Featurise = Callable[[Sequence[CanonicalVolume]], list[TokenFeatures]]


@dataclass(frozen=True, eq=False)
class TokenTable:
    """Tokens of all volumes of a cohort, one after the other; those of volume i are `offsets[i]:offsets[i + 1]`."""

    features: Float[np.ndarray, "tokens dim"]
    index: Int[np.ndarray, " tokens"]  # in the raster order of `grid`
    offsets: Int[np.ndarray, " volumes+1"]
    grid: tuple[int, int, int]
    patch: tuple[int, int, int]

    def of(self, volume: int) -> slice:
        """The tokens of one volume."""
        return slice(int(self.offsets[volume]), int(self.offsets[volume + 1]))

    def pooled(self, pool: str) -> Float[np.ndarray, "volumes features"]:
        """One vector of every volume by a pooling of `octjepa embed` that reads tokens and their places."""
        none = np.zeros(0, np.int64)
        rows = []
        for volume in range(len(self.offsets) - 1):
            part = self.of(volume)
            wide = self.features[part].astype(np.float32)
            one = TokenFeatures(wide, self.index[part], self.grid, np.ones(len(wide), np.float32))
            rows.append(pool_tokens(one, none, (pool,)))
        return np.stack(rows)


def token_table(featurise: Featurise, cohort: Cohort, encoder: PretrainedEncoder, what: str) -> TokenTable:
    """Tokens of every volume of `cohort`, in 16 bit."""
    features, index, counts = [], [], [0]
    with bar(f"{what} on {cohort.name}", len(cohort.ids), "volumes") as progress:
        for start in range(0, len(cohort.ids), _BATCH):
            volumes = [cohort.store.read(volume_id) for volume_id in cohort.ids[start : start + _BATCH]]
            for one in featurise(volumes):
                features.append(one.features.astype(np.float16))
                index.append(one.grid_index.astype(np.int32))
                counts.append(len(one.grid_index))
                progress.advance()
    recipe = encoder.recipe
    return TokenTable(
        np.concatenate(features), np.concatenate(index), np.cumsum(counts), recipe.grid, recipe.tokens.patch_size
    )


def of_intensity(encoder: PretrainedEncoder) -> Featurise:
    """Mean, standard deviation, 5th and 95th percentile of each of the encoder's patches."""

    def featurise(volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        selected = [encoder.select_tokens(volume) for volume in volumes]
        return [TokenFeatures(patch_intensity(one.patches), one.grid_index, one.grid, one.tissue) for one in selected]

    return featurise


def of_raw_patches(encoder: PretrainedEncoder, cohort: Cohort) -> Featurise:
    """The voxels of each patch on their first principal components, as many as the encoder is wide."""
    rng = np.random.default_rng(0)
    sample = []
    for volume in cohort.indices("train")[:_RAW_SAMPLE]:
        patches = encoder.select_tokens(cohort.store.read(cohort.ids[volume])).patches
        sample.append(patches[rng.permutation(len(patches))[:100]])
    voxels = np.concatenate(sample)
    mean = voxels.mean(axis=0)
    _, _, components = np.linalg.svd(voxels - mean, full_matrices=False)
    basis = components[: encoder.dim].T.astype(np.float32)

    def featurise(volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        selected = [encoder.select_tokens(volume) for volume in volumes]
        return [TokenFeatures((s.patches - mean) @ basis, s.grid_index, s.grid, s.tissue) for s in selected]

    return featurise


def of_raw(encoder: PretrainedEncoder) -> Featurise:
    """The voxels of each patch; `Projection` reduces them in the same way as every row."""

    def featurise(volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        selected = [encoder.select_tokens(volume) for volume in volumes]
        return [TokenFeatures(one.patches, one.grid_index, one.grid, one.tissue) for one in selected]

    return featurise


def of_tissue(encoder: PretrainedEncoder) -> Featurise:
    """Which patches hold tissue, and nothing of what is in them."""

    def featurise(volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        selected = [encoder.select_tokens(volume) for volume in volumes]
        return [
            TokenFeatures(np.zeros((len(one.grid_index), 0), np.float32), one.grid_index, one.grid, one.tissue)
            for one in selected
        ]

    return featurise


def of_position(encoder: PretrainedEncoder) -> Featurise:
    """Where a patch is, and nothing of what is in it: depth, eccentricity, their squares and their product."""

    def featurise(volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        selected = [encoder.select_tokens(volume) for volume in volumes]
        return [
            TokenFeatures(positions_in_view(one.grid_index, one.grid), one.grid_index, one.grid, one.tissue)
            for one in selected
        ]

    return featurise


def positions_in_view(index: Int[np.ndarray, " k"], grid: tuple[int, int, int]) -> Float[np.ndarray, "k 5"]:
    """Depth and eccentricity of tokens, from -1 to 1, their squares and their product."""
    at = np.stack(np.unravel_index(index, grid), axis=1)
    at = (2 * at + 1) / np.array(grid) - 1
    depth, eccentricity = at[:, 1], np.hypot(at[:, 0], at[:, 2])
    return np.stack([depth, eccentricity, depth**2, eccentricity**2, depth * eccentricity], axis=1).astype(np.float32)


def of_context(encoder: PretrainedEncoder) -> Featurise:
    """Hand-made features of each patch and its neighbourhood: seven numbers for every cell of 2 x 2 x 4 voxels.

    The cell's mean, its smoothed mean, that of the cells above, below and to both sides, and how far the smoothed mean
    is from the median of the eye at that depth. In patches of one B-scan a cell is one B-scan thick.
    """
    recipe = encoder.recipe
    size, patch = recipe.preprocessing.image_size, recipe.tokens.patch_size
    cell = tuple(map(min, patch, _CONTEXT_CELL))
    cells = tuple(part // one for part, one in zip(patch, cell, strict=True))

    def featurise(volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        found = []
        for volume in volumes:
            one = encoder.select_tokens(volume)
            view = geometry.apply_transform(volume.pixels, geometry.center_crop(recipe.preprocessing), size)
            image = intensity.lookup_table(volume.tissue_mean, volume.tissue_std)[view]
            maps = _context_maps(image, cell)
            features = [patches_of(each, one.grid, cells)[one.grid_index] for each in maps]
            found.append(TokenFeatures(np.concatenate(features, axis=1), one.grid_index, one.grid, one.tissue))
        return found

    return featurise


def _context_maps(image: Float[np.ndarray, "D H W"], cell: tuple[int, ...]) -> list[Float[np.ndarray, "d h w"]]:
    """The seven maps of `of_context`, one value for each cell."""
    (d, h, w), (p, q, r) = image.shape, cell
    mean = image.reshape(d // p, p, h // q, q, w // r, r).mean(axis=(1, 3, 5))
    smooth = gaussian_filter(mean, (0.5, 1.0, 1.0), mode="nearest")
    framed = np.pad(smooth, ((0, 0), (1, 1), (1, 1)), mode="edge")
    around = [framed[:, :-2, 1:-1], framed[:, 2:, 1:-1], framed[:, 1:-1, :-2], framed[:, 1:-1, 2:]]
    return [mean, smooth, *around, smooth - np.median(smooth, axis=(0, 2), keepdims=True)]


def patches_of(
    values: Float[np.ndarray, "d h w"], grid: tuple[int, int, int], patch: tuple[int, ...]
) -> Float[np.ndarray, "tokens n"]:
    """A map cut into `grid` patches of `patch` values each, in raster order."""
    tiles = values.reshape(grid[0], patch[0], grid[1], patch[1], grid[2], patch[2]).transpose(0, 2, 4, 1, 3, 5)
    return np.asarray(tiles.reshape(int(np.prod(grid)), -1), np.float32)


def of_encoder(encoder: FrozenEncoder) -> Featurise:
    """Frozen tokens of a network."""
    encoder.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return encoder.encode_volumes
