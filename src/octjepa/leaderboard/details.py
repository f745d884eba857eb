"""What stands behind an encoder's figure: its threshold, calibration, usefulness, fairness, and other vendors' eyes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from octjepa.leaderboard.choose import read
from octjepa.leaderboard.measure import Training
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.scores import PRIMARY_METRIC, Predictions
from octjepa.metrics.thresholds import decision_curve, reliability_curve, threshold_at_specificity, threshold_scores
from octjepa.probe.features import plan_selection
from octjepa.probe.subgroups import leave_one_group_out, subgroup_scores, transfer_thresholds
from octjepa.probe.targets import Target

GROUPS = ("device", "clinical_site", "eye")
SPECIFICITY = 0.9


def details_of(one: Training, target: Target, frame: pd.DataFrame, draws: Draws, seed: int) -> dict[str, Any]:
    """Plain data for one training and target; parts that its task or its people do not allow are empty or say why."""
    test = target.indices["test"]
    people = frame["person_id"].to_numpy(dtype=str)[test].tolist()
    found: dict[str, Any] = {"name": one.name, "seed": one.seed, "target": target.name}
    found |= {"reliability": [], "decision_curve": [], "threshold": None, "between_sites": []}
    metric = PRIMARY_METRIC[target.task]
    found["by_group"] = {
        group: _groups(metric, one, target, frame[group].to_numpy(dtype=str)[test], draws, people) for group in GROUPS
    }
    found["left_out"] = _vendor_left_out(metric, one, target, frame, draws, seed)
    if not target.classes:
        return found
    found["reliability"] = [asdict(point) for point in reliability_curve(one.said.test, draws, people)]
    if target.task == "binary":
        positive, calibrated = target.values["test"] == 1, one.said.test.calibrated[:, 1]
        found["decision_curve"] = decision_curve(positive, calibrated, draws, people)
        found |= _thresholds(one, target, frame, draws, people)
    return found


def _groups(
    metric: str, one: Training, target: Target, groups: np.ndarray, draws: Draws, people: list[str]
) -> dict[str, Any]:
    found = subgroup_scores(metric, one.said.test, groups, draws, people, target.label_hash)
    return {
        "metric": metric,
        "groups": {name: estimate.as_dict() for name, estimate in found.groups.items()},
        "equity_scaled": None if found.scaled is None else found.scaled.as_dict(),
        "left_out": found.left_out,
    }


def _vendor_left_out(
    metric: str, one: Training, target: Target, frame: pd.DataFrame, draws: Draws, seed: int
) -> dict[str, Any]:
    devices, people = frame["device"].to_numpy(dtype=str), frame["person_id"].to_numpy(dtype=str)
    if len(np.unique(devices[target.indices["test"]])) < 2:
        return {"rows": [], "mean_drop": None, "left_out": {}}

    def fit(held: Target) -> Predictions:
        return read(one.option, held, plan_selection(held, people, seed)).test

    found = leave_one_group_out(metric, target, devices, people, one.said.test, fit, draws)
    return asdict(found)


def _thresholds(one: Training, target: Target, frame: pd.DataFrame, draws: Draws, people: list[str]) -> dict[str, Any]:
    """The threshold of 0.9 specificity on validation, on test: of all sites together, and from site to site."""
    healthy = target.values["val"] == 0
    if not healthy.any():
        return {"threshold": None, "between_sites": []}
    val, test = one.said.val.scores[:, 1], one.said.test.scores[:, 1]
    threshold = threshold_at_specificity(~healthy, val, SPECIFICITY)
    used = threshold_scores(threshold, target.values["test"] == 1, test, draws, people, target.label_hash)
    sites, everybody = (frame[name].to_numpy(dtype=str) for name in ("clinical_site", "person_id"))
    return {
        "threshold": {
            "chosen_for_specificity": SPECIFICITY,
            "threshold": threshold,
            "sensitivity": used.sensitivity.as_dict(),
            "specificity": used.specificity.as_dict(),
        },
        "between_sites": transfer_thresholds(target, sites, everybody, val, test, draws, SPECIFICITY),
    }
