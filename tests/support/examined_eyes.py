"""Invented cohorts for tests of the exam: the table that the evaluation protocol reads, AUROC of invented scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from octjepa.evaluate.measurements import estimate_metric
from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.scores import Predictions


def eye_table(ids: Sequence[str], people: Sequence[str], splits: Sequence[str]) -> pd.DataFrame:
    """A row for each volume, one eye a person."""
    return pd.DataFrame(
        {
            "volume_id": list(ids),
            "content_hash": [f"hash-{name}" for name in ids],
            "person_id": list(people),
            "eye": "OD",
            "device": "",
            "clinical_site": "",
            "split": list(splits),
            "visit": "",
            "quality": 0.9,
            "age": 60.0,
            "sop_instance_uid": [f"1.2.{name}" for name in ids],
        }
    )


def auroc_of(truth: np.ndarray, scores: np.ndarray, draws: Draws, people: Sequence[str]) -> Estimate:
    """AUROC of log-odds, with its resamples."""
    both = np.stack([-scores, scores], axis=1)
    return estimate_metric("auroc", Predictions(truth.astype(int), both, both), draws, list(people), "lesion")
