"""Views are pure functions; what they do to a volume can be said by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from octjepa import keys
from octjepa.canonical.single_bscan import bscan_range
from octjepa.errors import ContractError, UsageError
from octjepa.views import geometry, intensity, tokens
from octjepa.views.loader import (
    LoadedSample,
    TrainingDataset,
    ValidationDataset,
    collate,
    select_volumes,
    training_batches,
    validation_batches,
)
from octjepa.views.sample import make_sample
from synthetic import MemoryStore, small_recipe, volume


def test_a_sample_depends_on_seed_epoch_and_volume_alone():
    recipe = small_recipe()
    one = volume(recipe.preprocessing, 1)
    first, again = make_sample(one, recipe, 3), make_sample(one, recipe, 3)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(make_sample(one, recipe, 4).context_view, first.context_view)
    other_seed = small_recipe(train={"max_updates": 4, "seed": 1})
    assert not np.array_equal(make_sample(one, other_seed, 3).context_view, first.context_view)


def test_a_sample_has_fixed_shapes_and_a_normalised_tissue():
    recipe = small_recipe()
    context, target = recipe.mask_counts
    for number in range(5):
        sample = make_sample(volume(recipe.preprocessing, number), recipe, 0)
        assert sample.context_view.shape == sample.target_view.shape == (24, 1024)
        assert sample.context_view.dtype == np.float32
        assert (len(sample.context), len(sample.target)) == (context, target)
        inside = sample.target_view[sample.tissue > 0.5]
        assert abs(np.median(inside)) < 0.6  # such patches hold some vitreous too


def test_the_z_score_is_applied_once():
    recipe = small_recipe(views={"crop": False, "flip_slow": 0.0})
    one = volume(recipe.preprocessing, 2)
    sample = make_sample(one, recipe, None)
    d, h, w = recipe.preprocessing.image_size
    a, b, c = recipe.preprocessing.margin
    crop = one.pixels[a : a + d, b : b + h, c : c + w].astype(float)
    expected = (crop - one.tissue_mean) / one.tissue_std
    patches = expected.reshape(2, 4, 4, 16, 4, 16).transpose(0, 2, 4, 1, 3, 5).reshape(32, 1024)
    assert np.allclose(sample.context_view, patches[sample.grid_index], atol=1e-4)


def test_light_neutral_changes_nothing_and_each_part_changes_something():
    patches = np.random.default_rng(0).integers(0, 256, size=(3, 64), dtype=np.uint8)
    rng = keys.generator("light")
    neutral = intensity.apply_intensity(patches, intensity.IntensityAugmentation(), 100.0, 50.0, rng)
    assert np.allclose(neutral, (patches - 100.0) / 50.0, atol=1e-5)
    for one in (
        intensity.IntensityAugmentation(gain=1.2),
        intensity.IntensityAugmentation(gamma=1.2),
        intensity.IntensityAugmentation(speckle=0.2),
    ):
        assert not np.allclose(intensity.apply_intensity(patches, one, 100.0, 50.0, rng), neutral, atol=1e-2)
    noise = intensity.apply_intensity(
        np.full((4, 4096), 100, np.uint8), intensity.IntensityAugmentation(speckle=0.2), 100.0, 50.0, rng
    )
    assert noise.std() == pytest.approx(0.2, rel=0.05)
    assert abs(noise.mean()) < 0.01


def test_blur_is_the_binomial_filter_within_each_patch():
    patches = np.zeros((2, 1, 5, 5), dtype=np.uint8)
    patches[0, 0, 2, 2] = 160
    patches[1, 0, 0, 0] = 160
    blurred = intensity.blur(patches.reshape(2, 25), (1, 5, 5)).reshape(2, 5, 5)
    assert blurred[0, 1:4, 1:4].tolist() == [[10, 20, 10], [20, 40, 20], [10, 20, 10]]
    assert blurred[0, 0].sum() == 0
    assert blurred[1, :2, :2].tolist() == [[160, 40], [40, 10]]


def test_cut_and_share_agree_with_loops():
    rng = np.random.default_rng(0)
    view = rng.integers(0, 256, size=(4, 32, 48), dtype=np.uint8)
    mask = view > 128
    patch = (2, 16, 16)
    every = np.arange(2 * 2 * 3)
    patches, share = tokens.extract_patches(view, patch, every), tokens.tissue_share(mask, patch)
    for number in every:
        d, h, w = np.unravel_index(number, (2, 2, 3))
        box = (slice(2 * d, 2 * d + 2), slice(16 * h, 16 * h + 16), slice(16 * w, 16 * w + 16))
        assert np.array_equal(patches[number], view[box].ravel())
        assert share[number] == pytest.approx(mask[box].mean())


@pytest.mark.parametrize("patch", [(4, 16, 16), (2, 8, 4), (1, 4, 8)])
def test_the_share_of_a_band_is_that_of_its_mask_to_the_bit(patch):
    recipe = small_recipe(views={"flip_slow": 0.5, "flip_fast": 0.5})
    preprocessing, rng = recipe.preprocessing, np.random.default_rng(0)
    one = volume(preprocessing, 3)
    band = one.band.copy()
    band[:, rng.random(band.shape[1:]) < 0.2] = -1  # no tissue
    band[1, 0] = one.pixels.shape[1] + 5  # out of the volume
    band[0, 1] = 0
    for _ in range(8):
        shape, size = geometry.sample_transform(preprocessing, recipe.views, rng), preprocessing.image_size
        mask = geometry.tissue_mask(band, shape, one.pixels.shape[1], size)
        found = tokens.tissue_share_of_band(geometry.band_in_view(band, shape, size), patch, size[1])
        assert found.dtype == np.float32
        assert np.array_equal(found, tokens.tissue_share(mask, patch))
    with pytest.raises(ValueError, match="tissue_mask"):
        geometry.band_in_view(band, geometry.ViewTransform((0, 0, 0), zoom=1.1), size)


def test_tissue_comes_first_and_the_rest_by_chance():
    share = np.zeros(40, dtype=np.float32)
    share[10:20] = 0.9
    picked = [tokens.select(share, 15, keys.generator("pick", n)) for n in range(20)]
    assert all(set(range(10, 20)) <= set(one) and len(one) == 15 for one in picked)
    assert len({tuple(one) for one in picked}) > 1
    reserved = tokens.select(share, 8, keys.generator("pick", 0), background=3)
    assert ((reserved < 10) | (reserved >= 20)).sum() == 3
    assert len(set(reserved)) == 8


def test_more_tissue_than_tokens_leaves_no_position_out_every_time():
    """Taken in raster order, or by share, the last B-scans of every eye would never be seen."""
    share = np.ones(40, dtype=np.float32)
    seen = np.zeros(40)
    for number in range(400):
        seen[tokens.select(share, 20, keys.generator("pick", number))] += 1
    assert abs(seen / seen.mean() - 1).max() < 0.25


def test_positions_in_millimetres_follow_the_spacing():
    index = np.array([0, 31])
    positions = tokens.positions(index, (2, 4, 4), (4, 16, 16), (0.4, 0.01, 0.05), "mm")
    assert np.allclose(positions, [[0.8, 0.08, 0.4], [2.4, 0.56, 2.8]])
    assert tokens.positions(index, (2, 4, 4), (4, 16, 16), (0.4, 0.01, 0.05), "index").tolist() == [
        [0, 0, 0],
        [1, 3, 3],
    ]


def test_a_crop_is_inside_the_margin_and_the_depth_is_never_flipped():
    recipe = small_recipe(views={"flip_slow": 1.0, "flip_fast": 1.0})
    ramp = np.zeros(recipe.preprocessing.stored_size, dtype=np.uint8)
    ramp += np.arange(72, dtype=np.uint8)[None, :, None]
    corners = set()
    for number in range(50):
        shape = geometry.sample_transform(recipe.preprocessing, recipe.views, keys.generator(number))
        corners.add(shape.corner)
        view = geometry.apply_transform(ramp, shape, recipe.preprocessing.image_size)
        assert (np.diff(view[0, :, 0].astype(int)) > 0).all()
    assert {c[0] for c in corners} == {0}
    assert {c[1] for c in corners} == set(range(9))


def test_zoom_and_rotation_keep_the_centre():
    view = np.zeros((1, 65, 65), dtype=np.uint8)
    view[0, 30:35, 30:35] = 200
    turned = geometry.apply_transform(
        view, geometry.ViewTransform((0, 0, 0), rotation_degrees=10, zoom=1.2), (1, 65, 65)
    )
    assert turned[0, 32, 32] == 200
    assert turned.astype(int).sum() > view.astype(int).sum()


def test_a_rotation_is_one_of_the_eye_and_not_of_the_voxels():
    preprocessing = small_recipe().preprocessing  # 64 x 64 voxels of 0.016 x 0.1 mm in depth and along columns
    (_, rows, columns), (_, row_mm, column_mm) = preprocessing.image_size, preprocessing.target_spacing_mm
    views = small_recipe(views={"rotation_degrees": 5.0, "crop": False, "flip_slow": 0.0}).views
    transform = geometry.sample_transform(preprocessing, views, keys.generator(1))
    assert abs(transform.rotation_degrees) > 1
    picture = np.zeros((1, rows, columns), dtype=np.uint8)
    picture[0, rows // 2 - 2 : rows // 2 + 2] = 200  # a layer
    turned = geometry.apply_transform(picture, dataclasses.replace(transform, corner=(0, 0, 0)), (1, rows, columns))[
        0
    ].astype(float)
    middle = slice(columns // 2 - 8, columns // 2 + 8)  # there the layer stays inside the view
    depth = (turned * np.arange(rows)[:, None]).sum(0)[middle] / turned.sum(0)[middle]
    slope = np.polyfit(np.arange(len(depth)), depth, 1)[0] * row_mm / column_mm
    assert abs(np.degrees(np.arctan(slope))) == pytest.approx(abs(transform.rotation_degrees), abs=0.2)


def test_a_single_bscan_has_as_many_tokens_in_every_crop():
    recipe = small_recipe(preprocessing={"margin": [2, 4, 4]}, data={"patterns": ["line"]})
    slots = bscan_range(recipe.preprocessing, recipe.tokens.patch_size[0])
    samples = []
    for number in range(6):
        one = volume(recipe.preprocessing, number)
        band = np.full_like(one.band, -1)
        band[:, slots] = one.band[:, slots]
        single = dataclasses.replace(one, band=band, bscan_slices=recipe.tokens.patch_size[0])
        samples.append(LoadedSample(one.volume_id, make_sample(single, recipe, 0)))
    assert collate(samples).grid_index.shape == (6, recipe.token_count // recipe.grid[0])


def test_every_epoch_shows_every_volume_once_and_updates_resume_anywhere():
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing)
    ids = select_volumes(store, recipe, "train").volume_ids
    stream = TrainingDataset(store, recipe, ids)
    epochs = [[stream.volume_at(p)[1] for p in range(e * 12, e * 12 + 12)] for e in range(3)]
    assert all(sorted(epoch) == ids for epoch in epochs)
    assert epochs[0] != epochs[1]
    whole = [batch.volume_ids for batch in training_batches(stream, 0, 6, 0)]
    assert [batch.volume_ids for batch in training_batches(stream, 2, 6, 0)] == whole[2:]
    assert all(len(ids) == 4 for ids in whole)


def test_loader_processes_change_nothing():
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing)
    stream = TrainingDataset(store, recipe, select_volumes(store, recipe, "train").volume_ids)
    for a, b in zip(training_batches(stream, 0, 3, 0), training_batches(stream, 0, 3, 2), strict=True):
        assert a.volume_ids == b.volume_ids
        assert all(torch.equal(x, y) for x, y in zip(a[:7], b[:7], strict=True))


def test_validation_batches_show_every_sample_once():
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing)
    samples = ValidationDataset(store, recipe, select_volumes(store, recipe, "val").volume_ids)
    sizes = [len(batch.volume_ids) for batch in validation_batches(samples, 3)]
    assert sizes == [3, 3, 2]


@pytest.mark.parametrize("gain", [0.0, 0.3])
def test_views_that_are_one_are_copied_once(gain):
    recipe = small_recipe(views={"gain": gain})
    store = MemoryStore(recipe.preprocessing)
    stream = TrainingDataset(store, recipe, sorted(store.volumes))
    batch = collate([stream[i] for i in range(4)])
    assert (batch.target_view is batch.context_view) == (gain == 0)
    for number in range(4):
        assert np.array_equal(batch.target_view[number], stream[number].sample.target_view)


def test_micro_batches_are_slices():
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing)
    stream = TrainingDataset(store, recipe, select_volumes(store, recipe, "train").volume_ids)
    whole = collate([stream[i] for i in range(4)])
    assert whole.micro_batch(1, 3).volume_ids == whole.volume_ids[1:3]
    assert torch.equal(whole.micro_batch(1, 3).target, whole.target[1:3])


def test_choice_by_device_and_limit():
    recipe = small_recipe(data={"strategy": "single_domain", "device": "zeiss_cirrus"})
    store = MemoryStore(recipe.preprocessing)
    table = store.table.set_index("volume_id")
    chosen = select_volumes(store, recipe, "train").volume_ids
    assert len(chosen) == 6
    assert set(table.loc[chosen, "device"]) == {"zeiss_cirrus"}
    limited = small_recipe(data={"max_samples": 5})
    assert len(select_volumes(store, limited, "train").volume_ids) == 5
    absent = small_recipe(data={"strategy": "single_domain", "device": "topcon_maestro2"})
    with pytest.raises(UsageError, match="the store has no device topcon_maestro2; it holds topcon_triton"):
        select_volumes(store, absent, "train")


def test_only_raster_scans_take_part():
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing)
    store.table.loc[0, "pattern"] = "radial"
    assert "volume0000" not in select_volumes(store, recipe, "train").volume_ids


def test_another_contract_is_refused_by_field():
    recipe = small_recipe()
    store = MemoryStore(small_recipe(preprocessing={"orientation": "native"}).preprocessing)
    store.preprocessing = recipe.preprocessing.model_copy(update={"orientation": "native"})
    with pytest.raises(ContractError, match="orientation: store native, recipe OD"):
        select_volumes(store, recipe, "train")
