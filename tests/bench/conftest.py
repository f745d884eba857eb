"""Everything in small: two people, 32 tokens."""

from __future__ import annotations

import pytest

SMALL = (
    "tiny_cpu_vjepa",
    "preprocessing.image_size=[8,64,64]",
    "preprocessing.margin=[0,4,4]",
    "preprocessing.target_spacing_mm=[0.4,0.016,0.1]",
    "tokens.budget=16",
    "train.global_batch=2",
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.data.RECIPE", SMALL)
    monkeypatch.setattr("benchmarks.peers.data.PEOPLE", 2)
    monkeypatch.setattr("benchmarks.peers.memory.VOLUMES", 4)
    monkeypatch.setattr("benchmarks.peers.scaling.WARM_UP_UPDATES", 1)
    monkeypatch.setattr("benchmarks.peers.scaling.UPDATES", 2)
    monkeypatch.setattr("benchmarks.peers.segment.BSCANS", 3)
    monkeypatch.setattr("benchmarks.peers.segment.SIZE", "small")
