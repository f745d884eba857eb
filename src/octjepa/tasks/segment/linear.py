"""The linear head: ridge regression from a token, and its position, to every cell of its patch; in closed form.

Cells are coarse along the columns (a few together), whole along slices and depth. In flattened volumes the position
predicts most layers (`PositionPrior`, measured next to the heads). A token should add to that, so every linear head
knows the position. Cells without a token take the prior.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int, UInt8

from octjepa.recipe import Recipe
from octjepa.tasks.labels.label_files import UNLABELLED
from octjepa.tasks.segment.dice import mean_dice, voxel_counts
from octjepa.tasks.segment.windows import (
    Corner,
    ExtractTokens,
    LabelledVolume,
    PositionPrior,
    Tokens,
    coarsen_columns,
    corners,
    refine_columns,
    window_slices,
)
from octjepa.volume import CanonicalVolume

PENALTIES = (1e-3, 1e-1, 1e1)  # of the mean squared feature, times the number of tokens


class Ridge:
    """Ridge regression from features to O outputs, fitted in parts; the intercept carries no penalty."""

    def __init__(self, dim: int, outputs: int) -> None:
        self.count = 0
        self.square = np.zeros((dim + 1, dim + 1))
        self.cross = np.zeros((dim + 1, outputs))

    def add(self, features: Float[np.ndarray, "k dim"], outputs: Float[np.ndarray, "k outputs"]) -> None:
        """Adds samples to the sums of products."""
        x = with_intercept(features)
        self.square += x.T @ x
        self.cross += x.T @ outputs
        self.count += len(x)

    def weights(self, penalty: float) -> Float[np.ndarray, "features outputs"]:
        """At `penalty` times the mean squared feature. Features are centred and scaled through the sums."""
        mean = self.square[-1, :-1] / self.count
        spread = np.sqrt(np.maximum(np.diag(self.square)[:-1] / self.count - mean**2, 1e-8))
        scale = np.zeros_like(self.square)  # x @ scale: standardised features and one
        np.fill_diagonal(scale, [*(1 / spread), 1.0])
        scale[-1, :-1] = -mean / spread
        inside = scale.T @ self.square @ scale
        inside[np.diag_indices(len(mean))] += penalty * self.count
        solved: np.ndarray = scale @ np.linalg.solve(inside, scale.T @ self.cross)
        return solved


def with_intercept(features: Float[np.ndarray, "k dim"]) -> Float[np.ndarray, "k dim+1"]:
    """The features with a constant column of 1."""
    return np.concatenate([features.astype(np.float64), np.ones((len(features), 1))], axis=1)


def patch_cells(
    volume: UInt8[np.ndarray, "d h c"], grid: tuple[int, int, int], index: Int[np.ndarray, " k"]
) -> UInt8[np.ndarray, "k cells"]:
    """The cells of each patch `index` (raster order of `grid`)."""
    (d, h, w), (slices, depth, columns) = grid, volume.shape
    p, q, r = slices // d, depth // h, columns // w
    tiles = volume.reshape(d, p, h, q, w, r).transpose(0, 2, 4, 1, 3, 5)  # grid, then cells of a patch
    return tiles.reshape(d * h * w, p * q * r)[index]


class TokenPositions:
    """Positions of a window's tokens: one-hot by depth, and by slice and column about the volume's centre."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, (d, h, w) = recipe, recipe.grid
        self.sizes = 2 * d + 1, h, 2 * w + 1  # a margin moves a window by less than a whole view

    def grid_positions(
        self, index: Int[np.ndarray, " k"], corner: Corner, shape: Sequence[int]
    ) -> Int[np.ndarray, "k 3"]:
        """(slice, depth, column) of the tokens of the window at `corner` of a volume of `shape`, in tokens."""
        d, _, w = self.recipe.grid
        p, _, r = self.recipe.tokens.patch_size
        i, j, k = np.unravel_index(index, self.recipe.grid)
        slices = np.rint((corner[0] + (i + 0.5) * p - shape[0] / 2) / p - 0.5).astype(np.int64) + d
        columns = np.rint((corner[2] + (k + 0.5) * r - shape[2] / 2) / r - 0.5).astype(np.int64) + w
        return np.stack([np.clip(slices, 0, 2 * d), j, np.clip(columns, 0, 2 * w)], axis=1)

    def join(self, tokens: Tokens, corner: Corner, shape: Sequence[int]) -> Float[np.ndarray, "k features"]:
        """Features and, one-hot, the position: (slice, depth) together and (depth, column) together."""
        at = self.grid_positions(tokens.index, corner, shape)
        a, h, b = self.sizes
        by_slice = (at[:, 0] * h + at[:, 1])[:, None] == np.arange(a * h)
        by_column = (at[:, 1] * b + at[:, 2])[:, None] == np.arange(h * b)
        return np.concatenate([tokens.features, by_slice, by_column], axis=1).astype(np.float32)


