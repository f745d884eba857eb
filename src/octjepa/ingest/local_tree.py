"""Scans on local disks: folders with all below them, globs, lists of files, manifests, single files.

A tree costs one system call a folder and a look at the head of each file; a listed file costs two calls. What lies
below a manifest's root gets its row, and a row never leads out of that root.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Collection, Iterable
from functools import cache, partial
from pathlib import Path, PurePath

from octjepa.errors import UsageError, VolumeRejected
from octjepa.ingest import formats
from octjepa.ingest.formats.sequence import IMAGE_SUFFIXES, sequences
from octjepa.ingest.manifest import (
    MANIFESTS,
    PARTICIPANTS,
    Manifest,
    find_manifest,
    find_participants,
    is_absolute,
    read_manifest,
    read_participants,
)
from octjepa.ingest.source_file import Discovery, SourceFile, how_to_expand, is_archive, printable
from octjepa.ingest.walk import Folder, matches, walk

LISTS = {".txt", ".lst"}
TABLES = {".tsv", ".csv"}
IMAGES = frozenset(IMAGE_SUFFIXES)
_log = logging.getLogger(__name__)
DISAGREES = "its rows in the manifest contradict each other"
ABSENT = "listed, but not there"
ABSOLUTE = "an absolute path that leads out of the manifest's root: write it relative to that, or list it in a .txt"


class LocalSearch:
    """Adds what it finds to `found`; remembers which tables of people it has read."""

    def __init__(self, found: Discovery) -> None:
        self.found = found
        self._tables: set[Path] = set()
        self._around = cache(self._manifest_around)
        self._images_of = cache(_images_of)
        self._usable = cache(_usable)  # one warning a table
        self._real = cache(os.path.realpath)  # of folders: thousands of files share few

    def add(self, source: Path) -> None:
        """A file, folder, manifest or list. Raises UsageError: no such thing, or none that can be read."""
        if source.is_dir():
            self.add_folder(source)
        elif not source.exists():
            raise UsageError(f"no file or folder at {printable(str(source))}")
        elif not source.is_file():
            raise UsageError(f"{printable(str(source))} is neither a file nor a folder")
        elif source.suffix.lower() in TABLES:
            self.add_manifest(source)
        else:
            self.add_file(source)

    def add_glob(self, pattern: str) -> None:
        """Files and folders that match, as in a tree: side files are left out. Raises UsageError: no match."""
        base, places = matches(pattern, self.found.ignored, partial(self._refuse, Path.cwd()))
        if not places:
            raise UsageError(f"nothing matches {printable(pattern)}: check the pattern, and quote it for the shell")
        for path in places:
            if path.is_dir():
                self.add_folder(path)
            elif is_archive(path.name) or self._is_candidate(path):
                self.add_file(path, base)

    def add_file(self, path: Path, base: Path | None = None) -> None:
        """A file that was named: it is read, or its place in the ledger says why not."""
        folder = Path(self._real(path.parent))
        manifest = self._around(folder)
        root = Path(manifest.root) if manifest else base or folder
        below = _prefix(folder, str(root)) + path.name if folder.is_relative_to(root) else path.name
        name, row = printable(below), manifest.at(below) if manifest else None
        if is_archive(path.name):
            self.found.refuse(path, name, "archive_not_expanded", how_to_expand(path.name))
        elif manifest and row and row.filepath in manifest.disagreeing:
            self.found.refuse(path, name, "manifest_disagrees", DISAGREES)
        else:
            self.found.files.append(SourceFile(path, name, row))

    def add_listed(self, path: Path, base: Path) -> None:
        """A file or folder of a list; an absent one goes to the ledger."""
        inside = path.is_relative_to(base)
        name = printable(path.relative_to(base).as_posix() if inside else path.name)
        try:
            kind = os.stat(path).st_mode
        except PermissionError as error:
            self.found.refuse(path, name, "unreadable_file", error.strerror or "permission denied")
        except OSError:
            self.found.refuse(path, name, "manifest_row_without_file", ABSENT)
        else:
            if stat.S_ISDIR(kind):
                self.add_folder(path)
            elif stat.S_ISREG(kind):
                self.add_file(path, base)
            else:
                self.found.refuse(path, name, "unreadable_file", "neither a file nor a folder")

    # Trees

    def add_folder(self, folder: Path) -> None:
        """All below `folder`, with the manifests that lie around and in it."""
        top = folder.resolve()  # what `walk` yields below a real path needs no resolving
        base = self._around(top)
        root = Path(base.root) if base else top
        governs: dict[Path, Manifest | None] = {top.parent: base}
        used: dict[str, tuple[Manifest, set[str]]] = {base.file: (base, set())} if base else {}
        for part in walk(top, self.found.ignored, partial(self._refuse, root)):
            if made := made_here(part.path.name, part.names):
                self.found.ignored[made] += 1
                part.inside.clear()
                continue
            manifest = governs[part.path] = self._own_manifest(part) or governs[part.path.parent]
            seen: set[str] = set()
            if manifest:
                _, seen = used.setdefault(manifest.file, (manifest, seen))
            self._add_names(part, root, manifest, seen)
        for manifest, seen in used.values():
            self._add_rows(manifest, (path for path in manifest.rows if path not in seen), root, f"{top}/")
            self._add_people(top, Path(manifest.file))
        if not used:
            self._add_people(top, None)

    def _own_manifest(self, folder: Folder) -> Manifest | None:
        """The manifest in a folder of the tree; other modalities (retinal_octa) have their own, of no use here."""
        other = folder.path.name.startswith("retinal_") and folder.path.name != "retinal_oct"
        name = next((name for name in MANIFESTS if name in folder.names), None)
        return None if name is None or other else self._usable(folder.path / name)

    def _add_names(self, folder: Folder, root: Path, manifest: Manifest | None, seen: set[str]) -> None:
        """Judges the files of one folder; `seen` takes the filepaths of the rows that were met."""
        prefix = _prefix(folder.path, str(root))
        listed = _prefix(folder.path, manifest.root) if manifest else ""
        whole = formats.is_scan_folder(folder.path, folder.names)
        if whole:
            row, differ = manifest.of_folder(listed.rstrip("/"), _images(folder.names)) if manifest else (None, False)
            seen.update([row.filepath] if row else [])
            self._take(
                SourceFile(folder.path, printable(prefix.rstrip("/")) or folder.path.name, row), manifest, differ
            )
        taken: list[str] = []
        left: list[str] = []
        for name in folder.names:
            path = folder.path / name
            row = manifest.at(listed + name) if manifest else None
            seen.update([row.filepath] if row else [])
            if is_archive(name) and not name.startswith("."):
                self.found.refuse(path, printable(prefix + name), "archive_not_expanded", how_to_expand(name))
            elif whole and path.suffix.lower() in IMAGES:
                continue
            elif manifest and row and name in folder.linked:
                self._add_row(manifest, row.filepath, root)  # it may lead out of the root
            elif row or (not whole and self._is_candidate(path)):
                self._take(SourceFile(path, printable(prefix + name), row), manifest)
                taken.append(name)
            elif not whole:
                left.append(name)
            else:
                self.found.ignored[printable(path.suffix.lower()) or "no suffix"] += 1
        if taken and left:
            self._look_again(folder.path, prefix, taken, left, manifest)

    def _look_again(
        self, folder: Path, prefix: str, taken: list[str], left: list[str], manifest: Manifest | None
    ) -> None:
        """What the scans of a folder tell of files left out: images of a scan; an empty one that is called as they."""
        tell_images(taken, left, self.found, folder, printable(prefix.rstrip("/")) or folder.name)
        if all(PurePath(name).suffix for name in taken):
            return
        for name in left:
            path = folder / name
            if not path.suffix and not name.startswith(".") and os.path.getsize(path) == 0:
                self.found.ignored["no suffix"] -= 1
                self._take(SourceFile(path, printable(prefix + name)), manifest)

    def _take(self, file: SourceFile, manifest: Manifest | None, differ: bool = False) -> None:
        """A file of a tree, unless its rows contradict each other."""
        if differ or (manifest and file.row and file.row.filepath in manifest.disagreeing):
            self.found.refuse(file.location, file.name, "manifest_disagrees", DISAGREES)
        else:
            self.found.files_without_row += manifest is not None and file.row is None
            self.found.files.append(file)

    def _is_candidate(self, path: Path) -> bool:
        if path.name.startswith("."):
            self.found.ignored["hidden"] += 1
            return False
        try:
            if formats.recognise(path) is not None:
                return True
        except VolumeRejected:
            return True  # it cannot be opened: the reader says so in the ledger
        self.found.ignored[printable(path.suffix.lower()) or "no suffix"] += 1
        return False

    def _refuse(self, root: Path, path: Path, reason: str, detail: str) -> None:
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        self.found.refuse(path, printable(path.name if name == "." else name), reason, detail)

    # Manifests

    def add_manifest(self, file: Path) -> None:
        """The files that a table lists. Raises UsageError: it cannot be read, or has no column `filepath`."""
        manifest = read_manifest(file)
        self._add_rows(manifest, manifest.rows, Path(manifest.root))
        self._add_people(Path(manifest.root), Path(manifest.file))

    def _add_rows(self, manifest: Manifest, filepaths: Iterable[str], top: Path, below: str = "") -> None:
        """The files of these rows, of those below a folder alone; and what is wrong with the table itself."""
        tell_faults(manifest, self.found, _prefix(Path(manifest.root), str(top)))
        root = manifest.root.rstrip("/")
        for filepath in filepaths:
            if f"{root}/{filepath}".startswith(below):
                self._add_row(manifest, filepath, top)

    def _add_row(self, manifest: Manifest, filepath: str, top: Path) -> None:
        """One listed file: read, absent, or refused; its name is relative to `top`, as those of the tree."""
        path = Path(manifest.root, filepath)
        name = printable(_prefix(Path(manifest.root), str(top)) + filepath)
        refuse = partial(self.found.refuse, path, name)
        try:
            kind = os.lstat(path).st_mode
            place = f"{self._real(path.parent)}/{path.name}"
            if stat.S_ISLNK(kind):
                place, kind = os.path.realpath(path), os.stat(path).st_mode
        except PermissionError as error:
            refuse("unreadable_file", error.strerror or "permission denied")
            return
        except OSError:
            refuse("manifest_row_without_file", ABSENT)
            return
        if not Path(place).is_relative_to(manifest.root):
            # Named by the link, not by what it leads to: that may be another data set's file.
            self.found.refuse(str(path), name, "path_escapes", "a link that leads out of the manifest's root")
        elif path.suffix.lower() in IMAGES and (images := self._images_of(path.parent)):
            folder = filepath.rpartition("/")[0]
            row, differ = manifest.of_folder(folder, images)
            name = printable(_prefix(Path(manifest.root), str(top)) + folder) or path.parent.name
            self._take(SourceFile(path.parent, name, row), manifest, differ)
        elif filepath in manifest.disagreeing:
            refuse("manifest_disagrees", DISAGREES)
        elif is_archive(path.name):
            refuse("archive_not_expanded", how_to_expand(path.name))
        elif stat.S_ISREG(kind) or (stat.S_ISDIR(kind) and formats.recognise(path) is not None):
            self.found.files.append(SourceFile(path, name, manifest.rows[filepath]))
        else:
            refuse("unreadable_file", "neither a file nor a folder of B-scans")

    def _manifest_around(self, folder: Path) -> Manifest | None:
        """The manifest that speaks of a folder; its people are added with it."""
        file = find_manifest(folder)
        self._add_people(folder, file)
        if file and file.name == MANIFESTS[0]:
            return read_manifest(file)
        return self._usable(file) if file else None

    def _add_people(self, folder: Path, manifest: Path | None) -> None:
        table = find_participants(folder, manifest)
        if table is not None and (place := table.resolve()) not in self._tables:
            self._tables.add(place)
            try:
                self.found.participants.extend(read_participants(table))
            except UsageError as error:
                if table.name == PARTICIPANTS:
                    raise
                _log.warning("%s; it is not used", error)  # another program's table may be called so


def _usable(file: Path) -> Manifest | None:
    """The manifest in a tree; None, and a warning, where it cannot be used."""
    try:
        return read_manifest(file)
    except UsageError as error:
        _log.warning("%s; the scans beside it are read without its ids and spacings", error)
        return None


def tell_faults(manifest: Manifest, found: Discovery, prefix: str) -> None:
    """Paths that lead out of the root, into the ledger; rows that were there before, counted.

    `prefix` is where the manifest's root lies below the source. Of an absolute path the last part alone is told.
    """
    if manifest.repeated:
        found.ignored["repeated manifest row"] += manifest.repeated
    for text in manifest.escaping:
        place = (
            f"{manifest.root}/outside/{printable(text)}"  # never looked at; it only tells one ledger row from the next
        )
        if is_absolute(text):
            last = text.replace("\\", "/").rpartition("/")[2]
            found.refuse(place, printable(prefix + last), "path_escapes", ABSOLUTE)
        else:
            name = text if "://" in text else prefix + text
            found.refuse(place, printable(name), "path_escapes", "it leads out of the manifest's root")


def tell_images(taken: Iterable[str], left: Iterable[str], found: Discovery, folder: Path | str, name: str) -> None:
    """Numbered images that were left out beside scans, into the ledger; a HEYEX XML has its images beside it."""
    images = sum(map(len, sequences(left)))
    if images and not any(one.lower().endswith(".xml") for one in taken):
        found.refuse(folder, name, "images_beside_scan", f"{images} images")


def made_here(folder: str, names: Collection[str]) -> str:
    """What octjepa itself made of a folder ("" for another's): its arrays are no scans to read."""
    if "store.json" in names:
        return "store of octjepa"
    return "truth of phantoms" if folder == "truth" and "eyes.tsv" in names else ""


def read_list(text: bytes, called: str) -> list[str]:
    """The entries of a list of files, one a line; empty lines and those that begin with "#" are left out.

    Raises UsageError: no text, or no entry.
    """
    encoding = "utf-16" if text.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"  # as some shells write it
    lines = text.decode(encoding, "surrogateescape" if encoding == "utf-8-sig" else "replace").splitlines()
    entries = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not entries or any("\0" in entry for entry in entries):
        raise UsageError(f"{printable(called)} is no list of files: expected text with a path or url on each line")
    return entries


def _images(names: Iterable[str]) -> list[str]:
    return [name for name in names if PurePath(name).suffix.lower() in IMAGES]


def _images_of(folder: Path) -> tuple[str, ...]:
    """The images of a folder of B-scans; () for another folder."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    return tuple(_images(names)) if formats.is_scan_folder(folder, names) else ()


def _prefix(folder: Path, root: str) -> str:
    """ "a/b/" for root/a/b, "" for the root itself."""
    below = folder.relative_to(root).as_posix()
    return "" if below == "." else f"{below}/"
