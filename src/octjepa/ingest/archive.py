"""ZIP archives to the tree that ingest reads: streamed, checked, and continued where it stopped.

A member is written beside its place and renamed when its size and checksum are right, so that a file with its final
name is whole. Running the same command again writes what is missing and touches nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import lzma
import os
import shutil
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

from octjepa import remote
from octjepa.errors import OctjepaError, TooManyLostError, UsageError
from octjepa.ingest.archive_members import REFUSALS, Contents, Member, Refusal, Taken, judge
from octjepa.ingest.source_file import SourceFile, is_archive, shown
from octjepa.ingest.walk import walk
from octjepa.progress import Bar, bar

_BLOCK_BYTES = 1 << 20
_SPARE_BYTES = 64 << 20  # room on the disk that stays free
_MB = 1_000_000
_TOLD = 10  # refused members that the message names
_UNREADABLE = (BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, NotImplementedError,
               RuntimeError, struct.error)  # fmt: skip


@dataclass
class _Done:
    """What a run did so far."""

    written: int = 0
    skipped: int = 0
    bytes: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    nested: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


def expand(source: str | Path, target: str | Path, dry_run: bool = False) -> dict[str, Any]:
    """Expands the ZIP archives at `source` (a file, a folder with all below it, a url) into the folder `target`.

    Returns {archives, written, skipped, bytes, left_out, nested, refused, dry_run, seconds}: `skipped` members stand
    there already with the same size and checksum; `nested` archives are written as they are; `refused` lists {archive,
    member, reason, detail} with a reason of `octjepa.ingest.archive_members.REFUSALS`. With `dry_run` nothing is
    written and the figures are what would be.
    Raises UsageError (no archive, a target that is no folder), TooManyLostError where a member was refused, after all
    work is done; OctjepaError: too little room on the disk, or no archive can be read at all.
    """
    start = time.monotonic()
    done = _Done()
    archives = _archives(str(source), done)
    folder = _target(target)
    with _only_writer(folder, dry_run):
        taken = Taken()
        # What is fetched makes room for the next one; what lies on a disk is looked through before anything is written.
        local = [archive for archive in archives if isinstance(archive.location, Path)]
        groups = [local] if local else [[archive] for archive in archives]
        for group in groups:
            _expand_group(group, folder, taken, done, dry_run)
    summary = {
        "archives": len(archives),
        "written": done.written,
        "skipped": done.skipped,
        "bytes": done.bytes,
        "left_out": dict(sorted(done.left_out.items())),
        "nested": done.nested,
        "refused": [{key: shown(value) for key, value in asdict(one).items()} for one in done.refused],
        "dry_run": dry_run,
        "seconds": time.monotonic() - start,
    }
    if done.refused:
        _complain(done, len(archives), summary)
    return summary


def _complain(done: _Done, archives: int, summary: dict[str, Any]) -> None:
    """Raises TooManyLostError, or OctjepaError where nothing could be read."""
    lines = []
    for one in done.refused[:_TOLD]:
        place = f"{one.archive}: {one.member}" if one.member else one.archive
        lines.append(f"  {shown(place)}  {one.reason}: {REFUSALS[one.reason]}{one.detail and f' ({one.detail})'}")
    if len(done.refused) > _TOLD:
        lines.append(f"  and {len(done.refused) - _TOLD} more, with --json")
    table = "\n".join(lines)
    if sum(not one.member for one in done.refused) >= archives and not done.written + done.skipped:
        raise OctjepaError(f"nothing can be expanded:\n{table}\ncopy or download it again")
    raise TooManyLostError(
        f"expanded, but {len(done.refused)} archives or members are refused:\n{table}\n"
        "what is whole is written; mend the archive and run the same command again for the rest",
        summary,
    )


def _archives(source: str, done: _Done) -> list[SourceFile]:
    """The ZIP archives of a source, sorted; names are relative to it, or to the folder above a single archive's."""
    if remote.is_remote(source):
        single = None if source.endswith("/") else remote.info(source)
        objects = [single] if single else [one for one in remote.list_objects(source) if _is_zip(one.url)]
        base = source.rpartition("/")[0].rpartition("/")[0] if single else remote.join(source)
        found = [SourceFile(one.url, one.url.removeprefix(base).strip("/"), None, (one,)) for one in objects]
    elif Path(source).is_file():
        path = Path(source).resolve()
        found = [SourceFile(path, f"{path.parent.name}/{path.name}")]
    elif Path(source).is_dir():
        top = Path(source).resolve()

        def refuse(path: Path, reason: str, detail: str) -> None:
            if reason == "unreadable_folder":
                done.refused.append(Refusal(str(path.relative_to(top)), "", reason, detail))

        found = [
            SourceFile(folder.path / name, (folder.path / name).relative_to(top).as_posix())
            for folder in walk(top, Counter(), refuse)
            for name in folder.names
            if _is_zip(name)
        ]
    else:
        raise UsageError(f"no file or folder at {shown(source)}")
    if not found:
        raise UsageError(f"no ZIP archive in {shown(source)}: expected files called *.zip")
    return sorted(found, key=lambda one: one.name)


def _is_zip(name: str) -> bool:
    last = PurePosixPath(name).name
    return last.lower().endswith(".zip") and not last.startswith(".")


