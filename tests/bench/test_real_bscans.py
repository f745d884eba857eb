"""Tasks 5 and 6 on real B-scans: folds by patient group, thresholds, tokens of copies and differences."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.real_bscans import best_threshold, compare, dice, held_out_scores, pooled, tokens_of

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
    found = compare(rows, truth, groups, "auroc")
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
