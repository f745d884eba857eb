"""Several volumes of an eye or a person: what counts as one case, and how its volumes become one.

`level` is the case: a volume, an eye or a person. `several` is the rule where a case has more than one volume:
features (their mean; for a person first within each eye, so that an eye scanned often does not outweigh the other),
scores (probes learn from volumes, their scores of a case are averaged), best_quality (one volume, the one the store
rates highest), first_visit (the volumes of a person's first visit, then the mean of their features). Both are named in
the result. A person's label is that of the eyes that were scanned: of two that differ the worse one where labels have
an order, the mean of a quantity; where classes have no order such a person is left out and counted. A volume that is in
no split belongs to no eye's or person's case, and says nothing of a person's label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from octjepa.embed.alignment import NamedTables
from octjepa.embed.table import FEATURE_COLUMNS, Embeddings
from octjepa.errors import UsageError
from octjepa.metrics.scores import Predictions
from octjepa.probe.features import Selection, plan_selection
from octjepa.probe.labels import LabelTable
from octjepa.probe.results import ProbeResult, describe_target
from octjepa.probe.subgroups import GROUP_COLUMNS, coverage_faults
from octjepa.probe.targets import Target, join_labels, task_of

LEVELS = ("volume", "eye", "person")
RULES = ("features", "scores", "best_quality", "first_visit")
_SAID = {
    "features": "mean of the features of its volumes",
    "scores": "mean of the scores of its volumes",
    "best_quality": "its volume of best quality",
    "first_visit": "mean of the features of its volumes of the first visit",
}


@dataclass(frozen=True)
class Cases:
    """The cases of a table and their volumes.

    names: a name for each case; members: rows of the volume table, for each case; about: what the result says of the
    protocol.
    """

    level: str
    names: list[str]
    members: list[Int[np.ndarray, " _"]]
    about: dict[str, Any]

    def frame(self, volumes: pd.DataFrame) -> pd.DataFrame:
        """The keys of each case; its `volume_id` is the case's name."""
        first = volumes.iloc[[rows[0] for rows in self.members]].reset_index(drop=True)
        if self.level == "volume":
            return first
        first["volume_id"] = self.names
        first["device"] = ["+".join(sorted(set(volumes["device"].iloc[rows]))) for rows in self.members]
        if self.level == "person":
            first["eye"] = ""
        return first

    def aggregate(self, table: Embeddings) -> Embeddings:
        """A row for each case, with the mean of its volumes' features."""
        if self.level == "volume":
            return table.take(int(rows[0]) for rows in self.members)
        return _merged(table, self.members, self.frame(table.frame))


def check_aggregation(level: str, several: str) -> None:
    """Raises UsageError for a level or a rule that is unknown."""
    for what, given, known in (("level", level, LEVELS), ("rule for several volumes", several, RULES)):
        if given not in known:
            raise UsageError(f"no {what} {given!r}: known are {', '.join(known)}")


def case_names(frame: pd.DataFrame, level: str) -> list[str]:
    """The case of each volume; a volume of unknown eye is an eye of its own."""
    if level == "volume":
        return frame["volume_id"].tolist()
    if level == "person":
        return frame["person_id"].tolist()
    rows = zip(frame["person_id"], frame["eye"], frame["volume_id"], strict=True)
    return [f"{person} {eye or volume}" for person, eye, volume in rows]


def group_cases(frame: pd.DataFrame, level: str, several: str, visit_order: Mapping[str, float] | None = None) -> Cases:
    """The cases of a table's volumes, under `several`; of eyes and people those that have a volume in a split.

    People have one split (`labels.check_people`), so a case's volumes do, too, once those without one are out of it.
    Raises UsageError: an unknown level or rule, visits whose order nobody said, no quality to choose by.
    """
    check_aggregation(level, several)
    kept = np.arange(len(frame)) if level == "volume" else np.flatnonzero(frame["split"] != "")
    chosen = kept
    if several == "first_visit":
        chosen = kept[_of_first_visit(frame.iloc[kept], visit_order)]
    names = np.array(case_names(frame.iloc[chosen], level))
    order = np.argsort(names, kind="stable")
    cases, starts = np.unique(names[order], return_index=True)
    members = [chosen[part] for part in np.split(order, starts[1:])]
    # A volume is its own case, in the table's order.
    if level == "volume":
        cases, members = names, [np.array([row]) for row in chosen]
    if several == "best_quality" and level != "volume":
        members = [_best(frame, rows) for rows in members]
    known = frame.iloc[kept]
    one_eye = known[known["eye"] != ""].groupby("person_id")["eye"].nunique()
    about = {
        "level": level,
        "several": several,
        "cases": len(cases),
        "volumes": len(frame),
        "volumes_used": int(sum(map(len, members))),
        "volumes_in_no_split": len(frame) - len(kept),
        "people": int(known["person_id"].nunique()),
        "people_with_one_eye": int((one_eye == 1).sum()),
        "volumes_of_unknown_eye": int((known["eye"] == "").sum()),
        "text": "a case is a volume"
        if level == "volume"
        else f"a case is a{'n' * (level == 'eye')} {level}: " + _SAID[several],
    }
    return Cases(level, cases.tolist(), members, about)


