"""`train.precision=auto`: what is chosen, where it is recorded, and that a resume elsewhere keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octjepa.config import load_recipe
from octjepa.distributed import precision
from octjepa.distributed.precision import agree_on_precision
from octjepa.distributed.runtime import Runtime
from octjepa.errors import WrongCheckpointError
from octjepa.machine import Processor
from octjepa.recipe import Recipe
from octjepa.train import plan as planning
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe

RATES = {True: "amx_bf16: 400 GFLOP/s in bf16, 100 in fp32", False: "50 GFLOP/s in bf16, 100 in fp32"}


def recipe_of(name: str = "auto") -> Recipe:
    return small_recipe(
        train={"max_updates": 2, "global_batch": 2, "base_lr": 1e-3, "precision": name},
        checkpoint={"every_updates": 2},
        monitor={"every_updates": None},
        validation={"max_samples": 2},
    )


pytestmark = pytest.mark.cpu  # what torch reports of a CPU is replaced


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """`machine(True)`: from now on this CPU is faster in bf16; `machine(False)`: it is not."""

    def become(has_bf16: bool) -> None:
        found = Processor("x86_64", frozenset(["amx_bf16"] if has_bf16 else []))
        monkeypatch.setattr(precision, "processor", lambda: found)
        monkeypatch.setattr(precision, "measured_rates", lambda device: (400.0 if has_bf16 else 50.0, 100.0))

    return become


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp32")])
@pytest.mark.slow
def test_a_run_records_what_was_chosen_and_keeps_it_elsewhere(
    tmp_path: Path,
    machine: Any,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    has_bf16: bool,
    expected: str,
) -> None:
    store, out = MemoryStore(small_recipe().preprocessing, 4), tmp_path / "run"
    machine(has_bf16)
    pretrain(recipe_of(), store, out)
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("on cpu: "))
    assert line.startswith(f"on cpu: precision {expected} (")
    assert RATES[has_bf16] in line
    assert load_recipe(out / "recipe.yaml").train.precision == expected
    assert json.loads((out / "run.json").read_text())["devices"]["precision"] == expected
    machine(not has_bf16)
    caplog.clear()
    assert pretrain(recipe_of(), store, out, resume=True).updates == 2
    assert ("are slower than in fp32" in caplog.text) == has_bf16
    other = "fp32" if has_bf16 else "bf16"
    with pytest.raises(WrongCheckpointError, match=r"train\.precision"):
        pretrain(recipe_of(other), store, out, resume=True)


def test_bf16_that_is_slower_is_computed_with_a_warning(machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    machine(False)
    runtime = Runtime("fp32")
    assert agree_on_precision("bf16", lambda: None, runtime) == "bf16"
    assert runtime.precision == "bf16"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "slower than in fp32" in record.message


@pytest.mark.parametrize("recorded", ["fp32", "bf16"])
def test_a_run_that_resumes_says_why_it_keeps_its_precision(machine: Any, recorded: str) -> None:
    machine(recorded == "fp32")
    runtime = Runtime("fp32")
    assert agree_on_precision("auto", lambda: recorded, runtime) == recorded
    assert runtime.describe()["precision_reason"] == "in which this run began"


def test_rank_zero_decides_for_all(machine: Any) -> None:
    class Second(Runtime):
        """Rank 1, whose device has no bf16, next to a rank 0 that chose it."""

        def run_on_rank_zero(self, function: Callable[[], Any]) -> Any:
            return "bf16", "chosen by rank 0"

    machine(False)
    runtime = Second("fp32")
    assert agree_on_precision("auto", lambda: None, runtime) == "bf16"
    assert runtime.precision == "bf16"


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp32")])
def test_plan_names_it_and_counts_its_memory(
    monkeypatch: pytest.MonkeyPatch, machine: Any, has_bf16: bool, expected: str
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(planning, "peak_bytes", lambda recipe, *_: counted.append(recipe.train.precision))
    machine(has_bf16)
    planned = planning.plan(recipe_of())
    assert planned.precision == expected
    assert RATES[has_bf16] in planned.precision_reason
    assert counted == [expected]
