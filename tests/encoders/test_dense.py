"""The segmentation network as an encoder: its tokens are those of the grid, and say what the network says there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import octjepa
from command_line import call
from octjepa.canonical.single_bscan import bscan_range
from octjepa.encoders.dense import DenseEncoder
from octjepa.errors import UsageError, WrongCheckpointError
from octjepa.ingest.build import build_store
from octjepa.phantom import write_cohort
from octjepa.recipe import Preprocessing
from octjepa.shipped import SEGMENTER as NAME
from octjepa.tasks.finetune.external import load_start
from synthetic import volume

SMALL = Preprocessing(image_size=(4, 64, 32), target_spacing_mm=(0.36, 0.0078, 0.047), margin=(0, 4, 4))


@pytest.fixture(scope="module")
def encoder() -> DenseEncoder:
    return DenseEncoder.packaged(SMALL)


@pytest.mark.parametrize(
    ("preprocessing", "patch"),
    [
        (Preprocessing(), (4, 8, 8)),
        (Preprocessing(image_size=(48, 128, 256), target_spacing_mm=(0.12, 0.0078, 0.0235)), (12, 8, 16)),
        (Preprocessing(image_size=(7, 96, 96), target_spacing_mm=(0.36, 0.0104, 0.06)), (7, 6, 6)),
    ],
)
def test_a_token_has_about_the_same_size_whatever_the_store(preprocessing, patch):
    encoder = DenseEncoder.packaged(preprocessing)
    assert encoder.recipe.tokens.patch_size == patch
    assert encoder.grid == tuple(n // p for n, p in zip(preprocessing.image_size, patch, strict=True))
    assert encoder.preprocessing == preprocessing


def test_the_tokens_are_those_of_the_other_packaged_encoder():
    """Features of both can be compared token by token."""
    other = octjepa.load_encoder("phantom-truth")
    eye = volume(other.preprocessing, 3)
    ours, theirs = octjepa.open_encoder(NAME, other.preprocessing).tokens(eye), other.tokens(eye)
    assert np.array_equal(ours.grid_index, theirs.grid_index)
    assert ours.grid == theirs.grid
    assert np.array_equal(ours.tissue, theirs.tissue)


def test_features_do_not_depend_on_the_company_and_random_weights_give_others(encoder):
    eyes = [volume(SMALL, n) for n in range(2)]
    alone, together = encoder.tokens(eyes[1]), encoder.encode_volumes(eyes)[1]
    assert alone.features.shape == (len(alone.grid_index), encoder.dim)
    assert alone.features.dtype == np.float32
    assert np.isfinite(alone.features).all()
    assert np.array_equal(alone.features, together.features)
    untrained = encoder.untrained()
    assert untrained.weights_hash() == encoder.untrained().weights_hash() != encoder.weights_hash()
    assert not np.allclose(untrained.tokens(eyes[1]).features, alone.features)
    assert encoder.embed(eyes[1], pool="zones_whitened").ndim == 1


def test_tokens_of_another_size_are_another_encoder(encoder):
    """An interrupted table must not continue with features of other tokens."""
    thin = DenseEncoder.packaged(SMALL, token_mm=(0.36, 0.062, 0.19))
    assert thin.dim == encoder.dim
    assert thin.weights_hash() != encoder.weights_hash() == DenseEncoder.packaged(SMALL).weights_hash()


def test_what_a_token_says_is_what_the_network_says_there(encoder):
    """Boundaries at known rows, one class in one token, and a feature map that is the number of its column."""
    height, width = encoder._shape
    d, h, w = encoder.grid
    boundaries, classes = encoder.network.size.boundaries, encoder.network.size.classes
    rows = torch.arange(boundaries) * 6 + 5
    logits = torch.full((4, boundaries + classes, height, width), -30.0)
    for number, row in enumerate(rows):
        logits[:, number, row] = 30.0
    logits[:, boundaries] = 0.0
    token_height, token_width = height // h, width // w
    logits[:, boundaries + 2, 3 * token_height : 4 * token_height, token_width : 2 * token_width] = 60.0
    maps = torch.zeros(4, 32, height // 2, width // 2)
    maps[:, 0] = torch.arange(width // 2)
    features = encoder._describe(maps, logits, encoder.grid).reshape(d, h, w, -1)

    columns = token_width // 2
    assert features[0, 0, 1, 0] == pytest.approx(columns + (columns - 1) / 2)  # the mean of the map
    assert features[0, 0, 1, 32] == 2 * columns - 1  # its maximum
    fluid_mean, fluid_maximum = features[..., 64 + 1], features[..., 64 + 3 + 1]
    for values in (fluid_mean, fluid_maximum):
        assert values[0, 3, 1] == pytest.approx(1, abs=1e-3)
        values[:, 3, 1] = 0
        assert values.max() < 1e-3
    centre = (np.arange(h) + 0.5) * token_height - 0.5
    expected = np.clip((centre[:, None] - rows.numpy()) / token_height, -8, 8)
    assert np.allclose(features[0, :, 0, -boundaries:], expected, atol=1e-3)


def test_a_token_without_a_size_is_refused():
    with pytest.raises(UsageError, match=r"token_mm \(0\.36, 0\.0, 0\.19\): expected three lengths above 0"):
        DenseEncoder.packaged(SMALL, token_mm=(0.36, 0.0, 0.19))


def test_small_tokens_are_the_parts_of_a_large_one():
    """Their means are those of the large token, and its maxima are the largest of theirs."""
    small = DenseEncoder.packaged(SMALL, token_mm=(0.36, 0.0624, 0.188))
    large = DenseEncoder.packaged(SMALL)
    assert (small.grid, large.grid) == ((4, 8, 8), (1, 8, 4))
    assert small.untrained().grid == small.grid
    eye = volume(SMALL, 2)
    images = large.select_tokens(eye)
    every = np.arange(8 * 4), np.arange(4 * 8 * 8)
    whole, parts = (
        encoder._features(images._replace(grid_index=index))
        for encoder, index in zip((large, small), every, strict=True)
    )
    parts = parts.reshape(4, 8, 4, 2, -1).transpose(1, 2, 0, 3, 4).reshape(8 * 4, 8, -1)
    means, maxima = [*range(32), *range(64, 67)], [*range(32, 64), *range(67, 70)]
    assert np.allclose(parts[..., means].mean(axis=1), whole[:, means], atol=1e-4)
    assert np.allclose(parts[..., maxima].max(axis=1), whole[:, maxima], atol=1e-4)
    near = (np.abs(parts[..., 70:]) < 8).all(axis=1)
    assert near.mean() > 0.5
    assert np.allclose(parts[..., 70:].mean(axis=1)[near], whole[:, 70:][near], atol=1e-3)


def test_a_single_bscan_is_read_once_and_alone(encoder):
    """Whatever the number of slices that it fills: neighbours that are copies of it would be seen as tissue."""
    whole = volume(SMALL, 5)
    single = []
    for slices in (4, 2):
        filled = bscan_range(SMALL, slices)
        pixels, band = np.zeros_like(whole.pixels), np.full_like(whole.band, -1)
        pixels[filled], band[:, filled] = whole.pixels[1], whole.band[:, 1][:, None]
        single.append(replace(whole, pixels=pixels, band=band, bscan_slices=slices))
    first, second = (encoder.select_tokens(one) for one in single)
    assert len(first.images) == len(second.images) == 1
    assert np.array_equal(first.images, second.images)
    features = encoder.tokens(single[0]).features
    padded = encoder._features(first._replace(images=np.concatenate([first.images] * 3)))
    assert not np.allclose(features, padded[: len(features)])


def test_it_is_opened_by_name_and_cannot_be_trained_further():
    assert octjepa.open_encoder(NAME).preprocessing == Preprocessing()
    with pytest.raises(WrongCheckpointError, match=r"tokens are frozen.*Fine-tune phantom-truth"):
        octjepa.load_encoder(NAME)
    with pytest.raises(UsageError, match="fine-tune phantom-truth"):
        load_start(NAME, SMALL)


@pytest.mark.slow
def test_the_commands_read_it_on_the_store_of_another_recipe(tmp_path):
    write_cohort(tmp_path / "eyes", people=3, seed=5, size="small", workers=1)
    build_store([tmp_path / "eyes"], tmp_path / "store", SMALL)
    done = call("embed", NAME, "--store", tmp_path / "store", "--out", tmp_path / "e.parquet", "--json")
    assert done.code == 0, done.err
    summary = done.json
    assert summary["rows"] == 6
    assert summary["dim"] == 78
    (tmp_path / "labels.tsv").write_text("person_id\tsick\n")
    words = ("--labels", tmp_path / "labels.tsv", "--target", "sick", "--out", tmp_path / "b")
    board = call("leaderboard", NAME, "--store", tmp_path / "store", *words)
    assert "has a header and no rows" in board.err
    described = call("inspect", NAME, "--json")
    assert (described.code, described.json["dim"]) == (0, 78)
    assert NAME in call("embed", "phantom-unett", "--store", tmp_path / "store", "--out", tmp_path / "n.parquet").err
