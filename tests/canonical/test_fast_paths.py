"""What ingest computes in a fast way is what the plain computation gives, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from octjepa.canonical.burned_in import find_text
from octjepa.canonical.fill import (
    _MIN_RUN,
    intensity_beside_mask,
    intensity_counts,
    percentile_of_counts,
    runs_from_border,
    runs_from_top_and_bottom,
)
from octjepa.canonical.plausibility import running_sums
from octjepa.canonical.vitreous_objects import block_medians
from octjepa.read.picture_frames import block_means, block_sums


def painted(seed: int) -> np.ndarray:
    """A mask with boxes, some of them at a border, and holes."""
    draw = np.random.default_rng(seed)
    height, width = draw.integers(8, 50), draw.integers(8, 60)
    mask = draw.random((height, width)) < 0.05
    for _ in range(4):
        top, left = draw.integers(-10, height), draw.integers(-10, width)
        mask[max(top, 0) : top + draw.integers(4, 50), max(left, 0) : left + draw.integers(4, 50)] = True
    mask[draw.integers(0, height, 5), draw.integers(0, width, 5)] = False
    return mask


def plain_runs(full: np.ndarray) -> np.ndarray:
    """Runs from each border in turn, counted pixel by pixel."""
    joined = np.zeros_like(full)
    for turns in range(4):
        turned, into = np.rot90(full, turns), np.rot90(joined, turns)
        for column in range(turned.shape[1]):
            run = 0
            while run < len(turned) and turned[run, column]:
                run += 1
            if run >= _MIN_RUN:
                into[:run, column] = True
    return joined


def combed(seed: int) -> np.ndarray:
    """Runs of random length from the left and the right border, which often meet, and few from the others."""
    draw = np.random.default_rng(seed)
    height, width = draw.integers(8, 40), draw.integers(12, 30)
    column = np.arange(width)
    left, right = (draw.integers(0, width, height) * (draw.random(height) < 0.6) for _ in range(2))
    mask = (column < left[:, None]) | (column >= width - right[:, None])
    for flip in (False, True):
        deep = draw.integers(0, height, width) * (draw.random(width) < 0.1)
        mask |= np.flip(np.arange(height)[:, None] < deep, 0) if flip else np.arange(height)[:, None] < deep
    return mask


@pytest.mark.parametrize("make", [painted, combed])
def test_runs_from_the_border(make: Callable[[int], np.ndarray]) -> None:
    for seed in range(60):
        assert_runs(make(seed))


def assert_runs(full: np.ndarray) -> None:
    from scipy.ndimage import label

    runs, alone = runs_from_border(full)
    standing = full.copy()
    standing[:, :] = False
    for flip in (False, True):
        turned, into = (full[::-1], standing[::-1]) if flip else (full, standing)
        run = np.cumprod(turned, axis=0).astype(bool)
        into |= run & (run.sum(axis=0) >= _MIN_RUN)
    assert alone == np.array_equal(standing, runs)
    np.testing.assert_array_equal(runs, plain_runs(full))
    parts, _ = label(runs)
    reaching = np.isin(parts, np.setdiff1d(parts[[0, -1]], 0))
    np.testing.assert_array_equal(runs_from_top_and_bottom(full), reaching)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_percentiles_by_counting(size: int) -> None:
    values = np.random.default_rng(size).integers(0, 90, (1, size), dtype=np.uint8)
    for percent in (0, 5, 25, 50, 95, 100):
        assert percentile_of_counts(intensity_counts(values), percent) == np.percentile(values, percent)


def test_medians_of_all_b_scans_at_once() -> None:
    draw = np.random.default_rng(0)
    blocks = draw.normal(20, 9, (6, 5, 7)).astype(np.float32)
    chosen = draw.random(blocks.shape) < 0.5
    chosen[2], chosen[3] = True, False
    expected = [np.median(one[some]) if some.any() else 0.0 for one, some in zip(blocks, chosen, strict=True)]
    np.testing.assert_array_equal(block_medians(blocks, chosen), expected)


def test_block_means_and_running_sums() -> None:
    frames = np.random.default_rng(1).integers(0, 256, (3, 101, 51), dtype=np.uint8)
    means = frames[:, :100, :50].reshape(3, 50, 2, 25, 2).astype(np.float64).mean(axis=(2, 4))
    np.testing.assert_array_equal(block_means(frames), means.astype(np.float32))
    image = np.random.default_rng(2).normal(30, 9, (3, 40, 9)).astype(np.float32)
    np.testing.assert_array_equal(running_sums(image)[:, 1:], np.cumsum(image, axis=1))


def test_text_in_few_rows_is_found_where_it_is() -> None:
    pixels = np.random.default_rng(3).integers(0, 100, (6, 80, 120), dtype=np.uint8)
    for column in range(20, 60, 4):
        pixels[2, 60:70, column : column + 2] = 255
    found = find_text(pixels)
    assert found is not None
    assert found[2, 60:70, 20:58].all()
    assert not found[:, :40].any()


@pytest.mark.parametrize("seed", range(30))
def test_the_level_beside_a_mask(seed: int) -> None:
    """The median of up to twelve pixels above or below a mask, whichever is darker."""
    mask = painted(seed)
    mask[:, 0] = False
    frame = np.random.default_rng(seed).integers(0, 256, mask.shape, dtype=np.uint8)
    levels = []
    for turned, filled in ((frame, mask), (frame[::-1], mask[::-1])):
        beside = np.zeros_like(filled)
        for row, column in zip(*np.nonzero(filled), strict=True):
            beside[row + 1 : row + 13, column] = True
        beside &= ~filled
        if beside.sum() >= 12:
            levels.append(np.median(turned[beside]))
    expected = np.uint8(min(levels) if levels else np.percentile(frame[~mask], 25))
    assert intensity_beside_mask(frame, mask) == expected


@pytest.mark.parametrize(("down", "across"), [(5, 8), (1, 1), (7, 3), (300, 2)])
def test_block_sums_give_the_means_of_numpy(down: int, across: int) -> None:
    frames = np.random.default_rng(4).integers(0, 256, (3, 611, 53), dtype=np.uint8)
    high, wide = 611 // down, 53 // across
    cut = frames[:, : high * down, : wide * across].astype(np.float32)
    means = block_sums(frames, down, across)
    np.true_divide(means, np.intp(down * across), out=means, casting="unsafe")
    np.testing.assert_array_equal(means, cut.reshape(3, high, down, wide, across).mean(axis=(2, 4)))


def test_white_fill_without_other_values_is_that_of_either_limit() -> None:
    for seed in range(40):
        frame = np.where(painted(seed), 255, np.random.default_rng(seed).integers(0, 255, painted(seed).shape))
        frame = frame.astype(np.uint8)
        nearly = runs_from_top_and_bottom(frame >= 235)
        if (frame[nearly] == 255).all():
            np.testing.assert_array_equal(nearly, runs_from_top_and_bottom(frame >= 254))
