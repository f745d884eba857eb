"""Compares a local copy of a public data set with its documented layout, and lists its scans for `octjepa ingest`.

File names decide, and the directories of arrays in a few files; no pixel is read. The tables that `write_tables` makes
give each scan the person and the split of its path, which formats such as .npz and .mat do not hold.
"""

from __future__ import annotations

import csv
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from octjepa.datasets.catalogue import DataSet, ExpectedFiles
from octjepa.errors import UsageError
from octjepa.files import write_atomic
from octjepa.locks import writer_lock
from octjepa.parsing import printable
from octjepa.tables import format_table, table_cell

_MAX_FILES = 2_000_000
_OPENED = 3  # files of a kind whose members or columns are looked at
_SHOWN = 6
_GROUPS = ("split", "label", "device", "eye")
_SPLITS = {"training": "train", "trainingset": "train", "validation": "val", "testset": "test"}
_BY_TRUST = ("train", "val", "test", "")  # of the splits of a person, the recommended one comes first
_TABLES = ("manifest.tsv", "participants.tsv", "labels.tsv")


@dataclass(frozen=True)
class FoundFiles:
    """The files of one kind: how many of how many, people, files by split, label, device and eye, the first problem."""

    what: str
    files: int
    documented: int | None
    people: int
    groups: dict[str, dict[str, int]]
    problem: str


@dataclass(frozen=True)
class DataSetCheck:
    """The result for one folder. `ok`: every needed kind of files is there and holds what is documented."""

    name: str
    folder: str
    ok: bool
    kinds: tuple[FoundFiles, ...]

    @property
    def found(self) -> int:
        """Documented files that are there."""
        return sum(kind.files for kind in self.kinds)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "found": self.found}


def check_folder(data_set: DataSet, folder: Path) -> DataSetCheck:
    """Looks for the documented files of `data_set` below `folder`. Raises UsageError: no folder, or too many files."""
    paths = _paths_below(folder)
    kinds = tuple(_check_kind(data_set, expected, folder, paths) for expected in data_set.files)
    return DataSetCheck(data_set.name, str(folder), not any(kind.problem for kind in kinds), kinds)


def _paths_below(folder: Path) -> list[str]:
    """Paths of all files below `folder`, with "/"; hidden files and linked folders are left out.

    Raises UsageError: a folder cannot be listed, so that its files would be missing from the result.
    """
    if not folder.is_dir():
        raise UsageError(f"no folder at {folder}: name the folder that holds the unpacked data set")
    paths: list[str] = []

    def refuse(error: OSError) -> None:
        raise UsageError(
            f"{error.filename or folder} cannot be listed ({error.strerror}): check permissions and the disk"
        )

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = Path(parent).relative_to(folder)
        paths += [(below / name).as_posix() for name in sorted(names) if not name.startswith(".")]
        if len(paths) > _MAX_FILES:
            raise UsageError(f"{folder} holds more than {_MAX_FILES:,} files: name the folder of one data set")
    return paths


def _matches(expected: ExpectedFiles, paths: list[str]) -> list[tuple[str, dict[str, str]]]:
    """(path, groups of the pattern that are filled) of each file of a kind."""
    pattern = re.compile(expected.pattern)
    matches = ((path, pattern.search(path.lower())) for path in paths)
    return [
        (path, {name: text for name, text in match.groupdict().items() if text}) for path, match in matches if match
    ]


def _split_of(groups: dict[str, str]) -> str:
    return _SPLITS.get(groups.get("split", ""), groups.get("split", ""))


def _check_kind(data_set: DataSet, expected: ExpectedFiles, folder: Path, paths: list[str]) -> FoundFiles:
    matches = _matches(expected, paths)
    problem = ""
    if not matches and expected.needed:
        top = sorted({path.partition("/")[0] for path in paths})
        shown = ", ".join(top[:_SHOWN]) + (", ..." if len(top) > _SHOWN else "") if top else "no file"
        problem = f"none: expected names such as {expected.example}; the folder holds {shown}"
    for path, _ in matches[:_OPENED]:
        problem = problem or _content_problem(expected, folder / path, path)
    return FoundFiles(
        expected.what,
        len(matches),
        expected.count,
        len(set(_numbered_people(data_set, [match for match in matches if "person" in match[1]]))),
        {kind: counts for kind in _GROUPS if (counts := _counts(kind, matches))},
        problem,
    )


def _counts(kind: str, matches: list[tuple[str, dict[str, str]]]) -> dict[str, int]:
    """{value: files} of one group of the pattern."""
    values = (_split_of(groups) if kind == "split" else groups.get(kind, "") for _, groups in matches)
    return dict(sorted(Counter(filter(None, values)).items()))