def _of_first_visit(frame: pd.DataFrame, visit_order: Mapping[str, float] | None) -> Int[np.ndarray, " n"]:
    """Rows of each person's first visit. The store's names of visits are pseudonyms: only a table can order them."""
    kept: list[int] = []
    for _, rows in frame.reset_index(drop=True).groupby("person_id"):
        visits = sorted(set(rows["visit"]))
        first = visits[0]
        if len(visits) > 1:
            unknown = [visit for visit in visits if visit_order is None or visit not in visit_order]
            if unknown or visit_order is None:
                raise UsageError(
                    f"a person has {len(visits)} visits and the order of {len(unknown)} is unknown (the store keeps "
                    "pseudonyms, no dates): give --visit-order a TSV with the columns visit and order, or another rule"
                )
            first = min(visits, key=lambda visit: visit_order[visit])
        kept += rows.index[rows["visit"] == first].tolist()
    return np.array(sorted(kept))


def read_visit_order(path: Path) -> dict[str, float]:
    """visit -> order of a TSV or CSV with these columns. Raises UsageError."""
    try:
        frame = pd.read_csv(path, sep=None, engine="python", dtype=str)
        return {str(visit): float(order) for visit, order in zip(frame["visit"], frame["order"], strict=True)}
    except (OSError, ValueError, KeyError, pd.errors.ParserError) as error:
        raise UsageError(
            f"{path} is no order of visits ({type(error).__name__}): expected a TSV with the columns visit (as in the "
            "store) and order (a number, such as days since the first)"
        ) from None


def _best(frame: pd.DataFrame, rows: Int[np.ndarray, " n"]) -> Int[np.ndarray, "1"]:
    quality = frame["quality"].to_numpy()[rows]
    if len(rows) > 1 and np.isnan(quality).all():
        raise UsageError(
            "best_quality: the table does not say the quality of volumes; embed again, or use another rule"
        )
    best = max(range(len(rows)), key=lambda n: (np.nan_to_num(quality[n], nan=-1.0), -int(rows[n])))
    return rows[best : best + 1]


def _merged(table: Embeddings, members: list[np.ndarray], frame: pd.DataFrame) -> Embeddings:
    eyes = table.frame["eye"].to_numpy()

    def mean(block: Float[np.ndarray, "volumes features"]) -> Float[np.ndarray, "cases features"]:
        rows = []
        for case in members:
            within = [block[case[eyes[case] == eye]].mean(axis=0) for eye in np.unique(eyes[case])]
            rows.append(np.mean(within, axis=0))
        return np.stack(rows).astype(np.float32)

    blocks: dict[str, Any] = {name: mean(getattr(table, name)) for name in (*FEATURE_COLUMNS, *table.unpooled)}
    return replace(table, frame=frame, **blocks)


def person_labels(labels: LabelTable, frame: pd.DataFrame, target: str, task: str) -> tuple[LabelTable, str, list[str]]:
    """The labels of `target` by person (eye ""), from the scanned eyes; the task they are; notes on eyes that differ.

    Scanned are eyes of which a volume is in a split.
    Raises UsageError as `task_of`.
    """
    found = labels.values[target]
    by_person: dict[str, dict[str, str]] = {}
    frame = frame[frame["split"] != ""]
    for person, eye in zip(frame["person_id"], frame["eye"], strict=True):
        if (person, eye) in found:
            by_person.setdefault(person, {})[eye] = found[person, eye]
    if not by_person:
        return labels, task, []  # the join says what was found and what was expected
    kind, classes, _ = task_of([text for eyes in by_person.values() for text in eyes.values()], target, task)
    values: dict[tuple[str, str], str] = {}
    differing, left_out = 0, 0
    for person, eyes in by_person.items():
        texts = sorted(set(eyes.values()))
        if len(texts) > 1 and (
            kind == "regression" or len({float(t) for t in texts} if _numeric(texts) else texts) > 1
        ):
            differing += 1
            if kind == "multiclass":
                left_out += 1
                continue
            if kind == "regression":
                texts = [repr(float(np.mean([float(text) for text in eyes.values()])))]
            else:
                texts = [max(texts, key=lambda text: classes.index(_as_class(text)))]
        values[person, ""] = texts[0]
    notes = []
    if differing:
        rule = {"regression": "their mean is the person's", "multiclass": f"these {left_out} people are left out"}
        said = rule.get(kind, "the worse eye's is the person's")
        notes.append(f"{target}: the eyes of {differing} people have different labels; {said}")
    return replace(labels, by_eye=False, values={target: values}), kind, notes


