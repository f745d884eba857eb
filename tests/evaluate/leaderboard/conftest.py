"""Embedding tables of made-up encoders over one made-up cohort: how much each has learnt is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from octjepa.embed.table import TableFacts, write_embeddings

Tables = Callable[..., Path]


@pytest.fixture(autouse=True)
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two strengths of the penalty instead of seven: the choice is the probes' own matter and tested there."""
    monkeypatch.setattr("octjepa.evaluate.linear_knn.C_GRID", (0.1, 10.0))
    monkeypatch.setattr("octjepa.evaluate.linear_knn.K_GRID", (5, 15))


@pytest.fixture
def made(cohort: Callable[..., tuple[pd.DataFrame, pd.DataFrame]], tmp_path: Path) -> tuple[Tables, Path, pd.DataFrame]:
    """table(name, signal, ...) -> an encoder's table; labels.tsv with lesion0, grade, level; the frame behind both."""
    frame, labels = cohort(people=150, prevalence=(0.4,), shares=(0.5, 0.2, 0.3), signal=0.0, dim=8)
    labels["grade"] = labels["lesion0"] + np.arange(len(labels)) % 2  # three classes, of which the lesion knows much
    labels["level"] = labels["lesion0"] + 0.01 * np.arange(len(labels)) + 0.5  # a quantity
    labels.to_csv(tmp_path / "labels.tsv", sep="\t", index=False)
    sick = labels["lesion0"].to_numpy()

    def table(
        name: str,
        signal: float,
        seed: int = 0,
        change: Callable[[pd.DataFrame], pd.DataFrame] = lambda given: given,
        leaked: int = 0,
    ) -> Path:
        rng = np.random.default_rng(100 + seed)
        features = rng.normal(size=(len(frame), 24)).astype(np.float32)
        features[:, 0] += (signal * sick).astype(np.float32)
        changed = change(frame.assign(vector=list(features)))
        return write_embeddings(tmp_path / f"{name}.parquet", changed, TableFacts(8, name, "c" * 64, leaked))

    return table, tmp_path / "labels.tsv", frame
