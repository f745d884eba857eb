"""Distillation: the teacher's tokens at the student's places, published teacher shapes, training and its errors."""

from __future__ import annotations

import sys
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from octjepa.distributed.runtime import Runtime
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.external.published import PUBLISHED
from octjepa.encoders.locate import prepare_external
from octjepa.encoders.pooling import TokenFeatures
from octjepa.errors import OctjepaError, UsageError
from octjepa.files import read_json_lines
from octjepa.model import VJEPA3D
from octjepa.recipe import Preprocessing
from octjepa.tasks.distil import train
from octjepa.tasks.distil.positions import View, teach
from octjepa.tasks.distil.training import DistilNetwork, DistilSettings, DistilTask, Pairs, distil
from synthetic import MemoryStore, small_recipe

RECIPE = small_recipe()
STUDENT = RECIPE.preprocessing  # 8 x 64 x 64 voxels of 0.4 x 0.016 x 0.1 mm, margin 0, 4, 4
PATCH = RECIPE.tokens.patch_size
FINE = STUDENT.model_copy(
    update={"image_size": (16, 96, 80), "margin": (0, 0, 0), "target_spacing_mm": (0.2, 0.012, 0.09)}
)


def position_tokens(preprocessing: Preprocessing, grid: tuple[int, int, int]) -> TokenFeatures:
    """Tokens whose three features are their place in millimetres."""
    index = np.arange(np.prod(grid))
    token = np.asarray(preprocessing.image_size) / np.asarray(grid)
    centres = (np.stack(np.unravel_index(index, grid), axis=-1) + 0.5) * token
    features = View.centred(preprocessing).millimetres(centres).astype(np.float32)
    return TokenFeatures(features, index, grid, np.ones(len(index), np.float32))


@pytest.mark.parametrize(
    ("preprocessing", "grid"),
    [(STUDENT, (2, 4, 4)), (STUDENT, (8, 7, 5)), (FINE, (16, 14, 14)), (FINE, (4, 6, 5))],
)
@pytest.mark.parametrize("mirrored", [(False, False, False), (True, False, True)])
def test_a_student_token_gets_the_features_at_its_position(preprocessing, grid, mirrored) -> None:
    view = View(STUDENT, (0, 6, 2), mirrored)
    index = np.arange(32)
    found, known = teach(position_tokens(preprocessing, grid), preprocessing, view, PATCH, index)
    centres = (np.stack(np.unravel_index(index, (2, 4, 4)), axis=-1) + 0.5) * np.asarray(PATCH)
    stored = np.where(mirrored, np.asarray(STUDENT.image_size) - centres, centres) + np.array([0, 6, 2])
    d, h, w = STUDENT.stored_size
    middle = np.array([d / 2, round(STUDENT.axial_anchor * (h - 1)) + 0.5, w / 2])
    expected = (stored - middle) * np.asarray(STUDENT.target_spacing_mm)
    token_mm = np.asarray(preprocessing.image_size) / grid * np.asarray(preprocessing.target_spacing_mm)
    # A linear map is interpolated exactly, except within half of the teacher's token of its outer centres.
    positions_mm = position_tokens(preprocessing, grid).features
    extent = np.asarray(PATCH) * np.asarray(STUDENT.target_spacing_mm)
    inner = ((expected - extent / 2 >= positions_mm.min(0)) & (expected + extent / 2 <= positions_mm.max(0))).astype(
        bool
    )
    assert inner.all(axis=1).sum() + inner.any(axis=1).sum() > 4
    assert np.allclose(found[inner & known[:, None]], expected[inner & known[:, None]], atol=1e-4)
    assert np.all(np.abs(found - expected)[known] <= token_mm + 1e-4)