class LinearHead:
    """From tokens to scores of the classes (background first) at every voxel of a stored volume of any size."""

    def __init__(
        self,
        extract: ExtractTokens,
        weights: Float[np.ndarray, "features outputs"],
        prior: PositionPrior,
        recipe: Recipe,
    ) -> None:
        self.extract, self.weights, self.prior, self.recipe = extract, weights, prior, recipe

    def scores(self, volume: CanonicalVolume) -> Float[np.ndarray, "classes D H W"]:
        """Scores of the classes at every voxel."""
        return self.scores_of_tokens(self.tokens(volume), volume.pixels.shape, self.weights)

    def tokens(self, volume: CanonicalVolume) -> list[tuple[Corner, Tokens]]:
        """Of every window."""
        return [(corner, self.extract(volume, corner)) for corner in corners(volume.pixels.shape, self.recipe)]

    def scores_of_tokens(
        self, windows: Sequence[tuple[Corner, Tokens]], shape: Sequence[int], weights: np.ndarray
    ) -> Float[np.ndarray, "classes D H W"]:
        """Scores of tokens laid on the volume: the mean where windows overlap, the prior if there is no token."""
        classes, columns = len(self.prior.shares), self.prior.columns
        (d, h, w), (p, q, r) = self.recipe.grid, self.recipe.tokens.patch_size
        total = np.zeros((classes, *shape), np.float32)
        count = np.zeros(tuple(shape), np.float32)
        positions = TokenPositions(self.recipe)
        for corner, tokens in windows:
            scores = (with_intercept(positions.join(tokens, corner, shape)) @ weights).astype(np.float32)
            whole = np.zeros((d * h * w, p * q * (r // columns), classes), np.float32)
            whole[tokens.index] = scores.reshape(len(tokens.index), -1, classes)
            tiles = whole.reshape(d, h, w, p, q, r // columns, classes).transpose(6, 0, 3, 1, 4, 2, 5)
            view = refine_columns(tiles.reshape(classes, d * p, h * q, w * r // columns), columns, w * r)
            covered = np.zeros(d * h * w, bool)
            covered[tokens.index] = True
            covered = covered.reshape(d, h, w).repeat(p, 0).repeat(q, 1).repeat(r, 2)  # voxels of the view
            here = window_slices(corner, self.recipe)
            total[(slice(None), *here)] += view * covered
            count[here] += covered
        return np.where(count > 0, total / np.maximum(count, 1), self.prior.scores(shape)).astype(np.float32)


def fit_linear_head(
    extract: ExtractTokens,
    train: Iterable[LabelledVolume],
    val: Iterable[LabelledVolume],
    prior: PositionPrior,
    recipe: Recipe,
) -> tuple[LinearHead, float, float | None]:
    """(head, penalty, its mean Dice on `val`); if no class is in the labels of val the middle penalty and None."""
    ridge = _fit_ridge(extract, train, prior, recipe)
    head = LinearHead(extract, ridge.weights(PENALTIES[1]), prior, recipe)
    classes = len(prior.shares)
    tried = {penalty: (ridge.weights(penalty), np.zeros((classes - 1, 3))) for penalty in PENALTIES}
    for volume, labels in val:
        shape = volume.pixels.shape
        windows = head.tokens(volume)
        for weights, counts in tried.values():
            codes = head.scores_of_tokens(windows, shape, weights).argmax(axis=0).astype(np.uint8)
            counts += voxel_counts(codes, labels, classes - 1)
    figures = {penalty: mean_dice(counts) for penalty, (_, counts) in tried.items()}
    measured = {penalty: figure for penalty, figure in figures.items() if figure is not None}
    if not measured:
        return head, PENALTIES[1], None
    best = max(measured, key=measured.__getitem__)
    return LinearHead(extract, tried[best][0], prior, recipe), best, measured[best]


def _fit_ridge(extract: ExtractTokens, train: Iterable[LabelledVolume], prior: PositionPrior, recipe: Recipe) -> Ridge:
    classes, ridge = len(prior.shares), None
    positions = TokenPositions(recipe)
    for volume, labels in train:
        for corner in corners(volume.pixels.shape, recipe):
            tokens = extract(volume, corner)
            of_window = coarsen_columns(labels[window_slices(corner, recipe)], prior.columns)
            codes = patch_cells(of_window, recipe.grid, tokens.index)
            whole = (codes != UNLABELLED).all(axis=1)  # a patch that reaches out of the scan is left out
            features = positions.join(tokens, corner, volume.pixels.shape)[whole]
            ridge = ridge or Ridge(features.shape[1], codes.shape[1] * classes)
            one_hot = codes[whole][..., None] == np.arange(classes)
            ridge.add(features, one_hot.reshape(len(features), -1).astype(float))
    assert ridge is not None
    return ridge
