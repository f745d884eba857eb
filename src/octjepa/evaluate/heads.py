"""The two probes on frozen features, linear and k-nearest-neighbour, and how their one setting is chosen.

Features enter standardised by the training volumes and scaled so that a training volume has length one on average: one
grid then serves 192 or 1,728 features alike. The setting (C, alpha or k) is chosen by loss on the validation split, or,
where that holds too few people, by person-grouped cross-validation inside the training split. Every feature set, the
untrained encoder's included, goes through exactly this. The same held-out predictions place the decision between the
classes. The test split is only ever predicted, once.
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
    stratified = StratifiedGroupKFold(n_splits=count, shuffle=True, random_state=seed)
    splitter = stratified if target.classes else GroupKFold(n_splits=count)
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


def _shifted(scores: Float[np.ndarray, "n classes"], shift: Float[np.ndarray, " classes"]) -> np.ndarray:
    """Class probabilities with `shift` added to their logarithms."""
    logits = np.log(np.clip(scores, 1e-12, 1)) + shift
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: np.ndarray = raised / raised.sum(axis=1, keepdims=True)
    return probabilities


def _balancing_shift(
    scores: Float[np.ndarray, "n classes"], weight: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " classes"]:
    """The shift of the class logits of least weighted log loss: every class is then expected as often as the others.

    Newton's method; `weight` sums to 1 and gives every class the same share.
    """
    classes = scores.shape[1]
    shift = np.zeros(classes)
    for _ in range(25):
        said = _shifted(scores, shift)
        gradient = weight @ said - 1 / classes
        curvature = np.diag(weight @ said) - (said * weight[:, None]).T @ said
        step = np.linalg.solve(curvature + 1e-6 * np.eye(classes), gradient)
        shift -= np.clip(step, -1, 1)
        if np.abs(gradient).max() < 1e-8:
            break
    return shift - shift.mean()


def _choose(
    target: Target, truth: np.ndarray, held_out: list[Float[np.ndarray, "n classes"]]
) -> tuple[int, Float[np.ndarray, " classes"]]:
    """Place of the setting of least held-out loss (the first of equals), and its shift of the class logits.

    Loss: log loss in which every class weighs the same, after the shift; mean squared error in regression. The shift is
    needed because with more features than volumes, class weights alone leave every unseen volume on the side of the
    commoner class: an AUROC of 0.8 could stand beside a balanced accuracy of 0.5.
    """
    if not target.classes:
        return int(np.argmin([np.mean((truth - scores[:, 0]) ** 2) for scores in held_out])), np.zeros(1)
    counts = np.bincount(truth, minlength=len(target.classes))
    weight = 1 / (len(counts) * counts[truth])
    shifts = [_balancing_shift(scores, weight) for scores in held_out]
    right = np.arange(len(truth)), truth
    losses = [
        -weight @ np.log(np.clip(_shifted(scores, shift)[right], 1e-12, 1))
        for scores, shift in zip(held_out, shifts, strict=True)
    ]
    best = int(np.argmin(losses))
    return best, shifts[best]


def _result(
    target: Target, scores: Float[np.ndarray, "n classes"], shift: Float[np.ndarray, " classes"]
) -> Predictions:
    """Balanced class probabilities and, for calibration, the same at the training shares (Saerens et al. 2002)."""
    if not target.classes:
        return Predictions(target.values["test"], scores, scores)
    balanced = _shifted(scores, shift)
    calibrated = balanced * shares(target)
    return Predictions(target.values["test"], balanced, calibrated / calibrated.sum(axis=1, keepdims=True))


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
    best, shift, unconverged = len(grid) // 2, np.zeros(max(1, len(target.classes))), 0
    if how.by == "val":
        path = _Linear(target, tolerance=1e-4)
        held_out = []
        for setting in grid:
            path.fit(setting, space.train, truth)
            held_out.append(path.scores(space.val))
        best, shift = _choose(target, target.values["val"], held_out)
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
        best, shift = _choose(target, truth, held_out)
    final = _Linear(target, tolerance=1e-6)
    final.fit(grid[best], space.train, truth)
    predictions = _result(target, final.scores(space.test), shift)
    return Probed(predictions, grid[best], unconverged + final.unconverged)


def knn(space: Space, target: Target, how: Choosing) -> Probed:
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
        best, shift = _choose(target, target.values["val"], [_votes(target, order, k) for k in grid])
    elif how.by == "cv":
        order = space.neighbours("train", how.folds)
        best, shift = _choose(target, truth, [_votes(target, order, k) for k in grid])
    votes = _votes(target, space.neighbours("test"), grid[best])
    return Probed(_result(target, votes, shift), float(grid[best]), 0)


def _votes(target: Target, order: Int[np.ndarray, "n neighbours"], k: int) -> Float[np.ndarray, "n classes"]:
    nearest = target.values["train"][order[:, :k]]
    if not target.classes:
        return nearest.mean(axis=1, keepdims=True)
    common = shares(target)
    votes = (nearest[:, :, None] == np.arange(len(common))).sum(axis=1) + common
    scores = votes / common
    balanced: np.ndarray = scores / scores.sum(axis=1, keepdims=True)
    return balanced
