"""Labels from a table on disk, joined to embedded volumes by person and eye, with every loss counted.

A label file is TSV or CSV with `person_id` (or `participant_id`), optionally `eye` (or `laterality`), and a column per
target. A row without an eye speaks of both eyes. Nothing is dropped in silence: labels without scans, scans without
labels and missing values are counted and said; two rows that disagree, a target of one class and a person in two splits
are errors. Messages hold counts and the shape of ids, never an id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from octjepa.embed.table import SPLITS
from octjepa.errors import UsageError
from octjepa.ingest.manifest import clean_person_id
from octjepa.metrics.scores import Task
from octjepa.probe.target_types import (
    MOST_CLASSES,
    PLAIN_PAIRS,
    TASKS,
    beside_numbers,
    check_classes,
    numbers_of,
    task_of,
)

PERSON_COLUMNS = ("person_id", "participant_id")
EYE_COLUMNS = ("eye", "laterality")
SITE_COLUMNS = ("clinical_site", "site")
MISSING = {"", "na", "n/a", "#n/a", "<na>", "nan", "null"}  # "none" is not here: it can be the name of a class

_EYES = {"od": "OD", "r": "OD", "right": "OD", "os": "OS", "l": "OS", "left": "OS", "ou": "", "b": "", "both": ""}


@dataclass(frozen=True)
class LabelTable:
    """A label file as read: `values[target]` maps (person_id, eye) to the text of the label; both eyes written out.

    sites: person -> clinical site, where the file says it.
    """

    path: Path
    by_eye: bool
    values: dict[str, dict[tuple[str, str], str]]
    notes: tuple[str, ...]
    sites: dict[str, str]


@dataclass(frozen=True)
class Target:
    """One target joined to a table of embeddings.

    rows: positions of the labelled volumes in the table, by split. values: class codes (position in `classes`) or the
    quantity, in the same order. classes: empty for regression; in binary tasks the second is the positive one.
    label_hash: of the test volumes and their labels; equal hashes allow two rows to be compared.
    """

    name: str
    task: Task
    rows: dict[str, Int[np.ndarray, " n"]]
    values: dict[str, Int[np.ndarray, " n"] | Float[np.ndarray, " n"]]
    classes: tuple[str, ...]
    label_hash: str
    notes: tuple[str, ...]


def read_labels(path: str | Path, targets: Sequence[str]) -> LabelTable:
    """Reads the columns `targets` of a TSV or CSV.

    Raises UsageError: no such file, not a table, no person column, no such target, an eye that is no eye, two rows of
    one person and eye that disagree.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no label file at {path}: expected a TSV or CSV with person_id and a column per target")
    if not targets:
        raise UsageError("no target was named: give at least one column of the label file with --target")
    try:
        with path.open(encoding="utf-8-sig") as file:
            delimiter = "\t" if "\t" in file.readline() else ","
        frame = pd.read_csv(path, sep=delimiter, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise UsageError(f"{path} is not a readable TSV or CSV ({str(error).splitlines()[0]})") from None
    frame.columns = pd.Index([str(name).strip() for name in frame.columns])
    person = next((name for name in PERSON_COLUMNS if name in frame.columns), None)
    if person is None:
        raise UsageError(f"{path} has neither person_id nor participant_id; its columns are {_listed(frame.columns)}")
    absent = [name for name in targets if name not in frame.columns]
    if absent:
        raise UsageError(f"{path} has no column {', '.join(absent)}; its columns are {_listed(frame.columns)}")
    people = frame[person].map(clean_person_id)  # as ingest does: AIREADI-1001 is 1001
    nameless = int((people == "").sum())
    if nameless:
        raise UsageError(f"{path}: {nameless} of {len(frame)} rows have no {person}; fill it in or remove them")
    eye = next((name for name in EYE_COLUMNS if name in frame.columns), None)
    eyes = pd.Series([""] * len(frame)) if eye is None else _eyes(frame[eye], path, str(eye))
    notes: list[str] = []
    values = {name: _unique(people, eyes, frame[name].str.strip(), name, path, notes) for name in targets}
    site = next((name for name in SITE_COLUMNS if name in frame.columns), None)
    sites = {} if site is None else dict(zip(people, frame[site].str.strip(), strict=True))
    return LabelTable(path, eye is not None and bool((eyes != "").any()), values, tuple(notes), sites)


def one_by_one(labels: LabelTable, targets: Sequence[str]) -> tuple[LabelTable, list[str]]:
    """Multi-label columns ("drusen;fluid", "none" or "0" for no label) as one column of 0 and 1 for each label.

    Returns the table with the new columns `target=label` and their names. Raises UsageError: more than MOST_CLASSES
    labels.
    """
    values = dict(labels.values)
    names: list[str] = []
    for target in targets:
        cells = {key: _label_set(text) for key, text in labels.values[target].items()}
        found = sorted(set().union(*cells.values()), key=str.lower)
        if not found or len(found) > MOST_CLASSES:
            raise UsageError(
                f"{target} holds {len(found)} different labels, expected 1 to {MOST_CLASSES}, parted by ; or |"
            )
        for label in found:
            names.append(f"{target}={label}")
            values[names[-1]] = {key: str(int(label in cell)) for key, cell in cells.items()}
    return replace(labels, values=values), names


def _label_set(text: str) -> frozenset[str]:
    parts = {part.strip() for part in re.split(r"[;|]", text)}
    return frozenset(part for part in parts if part and part.lower() not in {"none", "0"})


def _listed(names: pd.Index) -> str:
    shown = [str(name) for name in names[:30]]
    return ", ".join(shown) + (f" and {len(names) - 30} more" if len(names) > 30 else "")


def _eyes(column: pd.Series, path: Path, name: str) -> pd.Series:
    text = column.str.strip().str.lower()
    mapped = text.map(lambda value: "" if value in MISSING else _EYES.get(value))
    unknown = sorted(set(column[mapped.isna()]))
    if unknown:
        raise UsageError(
            f"{path}: {name} holds {', '.join(map(repr, unknown[:5]))} in {int(mapped.isna().sum())} rows, "
            "expected OD, OS, R, L, right, left, or OU, both or empty for both eyes"
        )
    return mapped


def _unique(
    people: pd.Series, eyes: pd.Series, column: pd.Series, target: str, path: Path, notes: list[str]
) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    disagreeing: set[tuple[str, str]] = set()
    repeated = missing = 0
    for person, eye, value in zip(people, eyes, column, strict=True):
        if value.lower() in MISSING:
            missing += 1
            continue
        # Volumes of unknown laterality ("") take a label only from a row that speaks of the whole person.
        keys = [(person, eye)] if eye else [(person, "OD"), (person, "OS"), (person, "")]
        repeated += any(key in found for key in keys)
        for key in keys:
            if key in found:
                if found[key] != value and not _same_number(found[key], value):
                    disagreeing.add(key)
            else:
                found[key] = value
    if disagreeing:
        raise UsageError(
            f"{path}: {target} is given twice with different values for {len(disagreeing)} of {len(found)} person-eye "
            "keys; keep one row per person and eye"
        )
    if repeated:
        notes.append(f"{target}: {repeated} label(s) are given more than once with equal values; one of each is used")
    if missing:
        notes.append(f"{target}: {missing} of {len(column)} label rows are empty or NaN and are left out")
    return found


def _same_number(one: str, other: str) -> bool:
    numbers = numbers_of([one, other])
    return numbers is not None and bool(numbers[0] == numbers[1])


def check_people(frame: pd.DataFrame) -> list[str]:
    """Notes on scans that stand under two people of one split.

    Raises UsageError if a person, or a scan under two names, is in more than one split, or a side is empty.
    """
    used = frame[frame["split"] != ""]
    spread = used.groupby("person_id")["split"].nunique()
    leaked = int((spread > 1).sum())
    if leaked:
        raise UsageError(
            f"leak: {leaked} of {len(spread)} people have volumes in more than one split, so a test person was trained "
            "on; split by person with octjepa split STORE and embed again"
        )
    copies = used[used["content_hash"] != ""].groupby("content_hash")
    doubled = int((copies["split"].nunique() > 1).sum())
    if doubled:
        raise UsageError(
            f"leak: the same pixels stand under two people in different splits, {doubled} time(s): one of them is a "
            "duplicate; correct the ids, ingest and split again"
        )
    for split in ("train", "test"):
        if split not in set(used["split"]):
            raise UsageError(f"no volume is in split {split!r}; run octjepa split STORE and embed again")
    twice = int((copies["person_id"].nunique() > 1).sum())
    if not twice:
        return []
    return [f"the same pixels stand under two people in one split, {twice} time(s): intervals count them as two people"]


def join(labels: LabelTable, frame: pd.DataFrame, target: str, task: str = "auto") -> Target:
    """The labels of `target` for the volumes of `frame`, by person and eye.

    Raises UsageError: no volume has a label, one class only, a class missing where it is needed, labels that do not
    fit `task`.
    """
    if task not in TASKS:
        raise UsageError(f"no task {task!r}: known are {', '.join(TASKS)}")
    found = labels.values[target]
    if not found:
        raise UsageError(f"{labels.path}: {target} holds no label at all, every row is empty or NaN")
    keys = list(zip(frame["person_id"], frame["eye"], strict=True))
    labelled = np.array([key in found for key in keys])
    notes: list[str] = []
    if not labelled.any():
        count = len(found if labels.by_eye else {person for person, _ in found})
        raise UsageError(
            f"{labels.path}: none of its {count} labels of {target} meets one of the {len(frame)} embedded "
            f"volumes; person ids look like {_shape([person for person, _ in found])} there and "
            f"{_shape(frame['person_id'])} here"
        )
    scanned = set(keys)
    known_people = {person for person, _ in keys}
    if labels.by_eye:
        lost = sum(key not in scanned for key in found if key[1])
        unit = "person-eye labels"
    else:
        lost = len({person for person, _ in found} - known_people)
        unit = "people with a label"
    if lost:
        notes.append(f"{target}: {lost} {unit} have no embedded scan and are left out")
    if not labelled.all():
        without = len({person for (person, _), has in zip(keys, labelled, strict=True) if not has})
        notes.append(
            f"{target}: {int((~labelled).sum())} of {len(frame)} volumes ({without} people) have no label and are "
            "left out"
        )
    splits = frame["split"].to_numpy()
    unsplit = int((labelled & (splits == "")).sum())
    if unsplit:
        notes.append(f"{target}: {unsplit} labelled volumes are in no split and are left out")
    used = np.flatnonzero(labelled & (splits != ""))
    texts = [found[keys[row]] for row in used]
    kind, classes, values = task_of(texts, target, task)
    rows = {split: used[splits[used] == split] for split in SPLITS}
    by_split = {split: values[splits[used] == split] for split in SPLITS}
    if classes:
        notes += [*beside_numbers(target, texts), *check_classes(target, classes, by_split)]
        if kind == "binary" and tuple(name.lower() for name in classes) not in PLAIN_PAIRS:
            notes.append(f"{target}: the positive class is {classes[1]!r} (against {classes[0]!r})")
    elif min(len(by_split["train"]), len(by_split["test"])) < 2:
        raise UsageError(
            f"{target}: {len(by_split['train'])} training and {len(by_split['test'])} test volumes have a value, "
            "a regression needs at least 2 of each"
        )
    volume_ids = frame["volume_id"].to_numpy()
    said = [classes[int(value)] if classes else repr(float(value)) for value in by_split["test"]]
    label_hash = _hash(target, [(str(volume_ids[row]), text) for row, text in zip(rows["test"], said, strict=True)])
    return Target(target, kind, rows, by_split, classes, label_hash, tuple(notes))


def test_set_hash(labels: LabelTable, frame: pd.DataFrame, target: str) -> str:
    """Names the labelled test volumes of `target` and their labels, whatever counts as a case of them later."""
    found = labels.values[target]
    pairs = []
    for person, eye, volume, split in zip(*(frame[c] for c in ("person_id", "eye", "volume_id", "split")), strict=True):
        if split == "test" and (person, eye) in found:
            numbers = numbers_of([found[person, eye]])
            pairs.append((str(volume), found[person, eye] if numbers is None else repr(float(numbers[0]))))
    return _hash(target, pairs)


def _hash(target: str, pairs: Sequence[tuple[str, str]]) -> str:
    told = [(target, ""), *sorted(pairs)]
    return hashlib.sha256("\x1e".join("\x1f".join(pair) for pair in told).encode()).hexdigest()


def _shape(ids: Sequence[str] | pd.Series) -> str:
    """The form of the commonest id with its content hidden: "AIREADI-1001" -> "AAAAAAA-9999"."""
    forms = [re.sub(r"[^\W\d_]", "A", re.sub(r"\d", "9", str(text))) for text in ids]
    return repr(max(sorted(set(forms)), key=forms.count))
