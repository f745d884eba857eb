"""Rows, differences and details of a leaderboard.

Every metric of an entry is the mean over its seeds; each entry is compared with the reference and with the strongest
baseline. The details of a training are its threshold, calibration, net benefit, subgroups and transfer to a vendor
without labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
import pandas as pd

from octjepa.errors import UsageError
from octjepa.evaluate.calibration import ProbeFit
from octjepa.evaluate.features import plan_selection
from octjepa.evaluate.leaderboard.selection import EvaluatedOption, Option, evaluate_option
from octjepa.evaluate.measurements import best_by_test, estimate_metric
from octjepa.evaluate.results import (
    BoardRow,
    ChosenThreshold,
    CorrectedPaired,
    LeaveOneGroupOut,
    RecipePaired,
    SeedResult,
    TrainingDetails,
)
from octjepa.evaluate.subgroups import (
    Groups,
    group_scores,
    leave_one_group_out,
    score_groups,
    subgroup_scores,
    transfer_thresholds,
)
from octjepa.evaluate.targets import Target
from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.metrics.comparisons import (
    benjamini_hochberg,
    holm,
    mean_over_seeds,
    recipe_difference,
    recipe_interval,
    seed_spread,
)
from octjepa.metrics.findings import BASELINES
from octjepa.metrics.scores import PRIMARY_METRIC, TASK_METRICS, Predictions
from octjepa.metrics.thresholds import decision_curve, reliability_curve, threshold_at_specificity, threshold_scores

GROUPS = ("device", "clinical_site", "eye")
SPECIFICITY = 0.9


def is_baseline(name: str) -> bool:
    """Whether a row of this name is a baseline, "untrained:NAME" included."""
    return name.partition(":")[0] in BASELINES


@dataclass(frozen=True)
class Training:
    """One seed of an entry, or a baseline: its selected option and the predictions of that."""

    name: str
    seed: int
    option: Option
    validation: float | None
    evaluated: EvaluatedOption

    @property
    def label(self) -> str:
        """The name, with the seed if there are several."""
        return self.name if self.seed == 1 else f"{self.name} (seed {self.seed})"

    @classmethod
    def constant(cls, name: str, predictions: Predictions) -> Training:
        """A baseline that fits nothing and predicts the same for every case."""
        empty = np.zeros((0, predictions.scores.shape[1]))
        no_val = Predictions(predictions.truth[:0], empty, empty)
        option = Option("", "none", "constant", np.zeros((0, 1)))
        return cls(name, 1, option, None, EvaluatedOption(no_val, predictions, ProbeFit(predictions, 0.0, 0)))


@dataclass
class LeaderboardRow:
    """All seeds of one name for one target; `people` are those of the test volumes, in their order."""

    name: str
    trainings: list[Training]
    target: Target
    draws: Draws
    people: Sequence[str]
    _estimates: dict[str, list[Estimate]] = field(default_factory=dict)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics of this task."""
        return (*TASK_METRICS[self.target.task], *(("brier",) if self.target.classes else ()))

    @property
    def primary_metric(self) -> str:
        """The metric that the table is ordered by."""
        return PRIMARY_METRIC[self.target.task]

    def estimates(self, metric: str) -> list[Estimate]:
        """The value of every seed."""
        if metric not in self._estimates:
            self._estimates[metric] = [
                estimate_metric(metric, training.evaluated.test, self.draws, self.people, self.target.label_hash)
                for training in self.trainings
            ]
        return self._estimates[metric]

    def results(self) -> list[BoardRow]:
        """A row for every metric: the mean over seeds, its interval, and the spread of the seeds apart from it."""
        probe, pool = (
            ", ".join(dict.fromkeys(part for part in parts if part))
            for parts in zip(
                *((training.option.probe, training.option.pool) for training in self.trainings), strict=True
            )
        )
        rows = []
        for metric in self.metrics:
            estimates = self.estimates(metric)
            mean, seeds, recipe = mean_over_seeds(estimates), seed_spread(estimates), recipe_interval(estimates)
            rows.append(
                BoardRow(
                    self.name,
                    self.target.name,
                    probe,
                    pool,
                    metric,
                    **vars(mean.measured()),
                    primary=metric == self.primary_metric,
                    seeds=seeds.seeds,
                    seed_sd=seeds.sd,
                    recipe_low=recipe.low,
                    recipe_high=recipe.high,
                )
            )
        return rows

    def training_results(self) -> list[SeedResult]:
        """Every seed with what validation selected for it."""
        return [
            SeedResult(
                training.name,
                training.seed,
                self.target.name,
                self.primary_metric,
                training.option.checkpoint,
                training.option.pool,
                training.option.probe,
                training.evaluated.fit.setting,
                training.validation,
                measured.value,
                measured.low,
                measured.high,
            )
            for training, measured in zip(
                self.trainings, [estimate.measured() for estimate in self.estimates(self.primary_metric)], strict=True
            )
        ]

    def difference(self, reference: LeaderboardRow) -> CorrectedPaired:
        """This row minus `reference` on the primary metric; p is of the recipes if both have at least two seeds."""
        metric = self.primary_metric
        paired, recipe, p = recipe_difference(self.estimates(metric), reference.estimates(metric))
        return CorrectedPaired(
            self.name,
            self.target.name,
            metric,
            reference.name,
            paired.difference if np.isfinite(paired.difference) else None,
            paired.low,
            paired.high,
            paired.undefined,
            paired.n_people,
            paired.p if p is None else p,
            recipe.low,
            recipe.high,
            len(self.trainings),
            "networks" if p is None else "recipes",
        )


