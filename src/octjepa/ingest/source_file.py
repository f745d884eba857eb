"""One scan to read, on a disk or in a bucket, and what a search for scans found besides."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePath, PurePosixPath
from tempfile import TemporaryDirectory
from typing import NamedTuple

from octjepa import remote
from octjepa.errors import OctjepaError
from octjepa.read.dicom_series import may_be_b_scan
from octjepa.read.formats import companion_names
from octjepa.read.formats.metaimage import HEADER_BYTES, named_voxel_file
from octjepa.read.formats.vendor.heyex_xml import MAX_XML_BYTES, pictures_in
from octjepa.read.formats.zarr import is_zarr
from octjepa.read.manifest import ManifestRow
from octjepa.read.personal_data import StatedPerson, first_stated, read_stated_person

_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".7z", ".rar")

_MAX_HEADERS = 64  # that are read in a folder of unknown content to find out whom it shows
_HEADER_BYTES = 2 << 20  # of an object in a bucket that are fetched to find out whom it shows


def _hash_to_63_bits(*parts: object) -> int:
    """A 63-bit number that differs where `parts` do."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class SourceFile:
    """One file, or one folder of B-scan images; `name` is its path relative to the ingested root, "/" between parts.

    `location` is a local path or a url; `objects` are the objects of a url: a file and its companions
    (`formats.companion_names`), or the images of a folder. `member` is one of several scans in the same file, and part
    of `name` then ("eyes.e2e#2"). `series` names the files of a scan with a DICOM file per B-scan in a local folder.
    `is_link`: a link that is not followed, whose key is not that of its target, which may be in the store.
    """

    location: Path | str
    name: str
    row: ManifestRow | None = None
    objects: tuple[remote.RemoteObject, ...] = field(default=(), repr=False)
    member: str = ""
    series: tuple[str, ...] = field(default=(), repr=False)
    is_link: bool = False

    @property
    def path(self) -> Path:
        """The local path. Raises TypeError for an object in a bucket: use `local()`."""
        if isinstance(self.location, str):
            raise TypeError(f"{self.location} has no local path before it is fetched")
        return self.location

    @property
    def dataset_path(self) -> PurePath:
        """Its path in its data set, whose folders and name may state person, eye and device."""
        if isinstance(self.location, Path):
            return self.location
        return PurePosixPath(self.location.partition("://")[2])

    @cached_property
    def key(self) -> str:
        """16 hex digits of a hash of the real path or url (and member): no path enters the store."""
        if isinstance(self.location, str):
            location = self.location
        elif self.is_link:
            location = os.path.join(os.path.realpath(self.location.parent), self.location.name)
        else:
            location = os.path.realpath(self.location)
        location += f"#{self.member}" if self.member else ""
        return hashlib.sha256(os.fsencode(location)).hexdigest()[:16]

    def part_keys(self) -> list[str]:
        """The keys that the files of a series have when each is read by itself; [] for any other scan."""
        if isinstance(self.location, Path):
            return [SourceFile(self.location / name, name).key for name in self.series]
        return [SourceFile(obj.url, obj.url).key for obj in self.objects] if self.location.endswith("/") else []

    def stated_person(self) -> StatedPerson:
        """The person that DICOM headers state: that of the file, or those of the files in the folder.

        Of a series its files are read, of another folder at most `_MAX_HEADERS` files. Of objects in a bucket the
        first `_HEADER_BYTES` are fetched. Pipes are not read, because they never end.
        """
        if isinstance(self.location, str):
            is_folder = self.location.endswith("/")
            in_folder = [obj for obj in self.objects if may_be_b_scan(PurePosixPath(obj.url).name)]
            return first_stated(map(_person_of_object, in_folder if is_folder else self.objects[:1]))
        if self.location.is_file():
            return read_stated_person(self.location)
        return _person_in(self.location, self.series or _may_be_dicom(self.location)[:_MAX_HEADERS])

    @contextmanager
    def local(self, people: list[StatedPerson] | None = None) -> Iterator[Path]:
        """The path of the file, or of a verified copy of its objects that exists while the context is open. Read only.

        If the work on a copy fails before `people` holds the person, the person that the headers state is appended:
        later there may be no copy. Raises what `remote.local_copy` raises.
        """
        if isinstance(self.location, Path):
            yield self.location
            return
        with self._copy(self.location) as copy:
            try:
                yield copy
            except Exception:
                if people is not None and not people:
                    names = [PurePosixPath(obj.url).name for obj in self.objects]
                    people.append(_person_in(copy, names) if copy.is_dir() else read_stated_person(copy))
                raise

    @contextmanager
    def _copy(self, url: str) -> Iterator[Path]:
        """The path of a verified copy of the objects at `url`."""
        is_folder = url.endswith("/")
        if not is_folder and len(self.objects) < 2:
            with remote.local_copy(self.objects[0] if self.objects else url) as copy:
                yield copy
            return
        with ExitStack() as copies, TemporaryDirectory(prefix="octjepa-") as made:
            folder = Path(made, PurePosixPath(url).name) if is_folder else Path(made)
            folder.mkdir(exist_ok=True)
            for obj in self.objects:
                copy = copies.enter_context(remote.local_copy(obj))
                (folder / PurePosixPath(obj.url).name).symlink_to(copy)
            yield folder if is_folder else folder / PurePosixPath(url).name

    def state(self) -> tuple[int, int] | None:
        """(size, time or version): both are equal as long as nothing changed; None if it cannot be looked at.

        The second is the time of modification in ns for a single local file. Otherwise it is 63 bits of a hash: of
        versions, of the times of a file and what belongs to it, or of names, sizes and times: those in a folder, in the
        folders of a Zarr folder, and of the JSON file next to it.
        """
        if isinstance(self.location, str):
            found = self.objects or tuple(filter(None, [remote.info(self.location)]))
            versions = sorted((obj.url, obj.size, obj.version) for obj in found)
            return (sum(obj.size for obj in found), _hash_to_63_bits(versions)) if found else None
        try:
            stat = os.stat(self.location)
            if not self.location.is_dir():
                others = [os.stat(path) for path in _companions(self.location)]
                times = [status.st_mtime_ns for status in (stat, *others)]
                size = sum(status.st_size for status in (stat, *others))
                return size, _hash_to_63_bits(*times) if others else times[0]
            files = sorted(_facts_of_folder(self.location))
            return sum(size for _, size, _ in files), _hash_to_63_bits(files)
        except OSError:
            return None


