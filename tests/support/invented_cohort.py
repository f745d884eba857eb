"""A made-up cohort for the probe tests: two eyes a person, features with or without the signal of the labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

DIM = 16


@pytest.fixture(scope="session")
def cohort() -> Callable[..., tuple[pd.DataFrame, pd.DataFrame]]:
    """make(...) -> (embedding frame for write_embeddings, label frame by person and eye).

    `vector` carries `signal` times each lesion in a direction of its own, `untrained` nothing; lesions of a person's
    eyes agree more often than chance.
    """

    def make(
        people: int = 120,
        signal: float = 1.0,
        prevalence: tuple[float, ...] = (0.4,),
        shares: tuple[float, float, float] = (0.6, 0.1, 0.3),
        dim: int = DIM,
        seed: int = 0,
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        rng = np.random.default_rng(seed)
        volumes = 2 * people
        bounds = np.cumsum(np.round(np.array(shares) * people).astype(int))
        splits = np.array(["train", "val", "test"])[np.searchsorted(bounds[:2], np.arange(people), side="right")]
        person = rng.random((people, len(prevalence))).repeat(2, axis=0)
        lesions = (0.5 * person + 0.5 * rng.random((volumes, len(prevalence))) < np.array(prevalence)).astype(int)
        axes = np.linalg.qr(rng.normal(size=(3 * dim, len(prevalence))))[0].T
        features = rng.normal(size=(2, volumes, 3 * dim)).astype(np.float32)
        features[0] += (3 * signal * (lesions - 0.5) @ axes).astype(np.float32)
        frame = pd.DataFrame(
            {
                "person_id": [f"{1000 + index // 2}" for index in range(volumes)],
                "eye": ["OD", "OS"] * people,
                "volume_id": [f"{index:016x}" for index in range(volumes)],
                "content_hash": [f"{index:064x}" for index in range(volumes)],
                "device": rng.choice(["one", "two"], people).repeat(2),
                "split": splits.repeat(2),
                "age": rng.normal(60, 9, people).repeat(2),
                "clinical_site": rng.choice(["UW", "UAB"], people).repeat(2),
                "vector": list(features[0]),
                "untrained": list(features[1]),
                "histogram": list(rng.random((volumes, 8)).astype(np.float32)),
            }
        )
        labels = frame[["person_id", "eye"]].copy()
        for index in range(len(prevalence)):
            labels[f"lesion{index}"] = lesions[:, index]
        return frame, labels

    return make


def as_json(result: Any) -> Any:
    """A result whose attributes are those of its JSON form, which is what the commands write; `result` is itself."""
    return SimpleNamespace(**{**vars(result), **result.payload(), "payload": result.payload, "result": result})


def probe_with(
    tables: list[Any],
    labels: Path,
    targets: list[str],
    tokens: Sequence[Any] = (),
    ledger_folder: Path | None = None,
    **settings: Any,
) -> Any:
    """`run_probes` with the fields of `ProbeSettings` by keyword; see `as_json`."""
    from octjepa.evaluate.probe import ProbeSettings, run_probes

    return as_json(run_probes(tables, labels, targets, ProbeSettings(**settings), tokens, ledger_folder))


def board_with(
    entries: Sequence[str],
    labels: Path,
    targets: list[str],
    store: Any,
    folder: Path,
    ledger_folder: Path | None = None,
    **settings: Any,
) -> Any:
    """`run_board` with the fields of `BoardSettings` by keyword; see `as_json`."""
    from octjepa.evaluate.leaderboard.board import BoardSettings, run_board

    return as_json(run_board(entries, labels, targets, store, folder, BoardSettings(**settings), ledger_folder))


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """save(frame, labels) -> paths of the embedding table and of the label file."""
    from octjepa.embed.table import TableFacts, write_embeddings

    def save(frame: pd.DataFrame, labels: pd.DataFrame, encoder: str = "octjepa") -> tuple[Path, Path]:
        table, tsv = tmp_path / f"{encoder}.parquet", tmp_path / "labels.tsv"
        write_embeddings(table, frame, TableFacts(len(frame["vector"].iloc[0]) // 3, encoder, "c" * 64))
        labels.to_csv(tsv, sep="\t", index=False)
        return table, tsv

    return save