def _numeric(texts: Sequence[str]) -> bool:
    try:
        return all(np.isfinite(float(text)) for text in texts)
    except ValueError:
        return False


def _as_class(text: str) -> str:
    return f"{float(text):.15g}" if _numeric([text]) else text


def average_scores(
    said: Predictions, tested: Int[np.ndarray, " n"], members: Sequence[np.ndarray], truth: np.ndarray
) -> Predictions:
    """Scores of cases: the mean over those of their volumes that were tested.

    `tested` are the volume rows of `said`, `members` the volume rows of each case, `truth` that of the cases.
    """
    place = {int(row): number for number, row in enumerate(tested)}
    rows = [[place[int(row)] for row in case if int(row) in place] for case in members]
    scores, calibrated = (np.stack([block[at].mean(axis=0) for at in rows]) for block in (said.scores, said.calibrated))
    return Predictions(truth, scores, calibrated)


@dataclass(frozen=True)
class PreparedTarget:
    """A target as it is learnt and as it is measured: the same, unless scores of volumes become scores of cases."""

    fit_target: Target
    test_target: Target
    selection: Selection
    members: list[np.ndarray] | None

    def predictions(self, said: Predictions) -> Predictions:
        if self.members is None:
            return said
        cases = [self.members[row] for row in self.test_target.indices["test"]]
        return average_scores(said, self.fit_target.indices["test"], cases, self.test_target.values["test"])


def prepare_targets(
    labels: LabelTable,
    tables: NamedTables,
    merged: NamedTables,
    names: Sequence[str],
    task: str,
    cases: Cases | None,
    level: str,
    seed: int,
    result: ProbeResult,
) -> list[PreparedTarget]:
    """Every target that can be probed; `cases` only where probes learn from volumes and are measured on cases."""
    found: list[PreparedTarget] = []
    volumes, frame = tables[0][1].frame, merged[0][1].frame
    for name in names:
        try:
            of_cases, kind, notes = labels, task, list[str]()
            if level == "person":
                of_cases, kind, notes = person_labels(labels, volumes, name, task)
            target = join_labels(of_cases, frame, name, kind)
            learnt = target
            if cases is not None:
                learnt = join_labels(labels, volumes, name, kind)
                if learnt.classes != target.classes:
                    raise UsageError(
                        f"{name}: volumes have the classes {', '.join(learnt.classes)}, people "
                        f"{', '.join(target.classes)}: their scores cannot be averaged; use --several features"
                    )
        except UsageError as error:
            if len(names) == 1:
                raise
            result.add_note(f"target {name} is left out: {error}")
            continue
        groups = GROUP_COLUMNS if level == "volume" else GROUP_COLUMNS[:1]  # cases of several devices are no device
        for text in (*notes, *target.notes):
            result.add_note(text)
        for fault, text in coverage_faults(frame, labels, target, groups):
            result.add_fault(fault, text)
        people = (frame if cases is None else volumes)["person_id"].to_numpy(dtype=str)
        how = plan_selection(learnt, people, seed)
        if how.by == "fixed":
            result.add_note(f"{name}: too few people per class to choose settings; the middle of each grid is used")
        result.targets.append(describe_target(target))
        found.append(PreparedTarget(learnt, target, how, None if cases is None else cases.members))
    if not found:
        raise UsageError(f"none of the {len(names)} targets can be probed:\n  " + "\n  ".join(result.notes))
    return found


def aggregation_notes(cases: Cases, result: ProbeResult) -> None:
    about = cases.about
    if about["volumes_in_no_split"]:
        result.add_note(
            f"{about['volumes_in_no_split']} volumes are in no split and belong to no {about['level']}'s case"
        )
    if about["level"] == "person" and about["people_with_one_eye"]:
        result.add_note(
            f"{about['people_with_one_eye']} of {about['people']} people have one scanned eye only: their case is that "
            "eye"
        )
    if about["level"] == "eye" and about["volumes_of_unknown_eye"]:
        result.add_note(f"{about['volumes_of_unknown_eye']} volumes of unknown eye are each a case of their own")
