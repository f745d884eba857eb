"""Where a zone begins and ends, on grids small enough to be written down."""

from __future__ import annotations

import numpy as np

from octjepa.checkpoint.pooling import POOL_WIDTHS, token_regions
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
