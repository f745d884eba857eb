"""How surfaces are read: a linear correction, by tokens, of what the outline of the tissue says alone.

A row's tokens are those of the tissue that ingest found, so which of them are there gives a surface's depth to a few
voxels before any of them is looked at. First, ridge regression from that outline to the depth in every A-scan of a
column of patches: the same for every row, and the row `tissue` by itself. Then ridge regression from the three tokens
about that depth to what is missing of it, its penalty chosen by cross-validation over the labelled eyes, or over the
slabs of one eye. So no row reads worse than the outline because its head was given too little penalty, as until
2026-11-25 (lab/2026-11.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from octjepa.tasks.segment.linear import Ridge, with_intercept

from .tokens import TokenTable
from .truth import COLUMNS

PENALTIES = (1e-2, 1e-1, 1e0, 1e1, 1e2, 1e3)  # of the correction
_OUTLINE_PENALTY = 1e-3
_NEIGHBOURS = (-1, 0, 1)  # tokens about the depth that the outline gives
FOLDS = 5


class TokenEye(NamedTuple):
    """Tokens of an eye, of no features for the outline alone, and the one at each place of the grid, -1 for none."""

    features: Float[np.ndarray, "k f"]
    at: Int[np.ndarray, "d h w"]
    patch: tuple[int, int, int]


class LabelledEye(NamedTuple):
    """An eye with the depth of its surfaces, NaN where unknown, and a number for each column of patches: its fold."""

    eye: TokenEye
    depths: Float[np.ndarray, "boundaries D C"]
    fold: Int[np.ndarray, " n"]


def token_eye(table: TokenTable, volume: int, features: Float[np.ndarray, "k f"]) -> TokenEye:
    """A volume of a table, with `features` in place of the table's."""
    at = np.full(table.grid, -1)
    at.reshape(-1)[table.index[table.of(volume)]] = np.arange(len(features))
    return TokenEye(features, at, table.patch)


class SurfaceHead:
    """Fitted to labelled eyes; gives the depth of every surface in an eye. Raises ValueError for a single fold."""

    def __init__(self, labelled: Sequence[LabelledEye]) -> None:
        folds = np.concatenate([one.fold for one in labelled])
        if len(np.unique(folds)) < 2:
            raise ValueError("the penalty is chosen by cross-validation: two folds at least")
        outline = np.concatenate([outline_features(one.eye.at) for one in labelled])
        truth = np.concatenate([_by_column(one.depths, one.eye) for one in labelled])
        self.outline, self.corrections = [], []
        for number in range(truth.shape[1]):
            depths = truth[:, number]
            known = np.isfinite(depths).all(axis=1)
            head = fitted_ridge(outline[known], depths[known]).weights(_OUTLINE_PENALTY)
            first = with_intercept(outline) @ head
            self.outline.append(head)
            parts = np.split(first, np.cumsum([len(one.fold) for one in labelled])[:-1])
            x = np.concatenate([_about(one.eye, part) for one, part in zip(labelled, parts, strict=True)])
            missing = depths - first
            self.corrections.append(_correction(x[known], missing[known], folds[known]) if x.shape[1] else None)

    def depths(self, eye: TokenEye) -> Float[np.ndarray, "boundaries D C"]:
        """Depth index of each surface in every A-scan."""
        outline, found = with_intercept(outline_features(eye.at)), []
        for head, correction in zip(self.outline, self.corrections, strict=True):
            depth = outline @ head
            found.append(depth if correction is None else depth + with_intercept(_about(eye, depth)) @ correction)
        (d, _, w), (p, _, r) = eye.at.shape, eye.patch
        tiles = np.stack(found).reshape(len(found), d, w, p, r // COLUMNS)
        return tiles.transpose(0, 1, 3, 2, 4).reshape(len(found), d * p, -1)


def outline_features(at: Int[np.ndarray, "d h w"]) -> Float[np.ndarray, "n 8"]:
    """First and last token of each column of patches, of its two neighbours, and their mean over the slab; from 0 to 1.

    A column without a token has the mean of the others; a volume without one has the middle.
    """
    d, h, w = at.shape
    there = at >= 0
    some = there.any(axis=1)
    features = []
    for edge in (there.argmax(axis=1), h - 1 - there[:, ::-1].argmax(axis=1)):
        depth = np.where(some, edge, edge[some].mean() if some.any() else h / 2)
        beside = np.pad(depth, ((0, 0), (1, 1)), mode="edge")
        features += [depth, beside[:, :-2], beside[:, 2:], np.repeat(depth.mean(axis=1, keepdims=True), w, axis=1)]
    return np.stack(features, axis=-1).reshape(d * w, -1) / h


def _by_column(depths: Float[np.ndarray, "b D C"], eye: TokenEye) -> Float[np.ndarray, "n b a"]:
    """The depths of the A-scans of each column of patches."""
    (d, _, w), (p, _, r) = eye.at.shape, eye.patch
    tiles = depths.reshape(len(depths), d, p, w, r // COLUMNS).transpose(1, 3, 0, 2, 4)
    return tiles.reshape(d * w, len(depths), -1)


def _about(eye: TokenEye, depths: Float[np.ndarray, "n a"]) -> Float[np.ndarray, "n f"]:
    """The tokens about a column's mean depth, whether one is absent, and where in its token that depth is."""
    d, h, w = eye.at.shape
    if not eye.features.shape[1]:
        return np.zeros((d * w, 0))
    columns = eye.at.transpose(0, 2, 1).reshape(d * w, h)
    depth = depths.mean(axis=1) / eye.patch[1]
    row = np.clip(np.floor(depth).astype(int), 0, h - 1)
    parts = []
    for offset in _NEIGHBOURS:
        token = columns[np.arange(d * w), np.clip(row + offset, 0, h - 1)]
        absent = (token < 0)[:, None]
        parts += [np.where(absent, 0.0, eye.features[np.maximum(token, 0)]), absent]
    within = depth - row
    return np.concatenate([*parts, np.stack([within, within**2, row / h], axis=1)], axis=1)


def _correction(
    x: Float[np.ndarray, "n f"], y: Float[np.ndarray, "n a"], folds: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "features a"]:
    """Weights at the penalty with the least mean absolute error over the folds."""
    errors = np.zeros(len(PENALTIES))
    for fold in np.unique(folds):
        out: Bool[np.ndarray, " n"] = folds == fold
        head, held_out = fitted_ridge(x[~out], y[~out]), with_intercept(x[out])
        errors += [np.abs(y[out] - held_out @ head.weights(penalty)).sum() for penalty in PENALTIES]
    return fitted_ridge(x, y).weights(PENALTIES[int(errors.argmin())])


def fitted_ridge(x: Float[np.ndarray, "n f"], y: Float[np.ndarray, "n a"]) -> Ridge:
    """Ridge regression from all of `x` to `y`, which gives its weights at any penalty."""
    head = Ridge(x.shape[1], y.shape[1])
    head.add(x, y)
    return head
