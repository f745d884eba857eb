"""The unit of analysis (volume, eye or person) and how its volumes become one case.

`level` is the unit. `several` is the rule for a case of more than one volume: `features` (mean of their features; of a
person first within each eye, so that an eye scanned often does not outweigh the other), `scores` (probes are fitted on
volumes, and their scores are averaged over a case), `best_quality` (the volume with the highest quality in the store)
or `first_visit` (the volumes of a person's first visit, then the mean of their features). A person's label is that of
the scanned eyes: where they differ the worse one if labels have an order, the mean of a quantity; where classes have no
order the person is left out and counted. A volume in no split belongs to no eye's or person's case. If labels are
given by visit, a case is one visit of an eye.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from octjepa.embed.table import FEATURE_COLUMNS, Embeddings
from octjepa.errors import UsageError, counted, counted_are
from octjepa.evaluate.features import Selection, plan_selection
from octjepa.evaluate.labels import PERSON_COLUMNS, LabelTable, numbers_of, read_table, visit_pseudonyms
from octjepa.evaluate.results import CaseProtocol
from octjepa.evaluate.subgroups import GROUP_COLUMNS, coverage_faults
from octjepa.evaluate.targets import Target, have_order, join_labels, task_of
from octjepa.metrics.findings import Fault, Findings
from octjepa.metrics.scores import Predictions
from octjepa.read.personal_data import clean_person_id

LEVELS = ("volume", "eye", "person")
RULES = {
    "features": "mean of the features of its volumes",
    "scores": "mean of the scores of its volumes",
    "best_quality": "its volume of best quality",
    "first_visit": "mean of the features of its volumes of the first visit",
}
_DICOM_DATE = re.compile(r"(19|20)[0-9]{6}")


@dataclass(frozen=True)
class Cases:
    """The cases of a volume table.

    names: of the cases. members: positions of each case's volumes in the table. about: the protocol. joined: notes on
    visits and volumes that the rule joins or leaves out. by_visit: each visit is a case.
    """

    level: str
    names: list[str]
    members: list[Int[np.ndarray, " _"]]
    about: CaseProtocol
    joined: tuple[str, ...] = ()
    by_visit: bool = False

    @property
    def averages_scores(self) -> bool:
        """Whether probes are fitted on volumes and measured on the mean score of a case."""
        return self.level != "volume" and self.about.several == "scores"

    def frame(self, volumes: pd.DataFrame) -> pd.DataFrame:
        """The keys of each case; its `volume_id` is the case's name."""
        first = volumes.iloc[[positions[0] for positions in self.members]].reset_index(drop=True)
        if self.level == "volume":
            return first
        first["volume_id"] = self.names
        first["device"] = ["+".join(sorted(set(volumes["device"].iloc[positions]))) for positions in self.members]
        if self.level == "person":
            first["eye"] = ""
        return first

    def aggregate(self, table: Embeddings) -> Embeddings:
        """The embedding table of the cases, with the mean of each case's features."""
        if self.level == "volume":
            return table.take(int(positions[0]) for positions in self.members)
        eyes = table.frame["eye"].to_numpy()

        def mean(block: Float[np.ndarray, "volumes features"]) -> Float[np.ndarray, "cases features"]:
            means = []
            for case in self.members:
                of_eyes = [block[case[eyes[case] == eye]].mean(axis=0) for eye in np.unique(eyes[case])]
                means.append(np.mean(of_eyes, axis=0))
            return np.stack(means).astype(np.float32)

        blocks: dict[str, Any] = {name: mean(getattr(table, name)) for name in (*FEATURE_COLUMNS, *table.unpooled)}
        return replace(table, frame=self.frame(table.frame), **blocks)

    def notes(self) -> list[str]:
        """Cases that the protocol leaves out, and facts that it cannot tell."""
        about, notes = self.about, list(self.joined)
        if about.volumes_in_no_split:
            notes.append(
                f"{counted_are(about.volumes_in_no_split, 'volume')} in no split, so in no {self.level}'s case"
            )
        if self.level == "person" and about.people_with_one_eye:
            one_eye, people = about.people_with_one_eye, about.people
            notes.append(f"{one_eye} of {counted(people, 'person')} with one scanned eye only: their case is that eye")
        if self.level == "eye" and about.volumes_of_unknown_eye:
            notes.append(
                f"separate cases, because the eye is unknown: {counted(about.volumes_of_unknown_eye, 'volume')}"
            )
        return notes


