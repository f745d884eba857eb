"""Which task a column of labels is: two classes, several, ordered ones, or a quantity; and whether it can be probed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from jaxtyping import Float

from octjepa.embed.table import SPLITS
from octjepa.errors import UsageError
from octjepa.metrics.scores import Task

TASKS = ("auto", "classification", "binary", "multiclass", "ordinal", "multilabel", "regression")
MOST_CLASSES = 20
_FEW_NUMBERS = 10  # whole numbers up to so many are taken for classes
# Pairs of which everyone knows the positive one; of any other pair a note says it.
PLAIN_PAIRS = {("0", "1"), ("false", "true"), ("no", "yes"), ("absent", "present")}


def numbers_of(texts: Sequence[str]) -> Float[np.ndarray, " n"] | None:
    """The texts as finite numbers, or None if one of them is none."""
    try:
        numbers = np.array([float(text) for text in texts])
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None


def task_of(texts: list[str], target: str, task: str) -> tuple[Task, tuple[str, ...], np.ndarray]:
    """The task, its class names in order (numbers by size, text by alphabet) and the labels as codes or quantities."""
    numbers = numbers_of(texts)
    if numbers is None and task in ("auto", "regression"):
        _refuse_a_broken_quantity(texts, target)
    names = texts if numbers is None else [f"{number:.15g}" for number in numbers]
    classes = tuple(sorted(set(names), key=str.lower) if numbers is None else sorted(set(names), key=float))
    if task in ("auto", "classification"):
        few = numbers is None or (len(classes) <= _FEW_NUMBERS and bool((numbers == np.round(numbers)).all()))
        several = "multiclass" if few or task == "classification" else "regression"
        task = "binary" if len(classes) <= 2 else several
    if len(classes) < 2:
        raise UsageError(f"{target}: all {len(texts)} labelled volumes have one value, there is nothing to tell apart")
    if task == "regression":
        if numbers is None:
            raise UsageError(f"{target} holds text ({len(classes)} values), a regression needs numbers")
        return "regression", (), numbers
    if task == "ordinal" and (numbers is None or len(classes) < 3):
        raise UsageError(
            f"{target} holds {len(classes)} {'texts' if numbers is None else 'values'}: an ordinal task needs at least "
            "3 grades written as numbers, for their order"
        )
    if task == "binary" and len(classes) != 2:
        raise UsageError(f"{target} holds {len(classes)} values, a binary task needs 2; use --task multiclass")
    if len(classes) > MOST_CLASSES:
        raise UsageError(
            f"{target} holds {len(classes)} values, at most {MOST_CLASSES} classes are probed: is it an id, or a "
            "quantity (--task regression)?"
        )
    codes = {name: code for code, name in enumerate(classes)}
    return cast(Task, task), classes, np.array([codes[name] for name in names], dtype=np.int64)


def _refuse_a_broken_quantity(texts: Sequence[str], target: str) -> None:
    """Raises UsageError for many different numbers among which a few values are none: a slip, not names of classes."""
    finite = [text for text in texts if numbers_of([text]) is not None]
    if len(set(finite)) > _FEW_NUMBERS and 2 * len(finite) > len(texts):
        raise UsageError(
            f"{target}: {len(texts) - len(finite)} of {len(texts)} labelled volumes have a value that is no finite "
            f"number, the others {len(set(finite))} different numbers: correct them or leave the cells empty (classes: "
            "--task multiclass)"
        )


def beside_numbers(target: str, texts: Sequence[str]) -> list[str]:
    """A note on texts that became classes beside numbers: often a sign for a missing label, such as "?"."""
    strange = sorted({text for text in texts if numbers_of([text]) is None})
    if not strange or len(strange) == len(set(texts)):
        return []
    shown = ", ".join(map(repr, strange[:5]))
    return [f"{target}: {shown} beside numbers count as classes; leave such cells empty where no label is known"]


def check_classes(target: str, classes: tuple[str, ...], values: dict[str, np.ndarray]) -> list[str]:
    """Notes on classes that a split lacks; UsageError where the target cannot be learnt or measured without them."""
    lacking = {split: [name for code, name in enumerate(classes) if code not in values[split]] for split in SPLITS}
    counts = "; ".join(f"{split} {len(values[split])} volumes" for split in SPLITS)
    notes: list[str] = []
    if lacking["train"]:
        raise UsageError(f"{target}: split train has no volume of class {', '.join(lacking['train'])} ({counts})")
    if len(classes) - len(lacking["test"]) < 2:
        raise UsageError(f"{target}: split test has no volume of class {', '.join(lacking['test'])} ({counts})")
    if lacking["test"]:
        absent = ", ".join(lacking["test"])
        notes.append(f"{target}: split test has no volume of class {absent}; means run over the classes it has")
    if lacking["val"] and len(values["val"]):
        absent = ", ".join(lacking["val"])
        notes.append(f"{target}: split val has no volume of class {absent}; settings are chosen inside train")
    return notes
