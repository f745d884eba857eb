"""Where a zone begins and ends, on grids small enough to be written down."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg

from octjepa.encoders.pooling import (
    POOL_WIDTHS,
    TokenFeatures,
    default_pool,
    pool_tokens,
    readable_pools,
    token_regions,
    whitened,
)
from octjepa.views.tokens import REGIONS


def test_zones_are_bands_of_depth_times_the_middle_and_the_rest() -> None:
    grid = (4, 8, 8)
    zones = token_regions(np.arange(4 * 8 * 8), grid).reshape(grid)
    assert POOL_WIDTHS["zones"] == 2 * REGIONS == 32
    middle = np.zeros((4, 8), bool)
    middle[1:3, 2:6] = True  # the central half of the scan's two sides
    for row in range(8):
        assert (zones[:, row] == np.where(middle, 2 * row, 2 * row + 1)).all()


def test_grids_of_other_sizes_have_the_same_zones() -> None:
    fine = token_regions(np.arange(8 * 16 * 16), (8, 16, 16)).reshape(8, 16, 16)
    assert (fine[::2, ::2, ::2] == token_regions(np.arange(4 * 8 * 8), (4, 8, 8)).reshape(4, 8, 8)).all()
    coarse = token_regions(np.arange(1 * 4 * 2), (1, 4, 2)).reshape(1, 4, 2)
    assert coarse[0].tolist() == [[1, 1], [5, 5], [9, 9], [13, 13]]


def test_what_an_eye_adds_to_a_whole_depth_is_gone_after_centering_and_what_is_focal_stays() -> None:
    rng, grid = np.random.default_rng(3), (4, 8, 8)
    index = np.sort(rng.permutation(4 * 8 * 8)[:150])
    depth = np.unravel_index(index, grid)[1]
    features = rng.normal(size=(150, 6)).astype(np.float32)
    scanner = rng.normal(size=(8, 6)).astype(np.float32)[depth]  # another offset at each depth
    lesion = np.zeros_like(features)
    lesion[70, 2] = 9

    def pooled(pool: str, features: np.ndarray) -> np.ndarray:
        one = TokenFeatures(features, index, grid, np.ones(150, np.float32))
        return pool_tokens(one, np.zeros(0, np.int64), (pool,))

    assert np.allclose(pooled("zones_centered", features), pooled("zones_centered", features + scanner), atol=1e-5)
    assert np.abs(pooled("zones", features) - pooled("zones", features + scanner)).max() > 1
    difference = pooled("zones_centered", features + lesion) - pooled("zones_centered", features)
    assert difference.reshape(REGIONS, 3, 6)[token_regions(index[70:71], grid)[0], 1, 2] > 4
    assert len(difference) == 6 * POOL_WIDTHS["zones_centered"]


@pytest.mark.parametrize("pool", ["zones_centered", "zones_whitened"])
def test_a_mean_that_centering_makes_zero_is_zero_and_not_a_rounding_error(pool: str) -> None:
    """A probe divides each feature by its spread: rounding errors would weigh as much as anything else."""
    rng, grid = np.random.default_rng(5), (4, 8, 8)
    every = np.arange(4 * 8 * 8)
    zones = token_regions(every, grid)
    index = every[zones != 0]  # of the first depth, no token in the middle: the rest has all of its tokens
    features = rng.normal(3, 1, size=(len(index), 40)).astype(np.float32)
    eye = TokenFeatures(features, index, grid, np.ones(len(index), np.float32))
    mean, maximum, minimum = pool_tokens(eye, np.zeros(0, np.int64), (pool,)).reshape(REGIONS, 3, 40)[1]
    assert (mean == 0).all()
    assert (maximum > 0.1).all()
    assert (minimum < -0.1).all()


@pytest.mark.parametrize(("count", "dim"), [(150, 6), (40, 96)])
def test_whitened_tokens_have_less_of_what_all_of_them_vary_in(count: int, dim: int) -> None:
    rng = np.random.default_rng(4)
    spread = np.ones(dim, np.float32)
    spread[0] = 30
    tokens = (rng.normal(size=(count, dim)) * spread).astype(np.float32)
    tokens -= tokens.mean(axis=0)
    found = whitened(tokens)
    covariance = tokens.astype(float).T @ tokens / count
    shrunk = covariance / 2 + np.trace(covariance) / dim * np.eye(dim) / 2
    assert np.allclose(found, tokens @ np.linalg.inv(scipy.linalg.sqrtm(shrunk).real), atol=1e-3)
    assert found[:, 0].std() / found[:, 1].std() < 0.5 * tokens[:, 0].std() / tokens[:, 1].std()
    assert np.allclose(whitened(1000 * tokens), found, atol=1e-3)  # whatever the scale of an encoder's tokens
    assert found.dtype == np.float32


def test_tokens_that_do_not_vary_are_pooled_as_they_are() -> None:
    one = TokenFeatures(np.ones((1, 5), np.float32), np.zeros(1, np.int64), (4, 8, 8), np.ones(1, np.float32))
    pooled = pool_tokens(one, np.zeros(0, np.int64), ("zones_whitened",))
    assert len(pooled) == 5 * POOL_WIDTHS["zones_whitened"]
    assert not pooled.any()


def test_a_lesion_along_a_quiet_axis_stands_out_more_after_whitening() -> None:
    """What pooling takes of few unlike tokens, against the spread of the statistic over eyes without any."""
    rng, grid = np.random.default_rng(5), (4, 8, 8)
    index, layers = np.arange(4 * 8 * 8), np.zeros(0, np.int64)
    spread = np.array([20, 20, 20, 1, 1, 1], np.float32)
    mixing = np.linalg.qr(rng.normal(size=(6, 6)))[0].astype(np.float32)  # no axis is quiet by itself

    def eye(lesion: float, pool: str) -> np.ndarray:
        features = rng.normal(size=(256, 6)).astype(np.float32) * spread
        features[64 * 2 + 8 * 3 + 3 : 64 * 2 + 8 * 3 + 5, 4] += lesion  # two tokens of the middle, one depth
        one = TokenFeatures(features @ mixing, index, grid, np.ones(256, np.float32))
        return pool_tokens(one, layers, (pool,))

    effects = {}
    for pool in ("zones_centered", "zones_whitened"):
        with_it, without = (np.stack([eye(lesion, pool) for _ in range(60)]) for lesion in (12.0, 0.0))
        effects[pool] = np.abs((with_it.mean(axis=0) - without.mean(axis=0)) / (without.std(axis=0) + 1e-9)).max()
    assert effects["zones_whitened"] > 1.5 * effects["zones_centered"]


def test_tables_are_compared_by_the_default_pooling_or_the_best_that_they_have() -> None:
    assert default_pool(("mean_std_max", "zones_centered", "zones_whitened")) == "zones_whitened"
    assert default_pool(("mean_std_max", "zones_centered", "layers")) == "zones_centered"
    assert default_pool(readable_pools(("layers", "mean_std_max_min"))) == "mean_std_max"  # its head
    assert default_pool(("mean",)) == "mean"
    assert default_pool(("tissue_mean", "layers")) == "layers"
    assert default_pool(("mean_std_max_min",)) == "mean_std_max_min"  # read alone, its head is not there to compare
