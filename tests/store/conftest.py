"""A small cohort, written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight people, two eyes each, four devices; an AI-READI-shaped tree."""
    from octjepa.phantom import write_cohort

    out = tmp_path_factory.mktemp("cohort") / "set"
    write_cohort(out, people=8, seed=11)
    return out
