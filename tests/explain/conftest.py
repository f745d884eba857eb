"""Fixtures of the tests of maps."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def few_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One eye is enough."""
    monkeypatch.setattr("octjepa.explain.eyes.MAX_EYES", 1)
