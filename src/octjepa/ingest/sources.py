"""Finds the scans to ingest: files, folders, globs, lists of files and manifests, on disks and in buckets.

Enter what a user names; leave a sorted list of `SourceFile`s, what belongs into the ledger at once, and counts of what
was left out. Local files are recognised by their content, objects in buckets by their names. Side files (tables,
pictures, notes, `._` twins of macOS) are left out and counted. A file that is called DICOM and is none stays in the
list, so that it ends in the ledger, and so does an archive.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from octjepa import remote
from octjepa.errors import UsageError
from octjepa.ingest.bucket_tree import BucketSearch
from octjepa.ingest.local_tree import LISTS, LocalSearch, read_list
from octjepa.ingest.multi_scan import each_scan
from octjepa.ingest.reasons import REASONS
from octjepa.ingest.source_file import Discovery, SourceFile, printable
from octjepa.ingest.walk import WILDCARDS

__all__ = ["Discovery", "SourceFile", "discover"]

_log = logging.getLogger(__name__)
_TO_ACT_ON = (
    "archive_not_expanded",
    "unreadable_folder",
    "path_escapes",
    "images_beside_scan",
)  # each may stand for any number of scans


_DICOM_SUFFIXES = {".dcm", ".dicom", ".dic", ".ima", ""}


def _like_dicom(file: SourceFile) -> bool:
    """DICOM goes first: of one scan in two formats, the one whose header knows more enters the store."""
    return PurePosixPath(file.name).suffix.lower() in _DICOM_SUFFIXES


def _is_link(file: SourceFile) -> bool:
    return isinstance(file.location, Path) and os.path.realpath(file.location) != os.path.abspath(file.location)


def discover(sources: Sequence[str | Path]) -> Discovery:
    """All scans of `sources`: local paths and globs, gs:// and s3:// urls.

    Raises UsageError: nothing named, no such path, a glob without a match, an unreadable manifest or list, no scan
    found. OctjepaError: a bucket does not answer.
    """
    if not sources:
        raise UsageError("no source named: give a scan, a folder, a glob, a list of files or a manifest.tsv")
    found = Discovery()
    disk, bucket = LocalSearch(found), BucketSearch(found)
    for source in map(str, sources):
        if PurePosixPath(source).suffix.lower() in LISTS:
            _add_list(source, disk, bucket)
        elif remote.is_remote(source):
            bucket.add(source)
        elif set(source) & set(WILDCARDS) and not Path(source).exists():
            disk.add_glob(source)
        else:
            disk.add(Path(source))
    _sort(found)
    found.files = each_scan(found.files)
    _tell(sources, found)
    return found


def _add_list(source: str, disk: LocalSearch, bucket: BucketSearch) -> None:
    """The entries of a list; a relative one is meant from the list's own place."""
    if remote.is_remote(source):
        here = source.rpartition("/")[0]
        entries = read_list(remote.read_bytes(source), source)
        bucket.add_listed([one if remote.is_remote(one) else remote.join(here, one) for one in entries], here)
        return
    path = Path(source)
    try:
        entries = read_list(path.read_bytes(), source)
    except OSError as error:
        raise UsageError(f"{printable(source)} cannot be read as a list of files: {error.strerror}") from None
    urls = [entry for entry in entries if remote.is_remote(entry)]
    folder = path.parent.resolve()
    for entry in entries:
        if not remote.is_remote(entry):
            disk.add_listed(folder / entry, folder)
    if urls:
        bucket.add_listed(urls, "")


def _sort(found: Discovery) -> None:
    """Each file once, in the order of names; where it was found with a row and without, the row counts.

    Of a file and a link to it the file speaks, for its path tells of person and eye; other names of it are counted.
    """
    unique: dict[str, SourceFile] = {}
    for file in found.files:
        first = unique.setdefault(file.key, file)
        if first is file:
            continue
        two_names = os.path.abspath(first.location) != os.path.abspath(file.location)
        found.ignored["link to a file that is read"] += two_names
        unique[file.key] = max(first, file, key=lambda one: (one.row is not None, not _is_link(one)))
    found.ignored = +found.ignored  # without the kinds of which there are none
    found.files = sorted(unique.values(), key=lambda file: (not _like_dicom(file), file.name, str(file.location)))
    refused = {(one.source.key, one.reason): one for one in found.refused}
    found.refused = sorted(refused.values(), key=lambda one: (one.source.name, one.reason))


def _tell(sources: Sequence[str | Path], found: Discovery) -> None:
    """Warns of what a person must act on before all can be read. Raises UsageError where there is nothing to read."""
    by_reason = Counter(one.reason for one in found.refused)
    said = {
        code: f"{count} {code}: {REASONS[code].meaning}; {REASONS[code].action}" for code, count in by_reason.items()
    }
    if not found.files:
        where = ", ".join(printable(str(source)) for source in sources)
        ignored = ", ".join(f"{count} {kind}" for kind, count in found.ignored.most_common(5))
        why = f" (left out: {ignored})" if ignored else "" if said else ": it is empty"
        raise UsageError("\n  ".join([f"no OCT scan in {where}{why}", *said.values()]))
    for code in _TO_ACT_ON:
        if code in said:
            _log.warning("%s", said[code])
