"""Targets made ready for the probes: labels joined to cases, who chooses the settings, and what was lost on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octjepa.embed.alignment import Named
from octjepa.errors import UsageError
from octjepa.metrics.scores import Predictions
from octjepa.probe.aggregation import Cases, averaged, person_labels
from octjepa.probe.features import Choosing, choosing
from octjepa.probe.group_coverage import GROUPS, lost_groups
from octjepa.probe.labels import LabelTable, Target, join
from octjepa.probe.results import ProbeResult, about_target


@dataclass(frozen=True)
class Asked:
    """A target as it is learnt and as it is measured: the same, unless scores of volumes become scores of cases."""

    learnt: Target
    measured: Target
    how: Choosing
    members: list[np.ndarray] | None

    def predictions(self, said: Predictions) -> Predictions:
        if self.members is None:
            return said
        cases = [self.members[row] for row in self.measured.rows["test"]]
        return averaged(said, self.learnt.rows["test"], cases, self.measured.values["test"])


def make_ready(
    labels: LabelTable,
    tables: Named,
    merged: Named,
    names: Sequence[str],
    task: str,
    cases: Cases | None,
    level: str,
    seed: int,
    result: ProbeResult,
) -> list[Asked]:
    """Every target that can be probed; `cases` only where probes learn from volumes and are measured on cases."""
    found: list[Asked] = []
    volumes, frame = tables[0][1].frame, merged[0][1].frame
    for name in names:
        try:
            of_cases, kind, notes = labels, task, list[str]()
            if level == "person":
                of_cases, kind, notes = person_labels(labels, volumes, name, task)
            target = join(of_cases, frame, name, kind)
            learnt = target
            if cases is not None:
                learnt = join(labels, volumes, name, kind)
                if learnt.classes != target.classes:
                    raise UsageError(
                        f"{name}: volumes have the classes {', '.join(learnt.classes)}, people "
                        f"{', '.join(target.classes)}: their scores cannot be averaged; use --several features"
                    )
        except UsageError as error:
            if len(names) == 1:
                raise
            result.note(f"target {name} is left out: {error}")
            continue
        groups = GROUPS if level == "volume" else GROUPS[:1]  # cases of several devices are no device
        for text in (*notes, *target.notes):
            result.note(text)
        for fault, text in lost_groups(frame, labels, target, groups):
            result.fault(fault, text)
        people = (frame if cases is None else volumes)["person_id"].to_numpy(dtype=str)
        how = choosing(learnt, people, seed)
        if how.by == "fixed":
            result.note(f"{name}: too few people per class to choose settings; the middle of each grid is used")
        result.targets.append(about_target(target))
        found.append(Asked(learnt, target, how, None if cases is None else cases.members))
    if not found:
        raise UsageError(f"none of the {len(names)} targets can be probed:\n  " + "\n  ".join(result.notes))
    return found


def note_protocol(cases: Cases, result: ProbeResult) -> None:
    about = cases.about
    if about["volumes_in_no_split"]:
        result.note(f"{about['volumes_in_no_split']} volumes are in no split and belong to no {about['level']}'s case")
    if about["level"] == "person" and about["people_with_one_eye"]:
        result.note(
            f"{about['people_with_one_eye']} of {about['people']} people have one scanned eye only: their case is that "
            "eye"
        )
    if about["level"] == "eye" and about["volumes_of_unknown_eye"]:
        result.note(f"{about['volumes_of_unknown_eye']} volumes of unknown eye are each a case of their own")
