"""The two probes without gradient steps: linear and k-nearest-neighbour.

linear is L2-penalised logistic regression with classes weighted by inverse frequency. For ordered classes one for each
threshold between neighbours (Frank & Hall 2001). Ridge for a quantity, Cox regression for a time to an event.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from octjepa.evaluate.calibration import ProbeFit, calibrated_predictions, class_shares, class_weights, select_setting
from octjepa.evaluate.features import MAX_NEIGHBOURS, PROBES, FeatureSpace, Selection
from octjepa.evaluate.survival import TASK, CoxRegression
from octjepa.evaluate.targets import Target

C_GRID = tuple(float(f"{c:.3g}") for c in np.logspace(-2, 4, 7))
ALPHA_GRID = tuple(1 / c for c in C_GRID)
K_GRID = (1, 3, 5, 9, 15, 25, MAX_NEIGHBOURS)


class _LinearModel:
    """Logistic, ridge or Cox regression over a path of settings."""

    def __init__(self, target: Target, tolerance: float) -> None:
        from sklearn.linear_model import LogisticRegression, Ridge

        self.target = target
        self.ordinal = target.task == "ordinal"
        self.unconverged = 0
        balance = None if self.ordinal else "balanced"
        self.models: list[Any] = (
            # Along the path each fit starts from the previous fit: the same optimum in fewer steps.
            [
                LogisticRegression(class_weight=balance, warm_start=True, tol=tolerance, max_iter=2000)
                for _ in range(len(target.classes) - 1 if self.ordinal else 1)
            ]
            if target.classes
            else [CoxRegression() if target.task == TASK else Ridge(solver="cholesky")]
        )

    def fit(self, setting: float, features: Float[np.ndarray, "n axes"], truth: np.ndarray) -> None:
        """Fits the model with penalty `setting`."""
        from sklearn.exceptions import ConvergenceWarning

        # Of grades the classes weigh alike, not the two sides of each threshold: those would leave the middle empty.
        weight = class_weights(truth, len(self.target.classes))[truth] if self.ordinal else None
        for threshold, model in enumerate(self.models):
            model.set_params(**{"C" if self.target.classes else "alpha": setting})
            with warnings.catch_warnings(record=True) as raised:
                warnings.simplefilter("always", ConvergenceWarning)
                model.fit(features, truth > threshold if self.ordinal else truth, sample_weight=weight)
            self.unconverged += sum(issubclass(warning.category, ConvergenceWarning) for warning in raised)

    def scores(self, features: Float[np.ndarray, "n axes"]) -> Float[np.ndarray, "n classes"]:
        """Class probabilities, or the predicted value of a regression."""
        if self.ordinal:
            above = np.stack([model.predict_proba(features)[:, 1] for model in self.models], axis=1)
            return threshold_shares(above)
        (model,) = self.models
        scores: np.ndarray = model.predict_proba(features) if self.target.classes else model.predict(features)[:, None]
        return scores


def threshold_shares(above: Float[np.ndarray, "n thresholds"]) -> Float[np.ndarray, "n classes"]:
    """Class probabilities from those of exceeding each threshold; these are first made to fall."""
    falling = np.minimum.accumulate(above, axis=1)
    steps = np.concatenate([np.ones((len(above), 1)), falling, np.zeros((len(above), 1))], axis=1)
    shares = np.clip(steps[:, :-1] - steps[:, 1:], 1e-6, 1)
    probabilities: np.ndarray = shares / shares.sum(axis=1, keepdims=True)
    return probabilities


@PROBES.register("linear")
def fit_linear(
    space: FeatureSpace, target: Target, selection: Selection, smoothing: float = 0.0, seed: int = 0
) -> ProbeFit:
    """Linear probe: C (or alpha) chosen by `selection`, refitted on all training volumes, test volumes predicted.

    Equal losses go to the stronger penalty. `smoothing` and `seed` are those of other probes.
    """
    grid = C_GRID if target.classes else ALPHA_GRID
    truth = target.values["train"]
    best, shift, unconverged = len(grid) // 2, np.zeros(max(1, len(target.classes))), 0
    if selection.by == "val":
        path = _LinearModel(target, tolerance=1e-4)
        held_out = []
        for setting in grid:
            path.fit(setting, space.train, truth)
            held_out.append(path.scores(space.val))
        best, shift = select_setting(target, target.values["val"], held_out)
        unconverged = path.unconverged
    elif selection.by == "cv":
        held_out = [np.zeros((len(truth), len(shift))) for _ in grid]
        for number in np.unique(selection.folds):
            inside = selection.folds != number
            path = _LinearModel(target, tolerance=1e-4)
            for scores, setting in zip(held_out, grid, strict=True):
                path.fit(setting, space.train[inside], truth[inside])
                scores[~inside] = path.scores(space.train[~inside])
            unconverged += path.unconverged
        best, shift = select_setting(target, truth, held_out)
    final = _LinearModel(target, tolerance=1e-6)
    final.fit(grid[best], space.train, truth)
    predictions = calibrated_predictions(target, final.scores(space.test), shift)
    return ProbeFit(predictions, grid[best], unconverged + final.unconverged)


@PROBES.register("knn")
def fit_knn(
    space: FeatureSpace, target: Target, selection: Selection, smoothing: float = 0.0, seed: int = 0
) -> ProbeFit:
    """k nearest training volumes by cosine similarity, one vote each, votes divided by the class's share.

    One more vote is spread over the classes at their training shares, so that no class has probability zero.
    Regression: the neighbours' mean. Equal losses go to the larger k. `smoothing` and `seed` are those of other probes.
    """
    truth = target.values["train"]
    smallest = len(truth) - (np.bincount(selection.folds).max() if selection.by == "cv" else 0)
    grid = [k for k in K_GRID if k <= smallest][::-1]
    best, shift = len(grid) // 2, np.zeros(max(1, len(target.classes)))
    if selection.by != "fixed":
        by_val = selection.by == "val"
        order = space.neighbours("val") if by_val else space.neighbours("train", selection.folds)
        held_out = [_votes(target, order, k) for k in grid]
        best, shift = select_setting(target, target.values["val"] if by_val else truth, held_out)
    votes = _votes(target, space.neighbours("test"), grid[best])
    return ProbeFit(calibrated_predictions(target, votes, shift), float(grid[best]), 0)


def _votes(target: Target, order: Int[np.ndarray, "n neighbours"], k: int) -> Float[np.ndarray, "n classes"]:
    """Balanced votes of the `k` nearest volumes, summing to 1; [n, 1] their mean in regression."""
    nearest = target.values["train"][order[:, :k]]  # [n, k]
    if not target.classes:
        return nearest.mean(axis=1, keepdims=True)
    shares = class_shares(target)
    votes = (nearest[:, :, None] == np.arange(len(shares))).sum(axis=1) + shares
    scores = votes / shares
    balanced: np.ndarray = scores / scores.sum(axis=1, keepdims=True)
    return balanced
