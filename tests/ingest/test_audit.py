"""What a folder of scans holds, told from headers, before anything is read into a store."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command_line import call
from oct_dicom import make_dataset, retina, save
from octjepa.errors import UsageError
from octjepa.ingest.audit import audit
from octjepa.read.personal_data import FIELD_KINDS

PIXELS = retina(frames=4, rows=32, columns=32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two scans of Jane Doe, one of them in a folder called after her, a nameless one, a photograph and a note."""
    root = tmp_path / "export"
    for location, named, modality in (
        ("doe/a.dcm", True, "OPT"),
        ("p7/b.dcm", True, "OPT"),
        ("p8/c.dcm", False, "OPT"),
        ("p8/fundus.dcm", False, "OP"),
    ):
        ds = make_dataset(PIXELS)
        ds.Modality = modality
        if not named:
            ds.PatientName = ds.PatientBirthDate = ""
        (root / location).parent.mkdir(parents=True, exist_ok=True)
        save(ds, root / location)
    (root / "cut.dcm").write_bytes(bytes(128) + b"DICM\xff\xff")
    (root / "readme.txt").write_text("Jane Doe, 1950-01-01")
    return root


def test_fields_are_counted_and_nothing_is_quoted(folder: Path) -> None:
    found = audit([folder]).to_json()
    assert found["files"] == 5
    assert found["by_kind"] == {"dicom OP": 1, "dicom OPT": 3, "dicom without modality": 1}
    assert found["personal_data"]["PatientName"] == {"files": 2, "kind": "name", "direct": True}
    assert found["files_with_direct_data"] == 2
    assert found["paths_with_personal_data"] == 1
    text = json.dumps(found).lower()
    assert "doe" not in text
    assert "1950" not in text


def test_inspect_tells_it_for_a_folder_and_masks_it_for_a_file(folder: Path) -> None:
    message = call("inspect", folder, "--json")
    assert message.json["kind"] == "source"
    assert message.json["personal_data"]["PatientBirthDate"]["files"] == 2
    one = call("inspect", folder / "p7" / "b.dcm", "--json")
    assert one.json["personal_data"]["PatientName"] == "name, masked"
    assert set(one.json["personal_data"]) <= set(FIELD_KINDS)
    for outcome in (message, one):
        assert "jane" not in (outcome.out + outcome.err).lower()


def test_a_folder_without_scans_is_reported(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("nothing")
    with pytest.raises(UsageError, match="no OCT scan"):
        audit([tmp_path])


def test_names_inside_other_formats_are_found_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", oct_bscans=PIXELS, name="Miller", dob="19500101")
    found = audit([tmp_path]).to_json()
    assert found["by_kind"] == {"npz": 1}
    assert found["files_with_direct_data"] == 1
    assert set(found["personal_data"]) == {"PatientName", "PatientBirthDate"}
    assert call("inspect", tmp_path / "b.npz", "--json").json["personal_data"]["PatientName"] == "name, masked"


def test_a_reader_that_fails_ends_neither_file_nor_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octjepa.ingest import audit as module

    def failing(*_: object) -> None:
        raise RuntimeError("Doe^Jane")

    monkeypatch.setattr(module, "read_scan", failing)
    np.save(tmp_path / "a.npy", PIXELS)
    folder = tmp_path / "P7"
    folder.mkdir()
    for number, frame in enumerate(PIXELS):
        Image.fromarray(frame).save(folder / f"b{number}.png")
    found = audit([tmp_path]).to_json()
    assert found["files"] == 2
    assert all(kind.endswith(", refused") for kind in found["by_kind"])
