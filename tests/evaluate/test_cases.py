"""Cases: eyes and people from several volumes, by rules whose answers are worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from invented_cohort import probe_with
from octjepa.embed.table import Embeddings, TableFacts, read_embeddings, write_embeddings
from octjepa.embed.token_folder import TokenFolder, write_index, write_part
from octjepa.errors import UsageError
from octjepa.evaluate.cases import average_scores, check_level, group_cases, person_labels, read_visit_order
from octjepa.evaluate.labels import read_labels
from octjepa.evaluate.probe import ProbeResult
from octjepa.metrics.scores import Predictions
from token_parts import token_part

Cohort = Callable[..., tuple[pd.DataFrame, pd.DataFrame]]


def four_volumes() -> Embeddings:
    """A person with three scans of the right eye over two visits and one of the left; features 1, 2, 3 and 10."""
    frame = pd.DataFrame(
        {
            "person_id": ["p"] * 4,
            "eye": ["OD", "OD", "OD", "OS"],
            "volume_id": list("abcd"),
            "content_hash": list("abcd"),
            "device": ["x", "y", "x", "x"],
            "split": "train",
            "age": 60.0,
            "clinical_site": "UW",
            "visit": ["v1", "v2", "v2", "v2"],
            "quality": [0.9, 0.2, np.nan, 0.5],
        }
    )
    block = np.array([1.0, 2, 3, 10], np.float32)[:, None]
    return Embeddings(frame, block, block, block, 1, "e", "c", 0, ("mean",))


@pytest.mark.parametrize(
    ("level", "several", "features"),
    [
        ("volume", "features", [1, 2, 3, 10]),
        ("eye", "features", [2, 10]),
        ("person", "features", [6]),  # each eye counts once: (2 + 10) / 2, not 16 / 4
        ("eye", "best_quality", [1, 10]),
        ("person", "best_quality", [1]),
        ("eye", "first_visit", [2.5, 10]),
        ("person", "first_visit", [6.25]),
        ("volume", "first_visit", [2, 3, 10]),
    ],
)
def test_rules_give_what_they_say(level: str, several: str, features: list[float]) -> None:
    table = four_volumes()
    cases = group_cases(table.frame, level, several, {"v1": 30.0, "v2": 4.0})
    merged = cases.aggregate(table)
    assert merged.features("vector", "mean")[:, 0].tolist() == features
    assert (cases.about.cases, cases.about.level, cases.about.several) == (len(features), level, several)
    assert merged.frame["volume_id"].is_unique
    if (level, several) == ("eye", "features"):
        assert merged.frame["device"].tolist() == ["x+y", "x"]
        assert cases.about.text == "a case is an eye: mean of the features of its volumes"


def test_a_volume_of_unknown_eye_is_a_case_of_its_own() -> None:
    table = four_volumes()
    table.frame.loc[[0, 1], "eye"] = ""
    cases = group_cases(table.frame, "eye", "features")
    assert sorted(map(len, cases.members)) == [1, 1, 1, 1]
    assert cases.about.volumes_of_unknown_eye == 2


@pytest.mark.parametrize("unsplit", [[0], [1], [2], [0, 2]])
@pytest.mark.parametrize(("level", "several"), [("eye", "features"), ("person", "features"), ("person", "first_visit")])
def test_volumes_without_a_split_are_in_no_case(level: str, several: str, unsplit: list[int]) -> None:
    """Neither may the first of them take its person out of the split, nor a later one be merged into the case."""
    table = four_volumes()
    table.frame.loc[unsplit, "split"] = ""
    retained = [row for row in range(4) if row not in unsplit]
    cases = group_cases(table.frame, level, several, {"v1": 30.0, "v2": 4.0})
    assert set(cases.frame(table.frame)["split"]) == {"train"}
    first = [row for row in retained if table.frame["visit"][row] == "v2"]
    assert sorted(np.concatenate(cases.members)) == (first if several == "first_visit" else retained)
    assert cases.about.volumes_in_no_split == len(unsplit)


@pytest.mark.slow
def test_a_person_with_a_volume_in_no_split_is_tested_on_the_others(probed: Callable[..., ProbeResult]) -> None:
    def one_unsplit(frame: pd.DataFrame, labels: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        left = (frame["eye"] == "OS") & ~frame["person_id"].duplicated()
        right = (frame["eye"] == "OD") & ~frame["person_id"].duplicated()
        return frame.assign(split=frame["split"].mask(left | right, "")), labels

    result = probed(one_unsplit, level="person")
    assert auroc(result)["n"] == 27
    assert "90 volumes are in no split, so in no person's case" in result.notes


def test_unknown_visit_order_and_quality_are_errors(tmp_path: Path) -> None:
    table = four_volumes()
    with pytest.raises(UsageError, match="has 2 visits and the order of 2 is unknown"):
        group_cases(table.frame, "eye", "first_visit")
    with pytest.raises(UsageError, match="order of 1 is unknown"):
        group_cases(table.frame, "eye", "first_visit", {"v1": 1.0})
    with pytest.raises(UsageError, match="has no quality of volumes"):
        group_cases(table.frame.assign(quality=np.nan), "eye", "best_quality")
    (tmp_path / "order.tsv").write_text("visit\torder\nv1\t0\nv2\t365\n")
    assert read_visit_order(tmp_path / "order.tsv") == {"v1": 0.0, "v2": 365.0}
    (tmp_path / "order.tsv").write_text("visit;order\nv1;0,5\n")
    assert read_visit_order(tmp_path / "order.tsv") == {"v1": 0.5}
    for text, message in (
        ("visit\tdate\nv1\tlate\n", "is not an order of visits"),
        ("visit\torder\nv1\t0\nv2\t\n", "an order that is neither number nor date"),
        ("visit\torder\nv1\t0\nv2\t1\nv1\t2\n", "a visit more than once"),
    ):
        (tmp_path / "order.tsv").write_text(text)
        with pytest.raises(UsageError, match=message):
            read_visit_order(tmp_path / "order.tsv")


def test_scores_of_cases_are_means_over_their_tested_volumes() -> None:
    scores = np.array([[0.8, 0.2], [0.4, 0.6], [0.1, 0.9]])
    predicted = Predictions(np.array([0, 0, 1]), scores, scores)
    cases = average_scores(predicted, np.array([7, 9, 4]), [np.array([7, 9, 8]), np.array([4])], np.array([0, 1]))
    assert np.allclose(cases.scores, [[0.6, 0.4], [0.1, 0.9]])
    assert cases.truth.tolist() == [0, 1]


@pytest.fixture
def probed(cohort: Cohort, tmp_path: Path) -> Callable[..., ProbeResult]:
    """run(**options) on 90 people whose every eye was scanned twice, the second time without any signal."""

    def run(change: Callable[[pd.DataFrame, pd.DataFrame], Any] | None = None, **options: Any) -> ProbeResult:
        frame, labels = cohort(people=90)
        again = frame.assign(
            volume_id="b" + frame["volume_id"],
            content_hash="b" + frame["content_hash"],
            quality=0.1,
            vector=list(np.random.default_rng(8).normal(size=(180, 48)).astype(np.float32)),
        )
        frame = pd.concat([frame.assign(quality=0.9), again], ignore_index=True)
        if change is not None:
            frame, labels = change(frame, labels)
        labels.to_csv(tmp_path / "labels.tsv", sep="\t", index=False)
        table = read_embeddings(
            write_embeddings(tmp_path / "e.parquet", frame, TableFacts(16, "octjepa", "c" * 64, weights="w"))
        )
        given = {"probes": ["linear"], "pools": ["mean_std_max"], "bootstrap": 100, **options}
        return probe_with([table], tmp_path / "labels.tsv", ["lesion0"], **given)

    return run


def auroc(result: ProbeResult, name: str = "octjepa") -> dict[str, Any]:
    (row,) = [row for row in result.rows if row["name"] == name and row["metric"] == result.paired["metric"]]
    return row


@pytest.mark.slow
def test_levels_and_rules_reach_the_rows(probed: Callable[..., ProbeResult]) -> None:
    counts = {"volume": 108, "eye": 54, "person": 27}
    found = {}
    for level, several in (
        ("volume", "features"),
        ("eye", "features"),
        ("eye", "scores"),
        ("eye", "best_quality"),
        ("person", "scores"),
    ):
        result = probed(level=level, several=several)
        row = auroc(result)
        assert (row["n"], row["n_people"]) == (counts[level], 27)
        assert {one["n"] for one in result.rows} == {counts[level]}  # baselines are measured on the same cases
        assert result.protocol["several"] == several
        found[level, several] = row["value"]
    assert found["eye", "best_quality"] > 0.85  # the scans without signal are left out
    assert found["eye", "best_quality"] > found["volume", "features"]
    assert found["eye", "features"] > found["volume", "features"]


@pytest.mark.slow
def test_eyes_that_differ_make_a_person_by_rule(probed: Callable[..., ProbeResult]) -> None:
    result = probed(level="person")
    (note,) = [note for note in result.notes if "different labels" in note]
    assert note.endswith("the worse eye's is the person's")

    def named(frame: pd.DataFrame, labels: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        return frame, labels.assign(
            lesion0=labels["lesion0"].map({0: "none", 1: "dr"}).mask(labels.index % 9 == 0, "amd")
        )

    result = probed(named, level="person")
    (note,) = [note for note in result.notes if "different labels" in note]
    left_out = int(note.rpartition("; ")[2].split()[0])
    assert 90 - left_out == sum(sum(counts) for counts in result.targets[0]["counts"].values())

    def sized(frame: pd.DataFrame, labels: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        return frame, labels.assign(lesion0=labels["lesion0"] + np.linspace(0, 1, len(labels)))

    result = probed(sized, level="person")
    assert any("their mean is the person's" in note for note in result.notes)
    assert result.targets[0]["task"] == "regression"

    def unknown_people(frame: pd.DataFrame, labels: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        return frame, labels.assign(person_id="X" + labels["person_id"])

    with pytest.raises(UsageError, match="none of its 180 labels of lesion0 meets"):
        probed(unknown_people, level="person")


@pytest.mark.parametrize(
    ("worse", "better", "ordered"),
    [
        ("AMD", "Normal", False),
        ("Normal", "AMD", False),
        ("1", "0", True),
        ("2", "1", True),
        ("Yes", "No", True),
        ("true", "false", True),
        ("present", "absent", True),
    ],
)
def test_two_classes_have_a_worse_eye_if_their_order_is_known(
    tmp_path: Path, worse: str, better: str, ordered: bool
) -> None:
    (tmp_path / "labels.tsv").write_text(
        f"person_id\teye\tdx\n1\tOD\t{worse}\n1\tOS\t{better}\n2\tOD\t{better}\n2\tOS\t{better}\n"
    )
    eyes = pd.DataFrame({"person_id": ["1", "1", "2", "2"], "eye": ["OD", "OS"] * 2, "split": "test"})
    people, kind, notes = person_labels(read_labels(tmp_path / "labels.tsv", ["dx"]), eyes, "dx", "auto")
    assert kind == "binary"
    rule = "the worse eye's is the person's" if ordered else "1 person is left out"
    assert notes == [f"dx: the eyes of 1 person have different labels; {rule}"]
    assert people.values["dx"] == ({("1", ""): worse} if ordered else {}) | {("2", ""): better}


def test_a_missing_fellow_eye_is_counted(probed: Callable[..., ProbeResult]) -> None:
    def one_lost(frame: pd.DataFrame, labels: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        gone = frame["person_id"].isin(["1001", "1080"]) & (frame["eye"] == "OS")
        return frame[~gone], labels

    result = probed(one_lost, level="person")
    assert result.protocol["people_with_one_eye"] == 2
    assert any("2 of 90 people with one scanned eye only" in note for note in result.notes)
    assert auroc(result)["n"] == 27


@pytest.mark.slow
def test_tokens_of_several_volumes_have_no_mean(
    probed: Callable[..., ProbeResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octjepa.evaluate.probe_training.EPOCHS", 8)

    def same(frame: pd.DataFrame, labels: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        ids = frame["volume_id"].tolist()
        blocks = [np.stack(frame[name].to_list()).reshape(-1, 3, 16) for name in ("vector", "untrained")]
        (tmp_path / "tokens").mkdir(exist_ok=True)
        write_part(tmp_path / "tokens", "a", token_part(*blocks, positions=np.zeros((len(ids), 3))))
        about = {"encoder": "e", "weights": "w", "contract": "c" * 64, "dim": 16, "grid": [1, 1, 3]}
        write_index(tmp_path / "tokens", {"a": ids}, about)
        return frame, labels

    probed(same)
    tokens = [TokenFolder.open(tmp_path / "tokens")]
    with pytest.raises(UsageError, match="180 cases have several volumes, whose tokens have no mean"):
        probed(level="eye", probes=["attentive"], tokens=tokens)
    for several in ("scores", "best_quality"):
        result = probed(level="eye", several=several, probes=["attentive"], tokens=tokens)
        assert {(row["name"], row["probe"], row["pool"]) for row in result.rows} == {
            ("octjepa", "attentive", "attention"),
            ("untrained", "attentive", "attention"),
            ("histogram", "linear", "none"),
            ("covariates", "linear", "none"),
            ("majority", "constant", "none"),
        }
        assert {row["n"] for row in result.rows} == {54}
        assert (result.paired["probe"], result.paired["pool"]) == ("attentive", "attention")
        assert auroc(result)["value"] > auroc(result, "untrained")["value"] + 0.1

    def other(frame: pd.DataFrame, labels: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        return frame, labels

    (tmp_path / "tokens" / "tokens.json").write_text(
        (tmp_path / "tokens" / "tokens.json").read_text().replace('"weights": "w"', '"weights": "x"')
    )
    with pytest.raises(UsageError, match=r"tokens in .* are of other weights"):
        probed(other, probes=["attentive"], tokens=[TokenFolder.open(tmp_path / "tokens")])


def test_people_with_a_label_and_no_scan_stay_in_the_table_of_people(tmp_path: Path) -> None:
    path = tmp_path / "labels.tsv"
    path.write_text("person_id\teye\tgrade\np\tOD\t0\np\tOS\t1\nq\tOD\t1\n")
    people, _, _ = person_labels(read_labels(path, ["grade"]), four_volumes().frame, "grade", "auto")
    assert people.people("grade") == {"p", "q"}  # `join_labels` counts q


def test_an_unknown_level_and_an_absent_order_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no level 'patient': known are"):
        check_level("patient", by_visit=False)
    with pytest.raises(UsageError, match="no order of visits at "):
        read_visit_order(tmp_path / "missing.tsv")