def test_positions_without_a_teacher_token_are_unknown() -> None:
    taught = position_tokens(STUDENT, (2, 4, 4))
    upper = taught.grid_index[(taught.grid_index // 4) % 4 < 2]
    sparse = taught._replace(features=taught.features[upper], grid_index=upper)
    _, known = teach(sparse, STUDENT, View.centred(STUDENT), PATCH, np.arange(32))
    assert known.reshape(2, 4, 4).all(axis=(0, 2)).tolist() == [True, True, False, False]
    small = STUDENT.model_copy(update={"image_size": (4, 64, 64)})
    _, known = teach(position_tokens(small, (1, 4, 4)), small, View.centred(STUDENT), PATCH, np.arange(32))
    assert 0 < known.sum() <= 32


def teacher_of(name: str, layouts, folder: Path):
    """A published encoder with narrow random weights, for volumes of the student's store."""
    torch.save(layouts[name](), folder / "weights.pth")
    image = {"mirage": (64, 64), "octcube": (6, 32, 32)}.get(name, (32, 32))
    external = replace(PUBLISHED[name], sizes={16: (2, 2)}, image=image).load(folder / "weights.pth")
    return prepare_external(external, STUDENT)


def student() -> PretrainedEncoder:
    torch.manual_seed(0)
    return PretrainedEncoder(VJEPA3D.from_recipe(RECIPE).context_encoder, RECIPE, "student", (), "student")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retfound", "mirage", "dinov3"])
def test_the_student_learns_to_predict_a_2d_teacher(name: str, layouts, tmp_path: Path) -> None:
    if name == "dinov3":
        pytest.importorskip("transformers", minversion="4.56")
    teacher, encoder = teacher_of(name, layouts, tmp_path), student()
    assert teacher.grid == (8, 2, 2)
    pairs = Pairs(MemoryStore(STUDENT), RECIPE, teacher)
    encoder.network.requires_grad_(True).train()
    network = DistilNetwork(encoder.network, teacher.dim)
    start = {key: value.clone() for key, value in network.encoder.state_dict().items()}
    settings = DistilSettings(updates=24, batch=4, tokens=24, learning_rate=2e-3, validate_every=12, save_every=12)
    learner, seen = distil(network, pairs, settings, Runtime("fp32"), tmp_path / "run", "same")
    scores = read_json_lines(tmp_path / "run" / "validation.jsonl")
    assert scores[-1]["loss"] < scores[0]["loss"]
    assert learner.best_update == 24
    assert len(seen) == 12
    assert any(not torch.equal(value, start[key]) for key, value in network.encoder.state_dict().items())


def test_a_batch_is_a_function_of_its_update_and_the_teacher_is_read_at_the_crop(layouts, tmp_path: Path) -> None:
    pairs = Pairs(MemoryStore(STUDENT), RECIPE, teacher_of("retfound", layouts, tmp_path))
    network = DistilNetwork(student().network, 16)
    task = DistilTask(network, pairs, DistilSettings(updates=3, batch=2, tokens=24), Runtime("fp32"))
    first, again = next(task.batches(2)), next(task.batches(2))
    assert torch.equal(first.patches, again.patches)
    assert torch.equal(first.taught, again.taught)
    assert not torch.equal(first.taught, next(task.batches(1)).taught)
    assert first.taught.shape == (2, 24, 16)
    assert torch.allclose(first.taught[first.known].mean(-1), torch.zeros(int(first.known.sum())), atol=1e-4)


def test_teachers_that_cannot_teach_are_refused_in_one_line(
    layouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, teacher = MemoryStore(STUDENT), teacher_of("retfound", layouts, tmp_path)
    without = teacher_of("retfound", layouts, tmp_path)
    without.__dict__["grid"] = None
    with pytest.raises(
        UsageError, match=r"gives tokens without positions .*: expected an encoder with a grid of tokens$"
    ):
        Pairs(store, RECIPE, without)
    flat = prepare_external(teacher.external, STUDENT.model_copy(update={"flatten": "none"}))
    with pytest.raises(UsageError, match="reads volumes with flatten none, but the student reads quadratic"):
        Pairs(store, RECIPE, flat)
    with pytest.raises(UsageError, match="another preprocessing than the teacher reads: give a store"):
        Pairs(store, RECIPE, prepare_external(teacher.external, FINE))
    unrelated = MemoryStore(FINE)
    unrelated.table["volume_id"] = "other"
    with pytest.raises(UsageError, match="share no scan of split train"):
        Pairs(store, RECIPE, prepare_external(teacher.external, FINE), unrelated).ids("train")
    monkeypatch.setattr(type(teacher), "encode_volumes", lambda *_: [position_tokens(STUDENT, (2, 4, 4))])
    assert np.isfinite(Pairs(store, RECIPE, teacher).read("volume0001")[1].features).all()
    large = position_tokens(STUDENT, (2, 4, 4))
    large.features[0] = 7e4
    monkeypatch.setattr(type(teacher), "encode_volumes", lambda *_: [large])
    with pytest.raises(OctjepaError, match=r"volume0001 has a feature of size 7e\+04, and half precision"):
        Pairs(store, RECIPE, teacher).read("volume0001")
    monkeypatch.undo()
    finer = Pairs(store, RECIPE, prepare_external(teacher.external, FINE), MemoryStore(FINE))
    assert len(finer.ids("val")) == 8
    assert finer.read("volume0001")[1].grid == (16, 2, 2)


def test_the_fingerprint_names_what_both_stores_hold(layouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_of("retfound", layouts, tmp_path)
    store = MemoryStore(STUDENT, train=2, val=2)
    of_teacher = copy(store)
    pairs = Pairs(store, RECIPE, teacher, of_teacher)
    store.table["chunk_hash"] = store.table["content_hash"]
    monkeypatch.setattr(pairs, "ids", {split: pairs.ids(split) for split in ("train", "val")}.__getitem__)
    same = pairs.fingerprint
    before = store.table
    for changed in (store, of_teacher):
        for column in ("content_hash", "chunk_hash"):
            for row in before.index[before["split"] != "test"]:
                changed.table = before.copy()
                changed.table.loc[row, column] = "other"
                assert pairs.fingerprint != same
        changed.table = before
    assert pairs.fingerprint == same


@pytest.mark.slow
def test_the_command_exports_the_encoder_without_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A teacher of ours, which has tokens in tissue only."""
    packaged = load_encoder("phantom-tiny")
    store = MemoryStore(packaged.preprocessing, train=4, val=2)
    monkeypatch.setattr(train.Store, "open", lambda _: store)
    command = ["distil", "--teacher", "phantom-truth", "--store", "store", "--out", str(tmp_path), "--batch", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--updates", "2", "--tokens", "64", "--precision", "fp32"])
    assert train.main() == 0, capsys.readouterr().err
    distilled = load_encoder(tmp_path / "encoder")
    assert distilled.weights_hash() != packaged.weights_hash()
    assert distilled.preprocessing == packaged.preprocessing
    assert {"volume0000", "volume0003"} <= distilled.trained_on
    assert packaged.recorded_training <= distilled.recorded_training
    assert not [name for name, _ in distilled.network.named_parameters() if "recall" in name]
    (tmp_path / "encoder").rename(tmp_path / "first")
    monkeypatch.setattr(sys, "argv", [*command, "--updates", "3", "--tokens", "64", "--precision", "fp32"])
    assert train.main() == 1
    assert "was begun with 2 updates, not 3: give 2 again" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, "--updates", "2", "--tokens", "64", "--precision", "fp32"])
    store.table["content_hash"] = "other" + store.table["content_hash"]
    assert train.main() == 1
    assert "was begun with another recipe, encoder, store" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, "--updates", "0"])
    assert train.main() == 1
    assert capsys.readouterr().err.startswith("error: 0 updates of 2 volumes")
