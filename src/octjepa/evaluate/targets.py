"""Targets: labels joined to embedded volumes, their task (classes, ordered classes or a quantity), and their checks.

Labels without scans and scans without labels are counted in notes; a target of one class and a person in two splits are
errors. Messages hold counts and the pattern of ids, never an id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from octjepa.embed.table import SPLITS
from octjepa.errors import UsageError, counted, counted_are
from octjepa.evaluate.labels import MAX_CLASSES, LabelTable, check_spelling, numbers_of
from octjepa.evaluate.survival import TASK, check_events
from octjepa.metrics.findings import FEWEST_TEST_PEOPLE
from octjepa.metrics.scores import Task
from octjepa.read.personal_data import UNKNOWN_PERSON

TASKS = ("auto", "classification", "binary", "multiclass", "ordinal", "multilabel", "regression", "survival")
_FEW_NUMBERS = 10  # up to so many different whole numbers are classes
# Pairs whose positive class is obvious: the second. For any other pair a note names it.
PLAIN_PAIRS = {("0", "1"), ("false", "true"), ("no", "yes"), ("absent", "present")}


def task_of(texts: list[str], target: str, task: str) -> tuple[Task, tuple[str, ...], np.ndarray]:
    """The task, its class names in order (numbers by size, text by alphabet) and the labels as codes or quantities."""
    numbers = numbers_of(texts)
    if numbers is None:
        _check_spelling(texts, target)
    if numbers is None and task in ("auto", "regression"):
        _check_quantity(texts, target)
    names = texts if numbers is None else [f"{number:.15g}" for number in numbers]
    classes = tuple(sorted(set(names), key=str.lower) if numbers is None else sorted(set(names), key=float))
    if task in ("auto", "classification"):
        few = numbers is None or (len(classes) <= _FEW_NUMBERS and bool((numbers == np.round(numbers)).all()))
        several = "multiclass" if few or task == "classification" else "regression"
        task = "binary" if len(classes) <= 2 else several
    if len(classes) < 2:
        raise UsageError(
            f"{target}: all {len(texts)} labelled volumes have the same value; expected at least two different values"
        )
    if task in ("regression", "survival"):
        if numbers is None:
            raise UsageError(f"{target} holds text ({len(classes)} values), a {task} needs numbers")
        return cast(Task, task), (), numbers
    if task == "ordinal" and (numbers is None or len(classes) < 3):
        raise UsageError(
            f"{target} holds {len(classes)} {'texts' if numbers is None else 'values'}: an ordinal task needs at least "
            "3 grades written as numbers, for their order"
        )
    if task == "binary" and len(classes) != 2:
        raise UsageError(f"{target} holds {len(classes)} values, a binary task needs 2; use --task multiclass")
    if len(classes) > MAX_CLASSES:
        raise UsageError(
            f"{target} holds {len(classes)} values, at most {MAX_CLASSES} classes are probed: is it an id, or a "
            "quantity (--task regression)?"
        )
    codes = {name: code for code, name in enumerate(classes)}
    return cast(Task, task), classes, np.array([codes[name] for name in names], dtype=np.int64)


def _check_spelling(texts: Sequence[str], target: str) -> None:
    """Raises UsageError for numbers with decimal commas, which are not numbers, and texts that differ only by case."""
    if numbers_of([text.replace(",", ".", 1) for text in texts]) is not None:
        raise UsageError(f"{target}: its numbers have decimal commas: write 0.5 for 0,5")
    check_spelling(target, texts)


def _check_quantity(texts: Sequence[str], target: str) -> None:
    """Raises UsageError for many different numbers among which a few values are none: a slip, not names of classes."""
    finite = [text for text in texts if numbers_of([text]) is not None]
    if len(set(finite)) > _FEW_NUMBERS and 2 * len(finite) > len(texts):
        raise UsageError(
            f"{target}: {len(texts) - len(finite)} of {len(texts)} labelled volumes have a value that is not a finite "
            f"number, the others {len(set(finite))} different numbers: correct them or leave the cells empty (classes: "
            "--task multiclass)"
        )


def have_order(kind: Task, classes: tuple[str, ...]) -> bool:
    """Whether labels have an order: quantities, grades, two numbers and `PLAIN_PAIRS`; other texts have none."""
    if kind == "binary":
        return numbers_of(classes) is not None or is_plain_pair(classes)
    return kind != "multiclass"


def is_plain_pair(classes: tuple[str, ...]) -> bool:
    """Whether the classes are a pair whose second class is obviously the positive class."""
    return tuple(name.lower() for name in classes) in PLAIN_PAIRS


def non_numeric_notes(target: str, texts: Sequence[str]) -> list[str]:
    """A note on texts that became classes next to numbers: often a sign for a missing label, such as "?"."""
    strange = sorted({text for text in texts if numbers_of([text]) is None})
    if not strange or len(strange) == len(set(texts)):
        return []
    shown = ", ".join(map(repr, strange[:5]))
    return [f"{target}: {shown} next to numbers count as classes; leave such cells empty if no label is known"]


def check_classes(
    target: str, classes: tuple[str, ...], values: dict[str, np.ndarray], people_of: Mapping[str, int] | None = None
) -> list[str]:
    """Notes on classes that a split lacks.

    people_of: class -> number of people with that class, in all splits; it decides which advice an error gives.
    Raises UsageError if the target cannot be learned or measured without the classes that a split lacks.
    """
    lacking = {split: [name for code, name in enumerate(classes) if code not in values[split]] for split in SPLITS}
    notes: list[str] = []
    required = "train" if lacking["train"] else "test" if len(classes) - len(lacking["test"]) < 2 else ""
    if required:
        counts = "; ".join(
            f"{split} {', '.join(f'{(values[split] == code).sum()} of {name}' for code, name in enumerate(classes))}"
            for split in SPLITS
        )
        problem = (
            f"{target}: split {required} has no volume of class {', '.join(lacking[required])} (volumes: {counts})."
        )
        rarest = min((people_of[name] for name in lacking[required]), default=0) if people_of else len(SPLITS)
        if rarest < len(SPLITS):  # no split can hold the class on every side
            quantity = numbers_of(list(classes)) is not None and len(classes) > 2
            raise UsageError(
                f"{problem} A class needs at least {len(SPLITS)} people, one for each split, and has "
                f"{counted(rarest, 'person')} here; a conclusion needs {FEWEST_TEST_PEOPLE} test people. Label more "
                "people" + (", or use --task regression, because the labels are numbers" if quantity else "")
            )
        raise UsageError(
            f"{problem} Balance the splits over it with `octjepa split STORE --by stratified "
            f"--shares 0.6,0.1,0.3 --labels LABELS --target {target}`, and embed again "
            "(before that pretrain again, if on this store); or label more people"
        )
    if lacking["test"]:
        absent = ", ".join(lacking["test"])
        notes.append(f"{target}: split test has no volume of class {absent}; means run over the classes it has")
    if lacking["val"] and len(values["val"]):
        absent = ", ".join(lacking["val"])
        notes.append(f"{target}: split val has no volume of class {absent}; settings are chosen inside train")
    return notes


@dataclass(frozen=True)
class Target:
    """One target joined to a table of embeddings.

    indices: positions of the labelled volumes in the table, by split. values: class codes (positions in `classes`),
    the quantity, or of survival the signed time (see `survival`), in the same order. classes: empty for the last two;
    in binary tasks the second is the positive one.
    label_hash: of the test volumes and their labels; equal hashes allow two rows to be compared.
    undrawn_shares: class shares of the training volumes before people were drawn by class; empty if none were drawn.
    """

    name: str
    task: Task
    indices: dict[str, Int[np.ndarray, " n"]]
    values: dict[str, Int[np.ndarray, " n"] | Float[np.ndarray, " n"]]
    classes: tuple[str, ...]
    label_hash: str
    notes: tuple[str, ...]
    undrawn_shares: tuple[float, ...] = ()


def check_people(frame: pd.DataFrame) -> list[str]:
    """Notes on scans that are stored under two people of one split.

    Raises UsageError if a person, or a scan under two names, is in more than one split, or a side is empty.
    """
    used = frame[frame["split"] != ""]
    spread = used.groupby("person_id")["split"].nunique()
    leaked = int((spread > 1).sum())
    if leaked:
        raise UsageError(
            f"leak: {leaked} of {counted(len(spread), 'person')} in more than one split, so a test person "
            "was trained on; split by person with octjepa split STORE and embed again"
        )
    copies = used[used["content_hash"] != ""].groupby("content_hash")
    doubled = int((copies["split"].nunique() > 1).sum())
    if doubled:
        raise UsageError(
            f"leak: the same pixels are stored under two people in different splits, {counted(doubled, 'time')}: one "
            "of them is a duplicate; correct the ids, ingest and split again"
        )
    for split in ("train", "test"):
        if split not in set(used["split"]):
            if (people := frame["person_id"].nunique()) < len(SPLITS):
                raise UsageError(
                    f"the embeddings are of {counted(people, 'person')}: a probe needs at least {len(SPLITS)} people, "
                    f"because it splits by person, and {FEWEST_TEST_PEOPLE} test people for a conclusion. Add scans of "
                    "more people. Layers and thickness need no other people: octjepa segment SCAN... --out DIR"
                )
            few = f"; a conclusion needs {FEWEST_TEST_PEOPLE} test people" if people < 3 * FEWEST_TEST_PEOPLE else ""
            raise UsageError(
                f"no volume is in split {split!r}: run `octjepa split STORE --by stratified --shares 0.6,0.1,0.3`, "
                f"and embed again (embeddings of {counted(people, 'person')}{few})"
            )
    twice = int((copies["person_id"].nunique() > 1).sum())
    if not twice:
        return []
    return [
        f"the same pixels are stored under two people in one split, {counted(twice, 'time')}: intervals count "
        "them as two people"
    ]


def join_labels(labels: LabelTable, frame: pd.DataFrame, target: str, task: str = "auto") -> Target:
    """The labels of `target` for the volumes of `frame`, by person and eye.

    Raises UsageError: no volume has a label, one class only, a class missing if it is needed, labels that do not
    fit `task`.
    """
    if task not in TASKS:
        raise UsageError(f"no task {task!r}: known are {', '.join(TASKS)}")
    values, labelled_people = labels.values[target], labels.people(target)
    if not labelled_people:
        raise UsageError(f"{labels.path}: {target} holds no label at all, every row is empty or NaN")
    keys = list(zip(frame["person_id"], frame["eye"], strict=True))
    texts_of_volumes = labels.texts(target, frame)
    labelled = np.array([text is not None for text in texts_of_volumes])
    if not labelled.any():
        if labels.by_visit and labelled_people & set(frame["person_id"]):
            raise UsageError(
                f"{labels.path}: its people are in the table, but none of its {len(labels.visit_names)} visits is: "
                f"expected in the column {labels.visit_column} the pseudonym of the store (v-...), or the text that "
                "the scan's file states (study UID, date, visit of its JSON file, or file name of a single B-scan); "
                "rename the column if it names no visit"
            )
        count = len(values if labels.by_eye else labelled_people)
        raise UsageError(
            f"{labels.path}: none of its {count} labels of {target} meets one of the {len(frame)} embedded "
            f"volumes; person ids look like {_id_pattern(sorted(labelled_people))} there and "
            f"{_id_pattern(frame['person_id'])} here{_without_zeros(labelled_people, frame)}{_people_unknown(frame)}"
        )
    scanned = set(keys)
    if labels.by_eye and not labels.by_visit:
        without_scan, unit = sum(key not in scanned for key in values if key[1]), "person-eye labels"
    else:
        people = {person for person, _ in keys}
        without_scan, unit = len(labelled_people - people), "people with a label"
    notes = _visit_notes(labels, frame, target)
    if without_scan:
        zeros = _without_zeros(labelled_people, frame)
        notes.append(f"{target}: {without_scan} {unit} have no embedded scan and are left out{zeros}")
    if not labelled.all():
        people = {person for (person, _), has_label in zip(keys, labelled, strict=True) if not has_label}
        notes.append(
            f"{target}: {int((~labelled).sum())} of {len(frame)} volumes "
            f"({len(people)} {'person' if len(people) == 1 else 'people'}) have no label and are left out"
        )
    splits = frame["split"].to_numpy()
    unsplit = int((labelled & (splits == "")).sum())
    if unsplit:
        notes.append(f"{target}: {unsplit} labelled volumes are in no split and are left out")
    used = np.flatnonzero(labelled & (splits != ""))
    texts = [str(texts_of_volumes[position]) for position in used]
    kind, classes, codes = task_of(texts, target, task)
    indices = {split: used[splits[used] == split] for split in SPLITS}
    by_split = {split: codes[splits[used] == split] for split in SPLITS}
    if classes:
        persons = frame["person_id"].to_numpy()[used]
        people_of = {name: len(set(persons[codes == code])) for code, name in enumerate(classes)}
        notes += [*non_numeric_notes(target, texts), *check_classes(target, classes, by_split, people_of)]
        if kind == "binary" and not is_plain_pair(classes):
            notes.append(
                f"{target}: the positive class is {classes[1]!r} (against {classes[0]!r}): for the other one, write 1 "
                f"in place of {classes[0]!r} and 0 in place of {classes[1]!r} in the labels"
            )
    elif min(len(by_split["train"]), len(by_split["test"])) < 2:
        raise UsageError(
            f"{target}: {len(by_split['train'])} training and {len(by_split['test'])} test volumes have a value, "
            "a regression needs at least 2 of each"
        )
    if kind == TASK:
        check_events(target, by_split)
    test_ids = frame["volume_id"].to_numpy()[indices["test"]]
    test_labels = [classes[int(value)] if classes else repr(float(value)) for value in by_split["test"]]
    label_hash = _hash(target, list(zip(map(str, test_ids), test_labels, strict=True)))
    return Target(target, kind, indices, by_split, classes, label_hash, tuple(notes))


def test_set_hash(labels: LabelTable, frame: pd.DataFrame, target: str) -> str:
    """Hash of the labelled test volumes of `target` and their labels, the same for every unit of analysis."""
    pairs = []
    for text, volume, split in zip(labels.texts(target, frame), frame["volume_id"], frame["split"], strict=True):
        if split == "test" and text is not None:
            numbers = numbers_of([text])
            pairs.append((str(volume), text if numbers is None else repr(float(numbers[0]))))
    return _hash(target, pairs)


def _visit_notes(labels: LabelTable, frame: pd.DataFrame, target: str) -> list[str]:
    """Notes on labels by visit: visits without a scan, and volumes whose file names no visit."""
    if not labels.by_visit:
        visits = frame[frame["visit"] != ""].groupby("person_id")["visit"].nunique() if "visit" in frame else None
        several = 0 if visits is None else int((visits > 1).sum())
        text = f"{target}: several visits of {counted(several, 'person')}, with one label for all visits of a person"
        return [f"{text} (a column visit in the labels tells them apart)"] if several else []
    names_of_volumes = frame["visit"] if "visit" in frame else pd.Series([""] * len(frame))
    scanned = set(zip(frame["person_id"], names_of_volumes, strict=True))
    absent = sum(
        not any((person, name) in scanned for name in names) for (person, _), names in labels.visit_names.items()
    )
    notes = []
    if absent:
        notes.append(f"{target}: {absent} of {len(labels.visit_names)} visits with a label have no embedded scan")
    if nameless := int((names_of_volumes == "").sum()):
        notes.append(
            f"{target}: {counted(nameless, 'volume')} without a visit: labels come from rows without a visit only"
        )
    return notes


def _hash(target: str, pairs: Sequence[tuple[str, str]]) -> str:
    parts = [(target, ""), *sorted(pairs)]
    return hashlib.sha256("\x1e".join("\x1f".join(pair) for pair in parts).encode()).hexdigest()


def _id_pattern(ids: Sequence[str] | pd.Series) -> str:
    """The form of the commonest id with its content hidden: "AIREADI-1001" -> "AAAAAAA-9999"."""
    forms = [re.sub(r"[^\W\d_]", "A", re.sub(r"\d", "9", str(text))) for text in ids]
    return repr(max(sorted(set(forms)), key=forms.count))


def _people_unknown(frame: pd.DataFrame) -> str:
    """Advice if volumes name no person, so that no label can meet them; "" if all name a person."""
    unknown = int(frame["person_id"].astype(str).str.startswith(UNKNOWN_PERSON).sum())
    if not unknown:
        return ""
    return (
        f". {counted_are(unknown, 'volume')} without a person id ({UNKNOWN_PERSON}...): put a manifest.tsv with "
        "person_id and filepath next to the scans or pictures, then ingest and embed again"
    )


def _without_zeros(labelled: set[str], frame: pd.DataFrame) -> str:
    """Half a sentence where people of the labels would be people of `frame` with zeros before their ids, else ""."""
    scanned = set(frame["person_id"])
    bare = {person.lstrip("0") or "0" for person in scanned - labelled if person.startswith("0")}
    count = len({person for person in labelled - scanned if person in bare})
    if not count:
        return ""
    return (
        f"; the ids of {counted(count, 'person')} in the labels lack only zeros at the start, which spreadsheets remove"
    )
