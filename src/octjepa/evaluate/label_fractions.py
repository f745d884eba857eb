"""Label fractions: the same targets with labels of fewer training people, for a curve of metrics over labels.

People are drawn from train, as far as possible equally many of each class, in one order a seed and target: the first 10
of it are among the first 30. No person of val keeps a label, so that N labelled people are all that a probe has:
settings are then chosen by cross-validation among them. The test people stay. Calibrated probabilities keep the class
shares of all labelled training people, because the shares of the draw are not those of the test people. Raises
TooFewLabelsError where the draw cannot be made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from octjepa import keys
from octjepa.errors import UsageError
from octjepa.evaluate.calibration import calibration_shares
from octjepa.evaluate.cases import PreparedTarget
from octjepa.evaluate.features import plan_selection
from octjepa.evaluate.survival import MIN_EVENTS
from octjepa.evaluate.survival import TASK as SURVIVAL
from octjepa.evaluate.targets import Target


class TooFewLabelsError(UsageError):
    """Train holds too few people, or too few of a class, for a number of labelled people."""


MIN_PEOPLE = 2  # of each class: one to learn from and one to choose by


def parse_counts(text: str | None) -> tuple[int, ...]:
    """The numbers of people in a list such as "10,30,100", ascending. Raises UsageError for anything else."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) >= 2 * MIN_PEOPLE for part in parts):
        raise UsageError(
            f"--labelled {text!r} is not a list of numbers of people: give whole numbers of at least {2 * MIN_PEOPLE} "
            "with commas between them, such as 10,30,100"
        )
    return tuple(sorted({int(part) for part in parts}))


def people_order(target: Target, person_ids: np.ndarray, seed: int) -> list[str]:
    """The labelled people of train in the order of the draw: of each class in turn, until its people are used up.

    A person whose eyes have several classes counts for the class with the fewest people. A quantity has no classes, and
    its people come at random.
    """
    people, values = person_ids[target.indices["train"]], target.values["train"]
    codes = values if target.classes else np.zeros(len(people), dtype=np.int64)
    of_class = {int(code): set(people[codes == code].tolist()) for code in np.unique(codes)}
    groups: list[list[str]] = []
    taken: set[str] = set()
    for code in sorted(of_class, key=lambda code: (len(of_class[code]), code)):
        candidates = sorted(of_class[code] - taken)
        taken |= of_class[code]
        rng = keys.generator(seed, "labelled people", target.name, code)
        groups.append([candidates[position] for position in rng.permutation(len(candidates))])
    return list(_in_turn(groups))


def _in_turn(groups: Sequence[Sequence[str]]) -> Iterator[str]:
    for number in range(max(map(len, groups))):
        yield from (group[number] for group in groups if number < len(group))


def limit_target(target: Target, person_ids: np.ndarray, count: int, seed: int) -> Target:
    """`target` with the labels of `count` training people and of no person in val.

    `person_ids`: of every volume that the target's indices count. Raises TooFewLabelsError: train holds fewer
    people, or the drawn people fewer than two of a class, or of survival too few events.
    """
    order = people_order(target, person_ids, seed)
    if count > len(order):
        raise TooFewLabelsError(f"{target.name}: {count} labelled people were requested, train has {len(order)}")
    limited = _with_labels_of(target, person_ids, order[:count])
    people, values = person_ids[limited.indices["train"]], limited.values["train"]
    for code, name in enumerate(target.classes):
        n_people = len(set(people[values == code].tolist()))
        if n_people < MIN_PEOPLE:
            raise TooFewLabelsError(
                f"{target.name}: of {count} labelled people {n_people} are of class {name}, at least {MIN_PEOPLE} are "
                "needed"
            )
    events = int((values > 0).sum())
    if target.task == SURVIVAL and events < MIN_EVENTS:
        raise TooFewLabelsError(
            f"{target.name}: of {count} labelled people {events} had the event, at least {MIN_EVENTS} are needed"
        )
    return limited


def _with_labels_of(target: Target, person_ids: np.ndarray, drawn: Sequence[str]) -> Target:
    """`target` with the training labels of the people in `drawn`, and no labels in val."""
    is_drawn = np.isin(person_ids[target.indices["train"]], drawn)
    return replace(
        target,
        indices=target.indices | {"train": target.indices["train"][is_drawn], "val": target.indices["val"][:0]},
        values=target.values | {"train": target.values["train"][is_drawn], "val": target.values["val"][:0]},
        undrawn_shares=tuple(calibration_shares(target).tolist()) if target.classes else (),
    )


def limit_prepared(
    prepared: Sequence[PreparedTarget], person_ids: np.ndarray, count: int, seed: int
) -> tuple[list[PreparedTarget], list[str]]:
    """`limit_target` of every target, with its selection; and why targets are left out at this count.

    `fit_target` decides who is drawn. `test_target` has the labels of the same people: the majority and the counts of a
    target are those of its cases. `person_ids`: of every volume, or of every case if these are fitted.
    """
    limited, reasons = [], []
    for prepared_target in prepared:
        try:
            target = limit_target(prepared_target.fit_target, person_ids, count, seed)
            cases = _limit_cases(prepared_target, person_ids, np.unique(person_ids[target.indices["train"]]).tolist())
        except TooFewLabelsError as error:
            reasons.append(str(error))
            continue
        selection = plan_selection(target, person_ids, seed)
        limited.append(replace(prepared_target, fit_target=target, test_target=cases, selection=selection))
    return limited, reasons


def _limit_cases(prepared: PreparedTarget, person_ids: np.ndarray, drawn: Sequence[str]) -> Target:
    """`prepared.test_target` with the labels of the people in `drawn`.

    Raises TooFewLabelsError: no case of these people has a label, because their eyes differ.
    """
    if prepared.members is not None:
        person_ids = person_ids[[volumes[0] for volumes in prepared.members]]
    if not np.isin(person_ids[prepared.test_target.indices["train"]], drawn).any():
        raise TooFewLabelsError(
            f"{prepared.name}: {len(drawn)} labelled people were drawn, and no case has their label"
        )
    return _with_labels_of(prepared.test_target, person_ids, drawn)