def case_names(frame: pd.DataFrame, level: str, by_visit: bool = False) -> list[str]:
    """The case of each volume; a volume of unknown eye is a separate eye. `by_visit`: each visit is a case."""
    if level != "eye":
        return list(frame["volume_id" if level == "volume" else "person_id"])
    keys = zip(frame["person_id"], frame["eye"], frame["volume_id"], strict=True)
    names = [f"{person} {eye or volume}" for person, eye, volume in keys]
    return [f"{name} {visit}".strip() for name, visit in zip(names, frame["visit"], strict=True)] if by_visit else names


def check_level(level: str, by_visit: bool) -> None:
    """Raises UsageError: an unknown level, or people as cases of labels by visit, whose scores would be averaged."""
    if level not in LEVELS:
        raise UsageError(f"no level {level!r}: known are {', '.join(LEVELS)}")
    if by_visit and level == "person":
        raise UsageError("labels by visit are those of an eye at a visit: use --level volume or eye")


def group_cases(
    frame: pd.DataFrame,
    level: str,
    several: str,
    visit_order: Mapping[str, float] | None = None,
    by_visit: bool = False,
) -> Cases:
    """The cases of a table's volumes under the rule `several`; of eyes and people those with a volume in a split.

    `by_visit`: labels differ between the visits of an eye, so each visit is a case. People have one split
    (`targets.check_people`), and so do the volumes of a case. Raises UsageError: an unknown level or rule, visits
    without a known order, no quality to select by, people as cases of labels by visit.
    """
    check_level(level, by_visit)
    if several not in RULES:
        raise UsageError(f"no rule for several volumes {several!r}: known are {', '.join(RULES)}")
    in_split = np.arange(len(frame)) if level == "volume" else np.flatnonzero(frame["split"] != "")
    used = in_split[_first_visits(frame.iloc[in_split], visit_order)] if several == "first_visit" else in_split
    names = np.array(case_names(frame.iloc[used], level, by_visit))
    if level == "volume":
        members = [np.array([position]) for position in used]
    else:
        order = np.argsort(names, kind="stable")
        names, starts = np.unique(names[order], return_index=True)
        members = [used[positions] for positions in np.split(order, starts[1:])]
        if several == "best_quality":
            members = [_best_volume(frame, positions) for positions in members]
    known_volumes = frame.iloc[in_split]
    eyes_per_person = known_volumes[known_volumes["eye"] != ""].groupby("person_id")["eye"].nunique()
    about = CaseProtocol(
        level=level,
        several=several,
        cases=len(names),
        volumes=len(frame),
        volumes_used=int(sum(map(len, members))),
        volumes_in_no_split=len(frame) - len(in_split),
        people=int(known_volumes["person_id"].nunique()),
        people_with_one_eye=int((eyes_per_person == 1).sum()),
        volumes_of_unknown_eye=int((known_volumes["eye"] == "").sum()),
        text=f"a case is a{'n' * (level == 'eye')} {level}" + (f": {RULES[several]}" if level != "volume" else ""),
    )
    joined = _joined_notes(frame, in_split, members, about)
    return Cases(level, names.tolist(), members, about, joined, by_visit)


def _joined_notes(
    frame: pd.DataFrame, in_split: Int[np.ndarray, " n"], members: Sequence[np.ndarray], about: CaseProtocol
) -> tuple[str, ...]:
    """Notes on volumes that the rule leaves out, and on cases that join several visits."""
    notes = []
    names = frame["visit"].to_numpy() if "visit" in frame else np.full(len(frame), "")
    used = np.concatenate(members) if members else np.array([], dtype=int)
    if left_out := len(in_split) - len(used):
        others = np.setdiff1d(in_split, used)
        volumes = frame.iloc[others]
        visits = len(set(zip(volumes["person_id"], names[others], strict=True)))
        what = (
            f"of {counted(visits, 'later visit')}"
            if about.several == "first_visit"
            else "that are not the best of their case"
        )
        people = volumes["person_id"].nunique()
        notes.append(
            f"{about.several} leaves out {left_out} of {len(in_split)} volumes {what} ({counted(people, 'person')})"
        )
    several_visits = sum(len(set(names[positions]) - {""}) > 1 for positions in members)
    if several_visits:
        notes.append(
            f"{several_visits} of {len(members)} cases join several visits: name visits in the labels, or use "
            "--several first_visit, if the state of an eye may change between them"
        )
    return tuple(notes)


def _first_visits(frame: pd.DataFrame, visit_order: Mapping[str, float] | None) -> Int[np.ndarray, " n"]:
    """Positions of the volumes of each person's first visit. Visit names are pseudonyms: only a table orders them."""
    order = visit_order or {}
    first: dict[str, str] = {}
    for person, visits in frame.groupby("person_id")["visit"]:
        names = sorted(set(visits))
        unknown = [name for name in names if name not in order]
        if len(names) > 1 and unknown:
            raise UsageError(
                f"a person has {len(names)} visits and the order of {len(unknown)} is unknown (the store keeps "
                "pseudonyms, no dates): give --visit-order a TSV with the columns visit and order, or another rule"
            )
        first[str(person)] = min(names, key=lambda name: order.get(name, 0.0))
    return np.flatnonzero(frame["visit"] == frame["person_id"].map(first))


