"""Which encoders the exam refuses, and a whole reading of tiny cohorts: every figure is there, or why it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from benchmarks.exam import lesion_tasks, measurement_tasks, page, questions, reading
from benchmarks.exam import real_eyes as real_eyes_module
from benchmarks.exam.cohorts import EXAMINED, Cohort, make_cohorts, signature
from benchmarks.exam.decoys import DECOYS
from benchmarks.exam.reading import Exam
from benchmarks.exam.results import READINGS, Results, RowName
from benchmarks.exam.settings import REAL_EYES, RECIPE, TUNED, Settings

import octjepa
from examined_eyes import eye_table
from narrow_encoder import OVERRIDES
from octjepa.cohort.recorded_scans import uid_key
from octjepa.config import load_recipe
from octjepa.encoders import PretrainedEncoder
from octjepa.errors import UsageError
from octjepa.model import VJEPA3D
from octjepa.phantom import LESIONS

ROW = RowName("mine", (4, 8, 8))


def encoder(overrides: tuple[str, ...] = (), trained_on: tuple[str, ...] = ()) -> PretrainedEncoder:
    recipe = load_recipe(RECIPE, [*OVERRIDES, *overrides, "model.predictor_depth=1"])
    torch.manual_seed(0)
    return PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, "mine", trained_on)


def cohort(name: str) -> Cohort:
    """Two volumes of two people, without files."""
    store: Any = SimpleNamespace(preprocessing=load_recipe(RECIPE).preprocessing, participants=pd.DataFrame())
    people, splits = np.array(["1001", "1002"]), np.array(["train", "test"])
    ids = [f"{name}-a", f"{name}-b"]
    entries = tuple(eye_table(ids, people.tolist(), splits.tolist()).to_dict("records"))
    return Cohort(name, store, Path(), ids, people, people, splits, ({}, {}), entries)


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exam:
    """An exam that has no figure to read, so that what it does not refuse ends at once."""
    monkeypatch.setattr(reading, "recorded_real_eyes", lambda _: frozenset(["eye-01"]))
    monkeypatch.setattr(Cohort, "open", lambda _, name: cohort(name))
    return Exam(tmp_path, Results(tmp_path / "out"))


def read_nothing(exam: Exam, one: PretrainedEncoder, without: tuple[str, ...] = (), **options: Any) -> None:
    exam.read(ROW, one, "encoder", {}, [*set(READINGS) - set(REAL_EYES), *without], **options)


@pytest.mark.parametrize("name", EXAMINED)
@pytest.mark.parametrize("by_uid", [False, True])
def test_an_encoder_that_saw_a_volume_of_any_cohort_is_refused(name: str, by_uid: bool, refusing: Exam) -> None:
    seen = uid_key(f"1.2.{name}-b") if by_uid else f"{name}-b"  # another processor has other ids, and the same UIDs
    with pytest.raises(UsageError, match=f"mine was trained on 1 volumes of the exam's cohort {name}: .*it has seen"):
        read_nothing(refusing, encoder(trained_on=("elsewhere", seen)), REAL_EYES)
    read_nothing(refusing, encoder(trained_on=("elsewhere", uid_key("1.2.other"))), REAL_EYES)


def test_an_encoder_that_saw_the_real_eyes_is_not_tested_on_them_unless_its_row_says_so(
    refusing: Exam, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = encoder(trained_on=("elsewhere", "eye-01"))
    with pytest.raises(UsageError, match="--without real_fluid --without real_fluid_decoder --without real_surfaces"):
        read_nothing(refusing, one)
    read_nothing(refusing, one, REAL_EYES)
    monkeypatch.setattr(refusing.results, "has", lambda *_: True)
    read_nothing(refusing, one, real_eyes_seen=True)
    read_nothing(refusing, encoder())


def test_an_encoder_of_another_preprocessing_is_refused_with_what_differs(refusing: Exam) -> None:
    other = encoder(("preprocessing.target_spacing_mm=[0.36, 0.0078, 0.05]",))
    with pytest.raises(
        UsageError, match=r"(?s)mine expects other volumes .*target_spacing_mm: exam .*, recipe .*0\.05"
    ):
        read_nothing(refusing, other, REAL_EYES)
    with pytest.raises(UsageError, match=r"patches of 2 columns; .* every 4th column"):
        read_nothing(refusing, encoder(("tokens.patch_size=[4, 8, 2]", "tokens.budget=128")), REAL_EYES)
    read_nothing(refusing, encoder(), REAL_EYES)


def test_a_frozen_encoder_is_read_by_the_tasks_that_do_not_train_it(refusing: Exam) -> None:
    preprocessing = load_recipe(RECIPE).preprocessing
    frozen = octjepa.open_encoder("phantom-unet", preprocessing)
    requested: Any = {}
    for one in (frozen, encoder()):
        row: Any = reading._Row(refusing, ROW, one, lambda: None, "encoder")  # type: ignore[arg-type, return-value]
        requested[one.name] = {task for task, _ in row.tasks()}
    assert requested["mine"] - requested["phantom-unet"] == {*TUNED, "real_fluid_decoder"}
    assert requested["phantom-unet"] < requested["mine"]
    assert reading.patch_reader(frozen).name == "phantom-tiny"  # cuts the patches of its baselines
    coarse = preprocessing.model_copy(update={"target_spacing_mm": (0.36, 0.0156, 0.047)})
    with pytest.raises(UsageError, match=r"phantom-unet has tokens of 4x4x8 voxels: the exam has baselines .* 4x8x8"):
        reading.patch_reader(octjepa.open_encoder("phantom-unet", coarse))


@pytest.mark.slow
@pytest.mark.data
def test_the_real_eyes_are_known_by_their_files_and_as_they_are_stored(real_scans: Path, tmp_path: Path) -> None:
    reason = real_eyes_module.why_absent(real_scans)
    if reason is not None:
        pytest.skip(reason)
    known = real_eyes_module.recorded_real_eyes(real_scans)
    eyes = real_eyes_module.read_eyes(tmp_path, real_scans, load_recipe(RECIPE).preprocessing)
    assert {eye.volume.volume_id for eye in eyes} < known
    assert len([one for one in known if not one.startswith("uid:")]) == 4  # each eye as a file, and filled up
    assert real_eyes_module.recorded_real_eyes(tmp_path) == frozenset()


TINY = Settings(
    train=12,
    val=0,
    test=8,
    boundaries_train=5,
    boundaries_test=1,
    second_visit=8,
    decoy_train=6,
    decoy_val=0,
    decoy_test=6,
    seed=56,  # of which two test people and two others have each lesion
)
EYES_LABELLED, PEOPLE_LABELLED, BOUNDARIES_LABELLED = (4,), (4, 5), (5, 30)
FLOOR, TWIN, COVARIATES = (
    RowName("intensity", (4, 8, 8)),
    RowName("untrained", (4, 8, 8)),
    RowName("covariates", (4, 8, 8)),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (lesion_tasks, measurement_tasks, questions):
        for name, value in {
            "LABELLED_EYES": EYES_LABELLED,
            "LABELLED_PEOPLE": PEOPLE_LABELLED,
            "BOUNDARY_EYES": BOUNDARIES_LABELLED,
            "DRAWS": 1,
            "RESAMPLES": 20,
            "MIN_POSITIVES": 2,
        }.items():
            monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(lesion_tasks, "choose_strength", lambda *_: 1e-2)
    return


def keys_of(row: RowName) -> set[str]:
    """Every figure that a row is to have, or a reason why not."""
    lesions, people = ("", *(f"_{name}" for name in LESIONS)), [*map(str, PEOPLE_LABELLED), "all"]
    keys = {f"eye_lesion/auroc{one}/{count}" for one in lesions for count in people}
    if row != COVARIATES:
        keys |= {f"eye_lesion_centered/auroc{one}/{count}" for one in lesions for count in people}
    kinds = ("fluid_mm3", "atrophy_mm2", "central_thickness_um")
    keys |= {f"severity/{measure}_{kind}/5" for measure in ("r2", "mae") for kind in kinds}
    if row == COVARIATES:
        return keys
    keys |= {f"token_lesion/token_ap{one}/4" for one in lesions}
    keys |= {f"decoys/auroc{one}/5" for one in ("", *(f"_{name}" for name in DECOYS))}
    boundaries = ("", "_ilm", "_ipl_inl", "_opl_onl", "_bm")
    keys |= {f"surfaces/error_um{one}/{count}" for one in boundaries for count in BOUNDARIES_LABELLED}
    keys |= {"same_eye/top_1/0", "same_eye/mean_reciprocal_rank/0"}
    return keys | ({f"added_value/added_auroc/{count}" for count in people} if row == TWIN else set())


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 40 CPU-seconds, on a machine that does other work next to it
def test_tiny_cohorts_are_read_once_and_every_figure_is_there_or_left_out(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = make_cohorts(tmp_path, TINY, EXAMINED, workers=1), tmp_path / "out"
    results = Results(out)
    results.check_cohorts(signature(folder, EXAMINED))
    without, about, network = (*TUNED, *REAL_EYES), {"code": "c", "exam_code": "e"}, encoder()

    def read(results: Results) -> None:
        exam = Exam(folder, results)
        exam.read(FLOOR, network, "intensity", about, without)
        exam.read(TWIN, network, "encoder", about, without)
        exam.read_covariates(COVARIATES, about)

    read(results)
    again = Results(out)
    for row in (FLOOR, TWIN, COVARIATES):
        for key in keys_of(row):
            assert (again.value(row, key) is not None) != again.is_left_out(row, key), (row.name, key)
            assert again.is_left_out(row, key) or again.estimate(row, key) is not None  # with its resamples
    measured = {entry.task for entry in again.entries}
    assert measured == set(READINGS) - {*without, "frozen"}
    assert again.is_left_out(TWIN, "frozen/auroc/30")  # twelve people are not thirty
    assert all(one.reason for one in again.left_out)
    assert again.is_left_out(TWIN, "surfaces/error_um/30")  # five eyes are not thirty
    assert {entry.facts["exam_code"] for entry in again.entries} == {"e"}
    assert len(list((out / "samples").glob("*.npz"))) == 8 + 9 + 2

    def fail(*_: Any) -> None:
        raise AssertionError("it was read again")

    monkeypatch.setattr(reading, "token_table", fail)
    for module, tasks in {
        lesion_tasks: ("token_lesion", "eye_lesion", "decoys"),
        measurement_tasks: ("surfaces", "severity", "same_eye"),
    }.items():
        for task in tasks:
            monkeypatch.setattr(module, task, fail)
    read(again)
    page.write_page(again, out)
    text = (out / "rows.md").read_text(encoding="utf-8")
    assert "there are 5 training and 1 test eyes; 30 are to be labelled" in text

    seen = encoder(trained_on=(uid_key(str(Cohort.open(folder, "second_visit").entries[3]["sop_instance_uid"])),))
    with pytest.raises(UsageError, match="trained on 1 volumes of the exam's cohort second_visit"):
        Exam(folder, again).read(ROW, seen, "encoder", about, without)
