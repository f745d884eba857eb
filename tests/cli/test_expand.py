"""`octjepa expand` as a user calls it: figures, exit codes, and stops at any moment."""

from __future__ import annotations

import signal
import zipfile
from pathlib import Path

import pytest

from command_line import call, run, stop
from oct_dicom import make_dataset, retina, save

TREE = Path("retinal_oct", "structural_oct", "topcon_triton")
SCAN = bytes(128) + b"DICM"


def device(root: Path, people: int = 3, size: int = 200) -> Path:
    """`root`/topcon_triton/all.zip with a scan for each of some people."""
    path = root / "topcon_triton" / "all.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made:
        for person in range(people):
            made.writestr(f"{1000 + person}/scan {person}.dcm", SCAN + bytes(size))
    return path


def test_json_holds_the_agreed_keys(tmp_path: Path) -> None:
    device(tmp_path / "in")
    dry = call("expand", tmp_path / "in", tmp_path / "out", "--dry-run", "--json")
    assert dry.code == 0, dry.err
    assert not (tmp_path / "out").exists()
    result = call("expand", tmp_path / "in", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    assert {**dry.json, "dry_run": False, "seconds": 0} == {**result.json, "seconds": 0}
    assert (result.json["written"], result.json["skipped"], result.json["bytes"]) == (3, 0, 3 * 332)
    assert (result.json["refused"], result.json["nested"], result.json["archives"]) == ([], [], 1)
    again = call("expand", tmp_path / "in", tmp_path / "out", "--quiet")
    assert again.code == 0
    assert "skipped" in again.out
    assert len(list((tmp_path / "out" / TREE).rglob("*.dcm"))) == 3


def test_what_is_refused_is_reported_after_the_work(tmp_path: Path) -> None:
    path = device(tmp_path / "in")
    with zipfile.ZipFile(path, "a") as made:
        made.writestr("../../out.dcm", b"x")
    result = call("expand", path, tmp_path / "out", "--json")
    assert result.code == 3
    assert result.json["written"] == 3
    assert [one["reason"] for one in result.json["refused"]] == ["path_escapes"]
    assert "path_escapes" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("source", "target", "code", "words"),
    [
        ("absent", "out", 2, ["no file or folder at", "absent"]),
        ("empty", "out", 2, ["no ZIP archive in", "*.zip"]),
        ("page.zip", "out", 1, ["nothing can be expanded", "not_an_archive", "download it again"]),
        ("in", "page.zip", 2, ["is a file: name a folder"]),
        ("http://example.org/a.zip", "out", 2, ["http:// is not read"]),
    ],
)
def test_mistakes(tmp_path: Path, source: str, target: str, code: int, words: list[str]) -> None:
    device(tmp_path / "in")
    (tmp_path / "empty").mkdir()
    (tmp_path / "page.zip").write_bytes(b"<html>")
    positions = [name if "://" in name else tmp_path / name for name in (source, target)]
    result = call("expand", *positions, "--json")
    assert result.code == code, result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stop_at_any_moment_is_continued(tmp_path: Path, number: signal.Signals) -> None:
    path = device(tmp_path / "in", people=30, size=3 << 20)
    out = tmp_path / "out"
    result = stop(["expand", path, out, "--json"], number, lambda: len(list(out.rglob("*.dcm"))) >= 3)
    assert result.code == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    there = list(out.rglob("*.dcm"))
    assert 3 <= len(there) < 30
    assert all(one.stat().st_size == (3 << 20) + 132 for one in there)  # what has its name is whole
    assert number == signal.SIGKILL or not list(out.rglob("*.part"))
    again = run("expand", path, out, "--json")
    assert again.code == 0, again.err
    assert again.json["skipped"] == len(there)
    assert again.json["written"] == 30 - len(there)
    assert not list(out.rglob("*.part"))


@pytest.mark.parametrize("max_lost", [0.0, 1.0])
@pytest.mark.parametrize(
    "words", [("convert", "--to", "nifti", "--out"), ("ingest", "--store")], ids=["convert", "ingest"]
)
def test_the_advice_about_an_archive_is_printed_once(
    tmp_path: Path, words: tuple[str, ...], max_lost: float, caplog: pytest.LogCaptureFixture
) -> None:
    save(make_dataset(retina(6)), tmp_path / "set" / "scan.dcm")
    device(tmp_path / "set", 1)
    verb, *options = words
    done = call(verb, tmp_path / "set", *options, tmp_path / "out", "--max-lost", max_lost)
    assert (done.out + done.err + caplog.text).count("octjepa expand") == 1
    assert "1 archive_not_expanded: an archive: the scans in it are not read\n" in caplog.text
