"""The inputs of a probe: a standardised feature space or covariates, how its setting is selected, and its registry.

Features are standardised by the training volumes and scaled so that a training volume has length one on average: one
grid of settings then serves 192 and 1,728 features alike. The setting is selected by loss on the validation split, or,
if that holds too few people, by person-grouped cross-validation inside the training split. Every feature set, the
untrained encoder's included, goes through exactly this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from octjepa.embed.token_folder import TokenFolder
from octjepa.evaluate.calibration import ProbeFit, calibration_shares, class_shares
from octjepa.evaluate.survival import TASK as SURVIVAL
from octjepa.evaluate.targets import Target
from octjepa.metrics.scores import Predictions
from octjepa.registry import Registry

MAX_NEIGHBOURS = 49
FOLDS = 5
# A validation split with fewer people (of each class) selects worse than cross-validation over the training people.
MIN_VAL_PEOPLE = 20
_ROUNDING = 1e-6  # relative
COVARIATES = ("age", "clinical_site", "device")


@dataclass(frozen=True)
class Selection:
    """How a target's setting is selected: by "val", by "cv" over `folds` (a fold per training volume), or "fixed"."""

    by: str
    folds: Int[np.ndarray, " train"]


@dataclass
class FeatureSpace:
    """One feature set over one set of labelled volumes, ready for any number of targets.

    Coordinates are those of the training volumes' principal axes: with an L2 penalty the solution is in their span,
    so this rotation changes no prediction, and 1,728 features of 400 volumes become at most 399.
    """

    train: Float[np.ndarray, "train axes"]
    val: Float[np.ndarray, "val axes"]
    test: Float[np.ndarray, "test axes"]
    orders: dict[str, Int[np.ndarray, "queries neighbours"]] = field(default_factory=dict)

    def neighbours(self, queries: str, folds: Int[np.ndarray, " train"] | None = None) -> Int[np.ndarray, "q k"]:
        """Training volumes by falling cosine similarity to each volume of split `queries`; with `folds`, those of the
        query's own fold left out."""
        key = queries if folds is None else queries + folds.tobytes().hex()
        if key not in self.orders:
            similarity = _unit_length(getattr(self, queries)) @ _unit_length(self.train).T
            if folds is not None:
                similarity[folds[:, None] == folds] = -np.inf
            self.orders[key] = np.argsort(-similarity, axis=1, kind="stable")[:, :MAX_NEIGHBOURS]
        return self.orders[key]


class FeatureProbe(Protocol):
    """A probe on pooled features: fitted on train, its setting selected, test volumes predicted."""

    def __call__(
        self, space: FeatureSpace, target: Target, selection: Selection, smoothing: float = ..., seed: int = ...
    ) -> ProbeFit: ...


class TokenProbe(Protocol):
    """A probe on the tokens of each volume, for all targets in one pass; `train` are positions in `volume_ids`."""

    def __call__(
        self,
        tokens: TokenFolder,
        view: str,
        volume_ids: Sequence[str],
        train: Int[np.ndarray, " n"],
        targets: Sequence[Target],
        selections: Sequence[Selection],
        smoothing: float = ...,
        seed: int = ...,
    ) -> list[ProbeFit]: ...


PROBES = Registry[FeatureProbe](
    "probe",
    "octjepa.probes",
    {
        "linear": "octjepa.evaluate.linear_knn",
        "knn": "octjepa.evaluate.linear_knn",
        "mlp": "octjepa.evaluate.probe_training",
    },
)
TOKEN_PROBES = Registry[TokenProbe](
    "token probe", "octjepa.token_probes", {"attentive": "octjepa.evaluate.probe_training"}
)


def _unit_length(vectors: Float[np.ndarray, "n axes"]) -> Float[np.ndarray, "n axes"]:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)


