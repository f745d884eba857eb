"""Means over classes: the truth says which, alike for every row and for both sides of a pair."""

from __future__ import annotations

import numpy as np
import pytest

from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.comparisons import paired_difference
from octjepa.metrics.findings import Findings
from octjepa.tasks.segment.evaluation import METRICS, HeadEstimates, ScanFigures, report_classes

PEOPLE = [str(number) for number in range(8)]
COMMON = [8.0, 10.0, 10.0]  # both, said, true of a class: Dice 0.8
NOTHING, FALSE = [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]
FAR_MM = 0.3


def row(*rare: list[float], common: list[float] = COMMON) -> list[ScanFigures]:
    """Eight scans that hold the class `common`; the first ones have these counts of a second class, the others none."""
    counts = [*rare, *[NOTHING] * (len(PEOPLE) - len(rare))]
    empty = np.zeros((2, 9))
    return [
        ScanFigures(
            np.array([common, of]),
            np.array([[FAR_MM, 1, 1], [FAR_MM if of[0] else np.nan, 1, 1]]),
            np.zeros((2, 1, 1), np.float32),
            empty,
            empty,
        )
        for of in counts
    ]


def scored(**rows: list[ScanFigures]) -> HeadEstimates:
    scores = HeadEstimates(PEOPLE, ("common", "rare"), [np.zeros(1, np.uint8)] * len(PEOPLE), Draws(PEOPLE, 400, 0))
    for name, evaluated in rows.items():
        scores.add(name, evaluated)
    return scores


def test_a_false_voxel_of_a_class_that_no_scan_holds_moves_no_mean_and_is_seen() -> None:
    scores = scored(none=row(), false=row(FALSE))
    means = [scores.estimates[name, "dice", "mean"] for name in ("none", "false")]
    assert [mean.value for mean in means] == pytest.approx([0.8, 0.8])
    assert np.allclose(means[0].samples, means[1].samples)
    assert scores.estimates["false", "dice", "rare"].measured().to_json() == {
        "value": 0,
        "low": None,
        "high": None,
        "n": 8,
        "n_people": 0,
    }
    result = Findings()
    report_classes("net", row(FALSE, FALSE), ("common", "rare"), PEOPLE, result)
    assert (result.faults, result.notes) == (
        [],
        ["rare: no test scan holds it, so the means leave it out; net predicts 2 mm3 of it"],
    )


def test_both_sides_of_a_pair_average_the_classes_that_the_resamples_truth_holds() -> None:
    """One says the rare class rightly in its one scan; the other says it nowhere there, and falsely in another."""
    scores = scored(finds=row([5.0, 5.0, 5.0]), misses=row([0.0, 0.0, 5.0], FALSE))
    finds, misses = (scores.estimates[name, "dice", "mean"] for name in ("finds", "misses"))
    drawn = scores.draws.counts[0] > 0
    assert finds.samples == pytest.approx(np.where(drawn, 0.9, 0.8))
    assert misses.samples == pytest.approx(np.where(drawn, 0.4, 0.8))
    pair = paired_difference(finds, misses)
    assert (pair.difference, pair.undefined) == (pytest.approx(0.5), 0)
    assert scores.estimates["misses", "hd95_mm", "common"].value == pytest.approx(FAR_MM)
    assert np.isnan(scores.estimates["misses", "hd95_mm", "mean"].value)  # missing a class shortens no distance
    assert scores.estimates["finds", "hd95_mm", "mean"].value == pytest.approx(FAR_MM)
    scales = {metric: estimate.scale for (_, metric, _), estimate in scores.estimates.items()}
    assert scales == {"dice": "share", **dict.fromkeys(METRICS[1:], "error")}  # so that mm and um read alike


def test_a_class_of_few_people_has_no_interval_and_is_a_fault() -> None:
    some = row([4.0, 5.0, 5.0], [2.0, 5.0, 5.0])
    rare = scored(some=some).estimates["some", "dice", "rare"]
    assert (rare.n_people, rare.interval().low) == (2, None)
    result = Findings()
    report_classes("net", some, ("common", "rare"), PEOPLE, result)
    assert [fault.kind for fault in result.faults] == ["rare_class"]
    assert result.faults[0].what.startswith("rare: 2 of 8 test people have it, fewer than the 6 that an interval")
    alone = Findings()
    report_classes("net", row([4.0, 5.0, 5.0], common=NOTHING), ("other", "rare"), PEOPLE, alone)
    assert alone.faults == []  # no other class is in the mean
    assert any("its results have none" in text for text in alone.notes)
