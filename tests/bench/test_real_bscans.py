"""Lesions and diagnoses in real B-scans: folds by patient group, thresholds, tokens of copies and differences."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.bscan_readouts import by_eye, with_neighbours
from benchmarks.real_bscans import (
    Resampled,
    Tokens,
    best_threshold,
    compare,
    counted_groups,
    dice,
    held_out_scores,
    mean_of,
    pooled,
    resample,
    resampled_groups,
    retained_rows,
    tokens_of,
)

from octjepa.encoders.pooling import TokenFeatures


def test_the_threshold_with_the_best_dice() -> None:
    scores = np.array([0.9, 0.8, 0.7, 0.2, 0.1])
    truth = np.array([True, True, False, True, False])
    chosen = best_threshold(scores, truth)
    every = [dice(scores >= threshold, truth) for threshold in scores]
    assert dice(scores >= chosen, truth) == max(every)


@pytest.mark.slow
def test_a_feature_that_names_the_patients_helps_nobody() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 30)
    ill = rng.random(20) < 0.5
    truth = ill[groups]
    names = np.eye(20, dtype=np.float32)[groups] + rng.normal(0, 0.01, (600, 20)).astype(np.float32)
    sign = (truth + rng.normal(0, 0.3, 600)).astype(np.float32)[:, None]
    by_name, _ = held_out_scores(names, truth, groups, 10)
    by_sign, marked = held_out_scores(sign, truth, groups, 1)
    rows = {"names": (by_name, by_name > 0), "sign": (by_sign, marked), "random_init": (rng.normal(size=600), marked)}
    found = compare(resample(rows, truth, resampled_groups(groups), "auroc"), 20, "auroc")
    assert found["names"]["auroc"]["value"] < 0.65
    assert found["sign"]["auroc"]["value"] > 0.95
    difference = found["sign"]["less_random_init"]
    assert 0.2 < difference["low"] < difference["value"] < difference["high"]


def test_tokens_have_their_position_within_a_slice_and_their_b_scan() -> None:
    class _Frame:
        volume = None

    def featurise(volumes):  # type: ignore[no-untyped-def]
        index = np.array([8 + 1, 8 + 3])  # in slice 2 of a grid of 2 x 2 positions
        features = np.array([[2.0], [7.0]], np.float32)
        return [TokenFeatures(features, index, (4, 2, 2), np.ones(2, np.float32)) for _ in volumes]

    tokens = tokens_of(featurise, [_Frame(), _Frame()], "test")  # type: ignore[list-item]
    assert tokens.index.tolist() == [1, 3, 1, 3]
    assert tokens.features[:, 0].tolist() == [2.0, 7.0, 2.0, 7.0]
    assert tokens.frame.tolist() == [0, 0, 1, 1]


def test_an_eye_is_the_mean_and_the_maximum_of_its_samples() -> None:
    found = pooled(np.array([[1.0], [3.0], [5.0]]), ["b", "b", "a"])
    assert found == pytest.approx(np.array([[5.0, 5.0], [2.0, 3.0]]))


def test_the_mean_is_that_of_the_same_resamples() -> None:
    parts = [{"row": Resampled(np.full(2, value), np.full((3, 2), value))} for value in (0.2, 0.6)]
    parts[1]["row"].drawn[1] = np.nan  # a resample without the second lesion
    found = mean_of(parts)["row"]
    assert found.whole == pytest.approx([0.4, 0.4])
    assert found.drawn[:, 0] == pytest.approx([0.4, np.nan, 0.4], nan_ok=True)


def test_sets_with_other_groups_have_the_same_draws() -> None:
    groups = np.array([1, 1, 2, 3])
    every = resampled_groups(groups)
    some = resampled_groups(groups[:2], among=groups)
    for all_samples, samples in zip(every, some, strict=True):
        assert samples.tolist() == all_samples[all_samples < 2].tolist()
    assert any(len(samples) == 0 for samples in some)


def test_an_interval_counts_the_groups_that_limit_it() -> None:
    groups = np.array([1, 1, 2, 3, 4])
    assert counted_groups(np.array([True, False, False, False, True]), groups) == 2
    assert counted_groups(np.array([True, True, True, True, False]), groups) == 1


def test_rows_are_made_once(tmp_path) -> None:  # type: ignore[no-untyped-def]
    tokens = Tokens(np.ones((2, 3), np.float32), np.array([4, 5]), np.array([0, 0]))
    retained_rows(tmp_path, ["row"], lambda: [tokens])
    again = retained_rows(tmp_path, ["row"], lambda: pytest.fail("made twice"))["row"]
    assert (again.features == tokens.features).all()
    assert again.index.tolist() == [4, 5]


def test_neighbours_are_the_tokens_around_one_in_its_b_scan() -> None:
    features = np.array([[1.0], [2.0], [6.0], [9.0]], np.float32)
    tokens = Tokens(features, np.array([0, 1, 5, 0]), np.array([0, 0, 0, 1]))  # a grid of 2 x 3
    found = with_neighbours(tokens, (2, 3)).features
    assert found[:, 0].tolist() == [1.0, 2.0, 6.0, 9.0]
    assert found[:, 1] == pytest.approx([1.5, 3.0, 4.0, 9.0])


def test_features_of_an_eye_have_mean_0_and_spread_1() -> None:
    class _Named:
        def __init__(self, name: str) -> None:
            self.eye = self
            self.name = name

    features = np.array([[1.0], [3.0], [10.0], [30.0]], np.float32)
    tokens = Tokens(features, np.arange(4), np.array([0, 0, 1, 1]))
    found = by_eye(tokens, [_Named("a"), _Named("b")]).features  # type: ignore[list-item]
    assert found[:, 0] == pytest.approx([-1, 1, -1, 1])
