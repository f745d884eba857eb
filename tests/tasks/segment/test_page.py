"""The page of a segmentation: from its folder alone, with its figures and pictures, and faults first."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from command_line import call
from octjepa.metrics.findings import Findings
from octjepa.report import write_report
from octjepa.report.html import number, signed
from octjepa.store.index import IndexEntry
from octjepa.tasks.segment.bscans import fullest_bscan, median_and_lowest, write_bscans
from octjepa.tasks.segment.evaluation import ScanFigures, report_classes
from octjepa.tasks.segment.folder import load_head
from octjepa.tasks.segment.labelled_volumes import LabelledVolumes
from page_outline import Outline

from .conftest import RECIPE, Line

pytestmark = pytest.mark.timeout(400)  # the first one makes the cohort and imports MONAI


def read(line: Line, page: Path) -> str:
    assert call("report", line.out, "--out", page).code == 0
    return page.read_text(encoding="utf-8").replace("<wbr>", "")  # where a long file name may break


def test_the_page_says_who_was_learned_from_and_what_stands_beside_the_head(line: Line, tmp_path: Path) -> None:
    page = read(line, tmp_path / "page.html")
    outline = Outline(page)
    assert (outline.open, outline.scripts, outline.unlabelled) == ([], 0, [])
    assert set(outline.targets) <= set(outline.ids)
    assert {"cohort", "eyes", "probe", "files", "reproduce"} <= set(outline.ids)
    assert not {"masks", "training", "tokens"} & set(outline.ids)
    assert "Missing" not in page
    assert "Read this first" not in page
    assert "http://" not in page
    assert "https://" not in page
    assert "It was trained on 8 labelled scans of 4 people and evaluated once on 12 scans of 6 others" in page
    for pair in line.results["paired"]:
        assert pair["reference"] in {"untrained", "intensity", "position_prior"}
        span = f" ({signed(pair['low'])} to {signed(pair['high'])})" if pair["low"] is not None else ","
        assert f"{signed(pair['difference'])}{span}" in page
    ours = re.findall(r'<tr class="ours">.*?</tr>', page, re.DOTALL)
    values = [
        line.results["metrics"][key]["value"] for key in ("dice", *(f"dice_{name}" for name in line.results["classes"]))
    ]
    assert sorted(re.search(r"<b>(.*?)</b>", row)[1] for row in ours) == sorted(map(number, values))
    assert "octjepa segment recipe.yaml --from ENCODER" in page
    people = set(line.store.table["person_id"])
    assert not [person for person in people if re.search(rf">[^<]*\b{person}\b[^/<.]*<", page)]


def test_the_pictures_are_those_of_the_head_on_the_typical_and_the_worst_scan(line: Line, tmp_path: Path) -> None:
    cohort = LabelledVolumes(line.store, line.labels, RECIPE)
    typical, worst = line.results["bscans"]
    assert (typical["which"], worst["which"]) == ("typical", "worst")
    assert worst["dice"] < typical["dice"]
    head = load_head(line.out, str(line.encoder)).head
    with np.load(line.out / "bscans.npz") as arrays:
        for one in (typical, worst):
            volume, true = line.store.read(one["volume_id"]), cohort.stored[one["volume_id"]]
            at = one["bscan"] - 1
            message = head.scores(volume)[:, at].argmax(axis=0)
            for part, expected in (("pixels", volume.pixels[at]), ("true", true[at]), ("predicted", message)):
                assert np.array_equal(arrays[f"{one['which']}_{part}"], expected)
    page = read(line, tmp_path / "page.html")
    for one, why in ((typical, "the median"), (worst, "the lowest")):
        assert f"{why} Dice of 12 test scans, {one['dice']:.3f}: " in page
        assert f"volume {one['volume_id']}, B-scan {one['bscan']} of {one['of']}" in page
    assert page.count('aria-label="True labels') == page.count('aria-label="Predicted labels') == 2


def test_faults_stand_first_and_what_is_absent_is_named(line: Line, tmp_path: Path) -> None:
    out = Path(shutil.copytree(line.out, tmp_path / "out"))  # its store is not next to it any more
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    results["faults"] = [{"kind": "class_never_said", "what": "small predicts fluid for no voxel"}]
    (out / "results.json").write_text(json.dumps(results), encoding="utf-8")
    page = write_report(out).read_text(encoding="utf-8")
    assert page.index("Class never found.</strong> small predicts fluid") < page.index('id="cohort"')
    assert page.count("Missing: the store.") == 3  # in cohort, eyes and files
    (out / "bscans.npz").write_bytes(b"half")
    page = write_report(out).read_text(encoding="utf-8")
    assert "Missing: the B-scans." in page
    assert "bscans.npz cannot be read" in page
    assert page.count('class="headline"') == 3  # the rest stands
    assert "Thickness in the ETDRS sectors" in page
    (out / "results.json").write_text(json.dumps(results | {"rows": [{"name": "small"}]}), encoding="utf-8")
    damaged = write_report(out).read_text(encoding="utf-8")
    assert "results.json is damaged: the key &#39;class&#39; is missing" in damaged
    assert str(tmp_path) not in page
    (out / "results.json").unlink()
    assert "Missing: the probe." in write_report(out).read_text(encoding="utf-8")


def test_the_look_at_the_test_people_is_counted_beside_the_labels(line: Line) -> None:
    (use,) = line.results["uses"]
    assert (use["looks"], use["measured"]) == (1, 3)  # of an untrained encoder, itself is its twin; grey levels, prior
    assert Path(use["file"]).parent == line.labels.parent / "octjepa_test_uses"
    assert line.results["faults"] == []


def test_a_class_that_is_never_reported_though_it_is_there_is_a_fault() -> None:
    message_true = np.array([[5.0, 9, 9], [0, 0, 4], [0, 0, 0]])  # the second is missed, the third is not there
    nothing = np.zeros((3, 9))
    one = ScanFigures(message_true, np.zeros((3, 3)), np.zeros((3, 1, 1)), nothing, nothing)
    result = Findings()
    report_classes("small", [one, one], ("band", "fluid", "hole"), ["a", "b"], result)
    assert [fault.to_json() for fault in result.faults] == [
        {"kind": "class_never_said", "what": "small predicts fluid for no voxel of the test scans, which hold it"}
    ]


def test_scans_are_chosen_by_dice_and_b_scans_by_what_they_hold() -> None:
    assert median_and_lowest([0.5, 0.9, 0.7]) == {"typical": 2, "worst": 0}
    assert median_and_lowest([0.5, None, 0.7]) == {"typical": 2, "worst": 0}
    assert median_and_lowest([None, 0.7]) == {"only": 1}
    assert median_and_lowest([None]) == {}
    stored = np.zeros((5, 2, 2), np.uint8)
    stored[[0, 3], 0] = 1
    stored[1] = 255  # not labelled
    assert fullest_bscan(stored) == 3


def test_the_scans_of_a_median_are_those_with_a_dice(tmp_path: Path) -> None:
    counts = [np.array([[both, 10.0, 10.0]]) if both else np.zeros((1, 3)) for both in (0, 8, 0, 5, 2)]
    none = np.zeros((1, 9))
    scans = [ScanFigures(of, np.zeros((1, 3)), np.zeros((1, 1, 1)), none, none) for of in counts]
    stored = np.ones((1, 2, 2), np.uint8)
    common = {"content_hash": "", "person_id": "", "eye": "OD", "personal": "", "notes": "", "file": ""}
    entries = [IndexEntry(volume_id=str(number), split="test", **common) for number in range(len(scans))]
    preprocessing = SimpleNamespace(target_spacing_mm=(1.0, 1.0, 1.0))
    store = SimpleNamespace(read=lambda name: SimpleNamespace(pixels=stored), preprocessing=preprocessing)
    labelled = object.__new__(LabelledVolumes)
    vars(labelled).update(volumes=entries, store=store, stored={entry.volume_id: stored for entry in entries})
    scores = np.zeros((2, 1, 2, 2), np.float32)
    shown = write_bscans(tmp_path / "bscans.npz", lambda volume: scores, labelled, scans)
    assert [(one.which, one.volume_id, one.test_scans) for one in shown] == [("typical", "3", 3), ("worst", "4", 3)]
