"""Finds the files to ingest: a file, a folder, or a manifest.tsv becomes a sorted list of `SourceFile`.

DICOM is recognised by its content. Side files (tables, pictures, notes, `._` twins of macOS) are left out and counted;
a file that is called DICOM and is none stays in the list, so that it ends in the ledger.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from octjepa.errors import UsageError, VolumeRejected
from octjepa.ingest.dicom import has_dicom_magic
from octjepa.ingest.manifest import (
    Manifest,
    ManifestRow,
    find_manifest,
    find_participants,
    read_manifest,
    read_participants,
)

_DICOM_SUFFIXES = {".dcm", ".dicom", ".dic", ".ima"}


@dataclass(frozen=True)
class SourceFile:
    """One file to read; `name` is its path relative to the ingested root, "/" between parts."""

    path: Path
    name: str
    row: ManifestRow | None = None

    @cached_property
    def key(self) -> str:
        """16 hex digits that name this file on this machine; the path itself stays out of the store."""
        return hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:16]


@dataclass
class Discovery:
    """`files` sorted by name, each once; `missing` the files that a manifest lists and that are absent."""

    files: list[SourceFile] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    missing: list[SourceFile] = field(default_factory=list)
    files_without_row: int = 0
    participants: list[dict[str, object]] = field(default_factory=list)


def _walk(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        found.extend(Path(parent) / name for name in sorted(names))
    return found


def _is_candidate(path: Path, ignored: Counter[str]) -> bool:
    if path.name.startswith("."):
        ignored["hidden"] += 1
        return False
    if path.suffix.lower() in _DICOM_SUFFIXES:
        return True
    try:
        if path.is_file() and has_dicom_magic(path):
            return True
    except VolumeRejected:
        ignored["unreadable"] += 1
        return False
    ignored[path.suffix.lower() or "no suffix"] += 1
    return False


def _name(path: Path, root: Path) -> str:
    try:
        return path.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        return path.name


def _add_folder(folder: Path, found: Discovery) -> None:
    manifest_path = find_manifest(folder)
    manifest = read_manifest(manifest_path) if manifest_path else None
    root = manifest.root if manifest else folder
    inside = folder.resolve()
    seen: set[Path] = set()
    for path in _walk(folder):
        if _is_candidate(path, found.ignored):
            row = manifest.row(path) if manifest else None
            seen.add(path.resolve())
            found.files_without_row += manifest is not None and row is None
            found.files.append(SourceFile(path, _name(path, root), row))
    if manifest is not None:
        absent = [row.path for row in manifest.rows if row.path not in seen and row.path.is_relative_to(inside)]
        found.missing.extend(SourceFile(path, _name(path, root)) for path in absent if not path.is_file())
    _add_participants(folder, manifest_path, found)


def _add_manifest(manifest: Manifest, found: Discovery) -> None:
    for row in manifest.rows:
        if row.path.is_file():
            found.files.append(SourceFile(row.path, _name(row.path, manifest.root), row))
        else:
            found.missing.append(SourceFile(row.path, _name(row.path, manifest.root)))
    _add_participants(manifest.root, manifest.file, found)


def _add_participants(folder: Path, manifest: Path | None, found: Discovery) -> None:
    table = find_participants(folder, manifest)
    if table is not None:
        found.participants.extend(read_participants(table))


def discover(sources: Sequence[str | Path]) -> Discovery:
    """All files of `sources`. Raises UsageError: nothing named, no such path, an unreadable manifest, no file found."""
    if not sources:
        raise UsageError("no source named: give a DICOM file, a folder or a manifest.tsv")
    found = Discovery()
    remote = [str(source) for source in sources if "://" in str(source)]
    if remote:
        raise UsageError(f"{remote[0]} is no local path: this version reads local disks only; copy or mount it first")
    for source in map(Path, sources):
        if source.is_dir():
            _add_folder(source, found)
        elif not source.exists():
            raise UsageError(f"no file or folder at {source}")
        elif source.suffix.lower() in {".tsv", ".csv"}:
            _add_manifest(read_manifest(source), found)
        else:
            manifest_path = find_manifest(source.parent)
            manifest = read_manifest(manifest_path) if manifest_path else None
            row = manifest.row(source) if manifest else None
            found.files.append(SourceFile(source, _name(source, manifest.root if manifest else source.parent), row))
            _add_participants(source.parent, manifest_path, found)
    unique = {file.path.resolve(): file for file in found.files}
    found.files = sorted(unique.values(), key=lambda file: (file.name, str(file.path)))
    if not found.files:
        ignored = ", ".join(f"{count} {kind}" for kind, count in found.ignored.most_common(5)) or "it is empty"
        missing = f"; {len(found.missing)} files of the manifest are absent" if found.missing else ""
        where = ", ".join(str(source) for source in sources)
        raise UsageError(f"no OCT DICOM file in {where} (left out: {ignored}){missing}")
    return found