def read_visit_order(path: Path) -> dict[str, float]:
    """Pseudonym of a visit -> its order, of a TSV or CSV with the columns visit and order, and person_id if visits have
    the names that the scans' files state. Dates become days. Raises UsageError.
    """
    expected = (
        "expected a TSV with the columns visit (as in the store, each once; or with person_id as the scans' files name "
        "it) and order (a number, such as days since the first, or a date such as 2024-03-05 or 20240305)"
    )
    if not path.is_file():
        raise UsageError(f"no order of visits at {path}: {expected}")
    try:
        frame = read_table(path)
        cells, orders = frame["visit"].str.strip().tolist(), frame["order"].str.strip().tolist()
    except (UsageError, KeyError, AttributeError) as error:
        why = str(error) if isinstance(error, UsageError) else "a column is missing or there twice"
        raise UsageError(f"{path} is not an order of visits ({why}): {expected}") from None
    column = next((name for name in PERSON_COLUMNS if name in frame), None)
    people = [""] * len(cells) if column is None else frame[column].map(clean_person_id).tolist()
    numbers = _days(orders)
    keys = list(zip(people, cells, strict=True))
    if numbers is None or len(set(keys)) < len(keys):
        what = "an order that is neither number nor date" if numbers is None else "a visit more than once"
        raise UsageError(f"{path} is not an order of visits, it has {what}: {expected}")
    return {
        name: number
        for (person, cell), number in zip(keys, numbers, strict=True)
        for name in (visit_pseudonyms(person, cell) if person else (cell,))
    }


def _days(texts: Sequence[str]) -> list[float] | None:
    """The texts as numbers, or dates as days; None if one of them is neither.

    Eight digits are a date as DICOM writes it (20240305) if all texts are such dates of 1900 to 2099: differences
    between them as numbers would not be days.
    """
    numbers = numbers_of(texts)
    if numbers is not None and not all(_DICOM_DATE.fullmatch(text) for text in texts):
        return numbers.tolist()
    try:
        return [float(date.fromisoformat(text).toordinal()) for text in texts]
    except ValueError:
        return None if numbers is None else numbers.tolist()


def _best_volume(frame: pd.DataFrame, positions: Int[np.ndarray, " n"]) -> Int[np.ndarray, "1"]:
    quality = frame["quality"].to_numpy()[positions]
    if len(positions) > 1 and np.isnan(quality).all():
        raise UsageError("best_quality: the table has no quality of volumes; embed again, or use another rule")
    best = int(np.argmax(np.nan_to_num(quality, nan=-1.0)))  # the first of equals
    return positions[best : best + 1]


def person_labels(labels: LabelTable, frame: pd.DataFrame, target: str, task: str) -> tuple[LabelTable, str, list[str]]:
    """The labels of `target` by person (eye ""), their task, and notes on eyes that differ.

    A person's eyes are the eyes with a volume of `frame` in a split. Raises UsageError as `task_of`.
    """
    labelled = labels.values[target]
    eyes_by_person: dict[str, dict[str, str]] = {}
    frame = frame[frame["split"] != ""]
    for person, eye in zip(frame["person_id"], frame["eye"], strict=True):
        if (person, eye) in labelled:
            eyes_by_person.setdefault(person, {})[eye] = labelled[person, eye]
    if not eyes_by_person:
        return labels, task, []  # `join_labels` reports that nothing matches
    texts = [text for eyes in eyes_by_person.values() for text in eyes.values()]
    kind, classes, codes = task_of(texts, target, task)
    ordered = have_order(kind, classes)
    code = dict(zip(texts, codes.tolist(), strict=True))
    values: dict[tuple[str, str], str] = {}
    differing = 0
    for person, eyes in eyes_by_person.items():
        distinct = sorted(set(eyes.values()))
        numbers = numbers_of(distinct)
        if len(set(distinct if numbers is None else numbers.tolist())) > 1:
            differing += 1
            if not ordered:
                continue
            if kind == "regression":
                distinct = [repr(float(np.mean([code[text] for text in eyes.values()])))]
            elif kind == "survival":  # the earliest event; of two without one the longer follow-up
                distinct = [max(distinct, key=lambda text: 1 / code[text])]
            else:
                distinct = [max(distinct, key=lambda text: code[text])]
        values[person, ""] = distinct[0]
    # Whoever has a label and no scan stays in the table, so that `join_labels` counts them.
    unscanned = labels.people(target) - set(frame["person_id"])
    values |= {(person, ""): text for (person, _), text in labelled.items() if person in unscanned}
    notes = []
    if differing:
        rules = {
            "regression": "their mean is the person's",
            "survival": "the earliest event is the person's",
        }
        rule = rules.get(kind, "the worse eye's is the person's")
        rule = rule if ordered else f"{counted_are(differing, 'person')} left out"
        notes.append(f"{target}: the eyes of {counted(differing, 'person')} have different labels; {rule}")
    return replace(labels, by_eye=False, values={target: values}), kind, notes


