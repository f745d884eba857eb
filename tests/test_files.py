"""Files that appear whole or not at all, and never through a link that came with a folder."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, Any

import pytest

from octjepa.errors import OctjepaError
from octjepa.files import Journal, open_temporary, remove_unfinished, write_atomic, write_new_folder


def test_a_temporary_file_that_is_a_link_is_replaced_and_what_it_names_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    for link in (os.symlink, os.link):
        precious.write_text("mine")
        link(precious, tmp_path / ".report.html.tmp")
        write_atomic(tmp_path / "report.html", lambda file: file.write(b"page"))
        assert precious.read_text() == "mine"
        assert (tmp_path / "report.html").read_text() == "page"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "report.html"]


def test_a_file_that_is_a_link_is_replaced_and_what_it_names_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run.json").symlink_to("precious")
    write_atomic(tmp_path / "run.json", lambda file: file.write(b"{}"))
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "run.json").is_symlink()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_new_folder_and_what_is_in_it_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = write_new_folder(tmp_path, {"pixels.npy": lambda file: file.write(b"pixels")})
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    assert (folder / "pixels.npy").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_journal_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "journal.jsonl").symlink_to("precious")
    with pytest.raises(OctjepaError, match="is a link"):
        Journal(tmp_path / "journal.jsonl").append({"update": 1})
    assert (tmp_path / "precious").read_text() == "mine"


def test_what_a_killed_write_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".table.tmp").write_bytes(b"a longer half of a table")
    write_atomic(tmp_path / "table", lambda file: file.write(b"whole"))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("table", b"whole")]


def test_two_writers_of_one_file_wait_for_each_other(tmp_path: Path) -> None:
    first = open_temporary(tmp_path / ".table.tmp")
    first.write(b"first")
    second = threading.Thread(target=write_atomic, args=(tmp_path / "table", lambda file: file.write(b"second")))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    first.flush()
    os.replace(tmp_path / ".table.tmp", tmp_path / "other")
    first.close()
    second.join(10)
    assert ((tmp_path / "other").read_bytes(), (tmp_path / "table").read_bytes()) == (b"first", b"second")


def _refuse(number: int) -> Callable[[IO[bytes]], Any]:
    def write(file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "disk is full"), (errno.EACCES, "Permission denied"), (errno.EMFILE, "limit of open files")],
)
def test_a_refused_write_leaves_the_old_file_and_says_why(tmp_path: Path, number: int, message: str) -> None:
    (tmp_path / "table").write_bytes(b"old")
    with pytest.raises(OctjepaError, match=message):
        write_atomic(tmp_path / "table", _refuse(number))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("table", b"old")]


@pytest.mark.parametrize("link", ["chunks", "chunks/aa"])
def test_no_folder_is_written_or_removed_through_a_link(link: str, tmp_path: Path) -> None:
    elsewhere, chunks = tmp_path / "elsewhere", tmp_path / "store" / "chunks"
    left = elsewhere / ("aa/.new-left" if link == "chunks" else ".new-left")
    left.mkdir(parents=True)
    chunks.parent.mkdir()
    if link == "chunks":
        chunks.symlink_to(elsewhere)
    else:
        chunks.mkdir()
        (chunks / "aa").symlink_to(elsewhere)
    with pytest.raises(OctjepaError, match=f"{link} is a link to .*elsewhere, and nothing is written through it"):
        write_new_folder(chunks / "aa", {"pixels.npy": lambda file: file.write(b"1")})
    remove_unfinished(chunks)
    assert left.is_dir()
    assert not list(elsewhere.rglob("pixels.npy"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that was dropped is closed
def test_ctrl_c_at_any_line_is_still_ctrl_c(tmp_path: Path) -> None:
    """It came between two lines once, and the file was closed twice: the user read "Bad file descriptor"."""
    stopped = 0
    for number in range(1, 50):
        left = number

        def stop_at_a_line(frame: FrameType, event: str, argument: object) -> object:
            nonlocal left
            if frame.f_code.co_name != "open_temporary":
                return None
            left -= event == "line"
            if event == "line" and left == 0:
                raise KeyboardInterrupt
            return stop_at_a_line

        sys.settrace(stop_at_a_line)
        try:
            open_temporary(tmp_path / f"{number}").close()
        except KeyboardInterrupt:
            stopped += 1
        finally:
            sys.settrace(None)
        if left > 0:
            break
    assert stopped == number - 1 > 8
