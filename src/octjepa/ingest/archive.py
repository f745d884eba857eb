"""ZIP archives to the tree that ingest reads: streamed, checked, and resumed where a run stopped.

A member is written under a temporary name and renamed when its size and checksum are right, so that a file with its
final name is complete. Running the same command again writes what is missing and touches nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from posixpath import basename, dirname, join
from zipfile import ZipFile

from octjepa import remote
from octjepa.errors import OctjepaError, TooManyLostError, UsageError
from octjepa.ingest.archive_members import REFUSALS, ArchivePlan, ClaimedPaths, Member, Refusal, plan_members
from octjepa.ingest.archive_target import MB, UNREADABLE, Meter, Target, make_target, stream
from octjepa.ingest.listing import BucketListing, Listing, LocalListing, relative, walk
from octjepa.ingest.source_file import SourceFile, is_archive, printable
from octjepa.progress import bar
from octjepa.record import Record

_REPORTED = 10  # refused members that the message names


@dataclass
class _Counts:
    """The files that a run wrote and left out so far."""

    written: int = 0
    skipped: int = 0
    bytes: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    nested: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


@dataclass(frozen=True)
class Expansion(Record):
    """The result of `expand`.

    `skipped` members are at the target already with the same size and checksum. `left_out` counts members by kind.
    `nested` archives are written as they are. A reason of `refused` is a key of
    `octjepa.ingest.archive_members.REFUSALS`.
    """

    written: int
    skipped: int
    bytes: int
    left_out: dict[str, int]
    nested: list[str]
    refused: list[Refusal]
    archives: int
    dry_run: bool
    seconds: float


def expand(source: str | Path, target: str | Path, dry_run: bool = False) -> Expansion:
    """Expands the ZIP archives at `source` (a file, a folder with all below it, a url) into a folder or url.

    With `dry_run` nothing is written and the numbers are those of a real run.
    Raises UsageError (no archive, a target that is not a folder), TooManyLostError where a member was refused, after
    all work is done; OctjepaError: too little room on the disk, or no archive can be read at all.
    """
    start = time.monotonic()
    counts = _Counts()
    archives = _find_archives(str(source), counts)
    destination = make_target(target)
    claimed = ClaimedPaths()
    with nullcontext() if dry_run else destination.lock():
        # A fetched archive makes room for the next one; local ones are all planned before anything is written.
        local = [archive for archive in archives if isinstance(archive.location, Path)]
        for group in [local] if local else [[archive] for archive in archives]:
            _expand_group(group, destination, claimed, counts, dry_run)
    result = Expansion(
        written=counts.written,
        skipped=counts.skipped,
        bytes=counts.bytes,
        left_out=dict(sorted(counts.left_out.items())),
        nested=counts.nested,
        refused=[
            Refusal(*map(printable, (refusal.archive, refusal.member, refusal.reason, refusal.detail)))
            for refusal in counts.refused
        ],
        archives=len(archives),
        dry_run=dry_run,
        seconds=time.monotonic() - start,
    )
    if counts.refused:
        _raise_refused(counts, result)
    return result


def _raise_refused(counts: _Counts, result: Expansion) -> None:
    """Raises TooManyLostError, or OctjepaError if nothing could be read."""
    lines = []
    for refusal in counts.refused[:_REPORTED]:
        path = f"{refusal.archive}: {refusal.member}" if refusal.member else refusal.archive
        lines.append(
            f"  {printable(path)}  {refusal.reason}: {REFUSALS[refusal.reason]}"
            f"{refusal.detail and f' ({refusal.detail})'}"
        )
    if len(counts.refused) > _REPORTED:
        lines.append(f"  and {len(counts.refused) - _REPORTED} more, with --json")
    table = "\n".join(lines)
    if sum(not refusal.member for refusal in counts.refused) >= result.archives and not counts.written + counts.skipped:
        raise OctjepaError(f"nothing can be expanded:\n{table}\ncopy or download it again")
    raise TooManyLostError(
        f"expanded, but {len(counts.refused)} archives or members are refused:\n{table}\n"
        "whole members are written; repair the archive and run the same command again for the rest",
        result.to_json(),
    )


def _find_archives(source: str, counts: _Counts) -> list[SourceFile]:
    """The ZIP archives of a source, sorted; names are relative to it, or to the folder above a single archive's."""
    listing: Listing = BucketListing() if remote.is_remote(source) else LocalListing()
    located = listing.locate(listing.normalise(source), as_folder=source.endswith("/"))
    if located is None:
        raise UsageError(f"no file or folder at {printable(source)}")
    top, kind = located

    def refuse(path: str, reason: str, detail: str) -> None:
        if reason == "unreadable_folder":
            counts.refused.append(Refusal(relative(path, top) or ".", "", reason, detail))

    if kind == "file":
        name = join(basename(dirname(top)), basename(top))  # of an archive in "/" only the file name
        sources = [listing.source(top, name, None)]
    else:
        sources = [
            listing.source(path, relative(path, top) or "", None)
            for folder in walk(listing, top, Counter(), refuse)
            for name in folder.names
            if name.lower().endswith(".zip") and not name.startswith(".") and (path := join(folder.path, name))
        ]
    if not sources:
        raise UsageError(f"no ZIP archive in {printable(source)}: expected files called *.zip")
    return sorted(sources, key=lambda archive: archive.name)


def _expand_group(
    archives: Sequence[SourceFile], target: Target, claimed: ClaimedPaths, counts: _Counts, dry_run: bool
) -> None:
    """Plans some archives, checks that what is missing has room, and writes it."""
    planned = [(archive, plan) for archive in archives if (plan := _plan(archive, claimed, counts))]
    members = [member for _, plan in planned for member in plan.members]
    target.check_room(sum(member.info.file_size for member in members if not target.has(member.path)))
    with bar("expand", sum(member.info.file_size for member in members) // MB, "MB") as progress:
        meter = Meter(progress)
        for archive, plan in planned:
            counts.left_out.update(plan.left_out)
            counts.refused.extend(plan.refused)
            with archive.local() as path, ZipFile(path) as opened:
                for member in plan.members:
                    if reason := _write(opened, member, target, counts, meter, dry_run):
                        counts.refused.append(Refusal(plan.archive, member.info.filename, reason))
                    elif is_archive(member.path):
                        counts.nested.append(printable(member.path))


def _plan(archive: SourceFile, claimed: ClaimedPaths, counts: _Counts) -> ArchivePlan | None:
    """The members to unpack from an archive; None, and a refusal in `counts`, if it cannot be read."""
    with archive.local() as path:
        try:
            with ZipFile(path) as opened:
                return plan_members(PurePosixPath(archive.name), opened.infolist(), path.stat().st_size, claimed)
        except UNREADABLE as error:
            detail = error.strerror or "" if isinstance(error, OSError) else ""
            counts.refused.append(Refusal(archive.name, "", "not_an_archive", detail))
            return None


def _write(opened: ZipFile, member: Member, target: Target, counts: _Counts, meter: Meter, dry_run: bool) -> str:
    """Writes one member, or skips one that is there; the reason of `REFUSALS` if it is refused, else ""."""
    if target.has(member.path):
        same = target.is_same(member)
        counts.skipped += same
        meter.add(member.info.file_size)
        return "" if same else "other_file"
    if not target.is_free(member.path):
        return "other_file"
    if not (stream(opened, member, None, meter) if dry_run else target.write(opened, member, meter)):
        return "damaged"
    counts.written += 1
    counts.bytes += member.info.file_size
    return ""
