"""Everything in small: two people, 32 tokens."""

from __future__ import annotations

import pytest

SMALL = (
    "tiny_cpu_vjepa", "preprocessing.image_size=[8,64,64]", "preprocessing.margin=[0,4,4]",
    "preprocessing.target_spacing_mm=[0.4,0.016,0.1]", "tokens.budget=16", "train.global_batch=2",
)  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octjepa.bench.data.RECIPE", SMALL)
    monkeypatch.setattr("octjepa.bench.data.PEOPLE", 2)
    monkeypatch.setattr("octjepa.bench.memory.VOLUMES", 4)
    monkeypatch.setattr("octjepa.bench.scaling.WARM_UP_UPDATES", 1)
    monkeypatch.setattr("octjepa.bench.scaling.UPDATES", 2)
