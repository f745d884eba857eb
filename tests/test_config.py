from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from octjepa.config import PRETRAINING, load_recipe, parse_yaml, science, science_hash, to_yaml
from octjepa.errors import RecipeError
from octjepa.recipe import CheckpointRecipe, MachineRecipe, Preprocessing, Recipe

MINIMAL = """\
name: minimal
tokens:
  budget: 64
train:
  max_updates: 10
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path


def refused(path: Path, *overrides: str) -> str:
    """The message with which this recipe is refused."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def written(folder: Path, text: str) -> Path:
    path = folder / "written.yaml"
    path.write_text(text)
    return path


# Unknown keys


def test_an_unknown_key_is_refused_with_the_nearest_known_one(minimal: Path) -> None:
    assert "train.base_lrr: unknown key; did you mean 'base_lr'?" in refused(minimal, "train.base_lrr=1")


def test_an_unknown_section_is_refused_with_the_nearest_known_one(minimal: Path) -> None:
    assert "trian: unknown key; did you mean 'train'?" in refused(minimal, "trian.seed=1")


@pytest.mark.parametrize("section", [name for name in Recipe.model_fields if name != "name"])
def test_a_key_like_no_other_is_answered_with_the_known_ones(minimal: Path, section: str) -> None:
    message = refused(minimal, f"{section}.qqqq=1")
    first_field = next(iter(Recipe.model_fields[section].annotation.model_fields))
    assert f"{section}.qqqq: unknown key; known here: {first_field}" in message


def test_all_faults_are_reported_at_once(minimal: Path) -> None:
    message = refused(minimal, "train.base_lrr=1", "masks.ratio=2", "model.size=huge")
    assert all(key in message for key in ("train.base_lrr", "masks.ratio", "model.size"))


# Keys that nothing would read


@pytest.mark.parametrize(
    ("overrides", "message_text"),
    [
        (["data.device=topcon_triton"], "data.device is unused by strategy multi_domain"),
        (["tokens.select=all"], "tokens.budget is unused by tokens.select: all"),
        (["objective.name=normalized_mse", "model.predictor_depth=2"], "model.predictor_depth is unused by objective"),
        (["train.epochs=3"], "exactly one of train.max_updates and train.epochs"),
    ],
)
def test_a_key_that_the_rest_makes_unused_is_refused(minimal: Path, overrides: list[str], message_text: str) -> None:
    assert message_text in refused(minimal, *overrides)


@pytest.mark.parametrize(
    ("overrides", "message_text"),
    [
        (["data.strategy=single_domain"], "needs data.device"),
        (["tokens.budget=null"], "needs tokens.budget"),
        (["train.max_updates=null"], "exactly one of train.max_updates and train.epochs"),
    ],
)
def test_a_key_that_the_rest_makes_necessary_is_requested(
    minimal: Path, overrides: list[str], message_text: str
) -> None:
    assert message_text in refused(minimal, *overrides)


# Types and limits


@pytest.mark.parametrize(
    ("override", "message_text"),
    [
        ("train.base_lr=fast", "train.base_lr: Input should be a valid number"),
        ("train.seed=1.5", "train.seed: Input should be a valid integer"),
        ("train.seed=-1", "train.seed: Input should be greater than or equal to 0 (found -1)"),
        ("views.crop=1", "views.crop: Input should be a valid boolean (found 1)"),
        ("model.size=huge", "model.size: Input should be 'test', 'reference', 'small', 'base' or 'large'"),
        (
            "objective.name=jepa",
            "objective.name: unknown objective: one of levjepa, mae, mae_patch_norm, noise2noise, normalized_mse, "
            "vjepa, vjepa_dense, or your own module:Class (found",
        ),
        ("model.width=100", "model.width 100 over model.heads 6: a head needs a whole, even number of features"),
        ("model.heads=5", "model.width 192 over model.heads 5"),
        ("model.depth=257", "model.depth: Input should be less than or equal to 256"),
        ("model.predictor_depth=257", "model.predictor_depth: Input should be less than or equal to 256"),
        ("model.width=1000000", "model.width: Input should be less than or equal to 65536"),
        ("model.rope_base=1", "model.rope_base: Input should be greater than 1"),
        ("model.predictor_width=64", "model.predictor_width 64 over model.predictor_heads 3"),
        ("train.betas=[0.9]", "train.betas.1: missing"),
        ("train.betas=[0.9, 0.95, 0.99]", "train.betas: Tuple should have at most 2 items"),
        ("masks.ratio=.inf", "masks.ratio: Input should be a finite number"),
        ("masks.ratio=.nan", "masks.ratio: Input should be a finite number"),
        ("tokens=5", "tokens: Input should be a valid dictionary"),
        ("train.seed.x=1", "train.seed: Input should be a valid integer"),
        ("name=no/such", "name: String should match pattern"),
        ("preprocessing.margin=[0, -1, 0]", "margin must not be negative"),
        ("preprocessing.image_size=[16, 128, 130]", "image_size 130 is not a multiple of patch_size 16 along W"),
        ("preprocessing.clip_percentiles=[99, 1]", "clip_percentiles must rise"),
        ("tokens.budget=100000", "tokens.budget 100000 is more than the grid's 256 tokens"),
        ("masks.ratio=0.999", "masks leave 0 context"),
        ("objective.ema_final=0.5", "momentum must not fall"),
        ("objective.ema_horizon=0.5", "objective.ema_horizon: Input should be less than or equal to 0.1"),
    ],
)
def test_a_wrong_type_or_value_is_refused_by_key(minimal: Path, override: str, message_text: str) -> None:
    assert message_text in refused(minimal, override)


