"""What a data manager finds in the ledger and the counts: links, images next to scans, empty files, rows and paths."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from PIL import Image

from oct_dicom import make_dataset, retina, save
from octjepa.convert.scans import convert_sources
from octjepa.errors import NothingReadError, UsageError, VolumeRejected
from octjepa.ingest import Discovery, build_store, discover
from octjepa.ingest.audit import audit
from octjepa.ingest.one_file import refused
from octjepa.ingest.output_names import OutputNames
from octjepa.ingest.results_record import ResultsRecord
from octjepa.read.manifest import find_row
from octjepa.read.personal_data import StatedPerson
from octjepa.read.reader import read_volume
from octjepa.read.written_results import CONVERTED
from octjepa.reasons import rejection
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from vendor_files import e2e_bytes


def scan(path: Path, content: bytes = bytes(128) + b"DICM") -> Path:
    """A file, without `content` what is recognised as DICOM."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def manifest(
    root: Path, *rows: str, name: str = "manifest.tsv", columns: str = "person_id\tfilepath\tlaterality"
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("\n".join([columns, *rows]) + "\n")
    return root / name


def names(found: Discovery) -> list[str]:
    return [file.name for file in found.files]


def reasons(found: Discovery) -> dict[str, str]:
    return {one.source.name: one.reason for one in found.refused}


def refuse_to_list(patch: pytest.MonkeyPatch, ending: str) -> None:
    """Folders whose path has this ending cannot be listed; root, who runs many tests, may list every folder."""
    really = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith(ending):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path)

    patch.setattr(os, "scandir", refuse)


def test_of_a_file_and_a_link_to_it_the_file_is_read(tmp_path: Path) -> None:
    real = scan(tmp_path / "b" / "P5_OD.dcm")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "case1.dcm").symlink_to(real)
    for sources in ([tmp_path], [f"{tmp_path}/*/*.dcm"], [tmp_path / "a" / "case1.dcm", real]):
        found = discover(sources)
        assert [file.path for file in found.files] == [real]
        assert found.ignored == {"link to a file that is read": 1}
    assert not discover([tmp_path / "b", real]).ignored  # found twice, by one name
    with pytest.raises(UsageError, match="1 path_escapes"):  # the file itself lies elsewhere
        discover([tmp_path / "a"])
    (tmp_path / "chosen.txt").write_text("a/case1.dcm")
    assert names(discover([tmp_path / "chosen.txt"])) == ["a/case1.dcm"]  # a list is the user's own choice
    assert discover([tmp_path / "a", real]).ignored == {"link to a file that is read": 1}
    (tmp_path / "chosen.txt").unlink()
    manifest(tmp_path, "1\ta/case1.dcm\tL")
    assert names(discover([tmp_path])) == ["a/case1.dcm"]  # the row speaks of it by this name


def test_tables_called_csv_are_read_like_those_called_tsv(tmp_path: Path) -> None:
    for name in ("commas", "semicolons"):
        scan(tmp_path / name / "a.dcm")
    columns = "person_id,filepath,laterality,slice_thickness"
    manifest(tmp_path / "commas", "C1,a.dcm,L,0.26", name="manifest.csv", columns=columns)
    table = manifest(
        tmp_path / "semicolons", "C2;a.dcm;R;0,26", name="manifest.csv", columns=columns.replace(",", ";")
    )  # as a spreadsheet writes it where decimals have a comma
    manifest(tmp_path / "semicolons", "C2;61;val", name="participants.csv", columns="person_id;age;recommended_split")
    found = discover([tmp_path])
    rows = {file.name: file.row for file in found.files}
    assert {name: row and row.person_id for name, row in rows.items()} == {
        "commas/a.dcm": "C1",
        "semicolons/a.dcm": "C2",
    }
    assert {row and row.slice_thickness_mm for row in rows.values()} == {0.26}
    for source in (tmp_path, tmp_path / "semicolons", table, tmp_path / "semicolons" / "a.dcm"):
        (person,) = discover([source]).participants
        assert (person["person_id"], person["age"], person["recommended_split"]) == ("C2", 61.0, "val")
    manifest(tmp_path / "commas", "T1\ta.dcm\tL")  # of two the .tsv speaks
    (file,) = discover([tmp_path / "commas"]).files
    assert file.row is not None
    assert file.row.person_id == "T1"