def _target(target: str | Path) -> Path:
    if remote.is_remote(target):
        raise UsageError(
            f"{target} is a bucket: expand into a local folder, and copy that with the bucket's own program"
        )
    folder = Path(target)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{shown(str(folder))} is a file: name a folder, new or not")
    return folder.resolve()


@contextmanager
def _only_writer(folder: Path, dry_run: bool) -> Iterator[None]:
    """Makes the folder and holds it for one process. Raises UsageError where another one has it."""
    if dry_run:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            os.close(handle)
            raise UsageError(f"another process expands into {folder}: wait for it to end") from None
        # some network disks lock no folders: two runs at once are then the user's care
    try:
        yield
    finally:
        os.close(handle)


def _expand_group(archives: Sequence[SourceFile], folder: Path, taken: Taken, done: _Done, dry_run: bool) -> None:
    """Judges some archives, sees that what is missing has room, and writes it."""
    judged = [(archive, contents) for archive in archives if (contents := _contents(archive, taken, done))]
    missing = [member for _, contents in judged for member in contents.members if not _there(folder / member.place)]
    _check_room(sum(member.info.file_size for member in missing), folder)
    total = sum(member.info.file_size for _, contents in judged for member in contents.members)
    with bar("expand", total // _MB, "MB") as progress:
        meter = _Meter(progress)
        for archive, contents in judged:
            done.left_out.update(contents.left_out)
            done.refused.extend(contents.refused)
            with archive.local() as path, ZipFile(path) as opened:
                for member in contents.members:
                    _settle(opened, contents.archive, member, folder, done, meter, dry_run)


def _contents(archive: SourceFile, taken: Taken, done: _Done) -> Contents | None:
    with archive.local() as path:
        try:
            with ZipFile(path) as opened:
                return judge(PurePosixPath(archive.name), opened.infolist(), path.stat().st_size, taken)
        except _UNREADABLE as error:
            detail = error.strerror or "" if isinstance(error, OSError) else ""
            done.refused.append(Refusal(archive.name, "", "not_an_archive", detail))
            return None


def _check_room(needed: int, folder: Path) -> None:
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if needed and needed + _SPARE_BYTES > free:
        raise OctjepaError(
            f"too little room in {folder}: {needed / 1e9:.2f} GB are to be written and {free / 1e9:.2f} GB are free; "
            "nothing was started"
        )


class _Meter:
    """Bytes to the whole megabytes that the progress bar shows."""

    def __init__(self, progress: Bar) -> None:
        self._progress, self._bytes = progress, 0

    def add(self, count: int) -> None:
        before = self._bytes // _MB
        self._bytes += count
        self._progress.advance(self._bytes // _MB - before)


def _there(path: Path) -> bool:
    return os.path.lexists(path)


def _settle(
    opened: ZipFile, archive: str, member: Member, folder: Path, done: _Done, meter: _Meter, dry_run: bool
) -> None:
    """Writes one member, or finds it there, or refuses it."""
    path = folder / member.place
    reason = ""
    if _there(path):
        same = _is_same(path, member)
        done.skipped += same
        reason = "" if same else "other_file"
        meter.add(member.info.file_size)
    elif not _is_free(path, folder):
        reason = "other_file"
    elif _content(opened, member, None if dry_run else path, meter):
        done.written += 1
        done.bytes += member.info.file_size
    else:
        reason = "damaged"
    if reason:
        done.refused.append(Refusal(archive, member.info.filename, reason))
    elif is_archive(member.place):
        done.nested.append(shown(member.place))


def _is_same(path: Path, member: Member) -> bool:
    """Whether the file in a member's place has its size and checksum."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size != member.info.file_size:
        return False
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum == member.info.CRC


def _is_free(path: Path, folder: Path) -> bool:
    """Whether a file can be made here: no file in a folder's place, no link that leads out of the target."""
    above = next(place for place in path.parents if _there(place) or place == folder)
    return above == folder or (above.is_dir() and above.resolve().is_relative_to(folder))


def _content(opened: ZipFile, member: Member, path: Path | None, meter: _Meter) -> bool:
    """Streams one member to `path` (None: reads and checks only); False where its content is damaged."""
    if path is None:
        return _stream(opened, member, None, meter)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name depends on the place alone: what a kill leaves behind is written over by the next run.
    part = path.with_name(f".{hashlib.sha256(member.place.encode()).hexdigest()[:16]}.part")
    try:
        with part.open("wb") as file:
            whole = _stream(opened, member, file, meter)
        if whole:
            os.replace(part, path)
        return whole
    finally:
        part.unlink(missing_ok=True)


def _stream(opened: ZipFile, member: Member, file: IO[bytes] | None, meter: _Meter) -> bool:
    """Block by block; zipfile holds the checksum against the table's, and reads no more than the size it names."""
    size = 0
    try:
        source = opened.open(member.info)
    except _UNREADABLE:
        return False
    with source:
        while True:
            try:
                block = source.read(_BLOCK_BYTES)
            except _UNREADABLE:
                return False
            if not block:
                return size == member.info.file_size
            if file is not None:
                file.write(block)  # not in the try: a full disk is no fault of the archive
            size += len(block)
            meter.add(len(block))