def test_a_last_learning_rate_is_refused_where_the_rate_is_constant(minimal: Path, tmp_path: Path) -> None:
    message = refused(minimal, "train.schedule=constant", "train.min_lr_ratio=0.5")
    assert "train.min_lr_ratio is unused by the schedule constant" in message
    constant = load_recipe(minimal, ["train.schedule=constant"])
    assert load_recipe(written(tmp_path, to_yaml(constant))) == constant


@pytest.mark.parametrize("override", ["train.seed=true", "train.base_lr=yes", "preprocessing.image_size=[16, on, 128]"])
def test_a_switch_is_not_taken_for_the_number_one(minimal: Path, override: str) -> None:
    assert "are switches" in refused(minimal, override)


# Numbers


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", "1.0e-4", "0.0001", ".1e-3", '"1e-4"', "'1e-4'"])
def test_a_rate_is_a_number_in_every_spelling(tmp_path: Path, minimal: Path, text: str) -> None:
    in_file = load_recipe(written(tmp_path, f"{MINIMAL}  base_lr: {text}\n")).train.base_lr
    in_override = load_recipe(minimal, [f"train.base_lr={text}"]).train.base_lr
    assert (type(in_file), in_file) == (type(in_override), in_override) == (float, 1e-4)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("-2.5E+3", -2500.0), ("1e3", 1000.0), ("12", 12), ("1.5", 1.5), ("e4", "e4"), ("1-4", "1-4")],
)
def test_yaml_reads_floats_as_yaml_1_2_does(text: str, value: Any) -> None:
    read = parse_yaml(text, "test")
    assert (type(read), read) == (type(value), value)


# Folders


@pytest.mark.parametrize("text", ["null", "~", ""])
def test_null_switches_checkpoints_off(tmp_path: Path, minimal: Path, text: str) -> None:
    in_file = load_recipe(written(tmp_path, f"{MINIMAL}checkpoint:\n  dir: {text}\n"))
    assert in_file.checkpoint.dir is None
    assert load_recipe(minimal, [f"checkpoint.dir={text}"]).checkpoint.dir is None


@pytest.mark.parametrize("text", ["None", '"null"', "none", '"~"', '""', '" Null "'])
def test_a_spelled_null_is_no_folder(tmp_path: Path, minimal: Path, text: str) -> None:
    message_text = "write null without quotes to switch it off"
    assert message_text in refused(minimal, f"checkpoint.dir={text}")
    assert message_text in refused(written(tmp_path, f"{MINIMAL}checkpoint:\n  dir: {text}\n"))


def test_checkpoints_are_on_by_default(minimal: Path) -> None:
    assert load_recipe(minimal).checkpoint.dir == "checkpoints"


# Files and overrides


def test_a_key_given_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    message = refused(written(tmp_path, MINIMAL + "  max_updates: 20\n"))
    assert "key 'max_updates' is given twice" in message
    assert "line 6" in message