def test_another_programs_manifest_is_reported_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for source in (tmp_path / "set", tmp_path):
        path = scan(tmp_path / "set" / "a.dcm")
        manifest(tmp_path / "set", "1,2", name="manifest.csv", columns="series,size")
        manifest(tmp_path, "1,2", name="participants.csv", columns="name,size")
        caplog.clear()
        assert [file.row for file in discover([source]).files] == [None]
        assert caplog.text.count("manifest.csv has no column 'filepath' (found 2 other columns)") == 1
        assert caplog.text.count("participants.csv has no column of person ids") == 1
    assert find_row(path) is None


def test_every_path_is_reported_relative_to_the_source(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "top" / "set", scan(tmp_path / "elsewhere" / "x.dcm")
    for name in ("sub/c.dcm", "sub/e.dcm"):
        scan(root / name)
    (tmp_path / "alias").symlink_to(root)
    table = manifest(
        root,
        f"1\t{root}/sub/c.dcm\tL",
        "2\tsub/none.dcm\tL",
        "3\tsub/e.dcm\tL",
        "4\tsub/e.dcm\tL",
        f"5\t{elsewhere}\tL",
        "6\t../other/y.dcm\tL",
        "7\tC:\\eyes\\z.dcm\tL",
        f"8\t{tmp_path}/alias/sub/d.dcm\tR",
    )
    for source, prefix in ((tmp_path / "top", "set/"), (root, ""), (table, "")):
        found = discover([source])
        assert {file.name: file.row and file.row.person_id for file in found.files} == {f"{prefix}sub/c.dcm": "1"}
        assert reasons(found) == {
            f"{prefix}sub/none.dcm": "manifest_row_without_file",
            f"{prefix}sub/d.dcm": "manifest_row_without_file",  # by way of another name of the root
            f"{prefix}sub/e.dcm": "manifest_disagrees",
            f"{prefix}x.dcm": "path_escapes",
            f"{prefix}../other/y.dcm": "path_escapes",
            f"{prefix}z.dcm": "path_escapes",
        }
        assert not any(str(tmp_path) in one.source.name + one.detail for one in found.refused)
    absolute = next(one for one in found.refused if one.source.name == "x.dcm")
    assert absolute.detail.startswith("an absolute path that leads out")


def test_an_empty_file_among_scans_without_suffix_is_reported(tmp_path: Path) -> None:
    scan(tmp_path / "IM0001")
    scan(tmp_path / "IM0002", b"")
    scan(tmp_path / "README", b"text")
    scan(tmp_path / "other" / "scan.dcm")
    scan(tmp_path / "other" / "DONE", b"")  # nothing here is called so
    found = discover([tmp_path])
    assert names(found) == ["IM0001", "IM0002", "other/scan.dcm"]
    assert found.ignored == {"no suffix": 2}
    with pytest.raises(VolumeRejected, match="empty_file: zero bytes"):
        read_volume(tmp_path / "IM0002")


def test_numbered_images_beside_a_scan_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder, other in (("P1", "extra.dcm"), ("P2", "IM0001"), ("P3", "notes.txt")):
        scan(tmp_path / folder / other)
        for number in range(1, 7):
            Image.new("L", (8, 8)).save(tmp_path / folder / f"{number}.png")
    (tmp_path / "P3" / "notes.txt").write_text("text")
    scan(tmp_path / "P4" / "one.dcm")
    Image.new("L", (8, 8)).save(tmp_path / "P4" / "fundus_1.png")  # one picture is not a scan
    found = discover([tmp_path])
    assert names(found) == ["P1/extra.dcm", "P2/IM0001", "P3", "P4/one.dcm"]
    assert reasons(found) == {"P1": "images_beside_scan", "P2": "images_beside_scan"}
    assert {one.detail for one in found.refused} == {"6 images"}
    assert "2 images_beside_scan: numbered images next to a scan of another format" in caplog.text
    assert reasons(discover([tmp_path / "P1"])) == {"P1": "images_beside_scan"}


def test_rows_of_images_speak_of_their_scan(tmp_path: Path) -> None:
    for number in range(1, 7):
        for folder in ("one", "all", "differ"):
            scan(tmp_path / folder / f"{number}.png", b"")
    rows = [f"A2\tall/{number}.png\tL" for number in range(1, 7)]
    table = manifest(tmp_path, "A1\tone/1.png\tL", *rows, "A3\tdiffer/1.png\tL", "A4\tdiffer/2.png\tL")
    for source in (tmp_path, table):
        found = discover([source])
        assert {file.name: file.row and file.row.person_id for file in found.files} == {"one": "A1", "all": "A2"}
        assert reasons(found) == {"differ": "manifest_disagrees"}
        assert found.files_without_row == 0


def test_a_series_with_contradictory_rows_keeps_its_files(tmp_path: Path) -> None:
    """Only the last of 70 files states the person: all of them are read to mask the path."""
    scan(tmp_path / "other.dcm")
    (tmp_path / "Doe_Jane").mkdir()
    for number in range(70):
        frame = make_dataset(retina(1, seed=number))
        frame.SeriesInstanceUID, frame.InstanceNumber = "1.2.3", number + 1
        if number < 69:
            del frame.PatientName, frame.PatientBirthDate
        save(frame, tmp_path / "Doe_Jane" / f"{number:02}.dcm")
    manifest(tmp_path, "A1\tDoe_Jane/00.dcm\tL", "A2\tDoe_Jane/01.dcm\tL")
    (refusal,) = discover([tmp_path]).refused
    assert (refusal.reason, len(refusal.source.series)) == ("manifest_disagrees", 70)
    assert refused(refusal.source, "discover", refusal.reason, refusal.detail).entry["file"] == "***"


@pytest.mark.parametrize("listed", ["folder", "files"])
def test_rows_of_a_series_speak_of_its_scan(listed: str, tmp_path: Path) -> None:
    """By the folder that holds a file per B-scan, or by each of these files; from the tree and from the table."""
    files = [f"{number}.dcm" for number in range(6)]
    for number, name in enumerate(files):
        frame = make_dataset(retina(1))
        frame.SeriesInstanceUID, frame.InstanceNumber = "1.2.3", number
        save(frame, tmp_path / "P9" / name)
    rows = ["/P9"] if listed == "folder" else [f"/P9/{name}" for name in files]
    table = manifest(tmp_path, *(f"1234\t{row}\tR" for row in rows))
    for source in (tmp_path, table):
        found = discover([source])
        (file,) = found.files
        assert (file.name, found.refused) == ("P9", [])
        assert file.row is not None
        assert file.row.person_id == "1234"
        assert file.member


def test_a_row_of_a_zarr_folder_speaks_of_its_scan(tmp_path: Path) -> None:
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / ".zgroup").write_text("{}")
    table = manifest(tmp_path, "1234\t/a.zarr\tL")
    for source in (tmp_path, table):
        found = discover([source])
        assert (names(found), found.refused) == (["a.zarr"], [])
        assert found.files[0].row is not None
        assert found.files[0].row.person_id == "1234"