def feature_space(features: Float[np.ndarray, "volumes features"], target: Target) -> FeatureSpace:
    """Standardises by the training volumes of `target`, scales, and rotates to their principal axes."""
    train = features[target.indices["train"]]
    mean, std = train.mean(axis=0), train.std(axis=0)
    # A constant feature carries nothing. Its spread is rounding in fp32, which scaling would turn into unit noise.
    varied = std > _ROUNDING * np.maximum(np.abs(mean), 1e-12)
    if not varied.any():
        blank = {split: np.zeros((len(positions), 1)) for split, positions in target.indices.items()}
        return FeatureSpace(blank["train"], blank["val"], blank["test"])
    scale = std[varied] * np.sqrt(varied.sum())
    parts = {split: (features[at][:, varied] - mean[varied]) / scale for split, at in target.indices.items()}
    train = parts["train"]
    if len(train) <= train.shape[1]:
        power, axes = np.linalg.eigh(train @ train.T)
        large = power > 1e-10 * power[-1]
        rotation = train.T @ (axes[:, large] / np.sqrt(power[large]))  # [features, axes]
        parts = {split: part @ rotation for split, part in parts.items()}
    return FeatureSpace(parts["train"], parts["val"], parts["test"])


def plan_selection(target: Target, person_ids: np.ndarray, seed: int) -> Selection:
    """Validation split if it holds enough people, else person-grouped folds over the training volumes.

    Enough are `MIN_VAL_PEOPLE` of each class, or with the event. Fixed to the middle of the grid where even two folds
    cannot hold every class.
    """
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

    people, truth = person_ids[target.indices["train"]], target.values["train"]
    val_people, val_truth = person_ids[target.indices["val"]], target.values["val"]
    none = np.zeros(len(people), dtype=np.int64)
    codes = range(len(target.classes))
    of_val = [val_people[val_truth == code] for code in codes] if target.classes else [val_people]
    if target.task == SURVIVAL:
        of_val = [val_people[val_truth > 0]]
    of_train = [people[truth == code] for code in codes] if target.classes else [people]
    if min(len(set(group)) for group in of_val) >= MIN_VAL_PEOPLE:
        return Selection("val", none)
    count = min(FOLDS, *(len(set(group)) for group in of_train))
    if count < 2:
        return Selection("fixed", none)
    stratified = StratifiedGroupKFold(n_splits=count, shuffle=True, random_state=seed)
    splitter = stratified if target.classes else GroupKFold(n_splits=count)
    folds = none.copy()
    for number, (_, held_out) in enumerate(splitter.split(np.zeros((len(people), 1)), truth, people)):
        folds[held_out] = number
    if target.classes and any(len(set(truth[folds != number])) < len(codes) for number in range(count)):
        return Selection("fixed", none)
    return Selection("cv", folds)


def majority_predictions(target: Target) -> Predictions:
    """The same for every test volume: the training shares of the classes, or the training mean."""
    mean = [target.values["train"].mean()]
    decision, calibrated = (class_shares(target), calibration_shares(target)) if target.classes else (mean, mean)
    tested = len(target.values["test"]), 1
    return Predictions(target.values["test"], np.tile(decision, tested), np.tile(calibrated, tested))


def covariate_features(frame: pd.DataFrame, target: Target) -> tuple[Float[np.ndarray, "volumes features"], list[str]]:
    """Age (unknown: the training median, and a flag), site and device one-hot over the training values ("" is one).

    These are the shortcuts that an image model has to beat. A site or device outside training is zero in every column;
    a covariate that is itself the target is left out. Returns the features, and notes on covariates that were left out
    or never vary.
    """
    train = target.indices["train"]
    columns: list[np.ndarray] = []
    notes: list[str] = []
    for name in COVARIATES:
        if name == target.name:
            notes.append(f"{target.name}: it is the target, so the covariate row does not use it")
            continue
        if name == "age":
            age = frame["age"].to_numpy(dtype=np.float64)
            unknown = np.isnan(age)
            known_ages = age[train][~unknown[train]]
            encoded = [np.where(unknown, np.median(known_ages) if len(known_ages) else 0.0, age), unknown.astype(float)]
        else:
            texts = frame[name].to_numpy(dtype=str)
            encoded = [(texts == value).astype(float) for value in np.unique(texts[train])]
        if all(np.ptp(column[train]) == 0 for column in encoded):
            notes.append(f"{target.name}: {name} is constant or unknown in training; the covariate baseline ignores it")
        columns += encoded
    return np.stack(columns, axis=1), notes
