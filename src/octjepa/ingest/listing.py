"""Folders on disks and in buckets behind one interface, with the walk and the glob over them.

Paths are strings with "/" between their parts: local paths, or urls of buckets. A local folder costs one system call,
and for a file its first bytes are read. A tree in a bucket costs one listing; objects are recognised by their names.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import basename, dirname, join

from octjepa import remote
from octjepa.errors import UsageError, VolumeRejected
from octjepa.ingest.remote_series import series_of_objects
from octjepa.ingest.source_file import SourceFile
from octjepa.read import formats
from octjepa.read.dicom_series import Series, may_be_b_scan, series_in
from octjepa.read.formats.images import without_masks
from octjepa.read.formats.metaimage import HEADER_BYTES, named_voxel_file
from octjepa.read.formats.sequence import IMAGE_SUFFIXES
from octjepa.read.manifest import ManifestRow
from octjepa.read.single_bscan import BSCAN_SUFFIXES

Refuse = Callable[[str, str, str], None]  # path, reason code, detail
WILDCARDS = frozenset("*?[")
IMAGES = frozenset(IMAGE_SUFFIXES)
_FEW_OBJECTS = 3  # of a folder in a bucket: these are looked up one by one, more by a listing


def suffix_of(path: str) -> str:
    """The suffix of the last part, in lower case."""
    return PurePosixPath(path).suffix.lower()


def relative(path: str, folder: str) -> str | None:
    """`path` below `folder` ("" for the folder itself), None if it is elsewhere."""
    inside = folder.rstrip("/")
    if path.rstrip("/") == inside:
        return ""
    return path[len(inside) + 1 :] if path.startswith(f"{inside}/") else None


class LocalListing:
    """Files on the disks of this machine: what a search needs to know about them."""

    def __init__(self) -> None:
        self.real = cache(os.path.realpath)  # the path of a folder without links; thousands of files share few

    def normalise(self, source: str) -> str:
        """The path that a user's `source` names. Raises UsageError for one that cannot be searched."""
        return str(Path(source))

    def locate(self, path: str, as_folder: bool = False) -> tuple[str, str] | None:
        """(path without links, kind), kind as in `entries`; None if there is nothing. Raises PermissionError."""
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                real, mode = os.path.realpath(path), os.stat(path).st_mode
            else:
                real = join(self.real(dirname(path)), basename(path))
        except PermissionError:
            raise
        except OSError:
            return None
        return real, "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "special file"

    def entries(self, folder: str) -> list[tuple[str, str]]:
        """(name, kind) in the order of names; kind is file, folder, link (to a file) or what else it is.

        Raises OSError.
        """
        with os.scandir(folder) as children:
            return sorted((entry.name, self._kind(entry)) for entry in children)

    @staticmethod
    def _kind(entry: os.DirEntry[str]) -> str:
        try:
            if entry.is_symlink():
                if entry.is_dir():
                    return "linked folder"
                if entry.is_file():
                    return "link"
                return "special file" if os.path.exists(entry.path) else "link to nothing"
            if entry.is_dir(follow_symlinks=False):
                return "folder"
            return "file" if entry.is_file(follow_symlinks=False) else "special file"
        except OSError:  # a loop of links
            return "link to nothing"

    def leads_out(self, path: str, folder: str) -> bool:
        """Whether `path` is, or passes through, a link to something that is not below `folder`."""
        real = os.path.realpath(path) if os.path.islink(path) else join(self.real(dirname(path)), basename(path))
        return relative(real, self.real(folder)) is None

    def is_file(self, path: str) -> bool:
        """Whether `path` is a file that exists."""
        return os.path.isfile(path)

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return os.path.getsize(path)

    def read_bytes(self, path: str) -> bytes:
        """The whole content of a small file."""
        return Path(path).read_bytes()

    def is_scan(self, path: str) -> bool:
        """Whether a reader should try this file; True for one that cannot be opened, so that its error is recorded."""
        try:
            return formats.recognise(Path(path)) is not None
        except VolumeRejected:
            return True

    def is_scan_folder(self, folder: str, names: Sequence[str]) -> bool:
        """Whether the files called `names` in a folder are the B-scan images of one scan."""
        return formats.is_scan_folder(Path(folder), names)

    def series(self, folder: str, names: Sequence[str]) -> Sequence[Series]:
        """The scans of which a folder holds a DICOM file per B-scan. Raises ResourceError: no room for a copy."""
        return series_in(Path(folder), names)

    def location(self, path: str) -> Path:
        """The location that a reader opens: a path on a disk, or an address in a bucket."""
        return Path(path)

    def name_outside(self, path: str) -> str:
        """The name of a file that is not below the searched root."""
        return basename(path)

    def source(
        self, path: str, name: str, row: ManifestRow | None, is_folder: bool = False, series: Series | None = None
    ) -> SourceFile:
        """The scan at `path`, a folder of images or of the B-scans of `series` where `is_folder`."""
        return SourceFile(Path(path), name, row, series=() if series is None else series.names)


