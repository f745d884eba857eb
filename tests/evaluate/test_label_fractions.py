"""Label fractions: nested, balanced, the same for a seed, and refused where the labels do not suffice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from invented_cohort import probe_with
from octjepa.embed.table import read_embeddings
from octjepa.errors import UsageError
from octjepa.evaluate.calibration import calibrated_predictions, class_shares
from octjepa.evaluate.cases import PreparedTarget
from octjepa.evaluate.features import majority_predictions, plan_selection
from octjepa.evaluate.label_fractions import limit_prepared, limit_target, parse_counts, people_order
from octjepa.evaluate.targets import Target

Cohort = Callable[..., tuple[pd.DataFrame, pd.DataFrame]]


def eyes(people: int, sick: int) -> tuple[Target, np.ndarray]:
    """Two eyes of each person, of whom the first `sick` are diseased in one eye; every fifth person is in val."""
    person_ids = np.repeat([f"p{number:03d}" for number in range(people)], 2)
    truth = np.zeros(2 * people, np.int64)
    truth[0 : 2 * sick : 2] = 1
    everyone = np.arange(2 * people)
    val = everyone // 2 % 5 == 4
    indices = {"train": everyone[~val], "val": everyone[val], "test": everyone[val]}
    values = {split: truth[at] for split, at in indices.items()}
    return Target("sick", "binary", indices, values, ("0", "1"), "h", ()), person_ids


def test_the_draw_is_nested_balanced_and_the_same_for_a_seed() -> None:
    target, person_ids = eyes(50, 10)
    order = people_order(target, person_ids, 0)
    assert len(order) == len(set(order)) == 40
    sick = {f"p{number:03d}" for number in range(10)}
    assert len(sick & set(order[:10])) == 5
    assert sick - {"p004", "p009"} == sick & set(order)  # all who are sick, except for those of val
    assert order == people_order(target, person_ids, 0)
    assert order != people_order(target, person_ids, 1)
    few, more = (limit_target(target, person_ids, count, 0) for count in (10, 30))
    assert set(few.indices["train"]) < set(more.indices["train"])
    assert len(few.indices["train"]) == 20  # both eyes of ten people
    assert len(few.indices["val"]) == len(few.values["val"]) == 0
    assert (few.indices["test"] == target.indices["test"]).all()
    assert few.label_hash == target.label_hash


def test_too_few_people_or_positives_are_refused_with_the_numbers() -> None:
    target, person_ids = eyes(50, 10)
    with pytest.raises(UsageError, match="sick: 41 labelled people were requested, train has 40"):
        limit_target(target, person_ids, 41, 0)
    rare, person_ids = eyes(50, 1)
    with pytest.raises(UsageError, match="of 10 labelled people 1 are of class 1, at least 2 are needed"):
        limit_target(rare, person_ids, 10, 0)


def test_too_few_events_are_refused_with_the_number() -> None:
    target, person_ids = eyes(50, 1)
    years = {split: np.where(values > 0, 2.0, -3.0) for split, values in target.values.items()}
    survival = replace(target, task="survival", classes=(), values=years)
    with pytest.raises(UsageError, match=r"of 10 labelled people [01] had the event, at least 2 are needed"):
        limit_target(survival, person_ids, 10, 0)


def test_cases_have_the_labels_of_the_people_who_were_drawn() -> None:
    volumes, person_ids = eyes(50, 10)
    indices = {split: np.unique(at // 2) for split, at in volumes.indices.items()}
    values = {split: (at < 10).astype(np.int64) for split, at in indices.items()}
    people = replace(volumes, indices=indices, values=values)
    members = [np.array([2 * number, 2 * number + 1]) for number in range(50)]
    prepared = PreparedTarget(volumes, people, plan_selection(volumes, person_ids, 0), members)
    ((limited,), reasons) = limit_prepared([prepared], person_ids, 10, 0)
    assert not reasons
    drawn = set(person_ids[limited.fit_target.indices["train"]])
    assert drawn == {f"p{number:03d}" for number in limited.test_target.indices["train"]}
    assert len(drawn) == 10
    assert len(limited.test_target.indices["val"]) == 0
    assert (limited.test_target.indices["test"] == indices["test"]).all()
    assert majority_predictions(people).scores[0] == pytest.approx([0.8, 0.2])  # 8 of 40 people are sick
    assert majority_predictions(limited.test_target).scores[0] == pytest.approx([0.5, 0.5])
    assert majority_predictions(limited.test_target).calibrated[0] == pytest.approx([0.8, 0.2])


def test_calibrated_probabilities_keep_the_shares_before_the_draw() -> None:
    """Bayes: scores of a finding that half of the drawn people have, at the 8 of 80 training eyes that have it."""
    target, person_ids = eyes(50, 10)
    limited = limit_target(target, person_ids, 10, 0)
    again = limit_target(limited, person_ids, 6, 0)
    assert class_shares(limited) == pytest.approx([0.75, 0.25])  # one of two eyes of half of the people
    balanced = np.tile([0.4, 0.6], (len(target.values["test"]), 1))
    odds = 0.6 / 0.4 * (8 / 80) / (72 / 80)
    for drawn in (target, limited, again):
        calibrated = calibrated_predictions(drawn, balanced, np.zeros(2)).calibrated
        assert calibrated[:, 1] == pytest.approx(odds / (1 + odds))
    quantity = limit_target(replace(target, task="regression", classes=()), person_ids, 10, 0)
    assert quantity.undrawn_shares == ()


def test_people_without_a_label_of_cases_are_too_few() -> None:
    volumes, person_ids = eyes(50, 10)
    none = {"train": volumes.indices["train"][:0], "val": volumes.indices["val"][:0], "test": np.arange(4)}
    people = replace(volumes, indices=none, values={split: np.zeros(len(at), np.int64) for split, at in none.items()})
    members = [np.array([2 * number, 2 * number + 1]) for number in range(50)]
    prepared = PreparedTarget(volumes, people, plan_selection(volumes, person_ids, 0), members)
    limited, (reason,) = limit_prepared([prepared], person_ids, 10, 0)
    assert not limited
    assert "10 labelled people were drawn" in reason


@pytest.mark.parametrize("text", ["", "ten", "10;30", "10,-3", "3", "10,,30", "1e2"])
def test_bad_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a list of numbers of people"):
        parse_counts(text)


def test_counts_are_read_once_each_and_ascending() -> None:
    assert parse_counts(None) == ()
    assert parse_counts("100, 10,30,10") == (10, 30, 100)


@pytest.mark.slow
def test_results_are_keyed_by_the_number_of_people(cohort: Cohort, saved: Callable[..., tuple[Path, Path]]) -> None:
    frame, labels = cohort(people=120, signal=1.2, prevalence=(0.4,), shares=(0.5, 0.2, 0.3))
    labels["rare"] = 0
    labels.loc[[0, 200, 210], "rare"] = 1  # one eye of train, two of test
    table, path = saved(frame, labels)
    result = probe_with(
        [read_embeddings(table)], path, ["lesion0", "rare"], probes=["linear"], labelled=(10, 40), bootstrap=200
    )
    assert list(result.labelled) == ["10", "40"]
    for found in result.labelled.values():
        rows = [one for one in found["rows"] if (one["metric"], one["pool"]) == ("auroc", "mean_std_max")]
        (row,) = [one for one in rows if one["name"] == "octjepa"]
        assert row["target"] == "lesion0"
        assert row["low"] < row["value"] < row["high"]
        assert {one["name"] for one in found["rows"]} >= {"octjepa", "untrained", "histogram", "covariates"}
        assert found["comparisons"][0]["reference"] == "untrained"
        (reason,) = found["left_out"]
        assert "rare: of" in reason
        assert any(reason in note for note in result.notes)
        assert all(one["target"] != "macro" for one in found["rows"])  # it would be of other targets
    assert any(one["target"] == "macro" for one in result.rows)
    assert result.payload()["labelled"] == result.labelled
