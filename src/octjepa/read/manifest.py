"""manifest.tsv and participants.tsv of an AI-READI-shaped tree, all three generations, read leniently; .csv as well.

A manifest's `filepath` starts with "/" and is relative to the dataset root, the folder that holds retinal_oct/.
`participant_id` became `person_id` in the third release; both are read, and so are patient_id and subject_id. A path
that leads out of the root is never followed.
"""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import math
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from posixpath import basename, dirname, join

from octjepa.errors import UsageError, counted
from octjepa.read.personal_data import clean_person_id, names_nobody

MANIFEST = "manifest.tsv"
PERSON_COLUMNS = ("person_id", "participant_id", "patient_id", "subject_id")  # the first that is filled
PARTICIPANTS = "participants.tsv"
MANIFESTS = (MANIFEST, "manifest.csv")  # of two in one folder the first is read
PEOPLE_TABLES = (PARTICIPANTS, "participants.csv")
SPLITS = ("train", "val", "test")
_FILE_COLUMNS = ("filepath", "file_path")
_USED_COLUMNS = {
    *PERSON_COLUMNS,
    *_FILE_COLUMNS,
    *("manufacturer", "manufacturers_model_name", "anatomic_region", "laterality", "number_of_frames", "pixel_spacing"),
    *("slice_thickness", "sop_instance_uid", "clinical_site", "study_group", "age", "recommended_split"),
}
_UNKNOWN_PERSON = {
    "clinical_site": "",
    "study_group": "",
    "age": math.nan,
    "recommended_split": "",
    "split_unknown": False,
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ManifestRow:
    """One row of a manifest; "" or None where a cell is empty. `filepath` is relative to the root."""

    person_id: str
    manufacturer: str
    model: str
    region: str
    laterality: str
    frames: int | None
    pixel_spacing_mm: tuple[float, float] | None
    slice_thickness_mm: float | None
    sop_instance_uid: str
    filepath: str


def row_hash(row: ManifestRow | None) -> str:
    """16 hex digits of a hash of all cells that the reader uses, "" without a row: another means reading again."""
    if row is None:
        return ""
    fields = (
        row.person_id,
        row.manufacturer,
        row.model,
        row.region,
        row.laterality,
        row.pixel_spacing_mm,
        row.slice_thickness_mm,
    )
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Manifest:
    """A table of files. `root` (a real folder or a url) is what every filepath is relative to.

    `disagreeing` are files with rows that contradict each other. `escaping` the filepaths that lead out of the root.
    `repeated` counts rows whose file an earlier row listed.
    """

    root: str
    file: str
    rows: dict[str, ManifestRow] = field(repr=False)
    disagreeing: frozenset[str] = frozenset()
    escaping: tuple[str, ...] = ()
    repeated: int = 0

    def row_at(self, relative: str) -> ManifestRow | None:
        """The row of the file at this path below the root, however its accents are written (macOS takes them apart)."""
        return self.rows.get(unicodedata.normalize("NFC", relative))

    def row_of_folder(self, folder: str, images: Iterable[str]) -> tuple[ManifestRow | None, bool]:
        """(row of a folder of B-scans, else of its images; whether these rows contradict each other)."""
        if own := self.row_at(folder):
            return own, own.filepath in self.disagreeing
        rows = [row for name in images if (row := self.row_at(f"{folder}/{name}".lstrip("/")))]
        differ = len(set(map(row_hash, rows))) > 1 or any(row.filepath in self.disagreeing for row in rows)
        return (replace(rows[0], frames=None, sop_instance_uid="") if rows else None), differ

    def row_of_path(self, path: str) -> ManifestRow | None:
        """The row of a real local path; None if it is not below the root or its rows contradict each other."""
        row = self.row_at(os.path.relpath(path, self.root)) if path.startswith(self.root.rstrip("/") + "/") else None
        return None if row is None or row.filepath in self.disagreeing else row


def relative_path(text: str) -> str | None:
    """A filepath as folders and name below the root, "/" between them; "" for none, None if it leads out of it.

    A leading "/" is AI-READI's way to write the root; a drive letter, a url and ".." lead out. `_below_root`
    recognises an absolute path of this machine.
    """
    plain = unicodedata.normalize("NFC", text.strip().replace("\\", "/"))
    parts = [part for part in plain.split("/") if part not in {"", "."}]
    if ".." in parts or "\0" in plain or "://" in plain or re.match("[A-Za-z]:", plain):
        return None
    return "/".join(parts)


@lru_cache(maxsize=256)
def _is_on_this_machine(first: str, root: str) -> bool:
    """Whether "/first/..." is a path of this machine: the root holds no such thing, and the machine does."""
    return not os.path.lexists(f"{root}/{first}") and os.path.lexists(f"/{first}")


def _below_root(text: str, root: str) -> str | None:
    """As `relative_path`; also an absolute path of this machine that leads into `root`, a real folder."""
    path = relative_path(text)
    if (
        not path
        or not text.strip().startswith("/")
        or "://" in root
        or not _is_on_this_machine(path.partition("/")[0], root)
    ):
        return path
    real = Path(os.path.realpath(f"/{path}").rpartition("/")[0] or "/", path.rpartition("/")[2])
    return relative_path(real.relative_to(root).as_posix()) if real.is_relative_to(root) else None


def is_absolute(text: str) -> bool:
    """Whether a path in a manifest begins at the root of a disk."""
    return re.match(r"\s*([A-Za-z]:|[/\\])", text) is not None


def _parse_number(text: str | None) -> float | None:
    try:
        value = float((text or "").strip())
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _parse_pair(text: str | None) -> tuple[float, float] | None:
    """ "[0.003872, 0.01206]" -> (0.003872, 0.01206); "Varies by frame" -> None."""
    numbers = re.findall(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?", text or "")
    return (float(numbers[0]), float(numbers[1])) if len(numbers) == 2 else None


def _parse_table(text: str, name: str) -> list[dict[str, str]]:
    """Rows by column name, in lower case; between the cells tabs, or semicolons or commas where the header has no tab.

    Semicolons come from where decimals have a comma: 0,26 is then 0.26. Raises UsageError if rows would be lost or
    cells would change their column: an open quotation mark, a row with more cells than the header, a used column that
    is there twice.
    """
    lines = io.StringIO(text.lstrip("\ufeff"), newline="")
    header = lines.readline()
    lines.seek(0)
    delimiter = "\t" if "\t" in header else max("\t,;", key=header.count)
    reader = csv.DictReader(lines, restkey="", delimiter=delimiter, strict=True)
    try:
        rows = []
        for row in reader:
            _check_cells(row, delimiter, f"{name}, line {reader.line_num},")
            rows.append({(k or "").strip().lower(): (v or "") for k, v in row.items() if isinstance(v, str | None)})
    except csv.Error as error:
        raise UsageError(
            f"{name} cannot be read as a table after line {reader.line_num}: {error}. Close every quotation mark, or "
            "remove it"
        ) from None
    names = Counter(column.strip().lower() for column in reader.fieldnames or ())
    if twice := sorted(column for column, count in names.items() if count > 1 and column in _USED_COLUMNS):
        raise UsageError(f"{name} has the column {twice[0]!r} twice: keep one of them")
    if delimiter == ";":
        rows = [{k: re.sub(r"^\s*(-?\d+),(\d+)\s*$", r"\1.\2", v) for k, v in row.items()} for row in rows]
    return rows


def _check_cells(row: Mapping[str, str | list[str] | None], delimiter: str, where: str) -> None:
    """Raises UsageError: the row has more cells than the header, or an open quotation mark made whole rows one cell."""
    beyond = row.get("")
    if isinstance(beyond, list) and any(cell.strip() for cell in beyond):
        raise UsageError(
            f"{where} has more cells than the header, so its cells would be read in other columns: put a cell that "
            "holds the separator into quotation marks"
        )
    for cell in row.values():
        if isinstance(cell, str) and re.search(r"[\r\n]", cell) and cell.count(delimiter) >= len(row) - 1 > 0:
            raise UsageError(f"{where} has a cell that holds whole rows: close every quotation mark, or remove it")


def _columns_text(rows: list[dict[str, str]]) -> str:
    """The columns of a table that are used here, and the number of others: the first line of a table without a header
    is a row, and its cells may be a person's data."""
    columns = [column for column in rows[0] if column] if rows else []
    used = [column for column in columns if column in _USED_COLUMNS]
    others = len(columns) - len(used)
    return " and ".join(filter(None, (", ".join(used), counted(others, "other column") if others else ""))) or "nothing"


def decode_table(read: Callable[[], bytes], file: str) -> str:
    """The text of a table. Raises UsageError: it cannot be read, or is not UTF-8."""
    try:
        return read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as a table of UTF-8 text: {error}") from None


def _person_id(cells: dict[str, str]) -> str:
    """The person id of a row; "" for none, and for NA or unknown, which would make all such rows one person."""
    filled = (cells[column] for column in PERSON_COLUMNS if cells.get(column, "").strip())
    person = clean_person_id(next(filled, ""))
    return "" if names_nobody(person) else person


def _stated(cells: dict[str, str], column: str) -> str:
    """The text of a cell; "" if it is absent or a placeholder such as NA, which would hide what the file states."""
    text = cells.get(column, "").strip()
    return "" if names_nobody(text) else text


def parse_manifest(text: str, folder: str, name: str) -> Manifest:
    """The manifest in `text`, which is stored in `folder` (real path or url) and called `name` in messages.

    Raises UsageError: no table, or no column `filepath`.
    """
    table = _parse_table(text, name)
    column = next((name for name in _FILE_COLUMNS if table and name in table[0]), None)
    if column is None:
        raise UsageError(
            f"{name} has no column 'filepath' (found {_columns_text(table)}): expected an AI-READI manifest.tsv. A "
            "table of labels belongs to --labels of octjepa probe or finetune"
        )
    parent, _, last = folder.rpartition("/")
    inside = last == "retinal_oct" and not parent.endswith("/")  # a bucket may be called that as well
    root = (parent or "/") if inside else folder
    rows: dict[str, ManifestRow] = {}
    disagreeing: set[str] = set()
    escaping: list[str] = []
    repeated = 0
    for cells in table:
        filepath = _below_root(cells[column], root)
        if filepath is None:
            escaping.append(cells[column].strip())
            continue
        if not filepath:
            continue
        frames = _parse_number(cells.get("number_of_frames"))
        row = ManifestRow(
            person_id=_person_id(cells),
            manufacturer=_stated(cells, "manufacturer"),
            model=_stated(cells, "manufacturers_model_name"),
            region=_stated(cells, "anatomic_region"),
            laterality=_stated(cells, "laterality"),
            frames=None if frames is None else int(frames),
            pixel_spacing_mm=_parse_pair(cells.get("pixel_spacing")),
            slice_thickness_mm=_parse_number(cells.get("slice_thickness")),
            sop_instance_uid=_stated(cells, "sop_instance_uid"),
            filepath=filepath,
        )
        first = rows.setdefault(filepath, row)
        if first is not row:
            repeated += 1
            if first != row:
                disagreeing.add(filepath)
    return Manifest(root, name, rows, frozenset(disagreeing), tuple(escaping), repeated)


@lru_cache(maxsize=16)
def _read(path: str, mtime_ns: int) -> Manifest:
    return parse_manifest(decode_table(Path(path).read_bytes, path), os.path.dirname(path), path)


def is_bucket(url: str) -> bool:
    """Whether a path is a url that names a bucket and nothing in it."""
    return url.count("/") == 2 and "://" in url


def find_manifest(folder: str, is_file: Callable[[str], bool]) -> str:
    """The manifest of a real folder: in it, in its retinal_oct/, or in a retinal_oct/ above it; "" for none."""
    above = [folder]
    while (parent := dirname(above[-1])) != above[-1] and not parent.endswith(":"):
        above.append(parent)
    retinal_oct = [parent for parent in above[1:] if basename(parent) == "retinal_oct" and not is_bucket(parent)]
    return _first_file((folder, join(folder, "retinal_oct"), *retinal_oct), MANIFESTS, is_file)


def find_participants(folder: str, manifest: str, is_file: Callable[[str], bool]) -> str:
    """The table of people next to or above the manifest ("" for none), in `folder`, or in its retinal_oct/."""
    near = [dirname(manifest), dirname(dirname(manifest))] if manifest else []
    folders = [candidate for candidate in (*near, folder, join(folder, "retinal_oct")) if not candidate.endswith(":")]
    return _first_file(folders, PEOPLE_TABLES, is_file)


def _first_file(folders: Iterable[str], names: Sequence[str], is_file: Callable[[str], bool]) -> str:
    return next((path for folder in folders for name in names if is_file(path := join(folder, name))), "")


def find_row(path: Path) -> ManifestRow | None:
    """The manifest row of one local file, where the tree around it has a manifest. Raises UsageError: a damaged one."""
    real = os.path.join(os.path.realpath(path.parent), path.name)
    file = find_manifest(os.path.dirname(real), os.path.isfile)
    try:
        return _read(file, os.stat(file).st_mtime_ns).row_of_path(real) if file else None
    except UsageError:
        if basename(file) == MANIFEST:
            raise
        return None  # another program's table may be called manifest.csv


def parse_participants(text: str, name: str) -> list[dict[str, object]]:
    """People {person_id, clinical_site, study_group, age, recommended_split, split_unknown}; no other column is taken.

    Several rows of a person are merged: the first filled value of each column counts, and people whose rows differ are
    counted in a warning. A recommended split that is none of train, val, test counts as none, and `split_unknown` is
    then True. An age below 0, such as -9, stands for a missing value and counts as none.
    Raises UsageError: no table, or no id column.
    """
    if not text.lstrip("\ufeff").strip():
        raise UsageError(f"{name} is empty: copy or download it again, or remove it")
    rows = _parse_table(text, name)
    if rows and not set(PERSON_COLUMNS) & set(rows[0]):
        raise UsageError(
            f"{name} has no column of person ids, one of {', '.join(PERSON_COLUMNS)} (found {_columns_text(rows)})"
        )
    people: dict[str, dict[str, object]] = {}
    contradicted: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        person = _person_id(row)
        if not person:
            continue
        split = row.get("recommended_split", "").strip().lower()
        split = {"validation": "val", "valid": "val"}.get(split, split)
        age = _parse_number(row.get("age"))
        entry = people.setdefault(person, {})
        if split and split not in SPLITS:
            entry["split_unknown"] = True
        values = {
            "recommended_split": split if split in SPLITS else "",
            "clinical_site": row.get("clinical_site", "").strip(),
            "study_group": row.get("study_group", "").strip(),
            "age": None if age is None or age < 0 else age,
        }
        for column, value in values.items():
            if value not in ("", None) and entry.setdefault(column, value) != value:
                contradicted[column].add(person)
    if contradicted:
        _log.warning(
            "%s: rows of one person differ for %d people (%s): the first filled value counts, so it depends on the "
            "order of the rows. Correct the table, above all its splits",
            name,
            len(set().union(*contradicted.values())),
            ", ".join(f"{column} {len(persons)}" for column, persons in contradicted.items()),
        )
    return [{"person_id": person, **_UNKNOWN_PERSON, **entry} for person, entry in people.items()]
