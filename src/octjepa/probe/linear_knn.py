"""The two probes without gradient steps: linear and k-nearest-neighbour.

linear is L2-penalised logistic regression with classes weighted by inverse frequency; for ordered classes one for each
threshold between neighbours (Frank & Hall 2001); ridge for a quantity.
Both take a `FeatureSpace` and return a `ProbeFit`.
"""

from __future__ import annotations

import warnings

import numpy as np
from jaxtyping import Float, Int

from octjepa.probe.calibration import ProbeFit as ProbeFit
from octjepa.probe.calibration import calibrated_predictions, class_shares, class_weights, select_setting
from octjepa.probe.features import FOLDS as FOLDS
from octjepa.probe.features import MAX_NEIGHBOURS, FeatureSpace, Selection
from octjepa.probe.features import feature_space as feature_space
from octjepa.probe.features import plan_selection as plan_selection
from octjepa.probe.targets import Target

C_GRID = tuple(float(f"{c:.3g}") for c in np.logspace(-2, 4, 7))
ALPHA_GRID = tuple(1 / c for c in C_GRID)
K_GRID = (1, 3, 5, 9, 15, 25, MAX_NEIGHBOURS)


class _Linear:
    """Logistic or ridge regression over a path of settings."""

    def __init__(self, target: Target, tolerance: float) -> None:
        from sklearn.linear_model import LogisticRegression, Ridge

        self.target = target
        self.unconverged = 0
        balance = None if target.task == "ordinal" else "balanced"
        self.models = (
            # Along the path each fit starts from the one before it: the same optimum in fewer steps.
            [
                LogisticRegression(class_weight=balance, warm_start=True, tol=tolerance, max_iter=2000)
                for _ in range(len(target.classes) - 1 if target.task == "ordinal" else 1)
            ]
            if target.classes
            else [Ridge(solver="cholesky")]
        )

    def fit(self, setting: float, rows: Float[np.ndarray, "n axes"], truth: np.ndarray) -> None:
        from sklearn.exceptions import ConvergenceWarning

        ordinal = self.target.task == "ordinal"
        # Of grades the classes weigh alike, not the two sides of each threshold: those would leave the middle empty.
        weight = class_weights(truth, len(self.target.classes))[truth] if ordinal else None
        for threshold, model in enumerate(self.models):
            if self.target.classes:
                model.C = setting
            else:
                model.alpha = setting
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", ConvergenceWarning)
                model.fit(rows, truth > threshold if ordinal else truth, sample_weight=weight)
            self.unconverged += sum(issubclass(one.category, ConvergenceWarning) for one in said)

    def scores(self, rows: Float[np.ndarray, "n axes"]) -> Float[np.ndarray, "n classes"]:
        if self.target.task == "ordinal":
            above = np.stack([model.predict_proba(rows)[:, 1] for model in self.models], axis=1)
            return of_thresholds(above)
        (model,) = self.models
        if self.target.classes:
            probabilities: np.ndarray = model.predict_proba(rows)
            return probabilities
        predicted: np.ndarray = model.predict(rows)
        return predicted[:, None]


def of_thresholds(above: Float[np.ndarray, "n thresholds"]) -> Float[np.ndarray, "n classes"]:
    """Class probabilities from those of lying above each threshold; these are first made to fall."""
    falling = np.minimum.accumulate(above, axis=1)
    steps = np.concatenate([np.ones((len(above), 1)), falling, np.zeros((len(above), 1))], axis=1)
    shares = np.clip(steps[:, :-1] - steps[:, 1:], 1e-6, 1)
    probabilities: np.ndarray = shares / shares.sum(axis=1, keepdims=True)
    return probabilities


def fit_linear(space: FeatureSpace, target: Target, how: Selection) -> ProbeFit:
    """Linear probe: C (or alpha) chosen by `how`, refitted on all training volumes, test volumes predicted.

    Equal losses go to the stronger penalty.
    """
    grid = C_GRID if target.classes else ALPHA_GRID
    truth = target.values["train"]
    best, shift, unconverged = len(grid) // 2, np.zeros(max(1, len(target.classes))), 0
    if how.by == "val":
        path = _Linear(target, tolerance=1e-4)
        held_out = []
        for setting in grid:
            path.fit(setting, space.train, truth)
            held_out.append(path.scores(space.val))
        best, shift = select_setting(target, target.values["val"], held_out)
        unconverged = path.unconverged
    elif how.by == "cv":
        held_out = [np.zeros((len(truth), len(shift))) for _ in grid]
        for number in np.unique(how.folds):
            inside = how.folds != number
            path = _Linear(target, tolerance=1e-4)
            for scores, setting in zip(held_out, grid, strict=True):
                path.fit(setting, space.train[inside], truth[inside])
                scores[~inside] = path.scores(space.train[~inside])
            unconverged += path.unconverged
        best, shift = select_setting(target, truth, held_out)
    final = _Linear(target, tolerance=1e-6)
    final.fit(grid[best], space.train, truth)
    predictions = calibrated_predictions(target, final.scores(space.test), shift)
    return ProbeFit(predictions, grid[best], unconverged + final.unconverged)


def fit_knn(space: FeatureSpace, target: Target, how: Selection) -> ProbeFit:
    """k nearest training volumes by cosine similarity, one vote each, votes divided by the class's share.

    One more vote is spread over the classes at their training shares, so that no class is ever called impossible.
    Regression: the neighbours' mean. Equal losses go to the larger k.
    """
    truth = target.values["train"]
    smallest = len(truth) - (np.bincount(how.folds).max() if how.by == "cv" else 0)
    grid = [k for k in K_GRID if k <= smallest][::-1]
    best, shift = len(grid) // 2, np.zeros(max(1, len(target.classes)))
    if how.by == "val":
        order = space.neighbours("val")
        best, shift = select_setting(target, target.values["val"], [_votes(target, order, k) for k in grid])
    elif how.by == "cv":
        order = space.neighbours("train", how.folds)
        best, shift = select_setting(target, truth, [_votes(target, order, k) for k in grid])
    votes = _votes(target, space.neighbours("test"), grid[best])
    return ProbeFit(calibrated_predictions(target, votes, shift), float(grid[best]), 0)


def _votes(target: Target, order: Int[np.ndarray, "n neighbours"], k: int) -> Float[np.ndarray, "n classes"]:
    nearest = target.values["train"][order[:, :k]]
    if not target.classes:
        return nearest.mean(axis=1, keepdims=True)
    common = class_shares(target)
    votes = (nearest[:, :, None] == np.arange(len(common))).sum(axis=1) + common
    scores = votes / common
    balanced: np.ndarray = scores / scores.sum(axis=1, keepdims=True)
    return balanced
