"""The two probes on frozen features, linear and k-nearest-neighbour, and how their one setting is chosen.

Features enter standardised by the training volumes and scaled so that a training volume has length one on average: one
grid then serves 192 or 1,728 features alike. The setting (C, alpha or k) is chosen by loss on the validation split, or,
where that holds too few people, by person-grouped cross-validation inside the training split. Every feature set, the
untrained encoder's included, goes through exactly this. The test split is only ever predicted, once.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from octjepa.evaluate.labels import Target
from octjepa.evaluate.metrics import Predictions

C_GRID = tuple(float(f"{c:.3g}") for c in np.logspace(-2, 4, 7))
ALPHA_GRID = tuple(1 / c for c in C_GRID)
K_GRID = (1, 3, 5, 9, 15, 25, 49)
FOLDS = 5
# A validation split with fewer people (of each class) chooses worse than cross-validation over the training people.
LEAST_VAL_PEOPLE = 20


@dataclass(frozen=True)
class Choosing:
    """How a target's setting is chosen: by "val", by "cv" over `folds` (a fold per training volume), or "fixed"."""

    by: str
    folds: Int[np.ndarray, " train"]


@dataclass
class Space:
    """One feature set over one set of labelled volumes, ready for any number of targets.

    Coordinates are those of the training volumes' principal axes: with an L2 penalty the solution lies in their span,
    so this rotation changes no prediction, and 1,728 features of 400 volumes become at most 399.
    """

    train: Float[np.ndarray, "train axes"]
    val: Float[np.ndarray, "val axes"]
    test: Float[np.ndarray, "test axes"]
    orders: dict[str, Int[np.ndarray, "queries neighbours"]] = field(default_factory=dict)

    def neighbours(self, queries: str, folds: Int[np.ndarray, " train"] | None = None) -> Int[np.ndarray, "q k"]:
        """Training volumes by falling cosine similarity to each query; with `folds`, those of its own fold left out."""
        key = queries if folds is None else queries + folds.tobytes().hex()
        if key not in self.orders:
            similarity = _unit(getattr(self, queries)) @ _unit(self.train).T
            if folds is not None:
                similarity[folds[:, None] == folds] = -np.inf
            self.orders[key] = np.argsort(-similarity, axis=1, kind="stable")[:, : K_GRID[-1]]
        return self.orders[key]


def _unit(rows: Float[np.ndarray, "n axes"]) -> Float[np.ndarray, "n axes"]:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)


def prepare(features: Float[np.ndarray, "volumes features"], target: Target) -> Space:
    """Standardises by the training volumes of `target`, scales, and rotates to their principal axes."""
    train = features[target.rows["train"]]
    mean, std = train.mean(axis=0), train.std(axis=0)
    # The others are constant: they say nothing, and their spread is nothing to divide by.
    varied = std > 1e-8 * np.maximum(np.abs(mean), 1e-12)
    if not varied.any():
        blank = {split: np.zeros((len(rows), 1)) for split, rows in target.rows.items()}
        return Space(blank["train"], blank["val"], blank["test"])
    scale = std[varied] * np.sqrt(varied.sum())
    parts = {split: (features[rows][:, varied] - mean[varied]) / scale for split, rows in target.rows.items()}
    train = parts["train"]
    if len(train) <= train.shape[1]:
        power, axes = np.linalg.eigh(train @ train.T)
        kept = power > 1e-10 * power[-1]
        rotation = train.T @ (axes[:, kept] / np.sqrt(power[kept]))
        parts = {split: rows @ rotation for split, rows in parts.items()}
    return Space(parts["train"], parts["val"], parts["test"])


def choosing(target: Target, person_ids: np.ndarray, seed: int) -> Choosing:
    """Validation split if it holds enough people, else person-grouped folds over the training volumes.

    Fixed to the middle of the grid where even two folds cannot hold every class; the result rows say which it was.
    """
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

    people, truth = person_ids[target.rows["train"]], target.values["train"]
    val_people, val_truth = person_ids[target.rows["val"]], target.values["val"]
    none = np.zeros(len(people), dtype=np.int64)
    if target.classes:
        codes = range(len(target.classes))
        if min(len(set(val_people[val_truth == code])) for code in codes) >= LEAST_VAL_PEOPLE:
            return Choosing("val", none)
        count = min(FOLDS, *(len(set(people[truth == code])) for code in codes))
    else:
        if len(set(val_people)) >= LEAST_VAL_PEOPLE:
            return Choosing("val", none)
        count = min(FOLDS, len(set(people)))
    if count < 2:
        return Choosing("fixed", none)
    kind = StratifiedGroupKFold if target.classes else GroupKFold
    splitter = kind(n_splits=count, shuffle=True, random_state=seed)
    folds = none.copy()
    for number, (_, held_out) in enumerate(splitter.split(np.zeros((len(people), 1)), truth, people)):
        folds[held_out] = number
    if target.classes and any(len(set(truth[folds != number])) < len(target.classes) for number in range(count)):
        return Choosing("fixed", none)
    return Choosing("cv", folds)


@dataclass(frozen=True)
class Probed:
    """Predictions on the test split, the chosen setting, and how many fits stopped before they converged."""

    predictions: Predictions
    setting: float
    unconverged: int


