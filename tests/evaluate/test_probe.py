"""A planted signal is found and nothing else is; faults of labels, splits and encoders are named, not averaged away."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from invented_cohort import board_with, probe_with
from octjepa.embed.table import read_embeddings
from octjepa.errors import UsageError
from octjepa.evaluate import measurements
from octjepa.evaluate.probe import ProbeResult, run_probes
from octjepa.evaluate.results import ResultKey
from octjepa.evaluate.targets import Target
from octjepa.metrics.findings import Findings
from octjepa.metrics.scores import Predictions

Cohort = Callable[..., tuple[pd.DataFrame, pd.DataFrame]]
Save = Callable[..., tuple[Path, Path]]
THREE = ["lesion0", "lesion1", "lesion2"]


def _run(saved: Save, frame: pd.DataFrame, labels: pd.DataFrame, targets: list[str], **options: object) -> ProbeResult:
    table, tsv = saved(frame, labels)
    return probe_with([read_embeddings(table)], tsv, targets, **{"bootstrap": 300, **options})


def _row(result: ProbeResult, **wanted: str) -> dict[str, object]:
    rows = [row for row in result.rows if all(row[key] == value for key, value in wanted.items())]
    assert len(rows) == 1, (wanted, len(rows))
    return rows[0]


@pytest.fixture(scope="module")
def planted(cohort: Cohort, tmp_path_factory: pytest.TempPathFactory) -> ProbeResult:
    from octjepa.embed.table import TableFacts, write_embeddings

    frame, labels = cohort(people=150, prevalence=(0.4, 0.3, 0.5))
    folder = tmp_path_factory.mktemp("planted")
    labels.to_csv(folder / "labels.tsv", sep="\t", index=False)
    table = read_embeddings(write_embeddings(folder / "e.parquet", frame, TableFacts(16, "octjepa", "c" * 64)))
    return probe_with([table], folder / "labels.tsv", THREE, bootstrap=500)


@pytest.mark.slow
def test_a_planted_signal_is_found_and_baselines_are_at_chance(planted: ProbeResult) -> None:
    for target in THREE:
        row = _row(planted, name="octjepa", target=target, probe="linear", pool="mean_std_max", metric="auroc")
        assert row["low"] > 0.75
        assert row["low"] <= row["value"] <= row["high"]
        assert (row["n"], row["n_people"]) == (90, 45)
        for name, pool in (("untrained", "mean_std_max"), ("histogram", "none"), ("covariates", "none")):
            other = _row(planted, name=name, target=target, probe="linear", pool=pool, metric="auroc")
            assert other["low"] < 0.6
            assert other["high"] < row["low"]
    assert planted.paired["low"] > 0.1
    assert {key: planted.paired[key] for key in ("name", "reference", "target", "probe", "pool", "metric")} == {
        "name": "octjepa",
        "reference": "untrained",
        "target": "macro",
        "probe": "linear",
        "pool": "mean_std_max",
        "metric": "auroc",
    }
    assert planted.paired["n_people"] == 45


@pytest.mark.slow
def test_without_the_pooling_to_compare_by_mean_std_max_is_taken_or_the_last(cohort: Cohort, saved: Save) -> None:
    """Not the widest: a table of mean_std_max and layers is compared as it always was."""
    frame, labels = cohort(people=40, prevalence=(0.5,))
    for pools, compared in ((["mean_std_max", "mean"], "mean_std_max"), (["mean"], "mean")):
        result = _run(saved, frame, labels, ["lesion0"], probes=["linear"], pools=pools)
        assert result.paired["pool"] == compared


@pytest.mark.slow
def test_every_row_stands_beside_its_baselines(planted: ProbeResult) -> None:
    wanted = {("majority", "constant", "none"), ("covariates", "linear", "none")}
    wanted |= {("histogram", probe, "none") for probe in ("linear", "knn")}
    wanted |= {
        (name, probe, pool)
        for name in ("octjepa", "untrained")
        for probe in ("linear", "knn")
        for pool in ("mean", "mean_std_max")
    }
    for target in [*THREE, "macro"]:
        found = {(row["name"], row["probe"], row["pool"]) for row in planted.rows if row["target"] == target}
        assert found == wanted
    assert {row["metric"] for row in planted.rows if row["target"] == "lesion0"} == {
        *("auroc", "auprc", "balanced_accuracy", "f1_macro", "ece", "sensitivity_at_specificity_90")
    }
    for row in planted.rows:
        assert list(row) == ["name", "target", "probe", "pool", "metric", "value", "low", "high", "n", "n_people"]
    assert len(planted.comparisons) == 4 * 4
    assert len(planted.confusions) == 3 * len(wanted)


@pytest.mark.slow
def test_macro_is_the_mean_and_the_difference_is_of_the_rows(planted: ProbeResult) -> None:
    def auroc(name: str, target: str) -> dict[str, object]:
        return _row(planted, name=name, target=target, probe="linear", pool="mean_std_max", metric="auroc")

    mean = np.mean([auroc("octjepa", target)["value"] for target in THREE])
    macro = auroc("octjepa", "macro")
    assert macro["value"] == pytest.approx(mean)
    widest = max(auroc("octjepa", target)["high"] - auroc("octjepa", target)["low"] for target in THREE)
    assert macro["high"] - macro["low"] < widest
    assert planted.paired["difference"] == pytest.approx(macro["value"] - auroc("untrained", "macro")["value"])


@pytest.mark.slow
def test_the_result_is_plain_json(planted: ProbeResult) -> None:
    assert set(json.loads(json.dumps(planted.payload(), allow_nan=False))) == {
        *("faults", "notes", "rows", "paired", "comparisons", "baselines", "choices", "confusions", "targets"),
        *("protocol", "uses", "labelled", "subgroups"),
    }


@pytest.mark.slow
def test_the_planned_result_is_compared_with_every_other_baseline(planted: ProbeResult) -> None:
    key = {name: planted.paired[name] for name in ("name", "target", "probe", "pool", "metric")}
    value = _row(planted, **key)["value"]
    assert [one["reference"] for one in planted.baselines].count("untrained") == 0
    assert {one["reference"] for one in planted.baselines} >= {"histogram", "covariates", "majority"}
    for one in planted.baselines:
        assert one.items() >= key.items()
        pools = {row["pool"]: row for row in planted.rows if row["name"] == one["reference"]}
        (row,) = [
            row
            for row in planted.rows
            if (row["name"], row["target"], row["metric"]) == (one["reference"], key["target"], key["metric"])
            and row["probe"] in ("linear", "constant")
        ]
        assert pools.keys() == {"none"}
        assert one["difference"] == pytest.approx(value - row["value"])


@pytest.mark.slow
def test_the_order_of_rows_and_labels_changes_nothing(cohort: Cohort, saved: Save) -> None:
    frame, labels = cohort(people=60)
    once = _run(saved, frame, labels, ["lesion0"], pools=["mean"])
    mixed = frame.sample(frac=1, random_state=0), labels.sample(frac=1, random_state=1)
    again = _run(saved, *mixed, ["lesion0"], pools=["mean"])
    ours, theirs = (
        {key: one.payload()[key] for key in ("rows", "paired", "choices", "notes")} for one in (once, again)
    )
    assert json.dumps(ours) == json.dumps(theirs)
    assert again.uses[0]["file"] == once.uses[0]["file"]  # the same test set, so the same ledger


@pytest.mark.slow
def test_shuffled_labels_give_intervals_that_contain_chance(cohort: Cohort, saved: Save) -> None:
    frame, labels = cohort(people=150, prevalence=(0.4, 0.4, 0.4), seed=3)
    rng = np.random.default_rng(0)
    for target in THREE:
        labels[target] = rng.permutation(labels[target].to_numpy())
    result = _run(saved, frame, labels, THREE)
    rows = [row for row in result.rows if row["metric"] == "auroc"]
    rows = [row for row in rows if row["low"] is not None]  # majority: fixed at 0.5
    missed = [row for row in rows if not row["low"] <= 0.5 <= row["high"]]
    # 5 % of 95 % intervals miss by right; rows share people and features, so they miss together.
    assert len(missed) <= 0.1 * len(rows)
    assert result.paired["low"] < 0 < result.paired["high"]


def test_a_leaked_person_stops_everything(cohort: Cohort, saved: Save) -> None:
    frame, labels = cohort(people=60)
    frame.loc[[0, 2, 4], "split"] = "test"
    with pytest.raises(UsageError, match="leak: 3 of 60 people"):
        _run(saved, frame, labels, ["lesion0"])


@pytest.mark.slow
def test_a_constant_encoder_is_named(cohort: Cohort, saved: Save) -> None:
    frame, labels = cohort(people=60)
    frame["vector"] = [np.ones(48, np.float32)] * len(frame)
    result = _run(saved, frame, labels, ["lesion0"])
    for probe in ("linear", "knn"):
        row = _row(result, name="octjepa", target="lesion0", probe=probe, pool="mean", metric="auroc")
        assert (row["value"], row["low"], row["high"]) == (0.5, None, None)
        faults = [fault["what"] for fault in result.faults if fault["kind"] == "constant_predictor"]
        assert any(what.startswith(f"octjepa ({probe}, mean) predicts") for what in faults)


@pytest.mark.parametrize(("scores", "faults"), [([1e-10, 2e-10, 3e-10], 0), ([0.3, 0.3, 0.3], 1)])
def test_a_constant_is_one_at_the_scale_of_the_quantity(scores: list[float], faults: int) -> None:
    answers = np.array(scores)[:, None]
    target = Target("area", "regression", {}, {}, (), "h", ())
    findings = Findings()
    key = ResultKey("octjepa", "area", "linear", "mean")
    measurements._report_constant(key, target, Predictions(answers[:, 0], answers, answers), findings)
    assert len(findings.faults) == faults


def test_missing_labels_and_eyes_are_reported(cohort: Cohort, saved: Save, caplog: pytest.LogCaptureFixture) -> None:
    frame, labels = cohort(people=60)
    labels["lesion0"] = labels["lesion0"].astype(object)
    labels.loc[[0, 7], "lesion0"] = np.nan
    frame = frame.drop(index=[20])
    result = _run(saved, frame, labels, ["lesion0"], probes=["knn"])
    for text in (
        "2 of 120 label rows are empty or NaN",
        "1 person-eye labels have no embedded scan",
        "2 of 119 volumes",
    ):
        assert any(text in note for note in result.notes)
        assert text in caplog.text


def test_one_bad_target_of_several_is_left_out_and_alone_is_an_error(cohort: Cohort, saved: Save) -> None:
    frame, labels = cohort(people=60)
    labels["never"] = 0
    result = _run(saved, frame, labels, ["never", "lesion0"], probes=["knn"])
    assert {row["target"] for row in result.rows} == {"lesion0"}
    assert any("target never is left out" in note for note in result.notes)
    assert result.paired["target"] == "lesion0"
    with pytest.raises(UsageError, match="have the same value"):
        _run(saved, frame, labels, ["never"])
    with pytest.raises(UsageError, match="none of the 2 targets"):
        _run(saved, frame, labels.assign(always=1), ["never", "always"])


@pytest.mark.slow
def test_many_classes_and_quantities(cohort: Cohort, saved: Save) -> None:
    frame, labels = cohort(people=100, prevalence=(0.4, 0.4))
    labels["group"] = np.select([labels["lesion0"] == 1, labels["lesion1"] == 1], ["one", "two"], "none")
    labels["size"] = 3.5 * labels["lesion0"] + np.random.default_rng(0).normal(size=200)
    result = _run(saved, frame, labels, ["group", "size"])
    group = _row(result, name="octjepa", target="group", probe="linear", pool="mean_std_max", metric="auroc_ovr")
    assert group["low"] > 0.7
    size = _row(result, name="octjepa", target="size", probe="linear", pool="mean_std_max", metric="r2")
    assert size["value"] > 0.25
    assert _row(result, name="majority", target="size", metric="r2")["value"] <= 0
    counts = [one for one in result.confusions if one["target"] == "group" and one["name"] == "majority"]
    assert counts[0]["classes"] == ["none", "one", "two"]
    assert np.sum(counts[0]["counts"]) == 60
    assert result.paired["metric"] == "auroc_ovr"


@pytest.mark.slow
def test_two_encoders_are_cut_to_their_common_volumes(cohort: Cohort, saved: Save) -> None:
    frame, labels = cohort(people=60)
    weak, _ = cohort(people=60, signal=0.0)
    first, tsv = saved(frame, labels)
    second, _ = saved(weak.assign(vector=weak["untrained"]).iloc[:-1], labels, "second")
    tables = [read_embeddings(first), read_embeddings(second), read_embeddings(first)]
    result = probe_with(tables, tsv, ["lesion0"], probes=["linear"], pools=["mean"], bootstrap=100)
    names = {row["name"] for row in result.rows}
    assert names == {"octjepa", "octjepa#2", "second", "untrained", "histogram", "majority", "covariates"}
    (fault,) = [fault for fault in result.faults if fault["kind"] == "different_labels"]
    assert fault["what"].startswith("octjepa: 1 volume is left out: ")
    assert any("'octjepa' is taken" in note for note in result.notes)
    assert {row["n"] for row in result.rows} == {35}
    ours = _row(result, name="octjepa", metric="auroc")
    assert ours["value"] == _row(result, name="octjepa#2", metric="auroc")["value"]
    assert (result.paired["probe"], result.paired["pool"]) == ("linear", "mean")
    other, _ = saved(frame.assign(split=np.roll(frame["split"], 2)), labels, "other")
    with pytest.raises(UsageError, match="differ in person, eye or split for 6 of 120"):
        run_probes([tables[0], read_embeddings(other)], tsv, ["lesion0"])
    unknown_people = frame.assign(volume_id=[f"x{index}" for index in range(120)])
    with pytest.raises(UsageError, match="share no volume"):
        run_probes([tables[0], read_embeddings(saved(unknown_people, labels, "third")[0])], tsv, ["lesion0"])


@pytest.mark.slow
def test_a_rare_lesion_counts_the_resamples_without_it(cohort: Cohort, saved: Save) -> None:
    frame, labels = cohort(people=60)
    tested = labels.index[frame["split"] == "test"]
    labels.loc[tested, "lesion0"] = 0
    labels.loc[tested[:2], "lesion0"] = 1  # one person of eighteen: missing from a third of the resamples
    result = _run(saved, frame, labels, ["lesion0"], pools=["mean"])
    note = next(note for note in result.notes if "hold too few classes" in note)
    lost = int(note.split(": ")[1].split(" of")[0])
    assert 0.25 < lost / 300 < 0.5
    assert _row(result, name="octjepa", probe="linear", pool="mean", metric="auroc")["low"] is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": ["svm"]}, "no probe svm: known are knn, linear, mlp, attentive"),
        ({"pools": ["median"]}, "no pool median"),
        ({"pools": []}, "no pool given"),
        ({"metrics": ["accuracy"]}, "no metric accuracy"),
        ({"metrics": ["r2"]}, "none of the requested metrics fits"),
        ({"task": "ranking"}, "no task 'ranking'"),
        ({"task": "ordinal"}, "at least 3 grades"),
        ({"level": "retina"}, "no level 'retina': known are volume, eye, person"),
        ({"several": "median"}, "no rule for several volumes 'median'"),
        ({"probes": ["attentive"]}, "0 folder"),
        ({"attention": True}, "only a probe on tokens attends to them"),
        ({"pools": ["layers"]}, "no pooling 'layers' in this table: it holds mean, mean_std_max"),
        ({"label_smoothing": 1.0}, "label smoothing is 1.0"),
        ({"bootstrap": 0}, "at least 1 resample"),
        ({"label_smoothing": 0.1}, "only smoothed for mlp and attentive"),
        ({"visit_order": {"v1": 0.0}, "level": "eye"}, "add --several first_visit"),
        ({"several": "scores"}, "add --level eye or person"),
    ],
)
def test_wrong_options_name_what_is_known(
    cohort: Cohort, saved: Save, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        _run(saved, *cohort(people=60), ["lesion0"], **options)
    with pytest.raises(UsageError, match="no embeddings to probe"):
        run_probes([], "labels.tsv", ["lesion0"])


def test_only_the_metrics_requested(cohort: Cohort, saved: Save) -> None:
    result = _run(saved, *cohort(people=60), ["lesion0"], probes=["knn"], metrics=["balanced_accuracy"])
    assert {row["metric"] for row in result.rows} == {"balanced_accuracy"}
    assert result.paired["metric"] == "auroc"


@pytest.mark.slow
def test_uses_at_the_test_set_are_counted_with_the_leaderboards(cohort: Cohort, saved: Save, tmp_path: Path) -> None:
    frame, labels = cohort(people=60)
    options = {"probes": ["knn"], "pools": ["mean"]}
    first = _run(saved, frame, labels, ["lesion0"], **options)
    (use,) = first.uses
    assert (use["target"], use["looks"], use["measured"]) == ("lesion0", 1, 3)  # the encoder, untrained, histogram
    assert Path(use["file"]).parent == tmp_path / "octjepa_test_uses"
    assert first.faults == []
    again = _run(saved, frame, labels, ["lesion0"], **options)
    assert (again.uses[0]["looks"], again.uses[0]["measured"]) == (1, 3)  # the same rows are the same use
    # Another level measures other rows on the same test set.
    person = _run(saved, frame, labels, ["lesion0"], level="person", **options)
    assert (person.uses[0]["looks"], person.uses[0]["measured"]) == (2, 6)
    (fault,) = person.faults
    assert fault["kind"] == "test_used_before"
    assert "lesion0 for the 2nd time (6 different rows" in fault["what"]
    board = board_with(
        [str(tmp_path / "octjepa.parquet")], tmp_path / "labels.tsv", ["lesion0"], None, tmp_path / "kept"
    )
    assert (board.uses[0]["looks"], board.uses[0]["file"]) == (3, use["file"])
    elsewhere = _run(saved, frame, labels, ["lesion0"], ledger_folder=tmp_path / "mine", **options)
    assert (elsewhere.uses[0]["looks"], elsewhere.faults) == (1, [])
    # One sentence for all targets, and other labels are another test set.
    both = _run(saved, frame, labels.assign(other=1 - labels["lesion0"]), ["lesion0", "other"], **options)
    assert [one["looks"] for one in both.uses] == [3, 1]
    assert len([fault for fault in both.faults if fault["kind"] == "test_used_before"]) == 1


@pytest.mark.slow
def test_another_smoothing_or_task_is_another_use(cohort: Cohort, saved: Save, tmp_path: Path) -> None:
    frame, labels = cohort(people=60)
    looks = []
    for number, smoothing in enumerate((0.0, 0.2, 0.2)):
        options = {"probes": ["mlp"], "pools": ["mean"], "label_smoothing": smoothing}
        looks.append(_run(saved, frame, labels, ["lesion0"], **options).uses[0]["looks"])
        assert looks[-1] == (1, 2, 2)[number]
    options = {"probes": ["knn"], "pools": ["mean"], "ledger_folder": tmp_path / "tasks"}
    tasks = [_run(saved, frame, labels, ["lesion0"], task=task, **options) for task in ("binary", "regression")]
    assert [result.uses[0]["looks"] for result in tasks] == [1, 2]


@pytest.mark.slow
def test_mean_scores_by_another_level_are_another_use(cohort: Cohort, saved: Save) -> None:
    frame, labels = cohort(people=60)
    looks = []
    for level, several in (("volume", "features"), ("eye", "scores"), ("person", "scores"), ("person", "scores")):
        options = {"probes": ["knn"], "pools": ["mean"], "level": level, "several": several}
        looks.append(_run(saved, frame, labels, ["lesion0"], **options).uses[0]["looks"])
    assert looks == [1, 2, 3, 3]


def test_a_look_that_cannot_be_counted_is_not_taken(cohort: Cohort, saved: Save, tmp_path: Path) -> None:
    (tmp_path / "octjepa_test_uses").write_text("no folder", encoding="utf-8")
    with pytest.raises(UsageError, match="--ledger"):
        _run(saved, *cohort(people=60), ["lesion0"])
