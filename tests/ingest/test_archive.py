"""ZIP archives to trees: placement, continuing after a stop, and everything a hostile or damaged archive can hold."""

from __future__ import annotations

import io
import os
import random
import re
import shutil
import stat
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octjepa.errors import OctjepaError, TooManyLostError, UsageError
from octjepa.ingest import discover
from octjepa.ingest.archive import Expansion, expand
from octjepa.ingest.archive_members import REFUSALS
from octjepa.ingest.archive_target import make_target
from octjepa.ingest.listing import LocalListing
from octjepa.ingest.source_file import SourceFile

TREE = "retinal_oct/structural_oct"
SCAN = bytes(128) + b"DICM" + bytes(range(256)) * 20


def zipped(path: Path, *members: str | tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", method) as made:
        for member in members:
            name, content = (member, SCAN) if isinstance(member, str) else member
            made.writestr(name, content, method)
    return path


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}


def lost(source: Path, target: Path) -> Expansion:
    """The summary of an expansion in which something is refused."""
    with pytest.raises(TooManyLostError) as error:
        expand(source, target)
    assert error.value.exit_code == 3
    return Expansion.from_json(error.value.summary)


def reasons(summary: Expansion) -> dict[str, str]:
    assert all(one.reason in REFUSALS for one in summary.refused)
    return {one.member or one.archive: one.reason for one in summary.refused}


# The tree


@pytest.mark.parametrize(
    ("archive_name", "member", "target"),
    [
        ("topcon_triton/all.zip", "1001/a.dcm", f"{TREE}/topcon_triton/1001/a.dcm"),
        ("zeiss_cirrus.zip", "1001/a.dcm", f"{TREE}/zeiss_cirrus/1001/a.dcm"),
        ("x/y.zip", "topcon_triton/1001/a.dcm", f"{TREE}/topcon_triton/1001/a.dcm"),
        ("x/y.zip", "./wrap//topcon_triton/1001/a.dcm", f"{TREE}/topcon_triton/1001/a.dcm"),
        ("topcon_triton/y.zip", "structural_oct/topcon_triton/1001/a.dcm", f"{TREE}/topcon_triton/1001/a.dcm"),
        ("y.zip", f"dataset/v3/{TREE}/topcon_triton/1001/a.dcm", f"{TREE}/topcon_triton/1001/a.dcm"),
        ("y.zip", "retinal_photography/cfp/a.dcm", "retinal_photography/cfp/a.dcm"),
        ("clinic/2024 export.ZIP", "eye/a.vol", "clinic/2024 export/eye/a.vol"),
    ],
)
def test_members_come_to_where_ingest_expects_them(tmp_path: Path, archive_name: str, member: str, target: str) -> None:
    zipped(tmp_path / "in" / archive_name, member)
    summary = expand(tmp_path / "in", tmp_path / "out")
    assert files(tmp_path / "out") == {target}
    assert (tmp_path / "out" / target).read_bytes() == SCAN
    assert (summary.written, summary.skipped, summary.bytes) == (1, 0, len(SCAN))


def test_an_archive_at_the_root_of_the_disk_is_expanded_into_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = zipped(tmp_path / "export.zip", "eye/a.vol")  # as a container mounts it: /export.zip
    monkeypatch.setattr(LocalListing, "locate", lambda *_args, **_options: ("/export.zip", "file"))
    monkeypatch.setattr(LocalListing, "source", lambda _self, _path, name, _row: SourceFile(made, name))
    assert expand("/export.zip", tmp_path / "out").written == 1
    assert files(tmp_path / "out") == {"export/eye/a.vol"}


def test_tables_and_side_files_of_a_data_set(tmp_path: Path) -> None:
    table = (
        f"AI/{TREE}/topcon_triton/1001/a.dcm",
        "AI/participants.tsv",
        "AI/readme.txt",
        "AI/retinal_oct/manifest.tsv",
    )
    zipped(tmp_path / "all.zip", *table, "__MACOSX/AI/._a.dcm", "AI/.DS_Store", f"AI/{TREE}/._x")
    summary = expand(tmp_path / "all.zip", tmp_path / "out")
    assert files(tmp_path / "out") == {
        f"{TREE}/topcon_triton/1001/a.dcm",
        "participants.tsv",
        "retinal_oct/manifest.tsv",
        f"{tmp_path.name}/all/AI/readme.txt",
    }
    assert summary.left_out == {"macOS side files": 3}


