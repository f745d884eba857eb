"""The table of the study holds together: every arm has its floors, every recipe is one, every run a name of its own."""

from __future__ import annotations

import dataclasses

import pytest
from benchmarks.study import plan
from benchmarks.study.plan import (
    ABLATIONS,
    ARMS,
    LATENT,
    RECIPE,
    SIMPLE,
    SUPERVISED,
    Chosen,
    Settings,
    all_entries,
    main_entries,
)

from octjepa.config import load_recipe
from octjepa.recipe import OBJECTIVES


@pytest.mark.parametrize(
    "chosen", [Chosen(), Chosen("mae", "vjepa", ("masks_runs",)), *(Chosen(arm, arm) for arm in LATENT)]
)
def test_every_run_has_a_name_of_its_own_and_a_recipe_that_is_accepted(chosen: Chosen) -> None:
    entries = all_entries(Settings(), chosen, real=True)
    assert {entry.arm.split(":")[0] for entry in entries if entry.group == "curve"} == {chosen.best} - {None}
    assert {entry.arm.split(":")[0] for entry in entries if entry.group == "ablation"} == {chosen.ablated} - {None}
    assert len({entry.run for entry in entries}) == len(entries)
    assert len({(entry.group, entry.arm, entry.seed) for entry in entries}) == len(entries)
    for entry in entries:
        if entry.kind == "pretrain":
            recipe = load_recipe(RECIPE, [*entry.overrides, f"train.seed={entry.seed}", "train.max_updates=100"])
            assert recipe.objective.name in entry.arm
            assert entry.budget > 0


def test_every_arm_of_the_package_is_a_row_beside_its_floors_with_every_seed_and_one_budget() -> None:
    assert set(ARMS) == set(OBJECTIVES.names())
    entries = main_entries(Settings())
    assert {entry.arm for entry in entries} == {*ARMS, *SIMPLE, SUPERVISED}
    for arm in (*ARMS, "untrained", SUPERVISED):
        assert [entry.seed for entry in entries if entry.arm == arm] == [0, 1, 2]
    assert {entry.budget for entry in entries if entry.arm in (*ARMS, SUPERVISED)} == {1200.0}
    assert Settings().people >= 600


def test_arms_differ_in_their_objective_alone() -> None:
    recipes = {
        entry.arm: load_recipe(RECIPE, entry.overrides).model_dump(exclude={"objective"})
        for entry in main_entries(Settings())
        if entry.arm in ARMS
    }
    assert len({str(recipe) for recipe in recipes.values()}) == 1


def test_each_ablation_changes_the_recipe_and_has_a_reference_at_its_own_budget() -> None:
    base = load_recipe(RECIPE)
    changed = {name: load_recipe(RECIPE, overrides) for name, overrides in ABLATIONS.items()}
    assert changed.pop("reference") == base
    assert all(recipe != base for recipe in changed.values())
    entries = [entry for entry in all_entries(Settings(), Chosen("mae", "vjepa"), False) if entry.group == "ablation"]
    assert {entry.budget for entry in entries} == {Settings().ablation_budget}
    assert 3 * changed["tokens_third"].token_count == pytest.approx(changed["tokens_all"].token_count, abs=3)


def test_fluid_rows_come_for_every_encoder_with_floors_and_need_the_real_eyes() -> None:
    assert not [entry for entry in all_entries(Settings(), Chosen("mae", "vjepa"), False) if entry.group == "real"]
    entries = [entry for entry in all_entries(Settings(), Chosen("mae", "vjepa"), True) if entry.group == "real"]
    assert {entry.arm for entry in entries} == {*ARMS, "untrained", "mae:further_real", *plan.FLUID_FLOORS}
    runs = {entry.run for entry in main_entries(Settings())}
    assert all(entry.of in runs for entry in entries if entry.arm not in plan.FLUID_FLOORS)


def test_whatever_changes_the_result_changes_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(settings: Settings) -> set[str]:
        return {entry.run for entry in main_entries(settings)}

    usual = names(Settings())
    for change in ({"budget": 60.0}, {"people": 700}, {"difficulty": "plain"}, {"overrides": ("masks.ratio=0.5",)}):
        assert names(dataclasses.replace(Settings(), **change)) != usual, change
    monkeypatch.setattr(plan, "RECIPE", "tiny_cpu")
    assert not names(Settings()) & usual
