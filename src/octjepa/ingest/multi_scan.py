"""A file that holds several scans, as a vendor's file of both eyes does, stands for each of them.

How many there are stands in the file, so an object in a bucket is fetched for it: into the cache, where its reading
finds it, and what was found is remembered for as long as the object stays the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from octjepa import remote
from octjepa.errors import MachineRefuses, OctjepaError, VolumeRejected
from octjepa.ingest import formats
from octjepa.ingest.reasons import error_origin
from octjepa.ingest.source_file import SourceFile
from octjepa.progress import bar

_AT_ONCE = 8  # objects on the way
_log = logging.getLogger(__name__)
_looking = threading.Lock()  # vendors' libraries are not made for threads


def each_scan(files: Sequence[SourceFile]) -> list[SourceFile]:
    """`files`, those of several scans as one for each: "eyes.e2e" becomes "eyes.e2e#1" and "eyes.e2e#2".

    One that cannot be looked into stays whole: its reading says why. Raises MachineRefuses: no room for a copy.
    """
    asked = [
        file
        for file in files
        if PurePosixPath(file.dataset_path.name).suffix.lower() in formats.suffixes(multi_scan_only=True)
    ]
    objects = [file for file in asked if isinstance(file.location, str) and file.objects]
    found = {file.key: _scans_in(file.location, file.name) for file in asked if isinstance(file.location, Path)}
    if objects:
        pool = ThreadPoolExecutor(_AT_ONCE)
        with bar("looking for several scans in a file", len(objects), "files") as shown:
            try:
                for file, members in zip(objects, pool.map(_of_object, objects), strict=True):
                    found[file.key] = members
                    shown.advance()
            finally:
                pool.shutdown(cancel_futures=True)
    return [scan for file in files for scan in _split(file, found.get(file.key) or ())]


def _split(file: SourceFile, members: Sequence[str]) -> list[SourceFile]:
    return [replace(file, name=f"{file.name}#{member}", member=member) for member in members] or [file]


def _scans_in(path: Path, name: str) -> tuple[str, ...] | None:
    """The scans in the file, () for one; None where that could not be seen."""
    try:
        with _looking:
            return formats.list_scans(path)
    except VolumeRejected:  # its reading meets the same, and tells the ledger
        return None
    except Exception as error:  # vendors' libraries raise whatever a damaged file made of their parser
        _log.warning("%s was not looked into for several scans: %s", name, error_origin(error))
        return None


def _of_object(file: SourceFile) -> tuple[str, ...] | None:
    one = next(one for one in file.objects if one.url == file.location)
    digest = hashlib.sha256("\x1f".join((one.url, one.version, str(one.size))).encode()).hexdigest()
    remembered = remote.cache_folder("scans") / f"{digest[:32]}.json"
    try:
        return tuple(json.loads(remembered.read_text(encoding="utf-8"))["scans"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not looked into before
    try:
        with remote.local_copy(one) as path:
            members = _scans_in(path, file.name)
    except MachineRefuses:
        raise
    except OctjepaError:  # its reading meets the same, and tells the ledger
        return None
    if members is not None:
        with suppress(OSError):  # what is not remembered, or half of it, is looked for again
            remembered.write_text(json.dumps({"scans": members}), encoding="utf-8")
    return members
