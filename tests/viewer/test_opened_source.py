"""`octjepa view` opens a scan, a folder of scans and the answers of `octjepa segment` without a store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from command_line import call
from oct_dicom import make_dataset, retina, save
from octjepa import load_encoder
from octjepa.errors import NothingReadError, UsageError
from octjepa.ingest.build import build_store
from octjepa.ingest.remembered_sources import remember_sources, sources_of, spacings_of
from octjepa.phantom import make_eye
from octjepa.phantom.dicom import write_eye
from octjepa.read.reader import SpacingOption
from octjepa.viewer import server
from octjepa.viewer.opened_source import opened_source, scans_without_store
from octjepa.viewer.scans import Scans
from octjepa.viewer.server import open_scans

pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opened") / "deep" / "eyes"
    folder.mkdir(parents=True)
    for side in ("OD", "OS"):
        write_eye(folder / f"{side}.dcm", make_eye(3, 41, side, "heidelberg_spectralis"), 3)  # type: ignore[arg-type]
    return folder


@pytest.mark.slow
def test_a_scan_and_a_folder_of_scans_are_shown_without_a_store(eyes: Path) -> None:
    for source, count in ((eyes / "OD.dcm", 1), (eyes, 2)):
        with opened_source(source) as opened:
            shown = opened.shown
            scans = open_scans(shown, opened.folders)
            assert opened.notes == ()
            assert len(scans.ids) == count
            assert {scans.native_about(name).reason for name in scans.ids} == {""}
            assert scans.native(min(scans.ids)).volume.shape[0] > 8
            retained = Path(shown)
        assert not retained.exists()  # no copy of a scan stays behind
        assert sorted(path.name for path in eyes.iterdir()) == ["OD.dcm", "OS.dcm"]


def test_scans_to_look_at_cause_no_warnings_about_a_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):  # ingest would warn of two scans under one id
        dataset = make_dataset(retina(seed=number))
        dataset.PatientID = "7"
        save(dataset, tmp_path / "eyes" / f"{number}.dcm")
    with opened_source(tmp_path / "eyes"):
        assert [record.getMessage() for record in caplog.records if record.name.startswith("octjepa.ingest")] == []


def test_a_scan_without_a_spacing_is_shown_with_the_stated_one(tmp_path: Path) -> None:
    np.save(tmp_path / "eye.npy", retina())
    with pytest.raises(NothingReadError, match="spacing_unknown"), opened_source(tmp_path / "eye.npy"):
        pytest.fail("opened")
    stated_mm = (0.12, 0.004, 0.012)
    with opened_source(tmp_path / "eye.npy", spacing_mm=stated_mm) as opened:
        scans = open_scans(opened.shown, opened.folders)
        assert scans.native(min(scans.ids)).volume.spacing_mm == stated_mm
        refused = call("view", opened.shown, "--spacing", "0.12,0.004,0.012")
    assert (refused.code, "--spacing is for scans that are read" in refused.err) == (2, True)


def test_refused_files_are_named_on_stderr_and_on_the_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(retina(seed=1))
    dataset.PatientName = "Doe^Jane"
    (tmp_path / "eyes" / "doe").mkdir(parents=True)
    save(dataset, tmp_path / "eyes" / "doe" / "a.dcm")
    content = (tmp_path / "eyes" / "doe" / "a.dcm").read_bytes()
    (tmp_path / "eyes" / "doe" / "cut.dcm").write_bytes(content[: len(content) // 2])
    listened: list[Scans] = []
    monkeypatch.setattr(server, "app", lambda scans, key: listened.append(scans))
    monkeypatch.setattr(server, "_listen", lambda *_: None)
    server.serve(tmp_path / "eyes", 0, lambda url: None)
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("octjepa.viewer")]
    assert message.startswith("1 file not shown:\n")
    assert "/cut.dcm: truncated: " in message
    (note,) = listened[0].about().notes
    assert note.startswith("1 file not shown: ")
    assert note.endswith("/cut.dcm (truncated)")
    assert "doe" not in (message + note).lower()


def test_a_file_that_is_not_a_scan_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "letter.dcm").write_bytes(b"no scan")
    with pytest.raises(NothingReadError, match="not_dicom"), opened_source(tmp_path / "letter.dcm"):
        pass


def test_a_path_with_nothing_names_a_scan_among_the_sources(tmp_path: Path) -> None:
    message = r"no file or folder at .*: name a scan, a folder of scans"
    with pytest.raises(UsageError, match=message), opened_source(tmp_path / "nothing"):
        pass


@pytest.mark.slow
def test_the_answers_of_segment_are_shown_with_their_scans(eyes: Path, tmp_path: Path) -> None:
    options = ("--spacing", "0.24,0.0058,0.04", "--quiet", "--json")
    outcome = call("segment", eyes / "OS.dcm", "--out", tmp_path / "answers", *options)
    assert outcome.code == 0, outcome.err
    with opened_source(tmp_path / "answers") as opened:
        scans = open_scans(opened.shown, opened.folders)
        (name,) = scans.ids
        central = scans.etdrs(name).sectors["central"]
        assert central == outcome.json["scans"][0]["thickness_um"]["central"]  # the same numbers everywhere
    shutil.move(tmp_path / "answers", tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="--scans"), opened_source(tmp_path / "elsewhere"):
        pass
    (tmp_path / "elsewhere" / "index.html").write_text("page")
    with pytest.raises(UsageError, match=r"--scans, or open .*index\.html"), opened_source(tmp_path / "elsewhere"):
        pass
    with opened_source(tmp_path / "elsewhere", [str(eyes)]) as opened:
        assert opened.folders == [str(eyes)]


def spacings_shown(source: Path, *scans: Path, spacing_mm: SpacingOption = None) -> list[tuple[float, ...]]:
    """The spacings of the scans as they came, in order of their files."""
    with opened_source(source, list(map(str, scans)), spacing_mm) as opened:
        shown = open_scans(opened.shown, opened.folders)
        files = {shown.volumes.entry(name).file: shown.native(name).volume.spacing_mm for name in shown.ids}
        return [files[name] for name in sorted(files)]


def test_the_answers_of_segment_are_shown_with_the_spacing_that_segment_was_given(eyes: Path, tmp_path: Path) -> None:
    """The viewer measured with the spacing of the file, and showed another thickness than segment wrote."""
    for name in ("classes.json", "OD_boundaries.npz"):
        (tmp_path / name).write_text("{}")
    first, second = sorted(eyes.iterdir())
    of_file = spacings_shown(eyes)
    stated, another = (0.24, 0.0058, 0.04), (0.2, 0.005, 0.03)
    remember_sources(tmp_path, [first], None, stated)
    assert spacings_shown(tmp_path) == [stated]
    assert spacings_shown(tmp_path, spacing_mm=another) == [another]
    assert spacings_shown(tmp_path, spacing_mm="file") == of_file[:1]
    assert spacings_shown(tmp_path, eyes) == [stated, stated]  # the same scans, named by the user
    remember_sources(tmp_path, [second])
    assert spacings_shown(tmp_path) == [stated, of_file[1]]
    remember_sources(tmp_path, [second], None, another)
    assert spacings_shown(tmp_path) == [stated, another]
    remember_sources(tmp_path, [first, second], None, "file")
    assert spacings_shown(tmp_path) == of_file


def test_results_of_an_older_version_have_no_spacing(
    eyes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTJEPA_CACHE", str(tmp_path / "cache"))
    remember_sources(tmp_path, [eyes], None, (0.24, 0.0058, 0.04))
    (note,) = (tmp_path / "cache").rglob("*.json")
    content = json.loads(note.read_text())
    for damaged in ("0.24", [0.24, 0.0058], [0.24, 0.0058, 1e9]):
        note.write_text(json.dumps({**content, "spacings_mm": {str(eyes): damaged}}))
        assert spacings_of(tmp_path) == {str(eyes): None}
    note.write_text(json.dumps({"sources": content["sources"], "models": []}))
    assert spacings_of(tmp_path) == {str(eyes): None}
    assert sources_of(tmp_path) == [str(eyes)]


def test_a_network_that_is_gone_is_reported(eyes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("classes.json", "OD_boundaries.npz"):
        (tmp_path / name).write_text("{}")
    network = tmp_path / "network"
    network.mkdir()
    remember_sources(tmp_path, [eyes / "OD.dcm"], network)
    listened: list[Scans] = []
    monkeypatch.setattr(server, "app", lambda scans, key: listened.append(scans))
    monkeypatch.setattr(server, "_listen", lambda *_: None)
    server.serve(tmp_path, 0, lambda url: None)
    network.rmdir()
    server.serve(tmp_path, 0, lambda url: None)
    present, gone = listened
    assert (present.layers.is_adapted, present.about().notes) == (True, [])
    assert not gone.layers.is_adapted
    assert gone.about().notes == [
        "the adapted network that segmented these scans is gone: layers and fluid are those of the packaged network"
    ]


def test_the_results_of_pictures_are_shown_by_their_table(tmp_path: Path) -> None:
    for name in ("classes.json", "x_boundaries.npz", "images.csv", "x.png"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match=r"the viewer does not show: open the table .*images\.csv") as caught:
        scans_without_store(tmp_path, ["elsewhere"])
    assert "index.html" not in str(caught.value)
    (tmp_path / "images.csv").unlink()
    with pytest.raises(UsageError, match="name their folder with --scans") as caught:
        scans_without_store(tmp_path)
    assert "index.html" not in str(caught.value)


def test_a_store_finds_the_scans_that_were_ingested(eyes: Path, tmp_path: Path) -> None:
    build_store([eyes], tmp_path / "store", load_encoder("phantom-tiny").recipe.preprocessing)
    assert "--scans" in open_scans(tmp_path / "store").native_about(min(open_scans(tmp_path / "store").ids)).reason
    outcome = call("ingest", eyes, "--store", tmp_path / "store", "--recipe", "tiny_cpu", "--workers", 1, "--quiet")
    assert outcome.code == 0, outcome.err
    with opened_source(tmp_path / "store") as opened:
        assert opened.folders == [str(eyes)]
        scans = open_scans(opened.shown, opened.folders)
        assert scans.native_about(min(scans.ids)).reason == ""
    noted = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and b"deep/eyes" in path.read_bytes()]
    assert not noted  # a store holds no path


def test_sources_of_globs_and_of_absent_folders(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    remember_sources(tmp_path / "store", [tmp_path / "a" / "*.dcm", tmp_path / "gone", "gs://bucket/scans"])
    assert sources_of(tmp_path / "store") == [str(tmp_path / "a"), "gs://bucket/scans"]
    assert sources_of(tmp_path / "other") == []
    scans = [tmp_path / "a" / f"{number}.dcm" for number in range(300)]  # as a shell lists them for a/*.dcm
    for scan in scans:
        scan.touch()
    remember_sources(tmp_path / "answers", scans)
    assert sources_of(tmp_path / "answers") == [str(scan) for scan in scans]
