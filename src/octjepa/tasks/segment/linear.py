"""The linear head: ridge regression from a token, and where it lies, to every place of its patch; in closed form.

Places are coarse along the columns (a few together), whole along slices and rows. In flattened volumes the place alone
tells most layers (`octjepa.tasks.segment.prior`, a row of its own); a token is to tell more, so every linear row
knows the place. What no token covers takes the prior.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int, UInt8

from octjepa.recipe import Recipe
from octjepa.store import CanonicalVolume
from octjepa.tasks.segment.counts import counted, mean_of_classes
from octjepa.tasks.segment.label_files import UNSEEN
from octjepa.tasks.segment.prior import Prior, coarsened, refined
from octjepa.tasks.segment.windows import Corner, Featurise, Tokens, corners, cut_labels

PENALTIES = (1e-3, 1e-1, 1e1)  # of the mean squared feature, times the number of tokens
Labelled = tuple[CanonicalVolume, UInt8[np.ndarray, "D H W"]]


class Ridge:
    """Ridge regression from features to O outputs, fed part by part; the intercept carries no penalty."""

    def __init__(self, dim: int, outputs: int) -> None:
        self.count = 0
        self.square = np.zeros((dim + 1, dim + 1))
        self.cross = np.zeros((dim + 1, outputs))

    def add(self, features: Float[np.ndarray, "k dim"], wanted: Float[np.ndarray, "k outputs"]) -> None:
        x = with_one(features)
        self.square += x.T @ x
        self.cross += x.T @ wanted
        self.count += len(x)

    def weights(self, penalty: float) -> Float[np.ndarray, "features outputs"]:
        """At `penalty` times the mean squared feature. Features are centred and scaled through the sums."""
        mean = self.square[-1, :-1] / self.count
        spread = np.sqrt(np.maximum(np.diag(self.square)[:-1] / self.count - mean**2, 1e-8))
        scale = np.zeros_like(self.square)  # x_with_one @ scale: standardised features and one
        np.fill_diagonal(scale, [*(1 / spread), 1.0])
        scale[-1, :-1] = -mean / spread
        inside = scale.T @ self.square @ scale
        inside[np.diag_indices(len(mean))] += penalty * self.count
        solved: np.ndarray = scale @ np.linalg.solve(inside, scale.T @ self.cross)
        return solved


def with_one(features: Float[np.ndarray, "k dim"]) -> Float[np.ndarray, "k dim+1"]:
    return np.concatenate([features.astype(np.float64), np.ones((len(features), 1))], axis=1)


def cells(
    volume: UInt8[np.ndarray, "d h c"], grid: tuple[int, int, int], index: Int[np.ndarray, " k"]
) -> UInt8[np.ndarray, "k cells"]:
    """The places of each patch `index` (raster order of `grid`)."""
    (d, h, w), (depth, height, columns) = grid, volume.shape
    p, q, r = depth // d, height // h, columns // w
    tiles = volume.reshape(d, p, h, q, w, r).transpose(0, 2, 4, 1, 3, 5)
    return tiles.reshape(d * h * w, p * q * r)[index]


class Places:
    """Where a window's tokens lie in the volume: one-hot by row, and by slice and column about the volume's centre."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, (d, h, w) = recipe, recipe.grid
        self.sizes = 2 * d + 1, h, 2 * w + 1  # a margin moves a window by less than a whole view

    def __call__(self, index: Int[np.ndarray, " k"], corner: Corner, shape: Sequence[int]) -> Int[np.ndarray, "k 3"]:
        d, _, w = self.recipe.grid
        p, _, r = self.recipe.tokens.patch_size
        i, j, k = np.unravel_index(index, self.recipe.grid)
        near = np.rint((corner[0] + (i + 0.5) * p - shape[0] / 2) / p - 0.5).astype(np.int64) + d
        across = np.rint((corner[2] + (k + 0.5) * r - shape[2] / 2) / r - 0.5).astype(np.int64) + w
        return np.stack([np.clip(near, 0, 2 * d), j, np.clip(across, 0, 2 * w)], axis=1)

    def join(self, one: Tokens, corner: Corner, shape: Sequence[int]) -> Float[np.ndarray, "k features"]:
        """Features and, one-hot, the place: (slice, row) together and (row, column) together."""
        place = self(one.index, corner, shape)
        a, h, b = self.sizes
        down = (place[:, 0] * h + place[:, 1])[:, None] == np.arange(a * h)
        over = (place[:, 1] * b + place[:, 2])[:, None] == np.arange(h * b)
        return np.concatenate([one.features, down, over], axis=1).astype(np.float32)