def average_scores(
    predictions: Predictions, tested: Int[np.ndarray, " n"], members: Sequence[np.ndarray], truth: np.ndarray
) -> Predictions:
    """Predictions of cases: the mean over those of their volumes that were tested.

    `tested`: table positions of the volumes of `predictions`. `members`: table positions of each case's volumes.
    `truth`: of the cases.
    """
    index = {int(position): number for number, position in enumerate(tested)}
    of_cases = [[index[int(position)] for position in case if int(position) in index] for case in members]
    blocks = (predictions.scores, predictions.calibrated)
    scores, calibrated = (np.stack([block[volumes].mean(axis=0) for volumes in of_cases]) for block in blocks)
    return Predictions(truth, scores, calibrated)


@dataclass(frozen=True)
class PreparedTarget:
    """A target as it is fitted and as it is tested: the same, unless scores of volumes become scores of cases.

    members: positions of the volumes of every case if they differ, else None. notes, faults: what a reader must know
    of its labels, classes and groups.
    """

    fit_target: Target
    test_target: Target
    selection: Selection
    members: list[np.ndarray] | None
    notes: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def name(self) -> str:
        """The target's name."""
        return self.test_target.name

    def predictions(self, predictions: Predictions) -> Predictions:
        """Predictions for `fit_target`'s test volumes as predictions for `test_target`'s test cases."""
        if self.members is None:
            return predictions
        cases = [self.members[position] for position in self.test_target.indices["test"]]
        return average_scores(predictions, self.fit_target.indices["test"], cases, self.test_target.values["test"])

    def report(self, findings: Findings) -> None:
        """Adds `notes` and `faults` to `findings`."""
        findings.add_notes(self.notes)
        for fault in self.faults:
            findings.add_fault(fault.kind, fault.what)


def prepare_targets(
    labels: LabelTable, volumes: pd.DataFrame, cases: Cases, names: Sequence[str], task: str, seed: int
) -> tuple[list[PreparedTarget], dict[str, str]]:
    """Every target of `names` that can be measured, and by name why the others are left out.

    Raises UsageError if none can; of a single target its own error.
    """
    prepared: list[PreparedTarget] = []
    left_out: dict[str, str] = {}
    for name in names:
        try:
            prepared.append(_prepare_target(labels, volumes, cases, name, task, seed))
        except UsageError as error:
            if len(names) == 1:
                raise
            left_out[name] = f"target {name} is left out: {error}"
    if not prepared:
        raise UsageError(f"none of the {len(names)} targets can be measured:\n  " + "\n  ".join(left_out.values()))
    return prepared, left_out


def _prepare_target(
    labels: LabelTable, volumes: pd.DataFrame, cases: Cases, name: str, task: str, seed: int
) -> PreparedTarget:
    frame = cases.frame(volumes)
    case_labels, kind, notes = labels, task, list[str]()
    if cases.level == "person":
        case_labels, kind, notes = person_labels(labels, volumes, name, task)
    test_target = fit_target = join_labels(case_labels, frame, name, kind)
    if cases.averages_scores:
        fit_target = join_labels(labels, volumes, name, kind)
        if fit_target.classes != test_target.classes:
            raise UsageError(
                f"{name}: volumes have the classes {', '.join(fit_target.classes)}, people "
                f"{', '.join(test_target.classes)}: their scores cannot be averaged; use --several features"
            )
    notes += test_target.notes
    columns = GROUP_COLUMNS if cases.level == "volume" else GROUP_COLUMNS[:1]  # a case may be of several devices
    faults = tuple(Fault(kind, text) for kind, text in coverage_faults(frame, labels, test_target, columns))
    people = (volumes if cases.averages_scores else frame)["person_id"].to_numpy(dtype=str)
    selection = plan_selection(fit_target, people, seed)
    if selection.by == "fixed":
        notes.append(f"{name}: too few people per class to choose settings; the middle of each grid is used")
    members = cases.members if cases.averages_scores else None
    return PreparedTarget(fit_target, test_target, selection, members, tuple(notes), faults)
