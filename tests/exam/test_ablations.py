"""The recipes that carry the exam's encoder to a user, and the choices that are compared one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import ablations
from benchmarks.exam.settings import RESULTS
from benchmarks.exam.training import read_plans

from octjepa.config import load_recipe
from octjepa.files import write_json

# what a run keeps, says and saves; the rest is what it learns
_RUNNING = {"name", "monitor", "checkpoint", "tracking", "machine", "validation"}


@pytest.mark.parametrize(
    ("recipe", "encoder"), [("fine_cpu", "mae_long"), ("fine_cpu_noise2noise", "mae_noise2noise_longest")]
)
def test_a_recipe_trains_what_the_exam_has_read(recipe: str, encoder: str) -> None:
    shipped, examined = load_recipe(recipe), read_plans(only=[f"{encoder}:0"])[0].recipe(0)
    ours, theirs = (one.model_dump(exclude=_RUNNING) for one in (shipped, examined))
    for one in (ours, theirs):
        one["data"] = {}  # the exam names notes that no phantom has
        one["train"].pop("precision")
    assert ours == theirs


def test_every_choice_differs_from_its_encoder_and_from_all_others(tmp_path: Path) -> None:
    plans = ablations.plans_by_choice()
    seen = {}
    for choice, plan in plans.items():
        recipe = plan.recipe(0).model_dump(exclude=_RUNNING)
        assert recipe["train"]["precision"] == ("fp32" if choice.endswith("/fp32") else "bf16")
        assert recipe not in seen.values(), choice
        seen[choice] = recipe


def test_the_page_shows_each_choice_beside_its_twin(tmp_path: Path) -> None:
    row = {"seed": 0, "token_ap_30": 0.2, "auroc_30": 0.7, "auroc_100": 0.8}
    twin = {"choice": "untrained 4x8x8", "seed": 0, "token_ap_30": 0.06, "auroc_30": 0.65, "auroc_100": 0.7}
    rows = [
        {**row, "choice": "mae/stem", "about": "a stem", "updates": 777, "twin": "untrained 4x8x8"},
        {**row, "choice": "mae/stem", "about": "a stem", "updates": 777, "twin": "untrained 4x8x8", "seed": 1},
    ]
    ablations.write_page(tmp_path, [*rows, twin])
    page = (tmp_path / "ablations.md").read_text(encoding="utf-8")
    assert "| `stem` | a stem | 0, 1 | 0.200 (+0.140), 0.200 | 0.700 (+0.050), 0.700 |" in page
    assert "mae, 777 updates" in page
    assert "vjepa" not in page.partition("##")[2]  # nothing of it was read


def test_a_row_by_another_pooling_is_read_anew_and_replaced(tmp_path: Path) -> None:
    """One such row stood among the others once, 0.02 above what it compared with."""
    row = {"choice": "mae/stem", "about": "a stem", "updates": 777, "twin": "untrained 4x8x8", "seed": 0}
    ablations._add(tmp_path, {**row, "auroc_30": 0.7})
    assert ablations._has(tmp_path, "mae/stem", 0)
    write_json(tmp_path / "ablations.json", [{**row, "auroc_30": 0.8, "pool": "zones"}])
    assert not ablations._has(tmp_path, "mae/stem", 0)
    ablations._add(tmp_path, {**row, "auroc_30": 0.7})
    assert [one["auroc_30"] for one in ablations._rows(tmp_path)] == [0.7]


def test_all_recorded_rows_are_of_one_pooling() -> None:
    assert {one["pool"] for one in ablations._rows(RESULTS)} == {ablations.POOL}
