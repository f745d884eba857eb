"""From labels to a judged head, end to end on eyes with known layers; planted faults show in its figures."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from command_line import call
from octjepa.encoders import load_encoder
from octjepa.errors import ContractError, UsageError
from octjepa.outside import OutsideError
from octjepa.tasks.labels.label_files import PHANTOM_LAYERS
from octjepa.tasks.segment import fit
from octjepa.tasks.segment.dice import dice
from octjepa.tasks.segment.evaluation import evaluate_scan
from octjepa.tasks.segment.folder import load_head
from octjepa.tasks.segment.labelled_volumes import LabelledVolumes
from octjepa.tasks.segment.recipe import load_recipe

from .conftest import RECIPE, Line, write_encoder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # the first one makes the cohort and imports MONAI


def value(line: Line, name: str, metric: str = "dice", label: str = "mean") -> float:
    (row,) = (r for r in line.results["rows"] if (r["name"], r["metric"], r["class"]) == (name, metric, label))
    return row["value"]


def test_the_head_is_far_above_the_position_prior_with_intervals_over_people(line: Line) -> None:
    assert {row["name"] for row in line.results["rows"]} == {"small", "untrained", "intensity", "position_prior"}
    assert value(line, "small") > value(line, "position_prior") + 0.2
    assert value(line, "small") > 0.6
    assert value(line, "small", "hd95_mm") < value(line, "position_prior", "hd95_mm")
    metrics = line.results["metrics"]
    assert set(metrics) >= {"dice", *(f"dice_{name}" for name in PHANTOM_LAYERS), "hd95_mm", "thickness_error_um"}
    for figure in metrics.values():
        assert figure["low"] < figure["value"] < figure["high"]
        assert (figure["n"], figure["n_people"]) == (12, 6)
    assert metrics["etdrs_error_um"]["value"] < 25  # two rows of 12 um
    paired = {pair["reference"]: pair for pair in line.results["paired"]}
    assert paired["position_prior"]["low"] > 0.1
    assert paired["untrained"]["difference"] == pytest.approx(0)  # this encoder is its own randomly initialised encoder


def test_the_setting_is_chosen_on_validation_people(line: Line) -> None:
    chosen = line.results["chosen"]["small"]
    assert chosen["head"] == "linear"
    assert 0.5 < chosen["val_dice"] < 1


def etdrs_of(line: Line) -> list[dict[str, str]]:
    with Path(line.results["etdrs"]).open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@pytest.mark.parametrize("eye", ["OD", "OS"])
def test_the_nerve_fibres_are_thicker_on_the_nasal_side_of_either_eye(line: Line, eye: str) -> None:
    rows = [row for row in etdrs_of(line) if row["eye"] == eye and row["class"] == "inner"]
    assert {row["centre"] for row in rows} == {"labels"}
    assert {row["vertical"] for row in rows} == {"positions"}

    def mean(sector: str, key: str) -> float:
        return float(np.mean([float(row[key]) for row in rows if row["sector"] == sector and row[key]]))

    for key, margin in (("true_um", 15), ("predicted_um", 0)):
        assert mean("outer_nasal", key) > mean("outer_temporal", key) + margin
        assert mean("central", key) < mean("inner_nasal", key)


def test_the_figure_and_the_head_are_where_the_result_says(line: Line) -> None:
    assert Path(line.results["figure"]).read_text(encoding="utf-8").lstrip().startswith("<?xml")
    head = load_head(line.results["checkpoint"], str(line.encoder))
    assert head.classes == tuple(PHANTOM_LAYERS)
    again = call(
        "segment",
        "segment_linear",
        "--from",
        line.encoder,
        "--store",
        line.root / "store",
        "--labels",
        line.labels,
        "--out",
        line.out,
    )
    assert again.code == 2
    assert "holds a head already" in again.err


def test_inspect_says_what_the_head_tells_apart_and_how_well(line: Line, tmp_path: Path) -> None:
    found = call("inspect", line.out, "--json").json
    assert (found["kind"], found["head"], found["encoder"], found["finished"]) == (
        "segmentation",
        "linear",
        "small",
        True,
    )
    assert found["classes"] == list(PHANTOM_LAYERS)
    assert found["metrics"] == line.results["metrics"]
    assert found["dice_minus"].keys() == {"untrained", "intensity", "position_prior"}
    assert found["dice_minus"]["position_prior"]["low"] > 0.1
    shown = call("inspect", line.out).out
    assert re.search(r"^  dice_inner +0\.\d{3} \[0\.\d\d, 0\.\d\d\]$", shown, re.MULTILINE)
    copy = Path(shutil.copytree(line.out, tmp_path / "copy"))
    (copy / "results.json").write_text("{", encoding="utf-8")
    damaged = call("inspect", copy)
    assert (damaged.code, "results.json is damaged" in damaged.err) == (1, True)
    (copy / "results.json").unlink()
    torn = call("inspect", copy, "--json").json
    assert not torn["finished"]
    assert "remove the folder and train the head again" in torn["notes"][0]


def test_shifted_labels_and_swapped_classes_are_seen(line: Line) -> None:
    head = load_head(line.out, str(line.encoder))
    cohort = LabelledVolumes(line.store, line.labels, RECIPE)
    row = cohort.in_split("test")[0]
    scores = head.head.scores(line.store.read(row.volume_id))
    stored, truth = cohort.stored[row.volume_id], cohort.native(row, "labels", "inferior")

    def evaluated(stored: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        one = evaluate_scan(scores, stored, type(truth)(codes, truth.native, truth.scan, "labels", "positions"))
        return dice(one.counts[None])[:, 0], one.errors

    right, errors = evaluated(stored, truth.codes)
    shifted, far = evaluated(np.roll(stored, 8, axis=1), np.roll(truth.codes, 12, axis=1))  # 96 um down
    assert (shifted < right - 0.1).all()
    assert (far[:, 0] > errors[:, 0] + 0.02).sum() >= 4  # hd95_mm
    assert far[:, 1] == pytest.approx(errors[:, 1], abs=3)  # a shift changes no thickness: hence more than one metric
    swap = np.array([0, 2, 1, 3, 4, 5, *range(6, 256)], np.uint8)
    swapped, _ = evaluated(swap[stored], swap[truth.codes])
    assert (swapped[:2] < 0.35).all()
    assert swapped[2:] == pytest.approx(right[2:])


def test_a_head_refuses_an_encoder_of_another_contract_and_other_weights(line: Line, tmp_path: Path) -> None:
    other = RECIPE.model_copy(
        update={"preprocessing": RECIPE.preprocessing.model_copy(update={"target_spacing_mm": (0.7, 0.010, 0.09)})}
    )
    for name, path, what in (
        ("spacing", write_encoder(tmp_path / "a.safetensors", other), "preprocessing.target_spacing_mm: head"),
        ("weights", write_encoder(tmp_path / "b.safetensors", RECIPE, seed=1), "weights: head"),
    ):
        refused = call("segment", line.out, "--from", path, "--scan", line.scan("cirrus"), "--out", tmp_path / name)
        assert refused.code == 2
        assert what in refused.err
        assert not (tmp_path / name).exists()


def test_a_head_finds_the_encoder_that_it_notes(line: Line, tmp_path: Path) -> None:
    """The place is relative: head and encoder can be moved together. Without the encoder, --from is required."""
    scan = line.scan("cirrus")
    done = call("segment", line.out, "--scan", scan, "--out", tmp_path / "noted", "--format", "nifti", "--json")
    assert done.code == 0, done.err
    together = tmp_path / "moved"
    shutil.copytree(line.out / "head", together / "out" / "head")
    shutil.copy(line.encoder, together)
    assert load_head(together / "out", None).encoder.weights_hash() == load_encoder(line.encoder).weights_hash()
    write_encoder(together / line.encoder.name, RECIPE, seed=1)
    with pytest.raises(ContractError, match="weights: head"):
        load_head(together / "out", None)
    (together / line.encoder.name).unlink()
    absent = call("segment", together / "out", "--scan", scan, "--out", tmp_path / "x")
    assert absent.code == 2
    assert "which is not there: name it with --from" in absent.err


def test_a_head_opens_no_path_that_the_user_did_not_name(line: Line, tmp_path: Path) -> None:
    shutil.copytree(line.out / "head", tmp_path / "out" / "head")
    manifest = next((tmp_path / "out" / "head").glob("*/manifest.json"))
    about = json.loads(manifest.read_text())
    for path in (str(line.encoder), "gs://bucket/encoder.safetensors"):
        manifest.write_text(json.dumps({**about, "encoder_from": path}))
        with pytest.raises(OutsideError, match="--allow-outside"):
            load_head(tmp_path / "out", None)
    manifest.write_text(json.dumps({key: value for key, value in about.items() if key != "encoder_from"}))
    with pytest.raises(UsageError, match="name it with --from"):  # of an earlier version
        load_head(tmp_path / "out", None)


def test_a_store_that_was_prepared_otherwise_is_refused_with_what_differs_and_what_to_do(
    line: Line, tmp_path: Path
) -> None:
    other = RECIPE.model_copy(
        update={"preprocessing": RECIPE.preprocessing.model_copy(update={"flatten": "quadratic"})}
    )
    result = call(
        "segment",
        "segment_linear",
        "--from",
        write_encoder(tmp_path / "other.safetensors", other),
        "--store",
        line.root / "store",
        "--labels",
        line.labels,
        "--out",
        tmp_path / "out",
    )
    assert result.code == 2
    assert "flatten: store none, recipe quadratic" in result.err
    assert "Ingest the files into a new store with the recipe of the weights" in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("linked", ["head", "training/small/checkpoints", "training/untrained"])
def test_a_training_folder_that_is_a_link_is_refused_before_it_trains(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.txt").write_bytes(b"precious")
    out = tmp_path / "out"
    (out / linked).parent.mkdir(parents=True)
    (out / linked).symlink_to(tmp_path / "mine")

    def train(*_: object) -> None:
        raise AssertionError("it trains")

    monkeypatch.setattr(fit, "_fit_heads", train)
    with pytest.raises(UsageError, match=r"is a link to .*mine, and no checkpoint is written through it"):
        fit.segment_store(load_recipe("segment_decoder"), line.encoder, line.store, line.labels, out)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["own.txt"]
    (out / linked).unlink()
    with pytest.raises(AssertionError, match="it trains"):  # without the link it goes on
        fit.segment_store(load_recipe("segment_decoder"), line.encoder, line.store, line.labels, out)
