"""Synthetic eyes whose answers are known, and a place for a bench's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.study.cohort import Eyes
from benchmarks.study.frozen import Bench


class Said(dict[str, tuple[float, float | None, float | None, int]]):
    """Where a bench's figures go."""

    def __call__(self, metric: str, value: float, low: float | None, high: float | None, n: int) -> None:
        self[metric] = (value, low, high, n)


def invented(people: int = 120, **changes: Any) -> Eyes:
    """Two eyes each, four devices, lesions by chance, the fovea anywhere; no store behind them."""
    rng = np.random.default_rng(0)
    number = np.repeat(np.arange(people), 2)
    # Blocks of ten people, four devices in turn: 6 train, 1 val, 3 test.
    split = np.array(["train"] * 6 + ["val"] + ["test"] * 3)[(number // 4) % 10]
    given: dict[str, Any] = {
        "store": None, "truth": Path(), "ids": [f"v{i}" for i in range(2 * people)],
        "people": np.array([f"p{i:03d}" for i in number]),
        "devices": np.array(["a", "b", "c", "d"])[number % 4], "splits": split,
        "labels": rng.random((2 * people, 5)) < 0.3, "fovea_mm": rng.normal(0, 0.3, (2 * people, 2)),
    }  # fmt: skip
    return Eyes(**{**given, **changes})


def bench(eyes: Eyes, said: Said) -> Bench:
    """With few resamples."""
    return Bench(eyes, said, 100)