def test_a_row_that_names_a_pipe_is_refused_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.dcm")
    scan(tmp_path / "a.dcm")
    manifest(tmp_path, "1\t/x.dcm\tL", "2\t/a.dcm\tL")
    (refusal,) = discover([tmp_path]).refused

    def name_and_record() -> None:
        refused(refusal.source, "discover", refusal.reason, refusal.detail)
        OutputNames([refusal.source], ResultsRecord(tmp_path, CONVERTED)).of(refusal.source, [], "0" * 64)

    recording = threading.Thread(target=name_and_record, daemon=True)
    recording.start()
    recording.join(10)
    assert not recording.is_alive()


def series(
    folder: Path, uid: str, damaged: bool = True, names: tuple[str, ...] = ("Doe^Jane",), files: int = 6
) -> Path:
    """A DICOM file per B-scan, the first of them truncated; file k states the name `names[k]`, or the last of them."""
    for number in range(files):
        frame = make_dataset(retina(1, seed=number))
        frame.SeriesInstanceUID, frame.InstanceNumber = uid, number + 1
        frame.PatientName = names[min(number, len(names) - 1)]
        if damaged and number == 0:
            frame.PixelData = frame.PixelData[:100]
        save(frame, folder / f"{uid}_{number}.dcm")
    return folder


