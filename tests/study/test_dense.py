"""Dice by a linear head on tokens, against tokens that hold the answer, half of it, or nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from benchmarks.study.cohort import REGIONS, UNSEEN, Eyes
from benchmarks.study.dense import THRESHOLDS, curve, say_dense, say_place_prior
from benchmarks.study.features import Tokens
from benchmarks.study.frozen import Bench

from invented_eyes import Said, invented
from octjepa.phantom import LESIONS
from octjepa.tasks.segment import linear
from octjepa.tasks.segment.dice import dice
from octjepa.tasks.segment.linear import patch_cells, with_intercept

GRID = (1, 2, 2)
SHAPE = (1, 4, 4)  # places: a patch is 1 x 2 x 2 of them


def test_dice_is_over_all_volumes_together_and_weighs_resamples() -> None:
    counts = np.array([[[2.0, 4, 2]], [[0, 0, 2]], [[0, 0, 0]]])
    assert dice(counts) == pytest.approx(2 * 2 / (4 + 4))
    assert dice(counts, np.array([[1.0], [0], [0]])) == pytest.approx(4 / 6)
    assert np.isnan(dice(counts, np.array([[0.0], [0], [5]]))).all()


def test_curve_counts_what_reaches_each_threshold() -> None:
    scores = np.array([THRESHOLDS[0], THRESHOLDS[3], 1.0, -np.inf])
    found = curve(scores, np.array([True, False, True, True]))
    assert found[0].tolist() == [2, 3, 3]
    assert found[3].tolist() == [1, 2, 3]
    assert found[-1].tolist() == [1, 1, 3]


def test_cells_are_the_places_of_a_patch() -> None:
    volume = np.arange(16, dtype=np.uint8).reshape(SHAPE)
    assert patch_cells(volume, GRID, np.array([1, 2])).tolist() == [[2, 3, 6, 7], [8, 9, 12, 13]]


def test_the_head_is_ridge_regression_on_standardised_features() -> None:
    from sklearn.linear_model import Ridge

    rng = np.random.default_rng(0)
    x, y = rng.normal(3, [0.1, 5, 1], (200, 3)), rng.normal(size=(200, 2))
    head = linear.Ridge(3, 2)
    head.add(x[:50], y[:50])
    head.add(x[50:], y[50:])
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    known = Ridge(alpha=0.1 * 200).fit(z, y).predict(z)
    assert with_intercept(x) @ head.weights(0.1) == pytest.approx(known, abs=1e-6)


class Drawn(Eyes):
    """Eyes whose coarse truth is drawn: each place is one of the regions, one lesion where the region is 1."""

    def coarse_truth(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(place)
        regions = rng.integers(0, len(REGIONS), SHAPE).astype(np.uint8)
        lesions = (regions == 1).astype(np.uint8) * (1 << LESIONS.index("drusen"))
        if place % 5 == 0:
            regions[0, 0, 0] = UNSEEN
        return regions, lesions * bool(self.labels[place, 0])


def drawn(said: Said) -> Bench:
    eyes = invented(people=60)
    given = {one.name: getattr(eyes, one.name) for one in dataclasses.fields(eyes)}
    return Bench(Drawn(**given), said, 50)


def tokens_of(bench: Bench, index: list[int], noise: bool = False) -> list[Tokens]:
    """Tokens that hold their places' regions (and whether the eye has the lesion), one-hot; or noise."""
    found = []
    for place in range(len(bench.eyes.ids)):
        regions = patch_cells(bench.eyes.coarse_truth(place)[0], GRID, np.array(index))
        hot = (regions[..., None] == np.arange(len(REGIONS))).reshape(len(index), -1)
        sick = hot & bool(bench.eyes.labels[place, 0])
        told = np.concatenate([hot, sick], axis=1).astype(np.float16)
        rng = np.random.default_rng(place)
        found.append(Tokens(rng.normal(size=told.shape) if noise else told, np.array(index)))
    return found


def test_tokens_that_hold_the_answer_read_as_one_and_lost_places_are_lost(said: Said) -> None:
    bench = drawn(said)
    say_dense(bench, tokens_of(bench, [0, 1, 2, 3]), GRID)
    assert said["layer_dice"][0] == pytest.approx(1.0)
    assert said["lesion_dice_drusen"][0] == pytest.approx(1.0)
    half = Said()
    bench.say = half
    say_dense(bench, tokens_of(bench, [0, 3]), GRID)
    assert 0.45 < half["layer_dice"][0] < 0.75  # the other half of the places is guessed
    assert 0.4 < half["lesion_dice_drusen"][0] < 0.8  # precision one, recall about one half
    noise = Said()
    bench.say = noise
    say_dense(bench, tokens_of(bench, [0, 1, 2, 3], noise=True), GRID)
    assert noise["layer_dice"][0] < 0.3
    prior = Said()
    bench.say = prior
    say_place_prior(bench)
    assert prior["layer_dice"][0] < 0.3
