"""`octjepa predict`: the table over a store and over files, what is unlike the tuning, and what cannot be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from command_line import call
from oct_dicom import make_dataset, retina, save
from octjepa.errors import UsageError
from octjepa.read.identity import visit_pseudonym
from octjepa.recipe import Preprocessing
from octjepa.tasks.finetune.inference import StorePredictions, predict_scans, predict_store
from octjepa.tasks.finetune.predict import load_tuned
from planted import PlantedStore


def table_of(made: StorePredictions) -> pd.DataFrame:
    return read_table(made.predictions)


def read_table(path: str) -> pd.DataFrame:
    return pd.read_csv(path, sep="\t", dtype={"person_id": str}, keep_default_na=False)


@pytest.mark.slow
def test_a_line_for_each_case_says_what_the_model_says_of_it(done, planted, tmp_path: Path) -> None:
    out, _ = done
    made = predict_store(out, planted, tmp_path)
    table = table_of(made)
    assert (made.level, made.cases, made.volumes) == ("person", 40, 80)
    assert sum(made.predicted["mark"].values()) == 40
    line = table[table["person_id"] == "1003"].iloc[0]
    scans = planted.table.loc[planted.table["person_id"] == "1003", "volume_id"].tolist()
    answer = load_tuned(out).predict(*map(planted.read, scans))["mark"]
    assert line["volume_id"] == ";".join(scans)
    assert str(line["predicted"]) == answer["predicted"]
    for kind in ("calibrated", "balanced"):
        assert [line[f"{kind}_{name}"] for name in ("0", "1")] == pytest.approx(list(answer[kind].values()), abs=1e-5)
    eyes = table_of(predict_store(out, planted, tmp_path, "eye"))
    assert len(eyes) == 80
    assert set(eyes["eye"]) == {"OD", "OS"}


@pytest.mark.slow
def test_each_visit_of_an_eye_is_a_case_of_a_model_that_was_tuned_on_labels_by_visit(tune, tmp_path: Path) -> None:
    store = PlantedStore()
    people = store.table["person_id"]
    visits = [visit_pseudonym(person, "AB"[number % 2]) for number, person in enumerate(people)]
    store.table = store.table.assign(eye="OD", visit=visits)
    rows = [(person, "OD", visit, (int(person) + (visit == "B")) % 2) for person in people.unique() for visit in "AB"]
    columns = ["person_id", "eye", "visit", "mark"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "labels.tsv", sep="\t", index=False)
    short = ("stages.head=1", "stages.last=0", "stages.all=0", "level=eye")
    out = tmp_path / "out"
    tuned = tune(out, *short, store=store, labels=tmp_path / "labels.tsv")
    made = predict_store(out, store, tmp_path / "predicted")
    table = table_of(made)
    assert (made.level, made.cases, made.volumes) == ("eye", 80, 80)
    assert sorted(table["visit"]) == sorted(visits)
    with pytest.raises(UsageError, match="labels by visit are those of an eye at a visit: use --level volume or eye"):
        predict_store(out, store, tmp_path / "people", "person")
    with pytest.raises(UsageError, match="use --level volume or eye"):
        predict_scans(out, [tmp_path / "scans are not read"], tmp_path / "people", "person")
    assert not (tmp_path / "people").exists()
    manifest = Path(tuned["checkpoint"]) / "manifest.json"
    about = json.loads(manifest.read_text())
    assert about["tuned"].pop("by_visit") is True
    manifest.write_text(json.dumps(about))
    older = predict_store(out, store, tmp_path / "older")
    assert older.cases == 40
    assert "visit" not in table_of(older)


@pytest.mark.slow
def test_scans_unlike_those_of_the_tuning_are_marked(done, planted, tmp_path: Path) -> None:
    out, _ = done
    known = table_of(predict_store(out, planted, tmp_path))
    assert known["trained_on"].sum() == 20  # the people of train
    assert (known["unlike_training"] == "features").mean() <= 0.1
    other = PlantedStore()
    other.table = other.table.assign(device="zeiss_cirrus")
    for name, volume in other.volumes.items():
        other.volumes[name] = replace(volume, pixels=np.ascontiguousarray(255 - volume.pixels[:, ::-1]))
    made = predict_store(out, other, tmp_path)
    assert made.unlike_training == {"device": 40, "features": 40}


@pytest.mark.slow
def test_a_scan_that_was_compressed_anew_is_known_from_the_tuning_by_its_uid(done, tmp_path: Path) -> None:
    out, _ = done
    other = PlantedStore()
    other.volumes = {f"again-{name}": volume for name, volume in other.volumes.items()}
    other.table = other.table.assign(volume_id=list(other.volumes), content_hash=list(other.volumes))
    assert predict_store(out, other, tmp_path).trained_on == 20  # the people of train


@pytest.mark.slow
def test_files_become_a_table_and_what_is_refused_is_listed(done, tmp_path: Path) -> None:
    out, _ = done
    scans = tmp_path / "scans"
    scans.mkdir()
    for number in range(2):
        save(make_dataset(retina(seed=number)), scans / f"{number}.dcm")
    (scans / "broken.dcm").write_bytes(b"no scan")
    words = ("predict", out, scans, "--out", tmp_path / "out", "--workers", 1, "--max-lost", 0.5, "--level", "volume")
    made = call(*words, "--json")
    assert made.code == 0, made.err
    assert made.json["cases"] == 2
    assert len(read_table(made.json["predictions"])) == 2
    refused = pd.read_csv(tmp_path / "out" / "refused.tsv", sep="\t")
    assert refused["file"].tolist() == ["broken.dcm"]
    assert made.json["refused"] == {refused["reason"].iloc[0]: 1}
    few = call(*(0.1 if word == 0.5 else word for word in words), "--json")
    assert (few.code, few.json["cases"]) == (3, 2)


@pytest.mark.slow
def test_mistakes(done, planted, tmp_path: Path) -> None:
    out, _ = done
    assert "either the scans to predict or a --store" in call("predict", out, "--out", tmp_path / "a").err
    nothing = call("predict", tmp_path, "x.dcm", "--out", tmp_path / "a")
    assert nothing.code == 2
    assert "holds no tuned model: give the folder that octjepa finetune wrote" in nothing.err
    encoder = call("predict", out, "x.dcm", "--from", "run", "--out", tmp_path / "a")
    assert "--from is for a segmentation head" in encoder.err
    other = PlantedStore()
    other.table = other.table.assign(pattern="radial")
    with pytest.raises(UsageError, match="holds no raster volume"):
        predict_store(out, other, tmp_path / "b")
    assert isinstance(planted.preprocessing, Preprocessing)
