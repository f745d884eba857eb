"""What a folder of scans holds, told from headers, before anything is read into a store."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command_line import call
from oct_dicom import make_dataset, retina, save
from octjepa.errors import UsageError, VolumeRejected
from octjepa.ingest.audit import audit
from octjepa.ingest.sources import discover
from octjepa.read.personal_data import FIELD_KINDS
from octjepa.read.reader import read_volume
from vendor_files import write_heyex_xml

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


@pytest.mark.parametrize("name", ["doe/{}.dcm", "p9/doe_{}.dcm"])
def test_paths_of_a_series_of_files_are_checked(folder: Path, name: str) -> None:
    for number in range(4):
        ds = make_dataset(PIXELS[number : number + 1])
        ds.SeriesInstanceUID, ds.InstanceNumber = "1.2.3", number + 1
        (folder / "series" / name).parent.mkdir(parents=True, exist_ok=True)
        save(ds, folder / "series" / name.format(number))
    found = audit([folder / "series"])
    assert (found.files, found.files_with_direct_data, found.paths_with_personal_data) == (1, 1, 1)


def test_inspect_tells_it_for_a_folder_and_masks_it_for_a_file(folder: Path) -> None:
    message = call("inspect", folder, "--json")
    assert message.json["kind"] == "source"
    assert message.json["personal_data"]["PatientBirthDate"]["files"] == 2
    one = call("inspect", folder / "p7" / "b.dcm", "--json")
    assert one.json["personal_data"]["PatientName"] == "name, masked"
    assert set(one.json["personal_data"]) <= set(FIELD_KINDS)
    for outcome in (message, one):
        assert "jane" not in (outcome.out + outcome.err).lower()


def test_listed_files_that_do_not_exist_are_named(folder: Path, tmp_path: Path) -> None:
    files = tmp_path / "files.txt"
    files.write_text("export/p7/b.dcm\nexport/gone.dcm\n")
    message = call("inspect", files, "--json").json
    assert message["files"] == 1
    assert message["refused"] == {"export/gone.dcm": "manifest_row_without_file: listed, but not there"}
    assert "gone.dcm manifest_row_without_file" in call("inspect", files).out
    assert audit([folder]).refused == {}


def test_pictures_without_a_scan_are_advised_to_be_read_as_bscans(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "texts").mkdir()
    Image.fromarray(PIXELS[0]).save(tmp_path / "pictures" / "x.png")
    (tmp_path / "texts" / "x.xlsx").write_bytes(b"PK")
    with pytest.raises(UsageError, match=r"left out: 1 \.png\): if the pictures are single B-scans, add --images"):
        discover([tmp_path / "pictures"])
    with pytest.raises(UsageError, match="no OCT scan in") as caught:
        discover([tmp_path / "texts"])
    assert "--images" not in str(caught.value)
    with pytest.raises(VolumeRejected, match=r"a single picture, not a volume: .* add --images"):
        read_volume(tmp_path / "pictures" / "x.png")


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


def test_the_device_that_another_format_states_is_counted(tmp_path: Path) -> None:
    path = write_heyex_xml(tmp_path / "export", [retina(6, 64, 48)])
    stated = call("inspect", path, "--json").json["device"]
    assert stated == "heidelberg_spectralis"
    assert audit([tmp_path]).to_json()["by_device"] == {stated: 1}


def test_a_device_that_repeats_the_name_of_the_person_is_left_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", oct_bscans=PIXELS, name="Miller", device="Miller")
    assert audit([tmp_path]).to_json()["by_device"] == {"unknown": 1}


@pytest.mark.parametrize("verb", ["inspect", "ingest"])
def test_a_table_of_labels_is_sent_to_the_commands_that_take_it(tmp_path: Path, verb: str) -> None:
    (tmp_path / "labels.csv").write_text("person_id,dme\n1,0\n", encoding="utf-8")
    store = ("--store", tmp_path / "store") if verb == "ingest" else ()
    outcome = call(verb, tmp_path / "labels.csv", *store)
    assert outcome.code == 2
    assert "A table of labels belongs to --labels of octjepa probe or finetune" in outcome.err
