"""Tuning on labelled people: who is drawn, what is left out, and that a lesion that can be seen is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from benchmarks.exam import tuning_loop
from benchmarks.exam import tuning_segmentation as segmentation
from benchmarks.exam.results import Finding, LeftOut
from benchmarks.exam.truth import COLUMNS
from benchmarks.exam.tuning import frozen, logits, tune, tuning
from benchmarks.exam.tuning_loop import draw_people, training_recipe
from benchmarks.exam.tuning_segmentation import (
    _BITS,
    THRESHOLDS,
    LabelledEyes,
    Segmenter,
    Start,
    counts_of,
    dice_by_threshold,
    tuning_segmentation,
)

from examined_eyes import eye_table
from octjepa.encoders import PretrainedEncoder
from octjepa.model import VJEPA3D
from octjepa.phantom import LESIONS
from octjepa.recipe import Recipe
from octjepa.tasks.segment.linear import patch_cells
from octjepa.views.intensity import lookup_table
from octjepa.views.loader import LoadedSample
from octjepa.views.sample import view_transform
from synthetic import MemoryStore, small_recipe

RECIPE = small_recipe(model={"width": 32, "depth": 1, "heads": 2})


class Eyes:
    """What tuning asks of a cohort: every second eye has a bright spot, which is every lesion."""

    name, truth_folder = "main", Path()  # the folder is of each test

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

    @property
    def table(self) -> pd.DataFrame:
        return eye_table(self.ids, self.people.tolist(), self.splits.tolist())

    @property
    def uses(self) -> Path:
        return self.truth_folder.parent.parent / "uses"

    def indices(self, split: str) -> np.ndarray:
        return np.flatnonzero(self.splits == split)


@pytest.fixture(autouse=True)
def _folder_of_the_truth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Eyes, "truth_folder", tmp_path / "main" / "truth")


def encoder(recipe: Recipe = RECIPE) -> PretrainedEncoder:
    torch.manual_seed(0)
    return PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, "small")


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_lesions_are_segmented_where_they_are_and_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    eyes: Any = Eyes()
    monkeypatch.setattr(tuning_loop, "MIN_POSITIVES", 5)
    monkeypatch.setattr(segmentation, "lesion_labels", spots)
    found = list(tuning_segmentation(eyes, encoder(), 0, counts=(10, 30), updates=40))
    figures = {(one.metric, one.labels): one.estimate.value for one in found if isinstance(one, Finding)}
    assert set(figures) == {("dice", 10), *((f"dice_{name}", 10) for name in LESIONS)}
    assert figures["dice", 10] > 0.7
    (left_out,) = (one for one in found if isinstance(one, LeftOut))
    assert "12 training people, 30" in left_out.reason
    again = list(tuning_segmentation(eyes, encoder(), 0, counts=(10,), updates=40))
    assert [one.estimate.value for one in again if isinstance(one, Finding)] == [
        one.estimate.value for one in found if isinstance(one, Finding)
    ]


@pytest.mark.parametrize("flip_fast", [0.0, 1.0])
def test_each_lesion_moves_with_the_view_that_is_cropped_and_mirrored(flip_fast: float) -> None:
    eyes: Any = Eyes()
    recipe = training_recipe(RECIPE, 0, 4)
    recipe = recipe.model_copy(update={"views": recipe.views.model_copy(update={"flip_fast": flip_fast})})
    volume = eyes.store.volumes[eyes.ids[0]]
    volume.pixels[:] = 10
    whole = np.zeros(volume.pixels.shape, np.uint8)
    for lesion in _BITS:  # each another grey and its own columns, about no middle of any axis
        where = slice(1, 4), slice(30, 41), slice(21 + 5 * lesion, 26 + 5 * lesion)
        volume.pixels[where], whole[where] = 100 + 20 * lesion, 1 << lesion
    p, q, r = RECIPE.tokens.patch_size
    mirrored, seen = set(), torch.zeros(len(LESIONS))
    for visit in range(8):
        sample, cells = segmentation._sample_with_lesions(volume, recipe, visit, {volume.volume_id: whole})
        batch = segmentation._collate([LoadedSample(volume.volume_id, (sample, cells))])
        voxels = sample.context_view.reshape(-1, p, q, r)[..., COLUMNS // 2 :: COLUMNS].reshape(len(cells), -1)
        table = lookup_table(volume.tissue_mean, volume.tissue_std)
        for lesion in _BITS:
            expected = torch.from_numpy(np.isclose(voxels, table[100 + 20 * int(lesion)]))
            assert torch.equal(batch.lesions[0, :, int(lesion)].bool(), expected)
        seen += batch.lesions.sum(dim=(0, 1, 3))
        transform = view_transform(volume, recipe, visit)
        mirrored.add((transform.flip_slow, transform.flip_fast))
    assert seen.all()
    assert mirrored == {(False, bool(flip_fast)), (True, bool(flip_fast))}


def test_counts_are_of_each_lesion_and_hold_voxels_that_no_token_covers() -> None:
    eyes: Any = Eyes()
    share, which = float(THRESHOLDS[20]), np.array([0, 1])
    start = Start(torch.zeros(32), torch.ones(32), torch.full((len(LESIONS),), share))
    recipe = small_recipe(model={"width": 32, "depth": 1, "heads": 2}, tokens={"patch_size": [4, 8, 8]})
    model = encoder(recipe)
    network = Segmenter(model, start)  # before its first update it gives every voxel this probability
    d, h, w = RECIPE.preprocessing.image_size
    rng = np.random.default_rng(0)
    labels = [rng.integers(0, 2 ** len(LESIONS), (d, h, w // COLUMNS)).astype(np.uint8) for _ in which]
    counts = counts_of(network, eyes, LabelledEyes(which, labels))
    for number, volume in enumerate(which):
        tokens = model.select_tokens(eyes.store.volumes[eyes.ids[volume]]).grid_index
        for lesion in _BITS:
            mask = (labels[number] >> lesion) & 1
            inside = patch_cells(mask, recipe.grid, tokens)
            reached = counts[number, :21, lesion]  # the share itself is reached
            assert (reached == [inside.sum(), inside.size, mask.sum()]).all()
            assert (counts[number, 21:, lesion] == [0, 0, mask.sum()]).all()
            assert inside.sum() < mask.sum()


@pytest.mark.slow
def test_a_lesion_that_no_validation_eye_has_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    eyes: Any = Eyes()
    monkeypatch.setattr(segmentation, "lesion_labels", lambda *given: spots(*given) & 3)
    val = LabelledEyes.read(eyes, eyes.indices("val"))
    task = segmentation.SegmentationTask(eyes, eyes.indices("train"), val, training_recipe(RECIPE, 0, 2))
    task.add_learner(Segmenter(encoder(), segmentation.start_of(encoder(), eyes, val)), 1e-4)
    (loss,) = task.validate(task.learners)
    assert loss is not None
    best = dice_by_threshold(task.counts[task.learners[0].name])[:, :2].max(axis=0)
    assert loss == pytest.approx(1 - best.mean())
    none = LabelledEyes(val.volumes, [np.zeros_like(one) for one in val.labels])
    task.val = none
    assert task.validate(task.learners) == [None]
