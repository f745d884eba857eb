"""Fine-tuning of encoders of other projects: what learns, that they are written whole, and what is read of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from command_line import call
from octjepa.canonical.single_bscan import bscan_range
from octjepa.cohort.recorded_scans import split_recorded
from octjepa.embed.embedding import embed_store
from octjepa.embed.table import read_embeddings
from octjepa.encoders import load_encoder
from octjepa.encoders.external import is_external, load_external
from octjepa.errors import CheckpointError, ContractError, OctjepaError, WrongCheckpointError
from octjepa.explain.eyes import occluded_cases
from octjepa.report import write_report
from octjepa.tasks.finetune.external import load_start, make_bscan_view, tuned_network
from octjepa.tasks.finetune.inference import predict_store
from octjepa.tasks.finetune.network import pooled
from octjepa.tasks.finetune.predict import load_tuned
from octjepa.tasks.finetune.recipe import load_recipe
from octjepa.views.loader import LoadedSample
from octjepa.views.sample import make_sample, make_view
from octjepa.views.tokens import extract_patches, grid_coordinates
from planted import RECIPE, PlantedStore
from synthetic import small_recipe, volume

PREPROCESSING = RECIPE.preprocessing
VIEW = np.random.default_rng(0).integers(0, 255, size=PREPROCESSING.image_size, dtype=np.uint8)
# A network of a user: patches by convolution, two blocks, a norm; it returns a feature map.
CODE = """
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv3d(1, 16, (4, 8, 8), (4, 8, 8))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv3d(16, 16, 1), nn.GELU()) for _ in range(2)])
        self.norm = nn.GroupNorm(1, 16)

    def forward(self, images):
        x = self.patches(images - 0.4)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def create(path):
    torch.manual_seed(0 if path is None else 1)
    return Network()
