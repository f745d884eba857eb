"""A site that fell out, a leaked person and other planted faults are named by the result, each in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from invented_cohort import probe_with
from octjepa.embed.table import read_embeddings
from octjepa.errors import UsageError
from octjepa.evaluate.probe import ProbeResult

Cohort = Callable[..., tuple[pd.DataFrame, pd.DataFrame]]
Save = Callable[..., tuple[Path, Path]]


@pytest.fixture
def run_probe(saved: Save) -> Callable[..., ProbeResult]:
    def run(frame: pd.DataFrame, labels: pd.DataFrame, **options: Any) -> ProbeResult:
        table, tsv = saved(frame, labels)
        given = {"targets": ["lesion0"], "probes": ["knn"], "pools": ["mean"], "bootstrap": 50, **options}
        return probe_with([read_embeddings(table)], tsv, **given)

    return run


def test_a_site_whose_labels_meet_no_scan_is_named(cohort: Cohort, run_probe: Callable[..., ProbeResult]) -> None:
    frame, labels = cohort(people=80)
    assert run_probe(frame, labels).faults == []
    # An id pattern that knows one site only: the other's labels are of people nobody has scanned.
    uab = labels["person_id"].map(dict(zip(frame["person_id"], frame["clinical_site"], strict=True))) == "UAB"
    labels = labels.assign(clinical_site=np.where(uab, "UAB", "UW"))
    labels.loc[uab, "person_id"] = "7" + labels.loc[uab, "person_id"]
    faults = run_probe(frame, labels).faults
    scans, people = int((frame["clinical_site"] == "UAB").sum()), int(uab.sum() / 2)
    for what in (
        f"lesion0: clinical_site UAB is lost: none of its {scans} scans or cases has a label and a split",
        f"lesion0: site UAB is lost: none of its {people} people with a label has an embedded scan",
    ):
        assert {"kind": "lost_group", "what": what} in faults


def test_a_device_on_one_side_of_the_split_is_named(cohort: Cohort, run_probe: Callable[..., ProbeResult]) -> None:
    frame, labels = cohort(people=80)
    frame["device"] = np.where(frame["split"] == "test", "cirrus", "spectralis")
    faults = {fault["what"]: fault["kind"] for fault in run_probe(frame, labels).faults}
    assert faults == {
        "lesion0: device cirrus is tested and has nothing to train on": "one_sided_group",
        "lesion0: device spectralis is trained on and never tested: the metrics do not describe it": "one_sided_group",
    }


def test_the_same_scan_under_two_people_is_a_leak(cohort: Cohort, run_probe: Callable[..., ProbeResult]) -> None:
    frame, labels = cohort(people=80)
    frame.loc[frame.index[-1], "content_hash"] = frame["content_hash"][0]
    with pytest.raises(UsageError, match="same pixels are stored under two people in different splits, 1 time"):
        run_probe(frame, labels)


def test_a_class_that_validation_lacks_is_reported(cohort: Cohort, run_probe: Callable[..., ProbeResult]) -> None:
    frame, labels = cohort(people=80)
    labels.loc[frame["split"] == "val", "lesion0"] = 0
    assert any(
        "split val has no volume of class 1; settings are chosen inside train" in n
        for n in run_probe(frame, labels).notes
    )


def test_a_constant_quantity_is_named(cohort: Cohort, run_probe: Callable[..., ProbeResult]) -> None:
    frame, labels = cohort(people=80)
    frame["vector"] = [np.ones(48, np.float32)] * len(frame)
    labels["lesion0"] = np.random.default_rng(0).normal(300, 20, len(labels))
    (fault,) = run_probe(frame, labels, probes=["linear"]).faults
    assert fault["kind"] == "constant_predictor"
    assert "for every test case of lesion0: a constant predictor" in fault["what"]


@pytest.mark.slow
def test_labels_in_one_cell_are_a_target_each(cohort: Cohort, run_probe: Callable[..., ProbeResult]) -> None:
    frame, labels = cohort(people=120, prevalence=(0.4, 0.3))
    both = [
        ";".join(name for name, has in zip(("dr", "amd"), row, strict=True) if has) or "none"
        for row in labels[["lesion0", "lesion1"]].to_numpy()
    ]
    result = run_probe(frame, labels.assign(found=both), targets=["found"], task="multilabel", probes=["linear"])
    apart = run_probe(frame, labels, targets=["lesion1", "lesion0"], probes=["linear"])
    assert {row["target"] for row in result.rows} == {"found=amd", "found=dr", "macro"}
    ours, theirs = ([row["value"] for row in one.rows if row["metric"] == "auroc"] for one in (result, apart))
    assert ours == theirs
    with pytest.raises(UsageError, match="holds 160 different labels"):
        run_probe(
            frame, labels.assign(found=[f"x{n // 1 % 160}" for n in range(240)]), targets=["found"], task="multilabel"
        )


@pytest.mark.slow
def test_ordered_grades_use_their_order(
    cohort: Cohort, run_probe: Callable[..., ProbeResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octjepa.evaluate.probe_training.EPOCHS", 10)
    frame, labels = cohort(people=120, signal=0.0)
    grade = np.random.default_rng(1).integers(0, 4, len(frame))
    frame["vector"] = [
        (row + 0.9 * g * np.eye(48)[0]).astype(np.float32) for row, g in zip(frame["vector"], grade, strict=True)
    ]
    options = {"targets": ["grade"], "task": "ordinal", "probes": ["linear", "mlp"]}
    result = run_probe(frame, labels.assign(grade=grade), **options)
    for probe in ("linear", "mlp"):
        row = next(r for r in result.rows if r["name"] == "octjepa" and r["probe"] == probe)
        assert row["metric"] == "quadratic_kappa"
        assert row["value"] > 0.4, probe
    assert result.targets[0]["classes"] == ["0", "1", "2", "3"]
    weights, counts = (np.array(result.targets[0][key]) for key in ("class_weights", "counts"))
    assert np.allclose(weights * counts.item()["train"], sum(counts.item()["train"]) / 4, atol=1e-3)
