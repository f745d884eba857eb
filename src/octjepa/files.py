"""Files on disk: written atomically (a crash leaves the old file or the new one), and journals.

Temporary files have one name each, so that the next write of the same file replaces what a killed one left. Neither
they nor journals follow a link: one that came with a folder would name a file of the user's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from octjepa.errors import LINK, MORE_FILES, OctjepaError
from octjepa.parsing import Malformed, json_lines, read_object

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW


def _write_error(error: OSError, path: Path) -> OctjepaError:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == errno.EFBIG or (error.errno is None and limit != resource.RLIM_INFINITY):
        return OctjepaError(
            f"cannot write {path}: files may have at most {limit} bytes here; raise the limit (ulimit -f) and run the "
            "same command again"
        )
    # NumPy reports a short write without an error number.
    if error.errno in {errno.ENOSPC, errno.EDQUOT, None}:
        return OctjepaError(f"the disk is full while writing {path}; free some space and run the same command again")
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return OctjepaError(f"cannot write {path}: {error.strerror}: {MORE_FILES}")
    if error.errno == errno.ELOOP:
        return OctjepaError(f"{path} {LINK}")
    return OctjepaError(f"cannot write {path}: {error.strerror or error}")


def open_temporary(path: Path) -> IO[bytes]:
    """The file `path`, empty and reserved for this process until it is closed; what a killed process left is replaced.

    It follows no link: whatever is there and is not a plain file with one name is removed. Of two processes that
    write the same file the second waits for the first. Raises OSError.
    """
    while True:
        with suppress(FileNotFoundError):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                path.unlink()
        # The file object owns its descriptor from the start, so that a Ctrl-C at any line closes it once.
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "wb")
        try:
            with suppress(OSError):  # some network disks know no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.lstat()):  # else the other writer has renamed it
                    os.ftruncate(file.fileno(), 0)
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def write_atomic(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Calls `write(file)` on a temporary file next to `path`, flushes it to disk, renames it. Raises OctjepaError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        try:
            with open_temporary(temporary) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _write_error(error, path) from error


def write_by_name(path: Path, write: Callable[[Path], object]) -> None:
    """`write_atomic` for a library that opens files itself: `write(temporary)` gets a hidden neighbour of `path`.

    The neighbour ends as `path` does, because libraries take the format from there. Raises OctjepaError.
    """
    temporary = path.with_name(f".new-{path.name}")
    try:
        try:
            temporary.unlink(missing_ok=True)  # what a killed call left, or a link
            write(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _write_error(error, path) from error


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON with sorted keys, atomically. Raises OctjepaError."""
    text = json.dumps(value, indent=1, sort_keys=True)
    write_atomic(path, lambda file: file.write(text.encode()))


def _new_folder(parent: Path) -> Path:
    """A new hidden folder in `parent`, which others may open as far as the umask allows. Raises OSError.

    `tempfile.mkdtemp` makes a folder that only its owner can open, also after it is renamed.
    """
    while True:
        folder = parent / f".new-{secrets.token_hex(8)}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder


def write_new_folder(parent: Path, parts: dict[str, Callable[[IO[bytes]], object]]) -> Path:
    """Writes `parts` into a new hidden folder in `parent`, which `replace_folder` then renames.

    Raises OctjepaError, also where `parent` or the folder that holds it is a link: in a folder from another person it
    would lead what is written anywhere.
    """
    for folder in (parent, parent.parent):
        if folder.is_symlink():
            raise OctjepaError(
                f"{folder} is a link to {os.readlink(folder)}, and nothing is written through it: replace it by a "
                "folder, or move the whole there"
            )
    try:
        parent.mkdir(parents=True, exist_ok=True)
        temporary = _new_folder(parent)
        try:
            for name, write in parts.items():
                with (temporary / name).open("wb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise _write_error(error, parent) from error
    return temporary


def replace_folder(new: Path, path: Path) -> None:
    """Renames the folder `new` to `path`; whoever has the old one open keeps it. Raises OctjepaError."""
    old = new.with_name(new.name.replace(".new-", ".old-"))
    try:
        if path.is_dir():
            os.replace(path, old)
        os.replace(new, path)
    except OSError as error:
        raise _write_error(error, path) from error
    shutil.rmtree(old, ignore_errors=True)


def remove_unfinished(chunks: Path) -> None:
    """Removes what killed calls of `write_new_folder` and `replace_folder` left in the folders of `chunks`."""
    if chunks.is_symlink():
        return
    for pattern in ("*/.new-*", "*/.old-*"):
        for left in chunks.glob(pattern):
            if not left.parent.is_symlink():
                shutil.rmtree(left, ignore_errors=True)


def read_json_object(path: Path, to_do: str) -> dict[str, Any]:
    """Reads the JSON object in `path`. Raises OctjepaError ending in `to_do`: absent, damaged, or not an object."""
    try:
        return read_object(path)
    except Malformed as error:
        raise OctjepaError(f"{path} is damaged ({error}): {to_do}") from None
    except FileNotFoundError:
        raise OctjepaError(f"{path} is not there: {to_do}") from None
    except OSError as error:
        raise OctjepaError(f"{path} cannot be read ({error.strerror}): {to_do}") from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics.jsonl, each with its `update`, without a last line that a crash cut short.

    Raises OctjepaError on a damaged line, and where the file is too large.
    """
    try:
        entries = []
        for number, entry in json_lines(path):
            if isinstance(entry, Malformed):
                raise Malformed(f"line {number}: {entry}")
            if type(entry.get("update")) is not int:
                raise Malformed(f"line {number} names no update")
            entries.append(entry)
        return entries
    except (Malformed, OSError) as error:
        raise OctjepaError(f"{path} is damaged ({error}): start a new run with another --out") from None


class Journal:
    """A file of JSON lines that grows by entries; an entry is handed to the system when `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """All entries, without lines that a crash cut short; empty where the file does not exist.

        Raises OctjepaError: the file is too large, or cannot be read.
        """
        if not self.path.is_file():
            return []
        try:  # a damaged line was cut short by a crash: that file is simply ingested again
            return [entry for _, entry in json_lines(self.path) if not isinstance(entry, Malformed)]
        except Malformed as error:
            raise OctjepaError(f"{self.path} is damaged ({error}): restore it from a copy, or remove it") from None
        except OSError as error:
            raise OctjepaError(f"{self.path} cannot be read ({error.strerror})") from None

    def append(self, entry: Mapping[str, Any]) -> None:
        """Adds one line, after ending a line that a crash cut short. Raises OctjepaError (disk full)."""
        line = (json.dumps(entry) + "\n").encode()
        try:
            with os.fdopen(os.open(self.path, _APPEND, 0o666), "ab") as file:
                if file.tell() and not self._ends_whole():
                    line = b"\n" + line
                file.write(line)
        except OSError as error:
            raise _write_error(error, self.path) from error

    def truncate(self, update: int, *added: Mapping[str, Any]) -> None:
        """Removes the entries whose `update` is above `update` and adds `added`, in one atomic write.

        Creates the file if there is none. Raises OctjepaError (a damaged line, disk full).
        """
        lines = read_json_lines(self.path) if self.path.exists() else []
        entries = [*(entry for entry in lines if entry["update"] <= update), *added]
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        write_atomic(self.path, lambda file: file.write(text.encode()))

    def sync(self) -> None:
        """Returns when every entry so far is on the disk. May be called from any thread."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Deletes the file."""
        self.path.unlink(missing_ok=True)

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