def test_the_folder_of_a_damaged_series_hides_the_person_of_its_files(tmp_path: Path) -> None:
    series(tmp_path / "set" / "Doe_Jane_19500101", "1.2.3", names=("anonymous", "", "Doe^Jane"))
    store = tmp_path / "store"
    with pytest.raises(NothingReadError):
        build_store([tmp_path / "set"], store, Preprocessing(image_size=(16, 32, 32)))
    (refusal,) = Store.open(store).quarantine
    assert (refusal["reason"], refusal["file"]) == ("truncated", "***")
    (scan,) = convert_sources([str(tmp_path / "set")], tmp_path / "converted", "nifti").refused
    assert (scan.reason, scan.scan) == ("truncated", "***")


def test_a_series_states_the_person_of_its_own_files(tmp_path: Path) -> None:
    """Two people in one folder are not taken for each other."""
    series(tmp_path / "set", "1.2.3")
    series(tmp_path / "set", "1.2.4", names=("Roe^Richard",))
    found = discover([tmp_path / "set"]).files
    assert [file.stated_person().name for file in found] == ["Doe^Jane", "Roe^Richard"]
    os.mkfifo(tmp_path / "set" / "1.2.3_00.dcm")
    (tmp_path / "set" / "1.2.3_0.dcm").unlink()  # gone since the search
    assert found[0].stated_person() == StatedPerson("Doe^Jane", "19500101", "")


def test_a_refused_folder_hides_the_person_of_the_files_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "Doe_Jane"
    series(folder, "1.2.3", damaged=False, files=1)
    os.mkfifo(folder / "0.dcm")
    for number in range(1, 7):
        Image.new("L", (8, 8)).save(folder / f"{number}.png")
    (refusal,) = discover([tmp_path / "set"]).refused
    assert (refusal.reason, refusal.source.name) == ("images_beside_scan", "Doe_Jane")
    assert OutputNames.shown(refusal.source, []) == "***"
    assert list(audit([tmp_path / "set"]).refused) == ["***"]


def test_files_that_are_part_of_a_scan_leave_the_quarantine(tmp_path: Path) -> None:
    folder, store, contract = tmp_path / "set" / "P1", tmp_path / "store", Preprocessing(image_size=(16, 32, 32))
    series(folder, "1.2.3", damaged=False)
    with pytest.raises(NothingReadError, match="single_frame_series"):
        build_store([f"{folder}/*_[0-2].dcm"], store, contract)
    build_store([folder], store, contract)
    assert not Store.open(store).quarantine


def test_a_folder_that_can_be_listed_again_leaves_the_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, contract = tmp_path / "store", Preprocessing(image_size=(16, 32, 32))
    scan(tmp_path / "set" / "a.dcm")
    scan(tmp_path / "set" / "locked" / "below" / "b.dcm")
    with monkeypatch.context() as patch:
        refuse_to_list(patch, "locked")
        with pytest.raises(NothingReadError):
            build_store([tmp_path / "set"], store, contract)
        assert "unreadable_folder" in {entry["reason"] for entry in Store.open(store).quarantine}
        with pytest.raises(NothingReadError):
            build_store([tmp_path / "set"], store, contract)
        assert "unreadable_folder" in {entry["reason"] for entry in Store.open(store).quarantine}
    with pytest.raises(NothingReadError):
        build_store([tmp_path / "set"], store, contract)
    assert [entry["file"] for entry in Store.open(store).quarantine] == ["a.dcm", "locked/below/b.dcm"]


# -- refusals that say nothing about a file's content --

SMALL = Preprocessing(image_size=(16, 32, 32))


def volumes_at(store: Path) -> list[str]:
    """The files of the volumes in a store whose chunks are there."""
    made = Store.open(store)
    return sorted(entry.file for entry in made.entries() if made.has_files(entry.volume_id))


