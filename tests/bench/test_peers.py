"""The other side does the work it is expected to do: else a ratio would say nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from benchmarks.peers import embed, loader, transformers_videomae, transformers_vjepa2
from benchmarks.peers.data import WHOLE_GRID, bench_recipe, one_thread, phantom_files, phantom_store, random_batch
from benchmarks.peers.ingest import by_monai, by_scipy, read_plainly
from benchmarks.peers.memory import peak_memory_bytes

from octjepa.embed.embedding import embed_store
from octjepa.errors import OctjepaError, UsageError
from octjepa.model import VJEPA3D
from octjepa.read.reader import read_volume
from octjepa.recipe import Recipe
from octjepa.views.sample import make_sample

pytestmark = pytest.mark.usefixtures("small")
TILED = (*WHOLE_GRID, "model.positions=rope_tiled")


def patches(video: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    return torch.stack([loader.cut(one[:, 0], recipe.tokens.patch_size) for one in video])


def test_a_random_batch_has_the_shapes_of_a_real_one() -> None:
    recipe = bench_recipe()
    batch = random_batch(recipe, 3)
    assert batch.context_view.shape == (3, 16, 4 * 16 * 16)
    assert (batch.context.shape[1], batch.target.shape[1]) == recipe.mask_counts
    assert sorted(torch.cat([batch.context[0], batch.target[0]]).tolist()) == list(range(16))
    assert batch.positions[0].max(dim=0).values.tolist() == [0, 3, 3]  # of a grid 2 x 4 x 4 the first 16


@pytest.mark.slow
@torch.no_grad()
def test_their_student_sees_the_context_alone_and_makes_our_features_of_it() -> None:
    recipe = bench_recipe(*TILED)
    torch.manual_seed(0)
    model = VJEPA3D.from_recipe(recipe)
    student = transformers_vjepa2.vjepa2_model(recipe, model)
    batch = random_batch(recipe)
    (d, h, w), count = recipe.preprocessing.image_size, recipe.train.global_batch
    video = torch.randn(count, d, 1, h, w)
    found = transformers_vjepa2.context_features(student.encoder, video, batch.context)
    index = batch.context.unsqueeze(-1)
    ours = model.target_encoder(
        patches(video, recipe).gather(1, index.expand(-1, -1, 1024)), batch.positions.gather(1, index.expand(-1, -1, 3))
    )
    assert (found - ours).abs().max() < 1e-4
    result = transformers_vjepa2.predicted_features(student, video, batch.context, batch.target)
    assert result.shape == (count, recipe.mask_counts[1], 192)
    first = torch.zeros(recipe.token_count, dtype=torch.bool)
    first[batch.target[0]] = True
    hidden = first.reshape(recipe.grid).repeat_interleave(4, 0).repeat_interleave(16, 1).repeat_interleave(16, 2)
    other = video.clone()
    other[0, :, 0][hidden] += 1.0
    assert torch.equal(transformers_vjepa2.predicted_features(student, other, batch.context, batch.target), result)
    other[0, :, 0][~hidden] += torch.randn(int((~hidden).sum()))
    assert not torch.allclose(
        transformers_vjepa2.predicted_features(student, other, batch.context, batch.target)[0], result[0]
    )


@pytest.mark.slow
def test_their_masked_autoencoder_is_as_large_and_sees_as_much() -> None:
    recipe = bench_recipe(*transformers_videomae.ALIKE, name=transformers_videomae.RECIPE)
    theirs, ours = transformers_videomae.videomae_model(recipe), VJEPA3D.from_recipe(recipe)
    weights = [
        sum(one.numel() for one in module.parameters() if one.ndim == 2)
        for module in (theirs.videomae.encoder, theirs.decoder, ours.context_encoder, ours.predictor)
    ]
    assert weights[0] == pytest.approx(weights[2], rel=0.1)
    assert weights[1] == pytest.approx(weights[3], rel=0.1)
    hidden = transformers_videomae.hidden_patches(recipe)
    visible, predicted = recipe.mask_counts
    assert (~hidden).sum(dim=1).tolist() == [visible] * recipe.train.global_batch
    assert hidden.sum(dim=1).tolist() == [predicted] * recipe.train.global_batch
    assert transformers_videomae.step_by_videomae(recipe)() == 2 * recipe.train.global_batch


@pytest.mark.slow
def test_other_features_from_the_same_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = transformers_vjepa2.vjepa2_model

    def broken(recipe: Recipe, model: VJEPA3D) -> torch.nn.Module:
        theirs = real(recipe, model)
        theirs.encoder.layer[0].mlp.fc2.bias.data[0] += 1.0
        return theirs

    monkeypatch.setattr(transformers_vjepa2, "vjepa2_model", broken)
    with (
        pytest.raises(OctjepaError, match="other features from the same weights"),
        transformers_vjepa2.embed_against_transformers(),
    ):
        pass


@pytest.mark.slow
def test_a_plain_sample_is_ours_where_nothing_is_random() -> None:
    views = [f"views.{name}=0" for name in ("flip_slow", "gain", "gamma", "speckle", "blur")]
    recipe = bench_recipe(*WHOLE_GRID, *views, "preprocessing.margin=[0,0,0]")
    with phantom_store(recipe.preprocessing, people=1) as (_, store):
        name = store.table["volume_id"].iloc[0]
        ours = make_sample(store.read(name), recipe, 0)
        seen, other, shown, hidden = loader.PlainViews(store, [name], recipe)[0]
        assert np.abs(seen.numpy() - ours.context_view).max() < 1e-5
        assert np.abs(other.numpy() - ours.target_view).max() < 1e-5
        assert (len(shown), len(hidden)) == recipe.mask_counts
        assert sorted([*shown.tolist(), *hidden.tolist()]) == list(range(recipe.token_count))
        for by_monai_too in (loader.monai_views, loader.monai_persistent_views):
            by_theirs = by_monai_too(store, [name], recipe)[0]
            assert [one.shape for one in by_theirs] == [seen.shape, other.shape, shown.shape, hidden.shape]
            assert np.corrcoef(by_theirs[0].numpy().ravel(), seen.numpy().ravel())[0, 1] > 0.999
        (cached,) = store.path.with_name("monai").glob("*.pt")
        assert torch.load(cached, weights_only=True)["seen"].shape[1:] == recipe.preprocessing.stored_size
        assert loader.DecodedViews(store, [name], recipe)[0][0].shape == seen.shape


def test_a_plain_sample_changes_as_recipes_ask() -> None:
    recipe = bench_recipe(*WHOLE_GRID, "views.gain=0.15", "views.speckle=0.15")
    with phantom_store(recipe.preprocessing, people=1) as (_, store):
        plain = loader.PlainViews(store, store.table["volume_id"].tolist(), recipe)
        first, second = plain[0], plain[0]
        assert not torch.equal(first[0], first[1])
        assert not torch.equal(first[0], second[0])


@pytest.mark.slow
def test_the_plain_pipelines_make_what_a_store_would_hold(tmp_path: Path) -> None:
    preprocessing = bench_recipe().preprocessing
    made = {}
    with phantom_files(people=1) as (_, cohort), one_thread():
        path = sorted(cohort.rglob("*.dcm"))[0]
        assert read_plainly(path)[1] == pytest.approx(read_volume(path).spacing_mm, rel=1e-3)
        for name, pipeline in (("scipy", by_scipy), ("monai", by_monai)):
            (tmp_path / name).mkdir()
            pipeline(path, tmp_path / name, preprocessing)
            (file,) = (tmp_path / name).glob("*.npy")
            pixels = np.load(file)
            assert (pixels.dtype, pixels.shape) == (np.uint8, preprocessing.stored_size)
            assert pixels.max() == 255
            made[name] = pixels.reshape(8, 9, 8, 9, 8).mean(axis=(2, 4))  # speckle aliases differently in each
    assert np.corrcoef(made["scipy"].ravel(), made["monai"].ravel())[0, 1] > 0.95


@pytest.mark.slow
def test_the_script_embeds_what_the_verb_does(tmp_path: Path) -> None:
    from octjepa.encoders import load_encoder

    with phantom_store(load_encoder(embed.ENCODER).recipe.preprocessing, people=1) as (_, store):
        assert embed.one_by_one(store, tmp_path / "other.parquet") == 2
        embed_store(embed.ENCODER, store, tmp_path / "ours.parquet", [embed.POOL])
    ours, other = (pd.read_parquet(tmp_path / f"{name}.parquet").set_index("volume_id") for name in ("ours", "other"))
    for column in ("vector", "untrained", "histogram"):
        for name in ours.index:
            assert np.abs(np.asarray(ours[column][name]) - np.asarray(other[column][name])).max() < 1e-4


@pytest.mark.slow
def test_memory_that_cannot_be_measured_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(OctjepaError, match=r"the process that measures memory failed: .*nowhere"):
        peak_memory_bytes(["nowhere"])
    monkeypatch.setattr("benchmarks.peers.memory.STATUS", tmp_path / "status")
    with pytest.raises(UsageError, match="measure on Linux"):
        peak_memory_bytes(["tiny_cpu_vjepa"])
