"""Finds the scans to ingest: files, folders, globs, lists of files and manifests, on disks and in buckets.

The sources that a user names become a sorted list of `SourceFile`s, the entries of the quarantine that are known before
anything is read, and counts of what was left out. A file that holds several scans, such as a vendor's file of both
eyes, becomes a `SourceFile` for each of them.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from octjepa import remote
from octjepa.errors import OctjepaError, ResourceError, UsageError, VolumeRejected
from octjepa.ingest.listing import IMAGES, BScanListing, BucketListing, LocalListing, suffix_of
from octjepa.ingest.search import Search
from octjepa.ingest.source_file import Discovery, SourceFile, printable, source_name
from octjepa.progress import bar
from octjepa.read import formats
from octjepa.reasons import REASONS, error_origin

__all__ = ["Discovery", "SourceFile", "discover"]

_LISTS = {".txt", ".lst"}
_DICOM_SUFFIXES = {".dcm", ".dicom", ".dic", ".ima", ""}
# Reasons of which an entry may concern any number of scans.
WARNED_REASONS = ("archive_not_expanded", "unreadable_folder", "path_escapes", "images_beside_scan")
# Names that file managers and people give to copies, of a file or of its folder: "scan (1)", "Copy of scan", "backup/".
_COPY = re.compile(
    r"(?<![a-z])(?:cop(?:y|ies)|duplicates?|backups?|bak|kopien?|copie|copia)(?![a-z])|\(\d+\)$", re.IGNORECASE
)
_CONCURRENT_FETCHES = 8
_log = logging.getLogger(__name__)
_parsing = threading.Lock()  # vendors' libraries are not made for threads


def discover(sources: Sequence[str | Path], single_bscans: bool = False) -> Discovery:
    """All scans of `sources`: local paths and globs, gs:// and s3:// urls.

    `single_bscans`: every picture and DICOM file is one B-scan, and only local sources are searched.

    Raises UsageError: nothing or an empty text named, no such path, a glob without a match, an unreadable manifest or
    list, no scan found. OctjepaError: a bucket does not answer. ResourceError: no room for a copy of an object.
    """
    if not sources:
        raise UsageError("no source named: give a scan, a folder, a glob, a list of files or a manifest.tsv")
    if not all(str(source).strip() for source in sources):  # an unset variable of a shell; a path "" is the folder "."
        raise UsageError('a source is an empty text: give a path, or "." for the current folder')
    discovery = Discovery()
    if single_bscans and any(remote.is_remote(str(source)) for source in sources):
        raise UsageError("single B-scans (--images) are read only from disks: copy them from the bucket into a folder")
    disk, objects = Search(BScanListing() if single_bscans else LocalListing(), discovery), BucketListing()
    bucket = Search(objects, discovery)
    for source in map(str, sources):
        refused_before = len(discovery.refused)
        if suffix_of(source) in _LISTS:
            _add_list(source, disk, bucket, objects)
        else:
            (bucket if remote.is_remote(source) else disk).add(source)
        discovery.searched.add(source_name(source))
        discovery.found_in |= {
            refusal.source.key: source_name(source) for refusal in discovery.refused[refused_before:]
        }
    _sort(discovery)
    discovery.files = _split_multi_scan_files(discovery.files)
    _report(sources, discovery, single_bscans)
    return discovery


def _add_list(source: str, disk: Search, bucket: Search, objects: BucketListing) -> None:
    """The entries of a list of files; relative entries are relative to the list's folder."""
    if remote.is_remote(source):
        folder = source.rpartition("/")[0]
        entries = read_list(remote.read_bytes(source), source)
        urls = [entry if remote.is_remote(entry) else remote.join(folder, entry) for entry in entries]
    else:
        path = Path(source)
        try:
            entries = read_list(path.read_bytes(), source)
        except OSError as error:
            raise UsageError(f"{printable(source)} cannot be read as a list of files: {error.strerror}") from None
        folder = os.path.realpath(path.parent)
        urls = [remote.join(entry) for entry in entries if remote.is_remote(entry)]
        for entry in entries:
            if not remote.is_remote(entry):
                disk.add_listed(os.path.join(folder, entry), folder)
    objects.prefetch(urls)
    for url in urls:
        bucket.add_listed(url, folder)


def read_list(content: bytes, source: str) -> list[str]:
    """The entries of a list of files, one a line; empty lines and those that begin with "#" are left out.

    Raises UsageError: no text, or no entry.
    """
    encoding = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"  # as some shells write it
    lines = content.decode(encoding, "surrogateescape" if encoding == "utf-8-sig" else "replace").splitlines()
    entries = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not entries or any("\0" in entry for entry in entries):
        raise UsageError(f"{printable(source)} is not a list of files: expected text with a path or url on each line")
    return entries


