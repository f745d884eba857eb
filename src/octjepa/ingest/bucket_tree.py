"""Scans in gs:// and s3:// buckets: trees, globs, lists, manifests, single objects. Nothing is fetched but tables.

A tree is one listing. Objects are recognised by their names; others are left out and counted. A manifest speaks of
what lies below its root, as on a disk.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from os.path import commonpath
from pathlib import Path, PurePosixPath

from octjepa import remote
from octjepa.errors import UsageError
from octjepa.ingest import formats
from octjepa.ingest.local_tree import ABSENT, DISAGREES, IMAGES, TABLES, made_here, tell_faults, tell_images
from octjepa.ingest.manifest import (
    MANIFESTS,
    PARTICIPANTS,
    PEOPLE_TABLES,
    Manifest,
    ManifestRow,
    parse_manifest,
    parse_participants,
)
from octjepa.ingest.source_file import Discovery, SourceFile, how_to_expand, is_archive, printable
from octjepa.ingest.walk import WILDCARDS
from octjepa.remote import RemoteObject

_FEW = 3  # listed objects of one folder that are asked for one by one; more are found by listing the folder
# By name alone a TIFF may be a single picture; folders of them are told by `is_scan_folder`.
_SUFFIXES = tuple(formats.suffixes() - IMAGES)
_Folders = dict[str, list[RemoteObject]]

_log = logging.getLogger(__name__)


class BucketSearch:
    """Adds what it finds to `found`; remembers the tables it has read."""

    def __init__(self, found: Discovery) -> None:
        self.found = found
        self._manifests: dict[str, Manifest | None] = {}
        self._people: set[str] = set()

    def add(self, url: str) -> None:
        """An object, a tree, a glob or a manifest. Raises UsageError: nothing there, or no access."""
        place = remote.join(url)
        if set(place.split("/")[2]) & set(WILDCARDS):
            raise UsageError(f"{url} has a wildcard in the bucket's name: name the bucket")
        single = remote.info(place) if _parent(place) and not url.endswith("/") else None
        if single is None and set(url) & set(WILDCARDS):
            self._add_glob(place)
        elif single is None:
            objects = remote.list_objects(place)
            if not objects:
                raise UsageError(f"nothing at {url}: neither an object nor anything below it")
            self._add_tree(objects, place)
        elif _suffix(place) in TABLES:
            self._add_manifest(place)
        else:
            self._add_named(single, _parent(place))

    def add_listed(self, urls: Sequence[str], base: str) -> None:
        """The objects that a list names; an absent one goes to the ledger."""
        by_folder: defaultdict[str, list[str]] = defaultdict(list)
        for url in map(remote.join, urls):
            by_folder[_parent(url) or url].append(url)
        for folder, named in by_folder.items():
            few = len(named) <= _FEW
            found = map(remote.info, named) if few else remote.list_objects(folder, recursive=False)
            there = {one.url: one for one in found if one is not None}
            for url in named:
                if url in there:
                    self._add_named(there[url], base, None if few else there)
                else:
                    self.found.refuse(url, printable(_below(url, base)), "manifest_row_without_file", ABSENT)

    def _add_named(self, one: RemoteObject, base: str, there: Mapping[str, RemoteObject] | None = None) -> None:
        """An object that was named: it is read, or its place in the ledger says why not. there: as `_parts`."""
        manifest = self._around(_parent(one.url))
        base = manifest.root if manifest else base
        if is_archive(one.url):
            self._refuse_archive(one, base)
        else:
            self._keep(SourceFile(one.url, *_name_and_row(one.url, base, manifest), _parts(one, there)), manifest)

    # Trees

    def _add_glob(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        parts = rest.split("/")
        fixed = next(number for number, part in enumerate(parts) if set(part) & set(WILDCARDS))
        base = f"{scheme}://{'/'.join(parts[:fixed])}"
        # As on a disk, a folder that matches stands for all below it.
        whole = re.compile("".join("(?:.*/)?" if part == "**" else _name_pattern(part) for part in parts[fixed:]))
        objects = [one for one in remote.list_objects(base) if whole.match(_below(one.url, base) + "/")]
        if not objects:
            raise UsageError(f"nothing matches {url}: check the pattern, and quote it for the shell")
        self._add_tree(objects, base)

    def _add_tree(self, objects: Sequence[RemoteObject], base: str) -> None:
        folders: _Folders = {}
        for one in objects:
            folders.setdefault(_parent(one.url), []).append(one)
        self._leave_out_own(folders)
        governs = {folder: made for folder in folders if (made := self._own_manifest(folder, folders[folder]))}
        top = self._around(base) or governs.get(f"{base}/retinal_oct")
        root = top.root if top else base
        met: defaultdict[str, set[str]] = defaultdict(set)
        for folder, inside in folders.items():
            manifest = _nearest(folder, base, governs) or top
            self._add_folder(folder, inside, manifest, root, met[manifest.file if manifest else ""])
            if {one.url for one in inside} & {f"{folder}/{name}" for name in PEOPLE_TABLES}:
                self._add_people(folder)
        for manifest in {one.file: one for one in (top, *governs.values()) if one}.values():
            tell_faults(manifest, self.found, f"{_below(manifest.root, root)}/" if manifest.root != root else "")
            for filepath in manifest.rows:
                url = f"{manifest.root}/{filepath}"
                if filepath not in met[manifest.file] and url.startswith(f"{base}/"):
                    self.found.refuse(url, printable(_below(url, root)), "manifest_row_without_file", ABSENT)

    def _leave_out_own(self, folders: _Folders) -> None:
        """Takes out what octjepa made: stores, the truth of phantoms, with all below."""
        for folder in sorted(folders):
            made = made_here(PurePosixPath(folder).name, {_below(one.url, folder) for one in folders.get(folder, ())})
            if made:
                self.found.ignored[made] += 1
                for inside in [one for one in folders if f"{one}/".startswith(f"{folder}/")]:
                    del folders[inside]

    def _own_manifest(self, folder: str, inside: Sequence[RemoteObject]) -> Manifest | None:
        name = PurePosixPath(folder).name
        if name.startswith("retinal_") and name != "retinal_oct":  # of another modality
            return None
        urls = {one.url for one in inside}
        url = next((url for url in (f"{folder}/{name}" for name in MANIFESTS) if url in urls), None)
        return self._manifest(url) if url else None

    def _add_folder(
        self, folder: str, inside: Sequence[RemoteObject], manifest: Manifest | None, root: str, met: set[str]
    ) -> None:
        """Judges the objects of one folder; `met` takes the filepaths of the rows that were met."""
        names = [_below(one.url, folder) for one in inside]
        there = {one.url: one for one in inside}
        whole = formats.is_scan_folder(Path(PurePosixPath(folder).name), names)
        if whole:
            images = tuple(one for one, name in zip(inside, names, strict=True) if _suffix(name) in IMAGES | {".json"})
            label, row = _name_and_row(folder, root, manifest)
            differ = False
            if manifest and f"{folder}/".startswith(f"{manifest.root}/"):
                listed = folder[len(manifest.root) + 1 :]
                row, differ = manifest.of_folder(listed, [_below(one.url, folder) for one in images])
            met.update([row.filepath] if row else [])
            self._keep(SourceFile(f"{folder}/", label, row, images), manifest, differ)
        taken: list[str] = []
        for one, name in zip(inside, names, strict=True):
            label, row = _name_and_row(one.url, root, manifest)
            met.update([row.filepath] if row else [])
            if name.startswith("."):
                self.found.ignored["hidden"] += 1
            elif is_archive(name):
                self._refuse_archive(one, root)
            elif whole and _suffix(name) in IMAGES:
                continue
            elif row or (not whole and name.lower().endswith(_SUFFIXES)):
                self._keep(SourceFile(one.url, label, row, _parts(one, there)), manifest)
                taken.append(name)
            else:
                self.found.ignored[printable(_suffix(name)) or "no suffix"] += 1

        if taken and not whole:
            left = [name for name in names if name not in taken]
            tell_images(taken, left, self.found, f"{folder}/", printable(_below(folder, root)))

    def _keep(self, file: SourceFile, manifest: Manifest | None, differ: bool = False) -> None:
        if differ or (manifest and file.row and file.row.filepath in manifest.disagreeing):
            self.found.refuse(file.location, file.name, "manifest_disagrees", DISAGREES)
        else:
            self.found.files_without_row += manifest is not None and file.row is None
            self.found.files.append(file)

    def _refuse_archive(self, one: RemoteObject, root: str) -> None:
        self.found.refuse(one.url, printable(_below(one.url, root)), "archive_not_expanded", how_to_expand(one.url))

    # Tables

    def _add_manifest(self, url: str) -> None:
        """The objects that a table lists, by one listing of the folder they share."""
        manifest = self._manifests[url] = parse_manifest(_text(url), _parent(url), url)
        self._add_people(manifest.root, _parent(url))
        tell_faults(manifest, self.found, "")
        shared = commonpath([str(PurePosixPath("/", path).parent) for path in manifest.rows] or ["/"])
        there = {one.url: one for one in remote.list_objects(remote.join(manifest.root, shared))}
        for filepath in manifest.rows:
            place = f"{manifest.root}/{filepath}"
            if place in there:
                self._add_listed_row(there[place], manifest, there)
            else:
                self.found.refuse(place, printable(filepath), "manifest_row_without_file", ABSENT)

    def _add_listed_row(self, one: RemoteObject, manifest: Manifest, there: Mapping[str, RemoteObject]) -> None:
        if is_archive(one.url):
            self._refuse_archive(one, manifest.root)
        else:
            name, row = _name_and_row(one.url, manifest.root, manifest)
            self._keep(SourceFile(one.url, name, row, _parts(one, there)), manifest)

    def _around(self, folder: str) -> Manifest | None:
        """The manifest in a folder, or in the retinal_oct/ that holds it."""
        parts = folder.split("/")
        above = parts[: len(parts) - parts[::-1].index("retinal_oct")] if "retinal_oct" in parts[3:] else []
        places = [folder, "/".join(above)] if above else [folder]
        urls = (f"{place}/{name}" for place in places for name in MANIFESTS)
        return next((made for url in urls if (made := self._manifest(url))), None)

    def _manifest(self, url: str) -> Manifest | None:
        """The manifest at `url`, read once, with its people; None where there is none that can be used."""
        if url not in self._manifests:
            self._manifests[url] = None
            if remote.info(url) is not None:
                try:
                    manifest = self._manifests[url] = parse_manifest(_text(url), _parent(url), url)
                    self._add_people(manifest.root, _parent(url))
                except UsageError as error:
                    _log.warning("%s; the scans beside it are read without its ids and spacings", error)
        return self._manifests[url]

    def _add_people(self, *folders: str) -> None:
        """The first table of people in these folders, once."""
        for url in (f"{folder}/{name}" for folder in folders for name in PEOPLE_TABLES):
            if url in self._people:
                return
            if remote.info(url) is not None:
                self._people.add(url)
                try:
                    self.found.participants.extend(parse_participants(_text(url), url))
                except UsageError as error:
                    if url.endswith(f"/{PARTICIPANTS}"):
                        raise
                    _log.warning("%s; it is not used", error)
                return


def _parts(one: RemoteObject, there: Mapping[str, RemoteObject] | None) -> tuple[RemoteObject, ...]:
    """`one` and what belongs to it among `there`, objects by url; None: the bucket is asked."""
    folder, name = one.url.rpartition("/")[::2]
    urls = [f"{folder}/{other}" for other in formats.companion_names(name)]
    with_images = _suffix(name) == ".xml"  # a HEYEX export lists images beside it
    if there is None:
        found = remote.list_objects(folder, recursive=False) if with_images else filter(None, map(remote.info, urls))
        there = {one.url: one for one in found}
    if with_images:
        urls += [url for url in there if _suffix(url) in IMAGES and _parent(url) == folder]
    return (one, *(there[url] for url in urls if url in there))


def _parent(url: str) -> str:
    """The folder or bucket that holds an object, "" for a bucket."""
    parent = url.rpartition("/")[0]
    return "" if parent.endswith("/") else parent


def _below(url: str, folder: str) -> str:
    """A url's path below a folder; below its bucket where it lies elsewhere."""
    inside = url.startswith(f"{folder}/")
    return url[len(folder) + 1 :] if inside else url.partition("://")[2].partition("/")[2]


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _nearest(folder: str, base: str, governs: dict[str, Manifest]) -> Manifest | None:
    """The manifest of the nearest folder at or above this one, not above `base`."""
    while folder not in governs:
        if folder == base:
            return None
        folder = _parent(folder)
    return governs[folder]


def _name_and_row(url: str, root: str, manifest: Manifest | None) -> tuple[str, ManifestRow | None]:
    """What a file is called below `root`, and its row."""
    row = manifest.at(_below(url, manifest.root)) if manifest and url.startswith(f"{manifest.root}/") else None
    return printable(_below(url, root)), row


def _name_pattern(part: str) -> str:
    """A regular expression for one name that a glob's part means, with the "/" after it; "*" takes no "/"."""
    classes = re.split(r"(\[!?\]?[^\]]*\])", part)
    said = ""
    for piece in classes:
        if piece.startswith("[") and piece.endswith("]") and len(piece) > 2:
            said += "[^" + piece[2:] if piece[1] == "!" else piece
        else:
            said += "".join({"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char)) for char in piece)
    return said + "/"


def _text(url: str) -> str:
    try:
        return remote.read_bytes(url).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{url} cannot be read as a table of UTF-8 text: {error}") from None
