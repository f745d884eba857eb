"""Exported weights come back the same: to `load_encoder`, and to transformers."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from layered_eye import eye
from octjepa import load_encoder
from octjepa.config import PRETRAINING, load_recipe
from octjepa.encoders.export import export
from octjepa.errors import UsageError
from octjepa.model import VJEPA3D
from octjepa.model.vjepa3d import grid_positions
from octjepa.recipe import Recipe
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe


@pytest.fixture(scope="module", params=["rope", "rope_tiled"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = small_recipe(train={"max_updates": 2, "global_batch": 4}, model={"positions": request.param})
    out = tmp_path_factory.mktemp(request.param) / "run"
    store = MemoryStore(recipe.preprocessing)
    store.table["sop_instance_uid"] = [f"1.2.{number}" for number in range(len(store.table))]
    pretrain(recipe, store, out)
    return out


@pytest.mark.slow
def test_one_file_gives_the_same_embedding(run: Path, tmp_path: Path) -> None:
    files = export(run, "safetensors", tmp_path / "out")
    assert files == ["model.safetensors", "README.md", "SHA256SUMS"]
    first, second = load_encoder(run), load_encoder(tmp_path / "out")
    volume = MemoryStore(first.recipe.preprocessing).volumes["volume0003"]
    assert np.array_equal(first.embed(volume), second.embed(volume))
    assert second.trained_on == first.trained_on
    assert second.trained_on_uids == first.trained_on_uids != set()
    for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Trained on | 12 volumes; their content hashes and hashes of their SOP instance UIDs" in card
    assert "Not a medical device" in card


def test_a_card_says_that_other_training_is_not_in_it(tmp_path: Path) -> None:
    """phantom-truth learned from labels only, which is not the objective of its recipe."""
    export("phantom-truth", "safetensors", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| Objective | noise2noise |" in text
    assert "| Trained on | no scan that the weights' metadata name |" in text
    assert "do not record what else the encoder\nlearned from: the labels of a fine-tuning, the truth" in text


def test_equal_exports_are_equal_files(tmp_path: Path) -> None:
    for number in range(6):  # metadata comes in any order
        export("phantom-tiny", "safetensors", tmp_path / str(number))
    assert len({(tmp_path / str(number) / "SHA256SUMS").read_bytes() for number in range(6)}) == 1
    assert load_encoder(tmp_path / "0").trained_on == load_encoder("phantom-tiny").trained_on
    export("phantom-tiny", "safetensors", tmp_path / "0")  # as after one that was killed


@pytest.mark.slow
def test_transformers_reads_the_other_form(run: Path, tmp_path: Path) -> None:
    encoder = load_encoder(run)
    if encoder.recipe.model.positions == "rope":
        return  # a model of ours, below
    from transformers import VJEPA2Model

    export(run, "hf", tmp_path / "out")
    # the predictor is not exported: transformers makes a new one, and says so
    theirs = VJEPA2Model.from_pretrained(tmp_path / "out").eval()
    view = torch.randn(1, 8, 64, 64)
    cut = view.reshape(1, 2, 4, 4, 16, 4, 16).permute(0, 1, 3, 5, 2, 4, 6).reshape(1, 32, 1024)
    with torch.no_grad():
        ours = encoder.encoder(cut, grid_positions((2, 4, 4))[None])
        other = theirs(pixel_values_videos=view.unsqueeze(2), skip_predictor=True).last_hidden_state
    assert (ours - other).abs().max() < 1e-5
    contract = json.loads((tmp_path / "out" / "preprocessing.json").read_text())
    assert contract["preprocessing"]["image_size"] == [8, 64, 64]
    fewer = encoder.recipe.token_count < encoder.recipe.grid_tokens
    assert fewer == ("This model takes all 32 tokens" in (tmp_path / "out" / "README.md").read_text())


def test_a_card_says_that_transformers_sees_tokens_the_encoder_never_did(tmp_path: Path) -> None:
    recipe = small_recipe(model={"positions": "rope_tiled"}, tokens={"select": "tissue", "budget": 16})
    export(saved(recipe, tmp_path / "weights.safetensors"), "hf", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "This model takes all 32 tokens of a volume, and the encoder was trained on 16 of them" in card


OTHER_FORMS = {
    "paired rotary positions": ({"model": {"positions": "rope"}}, "positions 'rope'"),
    "sines": ({"model": {"positions": "sincos"}}, "positions 'sincos'"),
    "millimetres": (
        {"model": {"positions": "rope_tiled", "position_unit": "mm"}},
        "positions in mm: VJEPA2Model counts",
    ),
    "a stem of two layers": ({"model": {"positions": "rope_tiled", "stem": "patch_mlp"}}, "a non-linear stem"),
}


@pytest.mark.parametrize("case", OTHER_FORMS)
def test_what_vjepa2_cannot_hold_is_a_model_of_ours_with_the_same_features(tmp_path: Path, case: str) -> None:
    """VJEPA2Model would give every token a wrong position, and nothing would tell."""
    from transformers import AutoModel

    import octjepa.encoders.auto_model  # noqa: F401 -- registers the model type

    settings, reason = OTHER_FORMS[case]
    path = saved(small_recipe(**settings), tmp_path / "weights.safetensors")
    export(path, "hf", tmp_path / "out")
    assert f"Why not VJEPA2Model: {reason}" in (tmp_path / "out" / "README.md").read_text()
    encoder = load_encoder(path)
    theirs, info = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    images = torch.randn(2, 1, 8, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens, pooled = encoder.module(trainable=False)(images)
        found = theirs.eval()(images)
    assert torch.equal(found.last_hidden_state, tokens)
    assert torch.equal(found.pooler_output, pooled)


@pytest.mark.parametrize("name", PRETRAINING.names())
def test_every_shipped_recipe_has_a_form_in_transformers(tmp_path: Path, name: str) -> None:
    """Narrow: width and depth do not decide which form it is."""
    from transformers import AutoModel

    import octjepa.encoders.auto_model  # noqa: F401 -- registers the model type

    recipe = load_recipe(name, ["model.width=24", "model.depth=1", "model.heads=2"])
    path = saved(recipe, tmp_path / "weights.safetensors")
    export(path, "hf", tmp_path / "out")
    theirs, info = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    own = load_encoder(path).encoder.state_dict()
    assert all(torch.equal(theirs.encoder.state_dict()[key], value) for key, value in own.items())


def saved(recipe: Recipe, path: Path) -> Path:
    """Fresh weights of `recipe`, as an exported file holds them."""
    weights = VJEPA3D.from_recipe(recipe).target_encoder.state_dict()
    about = {"schema": 1, "recipe": recipe.model_dump(mode="json"), "trained_on": []}
    save_file(
        {f"target_encoder.{name}": value for name, value in weights.items()}, path, {"octjepa": json.dumps(about)}
    )
    return path


@pytest.mark.slow
def test_a_folder_that_holds_something_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UsageError, match="name a new one"):
        export(run, "safetensors", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    for name in ("mine.txt", "model.safetensors"):  # larger than any memory, so it may not be read
        (tmp_path / "mine.txt").rename(tmp_path / name)
        os.truncate(tmp_path / name, 2**42)
        with pytest.raises(UsageError, match="name a new one"):
            export(run, "safetensors", tmp_path)
        (tmp_path / name).rename(tmp_path / "mine.txt")


@pytest.mark.parametrize("positions", ["rope", "rope_tiled"])
def test_the_processor_prepares_what_the_model_takes(tmp_path: Path, positions: str) -> None:
    """Files and store volumes alike; the features are those of the encoder on the same volume."""
    from transformers import AutoImageProcessor, AutoModel

    import octjepa.encoders.auto_model  # noqa: F401 -- registers the processor

    path = saved(small_recipe(model={"positions": positions}), tmp_path / "weights.safetensors")
    export(path, "hf", tmp_path / "out")
    encoder = load_encoder(path)
    volumes = [MemoryStore(encoder.recipe.preprocessing).volumes[name] for name in ("volume0001", "volume0002")]
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    inputs = processor(volumes)
    images = encoder.collate(volumes)
    own_model = positions == "rope"
    assert list(inputs) == ["pixel_values" if own_model else "pixel_values_videos"] == processor.model_input_names
    model = AutoModel.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected, _ = encoder.module(trainable=False)(images)
        found = model(**inputs, **({} if own_model else {"skip_predictor": True})).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    processor.save_pretrained(tmp_path / "again")
    again = AutoImageProcessor.from_pretrained(tmp_path / "again")(volumes[0])
    assert torch.equal(next(iter(again.values())), next(iter(inputs.values()))[:1])


def test_the_processor_prepares_a_native_scan_and_its_config_says_the_contract(tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    import octjepa.encoders.auto_model  # noqa: F401 -- registers the processor

    recipe = small_recipe()
    path = saved(recipe, tmp_path / "weights.safetensors")
    export(path, "hf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert config["size"] == dict(zip(("slices", "depth", "columns"), recipe.preprocessing.image_size, strict=True))
    assert config["spacing_mm"] == list(recipe.preprocessing.target_spacing_mm)
    assert config["input_shape"] == ["B", 1, *recipe.preprocessing.image_size]
    scan = eye()
    encoder = load_encoder(path)
    found = AutoImageProcessor.from_pretrained(tmp_path / "out")(scan)["pixel_values"]
    assert torch.equal(found, encoder.collate([encoder.prepare(scan)]))