def _sort(discovery: Discovery) -> None:
    """Each file once, in the order of names; a file found with a manifest row takes precedence over one without.

    Of a file and a link to it the file is read, for its path may state person and eye; the other names are counted.
    DICOM comes first: of one scan in two formats, the file whose header knows more enters the store. Files whose name
    or folder says that they are copies come last, so that the original is stored and the copy refused.
    """

    def is_link(file: SourceFile) -> bool:
        return isinstance(file.location, Path) and os.path.realpath(file.location) != os.path.abspath(file.location)

    unique: dict[str, SourceFile] = {}
    for file in discovery.files:
        first = unique.setdefault(file.key, file)
        if first is file:
            continue
        two_names = os.path.abspath(first.location) != os.path.abspath(file.location)
        discovery.ignored["link to a file that is read"] += two_names
        unique[file.key] = max(first, file, key=lambda entry: (entry.row is not None, not is_link(entry)))
    read_by_path = [
        entry
        for entry in discovery.refused
        if entry.source.is_link and replace(entry.source, is_link=False).key in unique
    ]
    discovery.ignored["link to a file that is read"] += len(read_by_path)
    discovery.refused = [entry for entry in discovery.refused if entry not in read_by_path]
    discovery.ignored = +discovery.ignored  # without the kinds of which there are none
    discovery.files = sorted(
        unique.values(),
        key=lambda file: (
            suffix_of(file.name) not in _DICOM_SUFFIXES,
            named_as_copy(file.name),
            file.name,
            str(file.location),
        ),
    )
    refused = {(refusal.source.key, refusal.reason): refusal for refusal in discovery.refused}
    discovery.refused = sorted(refused.values(), key=lambda refusal: (refusal.source.name, refusal.reason))


def named_as_copy(name: str) -> bool:
    """Whether a file's name, or a folder in it, says that it is a copy: "scan (1).dcm", "backup/scan.dcm"."""
    return any(_COPY.search(part.rpartition(".")[0] or part) for part in name.split("/"))


def _report(sources: Sequence[str | Path], discovery: Discovery, single_bscans: bool) -> None:
    """Warns of what a person must act on before all can be read. Raises UsageError if there is nothing to read.

    The advice is in the error only: after a warning, the caller gives it with the refused files.
    """
    messages = {
        code: f"{count} {code}: {REASONS[code].meaning}"
        for code, count in Counter(refusal.reason for refusal in discovery.refused).items()
    }
    if not discovery.files:
        where = ", ".join(printable(str(source)) for source in sources)
        ignored = ", ".join(f"{count} {kind}" for kind, count in discovery.ignored.most_common(5))
        why = f" (left out: {ignored})" if ignored else "" if messages else ": it is empty"
        if not single_bscans and any(kind in IMAGES for kind in discovery.ignored):
            why += ": if the pictures are single B-scans, add --images to `octjepa segment` or `octjepa ingest`"
        lines = [f"{message}; {REASONS[code].action}" for code, message in messages.items()]
        raise UsageError("\n  ".join([f"no OCT scan in {where}{why}", *lines]))
    for code in WARNED_REASONS:
        if code in messages:
            _log.warning("%s", messages[code])


def _split_multi_scan_files(files: Sequence[SourceFile]) -> list[SourceFile]:
    """`files`, those of several scans as one for each: "eyes.e2e" becomes "eyes.e2e#1" and "eyes.e2e#2".

    A file whose scans cannot be listed stays whole: reading it reports why. Raises ResourceError.
    """
    suffixes = formats.suffixes(multi_scan_only=True)
    several = [file for file in files if file.dataset_path.suffix.lower() in suffixes]
    objects = [file for file in several if isinstance(file.location, str) and file.objects]
    members = {file.key: _list_scans(file.path, file.name) for file in several if isinstance(file.location, Path)}
    if objects:
        pool = ThreadPoolExecutor(_CONCURRENT_FETCHES)
        with bar("looking for several scans in a file", len(objects), "files") as progress:
            try:
                for file, scans in zip(objects, pool.map(_list_scans_of_object, objects), strict=True):
                    members[file.key] = scans
                    progress.advance()
            finally:
                pool.shutdown(cancel_futures=True)
    return [
        scan
        for file in files
        for scan in [
            replace(file, name=f"{file.name}#{member}", member=member) for member in members.get(file.key) or ()
        ]
        or [file]
    ]


def _list_scans(path: Path, name: str) -> tuple[str, ...] | None:
    """The scans in the file, () for one; None if they cannot be listed."""
    try:
        with _parsing:
            return formats.list_scans(path)
    except VolumeRejected:  # the reader raises the same, for the quarantine
        return None
    except Exception as error:  # vendors' libraries raise whatever a damaged file makes of their parser
        _log.warning("the scans in %s cannot be listed: %s", name, error_origin(error))
        return None


def _list_scans_of_object(file: SourceFile) -> tuple[str, ...] | None:
    """As `_list_scans`, of an object; the answer is cached for as long as the object stays the same."""
    entry = next(obj for obj in file.objects if obj.url == file.location)

    def find() -> tuple[tuple[str, ...] | None, bool]:
        try:
            with remote.local_copy(entry) as path:
                members = _list_scans(path, file.name)
        except ResourceError:
            raise
        except OctjepaError:  # the reader raises the same, for the quarantine
            return None, False
        return members, members is not None

    listed = remote.remembered("scans", [entry], find)
    return None if listed is None else tuple(listed)
