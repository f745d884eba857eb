"""`octjepa finetune` from labels to figures: a planted effect is learnt, next to what knows nothing."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from command_line import call
from octjepa.checkpoint.folder import read_manifest, write_folder
from octjepa.cohort.recorded_scans import uid_key
from octjepa.embed.table import read_embeddings
from octjepa.encoders import load_encoder
from octjepa.errors import ContractError, UsageError, WrongCheckpointError
from octjepa.evaluate.subgroups import parse_subgroups
from octjepa.files import read_json_lines
from octjepa.record import plain
from octjepa.report import write_report
from octjepa.report.html import number, signed
from octjepa.store import Store
from octjepa.tasks.finetune import fit
from octjepa.tasks.finetune.fit import FinetuneInputs, finetune_store, finetune_with_fewer_labels
from octjepa.tasks.finetune.predict import load_tuned
from octjepa.tasks.finetune.recipe import load_recipe
from planted import QUICK, RECIPE, PlantedStore, write_encoder, write_labels
from synthetic import TEST_SIZE, small_recipe

pytestmark = pytest.mark.slow


def figure(message, name, probe, metric="auroc", target="mark"):
    return next(
        row
        for row in message["rows"]
        if (row["name"], row["probe"], row["metric"], row["target"]) == (name, probe, metric, target)
    )


def test_a_planted_effect_is_learned_and_stands_beside_what_knows_nothing(done) -> None:
    _, message = done
    beside = {(row["name"], row["probe"]) for row in message["rows"]}
    assert beside == {
        ("small", "tuned"),
        ("untrained", "tuned"),
        ("small", "linear"),
        ("untrained", "linear"),
        ("intensity", "linear"),
        ("histogram", "linear"),
        ("covariates", "linear"),
        ("majority", "constant"),
    }
    assert figure(message, "small", "tuned")["value"] > 0.9
    assert figure(message, "histogram", "linear")["value"] < 0.8
    assert message["metrics"]["auroc"]["value"] == figure(message, "small", "tuned")["value"]
    assert message["metrics"]["auroc"]["n"] == 12  # people
    assert {pair["against"] for pair in message["paired"]} == {"frozen", "best_baseline", "tuned_from_scratch"}
    for pair in message["paired"]:
        other = figure(message, pair["reference"], pair["reference_probe"])
        ours = figure(message, "small", "tuned")
        assert pair["difference"] == pytest.approx(ours["value"] - other["value"])
        assert pair["n_people"] == 12
    best = next(pair for pair in message["paired"] if pair["against"] == "best_baseline")
    known = [row for row in message["rows"] if row["name"] != "small" and row["probe"] != "tuned"]
    assert figure(message, best["reference"], best["reference_probe"])["value"] == max(
        row["value"] for row in known if row["metric"] == "auroc"
    )
    assert "tuned minus frozen" in message["summary"]


def test_the_folder_holds_what_was_requested_done_and_found(done) -> None:
    out, message = done
    assert json.loads((out / "results.json").read_text())["metrics"] == message["metrics"]
    assert load_recipe(out / "recipe.yaml").level == "person"
    assert load_recipe(out / "recipe.yaml").precision in ("fp32", "bf16")
    about = json.loads((out / "run.json").read_text())
    assert (about["kind"], about["volumes"]) == ("fine-tuning", {"train": 40, "val": 16, "test": 24})
    lines = read_json_lines(out / "metrics.jsonl")
    updates = [line["update"] for line in lines if "loss" in line]
    assert updates == list(range(1, len(updates) + 1))
    looks = {line["update"]: line["val_loss"] for line in lines if "val_loss" in line}
    choice = next(one for one in message["choices"] if one["probe"] == "tuned" and one["name"] == "small")
    assert choice["update"] == min(looks, key=looks.get)  # validation chose
    assert message["checkpoint"].endswith(f"step-{choice['update']:08d}")
    assert not (out / "checkpoints").exists()


def test_inspect_says_what_was_tuned_and_what_the_test_gave(done) -> None:
    out, message = done
    found = call("inspect", out, "--json").json
    assert (found["kind"], found["name"], found["encoder"], found["level"]) == (
        "fine-tuning",
        "finetune",
        "small",
        "person",
    )
    assert found["targets"] == [{"target": "mark", "task": "binary", "classes": ["0", "1"]}]
    assert found["finished"]
    assert found["metrics"] == message["metrics"]
    assert found["tuned_minus"].keys() == {"frozen", "best_baseline", "tuned_from_scratch"}
    assert found["tuned_minus"]["frozen"]["value"] == message["paired"][0]["difference"]
    assert message["checkpoint"].endswith(f"step-{found['weights_of_update']:08d}")
    shown = call("inspect", out).out
    assert re.search(r"^targets +\n  mark; binary; \[0, 1\]$", shown, re.MULTILINE)
    assert re.search(r"^  frozen +-?\d\.\d{3}( \[-?\d\.\d\d, -?\d\.\d\d\])?$", shown, re.MULTILINE)


def test_inspect_says_where_a_tuning_stopped(done, tmp_path) -> None:
    out = Path(shutil.copytree(done[0], tmp_path / "out"))
    (out / "results.json").unlink()
    found = call("inspect", out, "--json").json
    assert (found["finished"], found["stopped_in"]) == (False, "the test")
    shutil.rmtree(out / "scratch" / "tuned")
    found = call("inspect", out, "--json").json
    assert (found["stopped_in"], found["updates"]) == ("tuned from first weights", 30)
    assert found["last_update"] == read_json_lines(out / "scratch" / "metrics.jsonl")[-1]["update"]
    (out / "run.json").write_text('{"kind": "fine-tuning"', encoding="utf-8")
    assert call("inspect", out).code == 1


def test_the_report_shows_the_tuned_row_beside_the_others_with_their_differences(done, tmp_path) -> None:
    out, message = done
    page = write_report(out, tmp_path / "page.html").read_text(encoding="utf-8")
    update = next(one["update"] for one in message["choices"] if one["probe"] == "tuned" and one["name"] == "small")
    assert "tuned to mark (binary) on 40 OCT volumes" in page
    assert f"the weights after update {update} were kept, chosen on validation people" in page
    for pair in message["paired"]:
        known = pair["low"] is not None
        span = f" ({signed(pair['low'])} to {signed(pair['high'])})" if known else ", no interval"
        assert f"</strong> {signed(pair['difference'])}{span}. " in page
    assert page.count('class="headline"') == len(message["paired"]) == 3
    ours = figure(message, "small", "tuned")
    (row,) = re.findall(r'<tr class="ours">.*?</tr>', page, re.DOTALL)
    assert ("small" in row, "tuned" in row, f"<b>{number(ours['value'])}</b>" in row) == (True, True, True)
    assert page.count('class="chart"') == 4
    assert "Tuned minus frozen" in page
    assert "Missing: the store." in page  # it lay in memory
    assert page.count("Missing:") == 4  # in cohort, eyes, occlusion and files
    for absent in ('id="masks"', 'id="tokens"', "built-in method", "trained encoder", "Pretraining took"):
        assert absent not in page
    assert "octjepa finetune recipe.yaml --target mark --from ENCODER" in page


def test_the_report_of_a_tuning_that_is_not_finished_shows_how_far_it_is(done, tmp_path) -> None:
    out = Path(shutil.copytree(done[0], tmp_path / "out"))
    (out / "results.json").unlink()
    page = write_report(out).read_text(encoding="utf-8")
    assert "It is not finished." in page
    assert "Missing: the probe." in page
    assert "octjepa finetune --resume" in page
    assert page.count('class="chart"') == 4
    (out / "results.json").write_text("[1", encoding="utf-8")
    assert "results.json is damaged" in write_report(out).read_text(encoding="utf-8")
    (out / "recipe.yaml").unlink()
    result = call("report", out)
    assert (result.code, "recipe.yaml cannot be read" in result.err) == (2, True)


def test_predictions_of_volumes_eyes_and_people_agree_with_the_figures(done) -> None:
    out, message = done
    table = pd.read_parquet(out / "predictions.parquet")
    assert set(table["split"]) == {"val", "test"}
    counts = table[table["split"] == "test"]["level"].value_counts()
    assert counts.to_dict() == {"volume": 24, "eye": 24, "person": 12}
    people = table[(table["level"] == "person") & (table["split"] == "test")]
    score, truth = np.array([row[1] for row in people["scores"]]), people["truth"].to_numpy() == "1"
    pairs = score[truth][:, None] - score[~truth][None]
    assert message["metrics"]["auroc"]["value"] == pytest.approx((pairs > 0).mean() + 0.5 * (pairs == 0).mean())
    volumes = table[(table["level"] == "volume") & (table["split"] == "test")]
    mean = volumes.groupby("person_id")["scores"].apply(lambda rows: np.stack(rows.tolist()).mean(axis=0))
    assert np.allclose(np.stack(mean.loc[people["person_id"]].tolist()), np.stack(people["scores"].tolist()))


def test_the_tuned_network_is_used_on_scans_and_read_as_an_encoder(done, planted, source, able_encoder) -> None:
    out, message = done
    table = pd.read_parquet(out / "predictions.parquet")
    tuned = load_tuned(out)
    person = table[(table["level"] == "person") & (table["split"] == "test")].iloc[0]
    ids = planted.table.loc[planted.table["person_id"] == person["person_id"], "volume_id"]
    answer = tuned.predict(*(planted.read(name) for name in ids))["mark"]
    assert list(answer["balanced"].values()) == pytest.approx(list(person["scores"]), abs=1e-5)
    assert answer["predicted"] == person["predicted"]
    assert sum(answer["calibrated"].values()) == pytest.approx(1)
    encoder, before = load_encoder(out), load_encoder(able_encoder)
    one = planted.read(ids.iloc[0])
    assert np.abs(encoder.embed(one) - before.embed(one)).max() > 1e-3  # it learnt
    train = planted.table[planted.table["split"] == "train"]
    assert encoder.trained_on == set(train["volume_id"])
    assert encoder.trained_on_uids == set(map(uid_key, train["sop_instance_uid"]))
    assert "tuned" in read_manifest(Path(message["checkpoint"]))
    with pytest.raises(WrongCheckpointError, match="holds no"):
        load_tuned(source)


def test_several_labels_grades_and_quantities_share_one_encoder(tune, tmp_path) -> None:
    message = tune(tmp_path / "signs", "task=multilabel", "stages.all=1", target="signs")
    assert {row["target"] for row in message["rows"]} == {"signs=mark", "signs=third", "macro"}
    assert {"auroc", "auroc_signs=mark", "auroc_signs=third"} <= set(message["metrics"])
    assert message["paired"][0]["target"] == "macro"
    graded = tune(tmp_path / "grade", "task=ordinal", "stages.all=1", "level=eye", target="grade")
    assert graded["paired"][0]["metric"] == "quadratic_kappa"
    assert list(load_tuned(tmp_path / "grade").predict(PlantedStore().read("volume0000"))["grade"]["balanced"]) == [
        "0",
        "1",
        "2",
    ]
    measured = tune(tmp_path / "size", "task=regression", "metric=mean_absolute_error", "stages.all=10", target="size")
    assert (
        measured["metrics"]["mean_absolute_error"]["value"]
        < figure(measured, "majority", "constant", "mean_absolute_error", "size")["value"]
    )
    assert 0 < load_tuned(tmp_path / "size").predict(PlantedStore().read("volume0000"))["size"]["value"] < 5


def test_each_look_at_the_test_set_is_counted(tune, source, tmp_path) -> None:
    given = {"labels": write_labels(tmp_path / "labels.tsv")}
    quick = ("stages.head=1", "stages.last=0", "stages.all=0")
    first = tune(tmp_path / "one", *quick, **given)
    assert first["uses"][0]["looks"] == 1
    again = tune(tmp_path / "again", *quick, **given)  # the same weights on the same scans
    assert again["uses"][0]["looks"] == 1
    people = tune(tmp_path / "people", *quick, "level=person", **given)  # the level could be chosen by these results
    assert people["uses"][0]["looks"] == 2
    second = tune(tmp_path / "two", *quick, "level=person", "seed=1", **given)
    assert second["uses"][0]["looks"] == 3
    assert [fault["kind"] for fault in second["faults"]] == ["few_to_choose_by", "test_used_before"]


def test_few_people_to_choose_by_are_a_fault_that_says_what_was_done(done) -> None:
    _, message = done
    (fault,) = message["faults"]
    assert fault["kind"] == "few_to_choose_by"
    assert "people in val (of the rarest class): mark 4; 20 are needed" in fault["what"]
    assert "chosen on them all the same, which is noisy" in fault["what"]
    assert "The frozen rows next to it choose by cross-validation inside train" in fault["what"]
    assert {one["by"] for one in message["choices"] if one["probe"] == "linear"} == {"cv"}


def test_the_frozen_row_is_of_the_weights_that_were_tuned(tune, tmp_path, monkeypatch) -> None:
    """A run that is still training writes newer weights in the meantime."""
    start = write_encoder(tmp_path / "encoder.safetensors")
    weights, honest = load_encoder(start).weights_hash(), fit.tune

    def tuned_while_others_train(*arguments):
        learner = honest(*arguments)
        write_encoder(start, small_recipe(model=TEST_SIZE))
        return learner

    monkeypatch.setattr(fit, "tune", tuned_while_others_train)
    tune(tmp_path / "out", "stages.head=1", "stages.last=1", "stages.all=1", checkpoint=start)
    assert read_embeddings(tmp_path / "out" / "frozen.parquet").weights == weights


def test_what_is_no_encoder_is_refused_by_name(tune, done, tmp_path) -> None:
    head = write_folder(tmp_path / "head", 1, {"head.safetensors": {}}, {"kind": "segmentation head"})
    with pytest.raises(WrongCheckpointError, match="is a segmentation head, no pretrained encoder"):
        tune(tmp_path / "out", checkpoint=head)
    with pytest.raises(WrongCheckpointError, match="no checkpoint at"):
        tune(tmp_path / "out", checkpoint=tmp_path / "nothing")
    with pytest.raises(UsageError, match="is not empty"):
        tune(tmp_path)
    with pytest.raises(UsageError, match="holds no fine-tuning to resume"):
        tune(tmp_path / "out", resume=True)
    assert not (tmp_path / "out").exists()


def test_the_command_line_prints_a_table_and_one_line_or_json(planted, source, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Store, "open", lambda location: planted)
    words = [
        "finetune",
        "study_group",
        *QUICK,
        "stages.head=1",
        "stages.last=0",
        "stages.all=0",
        "targets=[group]",
        "--from",
        source / "encoder.safetensors",
        "--store",
        "any",
        "--labels",
        source / "labels.tsv",
        "--out",
    ]
    text = call(*words, tmp_path / "text")
    assert text.code == 0, text.err
    (choices,) = (line for line in text.err.splitlines() if line.startswith("on "))
    assert "precision " in choices
    assert "loader_workers 0" in choices
    assert "group: balanced_accuracy" in text.out
    assert "tuned minus frozen" in text.out
    message = call(*words, tmp_path / "json", "--json", "--ledger", tmp_path / "ledger").json
    assert set(message["metrics"]["balanced_accuracy"]) == {"value", "low", "high", "n", "n_people"}
    assert Path(message["checkpoint"]).is_dir()
    refused = call(*words, tmp_path / "json")
    assert refused.code == 2
    assert "add --resume" in refused.err
    (tmp_path / "file").touch()
    assert call(*words, tmp_path / "file").code == 2


GOOD = [str(1000 + number) for number in range(40)]


@pytest.mark.parametrize(
    ("columns", "given", "result"),
    [
        ({}, {"target": "drusen"}, "has no column drusen"),
        ({}, {"target": ()}, "name a column|no target was named"),
        ({"mark": 1}, {}, "have the same value; expected at least two different values"),
        ({"mark": ["NaN"] * 40}, {}, "mark holds no label at all"),
        ({"person_id": [f"AB-{name}" for name in GOOD]}, {}, "ids look like 'AA-9999' there and '9999' here"),
        ({"mark": [int(n >= 28) for n in range(40)]}, {}, "split train has no volume of class 1"),
        ({"mark": [n % 2 if n < 28 else 0 for n in range(40)]}, {}, "split test has no volume of class 1"),
        ({"person_id": ["1000", *GOOD[:-1]]}, {}, "given twice with different values"),
        ({}, {"overrides": ("metric=r2",)}, "mark is binary, which has no metric r2"),
        ({}, {"overrides": ("task=ordinal",)}, "an ordinal task needs at least 3 grades"),
    ],
    ids=[
        "no-column",
        "no-target",
        "one-class",
        "nan",
        "no-scan",
        "class-not-in-train",
        "class-not-in-test",
        "twice",
        "metric",
        "task",
    ],
)
def test_labels_that_cannot_be_used_are_refused_before_the_first_update(tune, tmp_path, columns, given, result) -> None:
    labels = write_labels(tmp_path / "labels.tsv", **columns)
    with pytest.raises(UsageError, match=result):
        tune(tmp_path / "out", *given.get("overrides", ()), target=given.get("target", "mark"), labels=labels)
    assert not (tmp_path / "out").exists()


def test_people_the_encoder_knows_splits_that_leak_and_other_stores_are_refused(tune, tmp_path) -> None:
    store = PlantedStore()
    tested = store.table.loc[store.table["split"] == "test", "volume_id"].iloc[0]
    leaky = write_encoder(tmp_path / "leaky.safetensors", trained_on=(tested,))
    with pytest.raises(UsageError, match="pretrained on eyes of 1 person now in val or test"):
        tune(tmp_path / "out", checkpoint=leaky)
    store.table.loc[store.table["volume_id"] == tested, "split"] = "train"
    with pytest.raises(UsageError, match="leak: 1 of 40 people in more than one split"):
        tune(tmp_path / "out", store=store)
    other = RECIPE.preprocessing.model_copy(update={"flatten": "none"})
    another = write_encoder(tmp_path / "other.safetensors", RECIPE.model_copy(update={"preprocessing": other}))
    with pytest.raises(ContractError, match="flatten: store quadratic, recipe none"):
        tune(tmp_path / "out", checkpoint=another)


def test_scans_without_labels_and_nobody_in_val_are_reported(tune, tmp_path) -> None:
    marks = ["" if 20 <= number < 28 else str(number % 2) for number in range(40)]
    labels = write_labels(tmp_path / "labels.tsv", mark=marks)
    message = tune(tmp_path / "out", "stages.head=2", "stages.last=0", "stages.all=0", labels=labels)
    assert any("16 of 80 volumes (8 people) have no label" in text for text in message["notes"])
    assert any("no labelled person in val" in text for text in message["notes"])
    assert message["checkpoint"].endswith("step-00000002")


def test_fewer_labels_tune_a_network_each_beside_the_whole_run(planted, source, tmp_path) -> None:
    settings = load_recipe(
        "finetune", (*QUICK, "stages.head=2", "stages.last=0", "stages.all=0", "level=person", "resamples=50")
    )
    # Of 20 training people 5 lack the mark, in both of their eyes; half of 6 drawn people do.
    labels = write_labels(
        tmp_path / "labels.tsv", mark=[int(bool(number % (4 if number < 20 else 2))) for number in range(40)]
    )
    inputs = FinetuneInputs(source / "encoder.safetensors", planted, labels, ["mark"])
    by_site = replace(inputs, subgroups=parse_subgroups("eye,clinical_site"))
    whole = finetune_store(settings, by_site, tmp_path / "out")
    scored = {(one.name, one.probe, one.column) for one in whole.subgroups}
    assert {("small", "tuned", "eye"), ("small", "linear", "eye"), ("untrained", "linear", "clinical_site")} <= scored
    with pytest.raises(UsageError, match="was not measured by age: tune into a new --out"):
        finetune_store(settings, replace(inputs, subgroups=parse_subgroups("age:50")), tmp_path / "out", resume=True)
    made = finetune_with_fewer_labels(settings, (6, 999), inputs, tmp_path / "out")
    found = plain(made)
    assert json.loads((tmp_path / "out" / "labelled.json").read_text()) == found
    tuned = figure(found["6"], "small", "tuned")
    assert tuned["low"] <= tuned["value"] <= tuned["high"]
    assert tuned["n"] == 12  # the people of test stay
    about = json.loads((tmp_path / "out" / "labelled-6" / "run.json").read_text())
    assert about["volumes"] == {"train": 12, "val": 0, "test": 24}  # both eyes of six people
    assert found["6"]["left_out"] == []
    assert load_tuned(tmp_path / "out" / "labelled-6").heads[0].shares == pytest.approx((0.25, 0.75))
    assert not (tmp_path / "out" / "labelled-6" / "frozen.parquet").exists()  # that of the whole run is read
    assert found["999"]["rows"] == []
    assert "999 labelled people were requested, train has 20" in found["999"]["left_out"][0]
    assert finetune_with_fewer_labels(settings, (6,), inputs, tmp_path / "out") == {
        "6": made["6"]
    }  # what is finished is not redone


def test_the_majority_and_the_counts_of_fewer_labels_are_of_these_labels(tune, tmp_path) -> None:
    sizes = [10.0 + (number if number < 20 else number % 7) for number in range(40)]
    labels = write_labels(tmp_path / "labels.tsv", size=sizes)
    short = ("stages.head=2", "stages.last=0", "stages.all=0", "labelled=4", "level=person")
    result = tune(tmp_path / "out", *short, target="size", labels=labels)
    assert result["targets"][0]["counts"] == {"train": 4, "val": 0, "test": 12}
    of_all_labels = np.abs(np.array(sizes[28:]) - np.mean(sizes[:20])).mean()
    assert figure(result, "majority", "constant", "mean_absolute_error", "size")["value"] != pytest.approx(
        of_all_labels
    )
