"""Label tables: read from TSV or CSV and keyed by person, eye and visit, with every loss counted.

A label file is TSV or CSV with `person_id` (or `participant_id`), optionally `eye` (or `laterality`) and `visit`, and a
column per target. A row without an eye applies to both eyes. A row that names a visit applies to that visit, and a row
that does not to every visit without a row. Nothing is dropped silently: repeated and missing labels are
counted in notes, and two rows that disagree are an error. Messages hold counts, never an id.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

import numpy as np
import pandas as pd
from jaxtyping import Float

from octjepa.errors import UsageError, counted, counted_are, did_you_mean
from octjepa.read.formats.sequence import IMAGE_SUFFIXES
from octjepa.read.identity import visit_pseudonym
from octjepa.read.personal_data import clean_person_id, names_nobody
from octjepa.tables import plain_cell

PERSON_COLUMNS = ("person_id", "participant_id")
EYE_COLUMNS = ("eye", "laterality")
SITE_COLUMNS = ("clinical_site", "site")
VISIT_COLUMNS = ("visit", "image")  # the visit of a single B-scan is the name of its file
_PSEUDONYM = re.compile(r"v-[0-9a-f]{12}")
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
# Cells of other programs without a value. None is a class where others are words, and no value among numbers.
PLACEHOLDERS = {".", "?", "-", "--", "unknown", "missing", "not available"}
CODES = {-9.0, -99.0, -999.0, -9999.0}  # for a missing number, among numbers that are not negative
MISSING = {"", "na", "n/a", "#n/a", "<na>", "nan", "null"}  # "none" is not here: it can be the name of a class

_PERSON_LIKE = re.compile(
    r"(?:(?:patient|subject|person|participant|pat)[ _-]?(?:id|no|nr|number)?|id)$", re.IGNORECASE
)
# As spreadsheets save the line: in quotes, and with the separators of empty cells behind it.
_DECLARED_CLASSES = re.compile(r"\"?#\s*classes\s*:\s*([^\"\r\n]*)\"?[,;\t\s]*", re.IGNORECASE)
_ZIP_START = b"PK\x03\x04"  # of an .xlsx, which is a ZIP file
_CLASSES = "classes"  # the attribute of a table that holds them
_QUANTITY = 5  # a column with at least so many different numbers is a quantity, not classes

_EYES = {
    **dict.fromkeys(("od", "r", "right", "re", "rechts"), "OD"),
    **dict.fromkeys(("os", "l", "left", "le", "links"), "OS"),
    **dict.fromkeys(("ou", "b", "both"), ""),
}


@dataclass(frozen=True)
class LabelTable:
    """A label file as read: `values[target]` maps (person_id, eye) to the text of the label; both eyes written out.

    sites: person -> clinical site, where the file says it. visits: as `values`, of the rows that name a visit, by
    (person_id, eye, pseudonym of the visit in the store). visit_names: (person_id, cell) -> possible pseudonyms.
    """

    path: Path
    by_eye: bool
    values: dict[str, dict[tuple[str, str], str]]
    notes: tuple[str, ...]
    sites: dict[str, str]
    visits: Mapping[str, Mapping[tuple[str, str, str], str]] = field(default_factory=dict)
    visit_names: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    visit_column: str = "visit"

    @property
    def by_visit(self) -> bool:
        """Whether a row of the file names a visit."""
        return bool(self.visit_names)

    def texts(self, target: str, frame: pd.DataFrame) -> list[str | None]:
        """The label of each volume of `frame`, of its visit first; None if there is none."""
        values, visits = self.values[target], self.visits.get(target, {})
        names = frame["visit"] if "visit" in frame else [""] * len(frame)
        keys = zip(frame["person_id"], frame["eye"], names, strict=True)
        return [visits.get((person, eye, visit), values.get((person, eye))) for person, eye, visit in keys]

    def people(self, target: str) -> set[str]:
        """The people with a label of `target`."""
        return {person for person, *_ in (*self.values[target], *self.visits.get(target, ()))}

    def require_no_visits(self, purpose: str) -> None:
        """Raises UsageError where labels differ between visits and `purpose` needs one label per person and eye."""
        if self.by_visit:
            raise UsageError(
                f"{self.path} has labels by visit, and {purpose}: leave out or rename its column {self.visit_column}"
            )


def read_labels(path: str | Path, targets: Sequence[str]) -> LabelTable:
    """Reads the columns `targets` of a TSV or CSV.

    Raises UsageError: no such file, not a table, no person column, no such target, a column twice, an eye that is not
    an eye, no rows, two rows of one person and eye that disagree.
    """
    path = Path(path)
    if not targets:
        raise UsageError("no target was named: give at least one column of the label file with --target")
    frame = read_table(path)
    person, eye, site, visit = (
        _find_column(frame, names) for names in (PERSON_COLUMNS, EYE_COLUMNS, SITE_COLUMNS, VISIT_COLUMNS)
    )
    if person is None:
        similar = [str(column) for column in frame.columns if _PERSON_LIKE.match(str(column))]
        rename = f"; rename {similar[0]!r} to person_id" if similar else ""
        raise UsageError(
            f"{path} has neither person_id nor participant_id; its columns are {_listed(frame.columns)}{rename}"
        )
    absent = [name for name in targets if name not in frame.columns]
    if absent:
        hint = did_you_mean(absent[0], map(str, frame.columns))
        raise UsageError(f"{path} has no column {', '.join(absent)}; its columns are {_listed(frame.columns)}{hint}")
    used = {name for name in (*targets, person, eye, site, visit) if name is not None}
    if repeated := sorted(used & set(frame.columns[frame.columns.duplicated()])):
        raise UsageError(f"{path} has the column {', '.join(repeated)} more than once: keep one, or rename the others")
    if frame.empty:
        raise UsageError(f"{path} has a header and no rows: add a row for each person")
    people = frame[person].map(clean_person_id)  # as ingest does: AIREADI-1001 is 1001
    nameless = int(people.map(lambda person: person == "" or names_nobody(person)).sum())
    if nameless:
        raise UsageError(f"{path}: {nameless} of {len(frame)} rows have no {person}; fill it in or remove them")
    no_text = pd.Series("", index=frame.index)
    eyes = no_text if eye is None else _eyes(frame[eye], path, str(eye))
    notes: list[str] = []
    cells = no_text if visit is None or visit in targets else frame[visit].str.strip()
    cells = cells.mask(cells.str.lower().isin(MISSING), "")
    classes = frame.attrs[_CLASSES]
    columns = {name: _without_placeholders(frame[name].str.strip(), name, path, notes, classes) for name in targets}
    rows = pd.DataFrame({"person": people, "eye": eyes, "visit": cells})
    names = {(p, cell): visit_pseudonyms(p, cell) for p, cell in zip(people, cells, strict=True) if cell}
    labelled = {name: _unique(rows, names, column, name, path, notes) for name, column in columns.items()}
    values = {
        name: {(p, side): text for (p, side, visit_name), text in text_of.items() if not visit_name}
        for name, text_of in labelled.items()
    }
    visits = {name: {key: text for key, text in text_of.items() if key[2]} for name, text_of in labelled.items()}
    named_sites = () if site is None else zip(people, frame[site].str.strip(), strict=True)
    sites: dict[str, str] = {}
    for of_person, name in named_sites:
        sites[of_person] = sites.get(of_person) or name  # a row without a site does not erase that of another
    by_eye = eye is not None and bool((eyes != "").any())
    return LabelTable(path, by_eye, values, tuple(notes), sites, visits, names, visit or "visit")


def visit_pseudonyms(person_id: str, cell: str) -> tuple[str, ...]:
    """The pseudonyms that a store may have for a visit of a person: by its own pseudonym, or by the file's text.

    The text of a file is a study UID, a date or a name; a date 2024-03-05 is also tried as DICOM writes it, 20240305,
    and the file name of a picture without its suffix.
    """
    if _PSEUDONYM.fullmatch(cell):
        return (cell,)
    texts = [cell, "".join(date.groups())] if (date := _DATE.fullmatch(cell)) else [cell]
    if (name := PurePath(cell.replace("\\", "/"))).suffix.lower() in IMAGE_SUFFIXES:
        texts.append(name.stem)
    return tuple(visit_pseudonym(person_id, text) for text in texts)


def _without_placeholders(
    column: pd.Series, target: str, path: Path, notes: list[str], classes: frozenset[str]
) -> pd.Series:
    """The column with empty cells in the place of what stands for no value, which `notes` lists.

    `classes` are words, in lower case, that the file declares to be classes.

    Raises UsageError: texts among the numbers of a quantity, and errors of a spreadsheet such as #REF!.
    """
    column = column.mask(column.str.lower().isin(MISSING - classes), "")
    present = [text for text in column if text.lower() not in MISSING | PLACEHOLDERS | {"none"}]
    numbers = _numbers_by_text(present)
    without_codes = {text: number for text, number in numbers.items() if number not in CODES}
    is_quantity = len(without_codes) >= _QUANTITY and len(numbers) >= 0.8 * len(set(present))
    no_value = set(PLACEHOLDERS)
    if numbers and len(numbers) == len(set(present)):
        no_value.add("none")
    if all(number >= 0 for number in without_codes.values()) and len(without_codes) > 1:
        declared_codes = set(_numbers_by_text(classes).values())
        no_value |= {text.lower() for text, number in numbers.items() if number in CODES - declared_codes}
    no_value -= classes
    empty_words = sorted({text for text in column if text.lower() in no_value})
    if empty_words:
        count = int(column.str.lower().isin(no_value).sum())
        notes.append(
            f"{target}: {', '.join(map(repr, empty_words))} ({count} cells) counts as no value; to make it a class, "
            "begin "
            f"the file with the line `#classes: {empty_words[0]}`"
        )
        column = column.mask(column.str.lower().isin(no_value), "")
    strange = [
        (row, text)
        for row, text in column.items()
        if (text.startswith("#") and text.lower() not in classes)
        or (is_quantity and text and text.lower() not in classes and text not in numbers)
    ]
    if strange:
        shown = ", ".join(f"{text!r} in row {row}" for row, text in strange[:5])
        raise UsageError(
            f"{path}: {target} holds {counted(len(strange), 'cell')} without a number among numbers: {shown}; correct "
            "them, or leave them empty, or declare a class by a first line, "
            f"`#classes: {strange[0][1]}`"
        )
    return column


def _find_column(frame: pd.DataFrame, names: Sequence[str]) -> str | None:
    """The column that has the first of `names` that any has, in any case, as in the tables that ingest reads."""
    by_name = {str(column).lower(): str(column) for column in reversed(frame.columns)}
    return next((by_name[name] for name in names if name in by_name), None)


def label_columns(path: str | Path) -> list[str]:
    """The columns of a label table, but those of person, eye and visit. Raises UsageError as `read_labels` does."""
    keys = (*PERSON_COLUMNS, *EYE_COLUMNS, *VISIT_COLUMNS)
    return [name for name in read_table(Path(path)).columns if name.lower() not in keys]


def read_table(path: Path) -> pd.DataFrame:
    """The cells of a TSV or CSV as text; a row that ends early has empty cells. Empty rows are left out.

    The index is the line of the file in which each row begins, for messages.

    Between the cells are tabs, or semicolons or commas where the header has no tab. Semicolons come from where decimals
    have a comma: 0,5 is then 0.5. A first line `#classes: unknown, na` declares words that otherwise stand for a
    missing value to be classes. Raises UsageError: no such file, not a table, a row longer than the header.
    """
    if not path.is_file():
        raise UsageError(f"no label file at {path}: expected a TSV or CSV with person_id and a column per target")
    with path.open("rb") as file:
        if file.read(len(_ZIP_START)) == _ZIP_START:
            raise UsageError(f"{path} is an Excel file (.xlsx) or another ZIP file: save the table as CSV")
    try:
        text = io.StringIO(path.read_text(encoding="utf-8-sig"), newline="")
        first = text.readline()
        classes, start, before = frozenset[str](), 0, 0  # `before`: lines that the reader of rows does not see
        if declared := _DECLARED_CLASSES.fullmatch(first):
            classes = frozenset(word.strip().lower() for word in re.split(r"[,;\t]", declared[1]) if word.strip())
            start, before = text.tell(), 1
            first = text.readline()
        delimiter = "\t" if "\t" in first else ";" if first.count(";") > first.count(",") else ","
        if separator := re.fullmatch(r"sep=(.)", first.strip(), re.IGNORECASE):  # spreadsheets write it for themselves
            delimiter, before = separator[1], before + 1
        else:
            text.seek(start)
        reader = csv.reader(text, delimiter=delimiter, strict=True)  # a quote that nothing ends would swallow rows
        numbered, line = [], before + 1
        for row in reader:
            numbered.append((line, row))
            line = before + reader.line_num + 1  # a cell in quotes may span several lines
        (_, header), *body = [(line, row) for line, row in numbered if any(cell.strip() for cell in row)]
        rows = [row for _, row in body]
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a readable TSV or CSV of UTF-8 text ({error}): save it as UTF-8") from None
    except csv.Error as error:
        raise UsageError(f"{path} is not a readable TSV or CSV ({str(error).splitlines()[0]})") from None
    except ValueError:  # nothing to unpack
        raise UsageError(f"{path} is not a readable TSV or CSV (no columns to read)") from None
    while header and not header[-1].strip():
        header.pop()
    longer = sum(any(cell.strip() for cell in row[len(header) :]) for row in rows)
    if longer:
        raise UsageError(
            f"{path}: {longer} of {len(rows)} rows have more cells than the {len(header)} columns of the header, so a "
            "cell may be under a wrong name: give every column a name, and put cells that hold the separator in quotes"
        )
    cells = [[plain_cell(cell) for cell in (row + [""] * len(header))[: len(header)]] for row in rows]
    if delimiter == ";":
        cells = [[re.sub(r"^\s*(-?\d+),(\d+)\s*$", r"\1.\2", cell) for cell in row] for row in cells]
    lines = [line for line, _ in body]
    frame = pd.DataFrame(cells, lines, [plain_cell(name).strip() for name in header], dtype=str)
    frame.attrs[_CLASSES] = classes
    return frame


def split_multilabel(labels: LabelTable, targets: Sequence[str]) -> tuple[LabelTable, list[str]]:
    """Multi-label columns ("drusen;fluid", "none" or "0" for no label) as one column of 0 and 1 for each label.

    Returns the table with the new columns `target=label` and their names. Raises UsageError: more than MAX_CLASSES
    labels, or labels that differ only by case.
    """
    values, visits = dict(labels.values), dict(labels.visits)
    names: list[str] = []
    for target in targets:
        cells = {key: _label_set(text) for key, text in labels.values[target].items()}
        of_visits = {key: _label_set(text) for key, text in labels.visits.get(target, {}).items()}
        all_labels = sorted(set().union(*cells.values(), *of_visits.values()), key=str.lower)
        check_spelling(target, all_labels)
        if not all_labels or len(all_labels) > MAX_CLASSES:
            raise UsageError(
                f"{target} holds {len(all_labels)} different labels, expected 1 to {MAX_CLASSES}, parted by ; or |"
            )
        for label in all_labels:
            names.append(f"{target}={label}")
            values[names[-1]] = {key: str(int(label in cell)) for key, cell in cells.items()}
            visits[names[-1]] = {key: str(int(label in cell)) for key, cell in of_visits.items()}
    return replace(labels, values=values, visits=visits), names


def check_spelling(target: str, texts: Iterable[str]) -> None:
    """Raises UsageError for texts that differ only by case: they would be different classes."""
    spellings: dict[str, set[str]] = {}
    for text in texts:
        spellings.setdefault(text.casefold(), set()).add(text)
    for alike in (sorted(group) for group in spellings.values() if len(group) > 1):
        raise UsageError(
            f"{target} holds {' and '.join(map(repr, alike))}, which would be different classes: write the same class "
            "in the same way everywhere"
        )


def _label_set(text: str) -> frozenset[str]:
    parts = {part.strip() for part in re.split(r"[;|]", text)}
    return frozenset(part for part in parts if part and part.lower() not in {"none", "0"})


def _listed(names: pd.Index) -> str:
    shown = [str(name) for name in names[:30]]
    return ", ".join(shown) + (f" and {len(names) - 30} more" if len(names) > 30 else "")


def _eyes(column: pd.Series, path: Path, name: str) -> pd.Series:
    """The eye of each row, "OD", "OS" or "" for both. Raises UsageError for any other text."""
    text = column.str.strip().str.lower()
    mapped = text.map(lambda value: "" if value in MISSING else _EYES.get(value))
    unknown = sorted(set(column[mapped.isna()]))
    if unknown:
        where = column.index[mapped.isna()]
        rows = f"row {where[0]}" if len(where) == 1 else f"{len(where)} rows, first in row {where[0]}"
        raise UsageError(
            f"{path}: {name} holds {', '.join(map(repr, unknown[:5]))} in {rows}: "
            "expected OD, OS, R, L, right, left, or OU, both or empty for both eyes"
        )
    return mapped


def _unique(
    rows: pd.DataFrame,
    visit_names: Mapping[tuple[str, str], tuple[str, ...]],
    column: pd.Series,
    target: str,
    path: Path,
    notes: list[str],
) -> dict[tuple[str, str, str], str]:
    """{(person, eye, pseudonym of the visit or ""): label text}, with notes on repeated and missing labels.

    `rows` holds the person, eye and visit of each label. `visit_names` maps (person, visit) to the pseudonyms: two
    spellings of a visit, such as 2024-03-05 and 20240305, share one.

    Raises UsageError where two labels of a key differ.
    """
    label_of: dict[tuple[str, str, str], str] = {}
    disagreeing: dict[tuple[str, str, str], int] = {}  # the key of a row: the first row that contradicts another one
    row_keys: set[tuple[str, str, str]] = set()
    repeated = missing = 0
    for (line, person, eye, visit), value in zip(rows.itertuples(name=None), column, strict=True):
        if not value:
            missing += 1
            continue
        # Volumes of unknown laterality ("") take a label only from a row that speaks of the whole person.
        sides = (eye,) if eye else ("OD", "OS", "")
        keys = [(person, side, name) for side in sides for name in visit_names.get((person, visit), ("",))]
        row_keys.add((person, eye, visit))
        repeated += any(key in label_of for key in keys)
        for key in keys:
            if key in label_of:
                if label_of[key] != value and not _same_number(label_of[key], value):
                    disagreeing.setdefault((person, eye, visit), line)
            else:
                label_of[key] = value
    if disagreeing:
        has_visits, has_eyes = any(visit for *_, visit in row_keys), any(eye for _, eye, _ in row_keys)
        noun = "visit" if has_visits else "eye" if has_eyes else "person"
        raise UsageError(
            f"{path}: {target} is given twice with different values for {len(disagreeing)} of "
            f"{counted(len(row_keys), noun)}, first in row {min(disagreeing.values())}; keep one row per person and "
            "eye, or name the visit of each row in a column visit"
        )
    if repeated:
        notes.append(
            f"{target}: {counted_are(repeated, 'label')} given more than once with equal values; each is used once"
        )
    if missing:
        notes.append(f"{target}: {missing} of {len(column)} label rows are empty or NaN and are left out")
    return label_of


def _numbers_by_text(texts: Iterable[str]) -> dict[str, float]:
    """The texts that are finite numbers, with their values."""
    return {text: float(number[0]) for text in texts if (number := numbers_of([text])) is not None}


def _same_number(first: str, other: str) -> bool:
    numbers = numbers_of([first, other])
    return numbers is not None and bool(numbers[0] == numbers[1])


MAX_CLASSES = 20


def numbers_of(texts: Sequence[str]) -> Float[np.ndarray, " n"] | None:
    """The texts as finite numbers, or None if one of them is none."""
    try:
        numbers = np.array([float(text) for text in texts])
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None
