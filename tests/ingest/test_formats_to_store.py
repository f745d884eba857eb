"""Scans of open formats go into a store like DICOM: their spacing by option, their labels into labels.tsv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eye_files import write_images
from octjepa.config import load_recipe
from octjepa.errors import UsageError
from octjepa.evaluate.labels import read_labels
from octjepa.ingest import build_store
from octjepa.ingest.build import IngestSummary
from octjepa.inspection import describe
from octjepa.phantom import make_eye
from octjepa.read.reader import parse_spacing
from octjepa.store import Store

EYES = [make_eye(7, person, "OD", "zeiss_cirrus") for person in range(2)]
SPACING = tuple(round(mm, 6) for mm in EYES[0].spacing_mm)
PREPROCESSING = load_recipe("smoke_test").preprocessing


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    folder = tmp_path / "scans"
    folder.mkdir()
    for number, eye in enumerate(EYES):
        np.savez(
            folder / f"data_{number}.npz",
            oct_bscans=eye.pixels,
            glaucoma=number,
            laterality="OD",
            person_id=f"P{number}",
        )
    write_images(folder / "P9" / "OS", EYES[0].pixels[:, :, ::-1])
    return folder


def ingest(scans: Path, spacing_mm: Any = None) -> IngestSummary:
    return build_store([scans], scans.parent / "store", PREPROCESSING, max_lost=1.0, spacing_mm=spacing_mm)


def test_spacing_by_option_and_labels_into_the_store(scans: Path) -> None:
    with pytest.raises(UsageError, match="spacing_unknown"):
        ingest(scans)  # no file names a spacing
    made = ingest(scans, SPACING)
    assert (made.accepted, made.quarantined) == (3, 0)
    store = Store.open(scans.parent / "store")
    assert sorted(store.table["format"]) == ["images", "npz", "npz"]
    assert set(store.table["provenance_slice"]) == {"option"}
    assert sorted(store.table["eye"]) == ["OD", "OD", "OS"]
    labels = read_labels(store.path / "labels.tsv", ["glaucoma"])
    assert labels.values["glaucoma"] == {("P0", "OD"): "0", ("P1", "OD"): "1"}


@pytest.mark.slow
def test_another_spacing_reads_again_and_none_keeps_what_is_there(scans: Path) -> None:
    ingest(scans, SPACING)
    assert (ingest(scans, SPACING).skipped, ingest(scans).skipped) == (3, 3)
    wider = (SPACING[0], SPACING[1], SPACING[2] * 1.1)
    again = ingest(scans, wider)
    assert (again.accepted, again.skipped) == (3, 0)
    assert set(Store.open(scans.parent / "store").table["spacing_x_mm"]) == {wider[2]}
    first = sorted(scans.glob("*.npz"))[0]
    np.savez(first, oct_bscans=EYES[0].pixels, glaucoma=1, laterality="OD", person_id="P0")
    assert ingest(scans, wider).accepted == 1  # a corrected label, the same pixels
    store = Store.open(scans.parent / "store")
    assert set(read_labels(store.path / "labels.tsv", ["glaucoma"]).values["glaucoma"].values()) == {"1"}


def test_a_spacing_by_hand_is_reported_and_taken_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    np.savez(folder / "scan.npz", oct_bscans=EYES[0].pixels, spacing_mm=SPACING)
    wrong = (SPACING[0] * 1.5, *SPACING[1:])
    assert ingest(folder, wrong).spacing_overridden == 0
    assert not [record for record in caplog.records if "--spacing file" in record.message]
    retained = ingest(folder)
    assert (retained.skipped, retained.spacing_overridden) == (1, 1)
    assert [record.message for record in caplog.records if "--spacing file" in record.message]
    assert ingest(folder, parse_spacing("file")).accepted == 1
    table = Store.open(tmp_path / "store").table
    assert list(table["spacing_z_mm"]) == [SPACING[0]]
    assert list(table["provenance_slice"]) == ["header"]
    assert list(table["user_spacing_mm"]) == [""]
    again = ingest(folder, "file")
    assert (again.skipped, again.spacing_overridden) == (1, 0)
    assert ingest(folder).skipped == 1


def test_a_changed_file_keeps_the_spacing_that_was_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    np.savez(folder / "scan.npz", oct_bscans=EYES[0].pixels)
    ingest(folder, SPACING)
    np.savez(folder / "scan.npz", oct_bscans=EYES[0].pixels, laterality="OD")
    again = ingest(folder)
    assert (again.accepted, again.spacing_overridden) == (1, 1)
    assert [record for record in caplog.records if "1 volumes keep the spacing" in record.message]
    (entry,) = Store.open(tmp_path / "store").entries()
    assert (entry.eye, entry.stated_spacing_mm) == ("OD", SPACING)
    assert ingest(folder).skipped == 1


def test_an_absurd_spacing_is_warned_of(scans: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = ingest(scans, (0.002, 0.004, 0.002))
    result = [record for record in caplog.records if "extent_implausible" in record.message]
    assert len(result) == 1
    assert result[0].message.startswith(f"{made.notes['extent_implausible']} volumes with note")
    assert made.accepted == made.notes["extent_implausible"] > 0


def test_inspect_reads_folders_of_images_and_takes_a_spacing(scans: Path) -> None:
    assert describe(scans / "P9" / "OS")["reasons"][0]["reason"] == "spacing_unknown"
    assert describe(scans / "P9" / "OS", SPACING)["laterality"] == "OS"
    assert describe(scans)["kind"] == "source"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2", "not of the form"),
        ("a,b,c", "not of the form"),
        ("47,2.6,11.7", "47 mm along slice"),
        ("0.047,0.2,0.0117", "0.2 mm along depth"),
        ("0.047,0.0117,0.0039", "the other way round"),
        ("nan,0.002,0.01", "along slice"),
    ],
)
def test_a_wrong_spacing_is_reported(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_spacing(text)
    assert parse_spacing("0.047,0.0026,0.0117") == (0.047, 0.0026, 0.0117)
