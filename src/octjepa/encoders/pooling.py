"""How a volume's tokens become one vector: the named poolings, and which of them a table holds.

mean, mean_std_max and mean_std_max_min weigh every token alike; a focal lesion survives in spread and extremes better
than in the mean. The minimum helps some objectives, and not vjepa (docs/pretext.md).
tissue_mean weighs a token by its share of tissue. layers holds a mean for each of `views.tokens.LAYERS`, one after the
other. zones keeps where in the eye a token is: a mean and a maximum for each of `views.tokens.REGIONS` parts of the
grid, which are bands of depth times the middle of the scan and the rest. zones_centered compares
an eye with itself: each token less the mean token of its depth in this eye, then a mean, a maximum and a minimum for
each of the same parts. In flattened scans a depth is a layer, so what is left is where the layer differs from its own
average: what scanner and eye add to all of it is gone (docs/embed.md). zones_whitened whitens those tokens by the
covariance that they have in this eye before it takes the same statistics: what most tissue of the eye varies in weighs
less, and what few of its tokens differ in weighs more, as in the anomaly detector of Reed and Yu (1990). Attention
pooling is learned from labels, so it is part of the attentive probe, which reads tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from octjepa.errors import UsageError
from octjepa.recipe import Recipe
from octjepa.views import geometry, tokens
from octjepa.volume import CanonicalVolume

# Width of each pooling in multiples of the encoder's width.
POOL_WIDTHS = {
    "mean": 1,
    "mean_std_max": 3,
    "mean_std_max_min": 4,
    "tissue_mean": 1,
    "layers": len(tokens.LAYERS),
    "zones": 2 * tokens.REGIONS,
    "zones_centered": 3 * tokens.REGIONS,
    "zones_whitened": 3 * tokens.REGIONS,
}
# The first reads best on training and validation people of the exam (docs/embed.md) and needs the positions of tokens,
# which are not known of other encoders. `PretrainedEncoder.embed` gives one token width, the mean.
DEFAULT_POOL = "zones_whitened"
POSITION_FREE_POOL = "mean_std_max"
DEFAULT_POOLS = (POSITION_FREE_POOL, DEFAULT_POOL)
_EXTREMES = (np.mean, np.max, np.min)  # of each region, where tokens are compared with their own eye
_SHRINKAGE = 0.5  # of an eye's covariance towards its mean variance; chosen as the default pooling was
_ROUNDING = 1e-9  # of the mean size of a feature in an eye, with sums in float64
# A pooling that is the head of others, and those, the widest last.
_HEAD_OF = {"mean": ("mean_std_max", "mean_std_max_min"), "mean_std_max": ("mean_std_max_min",)}

Layers = Int[np.ndarray, " k"]


class TokenFeatures(NamedTuple):
    """Features of a volume's K selected tokens; `grid_index` is their index in the raster order of `grid`."""

    features: Float[np.ndarray, "k dim"]
    grid_index: Int[np.ndarray, " k"]
    grid: tuple[int, int, int]
    tissue: Float[np.ndarray, " k"]


def check_pools(pools: Sequence[str]) -> tuple[str, ...]:
    """The names once each. Raises UsageError: none, or an unknown pooling."""
    unknown = [name for name in pools if name not in POOL_WIDTHS]
    if unknown or not pools:
        raise UsageError(f"no pool {', '.join(unknown) or 'given'}: known are {', '.join(POOL_WIDTHS)}")
    return tuple(dict.fromkeys(pools))


def readable_pools(stored: Sequence[str]) -> tuple[str, ...]:
    """The poolings that can be read from a table that stores these poolings: mean is the head of mean_std_max, and so
    on.
    """
    return tuple(name for name in POOL_WIDTHS if name in stored or set(_HEAD_OF.get(name, ())) & set(stored))


def default_pool(pools: Sequence[str]) -> str:
    """The one pooling of `pools` to compare with: the default, else zones_centered, else mean_std_max, else the
    last.
    """
    return next((name for name in (DEFAULT_POOL, "zones_centered", POSITION_FREE_POOL) if name in pools), pools[-1])


def pool_columns(stored: Sequence[str], pool: str, dim: int) -> slice:
    """The columns of `pool` in features that hold the poolings `stored` one after the other."""
    holder = next((name for name in (pool, *_HEAD_OF.get(pool, ())) if name in stored), None)
    if holder is None:
        raise UsageError(f"no pooling {pool!r} in this table: it holds {', '.join(readable_pools(stored))}")
    start = dim * sum(POOL_WIDTHS[name] for name in stored[: stored.index(holder)])
    return slice(start, start + POOL_WIDTHS[pool] * dim)


def tissue_layers(volume: CanonicalVolume, recipe: Recipe) -> Int[np.ndarray, " grid"]:
    """The tissue layer of each patch of the centred view, -1 for none; raster order."""
    crop, size = geometry.center_crop(recipe.preprocessing), recipe.preprocessing.image_size
    mask = geometry.tissue_mask(volume.band, crop, volume.pixels.shape[1], size)
    return tokens.patch_layers(mask, recipe.tokens.patch_size)


def _tissue_mean(volume: TokenFeatures, layers: Layers) -> Float[np.ndarray, " n"]:
    """[dim] The mean weighted by tissue; the plain mean of a volume without any tissue."""
    weight = volume.tissue if volume.tissue.sum() > 0 else np.ones_like(volume.tissue)
    return np.average(volume.features, axis=0, weights=weight).astype(np.float32)