class BScanListing(LocalListing):
    """Files on the disks of this machine, every picture and DICOM file as a B-scan; masks are left out."""

    def __init__(self) -> None:
        super().__init__()
        self._scans = cache(self._find_scans)

    def is_scan(self, path: str) -> bool:
        return basename(path) in self._scans(dirname(path) or ".")

    @staticmethod
    def _find_scans(folder: str) -> frozenset[str]:
        names = [name for name in os.listdir(folder) if name.lower().endswith(BSCAN_SUFFIXES)]
        return frozenset(without_masks(names))

    def is_scan_folder(self, folder: str, names: Sequence[str]) -> bool:
        return False

    def series(self, folder: str, names: Sequence[str]) -> Sequence[Series]:
        return ()


class BucketListing:
    """Objects in buckets, with the methods of `LocalListing`. What was listed or looked up is not requested again."""

    def __init__(self) -> None:
        self._suffixes = tuple(formats.suffixes() - IMAGES)  # by name alone a TIFF may be a single picture
        self._objects: dict[str, remote.RemoteObject | None] = {}
        self._children: dict[str, set[tuple[str, str]]] = {}
        self._listed: set[str] = set()  # folders whose own objects are known
        self._listed_below: set[str] = set()  # folders of which everything below is known

    def normalise(self, source: str) -> str:
        url = remote.join(source)
        if set(url.split("/")[2]) & WILDCARDS:
            raise UsageError(f"{source} has a wildcard in the bucket's name: name the bucket")
        return url

    def prefetch(self, urls: Sequence[str]) -> None:
        """Lists the folders of `urls` if that takes fewer requests than looking each of them up."""
        for folder, count in Counter(map(dirname, urls)).items():
            if count > _FEW_OBJECTS:
                self.load(folder, below=False)

    def load(self, folder: str, below: bool = True) -> None:
        """Lists a folder, with everything below it or its own objects only, unless it is known."""
        if self._is_known(folder, below):
            return
        (self._listed_below if below else self._listed).add(folder)
        for entry in remote.list_objects(folder, recursive=below):
            self._objects[entry.url] = entry
            child, kind = entry.url, "file"
            while child != folder:
                parent = dirname(child)
                self._children.setdefault(parent, set()).add((basename(child), kind))
                child, kind = parent, "folder"

    def _is_known(self, folder: str, below: bool) -> bool:
        if not below and folder in self._listed:
            return True
        return any(relative(folder, listed) is not None for listed in self._listed_below)

    def _object(self, url: str) -> remote.RemoteObject | None:
        if url not in self._objects:
            is_known = self._is_known(dirname(url), below=False)
            self._objects[url] = None if is_known else remote.info(url)
        return self._objects[url]

    def locate(self, path: str, as_folder: bool = False) -> tuple[str, str] | None:
        if path.count("/") > 2 and not as_folder and self._object(path):
            return path, "file"
        self.load(path)
        return (path, "folder") if path in self._children else None

    def entries(self, folder: str) -> list[tuple[str, str]]:
        self.load(folder, below=False)
        return sorted(self._children.get(folder, ()))

    def leads_out(self, path: str, folder: str) -> bool:
        """False: a bucket has no links."""
        return False

    def is_file(self, path: str) -> bool:
        return self._object(path) is not None

    def size(self, path: str) -> int:
        entry = self._object(path)
        return entry.size if entry else 0

    def read_bytes(self, path: str) -> bytes:
        return remote.read_bytes(path)

    def real(self, folder: str) -> str:
        """The folder itself: a bucket has no links."""
        return folder

    def is_scan(self, path: str) -> bool:
        return path.lower().endswith(self._suffixes)

    def is_scan_folder(self, folder: str, names: Sequence[str]) -> bool:
        return formats.is_scan_folder(Path(basename(folder)), names)

    def series(self, folder: str, names: Sequence[str]) -> Sequence[Series]:
        return series_of_objects(
            {name: entry for name in names if may_be_b_scan(name) and (entry := self._object(join(folder, name)))}
        )

    def location(self, path: str) -> str:
        return path

    def name_outside(self, path: str) -> str:
        return path.partition("://")[2].partition("/")[2]

    def source(
        self, path: str, name: str, row: ManifestRow | None, is_folder: bool = False, series: Series | None = None
    ) -> SourceFile:
        """With the objects that have to be fetched together: companions of a file, images or B-scans of a folder."""
        if series is not None:
            parts = [join(path, one) for one in (*series.names, *series.beside)]
        elif is_folder:
            parts = [file for file in self._files(path) if suffix_of(file) in IMAGES | {".json"}]
            if path.count("/") > 2:  # otherwise it is a bucket, and nothing lies next to that
                parts.append(f"{path}.json")
        else:
            folder = dirname(path)
            parts = [path, *(join(folder, other) for other in formats.companion_names(basename(path)))]
            if suffix_of(path) == ".xml":  # a HEYEX export lists images next to it
                parts += [file for file in self._files(folder) if suffix_of(file) in IMAGES]
            if suffix_of(path) == ".mhd" and 0 < self.size(path) <= HEADER_BYTES:
                voxels = named_voxel_file(self.read_bytes(path))
                parts += [join(folder, voxels)] if voxels and "/" not in voxels else []
        objects = tuple(entry for part in dict.fromkeys(parts) if (entry := self._object(part)))
        return SourceFile(f"{path}/" if is_folder else path, name, row, objects)

    def _files(self, folder: str) -> list[str]:
        return [join(folder, name) for name, kind in self.entries(folder) if kind == "file"]