def constant_prediction(training: Training, target: Target) -> str:
    """The sentence on a training that predicts the same for every test volume; "" if it does not."""
    test = training.evaluated.test
    answers = np.unique(test.predicted_classes() if target.classes else test.scores[:, 0].round(9))
    if len(answers) > 1:
        return ""
    answer = repr(target.classes[int(answers[0])]) if target.classes else f"{answers[0]:.4g}"
    return f"{training.label} says {answer} of every test volume of {target.name}: a constant predictor"


def compare(rows: Sequence[LeaderboardRow], reference: str) -> list[CorrectedPaired]:
    """Every encoder minus the reference, with p-values corrected over all targets and encoders.

    Baselines are compared only as the reference, because they are not claims. Raises UsageError: a target has no such
    row.
    """
    references = {row.target.name: row for row in rows if row.name == reference}
    differences = []
    for row in rows:
        if row.target.name not in references:
            raise UsageError(
                f"no row {reference!r} to compare with: rows are {', '.join(dict.fromkeys(row.name for row in rows))}"
            )
        if row.name != reference and not is_baseline(row.name):
            differences.append(row.difference(references[row.target.name]))
    p = [difference.p for difference in differences]
    return [
        replace(difference, p_holm=by_holm, q_bh=by_bh)
        for difference, by_holm, by_bh in zip(differences, holm(p), benjamini_hochberg(p), strict=True)
    ]


def compare_with_strongest(rows: Sequence[LeaderboardRow]) -> list[RecipePaired]:
    """Every encoder minus the baseline with the best primary metric on the target.

    The baseline is selected by its test metric on these very people, which favours it; so these differences have no
    p-values and are not part of the corrected family.
    """
    differences = []
    for name in dict.fromkeys(row.target.name for row in rows):
        members = [row for row in rows if row.target.name == name]
        values = {
            row.name: mean_over_seeds(row.estimates(row.primary_metric)).value
            for row in members
            if is_baseline(row.name)
        }
        best = best_by_test(values, members[0].primary_metric)
        strongest = next((row for row in members if row.name == best), None)
        if strongest is not None:
            differences += [row.difference(strongest) for row in members if not is_baseline(row.name)]
    names = [field.name for field in fields(RecipePaired)]
    return [RecipePaired(**{name: getattr(difference, name) for name in names}) for difference in differences]


def training_details(
    training: Training, target: Target, frame: pd.DataFrame, draws: Draws, seed: int, subgroups: Groups
) -> TrainingDetails:
    """Details of one training for one target; parts that its task or its people do not allow are empty or say why.

    subgroups: the groups that the user named, of every entry of `frame`.
    """
    columns = {name: frame[name].to_numpy(dtype=str) for name in ("person_id", *GROUPS)}
    indices, metric, test = target.indices["test"], PRIMARY_METRIC[target.task], training.evaluated.test
    people = columns["person_id"][indices].tolist()
    by_group = {}
    for group in GROUPS:
        of_test = columns[group][indices]
        scores = subgroup_scores(metric, test, of_test, draws, people, target.label_hash)
        by_group[group] = group_scores(metric, scores, target, of_test, people)
    details = TrainingDetails(
        training.name,
        training.seed,
        target.name,
        left_out=_leave_vendors_out(training, target, columns, draws, seed),
        by_group=by_group,
        subgroups=tuple(score_groups(subgroups, target, test, people, draws)),
    )
    if target.classes:
        details = replace(details, reliability=tuple(reliability_curve(test, draws, people)))
    if target.task == "binary":
        positive = target.values["test"] == 1
        curve = decision_curve(positive, test.calibrated[:, 1], draws, people)
        details = _with_thresholds(replace(details, decision_curve=tuple(curve)), training, target, columns, draws)
    return details


def _leave_vendors_out(
    training: Training, target: Target, columns: dict[str, np.ndarray], draws: Draws, seed: int
) -> LeaveOneGroupOut:
    """The drop of the metric on each vendor when the probe sees no label of that vendor."""
    devices, people = columns["device"], columns["person_id"]
    if len(np.unique(devices[target.indices["test"]])) < 2:
        return LeaveOneGroupOut()

    def fit(reduced: Target) -> Predictions:
        return evaluate_option(training.option, reduced, plan_selection(reduced, people, seed)).test

    test = training.evaluated.test
    return leave_one_group_out(PRIMARY_METRIC[target.task], target, devices, people, test, fit, draws)


def _with_thresholds(
    details: TrainingDetails, training: Training, target: Target, columns: dict[str, np.ndarray], draws: Draws
) -> TrainingDetails:
    """Adds the threshold of 0.9 specificity on validation, used on test: for all sites together, and between sites."""
    healthy = target.values["val"] == 0
    if not healthy.any():
        return details
    val, test = training.evaluated.val.scores[:, 1], training.evaluated.test.scores[:, 1]
    people = columns["person_id"][target.indices["test"]].tolist()
    threshold = threshold_at_specificity(~healthy, val, SPECIFICITY)
    scores = threshold_scores(threshold, target.values["test"] == 1, test, draws, people, target.label_hash)
    between_sites = transfer_thresholds(
        target, columns["clinical_site"], columns["person_id"], val, test, draws, SPECIFICITY
    )
    return replace(
        details,
        threshold=ChosenThreshold(SPECIFICITY, threshold, scores.sensitivity.measured(), scores.specificity.measured()),
        between_sites=tuple(between_sites),
    )
