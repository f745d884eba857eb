"""Validating a recipe, also a stranger's, imports no torch and no class of an objective."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octjepa.config import load_recipe
from octjepa.errors import RecipeError
from octjepa.objectives.base import Objective, get_objective
from octjepa.recipe.objectives import FACTS, OBJECTIVES, objective_facts

CODE = """
import sys
from octjepa.config import PRETRAINING, load_recipe
from octjepa.errors import RecipeError
from octjepa.recipe.objectives import OBJECTIVES

for name in PRETRAINING.names():
    load_recipe(name).exported_encoder
keys = ["masks.per_target=2", "model.predictor_width=48", "model.predictor_depth=2", "objective.visible_weight=0.5",
        "objective.visible_warmup=0.2", "checkpoint.export=student", "objective.zone_sigreg=0.1"]
tried = 0
for name in OBJECTIVES.names():
    if OBJECTIVES.is_built_in(name):
        for key in keys:
            tried += 1
            try:
                load_recipe("tiny_cpu", [f"objective.name={name}", key]).exported_encoder
            except RecipeError:
                pass
print(tried, [name for name in ("torch", "octjepa.objectives") if name in sys.modules])
"""


def test_no_recipe_and_no_objective_name_imports_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.strip() == f"{7 * len(FACTS)} []"


def test_the_table_holds_every_objective_of_the_package() -> None:
    assert set(FACTS) == {name for name in OBJECTIVES.names() if OBJECTIVES.is_built_in(name)}


@pytest.mark.parametrize("name", FACTS)
def test_classes_have_the_facts_of_the_table(name: str) -> None:
    objective, facts = get_objective(name), objective_facts(name)
    assert objective.predictor == facts.predictor
    assert objective.exported_encoder == facts.exported_encoder
    assert objective.supervises_visible == facts.supervises_visible
    assert objective.supervises_visible == (type(objective).visible_loss is not Objective.visible_loss)


def test_a_key_of_a_section_is_pointed_to() -> None:
    with pytest.raises(RecipeError, match=r"did you mean train\.max_updates"):
        load_recipe("tiny_cpu", ["max_updates=10"])


@pytest.mark.parametrize("value", ["1e20", "1e308", "100000001", "9" * 30, "9" * 50])
def test_lengths_of_a_run_are_bounded(value: str) -> None:
    with pytest.raises(RecipeError):
        load_recipe("tiny_cpu", [f"train.max_updates={value}"])


def test_overrides_are_decimal() -> None:
    assert load_recipe("tiny_cpu", ["train.max_updates=010"]).train.max_updates == 10
    for value in ("0x10", "0b11", "1:30"):
        with pytest.raises(RecipeError):
            load_recipe("tiny_cpu", [f"train.max_updates={value}"])