"""


@pytest.fixture
def mine(install_package) -> str:
    install_package("network_of_a_user", "octjepa.encoders", "tunable = network_of_a_user:create", CODE)
    return "tunable:weights"


def test_blocks_are_the_longest_list_and_learn_in_stages(mine) -> None:
    start = load_start(mine, PREPROCESSING)
    network = tuned_network(start, [("binary", 2)])
    assert network.depth == 2
    found = []
    for blocks in (0, 1, 2, 3):
        network.unfreeze(blocks)
        names = {name for name, value in network.encoder.named_parameters() if value.requires_grad}
        found.append({".".join(name.split(".")[: 1 + name.startswith("blocks")]) for name in names})
    assert found == [
        set(),
        {"blocks.1", "norm"},
        {"blocks.0", "blocks.1", "norm"},
        {"patches", "blocks.0", "blocks.1", "norm"},
    ]
    settings = load_recipe("finetune", ["encoder_lr=0.01", "layer_decay=0.5", "head_lr=0.1"])
    peaks = {group["peak"] for group in network.groups(settings)}
    assert peaks == {0.1, 0.005, 0.0025, 0.00125}  # heads, last block with norm, first block, patches


def test_training_and_prediction_see_the_same_tokens_in_the_same_positions(mine, planted) -> None:
    start = load_start(mine, PREPROCESSING)
    network = tuned_network(start, [("binary", 2)])
    name = str(planted.table["volume_id"].iloc[3])
    still = load_recipe("finetune", ["views.crop=false", "views.flip_slow=0", "views.flip_fast=0"])
    sample = network.make_sample(planted.read(name), still.sampling(start.recipe), 0)
    assert sample.shape == PREPROCESSING.image_size
    batch = network.collate([LoadedSample(name, sample)])
    assert batch.volume_ids == (name,)
    trained = network.encode_batch(batch)
    (whole,) = start.encode_volumes([planted.read(name)])
    assert whole.grid == (2, 8, 8)
    assert torch.allclose(trained.features[0], torch.from_numpy(whole.features), atol=1e-6)
    assert np.allclose(trained.coordinates[0], grid_coordinates(whole.grid_index, whole.grid))
    assert torch.allclose(network.pool([planted.read(name)]), pooled(trained.features), atol=1e-5)


def test_views_are_those_of_pretraining_as_intensities(planted) -> None:
    one = planted.read(str(planted.table["volume_id"].iloc[0]))
    plain = make_view(one, RECIPE, None)
    sample = make_sample(one, RECIPE, None)
    patches = extract_patches(np.rint(plain * 255).astype(np.uint8), RECIPE.tokens.patch_size, sample.grid_index)
    scores = (patches - one.tissue_mean) / one.tissue_std
    assert np.allclose(scores, sample.context_view, atol=1e-3)
    bright = small_recipe(views={"gain": 0.3, "gamma": 0.2, "speckle": 0.2, "blur": 1.0})
    changed = make_view(one, bright, 0)
    assert changed.dtype == np.float32
    assert 0 <= changed.min() < changed.max() <= 1
    assert np.array_equal(changed, make_view(one, bright, 0))
    assert not np.array_equal(changed, make_view(one, bright, 1))


@pytest.mark.parametrize("views", [{"gain": 0.3}, {"gamma": 0.3}, {"speckle": 0.5}])
def test_the_slice_of_a_single_bscan_is_never_padding(views) -> None:
    """Augmentation gives the empty slices other values than zero."""
    recipe = small_recipe(preprocessing={"margin": [2, 4, 4]}, views={"flip_slow": 0.5, **views})
    whole, filled = volume(recipe.preprocessing), bscan_range(recipe.preprocessing, 2)
    pixels = np.zeros_like(whole.pixels)
    pixels[filled] = whole.pixels[2]
    single = replace(whole, pixels=pixels, bscan_slices=2)
    for epoch in range(8):
        view = make_bscan_view(single, recipe, epoch)
        assert view.shape == (1, *recipe.preprocessing.image_size[1:])
        assert view.std() > 0.1  # dark vitreous and bright tissue


@pytest.mark.slow
def test_a_module_of_a_package_is_tuned_written_predicted_and_embedded(tune, planted, mine, tmp_path, caplog) -> None:
    out = tmp_path / "out"
    message = tune(out, checkpoint=mine, target=("mark", "size"))
    rows = {(row["name"], row["probe"]) for row in message["rows"]}
    assert {("weights", "tuned"), ("weights", "linear"), ("untrained", "linear"), ("histogram", "linear")} <= rows
    assert any("drop_path was not applied" in note for note in message["notes"])
    tuned = load_tuned(out)
    before = load_external(mine)
    after = load_external(out)
    assert is_external(out)
    assert not np.allclose(after.tokens(VIEW), before.tokens(VIEW))
    assert np.allclose(after.untrained().tokens(VIEW), before.untrained().tokens(VIEW))
    # The tuned network says of a volume what it said in the test.
    table = pd.read_parquet(out / "predictions.parquet")
    row = table[(table["level"] == "volume") & (table["split"] == "test") & (table["target"] == "mark")].iloc[0]
    answer = tuned.predict(planted.read(row["volume_id"]))
    assert list(answer["mark"]["balanced"].values()) == pytest.approx(list(row["scores"]), abs=1e-5)
    made = predict_store(out, planted, tmp_path / "predicted")
    assert made.cases == made.volumes == len(planted.table)
    assert made.trained_on == 40
    # It is an encoder like any other, and nobody is tested on people whom it was tuned on.
    embed_store(out, planted, tmp_path / "tuned.parquet")
    assert read_embeddings(tmp_path / "tuned.parquet").leaked == 0
    planted.table = planted.table.assign(split="test")
    caplog.clear()
    try:
        assert embed_store(out, planted, tmp_path / "leaky.parquet").leaked == 20
        assert "fine-tuned on eyes of people who are now in val or test (20 of them)" in caplog.text
    finally:
        planted.table = PlantedStore().table
    assert call("inspect", out, "--json").json["encoder"] == "weights"
    with pytest.raises(WrongCheckpointError, match="tuned encoder of another project"):
        load_encoder(out)
    with pytest.raises(OctjepaError, match="reads whole images"):
        occluded_cases(planted, out, tuned)
    write_report(out, tmp_path / "page.html")


@pytest.mark.slow
def test_frozen_tokens_train_the_heads_alone(tune, mine, tmp_path) -> None:
    tune(tmp_path / "out", "stages.head=10", "stages.last=0", "stages.all=0", checkpoint=mine)
    assert np.array_equal(load_external(tmp_path / "out").tokens(VIEW), load_external(mine).tokens(VIEW))
    assert len(load_tuned(tmp_path / "out").heads) == 1


@pytest.mark.slow
def test_a_tuned_encoder_is_tuned_on_and_keeps_its_preprocessing(tune, planted, mine, tmp_path) -> None:
    tune(tmp_path / "first", "stages.all=1", checkpoint=mine)
    tune(tmp_path / "second", "stages.all=1", checkpoint=tmp_path / "first")
    tuned = load_external(tmp_path / "second").tuned_on
    assert tuned is not None
    assert [len(recorded) for recorded in split_recorded(tuned.volume_ids)] == [40, 40]  # ids and UIDs
    other = PlantedStore()
    other.preprocessing = PREPROCESSING.model_copy(update={"target_spacing_mm": (0.4, 0.02, 0.1)})
    with pytest.raises(ContractError, match="target_spacing_mm"):
        embed_store(tmp_path / "first", other, tmp_path / "none.parquet")
    with pytest.raises(ContractError, match="target_spacing_mm"):
        predict_store(tmp_path / "first", other, tmp_path / "none")


@pytest.mark.slow
def test_a_damaged_description_is_refused(tune, mine, tmp_path) -> None:
    message = tune(tmp_path / "out", "stages.all=1", checkpoint=mine)
    manifest = Path(message["checkpoint"]) / "manifest.json"
    about = json.loads(manifest.read_text())
    about["external"] = {"kind": "tunable"}
    manifest.write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="does not describe the encoder"):
        load_external(tmp_path / "out")
