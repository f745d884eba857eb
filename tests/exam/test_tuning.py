"""Tuning on labelled people: who is drawn, what is left out, and that a lesion that can be seen is learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.exam import tuning_loop
from benchmarks.exam import tuning_segmentation as segmentation
from benchmarks.exam.results import Finding, LeftOut
from benchmarks.exam.truth import COLUMNS
from benchmarks.exam.tuning import frozen, logits, tune, tuning
from benchmarks.exam.tuning_loop import draw_people, training_recipe
from benchmarks.exam.tuning_segmentation import bits, counts_of, dice_by_threshold, tuning_segmentation

from octjepa.checkpoint import PretrainedEncoder
from octjepa.model import VJEPA3D
from octjepa.phantom import LESIONS
from octjepa.views import geometry
from octjepa.views.loader import LoadedSample
from synthetic import MemoryStore, small_recipe

RECIPE = small_recipe(model={"width": 32, "depth": 1, "heads": 2})


class Eyes:
    """What tuning asks of a cohort: every second eye has a bright spot, which is every lesion."""

    def __init__(self, train: int = 12, val: int = 8, test: int = 24) -> None:
        count = train + val + test
        self.store = MemoryStore(RECIPE.preprocessing, train, val + test)
        self.ids = list(self.store.volumes)
        self.people = np.array([f"p{number:03d}" for number in range(count)])
        self.splits = np.array(["train"] * train + ["val"] * val + ["test"] * test)
        self.lesions = np.repeat((np.arange(count) % 2 == 0)[:, None], len(LESIONS), axis=1)
        for number, name in enumerate(self.ids):
            if self.lesions[number, 0]:
                volume = self.store.volumes[name]
                volume.pixels[2:6, 30:45, 20:50] = 255

    def indices(self, split: str) -> np.ndarray:
        return np.flatnonzero(self.splits == split)


def encoder() -> PretrainedEncoder:
    torch.manual_seed(0)
    return PretrainedEncoder(VJEPA3D.from_recipe(RECIPE).target_encoder, RECIPE, "small")


def test_people_are_nested_and_every_lesion_has_its_share() -> None:
    has = np.zeros((60, 3), bool)
    has[:4, 0], has[4:20, 1], has[20:30, 2] = True, True, True
    small, large = (draw_people(np.arange(100, 160), has, count, 0) for count in (10, 40))
    assert set(small) <= set(large)
    assert len(set(large.tolist())) == 40
    assert has[small - 100].sum(axis=0).min() >= 2
    assert has[large - 100].sum(axis=0)[0] == 4
    assert draw_people(np.arange(100, 160), has, 10, 1).tolist() != small.tolist()
    assert len(draw_people(np.arange(60), has, 100, 0)) == 60


def test_views_of_training_hold_a_share_of_the_tokens_and_the_light_of_the_package() -> None:
    recipe = training_recipe(RECIPE, 3, 7)
    assert recipe.token_count == 9
    assert (recipe.train.max_updates, recipe.train.seed, recipe.train.precision) == (7, 3, "fp32")


def test_a_visible_lesion_is_learned_and_the_given_encoder_stays() -> None:
    eyes: Any = Eyes()
    given = encoder()
    before = {name: value.clone() for name, value in given.encoder.state_dict().items()}
    network = tune(eyes, given, eyes.indices("train"), eyes.indices("val"), 0, updates=12)
    test = eyes.indices("test")
    scores, has = logits(network, eyes, test)[:, 0], eyes.lesions[test, 0]
    assert scores[has].min() > scores[~has].max()
    assert all(torch.equal(value, before[name]) for name, value in given.encoder.state_dict().items())
    assert any(not torch.equal(v, before[n]) for n, v in network.pretrained.encoder.state_dict().items())


def test_figures_have_their_number_of_people_and_too_few_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    eyes: Any = Eyes()
    eyes.lesions[:, 1] = False
    monkeypatch.setattr(tuning_loop, "MIN_POSITIVES", 5)
    found = list(tuning(eyes, encoder(), 0, counts=(10, 30), updates=2))
    figures = {(one.metric, one.labels) for one in found if isinstance(one, Finding)}
    assert figures == {(f"auroc_{name}", 10) for number, name in enumerate(LESIONS) if number != 1}
    left_out = {(one.metric, one.labels): one.reason for one in found if isinstance(one, LeftOut)}
    assert left_out[f"auroc_{LESIONS[1]}", 10].startswith("0 of 10 labelled and 0 of 24 test people")
    assert "12 training people, 30" in left_out["auroc", 30]
    assert left_out["auroc", 10].endswith(f"needs {LESIONS[1]}, left out here")  # four lesions are not all
    assert len(left_out) == 3
    eyes.lesions[:, 1] = eyes.lesions[:, 0]
    assert ("auroc", 10) in {
        (one.metric, one.labels) for one in tuning(eyes, encoder(), 0, (10,), 2) if isinstance(one, Finding)
    }
    monkeypatch.setattr(tuning_loop, "MIN_POSITIVES", 20)
    assert all(isinstance(one, LeftOut) for one in tuning(eyes, encoder(), 0, counts=(10,), updates=2))


def test_the_frozen_row_learns_from_the_people_of_the_tuning_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_loop, "MIN_POSITIVES", 5)
    eyes: Any = Eyes(train=40)
    labelled = draw_people(eyes.indices("train"), eyes.lesions[eyes.indices("train")], 10, 5)
    features = np.where(eyes.lesions[:, :1], 1.0, -1.0)  # of the others they say the opposite
    features[np.setdiff1d(eyes.indices("train"), labelled)] *= -1
    found = {(one.metric, one.labels): one for one in frozen(eyes, features, 5, counts=(10, 100))}
    assert isinstance(one := found["auroc", 10], Finding)
    assert one.estimate.value == 1.0
    assert isinstance(found["auroc", 100], LeftOut)


SPOT = 255  # the stored value that is every lesion


def spots(cohort: Any, index: int, corner: Any, size: Any, step: int = 1) -> np.ndarray:
    """As `lesion_labels`, of a cohort of `Eyes`; the sampled column is that of `coarsen_columns`."""
    pixels = cohort.store.volumes[cohort.ids[index]].pixels
    view = pixels[tuple(slice(start, start + count) for start, count in zip(corner, size, strict=True))]
    return np.where(view[..., step // 2 :: step] == SPOT, 2 ** len(LESIONS) - 1, 0).astype(np.uint8)


def test_lesions_are_segmented_where_they_are_and_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    eyes: Any = Eyes()
    monkeypatch.setattr(tuning_loop, "MIN_POSITIVES", 5)
    monkeypatch.setattr(segmentation, "lesion_labels", spots)
    found = list(tuning_segmentation(eyes, encoder(), 0, counts=(10, 30), updates=40))
    figures = {(one.metric, one.labels): one.estimate.value for one in found if isinstance(one, Finding)}
    assert set(figures) == {("dice", 10), *((f"dice_{name}", 10) for name in LESIONS)}
    assert figures["dice", 10] > 0.6
    (left_out,) = (one for one in found if isinstance(one, LeftOut))
    assert "12 training people, 30" in left_out.reason
    again = list(tuning_segmentation(eyes, encoder(), 0, counts=(10,), updates=40))
    assert [one.estimate.value for one in again if isinstance(one, Finding)] == [
        one.estimate.value for one in found if isinstance(one, Finding)
    ]


def test_lesions_move_with_the_view_that_is_cropped_and_mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    eyes: Any = Eyes()
    recipe = training_recipe(RECIPE, 0, 4)
    volume = eyes.store.volumes[eyes.ids[0]]
    whole = spots(eyes, 0, (0, 0, 0), volume.pixels.shape)
    p, q, r = RECIPE.tokens.patch_size
    transforms = set()
    for visit in range(6):
        sample, cells = segmentation._sample_with_lesions(volume, recipe, visit, {volume.volume_id: whole})
        batch = segmentation._collate([LoadedSample(volume.volume_id, (sample, cells))])
        voxels = sample.context_view.reshape(-1, p, q, r)[..., COLUMNS // 2 :: COLUMNS]
        bright = voxels >= sample.context_view.max() - 1e-4
        if whole.any() and bright.any():
            expected = torch.from_numpy(bright.reshape(len(bright), 1, -1)).expand(-1, len(LESIONS), -1)
            assert torch.equal(batch.lesions[0].bool(), expected)
        transforms.add(segmentation.draw_sample(volume, recipe, visit).transform)
    assert len(transforms) > 1


def test_counts_hold_voxels_that_no_token_covers_and_thresholds_are_inclusive() -> None:
    eyes: Any = Eyes()
    network = segmentation.Segmenter(encoder(), np.full(len(LESIONS), 0.25))
    cohort, which = eyes, np.array([0, 1])
    truth = [spots(eyes, one, RECIPE.preprocessing.margin, RECIPE.preprocessing.image_size, COLUMNS) for one in which]
    counts = counts_of(network, cohort, which, truth)
    assert (counts[..., 2] == np.array([bits(one).sum(axis=(0, 1, 2)) for one in truth])[:, None]).all()
    low, high = (segmentation.THRESHOLDS <= 0.25), (segmentation.THRESHOLDS > 0.25)  # every voxel has 0.25 at first
    selected = [len(encoder().select_tokens(eyes.store.volumes[eyes.ids[one]]).grid_index) for one in which]
    assert (counts[..., 1][:, low] == np.array(selected)[:, None, None] * network.cells).all()
    assert not counts[..., :2][:, high].any()
    table = dice_by_threshold(counts)
    assert table.shape == (len(segmentation.THRESHOLDS), len(LESIONS))
    both, found, true = counts[:, 0, 0].sum(axis=0)
    assert table[0, 0] == pytest.approx(2 * both / (found + true))
    assert geometry.center_crop(RECIPE.preprocessing).corner == RECIPE.preprocessing.margin
