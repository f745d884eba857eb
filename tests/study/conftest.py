"""A tiny cohort of the study, made once, and a place for figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.study.cohort import make_cohort
from benchmarks.study.plan import RECIPE

from invented_eyes import Said

COHORT = {"people": 8, "seed": 1, "difficulty": "plain"}


@pytest.fixture(scope="session")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight people, four vendors, in a store."""
    return make_cohort(tmp_path_factory.mktemp("study"), COHORT, RECIPE)


@pytest.fixture
def said() -> Said:
    return Said()
