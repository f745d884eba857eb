"""What a vendor's labels are worth, and what a threshold does in another hospital."""

from __future__ import annotations

import numpy as np
import pytest

from octjepa.evaluate.subgroups import leave_one_group_out, transfer_thresholds
from octjepa.evaluate.targets import Target
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.scores import Predictions

PEOPLE = 240


def _made() -> tuple[Target, np.ndarray, np.ndarray, np.ndarray]:
    """Truth, sites and a score; site "b" reads 1 brighter. Rows: two eyes of a person, split by person."""
    rng = np.random.default_rng(0)
    volumes = 2 * PEOPLE
    person = np.array([f"{index // 2:03d}" for index in range(volumes)])
    sites = np.array(["a", "b"])[np.arange(volumes) // 2 % 2]
    truth = rng.permutation(np.arange(volumes) % 2)
    score = 1.5 * truth + (sites == "b") + rng.normal(size=volumes)
    split = np.arange(volumes) * 3 // volumes
    rows = {name: np.flatnonzero(split == code) for code, name in enumerate(("train", "val", "test"))}
    values = {name: truth[positions] for name, positions in rows.items()}
    return Target("sick", "binary", rows, values, ("0", "1"), "h", ()), person, sites, score


def test_leave_one_out_fits_without_the_group_and_tests_on_it() -> None:
    target, people, sites, score = _made()
    requested: list[Target] = []

    def fit(held: Target) -> Predictions:
        """Knows where the middle lies at the sites it saw: at the others it guesses."""
        requested.append(held)
        seen = set(sites[held.indices["train"]])
        rows = held.indices["test"]
        known = np.isin(sites[rows], list(seen))
        predicted = np.where(known, score[rows], np.random.default_rng(1).normal(size=len(rows)))
        return Predictions(
            held.values["test"], np.stack([-predicted, predicted], 1), np.stack([-predicted, predicted], 1)
        )

    full = fit(target)
    draws = Draws(people[target.indices["test"]].tolist(), 200, 0)
    found = leave_one_group_out("auroc", target, sites, people, full, fit, draws)
    assert [row.group for row in found.rows] == ["a", "b"]
    for held, row in zip(requested[1:], found.rows, strict=True):
        assert set(sites[held.indices["train"]]) == set(sites[held.indices["val"]]) == {"a", "b"} - {row.group}
        assert set(sites[held.indices["test"]]) == {row.group}
        assert row.drop == pytest.approx(row.with_it - row.without_it)
        assert row.low > 0.1
    assert found.mean_drop.drop == pytest.approx(np.mean([row.drop for row in found.rows]))
    assert found.mean_drop.low > 0.1


def test_an_eye_of_two_vendors_gives_no_label_of_either() -> None:
    target, people, sites, score = _made()
    vendors = np.where(np.arange(len(sites)) // 2 % 5 == 0, "a+b", sites).astype(object)
    trained: dict[str, set[str]] = {}

    def fit(held: Target) -> Predictions:
        (tested,) = set(vendors[held.indices["test"]])
        trained[tested] = set(vendors[held.indices["train"]]) | set(vendors[held.indices["val"]])
        predicted = score[held.indices["test"]]
        return Predictions(
            held.values["test"], np.stack([-predicted, predicted], 1), np.stack([-predicted, predicted], 1)
        )

    at = target.indices["test"]
    full = Predictions(target.values["test"], *[np.stack([-score, score], 1)[at]] * 2)
    draws = Draws(people[at].tolist(), 50, 0)
    found = leave_one_group_out("auroc", target, vendors, people, full, fit, draws)
    assert trained == {"a": {"b"}, "b": {"a"}}
    assert "training label" in found.left_out["a+b"]


def test_a_group_that_cannot_be_left_out_is_named() -> None:
    target, people, sites, score = _made()
    sites = np.array(["only"] * len(sites), dtype="<U5")
    sites[target.indices["test"][:4]] = "few"
    predicted = np.stack([-score, score], 1)[target.indices["test"]]
    draws = Draws(people[target.indices["test"]].tolist(), 50, 0)
    full = Predictions(target.values["test"], predicted, predicted)
    found = leave_one_group_out("auroc", target, sites, people, full, lambda held: pytest.fail("fitted"), draws)
    assert found.rows == ()
    assert found.mean_drop is None
    assert found.left_out["few"].startswith("2 test people")
    assert "training label" in found.left_out["only"]


def test_a_threshold_of_one_site_fails_at_a_brighter_one() -> None:
    target, people, sites, score = _made()
    draws = Draws(people[target.indices["test"]].tolist(), 200, 0)
    val, test = score[target.indices["val"]], score[target.indices["test"]]
    rows = {(row.chosen_at, row.used_at): row for row in transfer_thresholds(target, sites, people, val, test, draws)}
    assert set(rows) == {("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")}
    assert rows["a", "a"].threshold == rows["a", "b"].threshold < rows["b", "b"].threshold
    assert rows["a", "b"].specificity_high < 0.9  # chosen for 0.9
    assert rows["b", "a"].sensitivity < rows["a", "a"].sensitivity - 0.2
    assert rows["a", "a"].specificity_low < 0.9 < rows["a", "a"].specificity_high


def test_a_vendor_whose_test_people_are_all_alike_is_left_out_of_the_mean() -> None:
    target, people, sites, score = _made()
    values = {split: score[rows] for split, rows in target.indices.items()}
    values["test"] = np.where(sites[target.indices["test"]] == "b", 0.0, values["test"])
    target = Target("age", "regression", target.indices, values, (), "h", ())
    full = Predictions(values["test"], *[score[target.indices["test"]][:, None]] * 2)

    def fit(held: Target) -> Predictions:
        return Predictions(held.values["test"], *[score[held.indices["test"]][:, None] + 1] * 2)

    draws = Draws(people[target.indices["test"]].tolist(), 50, 0)
    found = leave_one_group_out("r2", target, sites, people, full, fit, draws)
    assert [row.group for row in found.rows] == ["a"]
    assert found.left_out["b"].startswith("r2 has no value among its ")
    assert np.isfinite(found.mean_drop.drop)