Listing = LocalListing | BucketListing


@dataclass(frozen=True)
class Folder:
    """One folder of a walk: `names` of its files, those among them that are `links`, and its `subfolders`.

    The walk enters what is in `subfolders` next; clearing the list keeps it out.
    """

    path: str
    names: tuple[str, ...]
    links: frozenset[str]
    subfolders: list[str]


def walk(listing: Listing, top: str, ignored: Counter[str], refuse: Refuse) -> Iterator[Folder]:
    """`top` and all folders below it, each before those inside it; linked and hidden folders are not entered.

    What is left out is counted in `ignored`; what cannot be listed or opened goes to `refuse`.
    """
    waiting = [top]
    while waiting:
        path = waiting.pop()
        try:
            entries = listing.entries(path)
        except OSError as error:
            refuse(path, "unreadable_folder", error.strerror or str(error))
            continue
        subfolders = []
        for name, kind in entries:
            if kind == "folder" and not name.startswith("."):
                subfolders.append(join(path, name))
            elif kind == "link to nothing" and not name.startswith("."):  # hidden: an editor's lock
                refuse(join(path, name), "unreadable_file", "a link that leads nowhere")
            elif kind not in {"file", "link"}:
                ignored["hidden folder" if kind == "folder" else kind] += 1
        names = tuple(name for name, kind in entries if kind in {"file", "link"})
        links = frozenset(name for name, kind in entries if kind == "link")
        yield Folder(path, names, links, subfolders)
        waiting.extend(reversed(subfolders))


def glob(listing: Listing, pattern: str, ignored: Counter[str], refuse: Refuse) -> tuple[str, list[str]]:
    """The folder before the first wildcard, and the files and folders that `pattern` matches, sorted, each once.

    "*", "?" and "[...]" stand for parts of one name, "**" for any number of folders. Hidden names need a pattern that
    begins with a dot, and linked folders are not entered, as in `walk`.
    """
    parts = pattern.split("/")
    fixed = next(index for index, part in enumerate(parts) if set(part) & WILDCARDS)
    base = listing.real("/".join(parts[:fixed]) or ("/" if pattern.startswith("/") else "."))
    names: dict[str, None] = {}

    def expand(folder: str, rest: tuple[str, ...]) -> None:
        if not rest or rest == ("**",):
            names.setdefault(folder)
            return
        if rest[0] == "**":
            expand(folder, rest[1:])
        try:
            entries = listing.entries(folder)
        except NotADirectoryError:
            return
        except OSError as error:
            refuse(folder, "unreadable_folder", error.strerror or str(error))
            return
        for name, kind in entries:
            hidden = name.startswith(".") and not rest[0].startswith(".")
            if rest[0] == "**":
                if kind == "folder" and not hidden:
                    expand(join(folder, name), rest)
            elif not hidden and fnmatchcase(name, rest[0]):
                if kind == "folder" or (kind in {"file", "link"} and len(rest) == 1):
                    expand(join(folder, name), rest[1:])
                elif kind not in {"file", "link"}:
                    ignored[kind] += 1

    once = [part for index, part in enumerate(parts) if part != "**" or index == 0 or parts[index - 1] != "**"]
    located = listing.locate(base)
    if located and located[1] == "folder":
        expand(base, tuple(once[fixed:]))
    return base, sorted(names)
