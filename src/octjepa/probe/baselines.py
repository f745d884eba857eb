"""The rows that stand beside every probe, so that no figure is read alone.

majority: the training class shares (or the training mean) for everyone. covariates: age, clinical site and device, the
shortcut that any image model must beat, through the same linear probe. histogram and untrained are feature views of the
embedding table and go through the probes like the encoder's own.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float

from octjepa.metrics.scores import Predictions
from octjepa.probe.calibration import shares
from octjepa.probe.labels import Target

COVARIATES = ("age", "clinical_site", "device")


def majority(target: Target) -> Predictions:
    """Says the same of every test volume: the training shares of the classes, or the training mean."""
    volumes = len(target.values["test"])
    constant = shares(target) if target.classes else np.array([target.values["train"].mean()])
    scores = np.tile(constant, (volumes, 1))
    return Predictions(target.values["test"], scores, scores)


def covariate_features(frame: pd.DataFrame, target: Target) -> tuple[Float[np.ndarray, "volumes features"], list[str]]:
    """Age (unknown: the training median, and a flag), site and device one-hot over the training values ("" is one).

    A site or device that training never saw is zero in every column. A covariate that is itself the target is left out.
    Returns the features and notes on what was left out or never varied.
    """
    train = target.rows["train"]
    columns: list[np.ndarray] = []
    notes: list[str] = []
    for name in COVARIATES:
        if name == target.name:
            notes.append(f"{target.name}: it is the target, so the covariate row does not use it")
            continue
        if name == "age":
            age = frame["age"].to_numpy(dtype=np.float64)
            unknown = np.isnan(age)
            known = age[train][~unknown[train]]
            found = [np.where(unknown, np.median(known) if len(known) else 0.0, age), unknown.astype(float)]
        else:
            texts = frame[name].to_numpy(dtype=str)
            found = [(texts == value).astype(float) for value in np.unique(texts[train])]
        if all(np.ptp(column[train]) == 0 for column in found):
            notes.append(f"{target.name}: {name} does not vary in training; the covariate row learns nothing from it")
        columns += found
    return np.stack(columns, axis=1), notes