def _content_problem(expected: ExpectedFiles, file: Path, name: str) -> str:
    """The arrays or columns that a file lacks, in words; "" for none."""
    for kind, wanted, present in (
        ("arrays", expected.members, _members),
        ("columns", expected.columns, _columns),
    ):
        if not wanted:
            continue
        try:
            names = present(file)
        except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error, csv.Error):
            return f"{name} cannot be read"
        if names is None:
            continue
        if missing := [member for member in wanted if member not in names]:
            shown = ", ".join(names[:_SHOWN]) or "none"
            return f"{name} has no {' and no '.join(missing)} among its {kind} ({shown})"
    return ""


def _members(file: Path) -> list[str] | None:
    """Names of the arrays in an .npz or .mat file; None for MATLAB 7.3, which is HDF5. Raises OSError, ValueError."""
    if file.suffix.lower() == ".npz":
        with zipfile.ZipFile(file) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    from scipy.io import whosmat
    from scipy.io.matlab import MatReadError

    try:
        return [name for name, _, _ in whosmat(file)]
    except NotImplementedError:
        return None
    except (MatReadError, TypeError, KeyError, IndexError) as error:
        raise ValueError(str(error)) from None


def _columns(file: Path) -> list[str]:
    """Columns in the first line of a .csv or .tsv table. Raises OSError, ValueError."""
    with file.open(encoding="utf-8-sig", newline="") as table:
        line = table.readline(1 << 16)
    return [cell.strip() for cell in next(csv.reader([line], delimiter=_delimiter(line)), [])]


def _delimiter(line: str) -> str:
    return "\t" if "\t" in line else ";" if ";" in line and "," not in line else ","


@dataclass(frozen=True)
class WrittenTables:
    """Tables in the folder of a data set, and the number of scans and people in them.

    `people_in_two_splits` have scans in two folders of the split; they are recommended for training.
    """

    files: tuple[str, ...]
    scans: int
    people: int
    people_in_two_splits: int


def write_tables(data_set: DataSet, folder: Path) -> WrittenTables:
    """Writes `manifest.tsv` with the person of each scan, and `participants.tsv` and `labels.tsv` if paths state them.

    A person id consists of the data set, its part or class, and the number in the path, because numbers of volumes
    repeat between parts and classes. Single B-scans with equal numbers are of one person unless the set numbers people
    anew in each part; their labels name each image. Without person ids each image counts as a person. The eye is
    written if the path states it. Tables that a killed call left are completed. Raises UsageError: the set needs no
    tables, no scans, a name that is not in UTF-8, a table that is there already, scans that the set's own table of
    people does not list, or another process writes to the folder.
    """
    expected = next((kind for kind in data_set.files if kind.scans), None)
    if expected is None:
        raise UsageError(
            f"{data_set.name} needs no tables, or does not hold one volume per file: see `octjepa datasets show "
            f"{data_set.name}`"
        )
    matches = _matches(expected, _paths_below(folder))
    if not matches:
        raise UsageError(f"{folder} holds no scans of {data_set.name}: expected names such as {expected.example}")
    if expected.one_scan_per_folder:
        matches = list({path.rpartition("/")[0]: groups for path, groups in matches}.items())
    paths = [path for path, _ in matches]
    if foreign := next((path for path in paths if not _is_unicode(path)), None):
        raise UsageError(
            f"the name {printable(foreign)} in {folder} is not in UTF-8, so that no table can hold it: rename it, or "
            "unpack the data set again with the encoding of its archive (unzip -O)"
        )
    people = _people(data_set, matches, folder)
    splits = [_split_of(groups) for _, groups in matches]
    labels = [groups.get("label", "") for _, groups in matches]
    eyes = [groups.get("eye", "").upper() for _, groups in matches]
    # A path that a spreadsheet would take for a formula begins with "/", which stands for the folder of the manifest.
    # `table_cell` would add an apostrophe, which readers of the manifest would take for a part of the name.
    filepaths = [path if table_cell(path) == path else f"/{path}" for path in paths]
    rows = zip(people, eyes, filepaths, strict=True)
    texts = {"manifest.tsv": _filled_table(("person_id", "laterality", "filepath"), rows)}
    of_person: dict[str, set[str]] = {}
    for person, split in zip(people, splits, strict=True):
        of_person.setdefault(person, set()).add(split)
    if any(splits):
        recommended = ((person, next(s for s in _BY_TRUST if s in sources)) for person, sources in of_person.items())
        texts["participants.tsv"] = format_table(("person_id", "recommended_split"), recommended)
    if any(labels) and data_set.content == "B-scans":
        images = [path.rpartition("/")[2] for path in paths]
        columns = ("person_id", "eye", "image", "label")
        texts["labels.tsv"] = _filled_table(columns, zip(people, eyes, images, labels, strict=True))
    elif any(labels):
        by_person = dict(zip(people, labels, strict=True)).items()
        texts["labels.tsv"] = format_table(("person_id", "label"), by_person)
    _write_new(folder, {name: text.encode() for name, text in texts.items()})
    in_two = sum(len(sources) > 1 for sources in of_person.values())
    return WrittenTables(tuple(str(folder / name) for name in texts), len(matches), len(of_person), in_two)


