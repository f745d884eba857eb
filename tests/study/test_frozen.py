"""Rows read from frozen vectors, against features whose answer is known."""

from __future__ import annotations

import numpy as np
from benchmarks.study.frozen import (
    auroc_within,
    few,
    lesion_scores,
    say_all,
    say_few_labels,
    say_lesions,
    say_vendor_left_out,
)

from invented_eyes import Said, bench, invented


def test_the_answer_itself_reads_as_one_and_noise_as_chance(said: Said) -> None:
    eyes = invented(people=80)
    rng = np.random.default_rng(1)
    names = np.unique(eyes.devices)
    told = np.concatenate([eyes.labels, eyes.devices[:, None] == names, eyes.fovea_mm], axis=1).astype(float)
    say_all(bench(eyes, said), {"mean_std_max": told + rng.normal(0, 0.01, told.shape)})
    for metric in ("lesion_auroc_macro", "lesion_auroc_macro_val", "lesion_auroc_drusen", "few_label_auroc_10"):
        assert said[metric][0] > 0.97, metric
    assert said["vendor_accuracy"][0] == 1
    assert said["fovea_error_mm"][0] < 0.05
    assert said["fovea_r2"][0] > 0.95
    assert abs(said["leave_vendor_out_drop"][0]) < 0.03
    noise = Said()
    say_all(bench(eyes, noise), {"mean_std_max": rng.normal(size=told.shape)})
    assert 0.35 < noise["lesion_auroc_macro"][0] < 0.65
    assert noise["vendor_accuracy"][0] < 0.45
    assert noise["fovea_error_mm"][0] > 0.2
    for _, low, high, n in said.values():
        assert n in (len(bench(eyes, Said()).test), len(bench(eyes, Said()).val))
        assert low is None or high is None or low <= high


def test_a_sign_that_turns_with_the_vendor_is_lost_where_the_vendor_has_no_label(said: Said) -> None:
    eyes = invented()
    sign = np.where(eyes.devices == "a", -1.0, 1.0)[:, None] * (2.0 * eyes.labels - 1)
    of_vendor = (eyes.devices == "a")[:, None]
    features = np.concatenate([sign, sign * of_vendor], axis=1)
    one = bench(eyes, said)
    say_vendor_left_out(one, features, lesion_scores(one, features)[0])
    assert said["leave_vendor_out_drop"][0] > 0.2  # all of vendor a, a quarter of the mean


def test_within_a_vendor_its_share_of_lesions_plays_no_part(said: Said) -> None:
    """All that is known is the vendor, and the vendors' shares of training and test people are each other's reverse."""
    eyes = invented(people=120)
    of_vendor = eyes.devices == "a"
    for split, inside in (("train", True), ("test", False)):
        here = eyes.rows(split)
        eyes.labels[here, 0] = (of_vendor[here] == inside) & (np.arange(len(here)) % 8 < 6) | (
            np.arange(len(here)) % 8 == 7
        )
    one = bench(eyes, said)
    say_lesions(one, *lesion_scores(one, of_vendor[:, None].astype(float)))
    assert said["lesion_auroc_drusen"][0] < 0.35
    assert said["lesion_auroc_drusen_within_vendor"][0] == 0.5
    answer = Said()
    one = bench(eyes, answer)
    say_lesions(one, *lesion_scores(one, eyes.labels + 3.0 * of_vendor[:, None]))
    assert answer["lesion_auroc_drusen_within_vendor"][0] > 0.97
    assert answer["lesion_auroc_macro_within_vendor"][0] > 0.97


def test_pairs_within_groups_by_hand() -> None:
    truth = np.array([True, False, False, True, True, False])
    scores = np.array([0.9, 0.1, 0.95, 0.2, 0.4, 0.3])
    groups = np.array(["a", "a", "a", "b", "b", "b"])
    found = auroc_within(truth, scores, groups, np.ones((6, 1)))
    assert found.tolist() == [(1 + 1) / 4]  # a: one of two pairs, b: one of two
    weights = np.array([[1.0], [1.0], [1.0], [0.0], [0.0], [1.0]])  # nobody of b has the lesion in this resample
    assert auroc_within(truth, scores, groups, weights).tolist() == [0.5]


def test_nothing_told_is_one_half_everywhere(said: Said) -> None:
    eyes = invented()
    one = bench(eyes, said)
    say_lesions(one, *lesion_scores(one, np.ones((len(eyes.ids), 1))))
    assert said["lesion_auroc_macro"][:3] == (0.5, None, None)


def test_a_lesion_of_one_class_is_left_out_and_too_few_people_are_no_figure(said: Said) -> None:
    eyes = invented(people=40)
    eyes.labels[:, 1] = False
    one = bench(eyes, said)
    assert one.lesions() == [0, 2, 3, 4]
    say_few_labels(one, eyes.labels.astype(float), sizes=(10, 100))
    assert said["few_label_auroc_10"][0] > 0.9
    assert np.isnan(said["few_label_auroc_100"][0])


def test_few_people_are_training_people_half_of_them_with_the_lesion(said: Said) -> None:
    one = bench(invented(), said)
    rows = few(one, 0, 10, 0)
    assert rows is not None
    assert set(rows) <= set(one.train)
    people = one.eyes.people[rows]
    assert len(set(people)) == 10
    assert len(set(people[one.eyes.labels[rows, 0]])) == 5
    assert not np.array_equal(rows, few(one, 0, 10, 1))
