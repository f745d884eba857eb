"""The protocol holds and every planted fault is named: by the board, and by each of its forms."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from invented_cohort import board_with
from octjepa.embed import token_folder
from octjepa.embed.table import read_embeddings
from octjepa.errors import UsageError
from octjepa.evaluate.features import PROBES, plan_selection
from octjepa.evaluate.labels import read_labels
from octjepa.evaluate.leaderboard import board as board_module
from octjepa.evaluate.leaderboard.board import Board
from octjepa.evaluate.leaderboard.selection import Option, select_option, without_test
from octjepa.evaluate.probe import ProbeSettings, run_probes
from octjepa.evaluate.targets import join_labels
from octjepa.report.leaderboard import NAMES, write_leaderboard

pytestmark = pytest.mark.slow  # together: whole boards


def _run(labels: Path, *entries: str | Path, **options: Any) -> Board:
    options = {"bootstrap": 200, **options}
    return board_with([str(one) for one in entries], labels, ["lesion0"], None, labels.parent / "kept", **options)


def _row(board: Board, name: str, metric: str = "auroc") -> dict[str, Any]:
    (row,) = [row for row in board.rows if (row["name"], row["metric"]) == (name, metric)]
    return row


def _kinds(board: Board) -> list[str]:
    return [fault["kind"] for fault in board.faults]


def test_what_learned_more_stands_higher_and_baselines_are_there(made, tmp_path):
    table, labels, _ = made
    board = _run(labels, table("good", 2.5), table("poor", 0.0))
    assert [row["name"] for row in board.rows if row["primary"]] == [
        *("good", "poor", "untrained", "histogram", "covariates", "majority")
    ]
    assert _row(board, "good")["low"] > 0.8
    for name in ("poor", "untrained", "histogram", "covariates"):
        assert _row(board, name)["low"] < 0.6
    assert _row(board, "majority")["value"] == 0.5
    assert {row["metric"] for row in board.rows} >= {"auroc", "auprc", "balanced_accuracy", "brier", "ece"}
    good, poor = board.comparisons
    assert (good["name"], good["reference"], good["p_of"]) == ("good", "untrained", "networks")
    assert good["low"] > 0.2
    assert good["p_holm"] == pytest.approx(min(1, 2 * good["p"]))
    assert poor["p_holm"] > 0.05
    assert board.faults == []
    assert [one["looks"] for one in board.uses] == [1]
    assert list((tmp_path / "octjepa_test_uses").iterdir()) == [Path(board.uses[0]["file"])]


def test_details_speak_of_thresholds_groups_and_vendors(made):
    table, labels, _ = made
    board = _run(labels, table("good", 2.5))
    (found,) = board.details
    assert found["threshold"]["chosen_for_specificity"] == 0.9
    assert found["threshold"]["sensitivity"]["value"] > 0.7
    assert set(found["by_group"]["device"]["groups"]) == {"one", "two"}
    assert found["by_group"]["device"]["equity_scaled"]["value"] <= _row(board, "good")["value"]
    assert {row["group"] for row in found["left_out"]["rows"]} == {"one", "two"}
    assert {(row["chosen_at"], row["used_at"]) for row in found["between_sites"]} == {
        *(("UW", "UW"), ("UW", "UAB"), ("UAB", "UW"), ("UAB", "UAB"))
    }
    assert found["decision_curve"][0]["none"] == 0.0
    assert sum(point["n"] for point in found["reliability"]) == _row(board, "good")["n"]


@pytest.mark.slow
def test_seeds_of_an_objective_share_a_row_and_are_reported_apart(made):
    table, labels, _ = made
    board = _run(
        labels,
        *(f"ours={table(f's{seed}', 1.5, seed)}" for seed in range(3)),
        f"other={table('o', 0.5, 9)}",
        reference="other",
    )
    row = _row(board, "ours")
    assert row["seeds"] == 3
    each = [one["value"] for one in board.trainings if one["name"] == "ours"]
    assert row["value"] == pytest.approx(np.mean(each))
    assert row["seed_sd"] == pytest.approx(np.std(each, ddof=1))
    assert row["recipe_low"] < row["low"]
    (compared,) = board.comparisons
    assert (compared["name"], compared["reference"], compared["p_of"]) == ("ours", "other", "networks")
    assert compared["difference"] == pytest.approx(row["value"] - _row(board, "other")["value"])


def test_untrained_networks_of_the_seeds_are_seeds_of_one_row(made):
    table, labels, frame = made

    def drawn(seed: int):
        features = np.random.default_rng(50 + seed).normal(size=(len(frame), 24)).astype(np.float32)
        return table(f"s{seed}", 2.0, seed, change=lambda given: given.assign(untrained=list(features)))

    board = _run(labels, *(f"ours={drawn(seed)}" for seed in range(2)))
    assert _row(board, "untrained")["seeds"] == 2
    (compared,) = board.comparisons
    assert (compared["reference"], compared["p_of"]) == ("untrained", "recipes")
    assert compared["recipe_low"] < compared["low"]


@pytest.mark.slow
def test_classes_and_quantities_stand_on_one_board_and_on_paper(made, tmp_path):
    table, labels, _ = made
    entries, retained = [str(table("good", 2.5))], tmp_path / "kept"
    board = board_with(entries, labels, ["grade", "level", "lesion0"], None, retained, bootstrap=100)
    primary = {row["target"]: row["metric"] for row in board.rows if row["primary"]}
    assert primary == {"grade": "auroc_ovr", "level": "r2", "lesion0": "auroc"}
    assert [row["target"] for row in board.comparisons] == ["grade", "level", "lesion0"]
    assert all(row["p_holm"] >= row["p"] for row in board.comparisons)
    assert [bool(one["reliability"]) for one in board.details] == [True, False, True]
    (tmp_path / "board").mkdir()
    write_leaderboard(board.result, tmp_path / "board")
    page = (tmp_path / "board" / "leaderboard.html").read_text()
    assert all(f"<h2>{target}</h2>" in page for target in primary)


# Planted faults


def test_a_constant_predictor_is_named(made):
    table, labels, _ = made
    flat = table("flat", 0.0, change=lambda frame: frame.assign(vector=[np.ones(24, np.float32)] * len(frame)))
    board = _run(labels, table("good", 2.5), flat)
    (fault,) = [fault for fault in board.faults if fault["kind"] == "constant_predictor"]
    assert fault["what"].startswith("flat says")
    assert _row(board, "flat")["value"] == 0.5
    assert _row(board, "flat")["low"] is None


def test_a_lost_site_is_named(made):
    table, labels, frame = made
    retained = pd.read_csv(labels, sep="\t", dtype=str)
    lost = frame.loc[frame["clinical_site"] == "UAB", "person_id"]
    retained[~retained["person_id"].isin(lost)].to_csv(labels, sep="\t", index=False)
    board = _run(labels, table("good", 2.5))
    (fault,) = [fault for fault in board.faults if fault["kind"] == "lost_group"]
    assert "UAB is lost" in fault["what"]


def test_a_leaked_person_stops_the_board_or_the_encoder(made):
    table, labels, _ = made

    def into_test(frame: pd.DataFrame) -> pd.DataFrame:
        split = frame["split"].copy()
        split.iloc[0] = "test"  # the fellow eye stays in train
        return frame.assign(split=split)

    with pytest.raises(UsageError, match="leak: 1 of 150 people"):
        _run(labels, table("good", 2.5, change=into_test))
    board = _run(labels, table("good", 2.5), table("saw", 3.0, leaked=4))
    (fault,) = [fault for fault in board.faults if fault["kind"] == "leaked_person"]
    assert "saw was pretrained on eyes of 4 people" in fault["what"]
    assert "saw" not in {row["name"] for row in board.rows}
    with pytest.raises(UsageError, match="no entry is left"):
        _run(labels, table("saw", 3.0, leaked=4))
    with pytest.raises(UsageError, match="saw was left out"):
        _run(labels, table("good", 2.5), table("saw", 3.0, leaked=4), reference="saw")


@pytest.mark.slow
def test_choosing_on_the_test_set_is_counted_and_reported(made):
    """Five encoders tried one by one on the test set: from the second look on every output says it."""
    table, labels, _ = made
    for number in range(5):
        board = _run(labels, table(f"try{number}", 0.3, number))
        assert ("test_used_before" in _kinds(board)) == (number > 0)
        assert board.uses[0]["looks"] == number + 1
    (fault,) = [fault for fault in board.faults if fault["kind"] == "test_used_before"]
    assert "5th time" in fault["what"]
    assert "chosen on test labels" in fault["what"]
    assert board.uses[0]["measured"] == 5 + 2  # five encoders; untrained and histogram are the same each time
    elsewhere = _run(labels, table("try5", 0.3, 5), ledger_folder=labels.parent / "mine")
    assert elsewhere.uses[0]["looks"] == 1


def test_different_test_volumes_are_cut_to_the_common_ones_and_named(made):
    table, labels, _ = made
    fewer = table("fewer", 2.5, change=lambda frame: frame.iloc[:-20])
    board = _run(labels, table("good", 2.5), fewer)
    (fault,) = [fault for fault in board.faults if fault["kind"] == "different_labels"]
    assert "20 volumes are left out: rows are compared on the volumes that all tables hold" in fault["what"]
    assert _row(board, "good")["n"] == _row(board, "fewer")["n"] == 90 - 20


def test_validation_chooses_and_never_sees_the_test(made, monkeypatch):
    table, labels, _ = made
    found = read_embeddings(table("good", 2.5))
    target = join_labels(read_labels(labels, ["lesion0"]), found.frame, "lesion0")
    seen = without_test(target)
    assert set(seen.indices["test"]) == set(target.indices["val"])
    assert len(seen.indices["val"]) == 0
    people = found.frame["person_id"].to_numpy(dtype=str)
    good, poor = found.features("vector", "mean"), found.features("untrained", "mean")
    # What validation finds best is taken, even where the test volumes say the opposite.
    good, poor = good.copy(), poor.copy()
    test = target.indices["test"]
    good[test], poor[test] = 0.0, target.values["test"][:, None] * np.ones(8)
    options = [Option("step-1", "mean", "linear", poor), Option("step-2", "mean", "linear", good)]
    fitted: list[Any] = []
    linear = PROBES.get("linear")

    monkeypatch.setattr(PROBES, "get", lambda name: lambda space, of, how: fitted.append(of) or linear(space, of, how))
    chosen = select_option(options, target, plan_selection(seen, people, 0))
    assert chosen.option.checkpoint == "step-2"
    assert [name for name, _ in chosen.scored] == ["step-1 mean linear", "step-2 mean linear"]
    for one in fitted:
        assert not set(np.concatenate(list(one.indices.values()))) & set(test)


def test_a_probe_of_a_users_package_is_chosen_among(made, install_package):
    table, labels, _ = made
    install_package(
        *("my_package", "octjepa.probes", "mine = my_package:mine"),
        "from octjepa.evaluate.features import PROBES\n\n"
        "def mine(space, target, selection, smoothing=0.0, seed=0):\n"
        "    return PROBES.get('linear')(space, target, selection)\n",
    )
    board = _run(labels, table("good", 2.5), probes=["mine"])
    assert _row(board, "good")["probe"] == "mine"
    assert _row(board, "good")["low"] > 0.8
    assert {one["probe"] for one in board.trainings} == {"mine"}
    with pytest.raises(UsageError, match="no probe yours: known are knn, linear, mine, mlp, attentive"):
        _run(labels, table("good", 2.5), probes=["yours"])


def test_fewer_labels_read_the_chosen_option_again(made):
    table, labels, _ = made
    board = _run(labels, table("good", 2.5), labelled=(10, 40, 9999))
    few, more, all_of_them = (board.labelled[key] for key in ("10", "40", "9999"))
    assert all_of_them["rows"] == []
    (reason,) = all_of_them["left_out"]
    assert "9999 labelled people were requested, train has" in reason
    assert any(reason in note for note in board.notes)
    for some in (few, more):
        assert [row["name"] for row in some["rows"] if row["primary"]] == [
            *("good", "untrained", "histogram", "covariates", "majority")
        ]
        assert {row["n"] for row in some["rows"]} == {_row(board, "good")["n"]}
        assert some["comparisons"][0]["reference"] == "untrained"
        (row,) = [row for row in some["rows"] if (row["name"], row["metric"]) == ("good", "auroc")]
        assert row["low"] < row["value"] < row["high"]
        assert row["value"] > 0.6
        assert (row["probe"], row["pool"]) == (_row(board, "good")["probe"], _row(board, "good")["pool"])


def test_without_validation_labels_nothing_is_chosen_and_it_is_reported(made):
    table, labels, frame = made
    retained = pd.read_csv(labels, sep="\t", dtype=str)
    retained[~retained["person_id"].isin(frame.loc[frame["split"] == "val", "person_id"])].to_csv(
        labels, sep="\t", index=False
    )
    board = _run(labels, table("good", 2.5))
    assert any("nothing was chosen" in note for note in board.notes)
    assert board.trainings[0]["validation"] is None
    assert board.details[0]["threshold"] is None


def test_what_cannot_be_compared_is_refused(made, tmp_path):
    table, labels, _ = made
    good = table("good", 2.5)
    for entries, options, words in (
        ([], {}, "nothing to compare"),
        ([good, good], {}, "given twice"),
        ([f"untrained={good}"], {}, "baseline row"),
        ([tmp_path / "nowhere"], {}, "nothing at"),
        ([good], {"reference": "absent"}, "no row 'absent'"),
    ):
        with pytest.raises(UsageError, match=words):
            _run(labels, *entries, **options)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="--store"):
        _run(labels, tmp_path / "weights")


# What is written


@pytest.mark.slow
def test_every_form_names_the_faults_and_the_counts(made, tmp_path):
    table, labels, frame = made
    flat = table("flat|<b>", 0.0, change=lambda frame: frame.assign(vector=[np.ones(24, np.float32)] * len(frame)))
    _run(labels, table("other", 1.5))  # other features: a first use of the same test set
    board = _run(labels, table("good", 2.5), flat)
    (tmp_path / "board").mkdir()
    paths = write_leaderboard(board.result, tmp_path / "board")
    assert [path.name for path in paths] == list(NAMES)
    page, text = (
        (tmp_path / "board" / "leaderboard.html").read_text(),
        (tmp_path / "board" / "leaderboard.md").read_text(),
    )
    for form in (page, text):
        assert "a constant predictor" in form
        assert "for the 2nd time" in form
        assert "2 differences to" in form
        assert "95 % intervals are by person" in form
        assert "(no interval)" in form
    assert "flat|&lt;b&gt;" in page
    assert "flat\\|&lt;b>" in text
    assert not re.search(r"<script|https?://|src=", page)
    rows = list(csv.DictReader((tmp_path / "board" / "leaderboard.csv").read_text().splitlines()))
    assert len(rows) == len(board.rows)
    assert rows[0]["name"] == "good"
    assert json.loads((tmp_path / "board" / "leaderboard.json").read_text())["faults"] == board.faults
    for path in paths:
        assert not [person for person in frame["person_id"] if re.search(rf"\b{person}\b", path.read_text())]


# What is a case, and what reads it


@pytest.mark.slow
def test_eyes_and_people_are_cases_of_their_own(made):
    table, labels, _ = made
    good = table("good", 1.5)
    boards = {level: _run(labels, good, level=level, probes=["linear"]) for level in ("volume", "eye", "person")}
    assert [_row(board, "good")["n"] for board in boards.values()] == [90, 90, 45]
    assert {_row(board, "good")["n_people"] for board in boards.values()} == {45}
    assert boards["eye"].protocol["text"] == "a case is an eye: mean of the features of its volumes"
    # One ledger. A volume is an eye here, so that both have the same features: these count as one use.
    assert [board.uses[0]["looks"] for board in boards.values()] == [1, 1, 2]
    person = boards["person"]
    assert person.comparisons[0]["n_people"] == 45
    assert any("eyes of" in note and "the worse eye's is the person's" in note for note in person.notes)
    both = run_probes(
        [read_embeddings(good)], labels, ["lesion0"], ProbeSettings(["linear"], level="person", bootstrap=50)
    )
    (theirs,) = [
        row["value"]
        for row in both.payload()["rows"]
        if (row["name"], row["metric"], row["pool"]) == ("good", "auroc", person.trainings[0]["pool"])
    ]
    assert _row(person, "good")["value"] == pytest.approx(theirs)
    with pytest.raises(UsageError, match="no level 'retina'"):
        _run(labels, good, level="retina")


@pytest.mark.slow
def test_validation_chooses_among_the_probes_requested(made, monkeypatch):
    monkeypatch.setattr("octjepa.evaluate.probe_training.EPOCHS", 8)
    table, labels, _ = made
    board = _run(labels, table("good", 2.5), probes=["mlp"])
    assert {row["probe"] for row in board.rows} == {"mlp", "linear", "constant"}  # covariates, majority
    assert _row(board, "good")["low"] > 0.7
    assert len([one for one in board.choices if one["name"] == "good"]) == 2  # mean, mean_std_max
    for probes, message in ((["svm"], "no probe svm: known are knn, linear, mlp, attentive"), ([], "no probe given")):
        with pytest.raises(UsageError, match=message):
            _run(labels, table("good", 2.5), probes=probes)
    with pytest.raises(UsageError, match="has no tokens to read"):
        _run(labels, table("good", 2.5), probes=["attentive"])


@pytest.mark.slow
def test_tokens_are_read_by_the_attentive_probe(made, tmp_path, monkeypatch):
    """Networks read the table from top to bottom: what they say must come back in the order of the rows."""
    monkeypatch.setattr("octjepa.evaluate.probe_training.EPOCHS", 2)
    table, labels, frame = made
    ids = np.random.default_rng(0).permutation(frame["volume_id"].to_numpy())  # splits stand mixed in their order
    path = table("good", 2.5, change=lambda given: given.assign(volume_id=ids))
    values = {
        name: np.repeat(getattr(read_embeddings(path), name)[:, :8], 3, axis=0) for name in ("vector", "untrained")
    }
    arrays = {name: block.astype(np.float16) for name, block in values.items()}  # three tokens a volume
    arrays["counts"] = np.full(len(frame), 3, np.int32)
    (tmp_path / "tokens").mkdir()
    token_folder.write_part(tmp_path / "tokens", "a", {**arrays, "positions": np.zeros(3 * len(frame), np.int32)})
    about = {"encoder": "good", "weights": "", "contract": "c" * 64, "dim": 8, "grid": [1, 1, 1]}
    token_folder.write_index(tmp_path / "tokens", {"a": ids.tolist()}, about)
    tokens = token_folder.TokenFolder.open(tmp_path / "tokens")
    known = board_module.embed_entries
    monkeypatch.setattr(
        board_module, "embed_entries", lambda *given: [replace(one, tokens=tokens) for one in known(*given[:3])]
    )
    board = _run(labels, path, probes=["linear", "attentive"])
    labels_of_options = [one["option"] for one in board.choices if one["name"] == "good"]
    assert labels_of_options == ["mean_std_max linear", "mean linear", "attention attentive"]
    monkeypatch.setattr("octjepa.evaluate.probe_training.EPOCHS", 12)
    alone = _run(labels, path, probes=["attentive"])
    row = _row(alone, "good")
    assert (row["probe"], row["pool"]) == ("attentive", "attention")
    assert row["low"] > 0.7
    assert alone.trainings[0]["validation"] is None  # nothing to choose among
    assert _row(alone, "histogram")["probe"] == "linear"
    with pytest.raises(UsageError, match="cases have several volumes"):
        _run(labels, path, probes=["attentive"], level="person")