def shares(target: Target) -> Float[np.ndarray, " classes"]:
    """How common each class is among the training volumes."""
    return np.bincount(target.values["train"], minlength=len(target.classes)) / len(target.values["train"])


def _loss(target: Target, truth: np.ndarray, scores: Float[np.ndarray, "n classes"]) -> float:
    """Log loss in which every class weighs the same; mean squared error in regression. Only for choosing."""
    if not target.classes:
        return float(np.mean((truth - scores[:, 0]) ** 2))
    weight = 1 / shares(target)[truth]
    likelihood = np.clip(scores[np.arange(len(truth)), truth], 1e-12, 1)
    return float(-(weight * np.log(likelihood)).sum() / weight.sum())


def _result(target: Target, scores: Float[np.ndarray, "n classes"]) -> Predictions:
    """Balanced class probabilities and, for calibration, the same at the training shares (Saerens et al. 2002)."""
    calibrated = scores
    if target.classes:
        calibrated = scores * shares(target)
        calibrated = calibrated / calibrated.sum(axis=1, keepdims=True)
    return Predictions(target.values["test"], scores, calibrated)


class _Linear:
    """Logistic (classes weighted by inverse frequency) or ridge regression over a path of settings."""

    def __init__(self, target: Target, tolerance: float) -> None:
        from sklearn.linear_model import LogisticRegression, Ridge

        self.target = target
        self.unconverged = 0
        # Along the path each fit starts from the one before it: the same optimum in fewer steps.
        self.model = (
            LogisticRegression(class_weight="balanced", warm_start=True, tol=tolerance, max_iter=2000)
            if target.classes
            else Ridge(solver="cholesky")
        )

    def fit(self, setting: float, rows: Float[np.ndarray, "n axes"], truth: np.ndarray) -> None:
        from sklearn.exceptions import ConvergenceWarning

        if self.target.classes:
            self.model.C = setting
        else:
            self.model.alpha = setting
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", ConvergenceWarning)
            self.model.fit(rows, truth)
        self.unconverged += sum(issubclass(one.category, ConvergenceWarning) for one in said)

    def scores(self, rows: Float[np.ndarray, "n axes"]) -> Float[np.ndarray, "n classes"]:
        if self.target.classes:
            probabilities: np.ndarray = self.model.predict_proba(rows)
            return probabilities
        predicted: np.ndarray = self.model.predict(rows)
        return predicted[:, None]


def linear(space: Space, target: Target, how: Choosing) -> Probed:
    """Linear probe: C (or alpha) chosen by `how`, refitted on all training volumes, test volumes predicted.

    Equal losses go to the stronger penalty.
    """
    grid = C_GRID if target.classes else ALPHA_GRID
    truth = target.values["train"]
    losses = np.zeros(len(grid))
    unconverged = 0
    if how.by == "val":
        path = _Linear(target, tolerance=1e-4)
        for index, setting in enumerate(grid):
            path.fit(setting, space.train, truth)
            losses[index] = _loss(target, target.values["val"], path.scores(space.val))
        unconverged = path.unconverged
    elif how.by == "cv":
        held_out = np.zeros((len(grid), len(truth), max(1, len(target.classes))))
        for number in np.unique(how.folds):
            inside = how.folds != number
            path = _Linear(target, tolerance=1e-4)
            for index, setting in enumerate(grid):
                path.fit(setting, space.train[inside], truth[inside])
                held_out[index, ~inside] = path.scores(space.train[~inside])
            unconverged += path.unconverged
        losses[:] = [_loss(target, truth, scores) for scores in held_out]
    else:
        losses = np.abs(np.arange(len(grid)) - len(grid) // 2).astype(float)
    setting = grid[int(np.argmin(losses))]
    final = _Linear(target, tolerance=1e-6)
    final.fit(setting, space.train, truth)
    return Probed(_result(target, final.scores(space.test)), setting, unconverged + final.unconverged)


def knn(space: Space, target: Target, how: Choosing) -> Probed:
    """k nearest training volumes by cosine similarity, one vote each, votes divided by the class's share.

    One more vote is spread over the classes at their training shares, so that no class is ever called impossible.
    Regression: the neighbours' mean. Equal losses go to the larger k.
    """
    truth = target.values["train"]
    smallest = len(truth) - (np.bincount(how.folds).max() if how.by == "cv" else 0)
    grid = [k for k in K_GRID if k <= smallest][::-1]
    if how.by == "val":
        losses = [_loss(target, target.values["val"], _votes(target, space.neighbours("val"), k)) for k in grid]
    elif how.by == "cv":
        order = space.neighbours("train", how.folds)
        losses = [_loss(target, truth, _votes(target, order, k)) for k in grid]
    else:
        losses = [abs(index - len(grid) // 2) for index in range(len(grid))]
    k = grid[int(np.argmin(losses))]
    return Probed(_result(target, _votes(target, space.neighbours("test"), k)), float(k), 0)


def _votes(target: Target, order: Int[np.ndarray, "n neighbours"], k: int) -> Float[np.ndarray, "n classes"]:
    nearest = target.values["train"][order[:, :k]]
    if not target.classes:
        return nearest.mean(axis=1, keepdims=True)
    common = shares(target)
    votes = (nearest[:, :, None] == np.arange(len(common))).sum(axis=1) + common
    scores = votes / common
    balanced: np.ndarray = scores / scores.sum(axis=1, keepdims=True)
    return balanced
