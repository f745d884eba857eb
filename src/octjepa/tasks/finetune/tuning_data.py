"""Volumes and labels of a fine-tuning: which volumes are trained on, and which cases are measured.

Everything that can be wrong with people and labels is found here, before the first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from octjepa.embed.alignment import result_names
from octjepa.embed.embedding import add_participants, select_volumes
from octjepa.embed.table import complete_keys
from octjepa.errors import UsageError
from octjepa.evaluate.calibration import class_weights
from octjepa.evaluate.cases import PreparedTarget
from octjepa.evaluate.features import MIN_VAL_PEOPLE
from octjepa.evaluate.label_fractions import TooFewLabelsError, limit_prepared
from octjepa.evaluate.measurements import describe_target
from octjepa.evaluate.probe import ProbeResult
from octjepa.evaluate.protocol import (
    Evaluation,
    ProtocolSettings,
    prepare_evaluation,
    read_target_labels,
    refuse_pretraining_subjects,
)
from octjepa.evaluate.subgroups import SubgroupColumn
from octjepa.metrics.scores import PRIMARY_METRIC, TASK_METRICS, Task
from octjepa.store import Store
from octjepa.tasks.finetune.network import TunableEncoder
from octjepa.tasks.finetune.recipe import FinetuneRecipe


@dataclass(frozen=True)
class TrainingLabels:
    """The training data of the head of a target: `truth` of every volume (class code, or standardised quantity; NaN: no
    label).

    weight: of each class in the loss; scale: mean and standard deviation of a quantity among the training volumes.
    """

    task: Task
    classes: tuple[str, ...]
    truth: Float[np.ndarray, " volumes"]
    weight: Tensor | None
    scale: tuple[float, float]


@dataclass(frozen=True)
class TuningData:
    """The evaluation whose targets are tuned for; `labels` what the head of each learns.

    name: the encoder's in the results. metrics: the metric that compares results, by target.
    """

    evaluation: Evaluation
    name: str
    labels: list[TrainingLabels]
    metrics: dict[str, str]

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each volume that the encoder can read, sorted by id; targets are fitted to positions in it."""
        return self.evaluation.volumes

    @property
    def targets(self) -> list[PreparedTarget]:
        """The targets, in the order of `labels`."""
        return self.evaluation.targets

    def labelled(self, split: str) -> Int[np.ndarray, " n"]:
        """Indices in `frame` of the volumes of `split` that have a label of any target."""
        return np.unique(np.concatenate([target.fit_target.indices[split] for target in self.targets]))

    def volume_ids(self, split: str) -> list[str]:
        """The labelled volumes of `split`."""
        return [str(name) for name in self.frame["volume_id"].iloc[self.labelled(split)]]

    @property
    def tasks(self) -> list[tuple[Task, int]]:
        """The task and the number of classes of every label."""
        return [(labels.task, len(labels.classes)) for labels in self.labels]


def prepare_tuning_data(
    recipe: FinetuneRecipe,
    encoder: TunableEncoder,
    checkpoint: str | Path,
    store: Store,
    labels_path: Path,
    targets: Sequence[str],
    result: ProbeResult,
    subgroups: Sequence[SubgroupColumn] = (),
) -> TuningData:
    """Joins labels to volumes and notes in `result` what was left out.

    With `recipe.labelled` only the labels of so many people of train are kept (`evaluate.label_fractions`).

    Raises TooFewLabelsError: no target can be learned from so many. UsageError: people of val or test whom the encoder
    was pretrained on, a person in two splits, labels that meet no scan or cannot be learned, a metric that no target
    has.
    """
    targets = list(dict.fromkeys(targets or recipe.targets))
    if not targets:
        raise UsageError("no target was named: give a column of the label table with --target")
    labels = read_target_labels(labels_path, targets)
    volumes = select_volumes(encoder, store)
    refuse_pretraining_subjects(volumes, encoder, checkpoint)
    frame = complete_keys(add_participants(volumes, store.participants))
    settings = ProtocolSettings(
        recipe.task, recipe.level, "scores", subgroups=subgroups, resamples=recipe.resamples, seed=recipe.seed
    )
    evaluation = prepare_evaluation(frame, labels, targets, settings, result)
    result.protocol = evaluation.cases.about
    result.add_notes(evaluation.cases.notes())
    evaluation.report_targets(result)
    everyone = frame["person_id"].to_numpy(dtype=str)
    if recipe.labelled is not None:
        prepared, reasons = limit_prepared(evaluation.targets, everyone, recipe.labelled, recipe.seed)
        if not prepared:
            raise TooFewLabelsError("; ".join(reasons))
        result.add_notes([f"{recipe.labelled} labelled people: {reason}; left out" for reason in reasons])
        evaluation = evaluation.with_targets(prepared)
    result.targets = [describe_target(target.test_target) for target in evaluation.targets]
    _report_small_validation(evaluation.targets, everyone, result)
    return TuningData(
        evaluation,
        result_names([encoder.name], result.add_note)[0],
        [_training_labels(target, len(frame), recipe.class_weights) for target in evaluation.targets],
        _metrics(recipe.metric, evaluation.targets),
    )


