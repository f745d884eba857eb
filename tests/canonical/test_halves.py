"""Both halves of the B-scans: one anatomy, other speckle, from ingest to the views of a training sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layered_eye import PREPROCESSING, eye
from octjepa.canonical.pipeline import canonicalise
from octjepa.cohort.selection import select
from octjepa.errors import ContractError, RecipeError, UsageError
from octjepa.ingest import build_store
from octjepa.model import VJEPA3D
from octjepa.notes import HALVES_NOTE
from octjepa.phantom import CohortDesign, write_cohort
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.store.shards import pack
from octjepa.store.storage import DamagedVolume
from octjepa.tasks.finetune.recipe import FinetuneRecipe
from octjepa.views.loader import TrainingDataset, ValidationDataset, select_volumes
from octjepa.views.sample import make_sample
from synthetic import MemoryStore, small_recipe

HALVES = {"objective": {"name": "noise2noise"}, "views": {"halves": True}}


def test_halves_leave_the_volume_as_it_is_and_are_what_their_own_b_scans_show() -> None:
    volume = eye()
    pixels = volume.pixels.copy()
    pixels[0::2] = np.clip(pixels[0::2].astype(int) + 12 * (pixels[0::2] > 60), 0, 255)  # in tissue of every other one
    volume = replace(volume, pixels=pixels)
    plain, made = canonicalise(volume, PREPROCESSING), canonicalise(volume, PREPROCESSING, halves=True)
    assert plain.volume.half_difference is None
    assert plain.volume.halves is None
    assert np.array_equal(plain.volume.pixels, made.volume.pixels)
    assert HALVES_NOTE in made.notes
    assert HALVES_NOTE not in plain.notes
    first, second = made.volume.halves
    tissue = made.volume.pixels > 100
    assert 6 < (first[tissue].astype(float) - second[tissue]).mean() < 20
    assert np.abs((first.astype(float) + second) / 2 - made.volume.pixels)[tissue].mean() < 1.5
    assert not made.volume.half_difference[~(made.volume.band[0] >= 0).any(axis=1)].any()  # padding


def test_halves_of_the_largest_difference() -> None:
    volume = canonicalise(eye(), PREPROCESSING, halves=True).volume
    pixels, difference = np.full(volume.pixels.shape, 128, np.uint8), np.full(volume.pixels.shape, -128, np.int8)
    first, second = replace(volume, pixels=pixels, half_difference=difference).halves
    assert (int(first.max()), int(second.min())) == (0, 255)


def test_a_left_eye_is_mirrored_with_its_halves() -> None:
    right, left = (canonicalise(eye(side), PREPROCESSING, halves=True).volume for side in ("OD", "OS"))
    assert np.array_equal(right.half_difference, left.half_difference[..., ::-1])


def test_b_scans_too_far_apart_have_no_halves() -> None:
    made = canonicalise(replace(eye(), spacing_mm=(0.16, 0.0078, 0.035)), PREPROCESSING, halves=True)  # stored: 0.3
    assert made.volume.half_difference is None
    assert HALVES_NOTE not in made.notes


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    write_cohort(
        folder / "phantom", 2, 5, devices=["zeiss_cirrus"], size="dense", design=CohortDesign(eyes_per_person=1)
    )
    recipe = Recipe.model_validate({"name": "n", "tokens": {"budget": 16}, "train": {"max_updates": 1}})
    build_store([folder / "phantom"], folder / "store", recipe.preprocessing, halves=True)
    build_store([folder / "phantom"], folder / "plain", recipe.preprocessing)
    return folder


def test_a_store_keeps_halves_also_in_shards_and_reads_them_on_request(dense: Path) -> None:
    store, plain = Store.open(dense / "store"), Store.open(dense / "plain")
    assert (store.halves, plain.halves) == (True, False)
    name = store.table["volume_id"][0]
    assert np.array_equal(store.read(name).pixels, plain.read(name).pixels)
    assert store.read(name).half_difference is None
    before = store.read(name, halves=True).half_difference
    assert 1 < before.std() < 30
    assert store.damaged() == []
    pack(store, 256)
    assert np.array_equal(Store.open(dense / "store").read(name, halves=True).half_difference, before)
    with pytest.raises(DamagedVolume, match="half_difference"):
        plain.read(name, halves=True)


def test_a_store_made_without_halves_refuses_them(dense: Path) -> None:
    plain = Store.open(dense / "plain")
    with pytest.raises(ContractError, match="made without halves"):
        build_store([dense / "phantom"], dense / "plain", plain.preprocessing, halves=True)
    recipe = Recipe.model_validate({"name": "n", "tokens": {"budget": 16}, "train": {"max_updates": 1}, **HALVES})
    with pytest.raises(UsageError, match="--halves"):
        select_volumes(plain, recipe, "train")
    again = build_store([dense / "phantom"], dense / "store", plain.preprocessing)  # the store knows that it has them
    assert again.skipped == 2
    assert Store.open(dense / "store").halves


def test_volumes_without_halves_are_left_out_and_counted() -> None:
    store = with_halves(small_recipe(**HALVES))
    store.table.loc[3, "notes"] = "blank_frames=2"
    found = select(store, small_recipe().data, "train", halves=True)
    assert len(found.volume_ids) == 11
    assert (found.flow.stages[-1].name, found.flow.stages[-1].lost.volumes) == ("halves", 1)


def with_halves(recipe: Recipe) -> MemoryStore:
    """A store in memory whose halves differ by noise."""
    store = MemoryStore(recipe.preprocessing)
    store.halves = True
    store.table["notes"] = HALVES_NOTE
    rng = np.random.default_rng(0)
    for name, volume in store.volumes.items():
        noise = rng.integers(-9, 10, volume.pixels.shape).astype(np.int8)
        store.volumes[name] = replace(volume, half_difference=noise)
    return store


def test_context_and_target_are_the_two_halves_under_one_transform() -> None:
    recipe = small_recipe(**HALVES)
    volume = next(iter(with_halves(recipe).volumes.values()))
    whole = recipe.with_whole_views
    for epoch in range(8):
        sample, plain = make_sample(volume, recipe, epoch), make_sample(volume, whole, epoch)
        assert np.array_equal(sample.grid_index, plain.grid_index)
        assert np.array_equal(sample.context, plain.context)
        mean = (sample.context_view + sample.target_view) / 2
        bright = plain.context_view > -0.5  # where nothing was clipped
        assert np.allclose(mean[bright], plain.context_view[bright], atol=0.05)
        noise = (sample.context_view - plain.context_view)[bright]
        assert 3 < noise.std() * max(volume.tissue_std, 1) < 8
        assert np.array_equal(make_sample(volume, recipe, epoch).context_view, sample.context_view)
    fixed = make_sample(volume, recipe, None)
    assert not np.array_equal(fixed.context_view, fixed.target_view)
    with pytest.raises(ValueError, match="no halves"):
        make_sample(replace(volume, half_difference=None), recipe, 0)


def test_both_halves_are_the_context_in_turn() -> None:
    recipe = small_recipe(**HALVES)
    volume = next(iter(with_halves(recipe).volumes.values()))
    volume = replace(volume, half_difference=np.full(volume.pixels.shape, 5, np.int8))
    signs = {
        bool((make_sample(volume, recipe, epoch).context_view > make_sample(volume, recipe, epoch).target_view).any())
        for epoch in range(12)
    }
    assert signs == {True, False}


def test_loaders_read_halves() -> None:
    recipe = small_recipe(**HALVES)
    store = with_halves(recipe)
    names = list(store.volumes)
    for sample in (TrainingDataset(store, recipe, names)[0].sample, ValidationDataset(store, recipe, names)[0].sample):
        assert not np.array_equal(sample.context_view, sample.target_view)


def test_an_objective_of_halves_needs_them_and_fine_tuning_has_none() -> None:
    with pytest.raises(RecipeError, match=r"views\.halves=true"):
        VJEPA3D.from_recipe(small_recipe(objective={"name": "noise2noise"}))
    with pytest.raises(ValueError, match="whole volumes"):
        FinetuneRecipe.model_validate({"name": "f", "target": "x", "views": {"halves": True}})