def _layer_means(volume: TokenFeatures, layers: Layers) -> Float[np.ndarray, " n"]:
    """[layers * dim] The mean of each layer; of a layer without a token the mean of all tokens."""
    everywhere = volume.features.mean(axis=0)
    inside = [layers == number for number in range(len(tokens.LAYERS))]
    return np.concatenate([volume.features[here].mean(axis=0) if here.any() else everywhere for here in inside])


def token_regions(index: Int[np.ndarray, " k"], grid: tuple[int, int, int]) -> Int[np.ndarray, " k"]:
    """The region of each token, by its index in raster order (`views.tokens.regions_at`)."""
    return np.asarray(tokens.regions_at(np.stack(np.unravel_index(index, grid), axis=-1), grid))


def _regions(volume: TokenFeatures, layers: Layers) -> Float[np.ndarray, " n"]:
    """[regions * 2 * dim] Mean and maximum of each region; 0 without a token: no tissue is also information."""
    return _of_regions(volume, volume.features, (np.mean, np.max))


def _centered_regions(volume: TokenFeatures, layers: Layers) -> Float[np.ndarray, " n"]:
    """[regions * 3 * dim] Mean, maximum and minimum of each region, of tokens less the mean token of their depth."""
    return _of_regions(volume, _centered(volume), _EXTREMES)


def _whitened_regions(volume: TokenFeatures, layers: Layers) -> Float[np.ndarray, " n"]:
    """[regions * 3 * dim] The same of tokens that were whitened after it."""
    return _of_regions(volume, whitened(_centered(volume)), _EXTREMES)


def _centered(volume: TokenFeatures) -> Float[np.ndarray, "k dim"]:
    """Tokens less the mean token of their depth, in float64."""
    depth = np.unravel_index(volume.grid_index, volume.grid)[1]
    centered = volume.features.astype(np.float64)
    for row in np.unique(depth):
        centered[depth == row] -= centered[depth == row].mean(axis=0)
    return centered


def whitened(tokens: Float[np.ndarray, "k dim"]) -> Float[np.ndarray, "k dim"]:
    """Tokens of mean 0 times the inverse root of their covariance, half shrunk towards the mean variance.

    The root is the symmetric one (ZCA, Kessy et al. 2018), so that an axis stays the same axis in every eye; shrinkage
    after Ledoit and Wolf (2004), its weight fixed. Tokens that do not vary stay as they are.
    """
    count, dim = tokens.shape
    wide = tokens.astype(np.float64)
    of_tokens = count < dim  # X f(X'X) = f(XX') X: the smaller matrix gives the same
    values, vectors = np.linalg.eigh((wide @ wide.T if of_tokens else wide.T @ wide) / count)
    variance = values.sum() / dim
    if variance <= 0:
        return tokens
    scale = 1 / np.sqrt((1 - _SHRINKAGE) * np.maximum(values, 0) + _SHRINKAGE * variance)
    root = (vectors * scale) @ vectors.T
    return np.asarray(root @ wide if of_tokens else wide @ root, tokens.dtype)


def _of_regions(
    volume: TokenFeatures, features: Float[np.ndarray, "k dim"], statistics: Sequence[Callable[..., np.ndarray]]
) -> Float[np.ndarray, " n"]:
    """The statistics of each region's tokens, one after the other; 0 for a region without a token.

    Values that are 0 up to rounding are 0. The mean of centered tokens is, for a region that has all tokens of its
    depths, and a probe would standardise the rounding errors of many eyes.
    """
    regions = token_regions(volume.grid_index, volume.grid)
    inside = [features[regions == region] for region in range(tokens.REGIONS)]
    nothing = np.zeros(len(statistics) * features.shape[1], np.float32)
    pooled = np.concatenate(
        [
            np.concatenate([statistic(part, axis=0) for statistic in statistics]) if len(part) else nothing
            for part in inside
        ]
    )
    rounding = np.tile(_ROUNDING * np.abs(features).mean(axis=0), tokens.REGIONS * len(statistics))
    return np.where(np.abs(pooled) > rounding, pooled, 0.0)


def _mean_std_max(features: Float[np.ndarray, "k dim"]) -> Float[np.ndarray, " n"]:
    return np.concatenate([features.mean(axis=0), features.std(axis=0), features.max(axis=0)])


# Poolings that read the features alone, and not where a token is.
_OF_FEATURES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda features: features.mean(axis=0),
    "mean_std_max": _mean_std_max,
    "mean_std_max_min": lambda features: np.append(_mean_std_max(features), features.min(axis=0)),
}
_OF_TOKENS: dict[str, Callable[[TokenFeatures, Layers], np.ndarray]] = {
    "tissue_mean": _tissue_mean,
    "layers": _layer_means,
    "zones": _regions,
    "zones_centered": _centered_regions,
    "zones_whitened": _whitened_regions,
}


def pool_features(features: Float[np.ndarray, "k dim"], pool: str) -> Float[np.ndarray, " n"]:
    """One vector of features without positions: mean, mean_std_max or mean_std_max_min, as `pool_tokens` has them.

    Raises UsageError for a pooling that needs positions, and for an unknown one.
    """
    if pool not in _OF_FEATURES:
        raise UsageError(f"no pool {pool!r} of features without positions: one of {', '.join(_OF_FEATURES)}")
    return _OF_FEATURES[pool](features).astype(np.float32)


def pool_tokens(volume: TokenFeatures, layers: Layers, pools: Sequence[str]) -> Float[np.ndarray, " n"]:
    """[sum of `POOL_WIDTHS` * dim] The vectors of `pools`, concatenated; `layers` is the tissue layer of each token."""
    vectors = [
        _OF_FEATURES[name](volume.features) if name in _OF_FEATURES else _OF_TOKENS[name](volume, layers)
        for name in pools
    ]
    return np.concatenate(vectors).astype(np.float32)
