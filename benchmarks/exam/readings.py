"""How every row is read: principal components, logistic and ridge regression, and the labelled people drawn for them.

All rows are read alike. Components are fitted on training eyes without labels; penalties are chosen by cross-validation
over the labelled people alone, and nothing is chosen on test people.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score

from octjepa import keys

from .settings import COMPONENTS

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)  # C of logistic regression
PENALTIES = (1e0, 1e2, 1e4)  # alpha of ridge regression
_FOLDS = 5


class Projection:
    """Standardised features on their first principal components, scaled so that their mean variance is one.

    limited: no component leaves its range in `features`, so that a rare feature, such as the probability of fluid,
    changes what is read no more than it does there.
    """

    def __init__(
        self, features: Float[np.ndarray, "n dim"], components: int = COMPONENTS, limited: bool = False
    ) -> None:
        wide = features.astype(np.float32)
        self.mean, self.std = wide.mean(axis=0), np.maximum(wide.std(axis=0), 1e-6)
        components = min(components, *wide.shape)
        self.pca = PCA(components, svd_solver="full" if min(wide.shape) <= 1000 else "randomized", random_state=0)
        self.pca.fit((wide - self.mean) / self.std)
        self.scale = float(np.sqrt(self.pca.explained_variance_.mean()))
        self.limits: tuple[Float[np.ndarray, " c"], Float[np.ndarray, " c"]] | None = None
        if limited:
            there = self(features)
            self.limits = there.min(axis=0), there.max(axis=0)

    def __call__(self, features: Float[np.ndarray, "n dim"]) -> Float[np.ndarray, "n components"]:
        projected = self.pca.transform((features.astype(np.float32) - self.mean) / self.std)
        found = np.asarray(projected / self.scale, np.float32)
        return found if self.limits is None else found.clip(*self.limits)

    def whitened(self, features: Float[np.ndarray, "n dim"]) -> Float[np.ndarray, "n components"]:
        """Every component with unit variance over the training eyes."""
        return np.asarray(self(features) * self.scale / np.sqrt(self.pca.explained_variance_), np.float32)


def choose_strength(x: Float[np.ndarray, "n f"], y: Bool[np.ndarray, " n"], scoring: str = "roc_auc") -> float:
    """The C of `STRENGTHS` with the best mean score over folds of the labelled samples."""
    folds = min(_FOLDS, int(y.sum()), int((~y).sum()))
    if folds < 2:
        return STRENGTHS[1]
    split = StratifiedKFold(folds, shuffle=True, random_state=0)
    scores = [cross_val_score(_logistic(c), x, y, cv=split, scoring=scoring).mean() for c in STRENGTHS]
    return STRENGTHS[int(np.argmax(scores))]


def logistic_scores(
    x: Float[np.ndarray, "n f"], y: Bool[np.ndarray, " n"], test: Float[np.ndarray, "m f"], c: float
) -> Float[np.ndarray, " m"]:
    """Log-odds of test samples by logistic regression with balanced classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = _logistic(c).fit(x, y)
    return np.asarray(model.decision_function(test))


def _logistic(c: float) -> LogisticRegression:
    return LogisticRegression(C=c, class_weight="balanced", max_iter=300)


def ridge_values(
    x: Float[np.ndarray, "n f"], y: Float[np.ndarray, " n"], test: Float[np.ndarray, "m f"]
) -> Float[np.ndarray, " m"]:
    """Values of test samples by ridge regression, its penalty chosen by cross-validation over the labelled people."""
    split = KFold(min(_FOLDS, len(y)), shuffle=True, random_state=0)
    errors = [-cross_val_score(Ridge(a), x, y, cv=split, scoring="neg_mean_squared_error").mean() for a in PENALTIES]
    return np.asarray(Ridge(PENALTIES[int(np.argmin(errors))]).fit(x, y).predict(test))


def draw_labelled(
    candidates: Int[np.ndarray, " n"], has: Bool[np.ndarray, " n"], count: int, *key: int | str
) -> Int[np.ndarray, " count"] | None:
    """`count` of the `candidates`, half of them with `has`, or as many as there are; nested for growing counts.

    None where fewer than two have it, or have it not, or there are fewer than `count` in all.
    """
    rng = keys.generator("exam labelled", *key)
    positive, negative = rng.permutation(candidates[has]), rng.permutation(candidates[~has])
    some = min(max(count // 2, count - len(negative)), len(positive))
    if min(some, len(negative)) < 2 or len(candidates) < count:
        return None
    return np.concatenate([positive[:some], negative[: count - some]])


def interleave(parts: Sequence[Float[np.ndarray, "n f"]]) -> Float[np.ndarray, "n g"]:
    """Features of several rows side by side."""
    return np.concatenate(parts, axis=1)
