"""Who is tuned on and who is measured: the volumes an encoder knows, their labels, and cases of several volumes.

Everything that can be wrong with people and labels is found here, before the first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from octjepa.checkpoint import PretrainedEncoder
from octjepa.checkpoint.location import place_of
from octjepa.embed.alignment import name_tables
from octjepa.embed.embedding import add_participants, select_volumes
from octjepa.embed.leakage import count_leaked_people, training_volumes_of_ids
from octjepa.embed.table import Embeddings, complete_keys
from octjepa.errors import UsageError
from octjepa.metrics.scores import PRIMARY_METRIC, TASK_METRICS, Task
from octjepa.probe.aggregation import PreparedTarget, aggregation_notes, group_cases, prepare_targets
from octjepa.probe.calibration import class_weights
from octjepa.probe.features import MIN_VAL_PEOPLE
from octjepa.probe.labels import read_labels, split_multilabel
from octjepa.probe.results import ProbeResult
from octjepa.probe.targets import check_people, test_set_hash
from octjepa.store import Store
from octjepa.tasks.finetune.recipe import FinetuneRecipe


@dataclass(frozen=True)
class Tuning:
    """What a target's head is taught: `truth` of every row (class code, or standardised quantity; NaN: no label).

    weight: of each class in the loss; scale: mean and standard deviation of a quantity among the training volumes.
    """

    task: Task
    classes: tuple[str, ...]
    truth: Float[np.ndarray, " rows"]
    weight: Tensor | None
    scale: tuple[float, float]


@dataclass(frozen=True)
class Cohort:
    """`frame` has a row for each volume that the encoder knows, sorted by id; `asked` counts its rows.

    name: the encoder's in the result rows. By target, people: of its test cases, in their order; test_sets: what the
    ledger knows them by; metrics: the one that it is compared by.
    """

    frame: pd.DataFrame
    name: str
    asked: list[PreparedTarget]
    tunings: list[Tuning]
    people: dict[str, list[str]]
    test_sets: dict[str, str]
    metrics: dict[str, str]

    def rows(self, split: str) -> np.ndarray:
        """Rows of `split` that have a label of any target."""
        return np.unique(np.concatenate([one.fit_target.indices[split] for one in self.asked]))

    def volume_ids(self, split: str) -> list[str]:
        return [str(name) for name in self.frame["volume_id"].iloc[self.rows(split)]]

    @property
    def tasks(self) -> list[tuple[Task, int]]:
        return [(one.task, len(one.classes)) for one in self.tunings]


def choose_cohort(
    settings: FinetuneRecipe,
    encoder: PretrainedEncoder,
    checkpoint: str | Path,
    store: Store,
    labels_path: Path,
    targets: Sequence[str],
    result: ProbeResult,
) -> Cohort:
    """Joins labels to volumes and says in `result` what was left out.

    Raises UsageError: people of val or test whom the encoder was pretrained on, a person in two splits, labels that
    meet no scan or cannot be learnt, a metric that no target has.
    """
    targets = list(dict.fromkeys(targets or settings.targets))
    if not targets:
        raise UsageError("no target was named: give a column of the label table with --target")
    labels = read_labels(labels_path, targets)
    rows = select_volumes(encoder, store)
    frame = complete_keys(add_participants(rows, store.participants))
    for text in check_people(frame):
        result.add_note(text)
    leaked = count_leaked_people(rows, training_volumes_of_ids(encoder.trained_on, place_of(checkpoint)))
    if leaked:
        raise UsageError(
            f"leak: the encoder of {checkpoint} was pretrained on eyes of {leaked} people who are now in val or test, "
            "so their figures would be too good. Give the store the split it was trained with, or take another encoder"
        )
    for text in labels.notes:
        result.add_note(text)
    task: str = settings.task
    if task == "multilabel":
        labels, targets = split_multilabel(labels, targets)
        task = "binary"
    cases = group_cases(frame, settings.level, "scores")
    result.protocol = cases.about
    aggregation_notes(cases, result)
    # Keys without features: what joins labels to volumes asks a table for no more.
    nothing = np.zeros((len(frame), 0), np.float32)
    tables = name_tables([Embeddings(frame, nothing, nothing, nothing, 0, encoder.name, "")], result.add_note)
    merged = [(name, cases.aggregate(table)) for name, table in tables]
    by_volume = cases if settings.level != "volume" else None
    asked = prepare_targets(labels, tables, merged, targets, task, by_volume, settings.level, settings.seed, result)
    _tell_few(asked, frame["person_id"].to_numpy(dtype=str), result)
    people = merged[0][1].frame["person_id"].to_numpy(dtype=str)
    people_of = {one.test_target.name: people[one.test_target.indices["test"]].tolist() for one in asked}
    tunings = [_tuning(one, len(frame), settings.class_weights) for one in asked]
    test_sets = {one.test_target.name: test_set_hash(labels, frame, one.test_target.name) for one in asked}
    return Cohort(frame, tables[0][0], asked, tunings, people_of, test_sets, _metrics(settings.metric, asked))


def _tell_few(asked: Sequence[PreparedTarget], person_ids: np.ndarray, result: ProbeResult) -> None:
    """A fault where val holds too few people for `octjepa probe` to choose by, and what is done instead."""
    few = {one.fit_target.name: _rarest(one, person_ids) for one in asked if one.selection.by != "val"}
    if not few:
        return
    folds = all(one.selection.by == "cv" for one in asked if one.selection.by != "val")
    beside = "by cross-validation inside train" + ("" if folds else ", or not at all where train has too few, too")
    done = (
        "the tuned weights, and the decision between classes, are chosen on them all the same, which is noisy"
        if any(len(one.fit_target.indices["val"]) for one in asked)
        else "the last weights stay, and the decision between classes lies where training put it"
    )
    of = " (of the rarest class)" if any(one.fit_target.classes for one in asked) else ""
    counts = ", ".join(f"{name} {count}" for name, count in few.items())
    result.add_fault(
        "few_to_choose_by",
        f"people in val{of}: {counts}; {MIN_VAL_PEOPLE} are needed to choose by. Tuning has no "
        f"cross-validation: {done}. The frozen rows beside it choose {beside}",
    )


def _rarest(one: PreparedTarget, person_ids: np.ndarray) -> int:
    """People of val with a label of the target, of the class that has fewest."""
    people, truth = person_ids[one.fit_target.indices["val"]], one.fit_target.values["val"]
    if not one.fit_target.classes:
        return len(set(people.tolist()))
    return min(len(set(people[truth == code].tolist())) for code in range(len(one.fit_target.classes)))


def _tuning(one: PreparedTarget, count: int, weighted: bool) -> Tuning:
    learnt = one.fit_target
    truth = np.full(count, np.nan)
    for split in ("train", "val"):
        truth[learnt.indices[split]] = learnt.values[split]
    if not learnt.classes:
        mean, std = float(learnt.values["train"].mean()), float(learnt.values["train"].std()) or 1.0
        return Tuning(learnt.task, (), (truth - mean) / std, None, (mean, std))
    weight = class_weights(learnt.values["train"], len(learnt.classes)) if weighted else np.ones(len(learnt.classes))
    return Tuning(learnt.task, learnt.classes, truth, torch.from_numpy(weight.astype(np.float32)), (0.0, 1.0))


def _metrics(wanted: str | None, asked: Sequence[PreparedTarget]) -> dict[str, str]:
    """The metric that each target is compared by."""
    found = {}
    for one in asked:
        task = one.test_target.task
        if wanted is not None and wanted not in TASK_METRICS[task]:
            known = ", ".join(TASK_METRICS[task])
            raise UsageError(f"{one.test_target.name} is {task}, which has no metric {wanted}: it has {known}")
        found[one.test_target.name] = wanted or PRIMARY_METRIC[task]
    return found
