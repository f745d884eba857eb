"""ZIP archives to the tree that ingest reads: streamed, checked, and continued where it stopped.

A member is written beside its place and renamed when its size and checksum are right, so that a file with its final
name is whole. Running the same command again writes what is missing and touches nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZipFile

from octjepa import remote
from octjepa.errors import OctjepaError, TooManyLostError, UsageError
from octjepa.ingest.archive_members import REFUSALS, Contents, Member, Refusal, Taken, judge
from octjepa.ingest.archive_target import MB, UNREADABLE, Meter, Target, stream, target_of
from octjepa.ingest.source_file import SourceFile, is_archive, printable
from octjepa.ingest.walk import walk
from octjepa.progress import bar

_TOLD = 10  # refused members that the message names


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
    """Expands the ZIP archives at `source` (a file, a folder with all below it, a url) into `target`, a folder or
    a url.

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
    place = target_of(target)
    with nullcontext() if dry_run else place.only_writer():
        taken = Taken()
        # What is fetched makes room for the next one; what lies on a disk is looked through before anything is written.
        local = [archive for archive in archives if isinstance(archive.location, Path)]
        groups = [local] if local else [[archive] for archive in archives]
        for group in groups:
            _expand_group(group, place, taken, done, dry_run)
    summary = {
        "archives": len(archives),
        "written": done.written,
        "skipped": done.skipped,
        "bytes": done.bytes,
        "left_out": dict(sorted(done.left_out.items())),
        "nested": done.nested,
        "refused": [{key: printable(value) for key, value in asdict(one).items()} for one in done.refused],
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
        lines.append(f"  {printable(place)}  {one.reason}: {REFUSALS[one.reason]}{one.detail and f' ({one.detail})'}")
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
        raise UsageError(f"no file or folder at {printable(source)}")
    if not found:
        raise UsageError(f"no ZIP archive in {printable(source)}: expected files called *.zip")
    return sorted(found, key=lambda one: one.name)


def _is_zip(name: str) -> bool:
    last = PurePosixPath(name).name
    return last.lower().endswith(".zip") and not last.startswith(".")


def _expand_group(archives: Sequence[SourceFile], target: Target, taken: Taken, done: _Done, dry_run: bool) -> None:
    """Judges some archives, sees that what is missing has room, and writes it."""
    judged = [(archive, contents) for archive in archives if (contents := _contents(archive, taken, done))]
    missing = [member for _, contents in judged for member in contents.members if not target.has(member.place)]
    target.check_room(sum(member.info.file_size for member in missing))
    total = sum(member.info.file_size for _, contents in judged for member in contents.members)
    with bar("expand", total // MB, "MB") as progress:
        meter = Meter(progress)
        for archive, contents in judged:
            done.left_out.update(contents.left_out)
            done.refused.extend(contents.refused)
            with archive.local() as path, ZipFile(path) as opened:
                for member in contents.members:
                    _settle(opened, contents.archive, member, target, done, meter, dry_run)


def _contents(archive: SourceFile, taken: Taken, done: _Done) -> Contents | None:
    with archive.local() as path:
        try:
            with ZipFile(path) as opened:
                return judge(PurePosixPath(archive.name), opened.infolist(), path.stat().st_size, taken)
        except UNREADABLE as error:
            detail = error.strerror or "" if isinstance(error, OSError) else ""
            done.refused.append(Refusal(archive.name, "", "not_an_archive", detail))
            return None


def _settle(
    opened: ZipFile, archive: str, member: Member, target: Target, done: _Done, meter: Meter, dry_run: bool
) -> None:
    """Writes one member, or finds it there, or refuses it."""
    reason = ""
    if target.has(member.place):
        same = target.is_same(member)
        done.skipped += same
        reason = "" if same else "other_file"
        meter.add(member.info.file_size)
    elif not target.is_free(member.place):
        reason = "other_file"
    elif stream(opened, member, None, meter) if dry_run else target.write(opened, member, meter):
        done.written += 1
        done.bytes += member.info.file_size
    else:
        reason = "damaged"
    if reason:
        done.refused.append(Refusal(archive, member.info.filename, reason))
    elif is_archive(member.place):
        done.nested.append(printable(member.place))
