"""Finds the files that a store was made from and reads them again, so that a page can show the scan as it came.

A store holds no path, only each file's name below the folder that was ingested, a hash of its path, and the SHA-256 of
its decoded pixels. A file counts as the volume's own when its pixels have that hash, wherever it is now.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from octjepa.errors import OctjepaError, UsageError, VolumeRejected
from octjepa.ingest.read_source import read_source
from octjepa.ingest.source_file import SourceFile
from octjepa.ingest.sources import discover
from octjepa.notes import read_notes
from octjepa.read.dicom_series import series_in
from octjepa.read.one_frame import read_one_frame
from octjepa.remote import is_remote
from octjepa.store.index import IndexEntry
from octjepa.volume import OCTVolume

MAX_BYTES = 512 << 20  # of pixels that are held at once; the last scan is held in any case
_MAX_FOLDERS = 200  # that are tried next to the store


class NativeFiles:
    """Reads the native scans of a store's volumes. Its methods may be called from threads; files are read in turn."""

    def __init__(self, scans: Sequence[str], near: Sequence[Path] = ()) -> None:
        """`scans` are folders (also urls) that hold the files. `near` are folders that are tried by name alone."""
        self._scans, self._near = list(scans), list(near)
        self._lock = threading.Lock()
        self._held: OrderedDict[str, OCTVolume] = OrderedDict()

    def read(self, entry: IndexEntry) -> OCTVolume:
        """The native scan of an index entry, with the pixels that were ingested.

        Raises UsageError that says in words why there is none: not found, changed since ingest, not readable.
        """
        with self._lock:
            name = entry.volume_id
            if name not in self._held:
                self._held[name] = self._read(entry)
                while len(self._held) > 1 and sum(volume.pixels.nbytes for volume in self._held.values()) > MAX_BYTES:
                    self._held.popitem(last=False)
            self._held.move_to_end(name)
            return self._held[name]

    def frame(self, entry: IndexEntry, number: int) -> UInt8[np.ndarray, "H W"] | None:
        """B-scan `number` of an index entry, without reading the others; None if that cannot be done.

        That it is the file which was ingested is not checked except for its name and size: `read` does so afterwards.
        """
        source = next(self._candidates(entry), None)
        if source is None or source.member or entry.volume_id in self._held:
            return None
        try:
            with source.local() as path:
                return read_one_frame(path, number, entry.shape, read_notes(entry.notes))
        except (OctjepaError, OSError):
            return None

    def _read(self, entry: IndexEntry) -> OCTVolume:
        reasons = []
        for source in self._candidates(entry):
            try:
                volume = read_source(source, entry.stated_spacing_mm)
            except VolumeRejected as error:
                reasons.append(f"its file can no longer be read ({error.reason})")
            except (OctjepaError, OSError):
                reasons.append("its file cannot be opened")
            else:
                if volume.content_hash == entry.content_hash:
                    return volume
                reasons.append("its file has changed since ingest: the pixels are others now")
        if reasons:
            raise UsageError(reasons[0])
        hint = "is in none of the folders given with --scans" if self._scans else "is not next to the store"
        raise UsageError(f"its file {hint}: give --scans FOLDER, the folder that was ingested")

    def _candidates(self, entry: IndexEntry) -> Iterator[SourceFile]:
        """Files that may be the entry's: by name below the folders, then by the hash of the path, then by any name."""
        tried = set()
        for folder in (*map(Path, (scan for scan in self._scans if not is_remote(scan))), *self._near):
            for source in _scans_named(folder, entry.file):
                tried.add(source.key)
                yield source
        if self._scans:
            by_key, by_name = self._discovered
            for candidate in (by_key.get(entry.key), by_name.get(entry.file)):
                if candidate is not None and candidate.key not in tried:
                    tried.add(candidate.key)
                    yield candidate

    @cached_property
    def _discovered(self) -> tuple[dict[str, SourceFile], dict[str, SourceFile]]:
        """Every scan of the given folders and buckets by the hash of its path, and by its name below them."""
        try:
            files = discover(self._scans).files
        except OctjepaError:
            files = []
        return {file.key: file for file in files}, {file.name: file for file in files}


def _scans_named(folder: Path, file: str) -> Iterator[SourceFile]:
    """The scans that may be called `file` below `folder`, or in the file `folder`.

    "P#1" is a file or folder of this name, scan 1 of the file "P", or one of the series in the folder "P".
    """
    whole, _, member = file.rpartition("#")
    for name, part in ((file, ""), (whole, member)):
        if not name or ".." in Path(name).parts or Path(name).is_absolute():
            continue
        path = folder if folder.is_file() and folder.name == name else folder / name
        if path.is_file() or (path.is_dir() and not part):
            yield SourceFile(path, file, None, (), part)
        elif path.is_dir():
            names: list[str] = []
            with suppress(OSError):
                names = sorted(child.name for child in path.iterdir() if child.is_file())
            for series in series_in(path, names):
                yield SourceFile(path, file, None, (), series.member, series.names)


def existing_scans(scans: Sequence[str]) -> tuple[str, ...]:
    """`scans` as they were given. Raises UsageError: a folder of them does not exist."""
    for folder in scans:
        if not is_remote(folder) and not Path(folder).exists():
            raise UsageError(f"no folder of scans at {folder}: give the folder that was ingested")
    return tuple(scans)


def folders_near(store: Path) -> list[Path]:
    """The folders next to a store, one level deep, in which its files are tried by name."""
    parent = store.resolve().parent
    try:
        beside = sorted(path for path in parent.iterdir() if path.is_dir() and path != store.resolve())
    except OSError:
        beside = []
    return [parent, *beside[:_MAX_FOLDERS]]