class LinearHead:
    """From tokens to scores of the classes (background first) at every voxel of a stored volume of any size."""

    def __init__(
        self, featurise: Featurise, weights: Float[np.ndarray, "features outputs"], prior: Prior, recipe: Recipe
    ) -> None:
        self.featurise, self.weights, self.prior, self.recipe = featurise, weights, prior, recipe

    def scores(self, volume: CanonicalVolume) -> Float[np.ndarray, "classes D H W"]:
        return self.painted(self.tokens(volume), volume.pixels.shape, self.weights)

    def tokens(self, volume: CanonicalVolume) -> list[tuple[Corner, Tokens]]:
        """Of every window."""
        return [(corner, self.featurise(volume, corner)) for corner in corners(volume.pixels.shape, self.recipe)]

    def painted(
        self, found: Sequence[tuple[Corner, Tokens]], shape: Sequence[int], weights: np.ndarray
    ) -> Float[np.ndarray, "classes D H W"]:
        """Scores of tokens laid on the volume: the mean where windows overlap, the prior where no token lies."""
        classes, columns = len(self.prior.shares), self.prior.columns
        (d, h, w), (p, q, r) = self.recipe.grid, self.recipe.tokens.patch_size
        total = np.zeros((classes, *shape), np.float32)
        count = np.zeros(tuple(shape), np.float32)
        place = Places(self.recipe)
        for corner, one in found:
            scores = (with_one(place.join(one, corner, shape)) @ weights).astype(np.float32)
            whole = np.zeros((d * h * w, p * q * (r // columns), classes), np.float32)
            whole[one.index] = scores.reshape(len(one.index), -1, classes)
            tiles = whole.reshape(d, h, w, p, q, r // columns, classes).transpose(6, 0, 3, 1, 4, 2, 5)
            view = refined(tiles.reshape(classes, d * p, h * q, w * r // columns), columns, w * r)
            covered = np.zeros(d * h * w, bool)
            covered[one.index] = True
            seen = covered.reshape(d, h, w).repeat(p, 0).repeat(q, 1).repeat(r, 2)
            a, b, c = corner
            here = slice(a, a + d * p), slice(b, b + h * q), slice(c, c + w * r)
            total[(slice(None), *here)] += view * seen
            count[here] += seen
        return np.where(count > 0, total / np.maximum(count, 1), self.prior.scores(shape)).astype(np.float32)


def solve(
    featurise: Featurise, train: Iterable[Labelled], val: Iterable[Labelled], prior: Prior, recipe: Recipe
) -> tuple[LinearHead, float, float | None]:
    """(head, penalty, its mean Dice on `val`); where no class is in the labels of val the middle penalty and None."""
    ridge = _summed(featurise, train, prior, recipe)
    head = LinearHead(featurise, ridge.weights(PENALTIES[1]), prior, recipe)
    classes = len(prior.shares)
    tried = {penalty: (ridge.weights(penalty), np.zeros((classes - 1, 3))) for penalty in PENALTIES}
    for volume, labels in val:
        shape = volume.pixels.shape
        found = head.tokens(volume)
        for weights, counts in tried.values():
            counts += counted(head.painted(found, shape, weights).argmax(axis=0).astype(np.uint8), labels, classes - 1)
    scored = {p: figure for p, (_, counts) in tried.items() if (figure := mean_of_classes(counts)) is not None}
    if not scored:
        return head, PENALTIES[1], None
    best = max(scored, key=scored.__getitem__)
    return LinearHead(featurise, tried[best][0], prior, recipe), best, scored[best]


def _summed(featurise: Featurise, train: Iterable[Labelled], prior: Prior, recipe: Recipe) -> Ridge:
    classes, ridge = len(prior.shares), None
    place = Places(recipe)
    for volume, labels in train:
        for corner in corners(volume.pixels.shape, recipe):
            one = featurise(volume, corner)
            wanted = cells(coarsened(cut_labels(labels, corner, recipe), prior.columns), recipe.grid, one.index)
            whole = (wanted != UNSEEN).all(axis=1)  # a patch that reaches out of the scan teaches nothing
            features = place.join(one, corner, volume.pixels.shape)[whole]
            ridge = ridge or Ridge(features.shape[1], wanted.shape[1] * classes)
            hot = wanted[whole][..., None] == np.arange(classes)
            ridge.add(features, hot.reshape(len(features), -1).astype(float))
    assert ridge is not None
    return ridge
