"""Tokens of two grids over the same volume (`benchmarks.token_grids`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import objectives
from benchmarks.objectives import CHOICES, LONGER, recipe_of, store_encoder, train
from benchmarks.spectral import SpectralMAE, log_amplitudes
from benchmarks.token_grids import GRIDS, TWO_SCALES, children_of, of_same_tokens, of_two_scales

from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.export import export_encoder
from octjepa.errors import UsageError
from octjepa.files import write_json
from octjepa.model import VJEPA3D
from octjepa.objectives.mae import MAE
from octjepa.volume import CanonicalVolume
from synthetic import volume


def test_children_cover_the_voxels_of_their_token() -> None:
    coarse, fine = (4, 16, 16), (8, 16, 32)
    voxels = np.arange(16 * 128 * 128).reshape(16, 128, 128)
    tokens = {
        grid: voxels.reshape(grid[0], 16 // grid[0], grid[1], 128 // grid[1], grid[2], 128 // grid[2])
        .transpose(0, 2, 4, 1, 3, 5)
        .reshape(np.prod(grid), -1)
        for grid in (coarse, fine)
    }
    index = np.array([0, 17, 1023])
    children = children_of(index, coarse, fine)
    assert children.shape == (3, 4)
    for number, of_token in zip(index, children, strict=True):
        assert set(tokens[fine][of_token].ravel()) == set(tokens[coarse][number])


def test_the_mean_of_one_child_is_the_token_itself() -> None:
    encoder = load_encoder("phantom-tiny")
    one: CanonicalVolume = volume(encoder.recipe.preprocessing, 1)
    found, own = of_same_tokens(encoder, encoder.recipe)([one])[0], encoder.encode_volumes([one])[0]
    assert np.array_equal(found.grid_index, own.grid_index)
    assert found.features == pytest.approx(own.features, abs=1e-4)


def test_names_of_runs_are_unique() -> None:
    names = [choice.name for choice in (*CHOICES, *LONGER.values(), *GRIDS, *TWO_SCALES)]
    assert len(set(names)) == len(names)


def test_a_stored_encoder_is_read_where_the_run_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "STARTS", tmp_path / "stored")
    choice, encoder = LONGER["truth_longest"], load_encoder("phantom-tiny")
    with pytest.raises(UsageError, match="no run that has ended"):
        store_encoder(choice, 0, tmp_path / "work")
    run = tmp_path / "work" / "runs" / f"{choice.name}-0"
    export_encoder(encoder, "safetensors", run / "encoder")
    write_json(run / "time.json", {"cpu_seconds": 5.5})
    stored = store_encoder(choice, 0, tmp_path / "work")
    assert (stored / "model.safetensors").stat().st_size < 16e6
    found, cpu_seconds = train(choice, 0, tmp_path / "another machine")
    assert cpu_seconds == 5.5
    one: CanonicalVolume = volume(encoder.recipe.preprocessing, 1)
    assert found.encode_volumes([one])[0].features == pytest.approx(encoder.encode_volumes([one])[0].features, abs=1e-2)


def test_a_small_token_is_followed_by_the_large_one_around_it() -> None:
    small, recipe = load_encoder("phantom-tiny"), recipe_of(TWO_SCALES[1], 0)
    one: CanonicalVolume = volume(small.recipe.preprocessing, 1)
    large = PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, "large")
    alone, both = small.encode_volumes([one])[0], of_two_scales(small, large)([one])[0]
    width = alone.features.shape[1]
    assert np.array_equal(both.grid_index, alone.grid_index)
    assert both.features[:, :width] == pytest.approx(alone.features, abs=1e-4)
    slices, depths, columns = np.unravel_index(alone.grid_index, small.recipe.grid)
    parents = np.ravel_multi_index((slices, depths // 2, columns // 2), recipe.grid)
    for parent in np.unique(parents):
        of_parent = both.features[parents == parent, width:]
        assert np.array_equal(of_parent, np.broadcast_to(of_parent[0], of_parent.shape))
    assert len(np.unique(both.features[:, width:], axis=0)) == len(np.unique(parents))


def test_the_spectral_loss_sees_a_missing_high_frequency() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(1, 5, 256, generator=generator)
    smooth = target.unflatten(-1, (4, 8, 8)).mean(dim=-1, keepdim=True).expand(1, 5, 4, 8, 8).flatten(2)
    shifted = target.unflatten(-1, (4, 8, 8)).roll(1, dims=-1).flatten(2)
    assert log_amplitudes(shifted) == pytest.approx(log_amplitudes(target), abs=1e-4)
    spectral, plain = SpectralMAE().loss, MAE().loss
    assert spectral(target, target) == 0
    assert spectral(shifted, target) == pytest.approx(float(plain(shifted, target)), abs=1e-4)
    assert spectral(smooth, target) > 1.3 * plain(smooth, target)
