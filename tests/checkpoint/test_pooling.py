"""Where a zone begins and ends, on grids small enough to be written down."""

from __future__ import annotations

import numpy as np

from octjepa.checkpoint.pooling import (
    POOL_WIDTHS,
    TokenFeatures,
    default_pool,
    pool_tokens,
    readable_pools,
    token_regions,
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


def test_tables_are_compared_by_the_default_pooling_or_the_best_that_they_have() -> None:
    assert default_pool(("mean_std_max", "zones_centered", "layers")) == "zones_centered"
    assert default_pool(readable_pools(("layers", "mean_std_max_min"))) == "mean_std_max"  # its head
    assert default_pool(("mean",)) == "mean"
    assert default_pool(("tissue_mean", "layers")) == "layers"
    assert default_pool(("mean_std_max_min",)) == "mean_std_max_min"  # read alone, its head is not there to compare
