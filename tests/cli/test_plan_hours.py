"""`octjepa plan --store` says how long a run takes, unless that cannot be measured in seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from command_line import call
from octjepa import store
from octjepa.canonical import grid_coverage
from octjepa.cli.training import rough_duration
from octjepa.config import load_recipe
from octjepa.errors import UsageError
from octjepa.train import data
from octjepa.train import plan as plan_module

PARTS = plan_module.TimedParts("cpu", 1, 16, 0.1, 0.3, 0.05, 3)


pytestmark = pytest.mark.usefixtures("without_memory")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """A store of 30 training and 5 validation volumes; the list grows by the seconds of each measurement."""
    names = [str(number) for number in range(35)]
    table = pd.DataFrame({"split": ["train"] * 30 + ["val"] * 5, "person_id": names})
    opened = SimpleNamespace(table=table, preprocessing=None)
    cohort = SimpleNamespace(
        train=SimpleNamespace(volume_ids=names[:30]),
        val=SimpleNamespace(volume_ids=names[30:]),
        print_flow=lambda: None,
        about=dict,
    )
    monkeypatch.setattr(store.Store, "open", lambda location: opened)
    monkeypatch.setattr(data, "choose_cohort", lambda *arguments: (cohort, object()))
    monkeypatch.setattr(grid_coverage, "cohort_coverage", lambda *arguments: None)
    monkeypatch.setattr(plan_module, "is_quick_to_time", lambda *arguments: True)
    calls: list[float | None] = []

    def time_run(recipe: Any, stream: Any, updates: int, seconds: float | None = None) -> plan_module.Timing:
        calls.append(seconds)
        return plan_module.Timing(0.45, 0.15, PARTS)

    monkeypatch.setattr(plan_module, "time_run", time_run)
    return calls


def test_a_small_recipe_is_timed_for_a_few_seconds(timed: list[float | None]) -> None:
    planned = call("plan", "tiny_cpu", "--store", "store")
    assert planned.code == 0, planned.err
    assert planned.out.splitlines()[-1].split(None, 1) == ["verdict", "takes about 9 minutes on this machine"]
    assert timed == [plan_module.FEW_SECONDS]


def test_nothing_is_timed_unasked_in_json_or_if_that_takes_long(
    timed: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "hours" not in call("plan", "tiny_cpu", "--store", "store", "--json").json
    assert "leave out --no-measure" in call("plan", "tiny_cpu", "--store", "store", "--no-measure").out
    monkeypatch.setattr(plan_module, "is_quick_to_time", lambda *arguments: False)
    assert "--measure does it" in call("plan", "tiny_cpu", "--store", "store").out
    assert not timed
    assert call("plan", "tiny_cpu", "--store", "store", "--measure", "--json").json["hours"] == 0.15
    assert timed == [None]


def test_a_plan_holds_if_no_volume_can_be_read(timed: list[float | None], monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*arguments: Any) -> None:
        raise UsageError("the first volume is torn")

    monkeypatch.setattr(plan_module, "time_run", torn)
    planned = call("plan", "tiny_cpu", "--store", "store")
    assert planned.code == 0
    assert "no hours: the first volume is torn" in planned.out
    assert not timed


def test_small_recipes_are_quick_to_time_and_large_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "measured_rates", lambda device: (900.0, 140.0))
    monkeypatch.setattr(plan_module, "free_memory_bytes", lambda: 10**10)
    device = torch.device("cpu")
    tiny, large = (plan_module.plan(load_recipe(name, ["train.precision=bf16"])) for name in ("tiny_cpu", "one_gpu"))
    assert plan_module.is_quick_to_time(tiny, device)
    assert not plan_module.is_quick_to_time(large, device)
    assert not plan_module.is_quick_to_time(tiny, torch.device("meta"))
    monkeypatch.setattr(plan_module, "free_memory_bytes", lambda: tiny.peak_memory_bytes)
    assert not plan_module.is_quick_to_time(tiny, device)


@pytest.mark.parametrize(
    ("hours", "text"),
    [(0.001, "about 1 minute"), (0.15, "about 9 minutes"), (2.13, "about 2.1 hours"), (300, "about 12 days")],
)
def test_a_duration_has_a_unit_that_suits_it(hours: float, text: str) -> None:
    assert rough_duration(hours) == text