def _is_unicode(path: str) -> bool:
    """Whether the bytes of a path are text; Python keeps other bytes as halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in path)


def _write_new(folder: Path, tables: Mapping[str, bytes]) -> None:
    """Writes `tables` by their names. Raises UsageError: a table is there already, unless a killed call left it."""
    with writer_lock(folder):
        present = [name for name in _TABLES if (folder / name).exists()]
        # A killed call leaves some of the tables, complete: write_atomic renames each one when it is on the disk.
        is_unfinished = len(present) < len(tables) and all(
            name in tables and (folder / name).read_bytes() == tables[name] for name in present
        )
        if present and not is_unfinished:
            raise UsageError(f"{folder} holds {present[0]} already: it is not replaced; remove it to write a new one")
        for name, content in tables.items():
            if name not in present:
                write_atomic(folder / name, lambda file, content=content: file.write(content))  # type: ignore[misc]


def _people(data_set: DataSet, matches: list[tuple[str, dict[str, str]]], folder: Path) -> list[str]:
    """The person id of each scan. Raises UsageError: the set's table of people lacks a scan, or cannot be read."""
    table = next((kind for kind in data_set.files if kind.people is not None), None)
    if table is not None:
        listed = _listed_people(table, folder)
        absent = [path for path, _ in matches if PurePosixPath(path).stem not in listed]
        if absent:
            raise UsageError(
                f"{table.example} does not list {len(absent)} of {len(matches)} scans, such as {absent[0]}: remove "
                "them, or complete the table"
            )
        return [f"{data_set.name}-{listed[PurePosixPath(path).stem]}" for path, _ in matches]
    return [f"{data_set.name}-{person}" for person in _numbered_people(data_set, matches)]


def _numbered_people(data_set: DataSet, matches: list[tuple[str, dict[str, str]]]) -> list[str]:
    """The person of each file by its path: a number, after the part or label within which it is unique."""
    if data_set.content == "B-scans":
        return [_image_owner(path, groups) for path, groups in matches]
    return [part + groups["person"] for part, (_, groups) in zip(_parts(matches), matches, strict=True)]


def _image_owner(path: str, groups: dict[str, str]) -> str:
    """The person of a single B-scan, with the part of the set that numbers it; the image itself without a person."""
    if "person" not in groups:
        return re.sub(r"[^a-z0-9]+", "-", path.rpartition(".")[0].lower()).strip("-")
    return f"{groups['part']}-{groups['person']}" if "part" in groups else groups["person"]


def _listed_people(table: ExpectedFiles, folder: Path) -> dict[str, str]:
    """{file name without suffix: person} of the table of people. Raises UsageError."""
    assert table.people is not None
    files = _matches(table, _paths_below(folder))
    if not files:
        raise UsageError(f"{folder} lacks {table.example}, which states the person of each scan")
    path = folder / files[0][0]
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        rows = list(csv.DictReader(lines, delimiter=_delimiter(lines[0] if lines else "")))
        return {PurePosixPath(row[table.people[0]].strip()).stem: row[table.people[1]].strip() for row in rows}
    except (OSError, ValueError, KeyError, AttributeError, csv.Error) as error:
        raise UsageError(
            f"{path} cannot be read as a table with the columns {', '.join(table.people)} ({type(error).__name__})"
        ) from None


def _parts(matches: list[tuple[str, dict[str, str]]]) -> list[str]:
    """The scope of each number: its label, or the folder above its split folder, such as "glaucoma-"; else ""."""
    parts = []
    for path, groups in matches:
        if "label" in groups:
            parts.append(f"{groups['label']}-")
            continue
        folders = path.lower().split("/")[:-1]
        position = folders.index(groups["split"]) if groups.get("split") in folders else 0
        parts.append(f"{folders[position - 1]}-" if position else "")
    return parts


def _filled_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """The table without the columns that are empty in every row."""
    written = list(rows)
    filled = [number for number in range(len(columns)) if any(row[number] for row in written)]
    return format_table([columns[number] for number in filled], ([row[number] for number in filled] for row in written))
