"""One search over a listing of a disk or a bucket: it finds manifests and their roots, archives and scans.

A file below a manifest's root gets its row, and a row never leads out of that root. Side files (tables, pictures,
notes) are left out and counted; archives and what cannot be read go to the quarantine.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache, partial
from os.path import commonpath
from pathlib import PurePath
from posixpath import basename, dirname, join

from octjepa.errors import UsageError
from octjepa.ingest.listing import (
    IMAGES,
    WILDCARDS,
    BucketListing,
    Folder,
    Listing,
    glob,
    relative,
    suffix_of,
    walk,
)
from octjepa.ingest.source_file import Discovery, Refused, SourceFile, how_to_expand, is_archive, printable
from octjepa.read.dicom_series import Series
from octjepa.read.formats.sequence import sequences
from octjepa.read.formats.zarr import is_zarr
from octjepa.read.manifest import (
    MANIFEST,
    MANIFESTS,
    PARTICIPANTS,
    PEOPLE_TABLES,
    Manifest,
    ManifestRow,
    decode_table,
    find_manifest,
    find_participants,
    is_absolute,
    parse_manifest,
    parse_participants,
)
from octjepa.read.written_results import LAYERS, result_files

TABLES = {".tsv", ".csv"}
_ABSENT = "listed, but not there"
_ABSOLUTE = "an absolute path that leads out of the manifest's root: write it relative to that, or list it in a .txt"
_RESULTS = "folder with results of octjepa"
LINK_OUT = "a link that leads out of the folder: name the file itself as a source, or in a list (.txt)"
_log = logging.getLogger(__name__)


class Search:
    """Adds the scans of one listing to `found`, source by source."""

    def __init__(self, listing: Listing, found: Discovery) -> None:
        self._listing, self._found = listing, found
        self._people: set[str] = set()  # tables that were read
        self._manifest_around = cache(self._find_manifest_around)
        self._usable_manifest = cache(self._read_usable_manifest)  # one warning a table
        self._images_in = cache(self._find_images_in)
        self._series_in = cache(self._find_series_in)
        self._results_in = cache(self._find_results_in)
        self._series_of_rows: set[tuple[str, str]] = set()  # (folder, member) of scans that a row of a manifest added

    def add(self, source: str) -> None:
        """Adds a file, folder, glob or manifest. Raises UsageError: nothing there, or none that can be read."""
        path = self._listing.normalise(source)
        located = self._listing.locate(path, as_folder=source.endswith("/"))
        if located is None and set(path) & WILDCARDS:
            self._add_glob(path)
        elif located is None:
            raise UsageError(f"no file or folder at {printable(source)}")
        elif located[1] == "folder":
            self._add_tree(path)
        elif located[1] != "file":
            raise UsageError(f"{printable(source)} is neither a file nor a folder")
        elif suffix_of(path) in TABLES:
            self._add_manifest(path)
        else:
            self._add_file(path)

    def add_listed(self, path: str, base: str) -> None:
        """Adds a file or folder of a list in the folder `base`; an absent one goes to the quarantine."""
        inside = relative(path, base)
        refuse = partial(self._refuse, path, self._listing.name_outside(path) if inside is None else inside)
        try:
            located = self._listing.locate(path)
        except PermissionError as error:
            refuse("unreadable_file", error.strerror or "permission denied")
            return
        if located is None:
            refuse("manifest_row_without_file", _ABSENT)
        elif located[1] == "folder":
            self._add_tree(path)
        elif located[1] == "file":
            self._add_file(path, base)
        else:
            refuse("unreadable_file", "neither a file nor a folder")

    def _add_glob(self, pattern: str) -> None:
        """Adds files and folders that match, as in a tree: side files are left out."""
        base, paths = glob(self._listing, pattern, self._found.ignored, partial(self._refuse_below, "."))
        if not paths:
            raise UsageError(f"nothing matches {printable(pattern)}: check the pattern, and quote it for the shell")
        for path in paths:
            located = self._listing.locate(path)
            if located and located[1] == "folder":
                self._add_tree(path)
            elif basename(path) in self._results_in(dirname(path)):
                continue
            elif self._listing.leads_out(path, base):
                self._refuse_link(path, relative(path, base) or basename(path))
            elif is_archive(path) or self._is_candidate(path):
                self._add_file(path, base)

    def _add_file(self, path: str, base: str = "") -> None:
        """Adds a file that the user named: it is read, or the quarantine says why not."""
        folder = self._listing.real(dirname(path))
        manifest = self._manifest_around(folder)
        inside = relative(join(folder, basename(path)), manifest.root if manifest else base or folder)
        name = self._listing.name_outside(path) if inside is None else inside
        if is_archive(path):
            self._refuse(path, name, "archive_not_expanded", how_to_expand(path))
        else:
            row = manifest.row_at(inside or "") if manifest else None
            self._add_scan(self._listing.source(path, printable(name), row), manifest)

    # Trees

    def _add_tree(self, top: str) -> None:
        """Adds all scans below `top`, with the manifests around and in it."""
        top = self._listing.real(top)
        around = self._manifest_around(top)
        root = around.root if around else top
        manifest_of: dict[str, Manifest | None] = {dirname(top): around}
        used: dict[str, tuple[Manifest, set[str]]] = {around.file: (around, set())} if around else {}
        people_tables: list[str] = []
        for folder in walk(self._listing, top, self._found.ignored, partial(self._refuse_below, root)):
            if origin := written_by_octjepa(basename(folder.path), folder.names):
                self._found.ignored[origin] += 1
                folder.subfolders.clear()
                continue
            if results := result_files(folder.names):
                self._found.ignored[_RESULTS] += 1
                names = tuple(name for name in folder.names if name not in results)
                folder = replace(folder, names=names)  # scans may lie next to results, or below
            if is_zarr(folder.names):
                above = manifest_of[dirname(folder.path)]
                row = above.row_at(relative(folder.path, above.root) or "") if above else None
                if above and row:
                    used.setdefault(above.file, (above, set()))[1].add(row.filepath)
                self._add_zarr(folder.path, printable(relative(folder.path, root) or ""), row, above)
                folder.subfolders.clear()
                continue
            manifest = manifest_of[folder.path] = self._own_manifest(folder) or manifest_of[dirname(folder.path)]
            used_rows = used.setdefault(manifest.file, (manifest, set()))[1] if manifest else set()
            self._add_folder(folder, root, manifest, used_rows)
            people_tables += [join(folder.path, name) for name in PEOPLE_TABLES if name in folder.names][:1]
        for manifest, used_rows in used.values():
            self._add_rows(manifest, (path for path in manifest.rows if path not in used_rows), root, top)
            self._add_people(top, manifest.file)
        if not used:
            self._add_people(top, "")
        for table in people_tables:
            self._read_people(table, strict=False)

    def _add_zarr(self, folder: str, name: str, row: ManifestRow | None, manifest: Manifest | None) -> None:
        """Adds a Zarr folder, which is one scan; one in a bucket is refused, because its chunks are not fetched."""
        name = name or printable(basename(folder))
        if isinstance(self._listing, BucketListing):
            self._refuse(folder, name, "unknown_format", "a Zarr folder in a bucket: copy it to a disk")
        else:
            self._add_scan(self._listing.source(folder, name, row, is_folder=True), manifest)

    def _own_manifest(self, folder: Folder) -> Manifest | None:
        """The manifest in a folder of the tree; other modalities (retinal_octa) have their own, of no use here."""
        last = basename(folder.path)
        name = next((name for name in MANIFESTS if name in folder.names), None)
        if name is None or (last.startswith("retinal_") and last != "retinal_oct"):
            return None
        return self._usable_manifest(join(folder.path, name))

    def _add_folder(self, folder: Folder, root: str, manifest: Manifest | None, used_rows: set[str]) -> None:
        """Adds the files of one folder; filepaths of the manifest rows that it uses go into `used_rows`."""
        below = relative(folder.path, root) or ""
        listed = relative(folder.path, manifest.root) if manifest else None
        is_scan = self._listing.is_scan_folder(folder.path, folder.names)
        if is_scan:
            images = [name for name in folder.names if suffix_of(name) in IMAGES]
            row, differ = manifest.row_of_folder(listed or "", images) if manifest else (None, False)
            used_rows.update([row.filepath] if row else [])
            name = printable(below) or basename(folder.path)
            self._add_scan(self._listing.source(folder.path, name, row, is_folder=True), manifest, differ)
        assembled = self._add_series(folder, below, listed, manifest, used_rows)
        scans: list[str] = []
        others: list[str] = []
        for name in folder.names:
            if name in assembled:
                continue
            path, label = join(folder.path, name), join(below, name)
            row = manifest.row_at(join(listed, name)) if manifest and listed is not None else None
            used_rows.update([row.filepath] if row else [])
            if name in folder.links and row is None and self._listing.leads_out(path, root):
                if not name.startswith("."):
                    self._refuse_link(path, label)
            elif is_archive(name) and not name.startswith("."):
                self._refuse(path, label, "archive_not_expanded", how_to_expand(name))
            elif is_scan and suffix_of(name) in IMAGES:
                continue
            elif manifest and row and name in folder.links:
                self._add_row(manifest, row.filepath, root)  # it may lead out of the root
            elif row or (not is_scan and self._is_candidate(path)):
                self._add_scan(self._listing.source(path, printable(label), row), manifest)
                scans.append(name)
            elif is_scan:
                self._found.ignored[printable(suffix_of(name)) or "no suffix"] += 1
            else:
                others.append(name)
        if scans and others:
            self._check_left_out(folder.path, below, scans, others, manifest)

    def _add_series(
        self, folder: Folder, below: str, listed: str | None, manifest: Manifest | None, used_rows: set[str]
    ) -> set[str]:
        """Adds the scans of which the folder holds a file per B-scan; returns the names of these files."""
        found = self._listing.series(folder.path, [name for name in folder.names if name not in folder.links])
        for number, series in enumerate(found, 1):
            if manifest and listed is not None:
                used_rows.update([listed, *(join(listed, name) for name in series.names)])
            self._add_one_series(folder.path, below, series, number if len(found) > 1 else 0, manifest, listed or "")
        return {name for series in found for name in series.names}

    def _add_one_series(
        self, folder: str, below: str, series: Series, number: int, manifest: Manifest | None, listed: str
    ) -> None:
        """Adds the scan `series` of a folder; `number` it has among several there, 0 for the only one.

        `below` is the folder's path for the scan's name, `listed` its path below the manifest's root.
        """
        name = printable(below) or basename(folder)
        row, differ = manifest.row_of_folder(listed, series.names) if manifest else (None, False)
        source = self._listing.source(folder, name, row, is_folder=True, series=series)
        label = f"{name}#{number}" if number else name
        self._add_scan(replace(source, name=label, member=series.member), manifest, differ)

    def _check_left_out(
        self, folder: str, below: str, scans: list[str], others: list[str], manifest: Manifest | None
    ) -> None:
        """Among files left out next to scans: numbered images are refused, an empty file named like a scan is read."""
        images = sum(map(len, sequences(others)))
        if images and not any(suffix_of(name) == ".xml" for name in scans):  # a HEYEX XML has its images next to it
            self._refuse(folder, below or basename(folder), "images_beside_scan", f"{images} images")
        if all(PurePath(name).suffix for name in scans):
            return
        for name in others:
            path = join(folder, name)
            if not PurePath(name).suffix and not name.startswith(".") and self._listing.size(path) == 0:
                self._found.ignored["no suffix"] -= 1
                self._add_scan(self._listing.source(path, printable(join(below, name)), None), manifest)

    def _add_scan(self, file: SourceFile, manifest: Manifest | None, differ: bool = False) -> None:
        """Adds a file to read, or refuses it where its manifest rows contradict each other."""
        if differ or (manifest and file.row and file.row.filepath in manifest.disagreeing):
            detail = "its rows in the manifest contradict each other"
            self._found.refused.append(Refused(file, "manifest_disagrees", detail))
        else:
            self._found.files_without_row += manifest is not None and file.row is None
            self._found.files.append(file)

    def _is_candidate(self, path: str) -> bool:
        name = basename(path)
        if not name.startswith(".") and self._listing.is_scan(path):
            return True
        kind = "hidden" if name.startswith(".") else printable(suffix_of(name)) or "no suffix"
        self._found.ignored[kind] += 1
        return False

    def _refuse_link(self, path: str, name: str) -> None:
        """A link in a folder from another person would name any file of the user's, so it is not followed."""
        link = SourceFile(self._listing.location(path), printable(name), is_link=True)
        self._found.refused.append(Refused(link, "path_escapes", LINK_OUT))

    def _refuse(self, path: str, name: str, reason: str, detail: str) -> None:
        self._found.refuse(self._listing.location(path), printable(name), reason, detail)

    def _refuse_below(self, root: str, path: str, reason: str, detail: str) -> None:
        self._refuse(path, relative(path, root) or basename(path), reason, detail)

    # Manifests

    def _add_manifest(self, file: str) -> None:
        """Adds the files that a table lists. Raises UsageError: it cannot be read, or has no column `filepath`."""
        manifest = self._read_manifest(file, named=True)
        if isinstance(self._listing, BucketListing):
            shared = commonpath([dirname(f"/{path}") for path in manifest.rows] or ["/"])
            self._listing.load(join(manifest.root, shared.strip("/")).rstrip("/"))
        self._add_rows(manifest, manifest.rows, manifest.root, manifest.root)
        self._add_people(manifest.root, manifest.file)

    def _add_rows(self, manifest: Manifest, filepaths: Iterable[str], top: str, below: str) -> None:
        """Adds the files of these rows that are below the folder `below`; records faults of the table itself."""
        prefix = relative(manifest.root, top) or ""
        if manifest.repeated:
            self._found.ignored["repeated manifest row"] += manifest.repeated
        for text in manifest.escaping:
            if is_absolute(text):  # only its last part is reported
                name, detail = join(prefix, text.replace("\\", "/").rpartition("/")[2]), _ABSOLUTE
            else:
                name, detail = text if "://" in text else join(prefix, text), "it leads out of the manifest's root"
            # Never looked at: the location, a plain text, only tells one entry from the next.
            self._found.refuse(f"{manifest.root}/outside/{printable(text)}", printable(name), "path_escapes", detail)
        for filepath in filepaths:
            if relative(join(manifest.root, filepath), below) is not None:
                self._add_row(manifest, filepath, top)

    def _add_row(self, manifest: Manifest, filepath: str, top: str) -> None:
        """Adds one listed file, or refuses it; its name is relative to `top`, as those of the tree."""
        path = join(manifest.root, filepath)
        prefix = relative(manifest.root, top) or ""
        refuse = partial(self._refuse, path, join(prefix, filepath))
        try:
            located = self._listing.locate(path)
        except PermissionError as error:
            refuse("unreadable_file", error.strerror or "permission denied")
            return
        if located is None:
            refuse("manifest_row_without_file", _ABSENT)
            return
        real, kind = located
        if relative(real, manifest.root) is None:
            # Named by the link, not by its target, which may be another data set's file.
            detail = "a link that leads out of the manifest's root"
            self._found.refuse(path, printable(join(prefix, filepath)), "path_escapes", detail)
        elif suffix_of(path) in IMAGES and (images := self._images_in(dirname(path))):
            row, differ = manifest.row_of_folder(dirname(filepath), images)
            name = printable(join(prefix, dirname(filepath))) or basename(dirname(path))
            self._add_scan(self._listing.source(dirname(path), name, row, is_folder=True), manifest, differ)
        elif kind == "folder" and is_zarr(self._files_in(path)):
            self._add_zarr(path, printable(join(prefix, filepath)), manifest.rows[filepath], manifest)
        elif kind in {"file", "folder"} and (scans := self._series_at(path, kind)):
            folder, listed = (path, filepath) if kind == "folder" else (dirname(path), dirname(filepath))
            for number, series in scans.items():
                if (folder, series.member) not in self._series_of_rows:  # another row named it
                    self._series_of_rows.add((folder, series.member))
                    self._add_one_series(folder, join(prefix, listed), series, number, manifest, listed)
        elif filepath not in manifest.disagreeing and is_archive(path):
            refuse("archive_not_expanded", how_to_expand(path))
        elif kind == "file" or (kind == "folder" and self._images_in(path)):
            name, row = printable(join(prefix, filepath)), manifest.rows[filepath]
            self._add_scan(self._listing.source(path, name, row, is_folder=kind == "folder"), manifest)
        else:
            refuse("unreadable_file", "neither a file nor a folder of B-scans")

    def _files_in(self, folder: str) -> list[str]:
        """The names of a folder's files, without links; none if it cannot be listed: a row may still name a file."""
        try:
            return [name for name, kind in self._listing.entries(folder) if kind == "file"]
        except OSError:
            return []

    def _find_series_in(self, folder: str) -> tuple[dict[int, Series], dict[str, int]]:
        """The scans with a DICOM file per B-scan in a folder by number, 0 for the only one; the number of each file."""
        in_folder = tuple(self._listing.series(folder, self._files_in(folder)))
        scans = {number if len(in_folder) > 1 else 0: series for number, series in enumerate(in_folder, 1)}
        return scans, {name: number for number, series in scans.items() for name in series.names}

    def _series_at(self, path: str, kind: str) -> dict[int, Series]:
        """The scans of a folder, or the scan of one of its files, by number; the only scan of a folder has 0."""
        scans, number_of = self._series_in(path if kind == "folder" else dirname(path))
        if kind == "folder":
            return scans
        number = number_of.get(basename(path))
        return {} if number is None else {number: scans[number]}

    def _find_results_in(self, folder: str) -> frozenset[str]:
        """The files of a folder that octjepa wrote as results; the folder is counted."""
        names = self._files_in(folder)
        results = frozenset(names) if LAYERS in names else result_files(names)
        self._found.ignored[_RESULTS] += bool(results)
        return results

    def _find_images_in(self, folder: str) -> tuple[str, ...]:
        """The images of a folder of B-scans; () for another folder."""
        names = [name for name, kind in self._listing.entries(folder) if kind in {"file", "link"}]
        if not self._listing.is_scan_folder(folder, names):
            return ()
        return tuple(name for name in names if suffix_of(name) in IMAGES)

    def _find_manifest_around(self, folder: str) -> Manifest | None:
        """The manifest that covers a folder; its people are added with it."""
        file = find_manifest(folder, self._listing.is_file)
        self._add_people(folder, file)
        if basename(file) == MANIFEST:
            return self._read_manifest(file)
        return self._usable_manifest(file) if file else None

    def _read_manifest(self, file: str, named: bool = False) -> Manifest:
        """`named`: by the user, who may name a link. A linked table describes the tree that holds the link."""
        folder = self._listing.real(dirname(file))
        return parse_manifest(self._read_table(file, named), folder, join(folder, basename(file)))

    def _read_usable_manifest(self, file: str) -> Manifest | None:
        """The manifest in a tree; None, and a warning, if it cannot be used."""
        try:
            return self._read_manifest(file)
        except UsageError as error:
            _log.warning("%s; the scans next to it are read without its ids and spacings", error)
            return None

    def _read_table(self, file: str, named: bool = False) -> str:
        if not named and self._listing.leads_out(file, dirname(file)):
            raise UsageError(f"{printable(file)} is a link that leads out of its folder: copy the table there")
        return decode_table(partial(self._listing.read_bytes, file), file)

    def _add_people(self, folder: str, manifest: str) -> None:
        if table := find_participants(folder, manifest, self._listing.is_file):
            self._read_people(table, strict=basename(table) == PARTICIPANTS)

    def _read_people(self, table: str, strict: bool) -> None:
        """Adds a table of people once. Raises UsageError where `strict`; else another program's table is left out."""
        real = join(self._listing.real(dirname(table)), basename(table))
        if real in self._people:
            return
        self._people.add(real)
        try:
            self._found.participants.extend(parse_participants(self._read_table(table), table))
        except UsageError as error:
            if strict:
                raise
            _log.warning("%s; it is not used", error)


def written_by_octjepa(folder: str, names: Collection[str]) -> str:
    """The kind of output that octjepa wrote into a folder, in words, "" for nothing: its arrays are not scans to
    read.
    """
    if "store.json" in names:
        return "store of octjepa"
    if LAYERS in names:
        return _RESULTS
    return "truth of phantoms" if folder == "truth" and "eyes.tsv" in names else ""
