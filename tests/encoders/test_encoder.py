"""A pretrained encoder: found, verified, and the same vectors whatever the company."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import octjepa
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.export import export
from octjepa.encoders.pooling import POOL_WIDTHS, pool_features, token_regions
from octjepa.errors import CheckpointError, RecipeError, UsageError, WrongCheckpointError
from octjepa.model import VJEPA3D
from octjepa.train import loop
from octjepa.train.loop import pretrain
from octjepa.views import geometry
from octjepa.views.tokens import TISSUE_SHARE, tissue_share
from octjepa.volume import OCTVolume
from synthetic import MemoryStore, small_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recipe = small_recipe(objective={"ema_base": 0.9})
    out = tmp_path_factory.mktemp("encoder") / "run"
    pretrain(recipe, MemoryStore(recipe.preprocessing), out)
    return out


@pytest.mark.slow
def test_run_folder_checkpoint_and_file_give_the_same_encoder(run):
    step = next((run / "checkpoints").iterdir())
    store = MemoryStore(small_recipe().preprocessing)
    vectors = [
        load_encoder(path).embed(store.read("volume0003")) for path in (run, step, step / "model.safetensors", str(run))
    ]
    assert all(np.array_equal(vectors[0], other) for other in vectors[1:])
    assert octjepa.load_encoder is load_encoder


def test_it_is_the_target_encoder_and_not_the_untrained_one(run):
    encoder = load_encoder(run)
    untrained = encoder.untrained()
    assert encoder.parameters == untrained.parameters
    assert not torch.equal(encoder.encoder.embed.weight, untrained.encoder.embed.weight)
    again = encoder.untrained()
    assert torch.equal(untrained.encoder.embed.weight, again.encoder.embed.weight)


def test_the_student_is_loaded_on_request(run, tmp_path):
    own = {name: load_encoder(run, name) for name in ("target", "student")}
    assert load_encoder(run).which == "target"
    assert not torch.equal(own["target"].encoder.embed.weight, own["student"].encoder.embed.weight)
    step = next((run / "checkpoints").iterdir())
    weights = load_file(step / "model.safetensors")
    assert torch.equal(own["student"].encoder.embed.weight, weights["context_encoder.embed.weight"])
    assert torch.equal(own["target"].encoder.embed.weight, weights["target_encoder.embed.weight"])


@pytest.mark.slow
def test_a_student_that_a_recipe_exports_stays_the_student(tmp_path):
    """Of a run, of an exported folder, and of mae, which learns nothing from its moving average."""
    recipe = small_recipe(objective={"ema_base": 0.9}, checkpoint={"export": "student"})
    assert pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run").encoder == "student"
    student = load_encoder(tmp_path / "run")
    assert student.which == "student"
    assert torch.equal(student.encoder.embed.weight, load_encoder(tmp_path / "run", "student").encoder.embed.weight)
    export(tmp_path / "run", "safetensors", tmp_path / "out")
    exported = load_encoder(tmp_path / "out")
    assert exported.which == "student"
    assert torch.equal(student.encoder.embed.weight, exported.encoder.embed.weight)
    with pytest.raises(WrongCheckpointError, match="only one encoder, and not the target"):
        load_encoder(tmp_path / "out", "target")
    assert small_recipe(objective={"name": "mae"}).exported_encoder == "student"
    assert small_recipe().exported_encoder == "target"


@pytest.mark.parametrize(("accuracy", "better"), [((0.6, 0.7), "student"), ((0.7, 0.6), "target")])
@pytest.mark.slow
def test_validation_chooses_the_better_encoder(accuracy, better, tmp_path, monkeypatch):
    values = dict(zip(("layer_accuracy", "layer_accuracy_student"), accuracy, strict=True))
    monkeypatch.setattr(loop, "run_monitor", lambda *_: values)
    recipe = small_recipe(objective={"ema_base": 0.9}, checkpoint={"export": "validation"})
    assert pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run").encoder == better
    assert load_encoder(tmp_path / "run").which == better
    (tmp_path / "run" / "summary.json").unlink()  # killed between the last checkpoint and the summary
    again = pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run", resume=True)
    assert again.encoder == better
    with pytest.raises(RecipeError, match="needs the monitor"):
        small_recipe(checkpoint={"export": "validation"}, monitor={"every_updates": None})


def test_a_checkpoint_from_before_the_key_is_the_target(run, tmp_path):
    """Its recipe names no export, its manifest no encoder."""
    copied = shutil.copytree(run, tmp_path / "run")
    manifest = next(copied.glob("checkpoints/*/manifest.json"))
    about = json.loads(manifest.read_text())
    del about["encoder"], about["recipe"]["checkpoint"]["export"]
    about["recipe"]["objective"]["name"] = "normalized_mse"
    manifest.write_text(json.dumps(about))
    assert load_encoder(copied).which == "target"


def test_a_vector_does_not_depend_on_the_batch(run):
    encoder = load_encoder(run)
    store = MemoryStore(encoder.recipe.preprocessing)
    volumes = [store.read(f"volume{n:04d}") for n in range(4)]
    together = encoder.encode_volumes(volumes)
    for volume, one in zip(volumes, together, strict=True):
        alone = encoder.tokens(volume)
        assert np.allclose(alone.features, one.features, atol=1e-5)
        assert np.array_equal(alone.grid_index, one.grid_index)
        assert one.features.shape == (32, encoder.dim)  # the grid, which is as small as a multiple of 32 is
        assert one.grid == (2, 4, 4)


def test_all_tissue_is_read_whatever_training_drew_and_whoever_is_beside():
    tokens = {"patch_size": [2, 8, 8], "select": "tissue", "budget": 16}
    recipe = small_recipe(tokens=tokens)
    torch.manual_seed(0)
    encoder = PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, "fine")
    store = MemoryStore(recipe.preprocessing)
    volumes = [store.read(f"volume{n:04d}") for n in range(4)]
    volumes[1] = replace(volumes[1], band=volumes[1].band + np.array([6, -4], np.int16)[:, None, None])
    together = encoder.encode_volumes(volumes)
    counts = [len(one.grid_index) for one in together]
    assert len(set(counts)) > 1
    for volume, one in zip(volumes, together, strict=True):
        shape = geometry.center_crop(recipe.preprocessing)
        mask = geometry.tissue_mask(volume.band, shape, volume.pixels.shape[1], recipe.preprocessing.image_size)
        share = tissue_share(mask, (2, 8, 8))
        assert set(np.flatnonzero(share >= TISSUE_SHARE)) <= set(one.grid_index.tolist())
        assert len(one.grid_index) % 32 == 0
        assert len(one.grid_index) - (share >= TISSUE_SHARE).sum() < 32
        alone = encoder.tokens(volume)
        assert np.allclose(alone.features, one.features, atol=1e-5)
        assert np.array_equal(alone.grid_index, one.grid_index)


def test_a_native_volume_is_prepared_as_the_weights_expect(run):
    encoder = load_encoder(run)
    rng = np.random.default_rng(0)
    rows = np.arange(96)[None, :, None]
    pixels = np.where((rows > 30) & (rows < 60), 150, 20) + rng.integers(0, 30, size=(8, 96, 80))
    native = OCTVolume(
        pixels.astype(np.uint8), (0.4, 0.01, 0.08), dict.fromkeys(("slice", "depth", "column"), "shared"), "1", "", "OD"
    )
    vector = encoder.embed(native, pool="mean_std_max")
    assert vector.shape == (3 * encoder.dim,)
    assert np.isfinite(vector).all()


def test_poolings_by_hand():
    features = np.array([[1.0, 5.0], [3.0, 1.0]], dtype=np.float32)
    assert pool_features(features, "mean").tolist() == [2.0, 3.0]
    assert pool_features(features, "mean_std_max").tolist() == [2.0, 3.0, 1.0, 2.0, 3.0, 5.0]
    for other in ("median", "zones"):
        with pytest.raises(UsageError, match="mean_std_max"):
            pool_features(features, other)


def test_one_vector_by_every_pooling(run):
    encoder = load_encoder(run)
    volume = MemoryStore(encoder.recipe.preprocessing).read("volume0001")
    for pool, width in POOL_WIDTHS.items():
        assert encoder.embed(volume, pool).shape == (width * encoder.dim,)
    one = encoder.tokens(volume)
    first = token_regions(one.grid_index, one.grid) == token_regions(one.grid_index, one.grid)[0]
    assert one.features[first].max(axis=0).tolist() in encoder.embed(volume, "zones").reshape(-1, encoder.dim).tolist()
    with pytest.raises(UsageError, match="no pool median"):
        encoder.embed(volume, "median")


def test_what_is_no_checkpoint_is_reported(tmp_path, run):
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_encoder(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_encoder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(CheckpointError, match="not a weights file"):
        load_encoder(tmp_path / "model.safetensors")
    pickled = tmp_path / "weights.pt"
    torch.save({"a": torch.zeros(1)}, pickled)
    with pytest.raises(CheckpointError, match="not a weights file"):
        load_encoder(pickled)
