"""The encoder `phantom-truth` of the package is the stored run of the benchmark of objectives."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.ship_truth import RECORD, TARGET, ship

from octjepa.encoders.export import CARD, WEIGHTS
from octjepa.errors import UsageError


def test_the_package_holds_the_stored_run(tmp_path: Path) -> None:
    ship(0, "How it was made.", tmp_path / "made")
    for name in (WEIGHTS, RECORD):
        assert (tmp_path / "made" / name).read_bytes() == (TARGET / name).read_bytes()
    shared = (tmp_path / "made" / CARD).read_text().removesuffix("How it was made.\n")
    assert (TARGET / CARD).read_text().startswith(shared)


def test_a_seed_that_is_not_stored_is_refused_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--longer truth_longest --seeds 77 --store"):
        ship(77, "", tmp_path / "made")
