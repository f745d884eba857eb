"""`plan` with a store of another grid: the cost is predicted, and what to do before training is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from command_line import call
from octjepa import store
from octjepa.errors import ContractError
from octjepa.train import data


@pytest.fixture
def other_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ContractError("the store differs: image_size 16, the recipe wants 32")

    table = pd.DataFrame({"split": ["train"] * 30 + ["val"] * 5})
    monkeypatch.setattr(store.Store, "open", lambda location: SimpleNamespace(table=table))
    monkeypatch.setattr(data, "choose_cohort", refuse)


@pytest.mark.slow
@pytest.mark.usefixtures("other_grid", "without_memory")
def test_a_store_of_another_grid_is_planned_and_named() -> None:
    planned = call("plan", "tiny_cpu", "--store", "store")
    assert planned.code == 0
    assert "the store differs: image_size 16" in planned.err
    assert "ingest into a new store with --recipe tiny_cpu" in planned.out
    assert call("plan", "tiny_cpu", "--store", "store", "--json").json["volumes"] == 30


@pytest.mark.usefixtures("other_grid")
def test_nothing_is_timed_on_a_store_of_another_grid() -> None:
    measured = call("plan", "tiny_cpu", "--store", "store", "--measure")
    assert measured.code == 2
    assert "the store differs" in measured.err