@pytest.mark.parametrize(
    ("text", "message_text"),
    [
        ("train: [", "is not readable YAML"),
        ("- a\n- b\n", "holds list, expected a mapping"),
        ("", "holds NoneType, expected a mapping"),
        ("1: 2\n", "key 1 is not text"),
        ("? [a, b]\n: 1\n", "is not text"),
        ("name: !!python/object/apply:os.getcwd []\n", "is not readable YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, message_text: str) -> None:
    assert message_text in refused(written(tmp_path, text))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00name")
    assert "cannot be read as a text file" in refused(path)


def test_an_unknown_name_lists_the_shipped_recipes() -> None:
    with pytest.raises(RecipeError, match=r"no recipe 'no_such': give the path of a \.yaml file, or one of "):
        load_recipe("no_such")


def test_later_overrides_win_and_values_are_yaml(minimal: Path) -> None:
    recipe = load_recipe(minimal, ["train.seed=1", "train.seed=2", "preprocessing.margin=[0, 0, 0]", "name=other"])
    assert (recipe.train.seed, recipe.preprocessing.margin, recipe.name) == (2, (0, 0, 0), "other")
    assert load_recipe(minimal).train.seed == 0


@pytest.mark.parametrize("override", ["train.seed", "=1", "train.=1", ".seed=1", "train..seed=1"])
def test_an_override_of_another_form_is_refused(minimal: Path, override: str) -> None:
    assert "is not of the form key=value, such as train.base_lr=1e-4" in refused(minimal, override)


def test_an_override_below_a_value_is_refused(minimal: Path) -> None:
    assert "'budget' is a value, not a section" in refused(minimal, "tokens.budget.x=1")


def test_a_recipe_without_a_name_is_called_like_its_file(tmp_path: Path) -> None:
    path = tmp_path / "my_run.yaml"
    path.write_text(MINIMAL.replace("name: minimal\n", ""))
    assert load_recipe(path).name == "my_run"


def test_a_recipe_cannot_be_changed_in_position(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.train.seed = 5


# Shipped recipes


def test_the_reference_recipes_are_shipped() -> None:
    reference = {"smoke_test", "pretrain_vjepa_single_domain", "pretrain_vjepa_multi_domain"}
    assert reference <= set(PRETRAINING.names())


@pytest.mark.parametrize("name", PRETRAINING.names())
def test_every_shipped_recipe_loads_and_is_called_like_its_file(name: str) -> None:
    assert load_recipe(name).name == name


@pytest.mark.parametrize("name", PRETRAINING.names())
def test_a_resolved_recipe_reads_back_equal(tmp_path: Path, name: str) -> None:
    recipe = load_recipe(name)
    again = load_recipe(written(tmp_path, to_yaml(recipe)))
    assert again == recipe
    assert science_hash(again) == science_hash(recipe)


def test_extreme_values_read_back_equal(minimal: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        minimal, ["train.base_lr=1.2345678901234567e-9", "checkpoint.dir=null", "train.clip_norm=null"]
    )
    assert load_recipe(written(tmp_path, to_yaml(recipe))) == recipe


# The hash that names a run


def test_the_hash_is_the_same_on_every_machine(minimal: Path) -> None:
    # Golden: computed once. A change means that every earlier run and store gets another name.
    assert science_hash(Preprocessing())[:16] == "b845f74e755bb31d"
    assert science_hash(load_recipe(minimal)) == science_hash(load_recipe(minimal))


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "machine.devices=8",
        "machine.micro_batch=1",
        "machine.loader_workers=4",
        "checkpoint.dir=null",
        "checkpoint.every_updates=5",
        "checkpoint.keep_last=9",
        "data.expected_volumes=100",
    ],
)
def test_moving_a_run_to_another_machine_keeps_its_hash(minimal: Path, override: str) -> None:
    assert science_hash(load_recipe(minimal, [override])) == science_hash(load_recipe(minimal))


@pytest.mark.parametrize("section", [CheckpointRecipe, MachineRecipe])
def test_where_and_how_fast_is_never_science(section: type[CheckpointRecipe] | type[MachineRecipe]) -> None:
    for name, field in section.model_fields.items():
        if name != "export":  # which of its encoders a checkpoint is loaded as decides every figure read from it
            assert field.json_schema_extra == {"machine": True}, name


@pytest.mark.parametrize(
    "override",
    [
        "data.max_samples=8",
        "preprocessing.flatten=none",
        "tokens.budget=32",
        "masks.ratio=0.5",
        "views.gain=0.1",
        "checkpoint.export=student",
        "model.size=small",
        "model.width=384",
        "model.depth=3",
        "objective.name=normalized_mse",
        "objective.ema_base=0.99",
        "train.global_batch=4",
        "train.base_lr=2e-4",
        "train.precision=fp32",
        "train.seed=1",
    ],
)
def test_what_changes_the_result_changes_the_hash(minimal: Path, override: str) -> None:
    assert science_hash(load_recipe(minimal, [override])) != science_hash(load_recipe(minimal))


def test_a_key_of_a_later_version_is_part_of_the_hash_where_it_changes_something(minimal: Path) -> None:
    plain, halves = load_recipe(minimal), load_recipe(minimal, ["views.halves=true"])
    assert "halves" not in science(plain)["views"]
    assert science(halves)["views"]["halves"] is True
    assert science_hash(plain) != science_hash(halves)


def test_an_integer_and_its_float_are_the_same_science(minimal: Path) -> None:
    assert science_hash(load_recipe(minimal, ["views.gain=1"])) == science_hash(
        load_recipe(minimal, ["views.gain=1.0"])
    )


# What follows from a recipe


def test_token_and_mask_counts_of_the_minimal_recipe(minimal: Path) -> None:
    recipe = load_recipe(minimal, ["masks.target_share=0.5"])
    assert recipe.grid == (4, 8, 8)
    assert recipe.token_count == 64
    assert recipe.mask_counts == (26, 19)  # 0.6 x 64 = 38.4 hidden, half of 38 predicted
    assert recipe.preprocessing.stored_size == (16, 144, 144)
    everything = load_recipe(minimal, ["tokens.select=all", "tokens.budget=null"])
    assert everything.token_count == everything.grid_tokens == 256


def test_plain_data_is_refused_under_the_name_it_came_by() -> None:
    with pytest.raises(RecipeError, match=re.escape("recipe a checkpoint's recipe is refused")):
        PRETRAINING.read({"name": "x"}, "a checkpoint's recipe")
