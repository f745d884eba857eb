"""Encoders that start from V-JEPA 2's weights or from ours, and weights that do not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octjepa.checkpoint import warm_start as warm_start_module
from octjepa.checkpoint.warm_start import start_weights, warm_start
from octjepa.cohort.recorded_scans import uid_key
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.export import export_encoder
from octjepa.errors import CheckpointError, OctjepaError, RecipeError, UsageError
from octjepa.model import VJEPA3D
from octjepa.model.encoder import Encoder
from octjepa.model.vjepa2 import from_vjepa2, to_vjepa2, vjepa2_config
from octjepa.recipe import Recipe
from octjepa.train import loop
from octjepa.train.loop import pretrain
from octjepa.train.optimizer import update_target
from synthetic import TEST_SIZE, MemoryStore, small_recipe

PATCH = (4, 16, 16)


def vjepa2_folder(folder: Path, colours: int = 3, tubelet: int = 2, shards: bool = False) -> dict[str, torch.Tensor]:
    """Random weights of the shape of a released V-JEPA 2 encoder (RGB, tubelet 2), at our test size."""
    torch.manual_seed(5)
    encoder = Encoder(tubelet * 256, 192, 6, 6, "rope_tiled")
    weights = to_vjepa2(encoder, (tubelet, 16, 16))
    name = "encoder.embeddings.patch_embeddings.proj.weight"
    weights[name] = torch.randn(192, colours, tubelet, 16, 16)
    weights["predictor.layer.0.norm1.weight"] = torch.ones(4)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(vjepa2_config(encoder, (tubelet, 16, 16), (8, 16, 16))))
    if not shards:
        save_file(weights, folder / "model.safetensors")
        return weights
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({key: weights[key] for key in held}, folder / file)
    index = {"weight_map": {key: file for file, held in parts.items() for key in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


@pytest.mark.parametrize("shards", [False, True])
def test_both_encoders_start_from_the_video_weights(shards: bool, tmp_path: Path) -> None:
    weights = vjepa2_folder(tmp_path / "hf", shards=shards)
    recipe = small_recipe(model={**TEST_SIZE, "warm_start": str(tmp_path / "hf"), "positions": "rope_tiled"})
    model = VJEPA3D.from_recipe(recipe)
    warm_start(model, recipe)
    expected = from_vjepa2(weights, PATCH)
    for encoder in (model.context_encoder, model.target_encoder):
        assert all(torch.equal(encoder.state_dict()[name], value) for name, value in expected.items())
    intensity = weights["encoder.embeddings.patch_embeddings.proj.weight"].sum(1)  # [192, 2, 16, 16]
    kernel = model.context_encoder.embed.weight.view(192, 4, 16, 16)
    assert torch.allclose(kernel[:, 0], intensity[:, 0] / 2)
    assert torch.allclose(kernel[:, 3], intensity[:, 1] / 2)


def test_a_run_that_starts_from_our_export_for_transformers_knows_its_training_volumes(tmp_path: Path) -> None:
    recipe = small_recipe(model={**TEST_SIZE, "positions": "rope_tiled"})
    encoder = PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, "mine", {"a", uid_key("1.2")})
    export_encoder(encoder, "hf", tmp_path / "hf")
    second = small_recipe(model={**TEST_SIZE, "positions": "rope_tiled", "warm_start": str(tmp_path / "hf")})
    assert warm_start(VJEPA3D.from_recipe(second), second) == {"a", uid_key("1.2")}


@pytest.mark.slow
def test_a_run_trains_on_from_one_of_ours(tmp_path: Path) -> None:
    first = small_recipe(train={"max_updates": 2, "global_batch": 4})
    store = MemoryStore(first.preprocessing)
    pretrain(first, store, tmp_path / "first")
    second = small_recipe(
        model={"warm_start": str(tmp_path / "first")},
        train={"max_updates": 1, "global_batch": 4, "base_lr": 1e-9},
    )
    pretrain(second, store, tmp_path / "second")
    old, new = (load_encoder(tmp_path / name).encoder.state_dict() for name in ("first", "second"))
    assert all(torch.allclose(old[name], new[name], atol=1e-6) for name in old)


@pytest.mark.slow
def test_volumes_that_the_first_weights_were_trained_on_count_as_seen_also_after_a_resume(tmp_path: Path) -> None:
    """Otherwise the eyes that a warm start or a teacher has learned from would pass the leak check."""
    first = small_recipe(train={"max_updates": 1, "global_batch": 4}, monitor={"every_updates": None})
    store = MemoryStore(first.preprocessing)
    names = list(store.volumes)
    store.table["split"] = ["train"] * 4 + ["val"] * 16
    store.table["sop_instance_uid"] = ["", *(f"1.2.{number}" for number in range(1, 20))]
    pretrain(first, store, tmp_path / "first")
    assert load_encoder(tmp_path / "first").trained_on == set(names[:4])
    assert load_encoder(tmp_path / "first").trained_on_uids == {uid_key(f"1.2.{number}") for number in (1, 2, 3)}
    store.table["split"] = ["val"] * 4 + ["train"] * 5 + ["val"] * 11
    for model, objective in (({"warm_start": str(tmp_path / "first")}, {}), ({}, {"teacher": str(tmp_path / "first")})):
        settings = {"model": model, "objective": objective, "monitor": {"every_updates": None}}
        recipe = small_recipe(train={"max_updates": 2, "global_batch": 4}, checkpoint={"every_updates": 1}, **settings)
        out = tmp_path / ("warm" if model else "taught")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(loop, "update_target", interrupted_after(1))
            with pytest.raises(KeyboardInterrupt):
                pretrain(recipe, store, out)
        pretrain(recipe, store, out, resume=True)
        assert load_encoder(out).trained_on == set(names[:9])
        assert load_encoder(out).trained_on_uids == {uid_key(f"1.2.{number}") for number in range(1, 9)}


def interrupted_after(updates: int) -> Callable[..., None]:
    """In the place of `update_target`: the run is interrupted in the update after so many."""
    done = []

    def interrupted_or_not(*given: Any) -> None:
        if len(done) == updates:
            raise KeyboardInterrupt
        done.append(1)
        update_target(*given)

    return interrupted_or_not


@pytest.mark.slow
def test_a_teacher_is_the_target_and_stays_and_the_student_is_exported(tmp_path: Path) -> None:
    first = small_recipe(train={"max_updates": 1, "global_batch": 4}, monitor={"every_updates": None})
    store = MemoryStore(first.preprocessing)
    pretrain(first, store, tmp_path / "first")
    taught = small_recipe(
        objective={"teacher": str(tmp_path / "first")}, train={"max_updates": 3, "global_batch": 4, "base_lr": 1e-2}
    )
    pretrain(taught, store, tmp_path / "taught")
    teacher = load_encoder(tmp_path / "first").encoder.state_dict()
    target, student = (load_encoder(tmp_path / "taught", which).encoder.state_dict() for which in ("target", "student"))
    assert all(torch.equal(teacher[name], target[name]) for name in teacher)
    assert not torch.equal(student["norm.weight"], teacher["norm.weight"])
    exported = load_encoder(tmp_path / "taught")
    assert exported.which == "student"
    alarms = json.loads((tmp_path / "taught" / "summary.json").read_text())["alarms"]
    assert "frozen_target" not in alarms


@pytest.mark.slow
def test_a_teacher_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    first = small_recipe(train={"max_updates": 1, "global_batch": 4}, monitor={"every_updates": None})
    pretrain(first, MemoryStore(first.preprocessing), tmp_path / "first")
    teacher = {"teacher": str(tmp_path / "first")}
    for settings, message in (
        ({"objective": {**teacher, "name": "mae"}}, "unused by mae, which predicts voxels"),
        (
            {"objective": teacher, "model": {**TEST_SIZE, "size": "reference"}},
            r"objective\.teacher .* is of another size",
        ),
        ({"objective": teacher, "model": {"rope_base": 100.0}}, "other positions"),
        (
            {"objective": teacher, "preprocessing": {**first.preprocessing.model_dump(), "axial_anchor": 0.6}},
            "axial_anchor: teacher 0.65, recipe 0.6",
        ),
    ):
        recipe = small_recipe(**settings)
        with pytest.raises(UsageError, match=message):
            start_weights(VJEPA3D.from_recipe(recipe), recipe)
    with pytest.raises(RecipeError, match=r"objective\.ema_horizon is unused with objective\.teacher"):
        small_recipe(objective={**teacher, "ema_horizon": 0.01})
    with pytest.raises(RecipeError, match="the student is exported"):
        small_recipe(objective=teacher, checkpoint={"export": "target"})


@pytest.mark.parametrize(
    ("key", "other", "message"),
    [
        ("positions", "sincos", "model.positions=rope_tiled, the recipe says sincos: set both alike"),
        ("position_unit", "index", "model.position_unit=mm, the recipe says index: set both alike"),
        ("patch_size", [4, 8, 32], "tokens.patch_size=(4, 16, 16), the recipe says (4, 8, 32): set both alike"),
    ],
)
def test_a_teacher_that_reads_other_tokens_is_refused(key: str, other: Any, message: str, tmp_path: Path) -> None:
    model = {**TEST_SIZE, "positions": "rope_tiled", "position_unit": "mm"}
    first = small_recipe(model=model)
    teacher = PretrainedEncoder(VJEPA3D.from_recipe(first).target_encoder, first, "teacher")
    export_encoder(teacher, "safetensors", tmp_path / "teacher")
    changed = {"tokens": {key: other, "budget": 24}} if key == "patch_size" else {"model": {**model, key: other}}
    recipe = small_recipe(**{"model": model, "objective": {"teacher": str(tmp_path / "teacher")}, **changed})
    with pytest.raises(UsageError, match=re.escape(message)):
        start_weights(VJEPA3D.from_recipe(recipe), recipe)


def test_other_patches_with_as_many_voxels_are_refused(tmp_path: Path) -> None:
    first = small_recipe()
    weights = PretrainedEncoder(VJEPA3D.from_recipe(first).target_encoder, first, "first")
    export_encoder(weights, "safetensors", tmp_path / "first")
    recipe = small_recipe(
        model={**TEST_SIZE, "warm_start": str(tmp_path / "first")}, tokens={"patch_size": [4, 8, 32], "budget": 24}
    )
    with pytest.raises(UsageError, match=re.escape("tokens.patch_size=(4, 16, 16), the recipe says (4, 8, 32)")):
        warm_start(VJEPA3D.from_recipe(recipe), recipe)


def test_the_layouts_are_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vjepa2_folder(tmp_path / "hf")
    recipe = small_recipe(model={**TEST_SIZE, "warm_start": str(tmp_path / "hf")})
    warm_start(VJEPA3D.from_recipe(recipe), recipe)
    assert "model.positions=rope_tiled, the recipe says rope" in caplog.text
    assert "position_unit" not in caplog.text
    recipe = small_recipe(model={**TEST_SIZE, "warm_start": str(tmp_path / "hf"), "position_unit": "mm"})
    warm_start(VJEPA3D.from_recipe(recipe), recipe)
    assert "model.position_unit=index, the recipe says mm" in caplog.text


@pytest.mark.parametrize(
    ("heads", "error", "result"),
    [
        (12, UsageError, "has 12 attention heads, model.size test has 6"),
        (None, CheckpointError, "has no num_attention_heads"),
    ],
)
def test_heads_are_compared_though_no_shape_tells_them(
    heads: int | None, error: type[Exception], result: str, tmp_path: Path
) -> None:
    vjepa2_folder(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "num_attention_heads": heads}))
    recipe = small_recipe(model={**TEST_SIZE, "warm_start": str(tmp_path / "hf")})
    with pytest.raises(error, match=result):
        warm_start(VJEPA3D.from_recipe(recipe), recipe)


def test_weights_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    vjepa2_folder(tmp_path / "hf")
    for section, match in (
        ({"model": {"size": "reference"}}, "of another size"),
        ({"tokens": {"patch_size": [4, 8, 8], "budget": 24}}, "its patches are 16 x 16"),
    ):
        model = {**TEST_SIZE, "warm_start": str(tmp_path / "hf"), **section.get("model", {})}
        recipe = small_recipe(**{**section, "model": model})
        with pytest.raises(UsageError, match=match):
            warm_start(VJEPA3D.from_recipe(recipe), recipe)
    recipe = small_recipe(model={**TEST_SIZE, "warm_start": str(tmp_path / "hf")})
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"cannot be read as weights|is damaged: it is shorter"):
        warm_start(VJEPA3D.from_recipe(recipe), recipe)
    (tmp_path / "hf" / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no model\.safetensors"):
        warm_start(VJEPA3D.from_recipe(recipe), recipe)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_released_shape_starts_model_size_large(tmp_path: Path) -> None:
    """Random weights in bf16, by transformers' own names and config of ViT-L (1024 x 24, RGB, tubelet 2), 0.65 GB."""
    from transformers import VJEPA2Config, VJEPA2Model

    config = VJEPA2Config()  # its defaults are those of the released ViT-L
    recipe = small_recipe(model={**TEST_SIZE, "size": "large", "positions": "rope_tiled", "warm_start": str(tmp_path)})
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in VJEPA2Model(config).state_dict().items()}
        model = VJEPA3D.from_recipe(recipe)
    torch.manual_seed(0)
    theirs = {name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1) for name, shape in shapes.items()}
    save_file(theirs, tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)
    model.to_empty(device="cpu")
    warm_start(model, recipe)

    kernel = theirs["encoder.embeddings.patch_embeddings.proj.weight"]
    assert kernel.shape == (1024, 3, 2, 16, 16)
    intensity = kernel.float().sum(1).repeat_interleave(2, dim=1) / 2
    layer = "encoder.layer.23.attention"
    for encoder in (model.context_encoder, model.target_encoder):
        assert torch.equal(encoder.embed.weight.view(1024, 4, 16, 16), intensity)
        joined = torch.cat([theirs[f"{layer}.{name}.weight"] for name in ("query", "key", "value")])
        assert torch.equal(encoder.blocks[23].attention.qkv.weight, joined.float())
        assert torch.equal(encoder.blocks[0].mlp[2].weight, theirs["encoder.layer.0.mlp.fc2.weight"].float())
        assert torch.equal(encoder.norm.bias, theirs["encoder.layernorm.bias"].float())
    ours = sum(value.numel() for value in model.context_encoder.parameters())
    used = sum(value.numel() for name, value in theirs.items() if name.startswith("encoder."))
    assert (used, ours) == (303_885_312, 303_361_024)  # 2 x 3 colours a kernel there, 4 one-channel slices here


@pytest.mark.slow
def test_a_run_stopped_before_its_first_checkpoint_starts_warm_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vjepa2_folder(tmp_path / "hf")
    recipe = small_recipe(
        model={**TEST_SIZE, "warm_start": str(tmp_path / "hf"), "positions": "rope_tiled"},
        train={"max_updates": 2, "global_batch": 4},
        monitor={"every_updates": None},
    )
    store = MemoryStore(recipe.preprocessing)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "accumulate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.pretrain(recipe, store, tmp_path / "run")
    warmed: list[str] = []
    begin = warm_start_module.start_weights

    def noted(model: VJEPA3D, recipe: Recipe) -> frozenset[str]:
        warmed.append(recipe.name)
        return begin(model, recipe)

    monkeypatch.setattr(warm_start_module, "start_weights", noted)
    loop.pretrain(recipe, store, tmp_path / "run", resume=True)
    assert warmed == ["small"]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_run_that_cannot_start_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    recipe = small_recipe(model={"warm_start": str(tmp_path / "typing-error")})
    with pytest.raises(OctjepaError, match="typing-error"):
        pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run")
    assert not (tmp_path / "run").exists()
