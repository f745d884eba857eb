"""Figures by subgroups that the user names: right for a planted difference, and silent where a group is too small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from invented_cohort import probe_with
from octjepa.embed.table import read_embeddings
from octjepa.errors import UsageError
from octjepa.evaluate.subgroups import parse_subgroups, read_groups
from octjepa.read.identity import visit_pseudonym


@pytest.fixture(autouse=True)
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two strengths of the penalty instead of seven: the choice is the probes' own matter and tested there."""
    monkeypatch.setattr("octjepa.evaluate.linear_knn.C_GRID", (0.1, 10.0))


Cohort = Callable[..., tuple[pd.DataFrame, pd.DataFrame]]


def test_bands_hold_their_lower_edge() -> None:
    sex, age = parse_subgroups("sex, age:50,65")
    assert (sex.name, sex.edges, age.name, age.edges) == ("sex", (), "age", (50.0, 65.0))
    ages = ("49.9", "50", "64", "65", "90", "")
    assert [age.group_of(text) for text in ages] == [
        *("under 50", "50 to under 65", "50 to under 65", "65 and over", "65 and over", ""),
    ]
    assert sex.group_of("female") == "female"
    assert parse_subgroups(None) == ()
    with pytest.raises(UsageError, match="'old' is not a number"):
        age.group_of("old")


@pytest.mark.parametrize("text", ["", "sex,", "50", "age:", "age:old", ":50", "age:65,50", "sex,sex", "age:50,,65"])
def test_bad_lists_are_refused(text: str) -> None:
    if text == "50":  # a column may be called so
        assert parse_subgroups(text)[0].name == "50"
        return
    with pytest.raises(UsageError, match="--subgroups"):
        parse_subgroups(text)


@pytest.fixture
def files(cohort: Cohort, saved: Callable[..., tuple[Path, Path]]) -> tuple[Path, Path]:
    """Of the women the encoder knows the lesion, of the men nothing; four people are of a third group."""
    frame, labels = cohort(people=160, shares=(0.4, 0.1, 0.5), signal=2.0)
    sex = np.array(["female", "male"])[np.arange(len(frame)) // 2 % 2]
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(len(frame), len(frame["vector"][0]))).astype(np.float32)
    frame["vector"] = [noise[i] if sex[i] == "male" else vector for i, vector in enumerate(frame["vector"])]
    sex[-8:] = "other"
    sex[-10:-8] = ""
    return saved(frame, labels.assign(sex=sex))


@pytest.mark.slow
def test_each_group_has_its_own_figure_and_a_small_one_its_count(files: tuple[Path, Path]) -> None:
    table, labels = files
    result = probe_with(
        [read_embeddings(table)],
        labels,
        ["lesion0"],
        probes=["linear"],
        pools=["mean"],
        bootstrap=100,
        subgroups=parse_subgroups("sex,age:60"),
    )
    ours = {
        (one["column"], one["metric"]): one
        for one in result.subgroups
        if one["name"] == result.paired["name"] and one["pool"] in (result.paired["pool"], "none")
    }
    by_sex = ours["sex", "auroc"]
    assert set(by_sex["groups"]) == {"female", "male"}
    assert by_sex["groups"]["female"]["low"] > by_sex["groups"]["male"]["high"]
    assert by_sex["left_out"] == {
        "other": "4 test people, at least 6 are needed",
        "unknown": "1 test people, at least 6 are needed",
    }
    assert by_sex["equity_scaled"]["value"] < by_sex["groups"]["female"]["value"]
    (key,) = [key for key in result.predicted if vars(key).items() <= result.paired.items()]
    target, predictions = result.predicted[key]
    frame = read_embeddings(table).frame.iloc[target.indices["test"]]
    old = (frame["age"] >= 60).to_numpy()
    expected = roc_auc_score(predictions.truth[old], predictions.scores[old, 1])
    found = ours["age", "auroc"]["groups"]["60 and over"]
    assert found["value"] == pytest.approx(expected)
    assert (found["n"], found["n_people"]) == (old.sum(), frame["person_id"][old].nunique())
    sick = frame["person_id"][old & (predictions.truth == 1)].nunique()
    assert found["people_by_class"]["1"] == sick
    assert {one["metric"] for one in result.subgroups} >= {"auroc", "auprc", "ece"}
    assert {one["name"] for one in result.subgroups} >= {"untrained", "histogram", "covariates"}


def test_fewer_than_ten_people_of_a_class_are_not_scored(
    cohort: Cohort, saved: Callable[..., tuple[Path, Path]]
) -> None:
    frame, labels = cohort(people=100, shares=(0.4, 0.1, 0.5))
    healthy = (frame["split"] == "test") & (np.arange(len(frame)) % 22 > 1)
    labels["lesion0"] = np.where(healthy, 0, np.arange(len(frame)) % 2)
    table, path = saved(frame, labels.assign(sex=np.array(["f", "m"])[np.arange(len(frame)) // 2 % 2]))
    result = probe_with(
        [read_embeddings(table)],
        path,
        ["lesion0"],
        probes=["linear"],
        pools=["mean"],
        bootstrap=50,
        subgroups=parse_subgroups("sex"),
    )
    reasons = result.subgroups[0]["left_out"]
    assert set(reasons) == {"f", "m"}
    assert all("test people are of the rarest class, at least 10 are needed" in reason for reason in reasons.values())
    assert result.subgroups[0]["groups"] == {}


def test_a_column_that_is_not_there_and_one_with_too_many_values_are_refused(files: tuple[Path, Path]) -> None:
    table, labels = files
    frame = read_embeddings(table).frame
    with pytest.raises(UsageError, match=r"--subgroups gender: .* it has lesion0, sex; of the volumes age, clinical"):
        read_groups(parse_subgroups("gender"), labels, frame)
    with pytest.raises(UsageError, match=r"age has \d+ values, at most 20 .* as age:50,65"):
        read_groups(parse_subgroups("age"), labels, frame)


def test_a_column_of_labels_by_visit_is_read_at_the_visit(tmp_path: Path) -> None:
    path = tmp_path / "labels.tsv"
    path.write_text("person_id\teye\tvisit\tlens\n1\tOD\ta\tclear\n1\tOD\tb\tcloudy\n1\tOS\t\tclear\n")
    visits = [*(visit_pseudonym("1", name) for name in ("a", "b")), ""]
    eyes = pd.DataFrame({"person_id": ["1"] * 3, "eye": ["OD", "OD", "OS"], "visit": visits})
    assert read_groups(parse_subgroups("lens"), path, eyes)["lens"].tolist() == ["clear", "cloudy", "clear"]


def test_a_person_whose_eyes_differ_belongs_to_no_group(tmp_path: Path) -> None:
    path = tmp_path / "labels.tsv"
    path.write_text("person_id\teye\tlens\n1\tOD\tclear\n1\tOS\tcloudy\n2\tOD\tclear\n2\tOS\tclear\n")
    people = pd.DataFrame({"person_id": ["1", "2"], "eye": ["", ""]})
    assert read_groups(parse_subgroups("lens"), path, people)["lens"].tolist() == ["", "clear"]


def test_a_picture_of_unknown_eye_has_the_group_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "labels.tsv"
    path.write_text("person_id\timage\tsex\n1\ta.png\tf\n2\tb.png\tm\n")
    visits = [visit_pseudonym("1", "a"), visit_pseudonym("2", "b")]
    pictures = pd.DataFrame({"person_id": ["1", "2"], "eye": ["", ""], "visit": visits})
    assert read_groups(parse_subgroups("sex"), path, pictures)["sex"].tolist() == ["f", "m"]