def _person_of_object(obj: remote.RemoteObject) -> StatedPerson:
    """The person that the begin of an object states; empty texts also if it cannot be fetched."""
    begin = obj if obj.size <= _HEADER_BYTES else replace(obj, size=_HEADER_BYTES, checksum="", start=0)
    try:
        with remote.local_copy(begin) as copy:
            return read_stated_person(copy)
    except OctjepaError:
        return StatedPerson()


def _person_in(folder: Path, names: Sequence[str]) -> StatedPerson:
    """The person whom the files called `names` in a folder state; headers are read until one is named."""
    paths = (folder / name for name in names)
    return first_stated(read_stated_person(path) for path in paths if path.is_file())


def _may_be_dicom(folder: Path) -> list[str]:
    """The names of files in a folder that may be DICOM, sorted; links are left out. [] if it cannot be listed."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(
            entry.name for entry in entries if may_be_b_scan(entry.name) and entry.is_file(follow_symlinks=False)
        )
    return []


def _companions(path: Path) -> list[Path]:
    """The files next to or below a scan's file that belong to it: its JSON, voxels, text, and pictures of HEYEX."""
    names = [*companion_names(path.name)]
    if path.suffix.lower() == ".mhd":
        with path.open("rb") as file:
            names.append(named_voxel_file(file.read(HEADER_BYTES)))
    if path.suffix.lower() == ".xml":
        with path.open("rb") as file:
            names += pictures_in(file.read(MAX_XML_BYTES))
    return [path.parent / name for name in dict.fromkeys(names) if name and (path.parent / name).is_file()]


def _facts_of_folder(folder: Path) -> Iterator[tuple[str, int, int]]:
    """(path from the folder, size, time in ns) of every file in a folder and of `<folder>.json` next to it.

    Of a Zarr folder also of every file in its subfolders.
    """
    sidecar = folder.with_name(f"{folder.name}.json")
    if sidecar.is_file():
        status = os.stat(sidecar)
        yield f"../{sidecar.name}", status.st_size, status.st_mtime_ns
    is_in_zarr = is_zarr(os.listdir(folder))  # its chunks are in folders
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            here = list(entries)
        for entry in here:
            if entry.is_symlink() and not os.path.exists(entry.path):
                continue  # an editor's lock is a link to nothing: it comes and goes, and holds nothing
            status = entry.stat()
            yield entry.path[len(str(folder)) + 1 :], status.st_size, status.st_mtime_ns
            if is_in_zarr and entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))


class Refused(NamedTuple):
    """A file that was found and cannot be read: it goes to the quarantine with a code of `octjepa.reasons`."""

    source: SourceFile
    reason: str
    detail: str


@dataclass
class Discovery:
    """`files` sorted by name, each once; `refused` what goes to the quarantine before anything is read.

    `ignored` counts what was left out, by kind. `files_without_row` counts files that their manifest does not list.
    `searched` has the names of the sources (`source_name`); `found_in` the name of its source by the key of a refused
    file.
    """

    files: list[SourceFile] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    refused: list[Refused] = field(default_factory=list)
    files_without_row: int = 0
    participants: list[dict[str, object]] = field(default_factory=list)
    searched: set[str] = field(default_factory=set)
    found_in: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[SourceFile]:
        """Files that a manifest or a list names and that are absent."""
        return [refusal.source for refusal in self.refused if refusal.reason == "manifest_row_without_file"]

    def refuse(self, location: Path | str, name: str, reason: str, detail: str) -> None:
        """Records a file that is not even opened."""
        self.refused.append(Refused(SourceFile(location, name), reason, detail))


def source_name(source: str) -> str:
    """16 hex digits of a hash of a source that the user named: no path enters the store."""
    location = source if "://" in source else os.path.realpath(source)
    return hashlib.sha256(os.fsencode(location)).hexdigest()[:16]


def is_archive(name: str) -> bool:
    """Whether a file is called like an archive: files in it are not seen until it is expanded."""
    return name.lower().endswith(_ARCHIVES)


def how_to_expand(name: str) -> str:
    """The advice about an archive, as the detail of its quarantine entry."""
    if name.lower().endswith(".zip"):
        return "run `octjepa expand` on it and ingest the folder it makes"
    return "unpack it with the program that made it and ingest the folder"


def printable(text: str) -> str:
    """A path as text that every table and terminal can hold: line breaks and bytes that are not text are escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