def _report_small_validation(targets: Sequence[PreparedTarget], person_ids: np.ndarray, result: ProbeResult) -> None:
    """A fault where val holds too few people for `octjepa probe` to choose by, and what is done instead."""
    few = {target.fit_target.name: _rarest(target, person_ids) for target in targets if target.selection.by != "val"}
    if not few:
        return
    folds = all(target.selection.by == "cv" for target in targets if target.selection.by != "val")
    beside = "by cross-validation inside train" + ("" if folds else ", or not at all where train has too few as well")
    done = (
        "the tuned weights, and the decision between classes, are chosen on them all the same, which is noisy"
        if any(len(target.fit_target.indices["val"]) for target in targets)
        else "the last weights stay, and the decision between classes is that of training"
    )
    of = " (of the rarest class)" if any(target.fit_target.classes for target in targets) else ""
    counts = ", ".join(f"{name} {count}" for name, count in few.items())
    result.add_fault(
        "few_to_choose_by",
        f"people in val{of}: {counts}; {MIN_VAL_PEOPLE} are needed to choose by. Tuning has no "
        f"cross-validation: {done}. The frozen rows next to it choose {beside}",
    )


def _rarest(target: PreparedTarget, person_ids: np.ndarray) -> int:
    """People of val with a label of the target, of the class that has fewest."""
    people, truth = person_ids[target.fit_target.indices["val"]], target.fit_target.values["val"]
    if not target.fit_target.classes:
        return len(set(people.tolist()))
    return min(len(set(people[truth == code].tolist())) for code in range(len(target.fit_target.classes)))


def _training_labels(target: PreparedTarget, count: int, weighted: bool) -> TrainingLabels:
    fit_target = target.fit_target
    truth = np.full(count, np.nan)
    for split in ("train", "val"):
        truth[fit_target.indices[split]] = fit_target.values[split]
    if not fit_target.classes:
        mean, std = float(fit_target.values["train"].mean()), float(fit_target.values["train"].std()) or 1.0
        return TrainingLabels(fit_target.task, (), (truth - mean) / std, None, (mean, std))
    weight = (
        class_weights(fit_target.values["train"], len(fit_target.classes))
        if weighted
        else np.ones(len(fit_target.classes))
    )
    return TrainingLabels(
        fit_target.task, fit_target.classes, truth, torch.from_numpy(weight.astype(np.float32)), (0.0, 1.0)
    )


def _metrics(metric: str | None, targets: Sequence[PreparedTarget]) -> dict[str, str]:
    """The metric that each target is compared by."""
    for target in targets:
        task = target.test_target.task
        if metric is not None and metric not in TASK_METRICS[task]:
            metrics_text = ", ".join(TASK_METRICS[task])
            raise UsageError(
                f"{target.test_target.name} is {task}, which has no metric {metric}: it has {metrics_text}"
            )
    return {target.test_target.name: metric or PRIMARY_METRIC[target.test_target.task] for target in targets}
