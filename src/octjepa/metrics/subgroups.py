"""Does a model serve every group alike? A figure per subgroup, and the AUROC scaled by how unequal it is.

ES-AUC = AUC / (1 + sum over groups of |AUC - AUC of the group|): equal to the AUC when every group has it, smaller
otherwise (Luo et al. 2024, FairVision). Groups in which the figure cannot be measured are named, never averaged away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octjepa.metrics.bootstrap import LEAST_PEOPLE, Draws, Estimate
from octjepa.metrics.interval_scales import LOWER_IS_BETTER, OF_METRIC, scale_of
from octjepa.metrics.scores import Figures, Predictions, Weights, measure

_Figure = Callable[[Weights], Figures]


@dataclass(frozen=True)
class BySubgroup:
    """groups: an estimate per group that can be measured. scaled: the equity-scaled figure over these, or None.

    left_out: group -> why it cannot be measured.
    """

    groups: dict[str, Estimate]
    scaled: Estimate | None
    left_out: dict[str, str]


def by_subgroup(
    metric: str, predictions: Predictions, groups: np.ndarray, draws: Draws, person_ids: list[str], label_hash: str
) -> BySubgroup:
    """`metric` within every group of test volumes ("" is a group of its own, "unknown").

    scaled is given where at least two groups are measured: for AUROC this is ES-AUC, for other shares of which more is
    better the same scaling of them. Of others there is none: dividing a negative R2 or kappa, or an error, by how
    unequal it is would make unequal groups look better. It is resampled jointly; a resample in which a group has no
    figure is undefined.
    """
    names = np.array([str(group) or "unknown" for group in groups])
    people = np.array(person_ids)
    found: dict[str, Estimate] = {}
    left_out: dict[str, str] = {}
    parts: list[_Figure] = []
    for name in np.unique(names).tolist():
        inside = names == name
        count = len(set(people[inside].tolist()))
        missing = len(np.unique(predictions.truth)) - len(np.unique(predictions.truth[inside]))
        if count < LEAST_PEOPLE:
            left_out[name] = f"{count} test people, at least {LEAST_PEOPLE} are needed"
            continue
        if missing and predictions.scores.shape[1] > 1:
            left_out[name] = f"{missing} of the classes are missing among its {count} test people"
            continue
        cut = Predictions(predictions.truth[inside], predictions.scores[inside], predictions.calibrated[inside])

        def figure(weights: Weights, cut: Predictions = cut) -> Figures:
            return measure(metric, cut, weights)

        estimate = draws.estimate(
            figure, people[inside].tolist(), f"{label_hash}\x1f{name}", scale=scale_of(metric, cut.scores)
        )
        found[name] = estimate

        def part(weights: Weights, inside: np.ndarray = inside, figure: _Figure = figure) -> Figures:
            return figure(weights[inside])

        parts.append(part)
    scaled = None
    if len(found) > 1 and OF_METRIC[metric] == "share" and metric not in LOWER_IS_BETTER:

        def equity(weights: Weights) -> Figures:
            overall = measure(metric, predictions, weights)
            return overall / (1 + sum(np.abs(overall - part(weights)) for part in parts))

        scaled = draws.estimate(equity, person_ids, label_hash)
    return BySubgroup(found, scaled, left_out)