def test_what_is_expanded_can_be_discovered(tmp_path: Path) -> None:
    row = f"person_id\tfilepath\n1001\t/{TREE}/topcon_triton/1001/a.dcm\n"
    zipped(tmp_path / "in" / "topcon_triton" / "a.zip", "1001/a.dcm", ("manifest.tsv", row.encode()))
    expand(tmp_path / "in", tmp_path / "out")
    (file,) = discover([tmp_path / "out"]).files
    assert file.row is not None
    assert file.row.person_id == "1001"


def test_archives_in_archives_are_named(tmp_path: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as made:
        made.writestr("1001/a.dcm", SCAN)
    zipped(tmp_path / "in" / "all.zip", (f"{TREE}/topcon_triton/eyes.zip", inner.getvalue()))
    summary = expand(tmp_path / "in", tmp_path / "out")
    assert summary.nested == [f"{TREE}/topcon_triton/eyes.zip"]
    expand(tmp_path / "out", tmp_path / "out")  # the next level, in location
    assert f"{TREE}/topcon_triton/1001/a.dcm" in files(tmp_path / "out")


# Again, and after a stop


def test_again_writes_nothing_and_touches_nothing(tmp_path: Path) -> None:
    source = zipped(tmp_path / "topcon_triton" / "a.zip", "1/a.dcm", "2/b.dcm", ("3/empty.dcm", b""), "folder/")
    first = expand(source, tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.dcm")}
    second = expand(source, tmp_path / "out")
    assert (first.written, first.skipped) == (3, 0)
    assert (second.written, second.skipped, second.bytes) == (0, 3, 0)
    assert times == {path: path.stat().st_mtime_ns for path in times}


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path: Path) -> None:
    source = zipped(tmp_path / "topcon_triton" / "a.zip", "1/a.dcm", "2/b.dcm")
    dry = expand(source, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    wet = expand(source, tmp_path / "out")
    assert replace(dry, seconds=0, dry_run=False) == replace(wet, seconds=0)


def test_a_stop_leaves_whole_files_and_the_rest_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = zipped(tmp_path / "topcon_triton" / "a.zip", *[f"{number}/a.dcm" for number in range(5)])
    replace, renamed = os.replace, []

    def stopping(old: Any, new: Any) -> None:
        if len(renamed) == 2:
            raise KeyboardInterrupt
        renamed.append(new)
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopping)
        with pytest.raises(KeyboardInterrupt):
            expand(source, tmp_path / "out")
    assert len(files(tmp_path / "out")) == 2  # and no half one next to
    summary = expand(source, tmp_path / "out")
    assert (summary.written, summary.skipped) == (3, 2)


def test_a_member_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power cut leaves an empty file that the next call takes for another file."""
    steps: list[str] = []
    for name in ("fsync", "replace"):
        really = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *words, name=name, really=really: (steps.append(name), really(*words))[1])
    expand(zipped(tmp_path / "in" / "y.zip", "a.dcm", "b.dcm"), tmp_path / "out")
    assert steps == ["fsync", "replace"] * 2


def test_what_a_kill_left_half_written_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = zipped(tmp_path / "topcon_triton" / "a.zip", "1/a.dcm")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process cleans nothing up
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            expand(source, tmp_path / "out")
    (left,) = (tmp_path / "out").rglob("*.part")
    left.write_bytes(b"half")
    assert not discover_names(tmp_path / "out")
    expand(source, tmp_path / "out")
    assert files(tmp_path / "out") == {f"{TREE}/topcon_triton/1/a.dcm"}


def discover_names(folder: Path) -> list[str]:
    try:
        return [file.name for file in discover([folder]).files]
    except UsageError:
        return []


def test_another_file_at_the_path_is_retained(tmp_path: Path) -> None:
    source = zipped(tmp_path / "topcon_triton" / "a.zip", "1/a.dcm", "2/b.dcm", "3/c.dcm")
    location = tmp_path / "out" / TREE / "topcon_triton"
    (location / "1").mkdir(parents=True)
    (location / "1" / "a.dcm").write_bytes(SCAN[:-1] + b"x")  # same size
    (location / "2").write_bytes(b"a file where a folder is needed")
    summary = lost(source, tmp_path / "out")
    assert reasons(summary) == {"1/a.dcm": "other_file", "2/b.dcm": "other_file"}
    assert (location / "1" / "a.dcm").read_bytes() != SCAN
    assert (location / "3" / "c.dcm").read_bytes() == SCAN


def test_too_little_room_is_found_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = zipped(tmp_path / "topcon_triton" / "a.zip", "1/a.dcm")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 100))
    with pytest.raises(OctjepaError, match=r"too little room in .*nothing was started"):
        expand(source, tmp_path / "out")
    assert not files(tmp_path / "out")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    source = zipped(tmp_path / "a.zip", "1/a.dcm")
    with make_target(tmp_path / "out").lock(), pytest.raises(UsageError, match="another process is writing"):
        expand(source, tmp_path / "out")


# Hostile archives


def entry(name: str, mode: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("placeholder")
    info.filename = info.orig_filename = name  # past what zipfile itself would mend
    info.external_attr = mode << 16
    return info


HOSTILE: dict[str, tuple[zipfile.ZipInfo, str]] = {
    "absolute": (entry("/etc/a.dcm"), "path_escapes"),
    "up": (entry("../a.dcm"), "path_escapes"),
    "up inside": (entry("1001/../../../a.dcm"), "path_escapes"),
    "up after the mark": (entry(f"{TREE}/../../../a.dcm"), "path_escapes"),
    "drive": (entry("C:/a.dcm"), "path_escapes"),
    "drive, relative": (entry("c:a.dcm"), "path_escapes"),
    "backslash": (entry("..\\..\\a.dcm"), "path_escapes"),
    "server": (entry("\\\\server\\a.dcm"), "path_escapes"),
    "zero byte": (entry("1001/a.dcm\0/../../b.dcm"), "path_escapes"),
    "no name": (entry("./."), "path_escapes"),
    "link": (entry("1001/link", stat.S_IFLNK | 0o777), "link"),
    "pipe": (entry("1001/pipe", stat.S_IFIFO | 0o666), "link"),
    "device": (entry("1001/device", stat.S_IFBLK | 0o666), "link"),
    "control": (entry("a\x1b[2J.dcm"), "name_unsafe"),
    "direction": (entry("a\u202emcd.exe"), "name_unsafe"),
    "isolate": (entry("a\u2067b.dcm"), "name_unsafe"),
    "option": (entry("folder/-rf"), "name_unsafe"),
    "long": (entry("n" * 300 + ".dcm"), "name_too_long"),
    "deep": (entry("d/" * 2000 + "a.dcm"), "name_too_long"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_is_written_outside_the_target(tmp_path: Path, case: str) -> None:
    info, reason = HOSTILE[case]
    source = zipped(tmp_path / "in" / "topcon_triton" / "a.zip", (info, SCAN), "1001/good.dcm")
    summary = lost(source, tmp_path / "deep" / "out")
    assert [one.reason for one in summary.refused] == [reason]
    assert files(tmp_path / "deep") == {f"out/{TREE}/topcon_triton/1001/good.dcm"}
    assert {path.name for path in tmp_path.iterdir()} == {"in", "deep"}


def test_no_name_of_any_parts_leads_out(tmp_path: Path) -> None:
    draws = random.Random(1)
    for number in range(60):
        parts = draws.choices(["..", ".", "", "a", "b.dcm", "C:", "\\", "~", "é", " "], k=draws.randint(1, 6))
        root = tmp_path / str(number)
        source = zipped(root / "in" / "a.zip", (entry("/".join(parts) or "."), SCAN))
        with suppress(OctjepaError):
            expand(source, root / "deep" / "out")
        outside = {name for name in files(root) if not name.startswith("deep/out/")}
        assert outside == {"in/a.zip"}, parts
    assert {path.name for path in tmp_path.iterdir()} == {str(number) for number in range(60)}


def test_a_link_that_stands_in_the_target_leads_nowhere(tmp_path: Path) -> None:
    source = zipped(tmp_path / "topcon_triton" / "a.zip", "1001/a.dcm")
    (tmp_path / "elsewhere").mkdir()
    location = tmp_path / "out" / TREE / "topcon_triton"
    location.mkdir(parents=True)
    (location / "1001").symlink_to(tmp_path / "elsewhere")
    assert reasons(lost(source, tmp_path / "out")) == {"1001/a.dcm": "other_file"}
    assert not files(tmp_path / "elsewhere")


def test_names_that_some_disks_hold_for_one(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        zipped(
            tmp_path / "in" / "topcon_triton" / "a.zip",
            "1/a.dcm",
            ("1/A.dcm", b"x"),
            "2/\u00e4.dcm",
            ("2/a\u0308.dcm", b"x"),
            "3/file",
            "3/file/b.dcm",
            "1/a.dcm",
            ("1/a.dcm", b"other"),
        )
    zipped(tmp_path / "in" / "topcon_triton" / "b.zip", "1/a.dcm", ("2/\u00e4.dcm", b"y"))
    summary = lost(tmp_path / "in", tmp_path / "out")
    assert [one.reason for one in summary.refused] == ["name_collides"] * 5
    assert summary.left_out == {"second copies": 2}
    assert summary.written == 3


def test_a_bomb_does_not_go_off(tmp_path: Path) -> None:
    source = zipped(tmp_path / "topcon_triton" / "a.zip", ("1/zeros.dcm", bytes(65 << 20)), "1/good.dcm")
    summary = lost(source, tmp_path / "out")
    assert reasons(summary) == {"1/zeros.dcm": "too_large"}
    assert summary.bytes == len(SCAN)


def patched(path: Path, change: Callable[[bytearray, int], None], member: int = 0) -> Path:
    """The archive with `change(bytes, offset of a member's row in the central directory)` done to it."""
    data = bytearray(path.read_bytes())
    at = -1
    for _ in range(member + 1):
        at = data.index(b"PK\x01\x02", at + 1)
    change(data, at)
    path.write_bytes(bytes(data))
    return path


def put(field: int, value: int, size: int = 4) -> Callable[[bytearray, int], None]:
    def change(data: bytearray, at: int) -> None:
        data[at + field : at + field + size] = value.to_bytes(size, "little")

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(16, 12345), "damaged"),  # checksum
        (put(24, 100), "damaged"),  # less than it holds: what is over would come unseen
        (put(24, len(SCAN) + 5), "damaged"),  # more than it holds
        (put(20, 1 << 30), "overlaps"),  # compressed size
        (put(42, 0), "overlaps"),  # the second member's data are the first one's
        (put(8, 0x1, 2), "encrypted"),
        (put(10, 9, 2), "compression_unknown"),
        (put(10, 99, 2), "compression_unknown"),
    ],
)
def test_what_is_whole_is_retained_and_the_rest_named(
    tmp_path: Path, change: Callable[[bytearray, int], None], reason: str
) -> None:
    source = zipped(tmp_path / "topcon_triton" / "a.zip", "1/first.dcm", "2/second.dcm", "3/third.dcm")
    summary = lost(patched(source, change, member=1), tmp_path / "out")
    named = reasons(summary)
    assert named["2/second.dcm"] == reason
    assert set(named.values()) == {reason}
    assert summary.written == 3 - len(named)
    assert (tmp_path / "out" / TREE / "topcon_triton" / "3" / "third.dcm").exists() == ("3/third.dcm" not in named)
    assert not list((tmp_path / "out").rglob("*.part"))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_flipped_byte_is_found_in_every_compression(tmp_path: Path, method: int) -> None:
    content = os.urandom(5000)
    source = zipped(tmp_path / "topcon_triton" / "a.zip", ("1/a.dcm", content), "2/b.dcm", method=method)
    assert expand(source, tmp_path / "sound").written == 2
    data = bytearray(source.read_bytes())
    data[2000] ^= 0x55
    source.write_bytes(bytes(data))
    assert reasons(lost(source, tmp_path / "out")) == {"1/a.dcm": "damaged"}
    assert files(tmp_path / "out") == {f"{TREE}/topcon_triton/2/b.dcm"}


def test_archives_that_are_none(tmp_path: Path) -> None:
    sound = zipped(tmp_path / "in" / "a.zip", "1/a.dcm")
    (tmp_path / "in" / "cut.zip").write_bytes(sound.read_bytes()[:-30])
    (tmp_path / "in" / "page.zip").write_bytes(b"<html>not found</html>")
    (tmp_path / "in" / "empty.zip").write_bytes(b"")
    summary = lost(tmp_path / "in", tmp_path / "out")
    assert reasons(summary) == dict.fromkeys(("cut.zip", "page.zip", "empty.zip"), "not_an_archive")
    assert summary.written == 1
    with pytest.raises(OctjepaError, match="nothing can be expanded") as error:
        expand(tmp_path / "in" / "cut.zip", tmp_path / "out")
    assert error.value.exit_code == 1


def test_what_is_no_source_or_target_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file or folder at"):
        expand(tmp_path / "absent", tmp_path / "out")
    with pytest.raises(UsageError, match="no ZIP archive in"):
        expand(tmp_path, tmp_path / "out")
    source = zipped(tmp_path / "a.zip", "1/a.dcm")
    with pytest.raises(UsageError, match="is a file: name a folder"):
        expand(source, source)


def test_reasons_are_documented(root: Path) -> None:
    page = (root / "docs" / "convert.md").read_text(encoding="utf-8").partition("### What is refused")[2]
    assert dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \|", page, re.MULTILINE)) == REFUSALS


def test_memory_does_not_grow_with_a_member(tmp_path: Path) -> None:
    import tracemalloc

    source = tmp_path / "topcon_triton" / "a.zip"
    source.parent.mkdir()
    with zipfile.ZipFile(source, "w") as made, made.open("1/a.dcm", "w") as member:
        for _ in range(24):
            member.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        expand(source, tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