def test_a_refused_link_leaves_the_volume_of_its_target(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for seed, name in enumerate("ab"):
        save(make_dataset(retina(seed=seed)), tmp_path / name / f"{name}.dcm")
    build_store([tmp_path / "a"], store, SMALL)
    (tmp_path / "b" / "link.dcm").symlink_to("../a/a.dcm")
    assert build_store([tmp_path / "b"], store, SMALL, max_lost=1).by_reason == {"path_escapes": 1}
    assert volumes_at(store) == ["a.dcm", "b.dcm"]
    assert build_store([tmp_path / "a"], store, SMALL).skipped == 1
    assert [entry["file"] for entry in Store.open(store).quarantine] == ["link.dcm"]  # a is no cause to forget it


@pytest.mark.parametrize("reason", ["timed_out", "no_decoder", "worker_died", "size_implausible"])
def test_a_file_that_this_machine_cannot_read_keeps_its_volume(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store = tmp_path / "set" / "a.dcm", tmp_path / "store"
    save(make_dataset(retina()), path)
    build_store([path.parent], store, SMALL)
    os.utime(path, (1, 1))

    def fail(*_: object, **__: object) -> NoReturn:
        raise rejection(reason, "")

    with monkeypatch.context() as patch:
        patch.setattr("octjepa.ingest.one_file.read_volume", fail)
        assert build_store([path.parent], store, SMALL, max_lost=1).by_reason == {reason: 1}
    assert volumes_at(store) == ["a.dcm"]
    build_store([path.parent], store, SMALL)
    assert Store.open(store).quarantine == []


def test_a_folder_of_images_that_cannot_be_listed_keeps_its_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, folder = tmp_path / "store", tmp_path / "set" / "eye"
    folder.mkdir(parents=True)
    for number, pixels in enumerate(retina(10)):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    save(make_dataset(retina(seed=1)), tmp_path / "set" / "b.dcm")
    spacing_mm = (0.05, 0.0026, 0.0117)
    build_store([tmp_path / "set"], store, SMALL, spacing_mm=spacing_mm)
    with monkeypatch.context() as patch:
        refuse_to_list(patch, "eye")
        summary = build_store([tmp_path / "set"], store, SMALL, spacing_mm=spacing_mm, max_lost=1)
    assert summary.by_reason == {"unreadable_folder": 1}
    assert volumes_at(store) == ["b.dcm", "eye"]


def listed_in(store: Path) -> dict[str, str]:
    return {entry["file"]: entry["reason"] for entry in Store.open(store).quarantine}


def test_what_the_search_refused_leaves_the_quarantine_when_it_is_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, store = tmp_path / "set", tmp_path / "store"
    save(make_dataset(retina()), root / "a.dcm")
    manifest(root, "1\ta.dcm\tR", "2\t../b.dcm\tR", "3\tgone.dcm\tL")
    (root / "link.dcm").symlink_to(scan(tmp_path / "elsewhere.dcm"))
    for folder in (root, tmp_path / "other"):
        scan(folder / "more.zip", b"PK")
    save(make_dataset(retina(seed=1)), tmp_path / "other" / "c.dcm")
    build_store([root, tmp_path / "other"], store, SMALL, max_lost=1)
    expected = {
        "../b.dcm": "path_escapes",
        "gone.dcm": "manifest_row_without_file",
        "link.dcm": "path_escapes",
        "more.zip": "archive_not_expanded",
    }
    assert listed_in(store) == expected
    assert len(Store.open(store).quarantine) == 5  # there are two archives
    (root / "more.zip").unlink()
    (root / "link.dcm").unlink()
    manifest(root, "1\ta.dcm\tR")
    (root / "locked").mkdir()
    really = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        build_store([root], store, SMALL, max_lost=1)  # what is in the locked folder is not known
        assert listed_in(store) == {**expected, "locked": "unreadable_folder"}
    build_store([root], store, SMALL)
    assert listed_in(store) == {"more.zip": "archive_not_expanded"}  # that of the other source, which was not searched


def test_a_file_in_which_scans_are_found_leaves_the_quarantine(tmp_path: Path) -> None:
    path, store = tmp_path / "set" / "eyes.e2e", tmp_path / "store"
    scan(path, b"x")
    save(make_dataset(retina(seed=1)), tmp_path / "set" / "b.dcm")
    build_store([path.parent], store, SMALL, max_lost=1)
    assert list(listed_in(store)) == ["eyes.e2e"]
    linear = np.maximum(retina(12).astype(np.float32) / 255, 1e-12)
    path.write_bytes(e2e_bytes([linear, linear[::-1]]))
    build_store([path.parent], store, SMALL, max_lost=1)
    assert "eyes.e2e" not in listed_in(store)
