"""Buckets that are given up on soon: these tests wait for time-outs."""

from __future__ import annotations

import pytest


@pytest.fixture
def bucket_seconds() -> float:
    return 0.5
